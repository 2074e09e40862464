"""Tests of the facts that the adviser reads from a network."""

import pytest

from ddlf.extras.advice.network import _equal
from ddlf.training.exchanges.split.variables import unmade
from ddlf.training.slot.variables import is_made

pytestmark = pytest.mark.slow


def test_kernels_without_memory_are_judged_by_a_few_values():
    import keras

    shapes = []

    class Recorded(keras.initializers.RandomUniform):
        def __call__(self, shape, dtype=None):
            shapes.append(tuple(shape))
            return super().__call__(shape, dtype)

    dense = keras.layers.Dense
    with unmade():
        layers = [dense(300, kernel_initializer=Recorded()), dense(300, kernel_initializer="ones")]
        keras.Sequential([keras.Input((300,)), *layers])
    shapes.clear()
    assert [_equal(layer.kernel) for layer in layers] == [None, 1.0]
    assert shapes == [(2, 2)]
    assert not any(is_made(layer.kernel) for layer in layers)
