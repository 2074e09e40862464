"""Tests of the state of a run, which is computed only from its events, without a clock."""

from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf import events as e
from ddlf.events.record import RoundRecord
from ddlf.monitor.state import State
from ddlf.monitor.terminal.live import draw
from ddlf.monitor.terminal.phrases import phase_in_words, waiting
from tests.monitor.terminal.timed_events import (
    BEGAN,
    a_round,
    arrived,
    began,
    connected,
    in_training,
    moved,
    record,
    state_after,
)

COUNTS = st.integers(1, 9)


def possible(kind):
    """Return a strategy for an event or a record with possible numbers."""
    strategies = {int: COUNTS, float: st.floats(0, 9), RoundRecord: st.deferred(lambda: possible(RoundRecord))}
    return st.builds(
        kind, **{name: strategies.get(hint, st.from_type(hint)) for name, hint in get_type_hints(kind).items()}
    )


def test_the_progress_of_a_run_is_the_mean_of_its_slots_and_changes_inside_a_round():
    state = in_training()
    assert state.done == pytest.approx(2.5 / 6)
    state.tell(moved(1, 750, round=3), 21.0)
    assert state.done == pytest.approx((2.75 + 2.5) / 2 / 6)
    assert (state.rounds, state.round, state.is_training) == (6, 3, True)


def test_the_remaining_time_ignores_the_first_round_which_compiles():
    slow = (10.0, began(2)), *a_round(1, begin=10.0, seconds=40.0)
    state = state_after((0.0, BEGAN), *slow, *a_round(2, begin=50.0), *a_round(3, begin=54.0))
    assert state.left_s(58.0) == pytest.approx(3 * 4.0)
    assert state_after((0.0, BEGAN), (10.0, began(2))).left_s(11.0) is None


def test_a_resumed_run_begins_with_its_former_progress():
    resumed = state_after((0.0, BEGAN), (1.0, began(2, version=3, source="folder")))
    assert (resumed.done, resumed.rounds) == (0.5, 6)
    longer = state_after((0.0, BEGAN), (1.0, began(2, version=6)))  # a longer run adds its rounds
    assert (longer.done, longer.rounds) == (0.5, 12)


def test_the_progress_of_asynchronous_training_is_the_mean_of_its_slots():
    commits = [e.Committed(record=record(n, slot=1, version=n)) for n in (1, 2, 3)]
    state = state_after((0.0, BEGAN), (0.0, began(2, mode="async")), *((1.0, commit) for commit in commits))
    assert state.done == pytest.approx(3 / 12)


def test_a_lane_has_rate_loss_and_time_of_its_last_event():
    state = in_training()
    lane = state.lanes[1]
    assert (lane.slot, lane.round, lane.epoch, lane.done, lane.total, lane.loss) == (1, 3, 5, 500, 1000, 0.5)
    assert lane.heard == 20.0
    assert lane.rate == pytest.approx(250)  # 500 samples in 2 s
    state.tell(arrived(1, round=3, samples=500, epochs=2, compute_s=2.0), 22.0)
    assert state.lanes[1].rate == 500


def test_the_rate_of_a_run_comes_from_its_last_round_or_at_first_from_its_workers():
    assert in_training(rounds=1).rate == 1000 * 2 / 4.0
    state = in_training(rounds=0)
    assert state.rate == pytest.approx(2 * 250)
    state.tell(e.WorkerLost(round=1, worker=2, slot=2, why=""), 13.0)
    assert state.rate == pytest.approx(250)


def test_a_lost_worker_returns_or_is_gone():
    state = in_training()
    state.tell(e.WorkerLost(round=3, worker=2, slot=2, why="worker 2: cut"), 21.0)
    assert (state.lanes[2].is_there, state.lanes[2].reason, state.lanes[2].slot) == (False, "worker 2: cut", 0)
    state.tell(e.WaitingForWorkers(round=3, seconds=60), 21.0)
    assert state.waiting_until == 81.0
    state.tell(e.WorkerReturned(round=3, worker=2, name="worker 2 (pc:1)"), 25.0)
    assert (state.lanes[2].is_there, state.lanes[2].name, state.waiting_until) == (True, "worker 2", None)
    state.tell(e.WorkerGone(round=3, worker=2, rejected=3), 26.0)
    assert state.lanes[2].is_gone
    assert state.lanes[2].reason == "3 updates in a row were rejected"


