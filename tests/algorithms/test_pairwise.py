"""Tests of distances and angles of updates from sums over blocks: formulas, and equal bits for any cut."""

import random
from fractions import Fraction

import numpy as np
import pytest

from ddlf.algorithms.pairwise import added, brief, cosines, distances_in, norm, squared_distances

CHANCE = np.random.default_rng(3)
UPDATES = [
    [CHANCE.normal(size=(70, 1000)).astype("f4"), np.asarray(2.5, "f4"), CHANCE.normal(size=5)] for _ in range(4)
]
FLAT = np.stack([np.concatenate([tensor.ravel() for tensor in update]) for update in UPDATES]).astype("f8")


def test_squared_distances_are_those_of_the_flattened_updates():
    expected = [[((a - b) ** 2).sum() for b in FLAT] for a in FLAT]
    np.testing.assert_allclose(squared_distances(UPDATES), expected, rtol=1e-12)


def test_cosines_and_norms_are_those_of_the_flattened_updates():
    lengths = np.sqrt((FLAT**2).sum(axis=1))
    np.testing.assert_allclose([norm(update) for update in UPDATES], lengths, rtol=1e-12)
    np.testing.assert_allclose(cosines(UPDATES), FLAT @ FLAT.T / np.outer(lengths, lengths), atol=1e-12)


def test_sums_are_exact_in_any_order_and_cut_anywhere():
    values = [10.0 ** random.Random(n).uniform(-20, 20) * (-1) ** n for n in range(500)]
    sums = [np.full((2, 2), value) for value in values]
    exact = float(sum(map(Fraction, values)))
    assert added(sums, 2).tolist() == [[exact, exact]] * 2
    for cut in (0, 1, 77, 499, 500):
        parts = [*brief(sums[cut:], 2), *brief(sums[:cut], 2)]
        assert len(parts) <= 8
        assert np.array_equal(added(parts, 2), added(sums, 2))


def test_empty_updates_give_zeros():
    assert brief([], 3) == []
    assert np.array_equal(added([], 3), np.zeros((3, 3)))
    assert squared_distances([[], []]).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e308])
def test_values_beyond_float64_give_infinite_or_nan_sums(value):
    sums = [np.full((1, 1), value), np.full((1, 1), value), np.full((1, 1), 1.0)]
    assert not np.isfinite(added(brief(sums, 1), 1)).any()


def test_distances_of_the_largest_float32_do_not_overflow():
    assert np.isfinite(distances_in([np.full(9, 3e38, "f4"), np.full(9, -3e38, "f4")])).all()
