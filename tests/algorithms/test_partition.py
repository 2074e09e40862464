import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ddlf.algorithms.partition import equal_sizes, partition, shuffled, sizes_by_speed, smooth_speed, steps_by_speed
from ddlf.errors import ConfigError

seeds = st.integers(0, 2**63)
rounds = st.integers(0, 100_000)


@given(n=st.integers(1, 3000), seed=seeds, round=rounds)
def test_every_sample_appears_exactly_once_in_a_round(n, seed, round):
    assert np.array_equal(np.sort(shuffled(n, seed, round)), np.arange(n))


@given(n=st.integers(1, 3000), seed=seeds, round=rounds)
def test_the_same_seed_and_round_give_the_same_bits(n, seed, round):
    assert shuffled(n, seed, round).tobytes() == shuffled(n, seed, round).tobytes()


@given(seed=seeds, first=rounds, second=rounds)
def test_different_rounds_have_different_orders(seed, first, second):
    assume(first != second)
    assert not np.array_equal(shuffled(1000, seed, first), shuffled(1000, seed, second))


def test_seed_and_round_are_not_interchangeable():
    assert not np.array_equal(shuffled(1000, 1, 2), shuffled(1000, 2, 1))


def test_another_process_gets_the_same_order():
    code = "from ddlf.algorithms.partition import shuffled; print(shuffled(60_000, 7, 3)[:1000].tolist())"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(shuffled(60_000, 7, 3)[:1000].tolist())


def test_the_order_of_a_stored_run_does_not_change_with_numpy():
    assert shuffled(10, seed=1, round=2).tolist() == [8, 5, 6, 0, 9, 1, 4, 3, 7, 2]


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)],
)
def test_indices_have_the_smallest_type_that_holds_them(n, dtype):
    assert shuffled(n, 0, 0).dtype == dtype
    assert int(shuffled(n, 0, 0).max()) == n - 1


@pytest.mark.parametrize(("n", "seed", "round"), [(0, 0, 0), (-5, 0, 0), (5, -1, 0), (5, 0, -1)])
def test_an_impossible_shuffle_is_refused(n, seed, round):
    with pytest.raises(ConfigError):
        shuffled(n, seed, round)


@given(n=st.integers(1, 3000), data=st.data())
def test_partitions_are_disjoint_and_complete_and_not_copied(n, data):
    k = data.draw(st.integers(1, n))
    indices = shuffled(n, 3, 4)
    parts = partition(indices, equal_sizes(n, k))
    assert len(parts) == k
    assert np.array_equal(np.concatenate(parts), indices)
    assert all(np.shares_memory(part, indices) for part in parts)


@given(n=st.integers(1, 10**9), k=st.integers(1, 1000))
def test_equal_sizes_differ_by_at_most_one(n, k):
    assume(k <= n)
    sizes = equal_sizes(n, k)
    assert sum(sizes) == n
    assert len(sizes) == k
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("sizes", [[5, 4], [5, 6], [], [10, 0], [11, -1]])
def test_sizes_that_do_not_cover_the_samples_are_refused(sizes):
    with pytest.raises(ConfigError):
        partition(shuffled(10, 0, 0), sizes)


def test_more_slots_than_samples_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="60 samples cannot be split over 64 slots") as caught:
        equal_sizes(60, 64)
    assert "60" in caught.value.hint
    with pytest.raises(ConfigError, match="60 samples cannot be split over 64 slots"):
        sizes_by_speed(60, [1.0] * 64)


@pytest.mark.parametrize(("n", "k"), [(0, 1), (-1, 1), (1, 0), (1, -1)])
def test_a_split_of_no_samples_or_over_no_slots_is_refused(n, k):
    with pytest.raises(ConfigError):
        equal_sizes(n, k)


@given(
    n=st.integers(1, 10**7),
    speeds=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40),
    minimum=st.integers(1, 50),
)
def test_sizes_by_speed_add_up_keep_the_minimum_and_favour_the_faster(n, speeds, minimum):
    assume(n >= minimum * len(speeds))
    sizes = sizes_by_speed(n, speeds, minimum)
    assert sum(sizes) == n
    assert min(sizes) >= minimum
    assert [size for _, size in sorted(zip(speeds, sizes, strict=True))] == sorted(sizes)


@given(n=st.integers(1000, 10**7), speeds=st.lists(st.floats(1, 100), min_size=1, max_size=8))
def test_sizes_by_speed_are_within_one_sample_of_proportional(n, speeds):
    sizes = sizes_by_speed(n, speeds)
    for size, speed in zip(sizes, speeds, strict=True):
        assert abs(size - n * speed / sum(speeds)) <= 1 + 1e-6


@given(n=st.integers(1, 10**6), k=st.integers(1, 100), speed=st.floats(1e-3, 1e6))
def test_equal_speeds_give_equal_sizes(n, k, speed):
    assume(k <= n)
    assert sizes_by_speed(n, [speed] * k) == equal_sizes(n, k)


def test_the_largest_remainder_gets_the_remaining_samples():
    # shares of 10 are 4.7, 2.3 and 3.0, floors are 4, 2 and 3; the remainder of 0.7 gets the last sample
    assert sizes_by_speed(10, [47.0, 23.0, 30.0]) == [5, 2, 3]


def test_a_very_slow_worker_still_gets_the_minimum():
    assert sizes_by_speed(100, [1.0, 1e-9, 1.0], minimum=4) == [48, 4, 48]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_was_not_measured_is_refused(speed):
    with pytest.raises(ConfigError, match="speeds"):
        sizes_by_speed(100, [1.0, speed])


@pytest.mark.parametrize(("n", "minimum"), [(5, 3), (5, 0)])
def test_a_minimum_that_cannot_be_kept_is_refused(n, minimum):
    with pytest.raises(ConfigError):
        sizes_by_speed(n, [1.0, 1.0], minimum)


def test_speed_is_an_exponential_moving_average():
    assert smooth_speed(None, 80.0) == 80.0
    assert smooth_speed(80.0, 40.0) == 60.0
    assert smooth_speed(80.0, 40.0, alpha=0.25) == 70.0
    with pytest.raises(ConfigError):
        smooth_speed(80.0, 40.0, alpha=0.0)


@given(steps=st.integers(1, 1000), speeds=st.lists(st.none() | st.floats(1e-3, 1e6), min_size=1, max_size=9))
def test_steps_follow_the_formula_of_dynamic_local_updates(steps, speeds):
    from fractions import Fraction

    fastest = max((Fraction(speed) for speed in speeds if speed is not None), default=None)
    counts = steps_by_speed(steps, speeds)
    for step, speed in zip(counts, speeds, strict=True):
        assert step == (steps if speed is None else max(1, (steps * Fraction(speed) / fastest).__floor__()))
    assert max(counts) == steps


def test_steps_without_speeds_or_of_zero_are_refused():
    for steps, speeds in ((0, [1.0]), (4, [0.0, 1.0]), (4, [float("nan")])):
        with pytest.raises(ConfigError, match="must be finite and > 0"):
            steps_by_speed(steps, speeds)
