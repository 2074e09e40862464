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
from ddlf.training.exchanges.sharded.plan import Generation, MeanPlan, Plan
from ddlf.training.exchanges.sharded.ranges import PIECE, cut_range, pieces, size_of, write_range
from ddlf.training.slot.parts import PARTS, SlotPart
from ddlf.training.slot.task import SlotState
from ddlf.worker.peers import Unreached


@dataclass(slots=True)
class Mean:
    """A mean of slot states. While it is computed, a worker may have only a part.

    Args:
        has_array: For each entry of the group, whether it has an array.
        of: The arrays of the group.
    """

    has_array: list[bool]
    of: Generation

    @classmethod
    def from_group(cls, group: Sequence[Any]) -> Mean:
        """Return a mean that needs no more updates. ``group`` has its arrays, and None for each array that has no mean."""
        return cls([array is not None for array in group], Generation(arrays_of(group)))

    @classmethod
    def begun(cls, group: Sequence[Any]) -> Mean:
        """Return an empty mean with the shapes and types of a group of slot state, to be filled range by range."""
        return cls.from_group(
            [None if array is None else np.empty(np.shape(array), np.asarray(array).dtype) for array in group]
        )

    def group(self) -> list[Any]:
        """Return the mean in the format of the slot states that it is the mean of."""
        arrays = iter(self.of.weights)
        return [next(arrays) if is_present else None for is_present in self.has_array]


def averaging(
    me: int, plan: Plan, mean_plan: MeanPlan, new: Generation, copies: SlotCopies, ask: Ask
) -> list[Coroutine[Any, Any, None]]:
    """Return coroutines that compute and fetch a mean of slot states for new weights. They run at the same time.

    Args:
        me: Number of this worker, which has the state of a slot.
        plan: The plan of the generation.
        mean_plan: The plan of the mean to compute.
        new: The generation. It receives the mean at once, and its pieces as they are computed.
        copies: Slot states on this worker.
        ask: Calls workers.
    """
    slot, _, number, _ = next(state for state in mean_plan.states if state[1] == me)
    group = copies.state(slot, number)[mean_plan.group]
    mean = Mean.begun(
        group if mean_plan.total else [None if array is None else np.asarray(array, np.float64) for array in group]
    )
    new.means[mean_plan.group] = mean
    if not (size := size_of(mean.of.weights)):
        return []
    owners = list(plan.owners)[:size]
    coroutines = []
    for part, owner in zip(cut(size, len(owners)), owners, strict=True):
        parts = pieces(part, plan.piece)
        mean.of.ready.update({piece: asyncio.Event() for piece in parts})
        if owner == me:
            coroutines.append(_make(mean_plan, mean, parts, copies.ask))
        else:
            coroutines.append(fetch(ask, owner, ("mean", plan.generation, mean_plan.group), mean.of, parts))
    return coroutines


async def _make(mean_plan: MeanPlan, mean: Mean, parts: Sequence[Slice], ask: Ask) -> None:
    on_master, finite = {slot: arrays_of(group) for slot, group in mean_plan.on_master}, part_of(mean_plan.group).finite

    async def fetch_state(piece: Slice, slot: int, worker: int, number: int) -> Weights:
        if not worker:
            return cut_range(on_master[slot], piece)
        values: Weights = await ask(worker, "left", slot, number, mean_plan.group, *piece)
        if not _fits(values, cut_range(mean.of.weights, piece)):
            raise Unreached(worker, f"it sent a state of slot {slot + 1} that does not fit")
        if finite and not all(np.isfinite(array).all() for array in values):
            raise BadUpdate(f"slot {slot + 1} (worker {worker}) left a {mean_plan.group} that is not finite")
        return values

    async def compute_piece(piece: Slice) -> None:
        of_slots = await asyncio.gather(
            *(fetch_state(piece, slot, worker, n) for slot, worker, n, _ in mean_plan.states)
        )
        shares = [share for *_, share in mean_plan.states]
        write_range(mean.of.weights, piece, await asyncio.to_thread(_summed, of_slots, shares, mean_plan.total))
        mean.of.ready[piece].set()

    await limited(compute_piece, parts)


def _fits(values: Any, like: Weights) -> bool:
    return (
        isinstance(values, list)
        and len(values) == len(like)
        and all(isinstance(a, np.ndarray) and a.shape == w.shape for a, w in zip(values, like, strict=True))
    )


def _summed(of_slots: Sequence[Weights], shares: Sequence[float], total: float) -> Weights:
    if total:
        return mean_of(of_slots, shares, total)
    return mean_of([[np.asarray(a, np.float64) for a in arrays] for arrays in of_slots], shares, 1)


async def bring(ask: Ask, holders: Sequence[int], number: int, generation: Generation, groups: Iterable[str]) -> None:
    """Fetch the means of slot states that belong to a version of the weights, unless this worker has them.

    Args:
        ask: Calls workers.
        holders: Workers that have the means, in the order in which to call them.
        number: Number of the generation.
        generation: This worker's part of the generation.
        groups: Groups that have means.

    Raises:
        AppMissing: No worker returns a mean.
    """
    for group in groups:
        if group in generation.means:
            continue
        reason = "nobody has it"
        for worker in holders:
            try:
                shapes: Shapes = await ask(worker, "mean_shapes", number, group)
                mean = Mean.begun(empty_of(shapes[group]))
                parts = pieces((0, size_of(mean.of.weights)), PIECE)
                mean.of.ready = {piece: asyncio.Event() for piece in parts}
                await fetch(ask, worker, ("mean", number, group), mean.of, parts)
            except Unreached as error:
                reason = f"worker {worker}: {error.reason}"
            else:
                generation.means[group] = mean
                break
        else:
            raise AppMissing(f"the mean of the slots' {group} is unavailable: {reason}")


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
    mean: Mean | None = generation.means.get(group)
    if mean is None:
        raise AppMissing(f"the mean of the slots' {group} is not on this worker")
    return mean


def begins_with(means: SlotState, slot_counts: Mapping[str, int], like: Weights) -> dict[str, Any]:
    """Return the entries of a slot's task that contain means, by the entry's name.

    Args:
        means: Means by group.
        slot_counts: By group, the number of slots in a sum; 0 for a finished mean.
        like: Arrays with the types of the model's weights.
    """
    entries: dict[str, Any] = {}
    for group, slots in slot_counts.items():
        entries |= part_of(group).begins_with(means[group], slots, like)
    return entries


def part_of(name: str) -> type[SlotPart]:
    """Return the ``SlotPart`` class of the part of slot state with this name."""
    return next(part for part in PARTS if part.name == name)
