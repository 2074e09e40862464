"""Flattens a model's weights into rows of numbers, and cuts rows into parts.

Runs on master and workers; pure.

``Rows`` has two: trained values, and other floats. Servers of Downpour own parts of them. Other types, such as
the state of a random generator, are in neither row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Tensor, Weights, is_float
from ddlf.errors import ConfigError

Row = np.ndarray[Any, Any]
"""float32, shape (values,)."""
Slice = tuple[int, int]
"""A part of a row: the index of its first value, and the index after its last value."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Assigns a model's weights to two rows of numbers: the trained values, and the other floats.

    Args:
        like: Arrays with the shapes and types of the model's weights.
        trained: Indices of the trained weights.
        rest: Indices of the other floating-point weights.
    """

    like: Sequence[Tensor]
    trained: Sequence[int]
    rest: Sequence[int]

    @classmethod
    def of(cls, weights: Sequence[Tensor], trainable: Sequence[bool]) -> Rows:
        """Return the assignment of a model's weights to rows.

        Args:
            weights: Weights of the model. Only their shapes and types are used.
            trainable: Whether each weight is trained.
        """
        like = [np.broadcast_to(np.zeros((), w.dtype), w.shape) for w in weights]
        floats = [i for i, w in enumerate(weights) if is_float(w)]
        return cls(like, [i for i in floats if trainable[i]], [i for i in floats if not trainable[i]])

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of values in each row."""
        return sum(self.like[i].size for i in self.trained), sum(self.like[i].size for i in self.rest)

    def row(self, weights: Sequence[Tensor], indices: Sequence[int]) -> Row:
        """Return the values of some weights, one after another, as one float32 row."""
        parts = [np.asarray(weights[i], np.float32).reshape(-1) for i in indices]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def arrays(self, row: Row, indices: Sequence[int]) -> list[Tensor]:
        """Return the weights that a row contains, with their shapes and types. Float32 weights are views of the row."""
        arrays, begin = [], 0
        for i in indices:
            end = begin + self.like[i].size
            arrays.append(row[begin:end].reshape(self.like[i].shape).astype(self.like[i].dtype, copy=False))
            begin = end
        return arrays

    def slices(self, part: Slice, row: Row, indices: Sequence[int]) -> list[tuple[int, int, Tensor]]:
        """Convert a range of a row into ranges of the weights that it overlaps.

        Args:
            part: Begin and end of the slice in the row.
            row: The values of the slice.
            indices: Indices of the row's weights.

        Returns:
            For each overlapping weight: its index, the index of its first value in the slice, and its values in the
            slice, flat, in its type.
        """
        overlaps, begin = [], 0
        for position, low, high in overlapped([self.like[i] for i in indices], part):
            end = begin + high - low
            i = indices[position]
            overlaps.append((i, low, row[begin:end].astype(self.like[i].dtype, copy=False)))
            begin = end
        return overlaps

    def weights(self, trained: Row, rest: Row, originals: Sequence[Any]) -> Weights:
        """Return all weights of the model, put together from both rows.

        Weights that are in neither row come from ``originals``.
        """
        weights = list(originals)
        for row, indices in ((trained, self.trained), (rest, self.rest)):
            for i, array in zip(indices, self.arrays(row, indices), strict=True):
                weights[i] = array
        return weights

    def cut(self, shards: int, layers: Sequence[str] | None = None) -> list[tuple[Slice, Slice]]:
        """Divide both rows among the servers of Downpour.

        Return the ranges of both rows for each server. Ranges of the second row may be empty.

        Args:
            shards: S.
            layers: Layer name of each weight. Ranges then end at the ends of layers, and untrained values belong to the
                same server as their layer or the trained layer before it. None makes ranges of nearly equal size.

        Raises:
            ConfigError: There are no shards, or more shards than trained values or trained layers.
        """
        trained, rest = self.sizes
        if layers is None:
            return list(zip(cut(trained, shards), pairwise(rest * i // shards for i in range(shards + 1)), strict=True))
        slices = cut_by_layer([self.like[i].size for i in self.trained], [layers[i] for i in self.trained], shards)
        firsts = dict(zip(accumulate((self.like[i].size for i in self.trained), initial=0), self.trained, strict=False))
        ends = [sum(self.like[i].size for i in self.rest if i < firsts[end]) for _, end in slices[:-1]]
        return list(zip(slices, pairwise([0, *ends, rest]), strict=True))


def cut(size: int, shards: int) -> list[Slice]:
    """Cut a row of values into slices that differ by at most one value: 10 values on 3 shards are 4, 3, 3.

    Args:
        size: P, the number of values.
        shards: S, the number of slices.

    Raises:
        ConfigError: There are no shards, or more shards than values.
    """
    if not 0 < shards <= size:
        raise ConfigError(
            f"{size:,} values cannot be cut into {shards:,} shards",
            hint="use at least 1 shard, and at most one for each value",
        )
    least, remainder = divmod(size, shards)
    ends = accumulate(least + (shard < remainder) for shard in range(shards))
    return list(pairwise([0, *ends]))


def cut_by_layer(sizes: Sequence[int], layers: Sequence[str], shards: int) -> list[Slice]:
    """Cut a row of values at the ends of layers, into slices of similar size, so that each layer is on one shard.

    Args:
        sizes: Number of values in each tensor.
        layers: Name of each tensor's layer. Tensors of a layer are neighbours.
        shards: S, the number of slices. Each has at least one layer.

    Raises:
        ConfigError: There are no shards, or more shards than layers with values.
    """
    ends = list(accumulate(sizes))
    last = [end for end, layer, following in zip(ends, layers, [*layers[1:], None], strict=True) if layer != following]
    last = sorted({end for end in last if end > 0})
    if not 0 < shards <= len(last):
        raise ConfigError(
            f"{len(last)} layers cannot be cut into {shards:,} shards",
            hint="use at least 1 shard, and at most one for each layer",
        )
    chosen = [0]
    for shard in range(1, shards):
        before = bisect_right(last, chosen[-1])
        free = last[before : len(last) - (shards - shard)]  # each of the remaining shards needs a layer, too
        chosen.append(min(free, key=lambda end: abs(end - last[-1] * shard / shards)))
    return list(pairwise([*chosen, last[-1]]))


def overlapped(arrays: Sequence[Tensor], part: Slice) -> list[tuple[int, int, int]]:
    """Return which arrays a range overlaps.

    For each: its number, and the begin and end of its values in the range.
    """
    begin, end = part
    low, overlaps = 0, []
    for i, array in enumerate(arrays):
        high = low + array.size
        if max(begin, low) < min(end, high):
            overlaps.append((i, max(begin, low) - low, min(end, high) - low))
        low = high
    return overlaps
