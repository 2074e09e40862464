"""Tests of choosing a worker for the next call, by its open calls and its latency."""

import pytest

from ddlf.cluster.lanes import MOST, Habit, Lane


def lane(*seconds, way_s=0.0):
    new_lane = Lane("worker", way_s=way_s)
    for duration_s in seconds:
        new_lane.add_turn(object(), duration_s)
    return new_lane


def test_an_idle_worker_takes_any_call():
    assert lane().has_turn(alone=False)
    assert lane().has_turn(alone=True)


def test_no_call_is_sent_behind_a_long_one_or_one_of_unknown_length():
    assert not lane(None).has_turn(alone=False)
    assert not lane(10.0).has_turn(alone=False)
    assert not lane(10.0, 0.001).has_turn(alone=False)


def test_short_calls_are_sent_ahead_for_as_long_as_the_master_may_be_busy():
    assert lane(*[0.001] * 20).has_turn(alone=False)
    assert not lane(*[0.001] * 22).has_turn(alone=False)
    assert lane(0.025).has_turn(alone=False)
    assert not lane(0.025, 0.025).has_turn(alone=False)


def test_more_calls_are_sent_ahead_over_a_slow_connection():
    assert not lane(0.1, 0.1).has_turn(alone=False)
    assert lane(0.1, 0.1, way_s=0.1).has_turn(alone=False)


def test_a_call_with_a_time_limit_is_sent_to_an_idle_worker():
    assert not lane(0.001).has_turn(alone=True)


def test_the_number_of_calls_sent_ahead_is_limited():
    assert not lane(*[0.0] * (MOST + 1)).has_turn(alone=False)


def test_the_load_orders_by_unknown_calls_then_seconds_then_number():
    assert lane(0.1, 0.2).load == (0, pytest.approx(0.3), 2)
    assert lane(None, 0.1).load == (1, 0.1, 2)
    assert min([lane(5.0), lane(None), lane(), lane(0.1)], key=lambda candidate: candidate.load).turns == {}


def test_ended_calls_do_not_count_as_load():
    busy = lane(0.1)
    busy.add_turn("unknown", None)
    busy.beside.add("beside")
    for call in [*busy.turns, "beside", "unknown"]:
        busy.end(call)
    assert busy.load == (0, 0.0, 0)
    assert busy.is_first("whoever comes next")


def test_the_expected_time_is_a_mean_at_first_and_a_moving_average_later():
    habit = Habit()
    assert habit.seconds is None
    habit.took(1.0)
    habit.took(3.0)
    assert habit.seconds == pytest.approx(2.0)
    for _ in range(200):
        habit.took(0.5)
    assert habit.seconds == pytest.approx(0.5, abs=0.01)
