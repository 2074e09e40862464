"""Pictures that are nearly the same in training and another part: brighter, or saved again. Runs on the master; NumPy alone."""

from __future__ import annotations

from typing import Any

import numpy as np

SIDE = 8
"""Pixels of a thumbnail, each way."""
LEAST_SIDE = 16
ALIKE = 0.9
"""Cosine of two thumbnails, each less its mean, from which on they may be one picture."""
NEARER = 0.5
"""By which share of the distance of the second neighbour the first must be nearer: simple pictures, as of digits, have many that are alike."""
AT_ONCE = 256
MOST = 200_000
SHOWN = 10


def near(x: Any, other: Any) -> dict[str, Any] | None:
    """Near duplicates of training pictures in another part; None of what are no pictures.

    Of both parts 8 x 8 thumbnails are compared, less their means: a picture of the other part is a near duplicate of its nearest one if their
    cosine is above 0.9 and their distance at most half of that to the second nearest.

    Args:
        x: Training pictures, of shape (n, height, width, channels).
        other: Those of the other part.

    Returns:
        ``count`` of how many (``of``), and the nearest ``pairs``: number in training, number there.
    """
    fit = isinstance(x, np.ndarray) and isinstance(other, np.ndarray) and x.ndim == other.ndim == 4
    if not fit or x.shape[1:] != other.shape[1:] or min(x.shape[1:3]) < LEAST_SIDE or not 2 < len(x) <= MOST:
        return None
    mine, theirs = _thumbnails(x), _thumbnails(other)
    found: list[tuple[float, int, int]] = []
    for start in range(0, len(theirs), AT_ONCE):
        alike = theirs[start : start + AT_ONCE] @ mine.T
        best = np.argpartition(alike, -2, axis=1)[:, -2:]
        values = np.take_along_axis(alike, best, axis=1)
        first = values.argmax(axis=1)
        row = np.arange(len(alike))
        cosine, second = values[row, first], values[row, 1 - first]
        apart, further = (np.sqrt(np.maximum(2 - 2 * one, 0)) for one in (cosine, second))
        hits = np.flatnonzero((cosine > ALIKE) & (apart <= NEARER * further))
        found += [(float(apart[hit]), int(best[hit, first[hit]]), start + int(hit)) for hit in hits]
    found.sort()
    return {"count": len(found), "of": len(other), "pairs": tuple((a, b) for _, a, b in found[:SHOWN])}


def _thumbnails(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Means of equal parts of each picture, as rows less their mean and of length 1."""
    edges = [np.linspace(0, size, SIDE, endpoint=False).astype(int) for size in x.shape[1:3]]
    sizes = [np.diff([*edge, size]) for edge, size in zip(edges, x.shape[1:3], strict=True)]
    rows = np.empty((len(x), SIDE * SIDE * x.shape[3]), np.float32)
    for start in range(0, len(x), 1024):
        piece = np.nan_to_num(x[start : start + 1024].astype(np.float32))
        piece = np.add.reduceat(np.add.reduceat(piece, edges[0], axis=1), edges[1], axis=2)
        piece /= sizes[0][:, None, None] * sizes[1][:, None]
        rows[start : start + 1024] = piece.reshape(len(piece), -1)
    rows -= rows.mean(axis=1, keepdims=True)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
    return rows
