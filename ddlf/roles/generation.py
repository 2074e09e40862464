"""Weights that are made of a round by all workers together, and how: what ``shards.py`` works with. Runs in the executor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddlf.algorithms.check import Fault
from ddlf.algorithms.shards import Slice, take
from ddlf.algorithms.weights import Weights
from ddlf.errors import AppMissing


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the next weights are made.

    Args:
        base: Generation of the weights that the slots began with.
        generation: The one that comes of it.
        updates: Of each slot, in slot order, its number, the worker that has its update, the samples that it trained on, and what the update is
            scaled by.
        owners: Workers that step a slice, in the order of the slices.
        state: Parts of the outer optimizer's state: first value, the one behind the last, and the worker that has them.
        copies: Whether the owner of the next slice keeps a copy of that state.
        left: Of what slots have left on their workers, of which others keep copies: slot, its round, its worker, and the worker with the copy.
        groups: Groups of these states that are copied.
        merge: The merge rule, as text.
        weighed: What it makes of the updates as wholes: a weight for each, and what their sum is divided by; empty if it merges value by value.
        outer: The outer optimizer, as text.
        trainable: Whether each weight is trained.
        names: Paths of the weights.
        piece: Values in a piece.
    """

    base: int
    generation: int
    updates: Sequence[tuple[int, int, int, float]]
    owners: Sequence[int]
    state: Sequence[tuple[int, int, int]]
    copies: bool
    left: Sequence[tuple[int, int, int, int]]
    groups: Sequence[str]
    merge: str
    weighed: Sequence[float]
    outer: str
    trainable: Sequence[bool]
    names: Sequence[str]
    piece: int


State = list[list[np.ndarray[Any, Any]]]
"""What the outer optimizer keeps of a slice: for each array that it keeps of a weight, the slice of all of them."""


@dataclass(slots=True)
class Generation:
    """Weights, and the state that belongs to them.

    Args:
        weights: One array for each of the model's; of a generation that is being made, what is ready of them.
        state: Slices of the outer optimizer's state that are kept here.
        ready: Of each piece whether it is there; empty of what came as a whole.
    """

    weights: Weights
    state: list[tuple[Slice, State]] = field(default_factory=list)
    ready: dict[Slice, asyncio.Event] = field(default_factory=dict)

    async def wait_for(self, part: Slice) -> None:
        """Wait until a slice is there."""
        if (
            part in self.ready
        ):  # nearly always: to look through all pieces for each was a third of what an exchange computes
            await self.ready[part].wait()
            return
        for (begin, end), event in self.ready.items():
            if max(begin, part[0]) < min(end, part[1]):
                await event.wait()

    def state_of(self, part: Slice) -> State:
        """The state of a slice, as views.

        Raises:
            AppMissing: It is not here.
        """
        for (begin, end), groups in self.state:
            if begin <= part[0] and part[1] <= end:
                return [take(group, moved(part, begin)) for group in groups]
        raise AppMissing("the outer optimizer's state of this slice is not here")


class Unfit(Exception):
    """The next weights cannot be used, though the updates could.

    Args:
        fault: Why.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


class Unreached(Exception):
    """Another worker did not give what it was asked for.

    Args:
        worker: Its number.
        why: What happened, in one line.
        link: Whether nothing passes between the two.
        by: Number of the worker that did not reach it, if that is another one than who asks: on a way around.
    """

    def __init__(self, worker: int, why: str, *, link: bool = False, by: int | None = None) -> None:
        super().__init__(why)
        self.worker, self.why, self.link, self.by = worker, why, link or by is not None, by


def moved(part: Slice, begin: int) -> Slice:
    """A slice as it lies in one that begins somewhere."""
    return part[0] - begin, part[1] - begin


def size_of(weights: Weights) -> int:
    """How many values there are."""
    return sum(w.size for w in weights)
