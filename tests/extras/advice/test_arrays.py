"""Tests that compare the facts about arrays with NumPy on the whole arrays."""

import numpy as np
import pytest

from ddlf.extras.advice import arrays
from ddlf.extras.advice.arrays import compared, described


@pytest.fixture
def random():
    return np.random.default_rng(3)


def test_limits_and_values_that_are_not_finite_cover_all_values(random, monkeypatch):
    monkeypatch.setattr(arrays, "PIECE", 100)
    x = random.normal(size=(500, 7)).astype("float32")
    x[401, 2], x[499, 6], x[3, 3] = np.nan, np.inf, 900
    facts = described("x_train", "train", x)
    assert (facts.non_finite, facts.non_finite_rows) == (2, (401, 499))
    assert (facts.low, facts.high) == (np.nanmin(x), 900)
    assert facts.shape == (500, 7)


def test_scales_cover_features_that_have_one(random):
    x = random.normal(size=(3000, 4)) * [0.01, 1, 50, 3]
    x[:, 3] = 0
    x[::100, 3] = 7
    facts = described("x_train", "train", np.column_stack([x, np.full(3000, 5.0)]))
    assert facts.scales == pytest.approx((x[:, 0].std(), x[:, 2].std()), rel=1e-5)
    assert facts.loudest == pytest.approx(np.sqrt((x**2).mean(axis=0)).max(), rel=1e-5)
    assert facts.constant == (4,)


def test_a_feature_is_constant_only_if_it_is_equal_in_all_samples(random):
    x = random.normal(size=(20_000, 3))
    x[:, 1] = 2
    assert described("x_train", "train", x).constant == (1,)
    x[19_999, 1] = 3
    assert described("x_train", "train", x).constant == ()


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (np.arange(100) % 3, "numbers"),
        ((np.arange(100) % 3)[:, None], "numbers"),
        (np.arange(100) % 2 * 1.0, "numbers"),
        (np.eye(3)[np.arange(100) % 3], "one_hot"),
        (np.full((100, 4), 0.25), "shares"),
        (np.tile([[1.0, 1, 0], [1, 0, 0]], (50, 1)), "many_hot"),
        (np.linspace(0, 1, 100), "real"),
        (np.linspace(-1, 1, 300).reshape(100, 3), "real"),
        (np.zeros((100, 8, 8)), "real"),
        (np.arange(100) * 10**9, "real"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.dtype}{value.shape}",
)
def test_labels_have_a_kind(labels, kind):
    assert described("y_train", "train", labels).labels.kind == kind


def test_classes_are_counted_and_sorted_labels_are_noticed():
    y = np.repeat([0, 2, 1], [10, 20, 30])
    labels = described("y_train", "train", y).labels
    assert (labels.counts, labels.is_sorted) == ({0: 10, 1: 30, 2: 20}, True)
    assert described("y_train", "train", np.eye(3)[y]).labels == labels or labels.sums == (0, 0)
    assert not described("y_train", "train", np.roll(y, 3)).labels.is_sorted
    assert not described("y_train", "train", np.arange(9)).labels.is_sorted


def test_arrays_without_numbers_are_named():
    assert described("y_train", "train", np.array(["a", "b"])).dtype == "<U1"
    assert not described("y_train", "train", np.array([object()])).has_numbers
    assert described("x_train", "train", [1, 2]).dtype == "list"


def test_equal_samples_are_found_in_a_part_and_over_parts(random):
    x = random.normal(size=(300, 5))
    x[7], x[200], x[201] = x[3], x[3], x[100]
    y = np.arange(300) % 2
    y[7] = y[3]
    test = np.concatenate([random.normal(size=(50, 5)), x[[10, 20]]])
    comparison = compared({"x_train": x, "y_train": y, "x_test": test})
    assert (comparison.examined, comparison.distinct) == (300, 297)
    assert comparison.doubled == ((3, 7), (3, 200), (100, 201))
    assert (comparison.contradicting, comparison.pairs) == (2, ((3, 200), (100, 201)))
    (shared,) = comparison.shared
    assert (shared.part, shared.count, shared.of, shared.pairs) == ("test", 2, 52, ((10, 50), (20, 51)))


