"""What there is to say of an app's arrays. Each is gone over once or twice, in pieces, so that nothing as large as the data is made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddlf.data.trees import leaves
from ddlf.extras.advice.facts import Array, Labels, Rows, Shared

SAMPLED = 5_000
"""So many samples are looked at feature by feature at most; which follows from a fixed seed."""
VALUES = 1 << 20
"""Nor more than so many values, of one sample at least."""
PIECE = 1 << 22
"""Values that are looked at at once: 16 MB of float32."""
COMPARED_BYTES = 1 << 28
"""So much data is compared sample by sample; of more than that some, by a fixed seed."""
SHOWN = 5
MOST_CLASSES = 100_000
MOST_FEATURES = 20_000
ON_A_LINE = 0.999999
NEARLY, ALIKE = 0.99, 0.9
"""Correlation from which on one feature follows the target, where no other one comes to the second."""
LEAST_FEATURES, ENOUGH_ROWS = 3, 50
OVERLAPPING = 1_000
"""Windows that are looked for in training."""
LEAST_STEPS = 4
IN_ORDER, MOST_IN_ORDER = 3, 500
"""Classes from which on it is no chance that they lie one behind the other along a feature, and features that are asked."""
MOSTLY = 0.9
"""A feature with one value in so many samples has no scale of its own: a word that is rarely there, the corner of a picture."""


def described(name: str, part: str, array: Any) -> Array:
    """What there is to say of one array.

    Args:
        name: As it is written, ``x_train['left']``.
        part: ``"train"``, ``"val"`` or ``"test"``.
        array: Of NumPy.
    """
    letter = name[0]
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub" or not array.ndim or not array.size:
        kind = str(array.dtype) if isinstance(array, np.ndarray) else type(array).__name__
        return Array(name=name, part=part, letter=letter, shape=getattr(array, "shape", ()), dtype=kind)
    facts: dict[str, Any] = _range(array)
    if letter == "x":
        facts |= _features(array)
    if letter == "y":
        facts["labels"] = _labels(array, facts)
    return Array(name=name, part=part, letter=letter, shape=array.shape, dtype=str(array.dtype), **facts)


def chosen(samples: int, most: int) -> Any:
    """Numbers of some samples, in their order: a fixed choice; a slice where all are."""
    if samples <= most:
        return slice(None)
    return np.sort(np.random.default_rng(17).choice(samples, most, replace=False))


def _some(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Some samples."""
    found: np.ndarray[Any, Any] = array[chosen(len(array), max(1, min(SAMPLED, VALUES // max(1, array[0].size))))]
    return found


def _pieces(array: np.ndarray[Any, Any]) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    rows = max(1, PIECE // max(1, array[0].size))
    yield from ((start, array[start : start + rows]) for start in range(0, len(array), rows))


def _range(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Ends and what is not finite, of all values; spread of some."""
    bad, rows = 0, list[int]()
    low, high = math.inf, -math.inf
    if array.dtype.kind == "f":
        for start, piece in _pieces(array):
            ends = float(piece.min()), float(piece.max())
            if not np.isfinite(ends).all():
                wrong = ~np.isfinite(piece)
                bad += int(np.count_nonzero(wrong))
                if len(rows) < SHOWN:
                    at = np.flatnonzero(wrong.reshape(len(piece), -1).any(axis=1))[: SHOWN - len(rows)]
                    rows += [start + int(number) for number in at]
                good = piece[~wrong]
                ends = (float(good.min()), float(good.max())) if good.size else (math.inf, -math.inf)
            low, high = min(low, ends[0]), max(high, ends[1])
    else:
        low, high = float(array.min()), float(array.max())
    whole = array.dtype.kind != "f"
    values = _some(array).ravel()[:VALUES].astype(np.float64)
    values = values[np.isfinite(values)]
    if not whole and values.size and high - low < 1e9:
        whole = bool((values == np.rint(values)).all())
    return {
        "bad": bad,
        "bad_rows": tuple(rows),
        "low": low if math.isfinite(low) else 0.0,
        "high": high if math.isfinite(high) else 0.0,
        "std": float(values.std()) if values.size else 0.0,
        "whole": whole,
    }


def _features(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Scales of features, of some samples; of pictures and sequences a feature is a channel."""
    some = _some(array)
    is_table = array.ndim == 2
    flat = some.reshape(len(some), -1) if is_table else some.reshape(-1, some.shape[-1] if some.ndim > 2 else 1)
    if flat.shape[1] > MOST_FEATURES:
        flat = flat[:, :MOST_FEATURES]
    values = np.nan_to_num(flat.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    spread, middle = values.std(axis=0, dtype=np.float64), values.mean(axis=0, dtype=np.float64)
    facts: dict[str, Any] = {"loudest": float(np.sqrt(spread**2 + middle**2).max())}
    one_value = np.ptp(values, axis=0) == 0
    if is_table and one_value.any() and len(array) > 1:
        maybe = np.flatnonzero(one_value)
        facts["constant"] = tuple(int(number) for number in maybe if (array[:, number] == array[0, number]).all())
    if is_table and values.shape[1] > 1:
        usual = np.median(values, axis=0)
        own = ~one_value & ((values == usual).mean(axis=0) < MOSTLY)
        facts["scales"] = (float(spread[own].min()), float(spread[own].max())) if own.any() else (0.0, 0.0)
    if array.dtype.kind in "iu" and is_table and array.shape[1] > 1:
        facts["padded"] = float(((some[:, -1] == 0) & (some != 0).any(axis=1)).mean())
        is_token = some != 0
        before, behind = (np.logical_or.accumulate(each, axis=1) for each in (is_token, is_token[:, ::-1]))
        facts["pierced"] = float((~is_token & before & behind[:, ::-1]).any(axis=1).mean())
        if (tokens := some[some != 0]).size:
            values, counts = np.unique(tokens, return_counts=True)
            facts["commonest"] = int(values[counts.argmax()]), float(counts.max() / tokens.size)
    return facts


def _labels(array: np.ndarray[Any, Any], facts: dict[str, Any]) -> Labels:
    """What kind of labels these are."""
    rows = array.reshape(len(array), -1)
    width = rows.shape[1]
    if width == 1 and array.ndim <= 2:
        if not facts["whole"] or facts["bad"] or not -MOST_CLASSES < facts["low"] <= facts["high"] < MOST_CLASSES:
            return Labels()
        flat = rows[:, 0].astype(np.int64)
        values, counts = np.unique(flat, return_counts=True)
        found = {int(value): int(count) for value, count in zip(values, counts, strict=True)}
        return Labels(kind="numbers", counts=found, is_sorted=_is_sorted(flat, len(values)))
    if facts["bad"] or facts["low"] < 0 or array.ndim != 2:
        return Labels()
    sums = rows.sum(axis=1, dtype=np.float64)
    ends = float(sums.min()), float(sums.max())
    in_rows = max(abs(ends[0] - 1), abs(ends[1] - 1)) < 1e-3
    if facts["whole"] and facts["high"] <= 1 and ((rows == 0) | (rows == 1)).all():
        if not in_rows:
            kinds, codes = np.unique(rows, axis=0, return_inverse=True)
            return Labels(kind="many_hot", sums=ends, is_sorted=_is_sorted(codes.reshape(-1), len(kinds)))
        flat = rows.argmax(axis=1)
        counts = np.bincount(flat, minlength=width)
        found = {number: int(count) for number, count in enumerate(counts)}
        return Labels(kind="one_hot", counts=found, sums=ends, is_sorted=_is_sorted(flat, int((counts > 0).sum())))
    return Labels(kind="shares" if in_rows else "real", sums=ends)


def _is_sorted(flat: np.ndarray[Any, Any], classes: int) -> bool:
    """Whether each class lies in one piece, of several samples each."""
    return bool(classes > 1 and len(flat) >= 5 * classes and np.count_nonzero(np.diff(flat)) == classes - 1)


def compared(data: dict[str, Any]) -> Rows:
    """Compare samples with each other, and over parts.

    Args:
        data: Trees of arrays by name, as ``x_train``.
    """
    x = _arrays(data.get("x_train"), "x_train")
    if not x or len(x[0][1]) < 2:
        return Rows()
    bytes_of_one = sum(array[0].nbytes for _, array in x) or 1
    most = max(1, COMPARED_BYTES // bytes_of_one)
    numbers = np.arange(len(x[0][1]))[chosen(len(x[0][1]), most)]
    keys = _keys(x, numbers)
    first: dict[int, int] = {}
    doubled = [(first[key], int(n)) for n, key in zip(numbers, keys, strict=True) if first.setdefault(key, int(n)) != n]
    doubled = [(a, b) for a, b in doubled if _same(x, a, x, b)]
    facts: dict[str, Any] = {
        "looked": len(numbers),
        "distinct": len(numbers) - len(doubled),
        "doubled": tuple(doubled[:SHOWN]),
    }
    y = _arrays(data.get("y_train"), "y_train")
    if y and doubled:
        against = [(a, b) for a, b in doubled if not _same(y, a, y, b)]
        facts |= {"contradicting": len(against), "pairs": tuple(against[:SHOWN])}
    facts["shared"] = tuple(
        shared
        for part in ("val", "test")
        if (shared := _shared(x, first, part, _arrays(data.get(f"x_{part}"), f"x_{part}"), most)) is not None
    )
    facts["leaks"] = tuple(_leaks(x, y))
    facts["follows"] = None if facts["leaks"] else _follows(x, y)
    facts["overlapping"] = tuple(
        (part, *found)
        for part in ("val", "test")
        if (found := _overlapping(x, _arrays(data.get(f"x_{part}"), f"x_{part}"))) is not None
    )
    facts["copied"] = len(x) == len(y) == 1 and x[0][1].shape == y[0][1].shape and np.array_equal(x[0][1], y[0][1])
    return Rows(**facts)


def _arrays(tree: Any, name: str) -> list[tuple[str, np.ndarray[Any, Any]]]:
    found = [] if tree is None else list(leaves(tree, name))
    fit = all(isinstance(array, np.ndarray) and array.ndim and array.dtype.kind in "fiub" for _, array in found)
    return found if fit and len({len(array) for _, array in found}) == 1 else []


def _keys(arrays: list[tuple[str, np.ndarray[Any, Any]]], numbers: Any) -> list[int]:
    if len(arrays) == 1:
        array = arrays[0][1]
        return [hash(array[number].tobytes()) for number in numbers]
    return [hash(b"".join(array[number].tobytes() for _, array in arrays)) for number in numbers]


def _same(
    one: list[tuple[str, np.ndarray[Any, Any]]], a: int, other: list[tuple[str, np.ndarray[Any, Any]]], b: int
) -> bool:
    return all(left[a].tobytes() == right[b].tobytes() for (_, left), (_, right) in zip(one, other, strict=True))


def _shared(
    x: list[tuple[str, np.ndarray[Any, Any]]],
    first: dict[int, int],
    part: str,
    other: list[tuple[str, np.ndarray[Any, Any]]],
    most: int,
) -> Shared | None:
    """What another part has of training's samples."""
    alike = len(x) == len(other) and all(
        (a.shape[1:], a.dtype) == (b.shape[1:], b.dtype) for (_, a), (_, b) in zip(x, other, strict=False)
    )
    if not alike or not len(other[0][1]):
        return None
    numbers = np.arange(len(other[0][1]))[chosen(len(other[0][1]), most)]
    pairs = [(first[key], int(n)) for n, key in zip(numbers, _keys(other, numbers), strict=True) if key in first]
    pairs = [(a, b) for a, b in pairs if _same(x, a, other, b)]
    return Shared(part=part, count=len(pairs), of=len(numbers), pairs=tuple(pairs[:SHOWN]))


def _overlapping(
    x: list[tuple[str, np.ndarray[Any, Any]]], other: list[tuple[str, np.ndarray[Any, Any]]]
) -> tuple[int, int] | None:
    """How many windows of another part go on from one of training, or lead to one: all steps but one are the same."""
    if len(x) != 1 or len(other) != 1:
        return None
    mine, theirs = x[0][1], other[0][1]
    fit = (
        mine.ndim in (2, 3)
        and mine.dtype.kind == "f"
        and mine.shape[1:] == theirs.shape[1:]
        and mine.dtype == theirs.dtype
    )
    if not fit or mine.shape[1] < LEAST_STEPS or mine.nbytes > COMPARED_BYTES // 4 or not len(theirs):
        return None
    some = theirs[chosen(len(theirs), OVERLAPPING)]
    begins, ends = ({one.tobytes() for one in part} for part in (mine[:, :-1], mine[:, 1:]))
    moves = [one for one in some if (one[1:] != one[:-1]).any()]  # what stands still fits everywhere
    count = sum(one[1:].tobytes() in begins or one[:-1].tobytes() in ends for one in moves)
    return count, len(some)


def _leaks(
    x: list[tuple[str, np.ndarray[Any, Any]]], y: list[tuple[str, np.ndarray[Any, Any]]]
) -> Iterator[tuple[str, int]]:
    """Features of tables that are the label, in other numbers."""
    if len(y) != 1 or len(y[0][1]) < 50:
        return
    labels = y[0][1].reshape(len(y[0][1]), -1)
    some = chosen(len(labels), SAMPLED)
    wanted = labels[some].argmax(axis=1) if labels.shape[1] > 1 else labels[some, 0]
    values, flat = np.unique(wanted, return_inverse=True)
    if len(values) < 2 or not np.isfinite(values).all():
        return
    for name, array in x:
        is_window = array.ndim == 3 and labels.shape[1] == 1
        if (array.ndim != 2 and not is_window) or not 1 < array[0].size <= MOST_FEATURES:
            continue
        rows = array[some].reshape(len(flat), -1)
        if is_window and len(values) <= 0.2 * len(flat):
            continue
        if len(values) > 0.2 * len(flat):  # numbers, not classes: a feature that is the same but for unit and origin
            yield from ((name, column) for column in _along(rows, np.asarray(wanted, np.float64)))
            continue
        if len(values) >= IN_ORDER and rows.shape[1] <= MOST_IN_ORDER:
            yield from (
                (name, column) for column in range(rows.shape[1]) if _in_order(rows[:, column], flat, len(values))
            )
        # A copy of the label has one value for each of them: looked at over samples, so that most columns are out at once.
        maybe = np.ones(rows.shape[1], bool)
        for number in range(min(len(values), 50)):
            first, last = np.flatnonzero(flat == number)[[0, -1]]
            maybe &= rows[first] == rows[last]
        for column in np.flatnonzero(maybe):
            kinds, inverse = np.unique(rows[:, column], return_inverse=True)
            if len(kinds) == len(values) and len(set(zip(inverse.tolist(), flat.tolist(), strict=True))) == len(kinds):
                yield name, int(column)


def _in_order(column: np.ndarray[Any, Any], flat: np.ndarray[Any, Any], classes: int) -> bool:
    """Whether each class has a range of its own in a column of many values, as where classes were made of it."""
    order = np.argsort(column, kind="stable")
    return bool(np.count_nonzero(np.diff(flat[order])) == classes - 1 and len(np.unique(column)) > 2 * classes)


def _follows(x: list[tuple[str, np.ndarray[Any, Any]]], y: list[tuple[str, np.ndarray[Any, Any]]]) -> Any:
    """The one feature of a table that a target nearly lies on a line with, while no other does: steps of a series are alike themselves."""
    if len(x) != 1 or len(y) != 1 or x[0][1].ndim != 2 or y[0][1][0].size != 1 or len(y[0][1]) < ENOUGH_ROWS:
        return None
    name, array = x[0]
    some = chosen(len(array), SAMPLED)
    wanted = y[0][1].reshape(-1)[some].astype(np.float64)
    if not LEAST_FEATURES <= array.shape[1] <= MOST_FEATURES or len(np.unique(wanted)) < 0.2 * len(wanted):
        return None
    alike = _correlations(array[some], wanted)
    if alike is None:
        return None
    second, first = np.argsort(alike)[-2:]
    return (name, int(first), float(alike[first])) if alike[first] > NEARLY > ALIKE > alike[second] else None


def _along(rows: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> Iterator[int]:
    """Columns that lie on a line with a target."""
    if (alike := _correlations(rows, wanted)) is not None:
        yield from (int(column) for column in np.flatnonzero(alike > ON_A_LINE))


def _correlations(rows: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> Any:
    """Of each column with a target, without sign; None where there are none."""
    if not np.isfinite(rows).all() or not np.isfinite(wanted).all() or wanted.std() == 0:
        return None
    values = rows.astype(np.float64)
    values -= values.mean(axis=0)
    wanted = wanted - wanted.mean()
    norms = np.sqrt((values**2).sum(axis=0) * (wanted**2).sum())
    return np.abs(wanted @ values) / np.where(norms == 0, np.inf, norms)
