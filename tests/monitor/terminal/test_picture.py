"""Tests of the text of the live picture: its content, and that it fits the terminal."""

import pytest

from ddlf import events as e
from ddlf.monitor.terminal.live import draw
from ddlf.monitor.terminal.phrases import duration, number, waiting
from tests.monitor.terminal.timed_events import BEGAN, connected, in_training, state_after


def rows(state, now=20.0, width=80, height=24, **more):
    return draw(state, now, width, height, **more).plain.split("\n")


def test_the_picture_shows_a_run_of_two_workers():
    assert rows(in_training(), 24.0, 78) == [
        "training  ━━━━━━━━━━━━━━━╸──────────────────────  42 %  round 3/6  0:24 left",
        "          loss 0.5000  accuracy 0.9000  500 samples/s",
        "worker 1  ━━━━━━━━━━──────────  epoch 5      250/s  loss 0.5000  4 s ago",
        "worker 2  ━━━━━━━━━━──────────  epoch 5      250/s  loss 0.5000  4 s ago",
    ]


def test_the_picture_shows_the_phases_of_master_and_workers_before_training():
    state = state_after(
        (0.0, BEGAN),
        (0.5, connected(1)),
        (1.0, e.PhaseBegan(phase=1, what="importing")),
        (1.0, e.PhaseBegan(phase=2, what="loading", worker=1, total=200, unit="samples")),
        (2.0, e.PhaseMoved(phase=2, what="loading", worker=1, done=100)),
    )
    assert rows(state, 8.0) == [
        "master    importing the backend  7 s",
        "worker 1  loading the data  ━━━━━─────  7 s",
    ]
    assert waiting(state, 8.0) == (
        "master importing the backend for 7 s; worker 1 loading the data, 100 of 200 samples for 7 s"
    )


@pytest.mark.parametrize(("width", "height"), [(80, 24), (132, 50), (60, 12), (40, 10), (20, 4), (1, 1)])
@pytest.mark.parametrize("workers", [1, 2, 16, 300])
def test_the_picture_fits_every_terminal(width, height, workers):
    state = in_training(workers)
    state.tell(e.WorkerLost(round=3, worker=1, slot=1, why="worker 1: " + "no answer " * 20), 21.0)
    state.tell(e.PhaseBegan(phase=5, what="evaluating", total=10, unit="samples"), 21.0)
    state.tell(e.WaitingForWorkers(round=3, seconds=60), 21.0)
    drawn = rows(state, 22.0, width, height)
    assert max(map(len, drawn)) <= max(width - 2, 20)
    assert len(drawn) <= max(height // 2, 7)


def test_workers_with_problems_are_shown_and_the_rest_of_sixteen_is_counted():
    state = in_training(16)
    state.tell(
        e.WorkerLost(round=3, worker=14, slot=14, why="worker 14 (10.0.0.14:9000): the connection was reset"), 21.0
    )
    drawn = rows(state, 24.0)
    assert drawn[-1] == "+ 7 more   1,750/s"
    assert "worker 14  lost 3 s ago: the connection was reset" in drawn
    assert [row[:10].rstrip() for row in drawn[2:-2]] == [f"worker {n}" for n in range(1, 9)]


def test_an_excluded_worker_has_a_reason_and_an_idle_worker_is_marked():
    state = in_training()
    state.tell(e.WorkerGone(round=3, worker=1, why="KeyError: x\n\nTraceback"), 21.0)
    state.tell(e.SlotFinished(round=3, slot=2, worker=2), 22.0)
    assert rows(state, 22.5)[2:] == [
        "worker 1  excluded: KeyError: x",
        "worker 2  idle  0 s",
    ]


def test_a_terminal_without_unicode_gets_ascii():
    assert "\n".join(rows(in_training(), ascii_only=True)).isascii()


def test_numbers_are_formatted_for_people():
    assert [duration(seconds) for seconds in (0, 0.2, 61, 3600, 36061)] == [
        "0:00",
        "0:01",
        "1:01",
        "1:00:00",
        "10:01:01",
    ]
    assert [number(value) for value in (0.0, 0.31, 123.4, 1e-5, 1e9)] == [
        "0.0000",
        "0.3100",
        "123.4000",
        "1.00e-05",
        "1.00e+09",
    ]


def test_one_line_names_the_workers_that_a_run_waits_for():
    state = in_training()
    assert waiting(state, 21.0) == "round 3/6, 42% done, 0:17 left"
    assert waiting(state, 27.0) == "round 3/6, 42% done, 0:31 left; worker 1 and worker 2 silent for 7 s"
    state.tell(e.WorkerLost(round=3, worker=2, slot=2, why="cut"), 22.0)
    state.tell(e.WaitingForWorkers(round=3, seconds=60), 22.0)
    assert waiting(state, 30.0).endswith("no workers left; the run ends in 52 s; worker 1 silent for 10 s")


def test_an_unreachable_worker_is_shown_with_its_address_and_the_reason():
    state = in_training()
    state.tell(e.WorkerLost(round=3, worker=2, slot=2, why="worker 2 (10.0.0.2:9000): cut"), 22.0)
    refused = "10.0.0.2:9000: connection refused, nothing listens there"
    for tries in (1, 2, 3):
        state.tell(e.WorkerNotReached(worker=2, name="worker 2", tries=tries, why=refused), 22.0 + tries)
    message = f"worker 2 not reached: {refused} (3 tries)"
    assert f"; worker 2 lost; {message}" in waiting(state, 26.0)
    assert rows(state, 26.0, 100)[3] == f"worker 2  lost 4 s ago: {refused} (3 tries)"
    state.tell(e.WaitingForWorkers(round=3, seconds=60), 26.0)
    assert f"no workers left; the run ends in 59 s; {message}" in waiting(state, 27.0)
    state.tell(connected(2, again=True), 28.0)
    assert "not reached" not in waiting(state, 28.0)


def test_a_connecting_worker_is_shown_with_its_address_unless_there_are_several():
    state = state_after(
        (0.0, e.PhaseBegan(phase=1, what="connecting", worker=1, name="worker 1", address="10.0.0.1:9000"))
    )
    assert waiting(state, 6.0) == "worker 1 connecting to 10.0.0.1:9000 for 6 s"
    state.tell(e.PhaseBegan(phase=2, what="connecting", worker=2, name="pc02", address="10.0.0.2:9000"), 0.0)
    assert waiting(state, 6.0) == "worker 1 and pc02 connecting for 6 s"
    assert rows(state, 6.0) == [
        "worker 1  connecting to 10.0.0.1:9000  6 s",
        "pc02      connecting to 10.0.0.2:9000  6 s",
    ]


def test_several_workers_are_listed_and_many_are_counted():
    def line_of(*workers):
        return waiting(
            state_after(*((0.0, e.PhaseBegan(phase=n + 1, what="importing", worker=n)) for n in workers)), 6.0
        )

    assert line_of(0) == "master importing the backend for 6 s"
    assert line_of(1, 2) == "worker 1 and worker 2 importing the backend for 6 s"
    assert line_of(0, 1, 2, 3) == "master, worker 1, worker 2 and worker 3 importing the backend for 6 s"
    assert line_of(0, 1, 2, 3, 4) == "master and 4 workers importing the backend for 6 s"


def test_a_narrow_terminal_shows_the_remaining_time_instead_of_a_bar():
    assert rows(in_training(), 24.0, 40)[0] == "training   42 %  round 3/6  0:24 left"
    assert rows(in_training(), 24.0, 48)[0].startswith("training  ━━")
