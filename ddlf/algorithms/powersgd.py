"""The codec that sends a matrix as a product of two thin ones. Encoding runs in the sender, decoding in the receiver."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.payload import Codec, Float32s, Payload, array_of
from ddlf.algorithms.weights import Tensor
from ddlf.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD(Codec):
    """Send each matrix as a product of two thin ones, by one step of power iteration. Error feedback adds the loss later.

    ``M`` is the tensor as a matrix (last axis: columns), and ``Q`` the previous ``Q`` of this slot, random at first::

        P <- orthonormal(M @ orthonormal(Q));  Q <- M.T @ P;  decoded = P @ Q.T

    It sends ``(rows + columns) * rank`` values. Vectors, and matrices that would not shrink, are sent unchanged. ``Q``
    continues from round to round, so it turns towards the largest directions of updates.

    Args:
        rank: Columns of the thin matrices, > 0.

    Raises:
        ConfigError: ``rank`` is out of range.

    Source:
        Vogels et al. 2019, arXiv:1905.13727, Algorithm 1. There ``P`` and ``Q`` are averaged over all workers; here
        each slot sends its own, so that any rule can merge the decoded updates.
    """

    rank: int = 2

    biased: ClassVar[bool] = True
    goes_on: ClassVar[str] = "right"
    largest: ClassVar[float] = 1e30  # so that no sum of products overflows

    def __post_init__(self) -> None:
        if self.rank <= 0:
            raise ConfigError(f"rank must be > 0, got {self.rank}")

    def pack(self, tensor: Float32s) -> Payload:
        return self.pack_after(tensor, None)

    def pack_after(self, tensor: Float32s, last: Tensor | None) -> Payload:
        rows, columns = _sides(tensor.shape)
        if not _is_smaller(rows, columns, self.rank):
            return {"values": tensor.reshape(-1)}
        matrix = np.ascontiguousarray(tensor).reshape(rows, columns)
        start = _orthonormal(_begun(last, (columns, self.rank))).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinities come out as such
            left = _orthonormal(matrix @ start).astype(np.float32)
            right = matrix.T @ left
        return {"left": left.reshape(-1), "right": np.ascontiguousarray(right).reshape(-1)}

    def decode(self, payload: Payload, shape: Sequence[int]) -> Float32s:
        return self.decode_part(payload, shape, 0, prod(shape)).reshape(shape)

    def part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Payload:
        rows, columns = _sides(shape)
        if not _is_smaller(rows, columns, self.rank):
            return {"values": payload["values"][low:high]}
        begin, end = low // columns, -(-high // columns)
        return {**payload, "left": payload["left"][begin * self.rank : end * self.rank]}

    def decode_part(self, payload: Payload, shape: Sequence[int], low: int, high: int) -> Float32s:
        rows, columns = _sides(shape)
        if not _is_smaller(rows, columns, self.rank):
            return array_of(payload, "values", np.float32, high - low)
        return _product(payload, columns, self.rank, low, high)


def _product(payload: Payload, columns: int, rank: int, low: int, high: int) -> Float32s:
    """Return some values of the decoded matrix, shape (high - low,)."""
    begin, end = low // columns, -(-high // columns)
    left = array_of(payload, "left", np.float32, (end - begin) * rank).reshape(-1, rank)
    right = array_of(payload, "right", np.float32, columns * rank).reshape(columns, rank)
    # Not by a product of matrices, whose last bits depend on the machine: sender and receiver must get the same.
    with np.errstate(over="ignore", invalid="ignore"):  # of a payload that was made up
        decoded = np.multiply.outer(left[:, 0], right[:, 0])
        for k in range(1, rank):
            decoded += np.multiply.outer(left[:, k], right[:, k])
    return np.asarray(decoded).reshape(-1)[low - begin * columns : high - begin * columns]


def _is_smaller(rows: int, columns: int, rank: int) -> bool:
    return (rows + columns) * rank < rows * columns


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tensor as a matrix."""
    return prod(shape[:-1]), shape[-1] if shape else 1


def _begun(last: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Return the first ``Q`` of an iteration. Missing columns and zeros become random, because zeros would stay zeros."""
    chance = np.random.default_rng(0).standard_normal(shape)
    if last is None or last.size != chance.size:
        return chance
    return np.where(np.any(last.reshape(shape), axis=0), last.reshape(shape), chance)


def _orthonormal(matrix: Tensor) -> npt.NDArray[np.float64]:
    """Return an orthonormal basis of the columns of a thin matrix, in float64."""
    return np.asarray(np.linalg.qr(np.asarray(matrix, np.float64))[0])
