"""Tests of weights of every type: floats of any number of bits are trained, and other types are not."""

import ml_dtypes
import numpy as np
import pytest

from ddlf.algorithms.codec import Float32
from ddlf.algorithms.encoding import decode_update, encode_delta, encode_update, relative_error
from ddlf.algorithms.merge import MERGE, merged
from ddlf.algorithms.outer import Nesterov, Subtract
from ddlf.algorithms.pairwise import norm
from ddlf.algorithms.update_check import judge, scaled
from ddlf.algorithms.weights import difference, is_float, mean_of

FLOATS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
OTHERS = [np.int8, np.int64, np.uint32, np.bool_, np.complex64, ml_dtypes.int4, [("a", "f4")], "S3"]
few_bits = pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: np.dtype(kind).name)


@few_bits
def test_every_float_is_a_float(kind):
    assert is_float(np.zeros(3, kind))


@pytest.mark.parametrize("kind", OTHERS, ids=str)
def test_no_other_type_is_a_float(kind):
    assert not is_float(np.zeros(3, kind))


@few_bits
@pytest.mark.parametrize("shape", [(2,), ()])
def test_floats_of_any_kind_are_merged_and_applied(kind, shape):
    before = [np.full(shape, 8, kind)]
    updates = [difference(before, [np.full(shape, value, kind)]) for value in (4, 6)]
    for name in ("mean", "median", "trimmed:0.2"):
        mean = merged(MERGE.read(name), updates, [1, 1])
        assert (mean[0].dtype, mean[0].shape) == (kind, shape)
        assert np.all(mean[0] == 3)
    _, after = Subtract().update([], before, mean, [True])
    assert after[0].dtype == kind
    assert np.all(after[0] == 5)
    outer = Nesterov(learning_rate=1.0, momentum=0.5)
    velocity, after = outer.update(outer.init(before), before, mean, [True])
    assert after[0].dtype == velocity[0].dtype == kind
    assert np.all(after[0] == 3.5)


@few_bits
def test_floats_of_any_kind_are_compared_and_travel(kind):
    update = [np.array([3, 4], kind)]
    assert norm(update) == 5
    assert scaled(update, 0.5)[0].tolist() == [1.5, 2]
    verdicts = judge({0: (update, 1), 1: (update, 1), 2: ([update[0] * 0], 1)}, update, "reject")
    assert [verdict.action for verdict in verdicts.values()] == ["accept", "accept", "reject"]
    encoded, _ = encode_update(Float32(), update, [False])
    assert relative_error(update, decode_update(encoded, update)) == 0
    assert relative_error(update, [update[0] * 0]) == 1
    _, received = encode_delta(update, [update[0] * 0], Float32(), [False])
    assert received[0].tolist() == [3, 4]


def test_integers_and_booleans_never_differ():
    before = [np.array([True, False]), np.uint8([1, 2])]
    assert [array.tolist() for array in difference(before, [~before[0], before[1] + 1])] == [[False, False], [0, 0]]


def test_mean_of_lists_is_weighted_and_takes_the_largest_integer():
    chance = np.random.default_rng(0)
    lists = [
        [chance.normal(size=(3, 2)), np.asarray(chance.integers(9), "i8"), chance.normal(size=4).astype("f4")]
        for _ in range(3)
    ]
    mean, largest, narrow = mean_of(lists, [5, 1, 2])
    assert np.allclose(mean, (5 * lists[0][0] + lists[1][0] + 2 * lists[2][0]) / 8, rtol=0, atol=1e-12)
    assert (largest, largest.dtype) == (max(weights[1] for weights in lists), np.int64)
    assert narrow.dtype == np.float32


def test_the_mean_of_equal_weights_has_their_bits():
    weights = [np.random.default_rng(0).normal(size=1000).astype("f4"), np.array([True, False])]
    for lists, shares in (([weights], [7]), ([weights] * 3, [3, 60_000, 1])):
        assert [array.tobytes() for array in mean_of(lists, shares)] == [array.tobytes() for array in weights]


def test_a_mean_over_more_slots_counts_missing_ones_as_zeros():
    assert mean_of([[np.float32([2, 4])], [np.float32([4, 8])]], [1, 1], 4)[0].tolist() == [1.5, 3]


def test_a_difference_may_overwrite_the_later_weights() -> None:
    before, after = [np.float32([5, 6]), np.int32([7])], [np.float32([1, 4]), np.int32([9])]
    update = difference(before, after, over=True)
    assert [array.tolist() for array in update] == [[4, 2], [0]]
    assert update[0] is after[0]
    fixed = np.float32([1, 4])
    fixed.flags.writeable = False  # arrays from JAX are read-only
    assert difference(before[:1], [fixed], over=True)[0].tolist() == [4, 2]
    assert difference(before[:1], [np.float64([1, 4])], over=True)[0].dtype == np.float32
