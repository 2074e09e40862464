"""The state of a shard of L-BFGS as a value: its range of all vectors. Runs on both sides.

The master starts shards from such states. Backups and checkpoints receive them. A state is either a ``ShardState``,
which has its vectors, or a ``StoredShard``, whose vectors are in a slice of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddlf.algorithms.flat_weights import Rows, overlapped
from ddlf.algorithms.lbfgs import Array
from ddlf.training.checkpoints.progress_layout import KEPT
from ddlf.training.checkpoints.slices import WEIGHTS, part_name, read_part
from ddlf.training.messages import Message

VECTORS = "lbfgs"
"""Group of the run's state in checkpoints: ``s_1..s_k, y_1..y_k, g`` as whole vectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState(Message):
    """All that another worker needs to have a shard. Its arrays never change.

    Args:
        first, version, weights, gradient, s, y, history: The attributes of ``Shard`` with these names.
    """

    first: int
    version: int
    weights: Array
    gradient: Array | None
    s: Sequence[Array]
    y: Sequence[Array]
    history: int

    @property
    def vectors(self) -> list[Array]:
        """The vectors ``s_1..s_k, y_1..y_k, g``. The last one is missing in version 0."""
        return [*self.s, *self.y, *([] if self.gradient is None else [self.gradient])]

    def to_arrays(self, rows: Rows, names: Sequence[str]) -> dict[str, Array]:
        """Return the vectors as named arrays, to be written as one slice (file) of a checkpoint.

        Args:
            rows: Layout of the model's trained weights.
            names: Paths of the weights.
        """
        part = self.first, self.first + self.weights.size
        arrays = {
            part_name(WEIGHTS, low, f"{i:04d} {names[i]}"): values
            for i, low, values in rows.slices(part, self.weights, rows.trained)
        }
        for number, vector in enumerate(self.vectors):
            arrays[part_name(KEPT + VECTORS, self.first, f"{number:04d}")] = vector
        return arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard(Message):
    """A shard whose vectors are in a slice of a checkpoint, which ``ShardState.to_arrays`` made.

    Args:
        first, version, history: The attributes of ``Shard`` with these names.
        end: Index after the last value in whole vectors.
        names: Paths of the weights.
        pairs: Number of pairs of changes.
        dtype: Name of the type of the vectors.
    """

    first: int
    end: int
    version: int
    history: int
    names: Sequence[str]
    pairs: int
    dtype: str

    def loaded(self, rows: Rows, arrays: Mapping[str, Array]) -> ShardState:
        """Return the shard with its vectors.

        Args:
            rows: Layout of the model's trained weights.
            arrays: Arrays of the shard's slice of the checkpoint.

        Raises:
            CheckpointCorrupt: A part is missing, or has the wrong size.
        """

        def of(name: str, length: int) -> Array:
            return np.asarray(read_part(arrays, name, length), self.dtype)

        like, pairs, size = [rows.like[i] for i in rows.trained], self.pairs, self.end - self.first
        weights = [
            of(part_name(WEIGHTS, low, f"{rows.trained[at]:04d} {self.names[rows.trained[at]]}"), high - low)
            for at, low, high in overlapped(like, (self.first, self.end))
        ]
        numbers = range(2 * pairs + 1)
        vectors = [of(part_name(KEPT + VECTORS, self.first, f"{number:04d}"), size) for number in numbers]
        return ShardState(
            first=self.first,
            version=self.version,
            weights=np.concatenate(weights),
            gradient=vectors[-1],
            s=vectors[:pairs],
            y=vectors[pairs : 2 * pairs],
            history=self.history,
        )
