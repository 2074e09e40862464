"""Computes facts of an app's arrays, compares their samples, and tests whether labels relate to samples.

Runs on the master, with NumPy only.

It reads each array once or twice in pieces, so that it never allocates as much memory as the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddlf.data.trees import leaves
from ddlf.extras.advice.facts import ArrayFacts, LabelFacts, SampleFacts, Shared

SAMPLED = 5_000
"""Maximum number of samples to examine feature by feature, chosen by a fixed seed."""
VALUES = 1 << 20
"""Maximum number of values to examine. At least one sample is examined."""
PIECE = 1 << 22
"""Values to examine at once: 16 MB of float32."""
COMPARED_BYTES = 1 << 28
"""Maximum bytes to compare sample by sample. From larger data, a fixed seed chooses samples."""
SHOWN = 5
MOST_CLASSES = 100_000
MOST_FEATURES = 20_000
ON_A_LINE = 0.999999
NEARLY, ALIKE = 0.99, 0.9
"""A feature follows the target if its correlation is above the first number, and all others are below the second."""
LEAST_FEATURES, ENOUGH_ROWS = 3, 50
OVERLAPPING = 1_000
"""Number of windows of another part to search for in training."""
LEAST_STEPS = 4
IN_ORDER, MOST_IN_ORDER = 3, 500
"""Minimum number of classes in order along a feature for a finding, because fewer may be in order by chance; and
maximum number of features to examine."""
MOSTLY = 0.9
"""If this share of samples has the same value of a feature, such as a rare word or a picture's corner, its scale does
not count."""
SIDE = 8
"""Width and height of a thumbnail in pixels."""
LEAST_SIDE = 16
ALIKE_COSINE = 0.9
"""Two thumbnails may be the same picture if the cosine of their mean-free pixels is above this number."""
NEARER = 0.5
"""Maximum distance of the nearest picture, as a share of the second nearest. Simple pictures, such as digits, have many
similar ones."""
PICTURES_AT_ONCE = 256
MOST_PICTURES = 200_000
NEAR_SHOWN = 10
Numbers = np.ndarray[Any, Any]
LEAST_RELATED, MOST_RELATED = 200, 600
"""Minimum and maximum number of samples."""
FEATURES = 2048
"""Maximum number of features of a sample. From more features, a fixed seed chooses some."""
WIDEST_LABEL = 100
"""Maximum number of values of a label, or of classes."""
NEIGHBOURS = 5
PENALTIES = (0.1, 10.0)
EXCHANGES = 60


def described(name: str, part: str, array: Any) -> ArrayFacts:
    """Return facts about one array of an app's data, such as its shape and the range of its values.

    Args:
        name: The array's name in code, such as ``x_train['left']``.
        part: ``"train"``, ``"val"`` or ``"test"``.
        array: A NumPy array.
    """
    letter = name[0]
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub" or not array.ndim or not array.size:
        kind = str(array.dtype) if isinstance(array, np.ndarray) else type(array).__name__
        return ArrayFacts(name=name, part=part, letter=letter, shape=getattr(array, "shape", ()), dtype=kind)
    facts: dict[str, Any] = _range(array)
    if letter == "x":
        facts |= _features(array)
    if letter == "y":
        facts["labels"] = _labels(array, facts)
    return ArrayFacts(name=name, part=part, letter=letter, shape=array.shape, dtype=str(array.dtype), **facts)


def sample_numbers(samples: int, limit: int) -> Any:
    """Draw at most ``limit`` sample numbers with a fixed seed, and return them sorted. If ``limit`` includes all samples,
    return a slice.
    """
    if samples <= limit:
        return slice(None)
    return np.sort(np.random.default_rng(17).choice(samples, limit, replace=False))


def _random_rows(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a random part of an array's samples, small enough to compute statistics of it quickly."""
    rows: np.ndarray[Any, Any] = array[
        sample_numbers(len(array), max(1, min(SAMPLED, VALUES // max(1, array[0].size))))
    ]
    return rows


def _pieces(array: np.ndarray[Any, Any]) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    rows = max(1, PIECE // max(1, array[0].size))
    yield from ((start, array[start : start + rows]) for start in range(0, len(array), rows))


def _range(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the range of all values, the count of non-finite ones, and the standard deviation of some samples."""
    non_finite, rows = 0, list[int]()
    low, high = math.inf, -math.inf
    if array.dtype.kind == "f":
        for start, part in _pieces(array):
            bounds = float(part.min()), float(part.max())
            if not np.isfinite(bounds).all():
                is_wrong = ~np.isfinite(part)
                non_finite += int(np.count_nonzero(is_wrong))
                if len(rows) < SHOWN:
                    indices = np.flatnonzero(is_wrong.reshape(len(part), -1).any(axis=1))[: SHOWN - len(rows)]
                    rows += [start + int(number) for number in indices]
                finite = part[~is_wrong]
                bounds = (float(finite.min()), float(finite.max())) if finite.size else (math.inf, -math.inf)
            low, high = min(low, bounds[0]), max(high, bounds[1])
    else:
        low, high = float(array.min()), float(array.max())
    is_whole = array.dtype.kind != "f"
    values = _random_rows(array).ravel()[:VALUES].astype(np.float64)
    values = values[np.isfinite(values)]
    if not is_whole and values.size and high - low < 1e9:
        is_whole = bool((values == np.rint(values)).all())
    return {
        "non_finite": non_finite,
        "non_finite_rows": tuple(rows),
        "low": low if math.isfinite(low) else 0.0,
        "high": high if math.isfinite(high) else 0.0,
        "std": float(values.std()) if values.size else 0.0,
        "is_whole": is_whole,
    }


def _features(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return facts about the scales of an array's features, measured on some samples. In pictures and sequences, a
    feature is a channel."""
    rows = _random_rows(array)
    is_table = array.ndim == 2
    flat = rows.reshape(len(rows), -1) if is_table else rows.reshape(-1, rows.shape[-1] if rows.ndim > 2 else 1)
    if flat.shape[1] > MOST_FEATURES:
        flat = flat[:, :MOST_FEATURES]
    values = np.nan_to_num(flat.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    spread, middle = values.std(axis=0, dtype=np.float64), values.mean(axis=0, dtype=np.float64)
    facts: dict[str, Any] = {"loudest": float(np.sqrt(spread**2 + middle**2).max())}
    is_constant = np.ptp(values, axis=0) == 0
    if is_table and is_constant.any() and len(array) > 1:
        candidates = np.flatnonzero(is_constant)
        facts["constant"] = tuple(int(number) for number in candidates if (array[:, number] == array[0, number]).all())
    if is_table and values.shape[1] > 1:
        medians = np.median(values, axis=0)
        is_varied = ~is_constant & ((values == medians).mean(axis=0) < MOSTLY)
        facts["scales"] = (
            (float(spread[is_varied].min()), float(spread[is_varied].max())) if is_varied.any() else (0.0, 0.0)
        )
    if array.dtype.kind in "iu" and is_table and array.shape[1] > 1:
        facts["padded"] = float(((rows[:, -1] == 0) & (rows != 0).any(axis=1)).mean())
        is_token = rows != 0
        has_token_before, has_token_behind = (
            np.logical_or.accumulate(mask, axis=1) for mask in (is_token, is_token[:, ::-1])
        )
        facts["pierced"] = float((~is_token & has_token_before & has_token_behind[:, ::-1]).any(axis=1).mean())
        if (tokens := rows[rows != 0]).size:
            values, counts = np.unique(tokens, return_counts=True)
            facts["commonest"] = int(values[counts.argmax()]), float(counts.max() / tokens.size)
    return facts


def _labels(array: np.ndarray[Any, Any], facts: dict[str, Any]) -> LabelFacts:
    """Return the facts of an array of labels: the kind of labels, such as one-hot rows, and the counts of classes."""
    rows = array.reshape(len(array), -1)
    width = rows.shape[1]
    if width == 1 and array.ndim <= 2:
        if (
            not facts["is_whole"]
            or facts["non_finite"]
            or not -MOST_CLASSES < facts["low"] <= facts["high"] < MOST_CLASSES
        ):
            return LabelFacts()
        flat = rows[:, 0].astype(np.int64)
        values, counts = np.unique(flat, return_counts=True)
        class_counts = {int(value): int(count) for value, count in zip(values, counts, strict=True)}
        return LabelFacts(kind="numbers", counts=class_counts, is_sorted=_is_sorted(flat, len(values)))
    if facts["non_finite"] or facts["low"] < 0 or array.ndim != 2:
        return LabelFacts()
    sums = rows.sum(axis=1, dtype=np.float64)
    bounds = float(sums.min()), float(sums.max())
    in_rows = max(abs(bounds[0] - 1), abs(bounds[1] - 1)) < 1e-3
    if facts["is_whole"] and facts["high"] <= 1 and ((rows == 0) | (rows == 1)).all():
        if not in_rows:
            kinds, codes = np.unique(rows, axis=0, return_inverse=True)
            return LabelFacts(kind="many_hot", sums=bounds, is_sorted=_is_sorted(codes.reshape(-1), len(kinds)))
        flat = rows.argmax(axis=1)
        counts = np.bincount(flat, minlength=width)
        class_counts = {number: int(count) for number, count in enumerate(counts)}
        return LabelFacts(
            kind="one_hot", counts=class_counts, sums=bounds, is_sorted=_is_sorted(flat, int((counts > 0).sum()))
        )
    return LabelFacts(kind="shares" if in_rows else "real", sums=bounds)


def _is_sorted(flat: np.ndarray[Any, Any], classes: int) -> bool:
    """Return whether the samples of each class are consecutive."""
    return bool(classes > 1 and len(flat) >= 5 * classes and np.count_nonzero(np.diff(flat)) == classes - 1)


def compared(data: dict[str, Any]) -> SampleFacts:
    """Compare samples with each other to find duplicates within the training part, and between it and the other parts.

    Args:
        data: Trees of arrays by name, such as ``x_train``.
    """
    x = _arrays(data.get("x_train"), "x_train")
    if not x or len(x[0][1]) < 2:
        return SampleFacts()
    bytes_of_one = sum(array[0].nbytes for _, array in x) or 1
    most = max(1, COMPARED_BYTES // bytes_of_one)
    numbers = np.arange(len(x[0][1]))[sample_numbers(len(x[0][1]), most)]
    keys = _keys(x, numbers)
    first: dict[int, int] = {}
    doubled = [(first[key], int(n)) for n, key in zip(numbers, keys, strict=True) if first.setdefault(key, int(n)) != n]
    doubled = [(a, b) for a, b in doubled if _equal_samples(x, a, x, b)]
    facts: dict[str, Any] = {
        "examined": len(numbers),
        "distinct": len(numbers) - len(doubled),
        "doubled": tuple(doubled[:SHOWN]),
    }
    y = _arrays(data.get("y_train"), "y_train")
    if y and doubled:
        against = [(a, b) for a, b in doubled if not _equal_samples(y, a, y, b)]
        facts |= {"contradicting": len(against), "pairs": tuple(against[:SHOWN])}
    facts["shared"] = tuple(
        shared
        for part in ("val", "test")
        if (shared := _shared(x, first, part, _arrays(data.get(f"x_{part}"), f"x_{part}"), most)) is not None
    )
    facts["leaks"] = tuple(_leaks(x, y))
    facts["linear_feature"] = None if facts["leaks"] else _linear_feature(x, y)
    facts["overlapping"] = tuple(
        (part, *overlap)
        for part in ("val", "test")
        if (overlap := _overlapping(x, _arrays(data.get(f"x_{part}"), f"x_{part}"))) is not None
    )
    facts["copied"] = len(x) == len(y) == 1 and x[0][1].shape == y[0][1].shape and np.array_equal(x[0][1], y[0][1])
    return SampleFacts(**facts)


def _arrays(tree: Any, name: str) -> list[tuple[str, np.ndarray[Any, Any]]]:
    arrays = [] if tree is None else list(leaves(tree, name))
    fit = all(isinstance(array, np.ndarray) and array.ndim and array.dtype.kind in "fiub" for _, array in arrays)
    return arrays if fit and len({len(array) for _, array in arrays}) == 1 else []


def _keys(arrays: list[tuple[str, np.ndarray[Any, Any]]], numbers: Any) -> list[int]:
    if len(arrays) == 1:
        array = arrays[0][1]
        return [hash(array[number].tobytes()) for number in numbers]
    return [hash(b"".join(array[number].tobytes() for _, array in arrays)) for number in numbers]


def _equal_samples(
    first: list[tuple[str, np.ndarray[Any, Any]]],
    first_row: int,
    second: list[tuple[str, np.ndarray[Any, Any]]],
    second_row: int,
) -> bool:
    return all(
        first_array[first_row].tobytes() == second_array[second_row].tobytes()
        for (_, first_array), (_, second_array) in zip(first, second, strict=True)
    )


def _shared(
    x: list[tuple[str, np.ndarray[Any, Any]]],
    first: dict[int, int],
    part: str,
    other: list[tuple[str, np.ndarray[Any, Any]]],
    most: int,
) -> Shared | None:
    """Return the samples of another part, such as the test, that equal a training sample; None without such samples."""
    are_comparable = len(x) == len(other) and all(
        (a.shape[1:], a.dtype) == (b.shape[1:], b.dtype) for (_, a), (_, b) in zip(x, other, strict=False)
    )
    if not are_comparable or not len(other[0][1]):
        return None
    numbers = np.arange(len(other[0][1]))[sample_numbers(len(other[0][1]), most)]
    pairs = [(first[key], int(n)) for n, key in zip(numbers, _keys(other, numbers), strict=True) if key in first]
    pairs = [(a, b) for a, b in pairs if _equal_samples(x, a, other, b)]
    return Shared(part=part, count=len(pairs), of=len(numbers), pairs=tuple(pairs[:SHOWN]))


def _overlapping(
    x: list[tuple[str, np.ndarray[Any, Any]]], other: list[tuple[str, np.ndarray[Any, Any]]]
) -> tuple[int, int] | None:
    """Return the number of windows in another part that equal a training window shifted by one step."""
    if len(x) != 1 or len(other) != 1:
        return None
    windows, other_windows = x[0][1], other[0][1]
    fit = (
        windows.ndim in (2, 3)
        and windows.dtype.kind == "f"
        and windows.shape[1:] == other_windows.shape[1:]
        and windows.dtype == other_windows.dtype
    )
    if not fit or windows.shape[1] < LEAST_STEPS or windows.nbytes > COMPARED_BYTES // 4 or not len(other_windows):
        return None
    tested = other_windows[sample_numbers(len(other_windows), OVERLAPPING)]
    starts, ends = ({window.tobytes() for window in part} for part in (windows[:, :-1], windows[:, 1:]))
    # A constant window would match everywhere.
    moves = [window for window in tested if (window[1:] != window[:-1]).any()]
    count = sum(window[1:].tobytes() in starts or window[:-1].tobytes() in ends for window in moves)
    return count, len(tested)


def _leaks(
    x: list[tuple[str, np.ndarray[Any, Any]]], y: list[tuple[str, np.ndarray[Any, Any]]]
) -> Iterator[tuple[str, int]]:
    """Yield the features of tables that only encode the label with other numbers, and so reveal it."""
    if len(y) != 1 or len(y[0][1]) < 50:
        return
    labels = y[0][1].reshape(len(y[0][1]), -1)
    chosen_rows = sample_numbers(len(labels), SAMPLED)
    targets = labels[chosen_rows].argmax(axis=1) if labels.shape[1] > 1 else labels[chosen_rows, 0]
    values, flat = np.unique(targets, return_inverse=True)
    if len(values) < 2 or not np.isfinite(values).all():
        return
    for name, array in x:
        is_window = array.ndim == 3 and labels.shape[1] == 1
        if (array.ndim != 2 and not is_window) or not 1 < array[0].size <= MOST_FEATURES:
            continue
        rows = array[chosen_rows].reshape(len(flat), -1)
        if is_window and len(values) <= 0.2 * len(flat):
            continue
        if len(values) > 0.2 * len(flat):  # a regression target: look for a feature with another unit and origin
            yield from ((name, column) for column in _linear_columns(rows, np.asarray(targets, np.float64)))
            continue
        if len(values) >= IN_ORDER and rows.shape[1] <= MOST_IN_ORDER:
            yield from (
                (name, column)
                for column in range(rows.shape[1])
                if _separates_classes(rows[:, column], flat, len(values))
            )
        # A copy of the label has one value per class. Some samples suffice to exclude most columns.
        candidates = np.ones(rows.shape[1], bool)
        for number in range(min(len(values), 50)):
            first, last = np.flatnonzero(flat == number)[[0, -1]]
            candidates &= rows[first] == rows[last]
        for column in np.flatnonzero(candidates):
            kinds, inverse = np.unique(rows[:, column], return_inverse=True)
            if len(kinds) == len(values) and len(set(zip(inverse.tolist(), flat.tolist(), strict=True))) == len(kinds):
                yield name, int(column)


def _separates_classes(column: np.ndarray[Any, Any], flat: np.ndarray[Any, Any], classes: int) -> bool:
    """Return whether each class occupies its own range of a column's values, so that the column reveals the class."""
    order = np.argsort(column, kind="stable")
    return bool(np.count_nonzero(np.diff(flat[order])) == classes - 1 and len(np.unique(column)) > 2 * classes)


def _linear_feature(x: list[tuple[str, np.ndarray[Any, Any]]], y: list[tuple[str, np.ndarray[Any, Any]]]) -> Any:
    """Return the feature of a table that is almost linear in the target.

    None if several features are, as in a time series.
    """
    if len(x) != 1 or len(y) != 1 or x[0][1].ndim != 2 or y[0][1][0].size != 1 or len(y[0][1]) < ENOUGH_ROWS:
        return None
    name, array = x[0]
    chosen_rows = sample_numbers(len(array), SAMPLED)
    target = y[0][1].reshape(-1)[chosen_rows].astype(np.float64)
    if not LEAST_FEATURES <= array.shape[1] <= MOST_FEATURES or len(np.unique(target)) < 0.2 * len(target):
        return None
    correlations = _correlations(array[chosen_rows], target)
    if correlations is None:
        return None
    second, first = np.argsort(correlations)[-2:]
    return (
        (name, int(first), float(correlations[first]))
        if correlations[first] > NEARLY > ALIKE > correlations[second]
        else None
    )


def _linear_columns(rows: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> Iterator[int]:
    """Yield the numbers of the columns that are almost linear in a target."""
    if (correlations := _correlations(rows, target)) is not None:
        yield from (int(column) for column in np.flatnonzero(correlations > ON_A_LINE))


def _correlations(rows: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> Any:
    """Return the absolute correlation of each column with a target; None if it is not defined."""
    if not np.isfinite(rows).all() or not np.isfinite(target).all() or target.std() == 0:
        return None
    values = rows.astype(np.float64)
    values -= values.mean(axis=0)
    target = target - target.mean()
    norms = np.sqrt((values**2).sum(axis=0) * (target**2).sum())
    return np.abs(target @ values) / np.where(norms == 0, np.inf, norms)


def near_duplicates(x: Any, other: Any) -> dict[str, Any] | None:
    """Find pictures in another part, such as the test, that nearly equal a training picture. Return None if the arrays
    are not pictures.

    Thumbnails of 8 x 8 pixels are compared after their means are subtracted. A picture of the other part is a near
    duplicate of the nearest training picture if their cosine is above 0.9 and their distance at most half of the
    distance to the second nearest.

    Args:
        x: Training pictures, of shape (n, height, width, channels).
        other: The pictures of the other part, of shape (n, height, width, channels).

    Returns:
        ``count`` is the number of near duplicates among ``of`` pictures. ``pairs`` has the nearest ones: the number in
        training, and the number in the other part.
    """
    fit = isinstance(x, np.ndarray) and isinstance(other, np.ndarray) and x.ndim == other.ndim == 4
    if not fit or x.shape[1:] != other.shape[1:] or min(x.shape[1:3]) < LEAST_SIDE or not 2 < len(x) <= MOST_PICTURES:
        return None
    thumbnails, other_thumbnails = _thumbnails(x), _thumbnails(other)
    duplicates: list[tuple[float, int, int]] = []
    for start in range(0, len(other_thumbnails), PICTURES_AT_ONCE):
        similarities = other_thumbnails[start : start + PICTURES_AT_ONCE] @ thumbnails.T
        best = np.argpartition(similarities, -2, axis=1)[:, -2:]
        values = np.take_along_axis(similarities, best, axis=1)
        first = values.argmax(axis=1)
        row = np.arange(len(similarities))
        cosine, second_cosine = values[row, first], values[row, 1 - first]
        distance, second_distance = (
            np.sqrt(np.maximum(2 - 2 * similarity, 0)) for similarity in (cosine, second_cosine)
        )
        hits = np.flatnonzero((cosine > ALIKE_COSINE) & (distance <= NEARER * second_distance))
        duplicates += [(float(distance[hit]), int(best[hit, first[hit]]), start + int(hit)) for hit in hits]
    duplicates.sort()
    return {"count": len(duplicates), "of": len(other), "pairs": tuple((a, b) for _, a, b in duplicates[:NEAR_SHOWN])}


def _thumbnails(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a thumbnail of each picture as a row with mean 0 and length 1."""
    edges = [np.linspace(0, size, SIDE, endpoint=False).astype(int) for size in x.shape[1:3]]
    sizes = [np.diff([*edge, size]) for edge, size in zip(edges, x.shape[1:3], strict=True)]
    rows = np.empty((len(x), SIDE * SIDE * x.shape[3]), np.float32)
    for start in range(0, len(x), 1024):
        part = np.nan_to_num(x[start : start + 1024].astype(np.float32))
        part = np.add.reduceat(np.add.reduceat(part, edges[0], axis=1), edges[1], axis=2)
        part /= sizes[0][:, None, None] * sizes[1][:, None]
        rows[start : start + 1024] = part.reshape(len(part), -1)
    rows -= rows.mean(axis=1, keepdims=True)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
    return rows


def related(data: dict[str, Any], *, are_tokens: bool) -> dict[str, tuple[float, int]]:
    """Test whether samples and labels belong together: return how much better samples predict their own labels than
    permuted labels. The better of two simple predictors counts.

    Two predictors estimate each label without seeing it: the nearest samples, and ridge regression. Their error is
        compared with the error on permuted labels. The features are the samples' values, and the amplitudes of their
        frequencies, which do not depend on positions. For tokens, the features are the counts of tokens and of pairs of
        neighbours, and the positions of tokens.

    Args:
        data: ``x_train`` and ``y_train``; also ``x_test`` and ``y_test`` if they exist.
        are_tokens: Whether inputs are token numbers.

    Returns:
        ``"train"`` and ``"test"``, each with two numbers: how many standard deviations the prediction is better than
        for permuted labels, and the number of examined samples. Training samples predict the test labels. A part that
        cannot be examined is missing.
    """
    x, y, other, labels = (data.get(name) for name in ("x_train", "y_train", "x_test", "y_test"))
    if x is None or y is None or not (_are_numbers(x, y) and len(x) >= LEAST_RELATED and 2 <= x.ndim <= 4):
        return {}
    chosen_rows = sample_numbers(len(x), MOST_RELATED)
    codes = _coded(y[chosen_rows], y[chosen_rows])
    if codes is None:
        return {}
    other_codes: Numbers | None = None
    if other is not None and labels is not None and _are_numbers(other, labels) and len(other) >= LEAST_RELATED // 2:
        other_chosen = sample_numbers(len(other), MOST_RELATED)
        are_comparable = (other.shape[1:], labels.shape[1:]) == (x.shape[1:], y.shape[1:])
        other, other_codes = (
            other[other_chosen],
            _coded(labels[other_chosen], y[chosen_rows]) if are_comparable else None,
        )
    generator = np.random.default_rng(29)
    best: dict[str, tuple[float, int]] = {}
    for rows, other_rows in _views(x[chosen_rows], other if other_codes is not None else None, are_tokens):
        for predictions, other_predictions in _predicted(rows, codes, other_rows):
            for part, labels, part_predictions in (
                ("train", codes, predictions),
                ("test", other_codes, other_predictions),
            ):
                if labels is not None and part_predictions is not None:
                    best[part] = max(
                        best.get(part, (0.0, len(labels))),
                        (_deviations(labels, part_predictions, generator), len(labels)),
                    )
    return best


def _are_numbers(x: Any, y: Any) -> bool:
    numbers = all(isinstance(array, np.ndarray) and array.ndim and array.dtype.kind in "fiub" for array in (x, y))
    return bool(numbers and len(x) == len(y) and len(x) and y.ndim <= 2 and y[0].size <= WIDEST_LABEL)


def _coded(labels: Numbers, reference: Numbers) -> Numbers | None:
    """Return labels as rows of numbers for ridge regression: a column for each class, or the real values. None if all
    labels are equal."""
    rows, reference_rows = (array.reshape(len(array), -1).astype(np.float64) for array in (labels, reference))
    if not np.isfinite(rows).all() or not np.isfinite(reference_rows).all():
        return None
    classes = np.unique(reference_rows)
    if rows.shape[1] == 1 and (classes == np.rint(classes)).all() and len(classes) <= WIDEST_LABEL:
        rows, reference_rows = ((array == classes).astype(np.float64) for array in (rows, reference_rows))
    elif rows.shape[1] == 1:  # ranks, so that a few large values do not dominate
        rows = np.searchsorted(classes, rows).astype(np.float64)
        reference_rows = np.searchsorted(classes, reference_rows).astype(np.float64)
    spread = reference_rows.std(axis=0)
    codes: Numbers = ((rows - reference_rows.mean(axis=0)) / np.where(spread > 0, spread, np.inf)).astype(np.float32)
    return codes if (spread > 0).any() else None


def _views(x: Numbers, other: Numbers | None, are_tokens: bool) -> Iterator[tuple[Numbers, Numbers | None]]:
    """Yield, for each kind of features (values, frequencies, tokens), the samples as rows of scaled features. The
    second item has the rows of the other part."""
    transforms = [_bags, _token_positions] if are_tokens else [_flat_rows, _frequencies]
    for transform in transforms:
        rows, other_rows = transform(x), None if other is None else transform(other)
        if (
            not rows.shape[1]
            or not np.isfinite(rows).all()
            or (other_rows is not None and not np.isfinite(other_rows).all())
        ):
            continue
        middle, spread = rows.mean(axis=0), rows.std(axis=0)
        is_varied = spread > 1e-7
        if is_varied.any():
            yield (
                ((rows - middle) / np.maximum(spread, 1e-7))[:, is_varied],
                (
                    None
                    if other_rows is None
                    else np.clip((other_rows - middle) / np.maximum(spread, 1e-7), -30, 30)[:, is_varied]
                ),
            )


def _limit_features(rows: Numbers) -> Numbers:
    if rows.shape[1] > FEATURES:
        rows = rows[:, np.sort(np.random.default_rng(31).choice(rows.shape[1], FEATURES, replace=False))]
    return rows.astype(np.float32)


def _flat_rows(x: Numbers) -> Numbers:
    return _limit_features(x.reshape(len(x), -1))


def _frequencies(x: Numbers) -> Numbers:
    """Return the amplitude of each frequency over steps or pixels; None for tables."""
    if x.ndim < 3:
        return np.empty((len(x), 0), np.float32)
    axes = (1,) if x.ndim == 3 and x.shape[2] <= 16 else (1, 2)
    return _limit_features(np.log1p(np.abs(np.fft.rfftn(x.astype(np.float32), axes=axes))).reshape(len(x), -1))


def _bags(x: Numbers) -> Numbers:
    """Return for each sample the hashed counts of its tokens and of its pairs of neighbouring tokens."""
    rows = x.reshape(len(x), -1).astype(np.int64)
    counts = np.zeros((len(x), FEATURES), np.float32)
    sample = np.arange(len(x))[:, None]
    np.add.at(counts, (sample, rows % (FEATURES // 2)), (rows != 0) * np.float32(1))
    pairs = (rows[:, :-1] * 7919 + rows[:, 1:]) % (FEATURES // 2) + FEATURES // 2
    np.add.at(counts, (sample, pairs), (rows[:, 1:] != 0) * np.float32(1))
    return np.sqrt(counts)


def _token_positions(x: Numbers) -> Numbers:
    """Return the sum of each token's positions, from -1 to 1.

    They show a linear model which of two tokens comes first.
    """
    rows = x.reshape(len(x), -1).astype(np.int64)
    sums = np.zeros((len(x), FEATURES), np.float32)
    positions = np.linspace(-1, 1, rows.shape[1], dtype=np.float32)
    np.add.at(sums, (np.arange(len(x))[:, None], rows % FEATURES), (rows != 0) * positions)
    return sums


def _predicted(rows: Numbers, labels: Numbers, other_rows: Numbers | None) -> Iterator[tuple[Numbers, Numbers | None]]:
    """Yield the predicted labels of the nearest neighbours, then of ridge regression. Each training sample is predicted
    from the other ones; the second item has the predictions for the other part."""
    products = rows @ rows.T
    lengths = np.diag(products) / 2
    other_products = None if other_rows is None else other_rows @ rows.T
    without_self = np.where(np.eye(len(rows), dtype=bool), -np.inf, products - lengths)
    yield (
        _mean_of_nearest(without_self, labels),
        None if other_products is None else _mean_of_nearest(other_products - lengths, labels),
    )
    for penalty in PENALTIES:
        inverse = np.linalg.inv(
            products + np.float32(2 * penalty * lengths.mean()) * np.eye(len(rows), dtype=np.float32)
        )
        line = inverse @ labels
        yield labels - line / np.diag(inverse)[:, None], None if other_products is None else other_products @ line


def _mean_of_nearest(nearness: Numbers, labels: Numbers) -> Numbers:
    means: Numbers = labels[np.argpartition(nearness, -NEIGHBOURS, axis=1)[:, -NEIGHBOURS:]].mean(axis=1)
    return means


def _deviations(labels: Numbers, predictions: Numbers, chance: np.random.Generator) -> float:
    """Return how much better predictions fit the labels than they fit permuted labels, in standard deviations."""
    predictions = predictions - predictions.mean(axis=0)
    fits = float((labels * predictions).sum())
    exchanged = [float((labels[chance.permutation(len(labels))] * predictions).sum()) for _ in range(EXCHANGES)]
    return (fits - float(np.mean(exchanged))) / max(float(np.std(exchanged)), 1e-9)
