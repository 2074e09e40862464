"""Tests of variables that are created without values: they later get the initial values of a whole model."""

import numpy as np
import pytest

from ddlf.training.exchanges.split.variables import unmade
from ddlf.training.slot.variables import free, is_independent, is_made, make, set_weights, shapes_of
from tests.training.models import small_model
from tests.training.split.together import build_model


def without_values():
    with unmade():
        return build_model(small_model)


def test_each_weight_alone_gets_its_value_of_the_whole_model():
    built, model = build_model(small_model), without_values()
    assert not any(map(is_made, model.weights))
    assert all(map(is_independent, model.weights))
    make(model.weights[2])
    assert [is_made(weight) for weight in model.weights] == [False, False, True, False]
    assert np.array_equal(model.weights[2], built.weights[2])
    assert [weight.shape for weight in shapes_of(model.weights)] == [weight.shape for weight in built.get_weights()]


def test_weights_with_and_without_values_can_be_set():
    model, values = without_values(), build_model(small_model).get_weights()
    set_weights(model, values)
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), values, strict=True))
    free(model.weights[:1])
    assert not is_made(model.weights[0])
    set_weights(model, values)
    assert np.array_equal(model.weights[0], values[0])


@pytest.mark.parametrize("kind", ["shares", "own"])
def test_initializers_that_depend_on_others_are_found(kind):
    import keras

    generator = keras.random.SeedGenerator(1)
    initializer = {
        "shares": lambda: keras.initializers.RandomNormal(seed=generator),
        "own": lambda: lambda shape, dtype=None: keras.random.normal(shape),
    }[kind]()
    with unmade():
        layer = keras.layers.Dense(2, kernel_initializer=initializer)
        layer.build((None, 3))
    assert [is_independent(weight) for weight in layer.weights] == [False, True]
