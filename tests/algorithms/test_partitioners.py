"""Tests of the partition rules: which slot owns each sample, for all rules and for each one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.algorithms.partitioners import PARTITION, Classes, Dirichlet, Power, counts_of, labels_of
from ddlf.errors import ConfigError

UNEVEN = [rule for rule in PARTITION.names if rule != "equal"]
NONE = np.empty(0, np.int64)


def labels_for(samples, classes):
    return np.random.default_rng(samples).integers(0, classes, samples) * 3 - 1


@pytest.mark.parametrize("name", UNEVEN)
@given(slots=st.integers(1, 9), more=st.integers(0, 300), classes=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_every_sample_has_exactly_one_slot_and_every_slot_has_samples(name, slots, more, classes, seed):
    samples = 2 * slots + more
    owners = PARTITION.read(name).owners(samples, slots, seed, labels_for(samples, classes))
    assert owners.shape == (samples,)
    assert set(owners.tolist()) == set(range(slots))


@pytest.mark.parametrize("name", UNEVEN)
def test_owners_depend_on_the_seed_only(name):
    rule, labels = PARTITION.read(name), labels_for(500, 10)
    np.random.seed(5)
    owners = rule.owners(500, 4, 7, labels)
    np.random.seed(6)
    assert np.array_equal(owners, rule.owners(500, 4, 7, labels))
    assert not np.array_equal(owners, rule.owners(500, 4, 8, labels))


@pytest.mark.parametrize("name", UNEVEN)
def test_a_single_slot_has_all_samples(name):
    assert PARTITION.read(name).owners(50, 1, 0, labels_for(50, 3)).tolist() == [0] * 50


@pytest.mark.parametrize("name", UNEVEN)
def test_the_names_of_labels_do_not_matter(name):
    rule, labels = PARTITION.read(name), labels_for(300, 5)
    assert np.array_equal(rule.owners(300, 4, 1, labels), rule.owners(300, 4, 1, labels * 10 - 7))


def test_equal_assigns_no_samples_for_the_whole_run():
    assert PARTITION.read("equal").owners(10, 2, 0, NONE) is None


def test_the_partition_of_a_stored_run_does_not_change_with_numpy():
    labels = np.arange(16) % 4
    assert Dirichlet(alpha=0.5).owners(16, 2, 1, labels).tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert Classes().owners(16, 2, 1, labels).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert Power().owners(16, 2, 1, NONE).tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0]


def test_large_alpha_gives_each_slot_the_shares_of_the_whole_data():
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    owners = Dirichlet(alpha=1e7).owners(1000, 4, 0, labels)
    counts = np.array([[of[label] for label in range(3)] for of in counts_of(owners, labels, 4)])
    assert counts.sum(axis=1).tolist() == [250] * 4
    # Samples are drawn with these shares and without replacement: counts of 250 are within five standard deviations.
    assert np.all(np.abs(counts - [150, 75, 25]) < 5 * np.sqrt([60, 52.5, 22.5]))


def test_small_alpha_gives_a_slot_one_class():
    labels = np.arange(1000) % 10
    first = counts_of(Dirichlet(alpha=1e-3).owners(1000, 20, 3, labels), labels, 20)[0]
    assert list(first.values()) == [50]


def test_the_shares_of_the_first_slot_follow_the_formula():
    """With enough samples, the share of a class has the mean p and the variance p (1 - p) / (alpha + 1)."""
    labels, alpha = np.arange(20_000) % 2, 3.0
    shares = []
    for seed in range(400):
        owners = Dirichlet(alpha=alpha).owners(20_000, 20, seed, labels)
        shares.append(float(np.mean(labels[owners == 0])))
    assert np.mean(shares) == pytest.approx(0.5, abs=0.05)
    assert np.var(shares) == pytest.approx(0.25 / (alpha + 1), rel=0.2)


def test_classes_gives_each_slot_equal_shares_of_few_classes():
    labels = np.arange(800) % 8
    counts = counts_of(Classes(per_slot=2).owners(800, 4, 0, labels), labels, 4)
    assert all(sum(counts_of_slot.values()) == 200 and len(counts_of_slot) == 2 for counts_of_slot in counts)
    assert any(
        len(counts_of_slot) > 2
        for counts_of_slot in counts_of(Classes(per_slot=3).owners(800, 4, 0, labels), labels, 4)
    )


@pytest.mark.parametrize(("exponent", "sizes"), [(0.0, [20, 20, 20]), (1.0, [33, 16, 11]), (-1.0, [10, 20, 30])])
def test_power_gives_sizes_in_proportion(exponent, sizes):
    counts = np.bincount(Power(exponent=exponent).owners(60, 3, 0, NONE))
    assert np.all(np.abs(counts - sizes) <= 1)


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (Classes(per_slot=3), "10 samples cannot be cut into 12 shares, 3 for each of 4 slots"),
        (Dirichlet(), "3 samples cannot be split over 4 slots"),
        (Power(), "3 samples cannot be split over 4 slots"),
    ],
    ids=str,
)
def test_a_slot_that_would_be_empty_is_refused(rule, sentence):
    samples = int(sentence.split()[0])
    with pytest.raises(ConfigError, match=sentence):
        rule.owners(samples, 4, 0, np.zeros(samples, np.int64))


@pytest.mark.parametrize("dtype", ["u1", "i8", "f4", "?"])
def test_labels_are_whole_numbers_or_one_hot_rows(dtype):
    numbers = np.array([1, 0, 1, 1])
    for y in (numbers, numbers[:, None], np.eye(2)[numbers]):
        assert labels_of(y.astype(dtype)).tolist() == [1, 0, 1, 1]
        assert labels_of(y.astype(dtype)).dtype == np.int64


@pytest.mark.parametrize(
    ("y", "description"),
    [
        (np.array([0.5, 1.0]), r"float64 of shape \(2,\)"),
        (np.array([np.nan, 1.0]), r"float64 of shape \(2,\)"),
        (np.array([[1, 1], [0, 1]]), r"int64 of shape \(2, 2\)"),
        (np.array([[0.9, 0.1]]), r"float64 of shape \(1, 2\)"),
        (np.zeros((2, 3, 4)), r"float64 of shape \(2, 3, 4\)"),
        ({"a": np.zeros(2)}, "a dict"),
    ],
    ids=str,
)
def test_other_labels_are_refused_with_a_sentence(y, description):
    with pytest.raises(
        ConfigError, match=f"this partition needs .*; y_train is {description}; use partition='power:1'"
    ):
        labels_of(y)
