"""Tests of clipping against the golden sequence of the notes and the formula of the paper."""

import numpy as np
import pytest

from ddlf.algorithms.clipping import CLIP, Adaptive, Rolling
from ddlf.errors import ConfigError

NORMS = (1, 1, 1.2, 5, 1, 100, 1)
MOST = (1, 1, 1.092, 2.9156, 2.87452, 48.091636, 47.068361)
FACTORS = (1, 1, 0.909999, 0.583120, 1, 0.480916, 1)


def test_the_rolling_clip_gives_the_golden_sequence():
    mean = spread = 0.0
    for count, (norm, expected_limit, factor) in enumerate(zip(NORMS, MOST, FACTORS, strict=True)):
        mean, spread, limit = Rolling().observe(np.float64(norm), mean, spread, count, np)
        assert limit == pytest.approx(expected_limit, abs=1e-6)
        assert Rolling.factor(np.float64(norm), limit, np) == pytest.approx(factor, abs=1e-6)


def test_the_rolling_clip_allows_less_after_the_first_batches():
    for count, k in ((14, 4.0), (15, 2.0)):
        mean, spread, limit = Rolling().observe(np.float64(2), 1.0, 0.5, count, np)
        assert limit == pytest.approx(mean + k * spread)


def test_each_unit_is_clipped_to_a_share_of_its_weights():
    weight = np.array([[3.0, 0.0], [4.0, 0.0]])  # norms 5 and 0 of the two units
    gradient = np.array([[0.03, 1.0], [0.04, 0.0]])  # norms 0.05 and 1
    assert Adaptive().factor(gradient, weight, np) == pytest.approx(np.array([[1.0, 0.01 * 1e-3]]))
    assert Adaptive(share=0.005).factor(gradient, weight, np)[0, 0] == pytest.approx(0.5)


def test_a_unit_of_a_convolution_is_a_filter_and_a_vector_is_one_unit():
    weight = np.ones((3, 3, 2, 4))
    assert Adaptive().factor(weight, weight, np) == pytest.approx(np.full((1, 1, 1, 4), 0.01))
    assert Adaptive().factor(np.ones(9), np.ones(9), np) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("roling", "unknown clip 'roling', did you mean 'rolling'"),
        ("rolling:decay=1", "decay must be at least 0 and below 1, got 1.0"),
        ("rolling:warm=-1", "must be 0 or more"),
        ("agc:0", "share must be finite and > 0, got 0.0"),
    ],
)
def test_text_without_a_clip_is_refused_with_a_sentence(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        CLIP.read(text)
