"""What workers write, as the master prints it."""

import asyncio

from ddlf import events as e
from ddlf.monitor.terminal.echo import Echo, collapsed, harmless


def wrote(worker, *lines, dropped=0):
    return e.WorkerWrote(worker=worker, name=f"worker {worker}", stream="stdout", lines=lines, dropped=dropped)


def connected(worker):
    facts = dict(address="a:1", host="a", python="3.11", cores=1, threads=1)
    return e.WorkerConnected(worker=worker, name=f"worker {worker}", **facts)


def test_equal_lines_of_several_workers_come_once_and_those_of_one_as_often_as_it_wrote_them():
    held = [("a", "x"), ("b", "x"), ("a", "x"), ("a", "y"), ("c", "x"), ("b", "z"), ("c", "y")]
    assert collapsed(held) == ["[3 workers] x", "[a] x", "[2 workers] y", "[b] z"]


async def test_lines_of_several_workers_are_printed_together_when_the_others_have_had_their_time(capsys, monkeypatch):
    monkeypatch.setattr("ddlf.monitor.terminal.echo.WINDOW_S", 0)
    echo = Echo()
    for event in (connected(1), connected(2), wrote(1, "same", "mine"), wrote(2, "same")):
        echo(event)
    assert capsys.readouterr().err == ""
    await asyncio.sleep(0.01)
    assert capsys.readouterr().err == "[2 workers] same\n[worker 1] mine\n"


def test_lines_of_the_only_worker_are_printed_at_once_with_how_many_are_missing(capsys):
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


async def test_what_is_held_back_is_printed_when_a_worker_leaves(capsys):
    echo = Echo()
    for event in (connected(1), connected(2), wrote(1, "last words")):
        echo(event)
    echo(e.WorkerDisconnected(worker=1, name="worker 1"))
    assert capsys.readouterr().err == "[worker 1] last words\n"


def test_an_echo_that_is_off_prints_nothing(capsys):
    Echo(on=False)(wrote(1, "one"))
    assert capsys.readouterr().err == ""


def test_a_line_of_another_machine_keeps_its_colours_on_a_terminal_and_cannot_do_anything_to_it():
    line = "\x1b[1mbold\x1b[0m \x1b]0;title\x07 \x1b[2J tab\t\x9b31m é"
    assert harmless(line, colours=False) == r"bold \x1b]0;title\x07 \x1b[2J tab" + "\t" + r"\x9b31m é"
    assert harmless("\x1b[31mred", colours=True) == "\x1b[31mred\x1b[0m"
    assert harmless("plain", colours=True) == harmless("plain", colours=False) == "plain"
