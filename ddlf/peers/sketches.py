"""Sketches of sets: short vectors that keep lengths and angles of differences. Pure.

A sketch is a random projection. It is linear, so the sketch of a merge of two sets is the merge of their sketches, and
the server knows the length of a peer's training without another copy of the weights of each peer. A length is right to
a few percent, whatever the size of the model: ``sqrt(1 / (2 WIDTH))`` is 4 %. The signs of the projection are secret, so
nobody can make a set that hides from it.

Source:
    Charikar, Chen, Farach-Colton 2002, count sketch. Alon, Matias, Szegedy 1996 for the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.weights import is_float_type
from ddlf.peers.sets import Array
from ddlf.peers.wire import FLOAT32, Wire
from ddlf.training.checkpoints.tensors import dtype_of

Vector = npt.NDArray[np.float64]
Vector32 = npt.NDArray[np.float32]
Sketch = tuple[Vector, Vector]
"""The projection of the trained weights, and that of the other float weights, such as statistics of BatchNorm."""

WIDTH = 256
"""Numbers in a projection."""
CHUNK = 2**18
"""Values that are projected at once. All chunks share their signs, but begin at another place of the projection."""

HUGE = 1e18
"""A longer sketch is refused, whatever is usual: squares of such weights leave float32, and a mean with them is useless."""
NOTHING = np.zeros(0)


class Sketcher:
    """Makes sketches of the sets of one model.

    Args:
        wire: Reads sets.
        trainable: Per tensor, whether it is trained.
        seed: Seed of the signs. It should be secret.
    """

    def __init__(self, wire: Wire, trainable: Sequence[bool], seed: int) -> None:
        self._wire = wire
        kinds = [(is_float_type(dtype_of(kind)), kind) for _, _, kind in wire.model.tensors]
        floats = [index for index, (is_real, _) in enumerate(kinds) if is_real]
        self._groups = [[i for i in floats if trainable[i]], [i for i in floats if not trainable[i]]]
        self._is_flat = wire.codec == FLOAT32 and all(
            kind == FLOAT32 and trained for (_, kind), trained in zip(kinds, trainable, strict=True)
        )
        random = np.random.default_rng(seed)
        longest = max((int(np.prod(shape)) for _, shape, _ in wire.model.tensors), default=0)
        most = min(CHUNK, sum(int(np.prod(shape)) for _, shape, _ in wire.model.tensors) if self._is_flat else longest)
        self._signs = random.choice(np.array([-1, 1], np.float32), -(-max(most, 1) // WIDTH) * WIDTH)
        self._summing = np.ones(len(self._signs) // WIDTH, np.float32)
        self._shifts = random.integers(0, WIDTH, 4096)
        self._free: list[Vector32] = []  # memory for a chunk, used again; several threads may need some

    def sketch(self, data: bytes) -> Sketch:
        """Return the sketch of a set, which may be an exact one of the journal. It is not finite if the set is not."""
        if self._is_flat:  # one view of all weights, since this is done for each post
            flat = np.frombuffer(data, np.float32, offset=len(self._wire.model.header))
            return self._project([flat]), NOTHING
        weights = self._wire.decode(data)
        trained, untrained = ([weights[index] for index in group] for group in self._groups)
        return self._project(trained), self._project(untrained) if untrained else NOTHING

    def _project(self, weights: Sequence[Array]) -> Vector:
        total = np.zeros(WIDTH)
        chunks = 0
        with np.errstate(over="ignore", invalid="ignore"):
            for weight in weights:
                flat = weight.reshape(-1)
                for begin in range(0, flat.size, CHUNK):
                    sums = self._sum_chunk(flat[begin : begin + CHUNK])
                    if chunks:
                        shift = self._shifts[chunks % len(self._shifts)]
                        sums = np.roll(sums, shift) * (1 if chunks + shift & 1 else -1)
                    total += sums
                    chunks += 1
        return total

    def _sum_chunk(self, part: Array) -> Vector32:
        """Return the sums of each ``WIDTH``-th signed value."""
        try:
            signed = self._free.pop()
        except IndexError:  # other threads use all of it, or this is the first call
            signed = np.empty(len(self._signs), np.float32)
        rows = -(-part.size // WIDTH)
        np.multiply(part, self._signs[: part.size], signed[: part.size], dtype=np.float32, casting="unsafe")
        signed[part.size : rows * WIDTH] = 0
        sums: Vector32 = self._summing[:rows].dot(signed[: rows * WIDTH].reshape(rows, WIDTH))
        self._free.append(signed)
        return sums


def length(vector: Vector) -> float:
    """Return the L2 norm of a projection, which is about that of the weights."""
    return sqrt(vector.dot(vector))


def is_finite(sketch: Sketch) -> bool:
    """Return whether a sketch is finite, and not huge. That of a set with a NaN or an infinite value is not finite."""
    trained, untrained = sketch
    return bool(trained.dot(trained) <= HUGE**2) and (not untrained.size or bool(untrained.dot(untrained) <= HUGE**2))
