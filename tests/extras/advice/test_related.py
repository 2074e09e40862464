"""Tests of checking whether labels depend on their samples, by neighbours, linear models and frequencies."""

import numpy as np
import pytest

from ddlf.extras.advice.arrays import related
from ddlf.extras.advice.rules.data import RELATED, SURELY


@pytest.fixture
def random():
    return np.random.default_rng(5)


def _pictures(random):
    """Return pictures of squares and crosses at random places; only frequencies distinguish them."""
    x, y = random.normal(0, 0.2, (400, 20, 20, 1)), random.integers(0, 2, 400)
    for picture, is_square in zip(x, y, strict=True):
        row, column = random.integers(0, 14, 2)
        patch = picture[row : row + 6, column : column + 6]
        patch += 1 if is_square else 0
        patch[2:4] += 1
        patch[:, 2:4] += 1
    return x, y


def _ring(random):
    """Return points inside and outside of a ring; only neighbours distinguish them."""
    x = random.normal(size=(400, 2))
    return x, np.eye(2)[((x**2).sum(axis=1) > 1.4).astype(int)]


def _line(random):
    x = random.normal(size=(400, 30))
    return x, x @ random.normal(size=30) + random.normal(size=400)


def _words(random):
    x = random.integers(1, 50, (400, 20))
    return x, (x < 10).sum(axis=1) > 3


def _order(random):
    """Return sequences labelled by the first of two words."""
    x = random.integers(3, 40, (400, 16))
    positions = np.argsort(random.random(x.shape), axis=1)[:, :2]
    x[np.arange(400), positions[:, 0]], x[np.arange(400), positions[:, 1]] = 1, 2
    return x, positions[:, 0] < positions[:, 1]


@pytest.mark.parametrize(
    "samples_of",
    [_pictures, _words, *(pytest.param(generator, marks=pytest.mark.slow) for generator in (_ring, _line, _order))],
    ids=lambda generator: generator.__name__,
)
def test_labels_are_predicted_from_their_samples_but_not_from_shuffled_ones(samples_of, random):
    x, y = samples_of(random)
    tokens = samples_of in (_words, _order)
    assert related({"x_train": x, "y_train": y}, are_tokens=tokens)["train"][0] > 2 * RELATED
    other = random.permutation(y)
    assert related({"x_train": x, "y_train": other}, are_tokens=tokens)["train"][0] < RELATED


def test_a_test_set_with_shuffled_labels_is_found(random):
    x, y = _ring(random)
    data = {"x_train": x[:300], "y_train": y[:300], "x_test": x[300:], "y_test": y[300:]}
    scores = related(data, are_tokens=False)
    assert scores["test"][0] > RELATED
    turned = related({**data, "y_test": random.permutation(y[300:])}, are_tokens=False)
    assert turned["train"][0] > 10
    assert turned["test"][0] < RELATED < SURELY


def test_few_samples_one_class_and_pictures_as_labels_are_not_checked(random):
    x, y = _ring(random)
    assert related({"x_train": x[:100], "y_train": y[:100]}, are_tokens=False) == {}
    assert related({"x_train": x, "y_train": np.zeros(400)}, are_tokens=False) == {}
    assert related({"x_train": x, "y_train": np.zeros((400, 8, 8))}, are_tokens=False) == {}
    assert related({"x_train": None, "y_train": y}, are_tokens=False) == {}
