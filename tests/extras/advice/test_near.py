"""Tests of finding near duplicates of pictures: brighter or recompressed copies are found, other pictures are not."""

import numpy as np

from ddlf.extras.advice.arrays import near_duplicates


def pictures(count, seed):
    """Return smooth pictures of 24 x 24 pixels."""
    random = np.random.default_rng(seed)
    return np.kron(random.random((count, 6, 6, 3)), np.ones((1, 4, 4, 1))) + 0.05 * random.random((count, 24, 24, 3))


def test_changed_copies_of_training_pictures_are_found():
    x, test = pictures(300, 1), pictures(50, 2)
    test[7] = np.clip(x[40] * 1.1 + 0.05, 0, 1)
    test[11] = np.round(x[42] * 16) / 16
    duplicates = near_duplicates(x, test)
    assert (duplicates["count"], duplicates["of"]) == (2, 50)
    assert sorted(duplicates["pairs"]) == [(40, 7), (42, 11)]
    assert near_duplicates(x, pictures(50, 3))["count"] == 0


def test_data_other_than_pictures_is_skipped():
    assert near_duplicates(np.zeros((9, 8, 8, 1)), np.zeros((9, 8, 8, 1))) is None
    assert near_duplicates(np.zeros((9, 24)), np.zeros((9, 24))) is None
    assert near_duplicates({"a": np.zeros((9, 24, 24, 1))}, None) is None