def test_samples_of_several_inputs_are_equal_if_all_of_them_are(random):
    a, b = random.normal(size=(40, 3)), random.integers(0, 9, (40, 2))
    a[5] = a[4]
    assert compared({"x_train": {"a": a, "b": b}}).distinct == 40
    b[5] = b[4]
    assert compared({"x_train": {"a": a, "b": b}}).doubled == ((4, 5),)


def test_a_part_of_too_much_data_is_compared(random, monkeypatch):
    monkeypatch.setattr(arrays, "COMPARED_BYTES", 100 * 5 * 8)
    x = random.normal(size=(300, 5))
    assert compared({"x_train": x}).examined == 100


@pytest.mark.parametrize("make", [lambda y: y, lambda y: y * -3 + 1, lambda y: y.astype("float32")])
def test_a_feature_that_equals_the_label_is_found(random, make):
    x, y = random.normal(size=(400, 5)), random.integers(0, 3, 400)
    x[:, 2] = make(y)
    assert compared({"x_train": x, "y_train": y}).leaks == (("x_train", 2),)
    assert compared({"x_train": x, "y_train": np.eye(3)[y]}).leaks == (("x_train", 2),)
    x[5, 2] += 1
    assert compared({"x_train": x, "y_train": y}).leaks == ()


def test_only_a_feature_that_is_linear_in_a_target_is_found(random):
    x = random.normal(size=(400, 5))
    assert compared({"x_train": x, "y_train": 3 * x[:, 1] - 2}).leaks == (("x_train", 1),)
    assert compared({"x_train": x, "y_train": 3 * x[:, 1] + 0.1 * x[:, 2]}).leaks == ()


def test_a_single_feature_that_follows_a_target_is_found_but_steps_of_a_series_are_not():
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 6))
    follows = compared({"x_train": x, "y_train": 5 * x[:, 2] + 0.1 * x[:, 1]}).linear_feature
    assert follows[:2] == ("x_train", 2)
    assert 0.999 < follows[2] < 1
    assert compared({"x_train": x, "y_train": x[:, 2] + 0.3 * x[:, 1]}).linear_feature is None
    series = np.sin(np.arange(406) / 20)[:, None] + 0.01 * random.normal(size=(406, 1))
    steps = np.concatenate([series[number : number + 400] for number in range(6)], axis=1)
    assert compared({"x_train": steps, "y_train": series[6:, 0]}).linear_feature is None


def test_overlapping_windows_are_counted(random):
    series = random.normal(size=(330, 1)).cumsum(axis=0)
    windows = np.stack([series[i : i + 12] for i in range(300)])
    mixed = windows[random.permutation(300)]
    assert compared({"x_train": mixed[:200], "x_test": mixed[200:]}).overlapping[0][1] > 80
    assert compared({"x_train": windows[:200], "x_test": windows[200:]}).overlapping == (("test", 1, 100),)
    assert compared({"x_train": windows[:200, :3], "x_test": windows[200:, :3]}).overlapping == ()


def test_a_feature_that_separates_classes_by_ranges_is_found(random):
    x = random.normal(size=(300, 3))
    y = np.digitize(np.exp(x[:, 1]), [0.5, 1.0, 2.0])
    assert compared({"x_train": x, "y_train": y}).leaks == (("x_train", 1),)
    y[7] = (y[7] + 2) % 4
    assert compared({"x_train": x, "y_train": y}).leaks == ()
    assert compared({"x_train": x, "y_train": x[:, 1] > 0}).leaks == ()


def test_labels_count_as_sorted_if_equal_ones_are_adjacent():
    rows = np.array([[0, 0], [0, 1], [1, 1]], "float32").repeat(20, axis=0)
    mixed = rows[np.random.default_rng(0).permutation(60)]
    assert [described("y_train", "train", labels).labels.is_sorted for labels in (rows, mixed)] == [True, False]
