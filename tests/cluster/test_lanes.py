"""Which worker has room for another call: by what it has to do, and how long the way is."""

import pytest

from ddlf.cluster.lanes import MOST, Habit, Lane


def lane(*seconds, way_s=0.0):
    made = Lane("worker", way_s=way_s)
    for each in seconds:
        made.add_turn(object(), each)
    return made


def test_an_idle_worker_has_a_turn_whatever_is_known_of_the_call():
    assert lane().has_turn(alone=False)
    assert lane().has_turn(alone=True)


def test_nothing_is_sent_behind_a_call_of_unknown_length_or_a_long_one():
    assert not lane(None).has_turn(alone=False)
    assert not lane(10.0).has_turn(alone=False)
    assert not lane(10.0, 0.001).has_turn(alone=False)


def test_short_calls_are_sent_ahead_for_as_long_as_the_master_may_be_busy():
    assert lane(*[0.001] * 20).has_turn(alone=False)
    assert not lane(*[0.001] * 22).has_turn(alone=False)
    assert lane(0.025).has_turn(alone=False)
    assert not lane(0.025, 0.025).has_turn(alone=False)


def test_a_long_way_has_more_calls_sent_ahead():
    assert not lane(0.1, 0.1).has_turn(alone=False)
    assert lane(0.1, 0.1, way_s=0.1).has_turn(alone=False)


def test_what_may_take_so_long_only_is_sent_to_an_idle_worker():
    assert not lane(0.001).has_turn(alone=True)


def test_there_is_an_end_to_what_is_sent_ahead():
    assert not lane(*[0.0] * (MOST + 1)).has_turn(alone=False)


def test_the_load_is_what_nothing_is_known_of_then_seconds_then_calls():
    assert lane(0.1, 0.2).load == (0, pytest.approx(0.3), 2)
    assert lane(None, 0.1).load == (1, 0.1, 2)
    assert min([lane(5.0), lane(None), lane(), lane(0.1)], key=lambda one: one.load).turns == {}


def test_what_has_ended_is_no_load():
    one = lane(0.1)
    one.add_turn("unknown", None)
    one.beside.add("beside")
    for call in [*one.turns, "beside", "unknown"]:
        one.end(call)
    assert one.load == (0, 0.0, 0)
    assert one.is_first("whoever comes next")


def test_the_first_calls_are_averaged_and_later_ones_forget_slowly():
    habit = Habit()
    assert habit.seconds is None
    habit.took(1.0)
    habit.took(3.0)
    assert habit.seconds == pytest.approx(2.0)
    for _ in range(200):
        habit.took(0.5)
    assert habit.seconds == pytest.approx(0.5, abs=0.01)
