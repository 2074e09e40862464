"""Tests that compare parameters of losses from data with their formulas."""

import numpy as np
import pytest

from ddlf.errors import ConfigError
from ddlf.extras.stabilisers.from_data import class_weights, focal_alpha, huber_delta, spread

NORMAL = np.random.default_rng(0).normal(size=20_000)


def test_the_spread_of_normal_errors_is_their_deviation_even_with_outliers():
    assert spread(3 * NORMAL + 7) == pytest.approx(3, rel=0.02)
    wild = 3 * NORMAL
    wild[:200] = 1e6
    assert spread(wild) == pytest.approx(3, rel=0.04)
    assert spread([np.nan, 1, 2, 3]) == pytest.approx(1.4826)


def test_the_delta_of_huber_is_1_345_spreads():
    assert huber_delta(None, None, 2 * NORMAL) == pytest.approx(1.345 * 2, rel=0.02)
    assert huber_delta(None, None, np.stack([NORMAL, NORMAL + 100], 1)) == pytest.approx(1.345, rel=0.02)
    with pytest.raises(ConfigError, match="more than half of the errors are equal"):
        huber_delta(None, None, np.zeros(9))


def test_every_class_has_the_same_total_weight():
    labels = np.array([0] * 90 + [2] * 10)
    assert class_weights(labels) == {0: pytest.approx(100 / 180), 2: pytest.approx(5)}
    assert class_weights(np.eye(3)[labels]) == class_weights(labels)
    assert focal_alpha(labels[labels != 1] // 2) == pytest.approx([0.1, 0.9])
    assert sum(focal_alpha(np.array([0, 1, 1, 2]))) == pytest.approx(1)


@pytest.mark.parametrize(("labels", "sentence"), [([0.5, 1], "must be class numbers"), ([1, 1], "only one class")])
def test_labels_other_than_classes_are_refused(labels, sentence):
    with pytest.raises(ConfigError, match=sentence):
        focal_alpha(np.array(labels))
