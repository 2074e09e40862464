"""Tests of the checks of an app's own ``train`` method, on a model that is a list of arrays."""

from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.extras.advice.batch import find_train_mistake


class Model:
    """A stand-in for a Keras model, with the methods that the checks call."""

    def __init__(self):
        self.weights = [np.linspace(-1, 1, 12).reshape(3, 4), np.zeros(4)]

    def get_weights(self):
        return [array.copy() for array in self.weights]

    def set_weights(self, weights):
        self.weights = [array.copy() for array in weights]

    def step(self):
        self.weights = [array + 0.01 for array in self.weights]


def app_of(train):
    app = SimpleNamespace(model=Model(), batch_size=8, x_train=np.zeros((100, 3)))
    app.train = lambda weights, epochs, size: train(app, weights)
    return app


def right(app, weights):
    app.model.set_weights(weights)
    app.model.step()
    return [a - b for a, b in zip(weights, app.model.get_weights(), strict=True)], {"loss": 1.0}


def continues_training(app, weights):
    app.model.step()
    return [a - b for a, b in zip(weights, app.model.get_weights(), strict=True)]


def turned(app, weights):
    update, metrics = right(app, weights)
    return [-array for array in update], metrics


def never_given(app, weights):
    """Train like ``continues_training``, but return the correct update of this training."""
    before = app.model.get_weights()
    app.model.step()
    return [a - b for a, b in zip(before, app.model.get_weights(), strict=True)]


def of_all(app, weights):
    app.model.set_weights(weights)
    mean = app.x_train.mean()
    app.model.weights = [array + 0.01 + mean for array in app.model.weights]
    return [a - b for a, b in zip(weights, app.model.get_weights(), strict=True)]


def of_slot(app, weights):
    app.model.set_weights(weights)
    mean = app.x_train[app.indices].mean()
    app.model.weights = [array + 0.01 + mean for array in app.model.weights]
    return [a - b for a, b in zip(weights, app.model.get_weights(), strict=True)]


def of_a_worker(app, weights):
    return app.replica.fit(1)


def of_a_gradient(app, weights):
    return [array * 0 + 0.1 for array in weights]


@pytest.mark.parametrize(
    ("train", "fault"),
    [
        (right, ""),
        (of_slot, ""),
        (never_given, "from the weights of the model"),
        (of_all, "samples that are not in self.indices"),
        (continues_training, "continues from the weights of the model"),
        (turned, "after minus weights before"),
        (of_a_worker, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_own_train_must_begin_with_the_given_weights_and_return_before_minus_after(train, fault):
    app = app_of(train)
    start = app.model.get_weights()
    assert fault in (problem := find_train_mistake(app))
    assert bool(problem) == bool(fault)
    for before, after in zip(start, app.model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


def test_an_update_that_is_made_without_the_model_is_not_judged():
    assert find_train_mistake(app_of(of_a_gradient)) == ""
