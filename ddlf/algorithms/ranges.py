"""Ranges of the weights. Each is merged and stepped by itself. Runs on workers of the sharded exchange; pure.

The values of all tensors, one after the other, are a row of numbers from 0 to P. A *slice* is a part ``[begin, end)``
of it, whatever the tensors' sizes, and as arrays a list of views: of each tensor that it overlaps the values that are
in it. Operations on single values give the same bits for any cut: sums in slot order, rounding, the steps of outer
optimizers. Rules that need a whole tensor, or a whole update, do change bits: ``fits`` tells them apart.

A *piece* is a slice of a slice: what is sent, merged and stepped at a time, so that a piece travels while another one
is computed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ddlf.algorithms.codec import CODEC, Codec
from ddlf.algorithms.encoding import EncodedUpdate, decode_update
from ddlf.algorithms.merge import Rule
from ddlf.algorithms.outer import OuterOptimizer, State
from ddlf.algorithms.weights import Tensor
from ddlf.errors import ConfigError

Slice = tuple[int, int]
"""The first value and the one behind the last."""

PIECE = 1 << 20
"""Values in a piece: 4 MB of float32."""


def cut(size: int, shards: int) -> list[Slice]:
    """Cut a row of values into slices that differ by at most one value: 10 values on 3 shards are 4, 3, 3.

    Args:
        size: Values, P.
        shards: Slices, S.

    Raises:
        ConfigError: There are no shards, or more than values.
    """
    if not 0 < shards <= size:
        raise ConfigError(
            f"{size:,} values cannot be cut into {shards:,} shards",
            hint="take 1 shard or more, and no more than values",
        )
    least, more = divmod(size, shards)
    ends = accumulate(least + (shard < more) for shard in range(shards))
    return list(pairwise([0, *ends]))


def cut_by_layer(sizes: Sequence[int], layers: Sequence[str], shards: int) -> list[Slice]:
    """Cut a row of values where layers end, next to where equal slices would end, so that no layer is on two shards.

    Args:
        sizes: Values of each tensor.
        layers: Name of each tensor's layer. Tensors of a layer are neighbours.
        shards: Slices, S; each has a layer at least.

    Raises:
        ConfigError: There are more shards than layers that have values, or none.
    """
    ends = list(accumulate(sizes))
    last = [end for end, layer, following in zip(ends, layers, [*layers[1:], None], strict=True) if layer != following]
    last = sorted({end for end in last if end > 0})
    if not 0 < shards <= len(last):
        raise ConfigError(
            f"{len(last)} layers cannot be cut into {shards:,} shards",
            hint="take 1 shard or more, and no more than layers",
        )
    chosen = [0]
    for shard in range(1, shards):
        before = bisect_right(last, chosen[-1])
        free = last[before : len(last) - (shards - shard)]  # each that follows needs one, too
        chosen.append(min(free, key=lambda end: abs(end - last[-1] * shard / shards)))
    return list(pairwise([*chosen, last[-1]]))


def pieces(part: Slice, length: int = PIECE) -> list[Slice]:
    """Cut a range into pieces of one length. The last piece may be shorter."""
    begin, end = part
    return [(start, min(start + length, end)) for start in range(begin, end, length)]


def within(part: Slice, parts: Iterable[tuple[Slice, Any]]) -> list[tuple[Slice, Any]]:
    """Yield the parts of labelled ranges that lie in another range, in order.

    Raises:
        ConfigError: They do not cover it.
    """
    begin, end = part
    found = []
    for (low, high), what in sorted(parts, key=lambda one: one[0]):
        if begin < high and low < end and begin < end and low <= begin:
            found.append(((begin, min(high, end)), what))
            begin = min(high, end)
    if begin < end:
        raise ConfigError(f"no range has the values {begin:,} to {end:,}")
    return found


def runs(arrays: Sequence[Tensor], chosen: Collection[int]) -> list[Slice]:
    """Return the ranges of arrays with these numbers; neighbours become one range."""
    found: list[Slice] = []
    ends = accumulate(array.size for array in arrays)
    for i, (array, end) in enumerate(zip(arrays, ends, strict=True)):
        begin = end - array.size
        if i in chosen and begin < end:
            begin = found.pop()[0] if found and found[-1][1] == begin else begin
            found.append((begin, end))
    return found


def crossed(part: Slice, parts: Iterable[Slice]) -> list[Slice]:
    """Return the overlaps of a range with other ranges, which are in order."""
    both = [(max(part[0], begin), min(part[1], end)) for begin, end in parts]
    return [(begin, end) for begin, end in both if begin < end]


def take(arrays: Sequence[Tensor], part: Slice) -> list[Tensor]:
    """A slice of arrays: of each that it overlaps the values in it, flat. Views, if the arrays are contiguous."""
    return [arrays[i].reshape(-1)[low:high] for i, low, high in overlapped(arrays, part)]


def put(arrays: Sequence[Tensor], part: Slice, values: Sequence[Tensor]) -> None:
    """Write a slice into arrays, which are contiguous and of one's own.

    Raises:
        ConfigError: The slice is of another length or type.
    """
    places = overlapped(arrays, part)
    fits = len(values) == len(places) and all(
        isinstance(new, np.ndarray) and (new.shape, new.dtype) == ((high - low,), arrays[i].dtype)
        for new, (i, low, high) in zip(values, places, strict=True)
    )
    if not fits:
        found = [f"{new.dtype} {new.shape}" if isinstance(new, np.ndarray) else type(new).__name__ for new in values]
        wanted = [f"{arrays[i].dtype} ({high - low},)" for i, low, high in places]
        raise ConfigError(f"values {part[0]:,} to {part[1]:,} should be {wanted}, but are {found}")
    for new, (i, low, high) in zip(values, places, strict=True):
        arrays[i].reshape(-1)[low:high] = new


def take_encoded(encoded: EncodedUpdate, like: Sequence[Tensor], part: Slice) -> EncodedUpdate:
    """A slice of an update that was encoded as a whole, as ``decode_slice`` takes it.

    Args:
        encoded: From ``encode_update``.
        like: Arrays with the shapes of the tensors.
        part: Which slice.
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
    """Decode what ``take_encoded`` has cut: to the slice of what the whole decodes to.

    Args:
        encoded: As it arrived.
        like: Arrays with the shapes and types of the whole tensors.
        part: Which slice.

    Raises:
        ConfigError: It does not fit, or is malformed.
    """
    return decode_update(
        encoded, take(like, part), [(like[i].shape, low, high) for i, low, high in overlapped(like, part)]
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
    """Merge the updates of a slice, and step it.

    Args:
        merge: A rule that ``fits``.
        outer: One that ``fits``.
        state: Its state for the slice. Not modified, nor are the weights.
        weights: Slice of the weights.
        updates: For each slot, in slot order, the range of its update and its number of samples.
        trainable: For each tensor of the range, whether it is trained.
        sizes: Values of each of its tensors as a whole.

    Returns:
        State and weights of the slice after it: the bits that the whole would have there.
    """
    # NumPy sums the only values of several slots in another order than rows of values: one that was cut off a row is merged beside its like.
    alone = [i for i, (w, size) in enumerate(zip(weights, sizes, strict=True)) if w.size == 1 < size]

    def doubled(arrays: Sequence[Tensor]) -> list[Tensor]:
        return [np.repeat(array, 2) if i in alone else array for i, array in enumerate(arrays)]

    running = merge.start(len(updates), like=doubled(weights))
    for slot, (update, samples) in enumerate(updates):
        running.add(slot, doubled(update), samples)
    merged = [array[:1] if i in alone else array for i, array in enumerate(running.result())]
    return outer.update(state, weights, merged, trainable)


def fits(rule: Rule | OuterOptimizer | Codec) -> bool:
    """Whether a rule can be used on slices: it works value by value."""
    return bool(getattr(rule, "by_value", False))


def overlapped(arrays: Sequence[Tensor], part: Slice) -> list[tuple[int, int, int]]:
    """Return for each overlapping array its number, its first value in the range, and the end of its values."""
    begin, end = part
    low, found = 0, []
    for i, array in enumerate(arrays):
        high = low + array.size
        if max(begin, low) < min(end, high):
            found.append((i, max(begin, low) - low, min(end, high) - low))
        low = high
    return found
