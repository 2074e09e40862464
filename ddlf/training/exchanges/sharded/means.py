"""Means of slot states, which all slots use in their next round. Each worker computes one range.

For a group of slot states, such as optimizer states or control variates, each owner fetches one range from all slots.
It sums the range in slot order in float64, divides it, and offers it to the others. The result belongs to a generation
of weights (``Generation.means``) and travels with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddlf.algorithms.flat_weights import Slice, cut
from ddlf.algorithms.weights import Weights, mean_of
from ddlf.errors import AppMissing, BadUpdate
from ddlf.training.exchanges.sharded.copies import Shapes, SlotCopies, arrays_of, empty_of, shapes_of
from ddlf.training.exchanges.sharded.merging import Ask, fetch
from ddlf.training.exchanges.sharded.pairs import limited
from ddlf.training.exchanges.sharded.plan import Generation, Plan
from ddlf.training.exchanges.sharded.ranges import PIECE, pieces, put, size_of, take
from ddlf.training.slot.parts import PARTS, SlotPart
from ddlf.training.slot.task import SlotState
from ddlf.worker.peers import Unreached


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanPlan:
    """The master's plan that tells workers how to compute the mean of one group of slot states.

    Args:
        group: The group of slot states.
        states: For each slot with a state, in slot order: slot, worker with the state (0 if ``given`` has it), round,
            and share.
        total: Divisor of the sum. 0 keeps the sum itself, in float64, because the number of slots is not known yet.
        given: Slots and states that only the master has.
    """

    group: str
    states: Sequence[tuple[int, int, int, float]]
    total: float
    given: Sequence[tuple[int, list[Any]]]


@dataclass(slots=True)
class Mean:
    """A mean of slot states. While it is computed, a worker may have only a part.

    Args:
        known: For each entry of the group, whether it has an array.
        of: The arrays of the group.
    """

    known: list[bool]
    of: Generation

    @classmethod
    def whole(cls, group: Sequence[Any]) -> Mean:
        """Return a mean that needs no more updates. ``group`` has its arrays, and None for each array that has no mean."""
        return cls([one is not None for one in group], Generation(arrays_of(group)))

    @classmethod
    def begun(cls, group: Sequence[Any]) -> Mean:
        """Return an empty mean with the shapes and types of a group of slot state, to be filled range by range."""
        return cls.whole([None if one is None else np.empty(np.shape(one), np.asarray(one).dtype) for one in group])

    def group(self) -> list[Any]:
        """Return the mean in the format of the slot states that it is the mean of."""
        arrays = iter(self.of.weights)
        return [next(arrays) if known else None for known in self.known]


def averaging(
    me: int, plan: Plan, wanted: MeanPlan, new: Generation, copies: SlotCopies, ask: Ask
) -> list[Coroutine[Any, Any, None]]:
    """Return coroutines that compute and fetch a mean of slot states for new weights. They run at the same time.

    Args:
        me: Number of this worker, which has the state of a slot.
        plan: The plan of the generation.
        wanted: The plan of the mean to compute.
        new: The generation. It receives the mean at once, and its pieces as they are computed.
        copies: Slot states on this worker.
        ask: Calls workers.
    """
    slot, _, number, _ = next(one for one in wanted.states if one[1] == me)
    group = copies.state(slot, number)[wanted.group]
    mean = Mean.begun(
        group if wanted.total else [None if one is None else np.asarray(one, np.float64) for one in group]
    )
    new.means[wanted.group] = mean
    if not (size := size_of(mean.of.weights)):
        return []
    owners = list(plan.owners)[:size]
    found = []
    for part, owner in zip(cut(size, len(owners)), owners, strict=True):
        parts = pieces(part, plan.piece)
        mean.of.ready.update({piece: asyncio.Event() for piece in parts})
        if owner == me:
            found.append(_make(wanted, mean, parts, copies.ask))
        else:
            found.append(fetch(ask, owner, ("mean", plan.generation, wanted.group), mean.of, parts))
    return found


async def _make(wanted: MeanPlan, mean: Mean, parts: Sequence[Slice], ask: Ask) -> None:
    given, finite = {slot: arrays_of(group) for slot, group in wanted.given}, part_of(wanted.group).finite

    async def left(piece: Slice, slot: int, worker: int, number: int) -> Weights:
        if not worker:
            return take(given[slot], piece)
        found: Weights = await ask(worker, "left", slot, number, wanted.group, *piece)
        if not _fits(found, take(mean.of.weights, piece)):
            raise Unreached(worker, f"it sent a state of slot {slot + 1} that does not fit")
        if finite and not all(np.isfinite(one).all() for one in found):
            raise BadUpdate(f"slot {slot + 1} (worker {worker}) left a {wanted.group} that is not finite")
        return found

    async def one(piece: Slice) -> None:
        of_slots = await asyncio.gather(*(left(piece, slot, worker, n) for slot, worker, n, _ in wanted.states))
        shares = [share for *_, share in wanted.states]
        put(mean.of.weights, piece, await asyncio.to_thread(_summed, of_slots, shares, wanted.total))
        mean.of.ready[piece].set()

    await limited(one, parts)


def _fits(found: Any, like: Weights) -> bool:
    return (
        isinstance(found, list)
        and len(found) == len(like)
        and all(isinstance(a, np.ndarray) and a.shape == w.shape for a, w in zip(found, like, strict=True))
    )


def _summed(of_slots: Sequence[Weights], shares: Sequence[float], total: float) -> Weights:
    if total:
        return mean_of(of_slots, shares, total)
    return mean_of([[np.asarray(a, np.float64) for a in arrays] for arrays in of_slots], shares, 1)


async def bring(ask: Ask, at: Sequence[int], number: int, generation: Generation, groups: Iterable[str]) -> None:
    """Fetch the means of slot states that belong to a version of the weights, unless this worker has them.

    Args:
        ask: Calls workers.
        at: Workers that have the means, in the order in which to call them.
        number: Number of the generation.
        generation: This worker's part of the generation.
        groups: Groups that have means.

    Raises:
        AppMissing: No worker returns a mean.
    """
    for group in groups:
        if group in generation.means:
            continue
        why = "nobody has it"
        for worker in at:
            try:
                shapes: Shapes = await ask(worker, "mean_shapes", number, group)
                mean = Mean.begun(empty_of(shapes[group]))
                parts = pieces((0, size_of(mean.of.weights)), PIECE)
                mean.of.ready = {piece: asyncio.Event() for piece in parts}
                await fetch(ask, worker, ("mean", number, group), mean.of, parts)
            except Unreached as error:
                why = f"worker {worker}: {error.why}"
            else:
                generation.means[group] = mean
                break
        else:
            raise AppMissing(f"the mean of the slots' {group} is unavailable: {why}")


def shapes(generation: Generation, group: str) -> Shapes:
    """Return the shapes and types of a mean.

    Raises:
        AppMissing: The generation does not have it.
    """
    return shapes_of({group: mean_in(generation, group).group()})


def mean_in(generation: Generation, group: str) -> Mean:
    """Return the mean of a group of slot states, which belongs to a version of the weights.

    Raises:
        AppMissing: The generation does not have it.
    """
    found: Mean | None = generation.means.get(group)
    if found is None:
        raise AppMissing(f"the mean of the slots' {group} is not on this worker")
    return found


def begins_with(means: SlotState, of: Mapping[str, int], like: Weights) -> dict[str, Any]:
    """Return the entries of a slot's task that contain means, by the entry's name.

    Args:
        means: Means by group.
        of: By group, the number of slots in a sum; 0 for a finished mean.
        like: Arrays with the types of the model's weights.
    """
    found: dict[str, Any] = {}
    for group, slots in of.items():
        found |= part_of(group).begins_with(means[group], slots, like)
    return found


def part_of(name: str) -> type[SlotPart]:
    """Return the ``SlotPart`` class of the part of slot state with this name."""
    return next(part for part in PARTS if part.name == name)
