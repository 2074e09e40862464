"""Keras variables that have no value yet, only a shape. Runs on master and workers.

Keras gives a variable no value while a ``StatelessScope`` is open that does not initialize. Its initializer makes the
same value later. A model that spans workers is built so: each worker makes the variables of its part only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights, is_float
from ddlf.training.slot.transfer import transfer

PIECE = 1 << 20
"""Number of values that are checked at a time."""


def is_made(variable: Any) -> bool:
    """Return whether a Keras variable has a value. Variables of other models always have one."""
    return getattr(variable, "_value", variable) is not None


def set_value(variable: Any, value: np.ndarray[Any, Any]) -> None:
    """Set a variable, and make it first if it has no memory. It then gets the shape of the value, such as of a share."""
    if is_made(variable):
        variable.assign(value)
    else:
        variable._shape = tuple(value.shape)
        variable._initialize(variable._convert_to_tensor(value, dtype=variable._dtype))
        variable._initializer = None


def value_of(variable: Any) -> np.ndarray[Any, Any]:
    """Return the value of a variable, as a view of its memory where that is possible. Use it before the next step."""
    import keras

    value = variable.value
    try:
        return np.asarray(memoryview(value.read_value() if hasattr(value, "read_value") else value))
    except (TypeError, ValueError, RuntimeError, BufferError):  # another device, or a type that NumPy does not know
        return np.asarray(keras.ops.convert_to_numpy(value))


def is_finite(value: np.ndarray[Any, Any]) -> bool:
    """Return whether an array has only finite numbers, with little memory for the check."""
    flat = value.reshape(-1)
    pieces = (flat[begin : begin + PIECE] for begin in range(0, len(flat), PIECE))
    return not is_float(value) or all(bool(np.isfinite(piece).all()) for piece in pieces)


def make(variable: Any) -> None:
    """Give a variable the first value that its initializer makes, unless it has a value."""
    if not is_made(variable):
        variable._deferred_initialize()


def free(variables: Iterable[Any]) -> None:
    """Free the memory of variables. ``set_value`` makes them again."""
    import keras

    for variable in variables:
        if is_made(variable):
            variable._value, variable._initializer = None, keras.initializers.Zeros()


def set_weights(model: Any, weights: Sequence[Any]) -> None:
    """Set the weights of a model. Weights without memory are made, one after another."""
    if all(is_made(variable) for variable in model.weights):
        transfer().set_weights(model, weights)
        return
    for variable, value in zip(model.weights, weights, strict=True):
        set_value(variable, value)


def get_weights(model: Any) -> Weights:
    """Return the weights of a model, as arrays that may be read-only."""
    return transfer().get_weights(model)


def shapes_of(variables: Sequence[Any]) -> Weights:
    """Return arrays with the shapes and types of variables. The arrays take no memory."""
    return [np.broadcast_to(np.zeros((), np.dtype(variable.dtype)), tuple(variable.shape)) for variable in variables]


def is_independent(variable: Any) -> bool:
    """Return whether a variable's initializer makes the same value if no other variable is made before.

    This holds for Keras's initializers, each with its own seed, but not for one that shares a generator.
    """
    import keras

    initializer = variable._initializer
    where = getattr(initializer, "__module__", "") or ""
    shares = isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator)
    return where.startswith("keras.") and not shares