def test_a_restarted_slot_loses_progress_but_not_because_of_a_second_worker():
    state = in_training()
    state.tell(e.SlotBackedUp(round=3, slot=1, worker=2), 21.0)
    state.tell(e.SlotStarted(round=3, slot=1, worker=2), 21.0)
    assert state.done == pytest.approx(2.5 / 6)
    state.tell(e.WorkerLost(round=3, worker=1, slot=1, why=""), 21.0)
    state.tell(e.SlotStarted(round=3, slot=1, worker=2), 21.0)
    assert state.done == pytest.approx((2.0 + 2.5) / 2 / 6)


def test_a_worker_that_is_late_with_a_finished_round_changes_no_progress():
    state = in_training()
    state.tell(e.SlotBackedUp(round=3, slot=1, worker=2), 21.0)
    state.tell(e.SlotStarted(round=3, slot=1, worker=2), 21.0)
    state.tell(e.SlotFinished(round=3, slot=1, worker=2), 22.0)
    done = state.done
    late = e.SlotMoved(round=3, slot=1, worker=1, done=800, total=1000, epoch=1, loss=None)
    state.tell(late, 23.0)
    assert state.done == done
    state.tell(e.SlotStarted(round=4, slot=1, worker=2), 23.0)
    state.tell(late, 24.0)
    assert state.done == done


def test_a_worker_is_lost_when_the_cluster_reports_it_before_the_run():
    state = state_after((0.0, connected(1)), (1.0, e.WorkerDisconnected(worker=1, name="pc01", why="no answer")))
    assert (state.lanes[1].is_there, state.lanes[1].name) == (False, "pc01")
    state.tell(connected(1, again=True), 2.0)
    assert state.lanes[1].is_there
    state.tell(e.WorkerDisconnected(worker=1, name="pc01"), 3.0)  # this side has disconnected it
    assert state.lanes[1].is_there


def test_phases_overlap_and_end():
    load = dict(phase=7, what="loading", worker=1)
    state = state_after(
        (0.0, e.PhaseBegan(**load, total=100, unit="samples")), (1.0, e.PhaseBegan(phase=8, what="building"))
    )
    state.tell(e.PhaseMoved(**load, done=40), 2.0)
    assert [(phase.activity, phase.worker, phase.done, phase.since) for phase in state.phases.values()] == [
        ("loading", 1, 40, 0.0),
        ("building", 0, 0, 1.0),
    ]
    state.tell(e.PhaseEnded(**load, seconds=3.0), 3.0)
    state.tell(e.PhaseMoved(**load, done=50), 3.0)
    assert list(state.phases) == [8]


def test_a_second_run_restarts_with_the_same_workers():
    state = in_training()
    state.tell(e.RunEnded(run="r", how="failed", version=2, why="no"), 30.0)
    assert (state.is_training, state.how, state.reason, state.lanes[1].slot) == (False, "failed", "no", 0)
    state.tell(BEGAN, 31.0)
    assert (state.done, state.how, state.metrics, state.round, len(state.lanes)) == (0.0, "", {}, 0, 2)


@given(st.lists(st.one_of(*map(possible, e.KINDS.values())), max_size=12))
def test_any_order_of_events_is_accepted(events):
    state = State()
    for now, event in enumerate(events):
        state.tell(event, float(now))
        assert 0.0 <= state.done <= 1.0
        state.left_s(now + 0.5)


def test_a_map_is_shown_like_a_phase():
    of = {"map": 1, "function": "square"}
    state = State()
    state.tell(e.MapBegan(**of, items=1000, workers=2, per_worker=1), 1.0)
    state.tell(e.MapMoved(**of, done=118, failed=2), 2.0)
    assert [phase_in_words(phase) for phase in state.phases.values()] == ["mapping square, 120 of 1,000 items"]
    assert waiting(state, 6.0) == "master mapping square, 120 of 1,000 items for 5 s"
    state.tell(e.MapEnded(**of, how="complete", done=998, failed=2, seconds=3.0, compute_s=5.0), 4.0)
    assert not state.phases
    state.tell(e.MapBegan(**of, items=None, workers=2, per_worker=1), 1.0)
    state.tell(e.MapMoved(**of, done=118, failed=0), 2.0)
    assert [phase_in_words(phase) for phase in state.phases.values()] == ["mapping square"]
    assert "mapping square" in draw(state, 6.0, 80, 24).plain
