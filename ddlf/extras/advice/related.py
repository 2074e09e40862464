"""Whether labels have anything to do with their samples: neighbours and a straight line are asked, as simple as they are. NumPy alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ddlf.extras.advice.arrays import chosen

Array = np.ndarray[Any, Any]
LEAST, MOST = 200, 600
"""Samples that are asked."""
FEATURES = 2048
"""Of a sample; of more some are drawn."""
WIDEST = 100
"""Values of a label, or classes."""
NEIGHBOURS = 5
PENALTIES = (0.1, 10.0)
EXCHANGES = 60


def related(data: dict[str, Any], *, are_tokens: bool) -> dict[str, tuple[float, int]]:
    """By how much labels are told better than exchanged ones would be, by whoever tells them best.

    Each label is told by its nearest samples, and by ridge regression without it; what that comes to is compared with what it comes to when labels
    are exchanged among samples. Samples are looked at as they are, and by how much there is of each frequency, for which it is no matter where
    something is; tokens by how often each of them and each pair of neighbours is there, and by where they are.

    Args:
        data: ``x_train`` and ``y_train``, and those of the test if there are any.
        are_tokens: Whether inputs are numbers of tokens.

    Returns:
        ``"train"`` and ``"test"``: standard deviations from what exchanged labels give, and how many were asked; those of the test as the training
        samples tell them. What cannot be asked is left out.
    """
    x, y, other, labels = (data.get(name) for name in ("x_train", "y_train", "x_test", "y_test"))
    if x is None or y is None or not (_fit(x, y) and len(x) >= LEAST and 2 <= x.ndim <= 4):
        return {}
    some = chosen(len(x), MOST)
    mine = _coded(y[some], y[some])
    if mine is None:
        return {}
    theirs: Array | None = None
    if other is not None and labels is not None and _fit(other, labels) and len(other) >= LEAST // 2:
        tested = chosen(len(other), MOST)
        alike = (other.shape[1:], labels.shape[1:]) == (x.shape[1:], y.shape[1:])
        other, theirs = other[tested], _coded(labels[tested], y[some]) if alike else None
    chance = np.random.default_rng(29)
    best: dict[str, tuple[float, int]] = {}
    for rows, again in _views(x[some], other if theirs is not None else None, are_tokens):
        for told, of_others in _told(rows, mine, again):
            for part, labels, one in (("train", mine, told), ("test", theirs, of_others)):
                if labels is not None and one is not None:
                    best[part] = max(
                        best.get(part, (0.0, len(labels))), (_deviations(labels, one, chance), len(labels))
                    )
    return best


def _fit(x: Any, y: Any) -> bool:
    numbers = all(isinstance(one, np.ndarray) and one.ndim and one.dtype.kind in "fiub" for one in (x, y))
    return bool(numbers and len(x) == len(y) and len(x) and y.ndim <= 2 and y[0].size <= WIDEST)


def _coded(labels: Array, among: Array) -> Array | None:
    """Labels as rows of numbers: a column for each class, or their values; None if there is nothing to tell apart."""
    rows, known = (one.reshape(len(one), -1).astype(np.float64) for one in (labels, among))
    if not np.isfinite(rows).all() or not np.isfinite(known).all():
        return None
    classes = np.unique(known)
    if rows.shape[1] == 1 and (classes == np.rint(classes)).all() and len(classes) <= WIDEST:
        rows, known = ((one == classes).astype(np.float64) for one in (rows, known))
    elif rows.shape[1] == 1:  # ranks, so that a few large ones do not decide
        rows = np.searchsorted(classes, rows).astype(np.float64)
        known = np.searchsorted(classes, known).astype(np.float64)
    spread = known.std(axis=0)
    found: Array = ((rows - known.mean(axis=0)) / np.where(spread > 0, spread, np.inf)).astype(np.float32)
    return found if (spread > 0).any() else None


def _views(x: Array, other: Array | None, are_tokens: bool) -> Iterator[tuple[Array, Array | None]]:
    """Samples as rows of features of one scale, with those of another part, in each way of looking at them."""
    ways = [_bags, _places] if are_tokens else [_flat, _frequencies]
    for way in ways:
        rows, again = way(x), None if other is None else way(other)
        if not rows.shape[1] or not np.isfinite(rows).all() or (again is not None and not np.isfinite(again).all()):
            continue
        middle, spread = rows.mean(axis=0), rows.std(axis=0)
        kept = spread > 1e-7
        if kept.any():
            yield (
                ((rows - middle) / np.maximum(spread, 1e-7))[:, kept],
                (None if again is None else np.clip((again - middle) / np.maximum(spread, 1e-7), -30, 30)[:, kept]),
            )


def _fewer(rows: Array) -> Array:
    if rows.shape[1] > FEATURES:
        rows = rows[:, np.sort(np.random.default_rng(31).choice(rows.shape[1], FEATURES, replace=False))]
    return rows.astype(np.float32)


def _flat(x: Array) -> Array:
    return _fewer(x.reshape(len(x), -1))


def _frequencies(x: Array) -> Array:
    """How much there is of each frequency, over steps or pixels; nothing of tables."""
    if x.ndim < 3:
        return np.empty((len(x), 0), np.float32)
    axes = (1,) if x.ndim == 3 and x.shape[2] <= 16 else (1, 2)
    return _fewer(np.log1p(np.abs(np.fft.rfftn(x.astype(np.float32), axes=axes))).reshape(len(x), -1))


def _bags(x: Array) -> Array:
    """How often each token, and each pair of neighbours, is there, in so many places of a table."""
    rows = x.reshape(len(x), -1).astype(np.int64)
    found = np.zeros((len(x), FEATURES), np.float32)
    sample = np.arange(len(x))[:, None]
    np.add.at(found, (sample, rows % (FEATURES // 2)), (rows != 0) * np.float32(1))
    pairs = (rows[:, :-1] * 7919 + rows[:, 1:]) % (FEATURES // 2) + FEATURES // 2
    np.add.at(found, (sample, pairs), (rows[:, 1:] != 0) * np.float32(1))
    return np.sqrt(found)


def _places(x: Array) -> Array:
    """Where each token is, from -1 to 1, summed: of two of them a straight line sees which comes first."""
    rows = x.reshape(len(x), -1).astype(np.int64)
    found = np.zeros((len(x), FEATURES), np.float32)
    where = np.linspace(-1, 1, rows.shape[1], dtype=np.float32)
    np.add.at(found, (np.arange(len(x))[:, None], rows % FEATURES), (rows != 0) * where)
    return found


def _told(rows: Array, labels: Array, others: Array | None) -> Iterator[tuple[Array, Array | None]]:
    """What neighbours, and straight lines, say of each sample's label without it, and of the labels of others."""
    alike = rows @ rows.T
    lengths = np.diag(alike) / 2
    asked = None if others is None else others @ rows.T
    without = np.where(np.eye(len(rows), dtype=bool), -np.inf, alike - lengths)
    yield _of_nearest(without, labels), None if asked is None else _of_nearest(asked - lengths, labels)
    for penalty in PENALTIES:
        inverse = np.linalg.inv(alike + np.float32(2 * penalty * lengths.mean()) * np.eye(len(rows), dtype=np.float32))
        line = inverse @ labels
        yield labels - line / np.diag(inverse)[:, None], None if asked is None else asked @ line


def _of_nearest(nearness: Array, labels: Array) -> Array:
    found: Array = labels[np.argpartition(nearness, -NEIGHBOURS, axis=1)[:, -NEIGHBOURS:]].mean(axis=1)
    return found


def _deviations(labels: Array, told: Array, chance: np.random.Generator) -> float:
    """By how many standard deviations what is told fits labels better than exchanged ones."""
    told = told - told.mean(axis=0)
    fits = float((labels * told).sum())
    exchanged = [float((labels[chance.permutation(len(labels))] * told).sum()) for _ in range(EXCHANGES)]
    return (fits - float(np.mean(exchanged))) / max(float(np.std(exchanged)), 1e-9)
