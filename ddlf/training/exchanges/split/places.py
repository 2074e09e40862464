"""Where the states of the parts are: on workers, in a checkpoint, on the master, or nowhere yet. Runs on the master."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import ClusterTooSmall
from ddlf.training.checkpoints.slices import WEIGHTS, Slices, part_name
from ddlf.training.checkpoints.stored import SLOTS
from ddlf.training.crew.recovery import LOSS, first_line
from ddlf.training.exchanges.members import Member, Members
from ddlf.training.exchanges.split.kept import KeptStates, State, fetched, in_slice, optimizer_name, weight_name
from ddlf.training.exchanges.split.plan import Part, Plan
from ddlf.training.progress import WeightsRef
from ddlf.training.slot.task import OPTIMIZER


@dataclass(frozen=True, slots=True)
class Source:
    """A state of the whole model that is not on workers.

    Args:
        weights: The weights, or a reference to a checkpoint or to first weights.
        optimizer: The variables of the optimizer, in the order of ``Plan.optimizer``; None for new ones.
    """

    weights: Weights | WeightsRef
    optimizer: Weights | None


class Places:
    """The states of all parts in the current version of the weights.

    Args:
        plan: How the model is cut.
        members: The workers.
        names: Paths of the weights.
        seed: Seed of the first weights.
        source: The state that the run begins with.

    Attributes:
        version: Number of the version.
        at: For each part, the workers that have its state.
        source: The state that is not on workers; None if only workers have it.
    """

    def __init__(self, plan: Plan, members: Members, names: Sequence[str], seed: int, source: Source) -> None:
        self._plan, self._members, self._names, self._seed = plan, members, names, seed
        self.version = 0
        self.at: dict[int, list[Member]] = {}
        self.source: Source | None = source
        self._here = KeptStates()

    def begin_with(self, source: Source) -> None:
        """Make a state the current one that no worker has."""
        self.version += 1
        self.at, self.source = {}, source

    def moved(self, at: dict[int, list[Member]]) -> None:
        """Make the state after a round the current one, which only workers have.

        Args:
            at: For each part, the workers that have its state.
        """
        self.version += 1
        self.at, self.source = at, None
        self._here.drop_before(self.version)

    def holders(self, part: int) -> list[tuple[Member, ProxyWorker]]:
        """Return the workers of the run that have the state of a part."""
        there = self._members.members()
        return [(one, there[one]) for one in self.at.get(part, ()) if one in there]

    async def state_for(self, part: int, worker: ProxyWorker) -> dict[str, Any] | None:
        """Return the entry ``state`` of an order: how a worker gets the state of a part.

        Raises:
            ClusterTooSmall: The state is lost.
        """
        holders = [proxy for _, proxy in self.holders(part)]
        if any(one.id == worker.id for one in holders):
            return None
        if holders:
            return {"from": holders[0].id}
        if (part, self.version) in self._here:
            return {"arrays": self._here.of(part, self.version).views()}
        if self.source is None:
            raise self.gone(part)
        weights = self.source.weights
        if isinstance(weights, WeightsRef) and weights.first is not None:
            return {"seed": self._seed}
        me = self._plan.parts[part]
        if isinstance(weights, WeightsRef) and (slices := weights.slices) is not None and not self._plan.program.pieces:
            wanted = self._in_slices(me, everything=True)
            has = [{*file["arrays"]} for file in slices.files]
            listed = set[str]().union(*has)
            if all(name in listed for which, name in wanted.items() if which.startswith("weight")):
                wanted = {which: name for which, name in wanted.items() if name in listed}
                numbers = [number for number, names in enumerate(has) if names & {*wanted.values()}]
                await self._members.checkpoints.give(worker, slices, numbers)
                return {"slices": wanted}
        whole = await asyncio.to_thread(weights.read) if isinstance(weights, WeightsRef) else weights
        found = {weight_name(place): self._plan.piece(part, place, whole[place]) for place in me.all_weights}
        if (optimizer := self.source.optimizer) is not None:
            of = self._plan.optimizer.of
            found |= {
                optimizer_name(place): self._plan.piece(part, of[place], optimizer[place])
                for place in self._optimizer_of(me, everything=True)
            }
        return {"arrays": found}

    def gone(self, part: int) -> ClusterTooSmall:
        """Return the error that says that the state of a part is lost."""
        return ClusterTooSmall(
            f"the workers that had part {part + 1} of the model are lost",
            hint="resume from the last checkpoint; with checkpoint_every=1 no round is lost",
        )

    # -- on the master ------------------------------------------------------------------------------------------------

    async def bring(self) -> Source:
        """Return the whole state. Arrays that were on workers are in files on the master.

        Raises:
            ClusterTooSmall: A part is lost.
        """
        if self.source is not None:
            return self.source
        plan, found = self._plan, dict[str, list[np.ndarray[Any, Any]]]()
        for part in plan.parts:
            if part.weights or not part.number:
                views = (await self.bring_part(part.number)).views()
                mine = [weight_name(place) for place in part.weights]
                mine += [optimizer_name(place) for place in self._optimizer_of(part, everything=False)]
                for name in mine:
                    found.setdefault(name, []).append(views[name])
        weights = [plan.joined(place, found[weight_name(place)]) for place in range(len(self._names))]
        of = enumerate(plan.optimizer.of)
        return Source(weights, [plan.joined(weight, found[optimizer_name(place)]) for place, weight in of])

    async def bring_part(self, part: int) -> State:
        """Return the state of a part, fetched from a worker into a file on the master.

        Raises:
            ClusterTooSmall: The part is lost.
        """
        version = self.version
        if (part, version) not in self._here:
            why = ""
            for _, worker in self.holders(part):
                try:
                    state = await fetched(partial(worker.call, self._members.role), part, version)
                except LOSS as error:  # the crew notices the loss
                    why = first_line(error)
                    continue
                self._here.put(part, version, state)
                break
            else:
                raise self.gone(part) from (ConnectionError(why) if why else None)
        return self._here.of(part, version)

    async def hand_back(self, leaving: Callable[[int], bool]) -> None:
        """Fetch the states that only workers have that leave.

        Args:
            leaving: Returns whether the worker with a number leaves.
        """
        for part in self._plan.parts if self.source is None else ():
            if all(leaving(number) for (number, _), _ in self.holders(part.number)):
                await self.bring_part(part.number)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    async def write(self, at: dict[int, list[Member]], version: int, slices: Slices) -> None:
        """Have the workers of the parts write their slices of a checkpoint.

        Args:
            at: For each part, the workers that have its state.
            version: The version of these states.
            slices: The slices of the checkpoint.
        """
        there = self._members.members()

        async def one(part: Part) -> None:
            names = self._in_slices(part, everything=False)
            proxies = [there[member] for member in at[part.number] if member in there]

            async def written(place: dict[str, Any]) -> dict[str, Any]:
                for proxy in proxies:
                    try:
                        told = await proxy.call(self._members.role, "write", part.number, version, place, names)
                        return {**told, "by": proxy.id}
                    except LOSS:
                        continue
                return {"why": ""}

            async def here() -> tuple[dict[str, Any], dict[str, Any]]:
                for proxy in proxies:
                    try:
                        state = await fetched(partial(proxy.call, self._members.role), part.number, version)
                        return in_slice(state.views(), names), {}
                    except LOSS:
                        continue
                raise self.gone(part.number)

            await slices.write_one(part.number, written, here)

        await asyncio.gather(*map(one, self._plan.parts))
        like = self._plan.graph.model.weights
        slices.sliced[WEIGHTS] = [
            (f"{place:04d} {name}", np.dtype(one.dtype).name, list(map(int, one.shape)))
            for place, (name, one) in enumerate(zip(self._names, like, strict=True))
        ]
        slices.left = [{OPTIMIZER: len(self._plan.optimizer.paths)}]

    def _in_slices(self, part: Part, *, everything: bool) -> dict[str, str]:
        """Return for each array of a part's state its name in slices.

        Args:
            part: The part.
            everything: Whether to include what the part has, but other parts write.
        """
        weights = part.all_weights if everything else part.weights
        found = {weight_name(place): part_name(WEIGHTS, 0, f"{place:04d} {self._names[place]}") for place in weights}
        return found | {
            optimizer_name(place): part_name(SLOTS + OPTIMIZER, 0, f"slot 0000 {place:04d}")
            for place in self._optimizer_of(part, everything=everything)
        }

    def _optimizer_of(self, part: Part, *, everything: bool) -> list[int]:
        """Return the numbers of the variables of the optimizer that a part has, or that it writes."""
        if not everything:
            return self._plan.writes(part)
        mine = {*part.weights, None}
        return [place for place, of in enumerate(self._plan.optimizer.of) if of in mine]
