"""Copies of what slots have left on other workers, so that the loss of one worker loses nothing of it. Runs in the executor."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.shards import PIECE, Slice, pieces, put, take
from ddlf.algorithms.weights import Tensor, Weights
from ddlf.errors import AppMissing, ConfigError
from ddlf.roles.generation import Unreached, size_of
from ddlf.roles.task import KeptStates, SlotState, Task
from ddlf.roles.wholes import limited

Shapes = dict[str, list[tuple[tuple[int, ...], Tensor] | None]]
"""Of each group of a slot's state the shape of each array and an empty one of its type (NumPy has no text for bfloat16); None for none."""


class Copies:
    """What slots have left, here or on other workers.

    Args:
        kept: What the rounds of slots have left here.
        ask: Asks a worker, this one, too: its number, a verb, and the verb's arguments. Raises Unreached.
    """

    def __init__(self, kept: KeptStates, ask: Callable[..., Awaitable[Any]]) -> None:
        self._kept = kept
        self._ask = ask
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

    # -- what other workers ask for -------------------------------------------------------------------------------------

    def state(self, slot: int, number: int) -> SlotState:
        """What a round of a slot left, from 0, here or in a copy.

        Raises:
            AppMissing: It is not here.
        """
        copy = self._copies.get(slot, {}).get(number)
        return self._kept.left(slot, number) if copy is None else copy

    async def shapes(self, slot: int, number: int, groups: Sequence[str]) -> Shapes:
        """Shapes and types of groups of it."""
        state = self.state(slot, number)
        return {
            name: [
                None if array is None else (np.shape(array), np.empty(0, np.asarray(array).dtype))
                for array in state[name]
            ]
            for name in groups
            if name in state
        }

    async def left(self, slot: int, number: int, group: str, begin: int, end: int) -> Weights:
        """A slice of a group of it."""
        return take(_arrays(self.state(slot, number)[group]), (begin, end))

    async def _fetched(self, slot: int, number: int, worker: int, groups: Sequence[str]) -> SlotState:
        shapes: Shapes = await self._ask(worker, "shapes", slot, number, list(groups))
        found: SlotState = {
            name: [None if one is None else np.empty(tuple(one[0]), one[1].dtype) for one in shapes[name]]
            for name in shapes
        }
        for name, group in found.items():
            arrays = _arrays(group)

            async def one(piece: Slice, name: str = name, arrays: Weights = arrays) -> None:
                values = await self._ask(worker, "left", slot, number, name, *piece)
                try:
                    put(arrays, piece, values)
                except (ConfigError, TypeError) as error:
                    raise Unreached(worker, f"it sent what does not fit: {error}") from error

            await limited(one, pieces((0, size_of(arrays)), PIECE))
        return found


def _arrays(group: Sequence[Any]) -> Weights:
    return [np.asarray(array) for array in group if array is not None]
