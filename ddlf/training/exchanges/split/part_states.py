"""Where the states of the parts are: on workers, in a checkpoint, on the master, or nowhere yet. Runs on the master."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import ClusterTooSmall
from ddlf.training.checkpoints.progress_layout import SLOTS
from ddlf.training.checkpoints.slices import WEIGHTS, Destination, Slices, Written, part_name
from ddlf.training.checkpoints.tensors import Array
from ddlf.training.crew.recovery import LOSS, first_line
from ddlf.training.exchanges.members import Member, Members
from ddlf.training.exchanges.split.orders import PartSource
from ddlf.training.exchanges.split.plan import Part, Plan
from ddlf.training.exchanges.split.state_file import State, StateFiles, fetched, in_slice, optimizer_name, weight_name
from ddlf.training.exchanges.split.whole_weights import needs, united, written
from ddlf.training.progress import WeightsRef
from ddlf.training.slot.task import OPTIMIZER


class PartLost(ClusterTooSmall):
    """Error: no worker has the state of a part."""


@dataclass(frozen=True, slots=True)
class Source:
    """A state of the whole model that is not on workers.

    Args:
        weights: The weights, or a reference to a checkpoint or to first weights.
        optimizer: The variables of the optimizer, in the order of ``Plan.optimizer``; None for new ones.
    """

    weights: Weights | WeightsRef
    optimizer: Weights | None


class PartStates:
    """The states of all parts in the current version of the weights.

    Args:
        plan: How the model is cut.
        members: The workers.
        names: Paths of the weights.
        seed: Seed of the first weights.
        source: The state that the run begins with.

    Attributes:
        version: Number of the version.
        locations: For each part, the workers that have its state.
        source: The state that is not on workers; None if only workers have it.
    """

    def __init__(self, plan: Plan, members: Members, names: Sequence[str], seed: int, source: Source) -> None:
        self._plan, self._members, self._names, self._seed = plan, members, names, seed
        self.version = 0
        self.locations: dict[int, list[Member]] = {}
        self.source: Source | None = source
        self._on_master = StateFiles()

    def begin_with(self, source: Source) -> None:
        """Make a state the current one that no worker has."""
        self.version += 1
        self.locations, self.source = {}, source

    def accept(self, holders: dict[int, list[Member]]) -> None:
        """Make the state after a round the current one, which only workers have.

        Args:
            holders: For each part, the workers that have its state.
        """
        self.version += 1
        self.locations, self.source = holders, None
        self._on_master.drop_before(self.version)

    def holders(self, part: int) -> list[tuple[Member, ProxyWorker]]:
        """Return the workers of the run that have the state of a part."""
        present = self._members.members()
        return [(member, present[member]) for member in self.locations.get(part, ()) if member in present]

    async def state_for(self, part: int, worker: ProxyWorker) -> PartSource | None:
        """Return where a worker gets the state of a part; None if it has the state.

        Raises:
            PartLost: The state is lost.
        """
        holders = [proxy for _, proxy in self.holders(part)]
        if any(holder.id == worker.id for holder in holders):
            return None
        if holders:
            return PartSource(worker=holders[0].id)
        if (part, self.version) in self._on_master:
            return PartSource(arrays=self._on_master.of(part, self.version).views())
        if self.source is None:
            raise self.loss_error(part)
        weights = self.source.weights
        if isinstance(weights, WeightsRef) and weights.first is not None:
            return PartSource(seed=self._seed)
        model_part = self._plan.parts[part]
        if isinstance(weights, WeightsRef) and (slices := weights.slices) is not None:
            slice_names = self._in_slices(self._arrays_of(model_part))
            names_in_files = {number: {*file.arrays} for number, file in slices.by_number.items()}
            listed = set[str]().union(*names_in_files.values())
            if all(name in listed for array, name in slice_names.items() if array.startswith("weight")):
                slice_names = {array: name for array, name in slice_names.items() if name in listed}
                numbers = [number for number, names in names_in_files.items() if names & {*slice_names.values()}]
                await self._members.checkpoints.give(worker, slices, numbers)
                return PartSource(slices=slice_names)
        whole = await asyncio.to_thread(weights.read) if isinstance(weights, WeightsRef) else weights
        arrays = {weight_name(index): self._plan.piece(part, index, whole[index]) for index in model_part.all_weights}
        if (optimizer := self.source.optimizer) is not None:
            weight_of = self._plan.optimizer.weight_of
            arrays |= {
                optimizer_name(index): self._plan.piece(part, weight_of[index], optimizer[index])
                for index in self._optimizer_of(model_part)
            }
        return PartSource(arrays=arrays)

    def loss_error(self, part: int) -> PartLost:
        """Return the error that says that the state of a part is lost."""
        return PartLost(
            f"the workers that had part {part + 1} of the model and its copy are lost, and the run has no checkpoint",
            hint="set checkpoint (--checkpoint FOLDER): then the run continues from the last one",
        )

    # -- on the master ------------------------------------------------------------------------------------------------

    async def fetch(self) -> Source:
        """Return the whole state. Arrays that were on workers are in files on the master.

        Raises:
            PartLost: A part is lost.
        """
        if self.source is not None:
            return self.source
        plan, views = self._plan, dict[str, np.ndarray[Any, Any]]()
        for part in plan.parts:
            if part.weights or not part.number:
                names = written(plan, part)
                views |= (await self._united_here(part.number, names)).views()
        weights = [views[weight_name(index)] for index in range(len(self._names))]
        return Source(weights, [views[optimizer_name(index)] for index in range(len(plan.optimizer.weight_of))])

    async def _united_here(self, part: int, names: Sequence[str]) -> State:
        """Return whole arrays that a part writes, in a file on the master."""
        states = {number: await self.fetch_part(number) for number in {part, *needs(self._plan, names)}}
        return await asyncio.to_thread(united, self._plan, part, states, names)

    async def fetch_part(self, part: int) -> State:
        """Return the state of a part, fetched from a worker into a file on the master.

        Raises:
            PartLost: The part is lost.
        """
        version = self.version
        if (part, version) not in self._on_master:
            reason = ""
            for _, worker in self.holders(part):
                try:
                    state = await fetched(partial(worker.call, self._members.role), part, version)
                except LOSS as error:  # the crew notices the loss
                    reason = first_line(error)
                    continue
                self._on_master.put(part, version, state)
                break
            else:
                raise self.loss_error(part) from (ConnectionError(reason) if reason else None)
        return self._on_master.of(part, version)

    async def hand_back(self, leaving: Callable[[int], bool]) -> None:
        """Fetch the states that only workers have that leave.

        Args:
            leaving: Returns whether the worker with a number leaves.
        """
        for part in self._plan.parts if self.source is None else ():
            if all(leaving(number) for (number, _), _ in self.holders(part.number)):
                await self.fetch_part(part.number)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    async def write(self, holders_of: dict[int, list[Member]], version: int, slices: Slices) -> None:
        """Have the workers of the parts write their slices of a checkpoint.

        Args:
            holders_of: For each part, the workers that have its state.
            version: The version of these states.
            slices: The slices of the checkpoint.
        """
        present = self._members.members()
        states = StateFiles()  # shares that the master unites, if a worker cannot write
        holders = {
            part: [present[member] for member in members if member in present] for part, members in holders_of.items()
        }

        async def state(part: int) -> State:
            if (part, version) not in states:
                for proxy in holders[part]:
                    try:
                        fetched_state = await fetched(partial(proxy.call, self._members.role), part, version)
                    except LOSS:
                        continue
                    states.put(part, version, fetched_state)
                    break
                else:
                    raise self.loss_error(part)
            return states.of(part, version)

        async def write_part(part: Part) -> None:
            names = written(self._plan, part)
            stored = self._in_slices(names)
            shares = needs(self._plan, names)
            share_holders = [[number, [proxy.id for proxy in holders[number]]] for number in shares]

            async def on_worker(destination: Destination) -> Written[None] | None:
                for proxy in holders[part.number] if all(workers for _, workers in share_holders) else ():
                    arguments = part.number, version, destination, stored, share_holders
                    try:
                        return await proxy.call(self._members.role, "write", *arguments), None
                    except LOSS:
                        continue
                return None

            async def fetch_arrays() -> tuple[dict[str, Array], None]:
                part_states = {number: await state(number) for number in {part.number, *shares}}
                return in_slice(united(self._plan, part.number, part_states, names).views(), stored), None

            await slices.write_one(part.number, on_worker, fetch_arrays)

        try:
            await asyncio.gather(*map(write_part, self._plan.parts))
        finally:
            states.close()
        like = self._plan.graph.model.weights
        slices.sliced[WEIGHTS] = [
            (f"{index:04d} {name}", np.dtype(weight.dtype).name, list(map(int, weight.shape)))
            for index, (name, weight) in enumerate(zip(self._names, like, strict=True))
        ]
        slices.left = [{OPTIMIZER: len(self._plan.optimizer.paths)}]

    def _in_slices(self, names: Iterable[str]) -> dict[str, str]:
        """Return for arrays of states their names in slices."""

        def stored(name: str) -> str:
            kind, index = name.split()
            if kind == "weight":
                return part_name(WEIGHTS, 0, f"{int(index):04d} {self._names[int(index)]}")
            return part_name(SLOTS + OPTIMIZER, 0, f"slot 0000 {int(index):04d}")

        return {name: stored(name) for name in names}

    def _arrays_of(self, part: Part) -> list[str]:
        """Return the names of the arrays in the state of a part."""
        return [*map(weight_name, part.all_weights), *map(optimizer_name, self._optimizer_of(part))]

    def _optimizer_of(self, part: Part) -> list[int]:
        """Return the numbers of the variables of the optimizer that a part has."""
        own_indices = {*part.weights, None}
        return [index for index, weight in enumerate(self._plan.optimizer.weight_of) if weight in own_indices]
