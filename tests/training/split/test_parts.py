"""The parts of a model together take the steps of one process that adds up the same micro-batches."""

import numpy as np
import pytest

from tests.training.models import blobs, distance
from tests.training.split.together import Parts, trained_plain

CHANCE = np.random.default_rng(5)
IMAGES = CHANCE.normal(size=(44, 8, 8, 1)).astype("f4")
DIGITS = np.eye(4, dtype="f4")[CHANCE.integers(0, 4, 44)]


def layered():
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="tanh", kernel_regularizer="l2"),
            layers.Dropout(0.4),
            layers.Dense(12, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(4, activation="softmax", bias_regularizer="l1"),
        ]
    )
    return compiled(model, keras.optimizers.SGD(0.1, momentum=0.9))


def convolutions():
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(10, activation="relu"),
            layers.Dense(4, activation="softmax"),
        ]
    )
    return compiled(model, keras.optimizers.Adam(0.01))


def compiled(model, optimizer):
    model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"])
    return model


def batches_of(x, y, size, *more):
    return [tuple(a[begin : begin + size] for a in (x, y, *more)) for begin in range(0, len(x), size)]


CASES = {
    "dense": (layered, batches_of(*blobs(44), 16), 1e-6),
    "dense, weighted": (layered, batches_of(*blobs(44), 16, CHANCE.uniform(0, 2, 44).astype("f4")), 1e-6),
    "convolutions": (convolutions, batches_of(IMAGES, DIGITS, 16), 1e-4),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("split", ["stages:2", "stages:3"])
def test_parts_take_the_steps_of_one_process_that_adds_up_the_same_micro_batches(name, split):
    build, batches, tolerance = CASES[name]
    parts = Parts(build, split, 16, 5)
    parts.begin_epoch()
    for number, batch in enumerate(batches):
        parts.train(batch, (0, number))
    weights, metrics = trained_plain(build, batches, 5)
    assert distance(parts.weights(), weights) < tolerance
    assert parts.metrics(44) == pytest.approx(metrics, rel=1e-5)
    for model, me in zip(parts.models, parts.plan.parts, strict=True):
        assert {place for place, weight in enumerate(model.weights) if weight._value is not None} == set(me.all_weights)
