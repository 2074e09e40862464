"""Merges and steps ranges of the weights separately. Runs on workers; pure.

The P values of all tensors, one after another, form a row. A *slice* is a part ``[begin, end)`` of this row, and may
begin and end inside tensors. As arrays, a slice is a list of views: for each overlapping tensor its values in the
slice. Operations on single values, such as sums in slot order, rounding and the steps of outer optimizers, give the
same bits for any division into slices. Rules that need a whole tensor or a whole update give other bits: ``fits``
recognises them.

A *piece* is a slice of a slice. Pieces are sent, merged and stepped one at a time, so one piece travels while another
is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ddlf.algorithms.codec import CODEC, Codec
from ddlf.algorithms.encoding import EncodedUpdate, decode_update
from ddlf.algorithms.flat_weights import Slice, overlapped
from ddlf.algorithms.merge import Rule
from ddlf.algorithms.outer import OuterOptimizer, State
from ddlf.algorithms.weights import Tensor
from ddlf.errors import ConfigError

PIECE = 1 << 20
"""Number of values in a piece: 4 MB of float32."""


def pieces(part: Slice, length: int = PIECE) -> list[Slice]:
    """Cut a range of values into pieces of one length. The last piece may be shorter."""
    begin, end = part
    return [(start, min(start + length, end)) for start in range(begin, end, length)]


def within(part: Slice, parts: Iterable[tuple[Slice, Any]]) -> list[tuple[Slice, Any]]:
    """Yield the overlaps of labelled ranges with another range, in order. The label may be a worker, for example.

    Raises:
        ConfigError: The labelled ranges do not cover the range.
    """
    begin, end = part
    overlaps = []
    for (low, high), label in sorted(parts, key=lambda labelled: labelled[0]):
        if begin < high and low < end and begin < end and low <= begin:
            overlaps.append(((begin, min(high, end)), label))
            begin = min(high, end)
    if begin < end:
        raise ConfigError(f"no range has the values {begin:,} to {end:,}")
    return overlaps


def runs(arrays: Sequence[Tensor], chosen: Collection[int]) -> list[Slice]:
    """Return the ranges of values that belong to the arrays with these numbers. Neighbouring ranges become one."""
    ranges: list[Slice] = []
    ends = accumulate(array.size for array in arrays)
    for i, (array, end) in enumerate(zip(arrays, ends, strict=True)):
        begin = end - array.size
        if i in chosen and begin < end:
            begin = ranges.pop()[0] if ranges and ranges[-1][1] == begin else begin
            ranges.append((begin, end))
    return ranges


def crossed(part: Slice, parts: Iterable[Slice]) -> list[Slice]:
    """Return the parts of a range that overlap with other ranges, which are in order."""
    both = [(max(part[0], begin), min(part[1], end)) for begin, end in parts]
    return [(begin, end) for begin, end in both if begin < end]


def cut_range(arrays: Sequence[Tensor], part: Slice) -> list[Tensor]:
    """Return a slice of arrays: for each overlapping array its values in the slice, flat.

    They are views of contiguous arrays.
    """
    return [arrays[i].reshape(-1)[low:high] for i, low, high in overlapped(arrays, part)]


def write_range(arrays: Sequence[Tensor], part: Slice, values: Sequence[Tensor]) -> None:
    """Write a slice into contiguous arrays of the caller.

    Raises:
        ConfigError: The slice has another length or type.
    """
    overlaps = overlapped(arrays, part)
    fits = len(values) == len(overlaps) and all(
        isinstance(new, np.ndarray) and (new.shape, new.dtype) == ((high - low,), arrays[i].dtype)
        for new, (i, low, high) in zip(values, overlaps, strict=True)
    )
    if not fits:
        actual = [f"{new.dtype} {new.shape}" if isinstance(new, np.ndarray) else type(new).__name__ for new in values]
        expected = [f"{arrays[i].dtype} ({high - low},)" for i, low, high in overlaps]
        raise ConfigError(f"values {part[0]:,} to {part[1]:,} should be {expected}, but are {actual}")
    for new, (i, low, high) in zip(values, overlaps, strict=True):
        arrays[i].reshape(-1)[low:high] = new


def take_encoded(encoded: EncodedUpdate, like: Sequence[Tensor], part: Slice) -> EncodedUpdate:
    """Return a range of an encoded update, which ``decode_slice`` can decode.

    Args:
        encoded: Whole update from ``encode_update``.
        like: Arrays with the shapes of the tensors.
        part: Begin and end of the slice.
    """
    codec, payloads = CODEC.read(encoded["codec"]), []
    for i, low, high in overlapped(like, part):
        payload = encoded["payloads"][i]
        raw = payload.get("raw")
        payloads.append(
            codec.part(payload, like[i].shape, low, high) if raw is None else {"raw": raw.reshape(-1)[low:high]}
        )
    return {"codec": encoded["codec"], "payloads": payloads}


def decode_slice(encoded: EncodedUpdate, like: Sequence[Tensor], part: Slice) -> list[Tensor]:
    """Return the values of a range of an encoded update. They equal the same range of the whole decoded update.

    Args:
        encoded: The slice as it arrived.
        like: Arrays with the shapes and types of the whole tensors.
        part: Begin and end of the slice.

    Raises:
        ConfigError: The slice does not fit, or is malformed.
    """
    return decode_update(
        encoded, cut_range(like, part), [(like[i].shape, low, high) for i, low, high in overlapped(like, part)]
    )


def stepped(
    merge: Rule,
    outer: OuterOptimizer,
    state: State,
    weights: Sequence[Tensor],
    updates: Sequence[tuple[Sequence[Tensor], int]],
    trainable: Sequence[bool],
    sizes: Sequence[int],
) -> tuple[State, list[Tensor]]:
    """Merge the updates of a slice, and apply the result to the slice of the weights.

    Args:
        merge: A merge rule that ``fits`` accepts.
        outer: An outer optimizer that ``fits`` accepts.
        state: State of ``outer`` for the slice. Neither it nor the weights are modified.
        weights: Slice of the weights.
        updates: For each slot, in slot order, the range of its update and its number of samples.
        trainable: For each tensor of the slice, whether it is trained.
        sizes: Number of values in each whole tensor of the slice.

    Returns:
        New state and weights of the slice. They have the same bits as after a step of the whole.
    """
    # NumPy sums a single value of each slot in another order than rows of values. A copy of the value beside it
    # makes a row, so that the bits stay the same.
    alone = [i for i, (w, size) in enumerate(zip(weights, sizes, strict=True)) if w.size == 1 < size]

    def doubled(arrays: Sequence[Tensor]) -> list[Tensor]:
        return [np.repeat(array, 2) if i in alone else array for i, array in enumerate(arrays)]

    running = merge.start(len(updates), like=doubled(weights))
    for slot, (update, samples) in enumerate(updates):
        running.add(slot, doubled(update), samples)
    merged = [array[:1] if i in alone else array for i, array in enumerate(running.result())]
    return outer.update(state, weights, merged, trainable)


def fits(rule: Rule | OuterOptimizer | Codec) -> bool:
    """Return whether a rule works value by value, so that it can be applied to slices separately."""
    return bool(getattr(rule, "by_value", False))


def moved(part: Slice, begin: int) -> Slice:
    """Return a range with its limits counted from the beginning of another range."""
    return part[0] - begin, part[1] - begin


def size_of(weights: Sequence[Tensor]) -> int:
    """Return the number of values of all weights."""
    return sum(w.size for w in weights)
