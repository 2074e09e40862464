"""Tests of merging weight sets against the tables of WebNN's rules, computed by hand."""

import numpy as np
import pytest

from ddlf.algorithms.set_merge import SET_MERGE, WeightSet, mean_by_trainings


def weight_set(*values, trainings=0, accuracy=-np.inf):
    return WeightSet(weights=[np.array(values), np.array([7])], trainings=trainings, accuracy=accuracy)


@pytest.mark.parametrize(
    ("rule", "s", "q", "weights", "trainings"),
    [
        ("average", 3, 1, [3, 4], 3),
        ("weighted", 3, 1, [2, 3], 3),
        ("mimic", 3, 1, [-1 / 3, 2 / 3], 3),
        ("average", 3, 5, [3, 4], 3),
        ("weighted", 3, 5, [3.5, 4.5], 5),
        ("mimic", 3, 5, [7 / 3, 10 / 3], 5),
        ("average", 3, 3, [3, 4], 3),
        ("weighted", 3, 3, [3, 4], 3),
        ("mimic", 3, 3, [-1, 0], 3),
        ("weighted", 0, 0, [3, 4], 0),
    ],
)
def test_a_merge_follows_the_golden_table(rule, s, q, weights, trainings):
    own_set, peer_set = weight_set(1.0, 2.0, trainings=s), weight_set(5.0, 6.0, trainings=q)
    merged = SET_MERGE.read(rule).merge(own_set, peer_set)
    np.testing.assert_allclose(merged.weights[0], weights, rtol=0, atol=1e-6)
    assert merged.weights[1] == [7]
    assert merged.trainings == trainings == SET_MERGE.read(rule).trainings(s, q)
    assert list(own_set.weights[0]) == [1, 2]
    share = SET_MERGE.read(rule).share(own_set, peer_set)
    np.testing.assert_allclose([1 + share * 4, 2 + share * 4], weights, rtol=0, atol=1e-6)


def test_elastic_moves_both_sides_by_the_same_step():
    x, p = weight_set(3.0), weight_set(1.0)
    rule = SET_MERGE.read("elastic:0.25")
    assert (rule.merge(x, p).weights[0], rule.merge(p, x).weights[0]) == (2.5, 1.5)


def test_copy_takes_only_a_more_accurate_set():
    copy = SET_MERGE.read("copy")
    own_set, better_set = weight_set(1.0, accuracy=0.5), weight_set(2.0, accuracy=0.6)
    assert copy.merge(own_set, better_set).weights[0] == 2
    assert copy.merge(own_set, better_set).accuracy == 0.6
    assert copy.merge(better_set, own_set) is better_set
    assert copy.merge(own_set, weight_set(2.0, accuracy=np.nan)) is own_set
    assert (copy.share(own_set, better_set), copy.share(better_set, own_set)) == (1.0, 0.0)


def test_the_mean_by_trainings_gives_each_set_its_share():
    mean = mean_by_trainings([weight_set(1.0, trainings=100), weight_set(5.0, trainings=300)])
    assert (mean.weights[0], mean.trainings) == (4.0, 300)
    assert mean_by_trainings([weight_set(1.0), weight_set(5.0)]).weights[0] == 3.0
    assert mean_by_trainings([weight_set(1.0), weight_set(5.0, trainings=1)]).weights[0] == 5.0
