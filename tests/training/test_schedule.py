"""Tests of the schedule: which worker gets which slot and when, in simulated time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlf.training.crew.schedule import (
    FIRST_SLOT_S,
    Ended,
    Finished,
    GiveUp,
    Leaving,
    LeftOut,
    Lost,
    Ready,
    RoundBegan,
    Schedule,
    Start,
    Stop,
    Wanted,
)


def schedule_of(*workers, slots=(), **options):
    schedule = Schedule(**options)
    for worker in workers:
        schedule.apply(Ready(worker))
    for slot in slots:
        schedule.apply(Wanted(slot))
    return schedule


def test_each_wanted_slot_goes_to_a_different_worker():
    assert schedule_of(1, 2, slots=[0, 1]).plan(0) == [Start(0, 1), Start(1, 2)]


def test_more_slots_than_workers_are_carried_one_after_another():
    schedule = schedule_of(1, slots=[0, 1])
    assert schedule.plan(0) == [Start(0, 1)]
    assert schedule.plan(0) == []
    assert schedule.apply(Finished(1, 1))
    assert schedule.plan(1) == [Start(1, 1)]


def test_a_slot_returns_to_the_worker_that_carried_it_last():
    schedule = schedule_of(1, 2, slots=[0, 1])
    schedule.plan(0)
    schedule.apply(Finished(2, 1))
    schedule.apply(Finished(1, 2))
    for slot in (0, 1):
        schedule.apply(Wanted(slot))
    assert set(schedule.plan(2)) == {Start(0, 1), Start(1, 2)}


def test_the_slot_of_a_lost_worker_goes_to_the_next_free_one():
    schedule = schedule_of(1, 2, slots=[0, 1])
    schedule.plan(0)
    schedule.apply(Lost(2))
    assert schedule.plan(0) == []
    schedule.apply(Finished(1, 1))
    assert schedule.plan(1) == [Start(1, 1)]


def test_a_returning_worker_takes_a_waiting_slot():
    schedule = schedule_of(1, slots=[0])
    schedule.plan(0)
    schedule.apply(Lost(1))
    assert not schedule.workers
    schedule.apply(Ready(1))
    assert schedule.plan(5) == [Start(0, 1)]


def test_a_slot_avoids_a_worker_as_long_as_another_one_exists():
    schedule = schedule_of(1, 2)
    schedule.apply(Wanted(0, frozenset({1})))
    assert schedule.plan(0) == [Start(0, 2)]
    schedule.apply(Wanted(1, frozenset({2})))
    assert schedule.plan(0) == [Start(1, 1)]
    schedule.apply(Finished(1, 1))
    schedule.apply(Wanted(2, frozenset({1})))
    assert schedule.plan(1) == [], "worker 2 will be free"
    schedule.apply(Finished(2, 1))
    assert schedule.plan(1) == [Start(2, 2)]
    schedule.apply(Lost(2))
    assert schedule.plan(1) == [Start(2, 1)]


def test_a_slot_that_ended_three_executors_is_given_up():
    schedule = schedule_of(1, slots=[0])
    for _ in range(3):
        assert schedule.plan(0) == [Start(0, 1)]
        schedule.apply(Lost(1, crashed=True))
        schedule.apply(Ready(1))
    assert schedule.plan(0) == [GiveUp(0)]
    assert schedule.open == set()


def test_a_slot_that_progresses_each_time_is_not_given_up():
    schedule = schedule_of(1, slots=[0])
    for _ in range(10):
        assert schedule.plan(0) == [Start(0, 1)]
        schedule.apply(Lost(1, crashed=True))
        schedule.progressed(0)
        schedule.apply(Ready(1))


def test_a_worker_lost_by_the_network_does_not_count_against_its_slot():
    schedule = schedule_of(1, slots=[0])
    for _ in range(10):
        assert schedule.plan(0) == [Start(0, 1)]
        schedule.apply(Lost(1))
        schedule.apply(Ready(1))
    assert schedule.plan(0) == [Start(0, 1)]


def test_straggler_gets_a_backup_and_the_slower_copy_is_stopped():
    schedule = schedule_after_a_round(2)
    schedule.apply(Finished(1, 102))
    assert schedule.plan(102) == []
    assert schedule.wake_at() == 106
    assert schedule.plan(105.9) == []
    assert schedule.plan(106) == [Start(1, 1, backup=True)]
    assert schedule.plan(160) == []
    assert schedule.apply(Finished(1, 161))
    assert schedule.plan(161) == [Stop(2)]
    assert schedule.wake_at() is None
    schedule.apply(Wanted(1))
    assert schedule.plan(161) == [Start(1, 1)]
    assert not schedule.apply(Finished(2, 162)), "the stopped copy's answer belongs to the round before"
    assert schedule.open == {1}


def test_a_new_worker_ends_its_first_slot_although_a_backup_was_faster():
    """It may be compiling the step. A stopped worker would compile it again in each round, and never take part."""
    schedule = schedule_after_a_round(2)
    schedule.apply(Lost(2))
    schedule.apply(Ready(2))
    assert schedule.plan(101) == [Start(1, 2)]
    schedule.apply(Finished(1, 102))
    assert schedule.plan(107) == [Start(1, 1, backup=True)]
    assert schedule.apply(Finished(1, 109))
    assert schedule.plan(109) == []
    schedule.apply(RoundBegan())
    for slot in (0, 1):
        schedule.apply(Wanted(slot))
    assert schedule.plan(110) == [Start(0, 1)]
    assert not schedule.apply(Finished(2, 130)), "its slot belongs to the round before"
    assert schedule.plan(130) == [Start(1, 2)]
    assert schedule.apply(Finished(2, 131))


def test_a_first_slot_that_nobody_needs_is_stopped_in_the_end():
    schedule = schedule_of(1, 2, slots=[0, 1])
    schedule.plan(0)
    schedule.apply(Finished(1, 1))
    assert schedule.plan(5) == [Start(1, 1, backup=True)]
    assert schedule.apply(Finished(1, 7))
    assert schedule.plan(7) == []
    assert schedule.wake_at() == FIRST_SLOT_S
    assert schedule.plan(FIRST_SLOT_S) == [Stop(2)]
    assert schedule.wake_at() is None


def test_an_unneeded_first_slot_of_a_leaving_worker_is_stopped_at_once():
    schedule = schedule_of(1, 2, slots=[0, 1])
    schedule.plan(0)
    schedule.apply(Finished(1, 1))
    schedule.plan(5)
    schedule.apply(Finished(1, 7))
    schedule.apply(Leaving(2, 8, 60))
    assert schedule.plan(8) == [Stop(2)]


def test_a_straggler_is_not_given_to_a_worker_that_it_avoids():
    schedule = schedule_of(1, 2, 3, slots=[0])
    schedule.plan(0)
    schedule.apply(Wanted(1, frozenset({1})))
    assert schedule.plan(0) == [Start(1, 2)]
    schedule.apply(Finished(1, 2))
    assert schedule.plan(7) == [Start(1, 3, backup=True)]
    schedule.apply(Lost(3))
    assert schedule.plan(8) == []
    assert schedule.wake_at() is None


def test_short_slots_are_no_stragglers_and_without_backups_no_slot_is():
    for schedule, until in (
        (schedule_of(1, 2, slots=[0, 1]), 0.9),
        (schedule_of(1, 2, slots=[0, 1], backups=False), 99),
    ):
        schedule.plan(0)
        schedule.apply(Finished(1, 0.01))
        assert schedule.plan(until) == []


def test_durations_of_earlier_rounds_do_not_count():
    schedule = schedule_of(1, 2, slots=[0, 1])
    schedule.plan(0)
    for worker in (1, 2):
        schedule.apply(Finished(worker, 2))
    schedule.apply(RoundBegan())
    schedule.apply(Wanted(0))
    schedule.plan(2)
    assert schedule.wake_at() is None
    assert schedule.plan(100) == []


@pytest.mark.parametrize("event", [Finished(7, 1.0), Ended(7), Lost(7)])
def test_news_of_a_worker_that_carries_nothing_changes_nothing(event):
    schedule = schedule_of(1, slots=[0])
    assert not schedule.apply(event)
    assert schedule.plan(0) == [Start(0, 1)]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["ready", "wanted", "finished", "ended", "lost", "crashed", "pause"]), st.integers(1, 4)),
    max_size=80,
)


@settings(max_examples=3 * settings.default.max_examples)
@given(EVENTS)
def test_each_slot_has_one_result_in_any_order_of_events(events):
    schedule = Schedule()
    now = 0.0
    carried: dict[int, int] = {}  # the slot that the schedule has given to each worker
    stopped: set[int] = set()
    results = dict.fromkeys(range(1, 5), 0)
    requested = dict.fromkeys(results, 0)
    given_up = dict.fromkeys(results, 0)
    for kind, number in events:
        now += 0.1
        match kind:
            case "ready" if number not in carried:
                schedule.apply(Ready(number))
            case "wanted" if number not in schedule.open:
                schedule.apply(Wanted(number))
                requested[number] += 1
            case "finished" if number in carried:
                slot = carried.pop(number)
                results[slot] += schedule.apply(Finished(number, now))
                stopped.discard(number)
            case "ended" if number in stopped:
                schedule.apply(Ended(number))
                carried.pop(number, None)
                stopped.discard(number)
            case "lost" | "crashed":
                schedule.apply(Lost(number, crashed=kind == "crashed"))
                carried.pop(number, None)
                stopped.discard(number)
            case "pause":
                now += 10
        for action in schedule.plan(now):
            match action:
                case Start(slot, worker):
                    assert worker not in carried
                    carried[worker] = slot
                case Stop(worker):
                    assert carried[worker] not in schedule.open or list(carried.values()).count(carried[worker]) > 1
                    stopped.add(worker)
                case GiveUp(slot):
                    given_up[slot] += 1
        for slot in results:
            assert results[slot] + given_up[slot] + (slot in schedule.open) == requested[slot]
        at_work = {slot for worker, slot in carried.items() if worker not in stopped}
        free = schedule.workers - set(carried)
        assert not free or schedule.open <= at_work, "no slot waits while a worker is free"


# --- workers that leave ---------------------------------------------------------------------------------------------------


def schedule_after_a_round(took_s):
    """Two workers have carried a slot each in ``took_s`` seconds, and carry it again since second 100."""
    schedule = schedule_of(1, 2, slots=[0, 1])
    schedule.plan(0)
    for worker in (1, 2):
        schedule.apply(Finished(worker, took_s))
    for slot in (0, 1):
        schedule.apply(Wanted(slot))
    schedule.plan(100)
    return schedule


def test_leaving_worker_finishes_a_slot_that_fits_and_gets_no_other():
    schedule = schedule_after_a_round(3)
    assert not schedule.apply(Leaving(1, 101, 10))
    assert schedule.plan(101) == []
    assert schedule.apply(Finished(1, 103)), "its result counts"
    assert schedule.finished_leaving == {1}
    assert 1 in schedule.workers, "others may still ask it"
    schedule.apply(Wanted(0))
    assert schedule.plan(104) == []
    schedule.apply(Finished(2, 104))
    assert schedule.plan(104) == [Start(0, 2)]


def test_slot_that_does_not_fit_goes_to_another_worker_at_once():
    schedule = schedule_after_a_round(30)
    schedule.apply(Finished(2, 101))
    assert schedule.apply(Leaving(1, 101, 10))
    assert schedule.plan(101) == [Stop(1), Start(0, 2)]
    schedule.apply(Ended(1))
    assert schedule.finished_leaving == {1}
    assert schedule.apply(Finished(2, 130))


def test_slot_of_the_only_worker_stays_with_it_although_it_leaves():
    schedule = schedule_of(1, slots=[0])
    schedule.plan(0)
    assert not schedule.apply(Leaving(1, 1, 0.1, finishes=False))
    assert schedule.plan(1) == []
    assert schedule.apply(Finished(1, 2))


def test_slot_that_never_ends_moves_at_once():
    schedule = schedule_of(1, 2, slots=[0])
    schedule.plan(0)
    assert schedule.apply(Leaving(1, 1, 1000, finishes=False))
    assert schedule.plan(1) == [Stop(1), Start(0, 2)]


def test_leaving_worker_that_comes_back_is_like_any_other():
    schedule = schedule_after_a_round(3)
    schedule.apply(Leaving(1, 101, 10))
    schedule.apply(Lost(1))
    assert schedule.leaving == frozenset()
    schedule.apply(Ready(1))
    assert schedule.plan(102) == [Start(0, 1)]


def test_slot_that_belongs_to_a_worker_is_given_to_no_other():
    homes = {0: 1, 1: 2}
    schedule = Schedule(homes=homes)
    for event in (Ready(1), Ready(2), Ready(3), Wanted(1), Wanted(0, frozenset({1}))):
        schedule.apply(event)
    assert sorted(schedule.plan(0.0), key=lambda action: action.slot) == [Start(0, 1), Start(1, 2)]
    schedule.apply(Finished(1, 1.0))
    assert schedule.wake_at() is None  # no backup for a late slot
    assert schedule.plan(1000.0) == []
    assert not schedule.apply(Leaving(2, 1000.0, 0.0))  # no other worker can take its slot
    schedule.apply(Lost(2))
    assert schedule.plan(1000.0) == []
    assert schedule.homeless == {1}
    homes[1] = 3  # the machine of worker 2 returns as worker 3
    assert schedule.plan(1000.0) == [Start(1, 3)]
    schedule.apply(Lost(3))
    schedule.apply(LeftOut(1))
    assert not schedule.open
    schedule.apply(Ready(3))
    assert schedule.plan(1000.0) == []
    schedule.apply(Wanted(1))
    assert schedule.plan(1000.0) == [Start(1, 3)]
