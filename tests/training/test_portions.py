"""Tests of the portions of a pass: each portion counts once, and free workers help late workers."""

import numpy as np
import pytest

from ddlf.training.slot.task import MetricCounts
from ddlf.training.strategies.lbfgs.portions import LATE, Computed, Pool, portions_of


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self):
        return self.now


def pool_of(samples=24, slots=3, size=2):
    clock = Clock()
    return Pool(portions_of(samples, slots, size), clock), clock


@pytest.mark.parametrize(("samples", "slots", "size"), [(24, 3, 2), (203, 3, 13), (5, 5, 1), (7, 2, 100), (100, 7, 3)])
def test_portions_have_each_sample_once(samples, slots, size):
    portions = portions_of(samples, slots, size)
    assert [portion.number for portion in portions] == list(range(len(portions)))
    counts = np.zeros(samples, int)
    for portion in portions:
        assert 0 < portion.samples <= size
        counts[portion.begin : portion.end] += 1
    assert (counts == 1).all()


def one_of(pool, slot):
    """Take one portion."""
    (portion,) = pool.take(slot)
    return portion


def test_a_slot_takes_its_own_portions_and_then_neighbours_of_the_slot_with_the_most_left():
    pool, _ = pool_of()
    assert [portion.number for portion in pool.take(0)] == [0, 1], "many wait"
    assert [one_of(pool, slot).number for slot in (0, 0, 1)] == [2, 3, 4]
    assert [one_of(pool, 0).number for _ in range(7)] == [11, 10, 9, 8, 7, 6, 5]
    assert pool.take(0) == []


def test_a_free_slot_takes_an_unbegun_portion_at_once_and_a_late_one_after_a_while():
    pool, clock = pool_of(samples=4, slots=2, size=1)
    of_slot_0, of_slot_1 = [one_of(pool, 0), one_of(pool, 0)], [one_of(pool, 1), one_of(pool, 1)]
    assert not pool.waits
    clock.now = 10.0
    for portion in of_slot_0:
        assert pool.done([portion], 0, [portion.number]) == [True]
        clock.now += 10
    queued, _ = pool.second(0)
    assert queued == [of_slot_1[1]], "the other slot computes its first portion"
    assert pool.done(queued, 0, [2]) == [True]
    assert pool.done([of_slot_1[1]], 1, [2]) == [False], "a portion counts once"
    late, wait_s = pool.second(0)
    assert late == []
    assert wait_s == pytest.approx(pool._since[1] + LATE * np.median(pool._took) - clock.now)
    clock.now += wait_s
    assert pool.second(0)[0] == [of_slot_1[0]]
    assert pool.second(0) == ([], None), "two slots already compute it"


def test_two_portions_together_are_late_after_twice_the_time():
    pool, clock = pool_of(samples=8, slots=2, size=1)
    of_slot_1 = pool.take(1)
    assert len(of_slot_1) == 2
    for _ in range(6):
        assert pool.done(pool.take(0), 0, [0]) == [True]
    assert not pool.waits
    assert pool.second(0)[0] == [of_slot_1[1]], "the other slot may not have begun it"
    pool._took = [10.0]
    assert pool.second(0) == ([], 2 * LATE * 10)
    clock.now = 2 * LATE * 10
    assert pool.second(0)[0] == [of_slot_1[0]]


def test_lost_portions_are_computed_again_unless_they_were_pushed():
    pool, _ = pool_of(samples=6, slots=2, size=1)
    first, second, third = (one_of(pool, 0) for _ in range(3))
    pool.done([first], 0, ["a"])
    pool.pushed(0, [first.number])
    pool.done([second], 0, ["b"])
    pool.give_back(0)
    assert pool.results == {first.number: "a"}
    assert [one_of(pool, 0), one_of(pool, 0)] == [second, third]
    assert not pool.is_over


def test_a_lost_portion_does_not_wait_if_another_slot_computes_it():
    pool, _ = pool_of(samples=2, slots=2, size=1)
    first, second = one_of(pool, 0), one_of(pool, 1)
    pool.done([first], 0, [0])
    pool._since[1] = -100.0
    assert pool.second(0)[0] == [second]
    pool.give_back(1)
    assert not pool.waits
    assert pool.done([second], 0, [1]) == [True]


@pytest.mark.parametrize("seed", range(20))
def test_each_portion_counts_and_is_pushed_once_in_random_runs(seed):
    chance = np.random.default_rng(seed)
    pool, clock = pool_of(samples=60, slots=3, size=2)
    at = {slot: [] for slot in range(3)}
    counted = {slot: [] for slot in range(3)}
    pushed = []
    while not pool.is_over:
        clock.now += chance.random()
        slot = int(chance.integers(3))
        action = chance.choice(
            ["take", "take", "done", "done", "done", "push", "lose"], p=[0.2, 0.2, 0.2, 0.2, 0.1, 0.08, 0.02]
        )
        if action == "take" and len(at[slot]) < 2:
            portions = pool.take(slot) or (pool.second(slot)[0] if not at[slot] else [])
            at[slot] += [portions] if portions else []
        elif action == "done" and at[slot]:
            numbers = [portion.number for portion in at[slot][0]]
            counts = pool.done(at[slot].pop(0), slot, numbers)
            counted[slot] += [number for number, is_first in zip(numbers, counts, strict=True) if is_first]
        elif action == "push" and counted[slot]:
            pushed += counted[slot]
            pool.pushed(slot, counted[slot])
            counted[slot] = []
        elif action == "lose":
            pool.give_back(slot)
            at[slot], counted[slot] = [], []
    assert sorted(pushed) == [portion.number for portion in pool.portions]
    assert sorted(pool.results) == sorted(pushed)


@pytest.mark.parametrize(
    ("names", "state"),
    [
        (["loss", "accuracy"], [np.float32(1.5), np.float32(2.0), np.float32(0.1)]),
        (["loss", None], [np.float32(1.5), np.zeros(3, "f4")]),
        (["loss"], [np.float32(1.5), np.float64(0.1)]),
        ([], []),
    ],
)
def test_report_of_a_portion_equals_the_one_read_from_its_message(names, state):
    metrics = {"loss": 0.1, "accuracy": 0.5}
    state = [np.asarray(value) for value in state]
    for moved in ("", "norm/mean"):
        report = Computed(metrics, MetricCounts(names, state), 2.0, 0.25, moved)
        copy = Computed.of_message(report.to_message())
        assert (copy.metrics, copy.peak, copy.seconds, copy.moved) == (metrics, 2.0, 0.25, moved)
        assert copy.counted.names == names
        assert [(a.dtype, a.shape, a.tobytes()) for a in copy.counted.state] == [
            (a.dtype, a.shape, a.tobytes()) for a in state
        ]
