"""Tests of the formulas of ``benchmarks.equal_loss``."""

import math

import numpy as np
import pytest

from benchmarks.equal_loss import factors, holds, noise_scale


def test_noise_scale_is_correct_for_simulated_gradients():
    """The gradient has length 3 and the variances of the noise have the sum 450, so the noise scale is 450 / 9."""
    chance, size = np.random.default_rng(1), 400
    true = np.full(size, 3 / math.sqrt(size))

    def norm(batch):
        noise = chance.normal(scale=math.sqrt(450 / size / batch), size=(4000, size))
        return float(((true + noise) ** 2).sum(axis=1).mean())

    assert noise_scale(norm(8), norm(128), 8, 128) == pytest.approx(50, rel=0.05)
    assert math.isinf(noise_scale(2.0, 0.1, 8, 128))  # smaller than the noise alone


def test_samples_grow_with_the_batch_beyond_the_noise_scale():
    assert factors([32, 128, 512], 96) == pytest.approx([1.0, 1.75, 4.75])
    assert factors([32, 128], math.inf) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("measured", "predicted", "right"),
    [([1, 2, 4], [1, 1.5, 5], True), ([1, 2, 4], [1, 1.2, 4], False), ([1, 2, 1.9], [1, 1.9, 2], False)],
)
def test_a_prediction_holds_with_the_right_order_and_factors(measured, predicted, right):
    assert holds(measured, predicted) == right
