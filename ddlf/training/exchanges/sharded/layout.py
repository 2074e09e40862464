"""Locations of weights on workers, and how the master fetches them. Runs on the master."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.flat_weights import Slice, cut
from ddlf.algorithms.weights import Tensor, Weights
from ddlf.errors import ClusterTooSmall, ConfigError
from ddlf.training.checkpoints.slices import OUTER, WEIGHTS, Destination, Slices, Written
from ddlf.training.crew.recovery import LOSS
from ddlf.training.exchanges.members import Member, Members
from ddlf.training.exchanges.sharded.copies import arrays_of, empty_of
from ddlf.training.exchanges.sharded.plan import MeanPlan, left_parts, slice_arrays
from ddlf.training.exchanges.sharded.ranges import PIECE, pieces, within, write_range
from ddlf.training.exchanges.sharded.states import ShardedStates
from ddlf.training.run import Run
from ddlf.training.slot.task import Reply

AT_ONCE = 8 * PIECE
"""Number of values that the master requests at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The workers that have a generation (one numbered version of the weights) and the states that belong to it.

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


class RemoteWeights:
    """The weights of one run while workers hold them: fetches them to the master, and has them written to files.

    Args:
        run: The run.
        members: Where the run's tasks find their weights.
        like: Arrays with shapes and types of the weights.
        arrays_per_weight: Number of arrays that workers keep for each weight.
        coded: Whether the last of these arrays is the exact weight, because weights travel through a codec.

    Attributes:
        like, arrays_per_weight, coded: The arguments.
        size: Number of values of all weights.
    """

    def __init__(self, run: Run, members: Members, like: Weights, arrays_per_weight: int, *, coded: bool) -> None:
        self._run, self._members = run, members
        self.like, self.arrays_per_weight, self.coded = like, arrays_per_weight, coded
        self.size = sum(w.size for w in like)

    def loss_error(self) -> ClusterTooSmall:
        """Return the error that says that all copies of the weights are lost."""
        return ClusterTooSmall(
            f"the weights after round {self._run.progress.round} were on workers that are lost",
            hint="resume from the last checkpoint; with checkpoint_every=1 no round is lost",
        )

    def holding(self, layout: Layout) -> list[tuple[int, int, int]]:
        """Return which worker has which range of the outer optimizer's state, in the format of ``Plan.state``."""
        return [(*part, number) for part, (number, _) in self.parts(layout, self._members.members()) or ()]

    def parts(self, layout: Layout, alive: Collection[Member]) -> list[tuple[Slice, Member]] | None:
        """Return one worker that is still in the run for each range of the state; None if a range is lost."""
        if not self.arrays_per_weight:
            return []
        try:
            return within((0, self.size), [holding for holding in layout.state if holding[1] in alive])
        except ConfigError:
            return None

    def writers(self, layout: Layout, alive: Collection[Member]) -> list[tuple[Slice, Member]]:
        """Return the ranges of the state to write into a checkpoint, with the worker that writes each.

        Raises:
            ClusterTooSmall: The workers do not have all ranges.
        """
        holders = [member for member in layout.at if member in alive][: self.size]
        parts = self.parts(layout, alive)
        if not holders or parts is None:
            raise self.loss_error()
        return parts or list(zip(cut(self.size, len(holders)), holders, strict=True))

    async def fetch_mean(self, layout: Layout, group: str) -> list[Any]:
        """Fetch a mean of slot states from a worker to the master.

        Raises:
            ClusterTooSmall: No worker has it.
        """
        mean = empty_of((await self._call_any(layout, "mean_shapes", layout.generation, group))[group])
        arrays = arrays_of(mean)
        for piece in pieces((0, sum(array.size for array in arrays)), AT_ONCE):
            write_range(arrays, piece, await self._call_any(layout, "mean", layout.generation, group, *piece))
        return mean

    async def write_mean(self, layout: Layout, group: str, slices: Slices, number: int) -> dict[str, int]:
        """Have a worker write a mean of slot states into a checkpoint, in the format of the first slot's state.

        Args:
            layout: Location of the mean.
            group: Group of the mean.
            slices: The slices of the checkpoint.
            number: Number of the slice to write.

        Returns:
            The length of the group.
        """

        async def write_remotely(destination: Destination) -> Written[dict[str, int]]:
            answer: Written[dict[str, int]] = await self._call_any(
                layout, "write_mean", layout.generation, group, destination
            )
            return answer

        async def fetch_arrays() -> tuple[dict[str, Tensor], dict[str, int]]:
            return left_parts(0, {group: await self.fetch_mean(layout, group)})

        return await slices.write_one(number, write_remotely, fetch_arrays)

    async def write(self, layout: Layout, names: Sequence[str], slices: Slices) -> int:
        """Have workers write weights and state into a checkpoint.

        If one of the workers is lost meanwhile, begin again without it.

        Args:
            layout: Location of the weights.
            names: Paths of the weights.
            slices: The slices of the checkpoint.

        Returns:
            The number of slices written.

        Raises:
            ClusterTooSmall: The weights or a range of the state are lost.
        """
        n, listed = len(self.like), [(w.dtype.name, list(w.shape)) for w in self.like]
        slices.sliced[WEIGHTS] = [(f"{i:04d} {names[i]}", *tensor) for i, tensor in enumerate(listed)]
        if self.arrays_per_weight > self.coded:
            slices.sliced[OUTER] = [
                (f"{i:04d}", *listed[i % n]) for i in range((self.arrays_per_weight - self.coded) * n)
            ]
        alive = self._members.members()

        async def write_part(number: int, part: Slice, member: Member) -> None:
            async def ask(verb: str, part: Slice, *more: Any) -> Any:
                return await alive[member].call(self._members.holder, verb, layout.generation, *part, *more)

            async def write_remotely(destination: Destination) -> Written[None]:
                answer: Written[None] = await ask("write", part, names, destination)
                return answer

            async def fetch_arrays() -> tuple[dict[str, Tensor], None]:
                arrays: dict[str, Tensor] = {}
                for piece in pieces(part, AT_ONCE):
                    state = list(await ask("kept", piece)) if self.arrays_per_weight else []
                    values = state.pop() if self.coded else await ask("values", piece)
                    arrays |= slice_arrays(self.like, piece, names, values, state)
                return arrays, None

            try:
                await slices.write_one(number, write_remotely, fetch_arrays)
            except LOSS:
                alive.pop(member, None)
                raise

        while True:
            parts = self.writers(layout, alive)
            if not await _losses(write_part(i, *part) for i, part in enumerate(parts)):
                return len(parts)
            slices.clear()

    async def fetch(self, layout: Layout, *, state: bool = True) -> tuple[Weights, Weights]:
        """Fetch the weights and their state to the master, from the workers that have them.

        Raises:
            ClusterTooSmall: They are lost.
        """
        weights = [np.empty(w.shape, w.dtype) for w in self.like]
        needed = self.arrays_per_weight if state or self.coded else 0
        groups = [[np.empty(w.shape, w.dtype) for w in self.like] for _ in range(needed)]
        alive = self._members.members()

        async def get(verb: str, part: Slice, member: Member, into: Callable[[Any], list[tuple[Weights, Any]]]) -> None:
            worker = alive[member]
            for piece in pieces(part, AT_ONCE):
                try:
                    answer = await worker.call(self._members.holder, verb, layout.generation, *piece)
                except LOSS:
                    alive.pop(member, None)
                    raise
                for arrays, values in into(answer):
                    write_range(arrays, piece, values)

        while True:
            holders = [holder for holder in layout.at if holder in alive][: self.size]
            parts = self.parts(layout, alive) if needed else []
            if not holders or parts is None:
                raise self.loss_error()
            plain = [] if self.coded else list(zip(cut(self.size, len(holders)), holders, strict=True))
            work = [get("values", part, holder, lambda answer: [(weights, answer)]) for part, holder in plain]
            work += [
                get("kept", part, holder, lambda answer: [*zip(groups, answer, strict=True)]) for part, holder in parts
            ]
            if not await _losses(work):
                current = groups.pop() if self.coded else weights
                return current, [array for group in groups for array in group]

    async def _call_any(self, layout: Layout, verb: str, *arguments: Any) -> Any:
        """Call a method of the exchange on the first present worker that has the weights, and return its answer.

        Raises:
            ClusterTooSmall: No such worker is present.
        """
        alive = self._members.members()
        for member in layout.at:
            if member in alive:
                try:
                    return await alive[member].call(self._members.holder, verb, *arguments)
                except LOSS:
                    continue  # the crew notices the loss
        raise self.loss_error()


