"""All values of a model as two rows of numbers: trained values, and other floats. Runs on master and workers; pure.

Servers of Downpour own parts of these rows. Other types, such as the state of a random generator, are in neither row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ddlf.algorithms.ranges import Slice, cut, cut_by_layer, overlapped
from ddlf.algorithms.weights import Tensor, Weights, is_float

Row = np.ndarray[Any, Any]
"""float32, shape (values,)."""


def is_finite(row: Row) -> bool:
    """Whether there is no NaN and no infinity in a row: then its sum is a number, for float32 values do not get beyond float64."""
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(row.sum(dtype=np.float64)))


@dataclass(frozen=True, slots=True)
class Rows:
    """Which weights are in which row.

    Args:
        like: Arrays with the shapes and types of the model's weights.
        trained: Indices of the trained weights.
        rest: Places of the other floats.
    """

    like: Sequence[Tensor]
    trained: Sequence[int]
    rest: Sequence[int]

    @classmethod
    def of(cls, weights: Sequence[Tensor], trainable: Sequence[bool]) -> Rows:
        """The rows of a model.

        Args:
            weights: Weights of the model; only shapes and types count.
            trainable: Whether each is trained.
        """
        like = [np.broadcast_to(np.zeros((), w.dtype), w.shape) for w in weights]
        floats = [i for i, w in enumerate(weights) if is_float(w)]
        return cls(like, [i for i in floats if trainable[i]], [i for i in floats if not trainable[i]])

    @property
    def sizes(self) -> tuple[int, int]:
        """Values of each row."""
        return sum(self.like[i].size for i in self.trained), sum(self.like[i].size for i in self.rest)

    def row(self, weights: Sequence[Tensor], places: Sequence[int]) -> Row:
        """The values of some weights in one row, as float32."""
        parts = [np.asarray(weights[i], np.float32).reshape(-1) for i in places]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def arrays(self, row: Row, places: Sequence[int]) -> list[Tensor]:
        """Some weights of a row, in their shapes and types; views where they are float32."""
        found, begin = [], 0
        for i in places:
            end = begin + self.like[i].size
            found.append(row[begin:end].reshape(self.like[i].shape).astype(self.like[i].dtype, copy=False))
            begin = end
        return found

    def slices(self, part: Slice, row: Row, places: Sequence[int]) -> list[tuple[int, int, Tensor]]:
        """A slice of a row as slices of weights.

        Args:
            part: Which of the row.
            row: Its values.
            places: Indices of the row's weights.

        Returns:
            For each overlapping weight: its index, the first of its values in the range, and these values, flat, in
            its type.
        """
        found, begin = [], 0
        for place, low, high in overlapped([self.like[i] for i in places], part):
            end = begin + high - low
            i = places[place]
            found.append((i, low, row[begin:end].astype(self.like[i].dtype, copy=False)))
            begin = end
        return found

    def weights(self, trained: Row, rest: Row, others: Sequence[Any]) -> Weights:
        """All weights, of both rows; what is in neither is that of others."""
        found = list(others)
        for row, places in ((trained, self.trained), (rest, self.rest)):
            for i, array in zip(places, self.arrays(row, places), strict=True):
                found[i] = array
        return found

    def cut(self, shards: int, layers: Sequence[str] | None = None) -> list[tuple[Slice, Slice]]:
        """Return the ranges of both rows for each server. Ranges of the second row may be empty.

        Args:
            shards: S.
            layers: Layer name of each weight. Ranges then end at the ends of layers, and untrained values are with
                the trained layer at or before them. None makes ranges of nearly equal size.

        Raises:
            ConfigError: There are no shards, or more than values, or layers, that are trained.
        """
        trained, rest = self.sizes
        if layers is None:
            return list(zip(cut(trained, shards), pairwise(rest * i // shards for i in range(shards + 1)), strict=True))
        slices = cut_by_layer([self.like[i].size for i in self.trained], [layers[i] for i in self.trained], shards)
        firsts = dict(zip(accumulate((self.like[i].size for i in self.trained), initial=0), self.trained, strict=False))
        ends = [sum(self.like[i].size for i in self.rest if i < firsts[end]) for _, end in slices[:-1]]
        return list(zip(slices, pairwise([0, *ends, rest]), strict=True))
