"""Copies of what slots have left on other workers, so that the loss of one worker loses nothing of it. Runs in the executor."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.ranges import PIECE, Slice, pieces, take
from ddlf.algorithms.weights import Tensor, Weights
from ddlf.errors import AppMissing
from ddlf.training.checkpoints.slices import part_name, write_if_seen
from ddlf.training.exchanges.peers import Unreached
from ddlf.training.exchanges.sharded.pairs import limited
from ddlf.training.exchanges.sharded.plan import size_of, write
from ddlf.training.slot.task import KeptStates, SlotState, Task
from ddlf.worker.methods import offered

Shapes = dict[str, list[tuple[tuple[int, ...], Tensor] | None]]
"""Of each group of a slot's state the shape of each array and an empty one of its type (NumPy has no text for bfloat16); None for none."""


class SlotCopies:
    """What slots have left, here or on other workers.

    Args:
        kept: What the rounds of slots have left here.
        ask: Asks a worker, this one, too: its number, a verb, and the verb's arguments. Raises Unreached.
    """

    def __init__(self, kept: KeptStates, ask: Callable[..., Awaitable[Any]]) -> None:
        self._kept = kept
        self.ask = ask
        self._copies: dict[int, dict[int, SlotState]] = {}  # slot -> round, from 0, that left it -> groups

    async def keep(self, slot: int, number: int, worker: int, groups: Sequence[str]) -> None:
        """Keep a copy of what a round of a slot left on a worker, and that of the round before, since this one may not count.

        Raises:
            Unreached: It does not give it.
        """
        new = await self._fetched(slot, number, worker, groups)
        before = {n: state for n, state in self._copies.get(slot, {}).items() if n != number}
        newest = {n: before[n] for n in sorted(before)[-1:]}
        self._copies[slot] = {**newest, number: new}

    async def have(self, task: Task) -> Task:
        """The task with all that the slot's round before has left, if it says who has that.

        Raises:
            AppMissing: Nobody gives it.
        """
        why = ""
        for worker in task.at:
            try:
                found = await self._fetched(
                    task.slot, task.since, worker, [name for name in task.keep if name not in task.back]
                )
            except Unreached as error:
                why = f"worker {error.worker}: {error.why}"
            else:
                return dataclasses.replace(task, state=(task.state or {}) | found)
        if why:
            raise AppMissing(f"what slot {task.slot + 1} has left cannot be had: {why}")
        return task

    async def close(self) -> None:
        """See ``Role``."""

    # -- what other workers ask for -------------------------------------------------------------------------------------

    def state(self, slot: int, number: int) -> SlotState:
        """What a round of a slot left, from 0, here or in a copy.

        Raises:
            AppMissing: It is not here.
        """
        copy = self._copies.get(slot, {}).get(number)
        return self._kept.left(slot, number) if copy is None else copy

    def restore(
        self, slot: int, number: int, known: SlotState, lengths: Mapping[str, int], arrays: Mapping[str, Tensor]
    ) -> None:
        """Have what a round of a slot left elsewhere, as if it had left it here.

        Args:
            slot: Which.
            number: Of the round, from 0.
            known: Groups of it.
            lengths, arrays: The others, as of ``left_of``.
        """
        self._kept.put(slot, number, known | left_of(slot, lengths, arrays))

    async def write(self, slot: int, number: int, groups: Sequence[str], place: dict[str, Any]) -> dict[str, Any]:
        """Write it into a checkpoint.

        Returns:
            What ``write_if_seen`` does, and ``lengths``.

        Raises:
            AppMissing: It is not here.
        """
        left = self.state(slot, number)
        arrays, more = left_parts(slot, {name: left[name] for name in groups if name in left})
        return {**await asyncio.to_thread(write_if_seen, place, arrays), **more}

    @offered
    async def shapes(self, slot: int, number: int, groups: Sequence[str]) -> Shapes:
        """Shapes and types of groups of it."""
        state = self.state(slot, number)
        return shapes_of({name: state[name] for name in groups if name in state})

    @offered
    async def left(self, slot: int, number: int, group: str, begin: int, end: int) -> Weights:
        """A slice of a group of it."""
        return take(arrays_of(self.state(slot, number)[group]), (begin, end))

    async def _fetched(self, slot: int, number: int, worker: int, groups: Sequence[str]) -> SlotState:
        shapes: Shapes = await self.ask(worker, "shapes", slot, number, list(groups))
        found: SlotState = {name: empty_of(shapes[name]) for name in shapes}
        for name, group in found.items():
            arrays = arrays_of(group)

            async def one(piece: Slice, name: str = name, arrays: Weights = arrays) -> None:
                values = await self.ask(worker, "left", slot, number, name, *piece)
                write(worker, arrays, piece, values)

            await limited(one, pieces((0, size_of(arrays)), PIECE))
        return found


def left_parts(slot: int, state: SlotState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a slot has left as it is in a slice of a checkpoint, and the ``lengths`` of its groups."""
    arrays = {
        part_name(f"slots_{name}", 0, f"slot {slot:04d} {i:04d}"): np.asarray(array)
        for name, group in state.items()
        for i, array in enumerate(group)
        if array is not None
    }
    return arrays, {"lengths": {name: len(group) for name, group in state.items()}}


def left_of(slot: int, lengths: Mapping[str, int], arrays: Mapping[str, Tensor]) -> SlotState:
    """What a slot has left, of what ``left_parts`` made of it."""
    return {
        name: [arrays.get(part_name(f"slots_{name}", 0, f"slot {slot:04d} {i:04d}")) for i in range(length)]
        for name, length in lengths.items()
    }


def shapes_of(state: SlotState) -> Shapes:
    """Shapes and types of groups."""
    return {
        name: [None if array is None else (np.shape(array), np.empty(0, np.asarray(array).dtype)) for array in group]
        for name, group in state.items()
    }


def empty_of(shapes: Sequence[tuple[tuple[int, ...], Tensor] | None]) -> list[Any]:
    """Room for a group."""
    return [None if one is None else np.empty(tuple(one[0]), one[1].dtype) for one in shapes]


def arrays_of(group: Sequence[Any]) -> Weights:
    """The arrays that are in a group."""
    return [np.asarray(array) for array in group if array is not None]
