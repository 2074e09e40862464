"""Moves the values of variables between the device of a Keras model and arrays of NumPy. Runs on master and workers.

A card copies to and from pinned memory at the full rate of its bus, and each copy has a fixed cost. So on a card, all
variables of a model move at once, and the arrays that are read lie in pinned memory. JAX reads small arrays as one flat
array. ``docs/LAB.md`` has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.worker.machine import keras_backend

LARGE_BYTES = 4 * 1024**2
"""An array of this size or more is read by itself. Smaller ones of a type are read together."""


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
    """Moves the values of all variables at once. An array that is read belongs to the caller, who may change it."""

    def get_weights(self, model: Any) -> Weights:
        return super().get_weights(model) if _is_own(model, "get_weights") else self.read(model.weights)

    def set_weights(self, model: Any, weights: Sequence[Any]) -> None:
        if _is_own(model, "set_weights"):
            super().set_weights(model, weights)
        else:
            self.write(model.weights, weights)


class JaxTransfer(CardTransfer):
    """Moves values between a card and memory with JAX. The card puts small arrays together before they are read."""

    def read(self, variables: Sequence[Any]) -> Weights:
        import jax

        values = [variable.value for variable in variables]
        groups = _groups(values)
        flats = [_joined([values[i] for i in group]) if len(group) > 1 else values[group[0]] for group in groups]
        pinned = jax.device_put(flats, [flat.sharding.with_memory_kind("pinned_host") for flat in flats])
        arrays: Weights = [_NONE] * len(values)
        for group, flat in zip(groups, pinned, strict=True):
            for i, part in zip(group, _cut(_writable(flat), [values[i].shape for i in group]), strict=True):
                arrays[i] = part
        return arrays

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        import jax

        alike = all(
            variable._layout is None
            and np.dtype(variable.dtype) == value.dtype
            and tuple(variable.shape) == value.shape
            for variable, value in zip(variables, values, strict=True)
        )
        if not alike:  # JAX converts other types, and divides an array between several devices, for each variable
            super().write(variables, values)
            return
        # Without a device, the arrays may move later, like Keras's own. Otherwise JAX would compile the step again.
        for variable, value in zip(variables, jax.device_put(list(values)), strict=True):
            variable._direct_assign(value)


class TorchTransfer(CardTransfer):
    """Moves values between a card and memory with PyTorch, whose copies into pinned memory have several threads."""

    def read(self, variables: Sequence[Any]) -> Weights:
        import torch

        values = [variable.value.detach() for variable in variables]
        if not all(map(_suits_torch, values)):
            return super().read(variables)
        pinned = _pinned(values)
        for target, value in zip(pinned, values, strict=True):
            target.copy_(value, non_blocking=True)
        torch.cuda.synchronize()
        return [target.numpy() for target in pinned]

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        import torch

        on_card = [variable.value for variable in variables]
        alike = all(
            _suits_torch(tensor) and np.dtype(variable.dtype) == value.dtype and tuple(tensor.shape) == value.shape
            for variable, tensor, value in zip(variables, on_card, values, strict=True)
        )
        if not alike:
            super().write(variables, values)
            return
        with torch.no_grad():
            for tensor, pinned, value in zip(on_card, _pinned(on_card), values, strict=True):
                pinned.copy_(torch.from_numpy(_writable(np.asarray(value, order="C"))))
                tensor.copy_(pinned, non_blocking=True)


_NONE = np.zeros(0, np.float32)


def _groups(arrays: Sequence[Any]) -> list[list[int]]:
    """Return the numbers of arrays that move together: the small ones of a type, and each large one by itself."""
    together: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        together.setdefault((i,) if array.nbytes >= LARGE_BYTES else array.dtype, []).append(i)
    return list(together.values())


def _cut(flat: np.ndarray[Any, Any], shapes: Sequence[tuple[int, ...]]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the arrays that follow each other in a flat array, as views of it."""
    flat, begin = flat.reshape(-1), 0
    for shape in shapes:
        end = begin + int(np.prod(shape))
        yield flat[begin:end].reshape(shape)
        begin = end


class _Memory:
    """The memory of an array, for NumPy. It keeps the array."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (array.nbytes,), "data": (address, False)}


def _writable(value: Any) -> np.ndarray[Any, Any]:
    """Return a view of an array that counts as writable, also of one of JAX. Write to it only if nobody else uses it."""
    array = np.asarray(value)  # a view, which lives as long as the array
    return np.asarray(_Memory(array)).view(array.dtype).reshape(array.shape) if array.size else array


# -- JAX ----------------------------------------------------------------------------------------------------------------


def _joined(values: Sequence[Any]) -> Any:
    """Return the values of some arrays on the card as one flat array there."""
    return _in_jax()(values)


@cache
def _in_jax() -> Any:
    """Return the compiled function behind ``_joined``."""
    import jax

    return jax.jit(lambda values: jax.numpy.concatenate([value.reshape(-1) for value in values]))


# -- PyTorch ------------------------------------------------------------------------------------------------------------


def _pinned(like: Sequence[Any]) -> list[Any]:
    """Return tensors of PyTorch in pinned memory, with the shapes and types of others. Small ones share their memory."""
    import torch

    tensors: list[Any] = [None] * len(like)
    for group in _groups(like):
        sizes = [like[i].numel() for i in group]
        flat = torch.empty(sum(sizes), dtype=like[group[0]].dtype, pin_memory=torch.cuda.is_available())
        for i, part in zip(group, flat.split(sizes), strict=True):
            tensors[i] = part.view(like[i].shape)
    return tensors


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
