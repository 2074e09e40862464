"""Tests that the first signal ends the work cleanly, even while a line is printed."""

import signal

import pytest

from ddlf.peers.signals import Stop


@pytest.mark.parametrize("is_printing", [False, True])
def test_a_signal_asks_the_work_to_end_and_prints_a_message(is_printing, capfd):
    requests = []

    def say(line):
        if is_printing:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")
        print(line, flush=True)

    stop = Stop("the peer says goodbye", say)
    stop.gently = lambda: requests.append(True)
    with stop.on_signals():
        signal.raise_signal(signal.SIGINT)
    assert requests == [True]
    assert stop.exit_code == 130
    assert "stopping  the peer says goodbye; again ends at once" in capfd.readouterr().out
