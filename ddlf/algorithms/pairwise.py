"""Computes distances and angles between updates, from sums over fixed blocks of their values. Pure.

The values of each tensor are divided into blocks of ``BLOCK`` values, and the sums of blocks are added exactly. So
the bits do not depend on the computer of a block: the master, or a worker that owns a range of the weights.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import fsum, inf, nan

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.weights import Tensor

Vector = npt.NDArray[np.float64]

BLOCK = 1 << 16
"""Number of values in a block. A block of 64 updates takes 32 MiB as float64, for any size of the model."""


def squared_distances(updates: Sequence[Sequence[Tensor]]) -> Vector:
    """Return the squared Euclidean distance of each two of S updates, over all tensors, in float64, shape (S, S)."""
    return added([distances_in(rows) for rows in _blocks(updates)], len(updates))


def norm(update: Sequence[Tensor]) -> float:
    """Return the L2 norm of all tensors together.

    The sum is in float64, so finite float32 values cannot overflow it.
    """
    return float(np.sqrt(sum(float(np.einsum("i,i", t.ravel(), t.ravel(), dtype=np.float64)) for t in update)))


def cosines(updates: Sequence[Sequence[Tensor]]) -> Vector:
    """Return the cosine of the angle between each two of S updates, shape (S, S). None of them may be all zeros.

    Formula:
        ``cos(a, b) = sum(a * b) / (norm(a) * norm(b))``, over the values of all tensors.
    """
    norms = [norm(update) for update in updates]
    return added([cosines_in(rows, norms) for rows in _blocks(updates)], len(updates))


def distances_in(rows: Sequence[Tensor]) -> Vector:
    """Return what one block of values adds to the squared distances between S updates.

    Args:
        rows: The values of this block in each of S updates, each of shape (n,).
    """
    distances = np.zeros((len(rows), len(rows)))
    wide = [np.asarray(row, np.float64) for row in rows]
    for a, b in combinations(range(len(rows)), 2):
        difference = wide[a] - wide[b]
        distances[a, b] = distances[b, a] = np.square(
            difference, out=difference
        ).sum()  # do not use a product of BLAS, whose bits depend on the number of threads
    return distances


def cosines_in(rows: Sequence[Tensor], norms: Sequence[float]) -> Vector:
    """Return what one block of values adds to the cosines between S updates.

    Args:
        rows: The values of this block in each of S updates, each of shape (n,).
        norms: Length of each whole update.
    """
    # divide before the product, because large values would overflow
    scaled = np.stack(rows) / np.asarray(norms)[:, np.newaxis]
    return np.asarray(scaled @ scaled.T)


def added(sums: Sequence[Vector], size: int) -> Vector:
    """Return the exact sum of matrices of shape (size, size), rounded only once.

    It has the same bits in any order, and after ``brief``.
    """
    if not sums:
        return np.zeros((size, size))
    values = np.stack(sums).reshape(len(sums), -1).T.tolist()
    return np.array([_sum(terms) for terms in values]).reshape(size, size)


def brief(sums: Sequence[Vector], size: int) -> list[Vector]:
    """Return a few matrices whose exact sum is the same as that of the given matrices, because fewer must be sent."""
    matrices: list[Vector] = []
    while (remainder := added([*sums, *(-matrix for matrix in matrices)], size)).any():
        matrices.append(remainder)
        if not np.isfinite(remainder).all():
            break
    return matrices


def _sum(values: list[float]) -> float:
    try:
        return fsum(values)
    except OverflowError:
        return inf
    except ValueError:  # inf - inf
        return nan


def _blocks(updates: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
    """Yield the values of all updates, block by block, as one array for each update."""
    for tensors in zip(*updates, strict=True):
        flat = [tensor.reshape(-1) for tensor in tensors]
        for begin in range(0, flat[0].size, BLOCK):
            yield [values[begin : begin + BLOCK] for values in flat]
