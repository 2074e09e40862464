"""Locations of weights on workers, and how the master fetches them. Runs on the master."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.ranges import Slice, cut, pieces, put, within
from ddlf.algorithms.weights import Weights
from ddlf.errors import ClusterTooSmall, ConfigError
from ddlf.training.checkpoints.stored import left_parts
from ddlf.training.checkpoints.writing import AT_ONCE, Writing
from ddlf.training.crew.recovery import LOSS
from ddlf.training.exchanges.members import Member, Members
from ddlf.training.exchanges.sharded.copies import arrays_of, empty_of
from ddlf.training.exchanges.sharded.means import MeanPlan
from ddlf.training.exchanges.states import SlotStates
from ddlf.training.run import Run
from ddlf.training.slot.task import Reply


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Location of a generation and of the states that belong to it.

    Args:
        generation: Number of the generation.
        at: Workers that have all of the weights and the means.
        state: Ranges of the state with their workers. Some ranges occur twice, as original and backup.
        means: Groups of slot state whose means the slots' next rounds begin with. True if the workers have the sum.
    """

    generation: int
    at: Sequence[Member] = ()
    state: Sequence[tuple[Slice, Member]] = ()
    means: Mapping[str, bool] = dataclasses.field(default_factory=dict)


class HeldWeights:
    """The workers of one run that hold weights.

    Args:
        run: The run.
        there: Where the run's tasks find their weights.
        like: Arrays with shapes and types of the weights.
        kept: Number of arrays that workers keep for each weight.
        coded: Whether the last of these arrays is the exact weight, because weights travel through a codec.

    Attributes:
        like, kept, coded: The arguments.
        size: Number of values of all weights.
    """

    def __init__(self, run: Run, there: Members, like: Weights, kept: int, *, coded: bool) -> None:
        self._run, self._there = run, there
        self.like, self.kept, self.coded = like, kept, coded
        self.size = sum(w.size for w in like)

    def gone(self) -> ClusterTooSmall:
        """Return the error for lost weights."""
        return ClusterTooSmall(
            f"the weights after round {self._run.progress.round} were on workers that are lost",
            hint="resume from the last checkpoint; with checkpoint_every=1 no round is lost",
        )

    def holding(self, place: Layout) -> list[tuple[int, int, int]]:
        """Return ranges of the state with the numbers of their workers, in the format of ``Plan.state``."""
        return [(*part, number) for part, (number, _) in self.parts(place, self._there.members()) or ()]

    def parts(self, place: Layout, alive: Collection[Member]) -> list[tuple[Slice, Member]] | None:
        """Return ranges of the state with a present worker for each; None if a range is lost."""
        if not self.kept:
            return []
        try:
            return within((0, self.size), [one for one in place.state if one[1] in alive])
        except ConfigError:
            return None

    def writers(self, place: Layout, alive: Collection[Member]) -> list[tuple[Slice, Member]]:
        """Return the ranges to write into a checkpoint, with the worker that writes each.

        Raises:
            ClusterTooSmall: The workers do not have all ranges.
        """
        holders = [one for one in place.at if one in alive][: self.size]
        parts = self.parts(place, alive)
        if not holders or parts is None:
            raise self.gone()
        return parts or list(zip(cut(self.size, len(holders)), holders, strict=True))

    async def mean(self, place: Layout, group: str) -> list[Any]:
        """Bring a mean of slot states to the master.

        Raises:
            ClusterTooSmall: No worker has it.
        """
        found = empty_of((await self._asked(place, "mean_shapes", place.generation, group))[group])
        arrays = arrays_of(found)
        for piece in pieces((0, sum(array.size for array in arrays)), AT_ONCE):
            put(arrays, piece, await self._asked(place, "mean", place.generation, group, *piece))
        return found

    async def write_mean(self, place: Layout, group: str, writing: Writing, number: int) -> dict[str, int]:
        """Have a worker write a mean into a checkpoint, in the format of the first slot's state.

        Args:
            place: Location of the mean.
            group: Group of the mean.
            writing: The checkpoint.
            number: Number of the slice to write.

        Returns:
            The length of the group.
        """

        async def there(at: dict[str, Any]) -> dict[str, Any]:
            return dict(await self._asked(place, "write_mean", place.generation, group, at))

        async def here() -> tuple[dict[str, Any], dict[str, Any]]:
            return left_parts(0, {group: await self.mean(place, group)})

        return dict((await writing.slice(number, there, here))["lengths"])

    async def brought(self, place: Layout, *, state: bool = True) -> tuple[Weights, Weights]:
        """Bring weights and state to the master, from the workers that have them.

        Raises:
            ClusterTooSmall: They are lost.
        """
        weights = [np.empty(w.shape, w.dtype) for w in self.like]
        needed = self.kept if state or self.coded else 0
        groups = [[np.empty(w.shape, w.dtype) for w in self.like] for _ in range(needed)]
        alive = self._there.members()

        async def get(verb: str, part: Slice, member: Member, into: Callable[[Any], list[tuple[Weights, Any]]]) -> None:
            worker = alive[member]
            for piece in pieces(part, AT_ONCE):
                try:
                    found = await worker.call(self._there.holder, verb, place.generation, *piece)
                except LOSS:
                    alive.pop(member, None)
                    raise
                for arrays, values in into(found):
                    put(arrays, piece, values)

        while True:
            holders = [one for one in place.at if one in alive][: self.size]
            parts = self.parts(place, alive) if needed else []
            if not holders or parts is None:
                raise self.gone()
            plain = [] if self.coded else list(zip(cut(self.size, len(holders)), holders, strict=True))
            work = [get("values", part, one, lambda found: [(weights, found)]) for part, one in plain]
            work += [get("kept", part, one, lambda found: [*zip(groups, found, strict=True)]) for part, one in parts]
            found = await asyncio.gather(*work, return_exceptions=True)
            errors = [one for one in found if isinstance(one, BaseException)]
            if not errors:
                now = groups.pop() if self.coded else weights
                return now, [array for group in groups for array in group]
            if others := [one for one in errors if not isinstance(one, LOSS)]:
                raise others[0]

    async def _asked(self, place: Layout, verb: str, *arguments: Any) -> Any:
        """Call a verb on the first present worker that has the weights, and return its answer.

        Raises:
            ClusterTooSmall: No such worker is present.
        """
        alive = self._there.members()
        for member in place.at:
            if member in alive:
                try:
                    return await alive[member].call(self._there.holder, verb, *arguments)
                except LOSS:
                    continue  # the crew notices the loss
        raise self.gone()


def means_of(states: SlotStates, replies: Sequence[Reply], *, slots: int, grows: bool) -> list[MeanPlan]:
    """Return plans for the means of slot states after these replies. If slots may be added, plan sums for them."""
    found = []
    for group, part in states.parts.items():
        if part.shared:  # the mean over this round, weighted by samples
            left = [(one.slot, one.worker, one.task.round, float(one.samples)) for one in replies]
            found.append(MeanPlan(group=group, states=left, total=float(sum(one.samples for one in replies)), given=[]))
        elif part.mean is not None:  # the mean over all slots, also those without a reply
            now = {one.slot: (one.worker, one.task.round) for one in replies}
            where = {slot: now.get(slot) or states.where(slot, group) for slot in range(slots)}
            of_slots = [
                (slot, *(at if isinstance(at, tuple) else (0, 0)), 1.0) for slot, at in where.items() if at is not None
            ]
            given = [(slot, at) for slot, at in where.items() if isinstance(at, list)]
            found.append(MeanPlan(group=group, states=of_slots, total=0.0 if grows else float(slots), given=given))
    return found
