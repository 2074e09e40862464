"""Tests of printed lines about a run: few enough for a file, and one at least after a long wait."""

import threading

import pytest

from ddlf import events as e
from ddlf.monitor.terminal import lines as module
from ddlf.monitor.terminal.lines import Lines, line
from tests.monitor.terminal.timed_events import record
from tests.patience import PATIENCE_S

IMPORTING = e.PhaseBegan(phase=1, what="importing", worker=2)


class Clock:
    """A clock that replaces the module ``time``."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("ddlf.monitor.terminal.display.time", clock)
    return clock


@pytest.fixture
def lines(clock):
    lines = Lines()
    lines._done.set()  # ends the thread of the object, because the tests call ``look``
    yield lines
    lines.close()


def test_short_rounds_have_a_line_every_two_seconds_and_the_last_round_always_has_one(lines, clock, capsys):
    due = []
    for number in range(1, 21):
        if lines.is_due(record(number)):
            due.append(number)
        clock.now += 0.5
    assert due == [1, 5, 9, 13, 17]
    lines.tell(e.RunEnded(run="r", how="complete", version=20))
    assert capsys.readouterr().out == f"{record(20)}\n"


def test_a_last_round_with_a_line_has_no_second_one(lines, capsys):
    assert lines.is_due(record(1))
    lines.tell(e.RunEnded(run="r", how="complete", version=1))
    assert capsys.readouterr().out == ""


def test_each_slot_of_asynchronous_training_has_its_own_lines(lines):
    assert [lines.is_due(record(1, slot=slot)) for slot in (1, 2, 1)] == [True, True, False]


def test_a_long_wait_is_reported_after_5_s_and_then_less_and_less_often(lines, clock, capsys):
    lines.tell(IMPORTING)
    seconds = []
    for _ in range(80):
        clock.now += 0.5
        lines.look(clock.now)
        if capsys.readouterr().out:
            seconds.append(clock.now - 100)
    assert seconds == [5.0, 15.0, 35.0]


def test_the_line_names_the_awaited_worker_and_any_other_line_restarts_the_wait(lines, clock, capsys):
    lines.tell(IMPORTING)
    clock.now += 4
    lines.tell(e.ModelSaved(path="x"))  # the app prints a line for this event
    clock.now += 4
    lines.look(clock.now)
    assert capsys.readouterr().out == ""
    clock.now += 1
    lines.look(clock.now)
    assert capsys.readouterr().out == "waiting   worker 2 importing the backend for 9 s\n"


def test_no_line_is_printed_without_a_wait(lines, clock, capsys):
    clock.now += 1000
    lines.look(clock.now)
    assert capsys.readouterr().out == ""


def test_the_thread_ends_quietly_after_a_broken_pipe(monkeypatch, capsys):
    looked = threading.Event()

    def look(self, now):
        looked.set()
        raise BrokenPipeError

    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(Lines, "look", look)
    lines = Lines()
    assert looked.wait(PATIENCE_S)
    lines.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("version", "unit", "text"), [(5, "rounds", "5 rounds"), (1, "rounds", "1 round"), (7, "updates", "7 updates")]
)
def test_end_before_the_last_epoch_counts_rounds_or_updates(version, unit, text):
    ended = e.Converged(version=version, epochs=12, why="the budget is spent", unit=unit)
    assert line(ended) == f"ended     after {text}, before all 12 epochs: the budget is spent"
