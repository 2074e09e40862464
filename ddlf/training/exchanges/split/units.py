"""Which indices of a tensor or a weight each worker of a group has: ``Units``, ``Piece``. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Indices = np.ndarray[Any, Any]

UNITS = -1
"""The axis of units: the last one."""
ROWS = 1
"""The axis of image rows: the first one behind the samples."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """For each worker of a group, the indices that it has on an axis of a tensor.

    Args:
        of: The indices of each worker. Several workers may have the same ones.
        axis: ``UNITS`` or ``ROWS``.
    """

    of: tuple[Indices, ...]
    axis: int = UNITS

    def __len__(self) -> int:
        return len(self.of)

    def __iter__(self) -> Iterator[Indices]:
        return iter(self.of)

    def __getitem__(self, worker: int) -> Indices:
        return self.of[worker]

    @property
    def counts(self) -> list[int]:
        """The number of indices of each worker."""
        return [len(indices) for indices in self.of]

    def share_of(self, tensor: Any, worker: int) -> Any:
        """Return the share of a worker of a tensor."""
        return take_indices(tensor, self.of[worker], self.axis)

    def joined(self, tensors: Sequence[Any]) -> Any:
        """Return a tensor from the shares of all workers."""
        return joined(tensors, self.of, self.axis)

    def shape(self, whole: tuple[int | None, ...], worker: int) -> tuple[int | None, ...]:
        """Return the shape of a worker's share of one sample, from the shape of the whole."""
        sizes = list(whole)
        sizes[self.axis if self.axis < 0 else self.axis - 1] = len(self.of[worker])
        return tuple(sizes)


def shares(units: int, workers: int, axis: int = UNITS) -> Units:
    """Return which units each worker has, in order. Their numbers differ by at most 1; the first ones have more."""
    return Units(tuple(np.array_split(np.arange(units), workers)), axis)


def between(bounds: Sequence[int], axis: int) -> Units:
    """Return units that follow each other, from the first index of each worker, and the end."""
    return Units(tuple(np.arange(low, high) for low, high in pairwise(bounds)), axis)


def same_units(first: Units | None, second: Units | None) -> bool:
    """Return whether each worker has the same units."""
    if first is None or second is None:
        return first is second
    return first is second or (
        first.axis == second.axis and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    )


def run_of(indices: Indices) -> slice | None:
    """Return indices that follow each other as a slice; None for others."""
    begin = int(indices[0])
    follow = np.array_equal(indices, np.arange(begin, begin + len(indices)))
    return slice(begin, begin + len(indices)) if follow else None


def take_indices(tensor: Any, indices: Indices, axis: int = UNITS) -> Any:
    """Return some indices of a tensor."""
    import keras

    run = run_of(indices)
    if run is None:
        return keras.ops.take(tensor, indices, axis=axis)
    return tensor[..., run] if axis == UNITS else tensor[(slice(None),) * axis + (run,)]


def joined(tensors: Sequence[Any], indices: Sequence[Indices], axis: int = UNITS) -> Any:
    """Return a tensor in the order of its indices, from tensors with some of these each."""
    import keras

    if len(tensors) == 1:
        return tensors[0]
    first = sorted(range(len(tensors)), key=lambda number: int(indices[number][0]))
    whole = keras.ops.concatenate([tensors[number] for number in first], axis=axis)
    order = np.concatenate([indices[number] for number in first])
    return whole if run_of(order) else keras.ops.take(whole, np.argsort(order), axis=axis)


@dataclass(frozen=True, slots=True)
class Piece:
    """How a weight is cut.

    Args:
        axis: The axis that is cut.
        units: For each worker, the indices that it has.
    """

    axis: int
    units: Units

    def share_of(self, value: np.ndarray[Any, Any], worker: int) -> np.ndarray[Any, Any]:
        """Return the share of a worker. ``value`` may also be a variable of an optimizer, with the same shape."""
        return np.take(value, self.units[worker], axis=self.axis)

    def join(self, values: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """Return the whole weight from the shares of all workers."""
        whole = np.concatenate(list(values), axis=self.axis)
        return np.take(whole, np.argsort(np.concatenate(self.units.of)), axis=self.axis)

    def fraction(self, worker: int) -> float:
        """Return the share of the weight that a worker has, from 0 to 1."""
        return len(self.units[worker]) / sum(self.units.counts)