async def _losses(work: Iterable[Awaitable[None]]) -> int:
    """Wait for all of the work, and return the errors of parts that failed because a worker was lost.

    Raise any other error.
    """
    errors = [error for error in await asyncio.gather(*work, return_exceptions=True) if error is not None]
    if unexpected := [error for error in errors if not isinstance(error, LOSS)]:
        raise unexpected[0]
    return len(errors)


def means_of(states: ShardedStates, replies: Sequence[Reply], *, slots: int, grows: bool) -> list[MeanPlan]:
    """Return plans for computing the means of slot states after these replies.

    If slots may be added later, plan sums instead.
    """
    plans = []
    for group, part in states.parts.items():
        if part.shared:  # the mean over this round, weighted by samples
            left = [(reply.slot, reply.worker, reply.task.round, float(reply.samples)) for reply in replies]
            plans.append(
                MeanPlan(group=group, states=left, total=float(sum(reply.samples for reply in replies)), on_master=[])
            )
        elif part.mean is not None:  # the mean over all slots, also those without a reply
            carried = {reply.slot: (reply.worker, reply.task.round) for reply in replies}
            locations = {slot: carried.get(slot) or states.location_of(slot, group) for slot in range(slots)}
            of_slots = [
                (slot, *(location if isinstance(location, tuple) else (0, 0)), 1.0)
                for slot, location in locations.items()
                if location is not None
            ]
            on_master = [(slot, location) for slot, location in locations.items() if isinstance(location, list)]
            plans.append(
                MeanPlan(group=group, states=of_slots, total=0.0 if grows else float(slots), on_master=on_master)
            )
    return plans
