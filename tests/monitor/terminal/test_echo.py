"""Tests of printing the output of workers on the master."""

import asyncio

from ddlf import events as e
from ddlf.monitor.terminal.echo import Echo, collapsed, harmless


def wrote(worker, *lines, dropped=0):
    return e.WorkerWrote(worker=worker, name=f"worker {worker}", stream="stdout", lines=lines, dropped=dropped)


def connected(worker):
    facts = dict(address="a:1", host="a", python="3.11", cores=1, threads=1)
    return e.WorkerConnected(worker=worker, name=f"worker {worker}", **facts)


def test_equal_lines_of_several_workers_are_joined_but_repetitions_of_one_worker_stay():
    waiting = [("a", "x"), ("b", "x"), ("a", "x"), ("a", "y"), ("c", "x"), ("b", "z"), ("c", "y")]
    assert collapsed(waiting) == ["[3 workers] x", "[a] x", "[2 workers] y", "[b] z"]


async def test_lines_of_several_workers_are_printed_together_after_a_delay(capsys, monkeypatch):
    monkeypatch.setattr("ddlf.monitor.terminal.echo.WINDOW_S", 0)
    echo = Echo()
    for event in (connected(1), connected(2), wrote(1, "same", "mine"), wrote(2, "same")):
        echo(event)
    assert capsys.readouterr().err == ""
    await asyncio.sleep(0.01)
    assert capsys.readouterr().err == "[2 workers] same\n[worker 1] mine\n"


def test_lines_of_a_single_worker_are_printed_at_once_with_the_number_of_dropped_lines(capsys):
    echo = Echo()
    echo(connected(1))
    echo(wrote(1, "one"))
    echo(wrote(1, "two", dropped=1234))
    echo(wrote(1, dropped=5))
    assert capsys.readouterr().err.splitlines() == [
        "[worker 1] one",
        "[worker 1] (1,234 lines came too fast and were dropped)",
        "[worker 1] two",
        "[worker 1] (5 lines came too fast and were dropped)",
    ]


async def test_delayed_lines_are_printed_when_a_worker_leaves(capsys):
    echo = Echo()
    for event in (connected(1), connected(2), wrote(1, "last words")):
        echo(event)
    echo(e.WorkerDisconnected(worker=1, name="worker 1"))
    assert capsys.readouterr().err == "[worker 1] last words\n"


def test_an_echo_that_is_off_prints_nothing(capsys):
    Echo(on=False)(wrote(1, "one"))
    assert capsys.readouterr().err == ""


def test_a_line_keeps_its_colours_on_a_terminal_but_no_other_control_codes():
    line = "\x1b[1mbold\x1b[0m \x1b]0;title\x07 \x1b[2J tab\t\x9b31m é"
    assert harmless(line, colours=False) == r"bold \x1b]0;title\x07 \x1b[2J tab" + "\t" + r"\x9b31m é"
    assert harmless("\x1b[31mred", colours=True) == "\x1b[31mred\x1b[0m"
    assert harmless("plain", colours=True) == harmless("plain", colours=False) == "plain"
