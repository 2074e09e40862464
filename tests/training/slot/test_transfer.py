"""Tests of moving variables between a GPU and memory. Here JAX runs on the CPU, which has pinned memory, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.later import Later

keras = Later("keras")
transfer = Later("ddlf.training.slot.transfer")


@dataclass
class Variable:
    """A variable of Keras on JAX.

    Args:
        value: Its value.
        dtype: The name of its type.
    """

    value: Any
    dtype: str
    _layout: Any = None

    @property
    def shape(self) -> Any:
        return self.value.shape

    def assign(self, value: Any) -> None:
        """Convert a value, and set it."""
        import jax.numpy as jnp

        self.assigned = value
        self.value = jnp.asarray(value, self.dtype)

    def _direct_assign(self, value: Any) -> None:
        self.value = value


ARRAYS = [
    np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    np.float32(0.1) * np.ones((), np.float32),
    np.arange(4, dtype=np.int32),
    np.array([True, False]),
    np.zeros((0, 3), np.float32),
]


def variables(arrays: Any = ARRAYS) -> list[Variable]:
    import jax

    return [Variable(jax.device_put(array), str(array.dtype)) for array in arrays]


def test_read_returns_value_of_each_variable() -> None:
    import jax.numpy as jnp

    half = Variable(jnp.asarray([0.1, 2.0], "bfloat16"), "bfloat16")
    *arrays, last = transfer.JaxTransfer().read([*variables(), half])
    assert [(array.dtype, array.shape) for array in arrays] == [(array.dtype, array.shape) for array in ARRAYS]
    assert all(np.array_equal(a, b) for a, b in zip(arrays, ARRAYS, strict=True))
    assert str(last.dtype) == "bfloat16"
    assert last.astype(np.float32).tolist() == [np.float32(jnp.bfloat16(0.1)), 2.0]


@pytest.fixture(params=[4 * 1024**2, 8], ids=["together", "alone"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays move together. With the small limit, arrays of 8 bytes and more move alone."""
    monkeypatch.setattr("ddlf.training.slot.transfer.LARGE_BYTES", request.param)


def test_arrays_keep_values_when_variables_change(limit: None) -> None:
    targets = variables()
    arrays = transfer.JaxTransfer().read(targets)
    for variable, array in zip(targets, ARRAYS, strict=True):
        variable.assign(array + 1)
    transfer.JaxTransfer().write(targets, [np.zeros_like(array) for array in ARRAYS])
    assert all(np.array_equal(a, b) for a, b in zip(arrays, ARRAYS, strict=True))


def test_caller_owns_the_arrays_that_it_reads(limit: None) -> None:
    targets = variables()
    for array in transfer.JaxTransfer().read(targets):
        array[...] = 1
    assert all(np.array_equal(variable.value, expected) for variable, expected in zip(targets, ARRAYS, strict=True))


def test_write_sets_each_variable_to_its_array(limit: None) -> None:
    first, second = variables(), variables()
    new_values = [~array if array.dtype == bool else array + 1 for array in ARRAYS]
    transfer.JaxTransfer().write(first, new_values)
    transfer.JaxTransfer().write(second, ARRAYS)  # uses the same pinned memory
    assert all(np.array_equal(variable.value, expected) for variable, expected in zip(first, new_values, strict=True))
    assert all(np.array_equal(variable.value, expected) for variable, expected in zip(second, ARRAYS, strict=True))


@pytest.mark.parametrize("array", [ARRAYS[0].astype(np.float64), ARRAYS[0].reshape(3, 2)], ids=["type", "shape"])
def test_variable_of_other_type_or_shape_converts_by_itself(array: Any) -> None:
    targets = variables(ARRAYS[:1])
    transfer.JaxTransfer().write(targets, [array])
    assert targets[0].assigned is array
    assert np.array_equal(targets[0].value, array)


def test_write_refuses_wrong_number_of_arrays() -> None:
    with pytest.raises(ValueError, match="shorter"):
        transfer.JaxTransfer().write(variables(), ARRAYS[:1])


def test_weights_of_model_with_own_methods_move_by_them() -> None:
    class Own(keras.Model):
        """A model that stores its weights as their doubles."""

        def get_weights(self) -> Any:
            return [2 * weight for weight in super().get_weights()]

        def set_weights(self, weights: Any) -> None:
            super().set_weights([weight / 2 for weight in weights])

    number = keras.Input((1,))
    model = Own(number, keras.layers.Dense(1)(number))
    card = transfer.CardTransfer()
    card.set_weights(model, [np.full((1, 1), 4.0), np.zeros(1)])
    assert float(keras.ops.convert_to_numpy(model.weights[0])[0, 0]) == 2.0
    assert card.get_weights(model)[0].tolist() == [[4.0]]


def test_keras_moves_weights_on_cpu() -> None:
    assert type(transfer.transfer()) is transfer.Transfer
