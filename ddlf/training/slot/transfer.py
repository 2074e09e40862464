"""Moves the values of variables between the device of a Keras model and arrays of NumPy. Runs on master and workers.

A card copies to and from pinned memory at the full rate of its bus. So on a card, all variables of a model move at
once, and the arrays that are read lie in pinned memory. ``docs/LAB.md`` has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.worker.machine import keras_backend


class Transfer:
    """Moves values of variables in Keras's way, one variable after the other."""

    def read(self, variables: Sequence[Any]) -> Weights:
        """Return the values of variables. The arrays keep them when the variables change; they may be read-only."""
        import keras

        return [keras.ops.convert_to_numpy(variable) for variable in variables]

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Set variables. The caller must not change the arrays before the next ``read``.

        Raises:
            ValueError: The number of arrays or the shape of one is wrong.
        """
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def get_weights(self, model: Any) -> Weights:
        """Return the weights of a model, as ``read`` does."""
        return model.get_weights()  # type: ignore[no-any-return]

    def set_weights(self, model: Any, weights: Sequence[Any]) -> None:
        """Set the weights of a model, as ``write`` does."""
        model.set_weights(weights)


class CardTransfer(Transfer):
    """Moves the values of all variables at once."""

    def get_weights(self, model: Any) -> Weights:
        return super().get_weights(model) if _is_own(model, "get_weights") else self.read(model.weights)

    def set_weights(self, model: Any, weights: Sequence[Any]) -> None:
        if _is_own(model, "set_weights"):
            super().set_weights(model, weights)
        else:
            self.write(model.weights, weights)


class JaxTransfer(CardTransfer):
    """Moves values between a card and memory with JAX."""

    def read(self, variables: Sequence[Any]) -> Weights:
        import jax

        values = [variable.value for variable in variables]
        pinned = jax.device_put(values, [value.sharding.with_memory_kind("pinned_host") for value in values])
        return [np.asarray(value) for value in pinned]  # views of pinned memory, which live as long as the arrays

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        import jax

        alike = all(
            variable._layout is None and np.dtype(variable.dtype) == value.dtype
            for variable, value in zip(variables, values, strict=True)
        )
        # JAX converts other types, and divides an array between several devices, for each variable.
        super().write(variables, jax.device_put(values) if alike else values)


class TorchTransfer(CardTransfer):
    """Moves values between a card and memory with PyTorch."""

    def read(self, variables: Sequence[Any]) -> Weights:
        import torch

        values = [variable.value.detach() for variable in variables]
        if not all(map(_suits_torch, values)):
            return super().read(variables)
        pinned = [torch.empty(value.shape, dtype=value.dtype, pin_memory=True) for value in values]
        for there, value in zip(pinned, values, strict=True):
            there.copy_(value, non_blocking=True)
        torch.cuda.synchronize()
        return [there.numpy() for there in pinned]

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        import torch

        def on_card(variable: Any, value: np.ndarray[Any, Any]) -> Any:
            there = variable.value
            if not _suits_torch(there) or np.dtype(variable.dtype) != value.dtype:
                return value
            pinned = torch.empty(value.shape, dtype=there.dtype, pin_memory=True)
            np.copyto(pinned.numpy(), value)
            return pinned.to(there.device, non_blocking=True)

        super().write(variables, [on_card(*pair) for pair in zip(variables, values, strict=True)])


def _suits_torch(value: Any) -> bool:
    """Return whether a tensor is on a card, and of a type that NumPy and PyTorch both have."""
    return bool(value.is_cuda) and str(value.dtype) != "torch.bfloat16"


def _is_own(model: Any, method: str) -> bool:
    """Return whether the class of a model overrides a method of Keras."""
    import keras

    return getattr(type(model), method) is not getattr(keras.Model, method)


@cache
def transfer() -> Transfer:
    """Return the fastest transfer for the device that this process computes on. Call it after a model was built."""
    backend = keras_backend()
    if backend == "jax":
        import jax

        return JaxTransfer() if jax.default_backend() == "gpu" else Transfer()
    if backend == "torch":
        import torch

        return TorchTransfer() if torch.cuda.is_available() else Transfer()
    return Transfer()
