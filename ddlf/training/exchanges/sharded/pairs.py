"""Ranges of slots' updates, and the distances and angles between whole updates. Runs in the executor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ddlf.algorithms.encoding import EncodedUpdate
from ddlf.algorithms.flat_weights import Slice
from ddlf.algorithms.pairwise import BLOCK, Vector, brief, cosines_in, distances_in
from ddlf.algorithms.update_check import scaled
from ddlf.algorithms.weights import Tensor, Weights
from ddlf.errors import ConfigError
from ddlf.training.exchanges.sharded.ranges import cut_range, decode_slice, moved, pieces
from ddlf.training.messages import Message
from ddlf.worker.peers import Unreached

AT_ONCE = 8
"""Number of pieces of a range in flight. A worker steps a piece when it has all updates of it. More than one piece in
flight keeps the links of all workers busy while one worker is slow."""

Sent = tuple[int, int, int, float]
"""A slot's update: slot, worker that has it, number of trained samples, and factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(Message):
    """A request to workers for the distances or the angles between the updates of all slots.

    Args:
        base: Generation of the weights that the slots began with.
        updates: The update of each slot, in slot order.
        owners: Workers that compute a part, in the order of the ranges.
        tensors: Numbers of the tensors to compare.
        norms: Lengths of the updates, for angles; empty for distances.
        piece: Number of values in a piece.
    """

    base: int
    updates: Sequence[Sent]
    owners: Sequence[int]
    tensors: Sequence[int]
    norms: Sequence[float]
    piece: int


async def sums(
    request: Pairs, like: Weights, part: Slice, fetch: Callable[[Sent, Slice], Awaitable[EncodedUpdate]]
) -> list[Vector]:
    """Return what one range of the values adds to the distances or cosines between updates.

    This is a few matrices, each the exact sum over the blocks of the range. A block belongs to the range that it begins
    in.

    Args:
        request: The request.
        like: The model's weights.
        part: The range.
        fetch: Fetches a range of an update.

    Raises:
        Unreached: Another worker did not return its part.
    """
    matrices: list[Vector] = []

    async def add_run(run: Slice) -> None:
        updates = await asyncio.gather(*(fetch(sent, run) for sent in request.updates))
        matrices.extend(await asyncio.to_thread(add, run, updates))

    def add(run: Slice, updates: Sequence[EncodedUpdate]) -> list[Vector]:
        tensors = decoded(updates, request.updates, like, run)
        rows = [
            [cut_range(tensor, moved(block, run[0]))[0] for tensor in tensors]
            for block in blocks
            if run[0] <= block[0] < run[1]
        ]
        return [cosines_in(row, request.norms) if request.norms else distances_in(row) for row in rows]

    blocks = [block for block in blocks_of(like, request.tensors) if part[0] <= block[0] < part[1]]
    await limited(add_run, together(blocks, request.piece))
    return brief(matrices, len(request.updates))


def blocks_of(like: Weights, tensors: Sequence[int]) -> list[Slice]:
    """Return the blocks of some tensors, in order. A block is a short run of values that is summed by itself."""
    ends = list(accumulate(w.size for w in like))
    return [block for i in tensors for block in pieces((ends[i] - like[i].size, ends[i]), BLOCK)]


def together(blocks: Sequence[Slice], length: int) -> list[Slice]:
    """Join adjacent blocks into ranges of at most some number of values."""
    ranges: list[Slice] = []
    for begin, end in blocks:
        if ranges and ranges[-1][1] == begin and end - ranges[-1][0] <= max(length, BLOCK):
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((begin, end))
    return ranges


def decoded(updates: Sequence[EncodedUpdate], sent: Sequence[Sent], like: Weights, part: Slice) -> list[list[Tensor]]:
    """Fetch a range of each update, and return it decoded and scaled.

    Raises:
        Unreached: An update does not fit.
    """
    decoded_updates = []
    for update, (_, worker, _, factor) in zip(updates, sent, strict=True):
        try:
            decoded_updates.append(scaled(decode_slice(update, like, part), factor))
        except ConfigError as error:
            raise Unreached(worker, f"it sent an update that does not fit: {error}") from error
    return decoded_updates


async def limited(function: Callable[[Slice], Coroutine[Any, Any, None]], parts: Sequence[Slice]) -> None:
    """Run a function on each of many ranges, on at most ``AT_ONCE`` of them at the same time."""
    semaphore = asyncio.Semaphore(AT_ONCE)

    async def in_turn(part: Slice) -> None:
        async with semaphore:
            await function(part)

    await all_of([in_turn(part) for part in parts])


async def all_of(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines at the same time. If one fails, cancel the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
