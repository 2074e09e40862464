"""Backups of slot states on other workers, so that the loss of one worker loses no state. Runs in the executor."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.flat_weights import Slice
from ddlf.algorithms.weights import Tensor, Weights
from ddlf.errors import AppMissing
from ddlf.training.checkpoints.slices import Destination, Written, write_if_seen
from ddlf.training.exchanges.sharded.pairs import limited
from ddlf.training.exchanges.sharded.plan import left_of, left_parts, write
from ddlf.training.exchanges.sharded.ranges import PIECE, cut_range, pieces, size_of
from ddlf.training.slot.task import KeptStates, SlotState, Task
from ddlf.worker.calls import offered
from ddlf.worker.peers import Unreached

Shapes = dict[str, list[tuple[tuple[int, ...], Tensor] | None]]
"""By group of a slot's state: shape and empty array of each array (NumPy has no text for bfloat16); None for none."""


class SlotCopies:
    """The states that slots' rounds left on this worker, and backups of slots' states on other workers.

    Args:
        slot_states: Slot states that rounds on this worker have left.
        ask: Calls a worker, which may be this one, by number, verb and arguments. Raises Unreached.
    """

    def __init__(self, slot_states: KeptStates, ask: Callable[..., Awaitable[Any]]) -> None:
        self._slot_states = slot_states
        self.ask = ask
        self._backups: dict[int, dict[int, SlotState]] = {}  # slot -> number of the round, from 0 -> groups

    async def keep(self, slot: int, number: int, worker: int, groups: Sequence[str]) -> None:
        """Fetch and keep a backup of a slot's state after a round.

        Also keep the backup of the round before, because this round may fail.

        Raises:
            Unreached: The worker does not return the state.
        """
        new = await self._fetched(slot, number, worker, groups)
        earlier = {n: state for n, state in self._backups.get(slot, {}).items() if n != number}
        newest = {n: earlier[n] for n in sorted(earlier)[-1:]}
        self._backups[slot] = {**newest, number: new}

    async def have(self, task: Task, holders: Sequence[int]) -> Task:
        """Return a slot's task with the slot's state added, fetched from workers that have it.

        It is the state after the slot's previous round.

        Raises:
            AppMissing: No worker returns it.
        """
        reason = ""
        for worker in holders:
            try:
                state = await self._fetched(
                    task.slot, task.since, worker, [name for name in task.keep if name not in task.back]
                )
            except Unreached as error:
                reason = f"worker {error.worker}: {error.reason}"
            else:
                return dataclasses.replace(task, state=(task.state or {}) | state)
        if reason:
            raise AppMissing(f"the state of slot {task.slot + 1} is unavailable: {reason}")
        return task

    async def close(self) -> None:
        """Do nothing, since the replica frees the arrays.

        Every ``Role`` (an object that workers can call) needs this method.
        """

    # -- verbs for other workers --------------------------------------------------------------------------------------

    def state(self, slot: int, number: int) -> SlotState:
        """Return a slot's state after a round, numbered from 0, from this worker's rounds or its backups.

        Raises:
            AppMissing: This worker does not have it.
        """
        backup = self._backups.get(slot, {}).get(number)
        return self._slot_states.state_after(slot, number) if backup is None else backup

    def restore(
        self, slot: int, number: int, state: SlotState, lengths: Mapping[str, int], arrays: Mapping[str, Tensor]
    ) -> None:
        """Store a slot's state from a checkpoint, as if a round on this worker had left it.

        Args:
            slot: Number of the slot.
            number: Number of the round, from 0.
            state: Groups of the state that are already complete.
            lengths, arrays: The other groups, as arguments of ``left_of``.
        """
        self._slot_states.receive(slot, number, state | left_of(slot, lengths, arrays))

    async def write(
        self, slot: int, number: int, groups: Sequence[str], destination: Destination, by: int
    ) -> Written[dict[str, int]]:
        """Write groups (named parts) of a slot's state into a checkpoint, as the worker with number ``by``.

        Returns:
            The result of ``write_if_seen``, and the number of arrays in each group.

        Raises:
            AppMissing: This worker does not have the state.
        """
        left = self.state(slot, number)
        arrays, lengths = left_parts(slot, {name: left[name] for name in groups if name in left})
        return await asyncio.to_thread(write_if_seen, destination, arrays, by), lengths

    @offered
    async def shapes(self, slot: int, number: int, groups: Sequence[str]) -> Shapes:
        """Return the shapes and types of groups of a slot's state, for a worker that will fetch them."""
        state = self.state(slot, number)
        return shapes_of({name: state[name] for name in groups if name in state})

    @offered
    async def left(self, slot: int, number: int, group: str, begin: int, end: int) -> Weights:
        """Return a range of the values of one group of a slot's state, for another worker."""
        return cut_range(arrays_of(self.state(slot, number)[group]), (begin, end))

    async def _fetched(self, slot: int, number: int, worker: int, groups: Sequence[str]) -> SlotState:
        shapes: Shapes = await self.ask(worker, "shapes", slot, number, list(groups))
        state: SlotState = {name: empty_of(shapes[name]) for name in shapes}
        for name, group in state.items():
            arrays = arrays_of(group)

            async def fetch_piece(piece: Slice, name: str = name, arrays: Weights = arrays) -> None:
                values = await self.ask(worker, "left", slot, number, name, *piece)
                write(worker, arrays, piece, values)

            await limited(fetch_piece, pieces((0, size_of(arrays)), PIECE))
        return state


def shapes_of(state: SlotState) -> Shapes:
    """Return the shapes and types of groups of slot state."""
    return {
        name: [None if array is None else (np.shape(array), np.empty(0, np.asarray(array).dtype)) for array in group]
        for name, group in state.items()
    }


def empty_of(shapes: Sequence[tuple[tuple[int, ...], Tensor] | None]) -> list[Any]:
    """Return uninitialized arrays that can receive a group of slot state."""
    return [None if entry is None else np.empty(tuple(entry[0]), entry[1].dtype) for entry in shapes]


def arrays_of(group: Sequence[Any]) -> Weights:
    """Return the arrays of a group of slot state, without its empty entries."""
    return [np.asarray(array) for array in group if array is not None]
