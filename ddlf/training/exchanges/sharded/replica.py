"""A replica whose weights come from the other workers, and whose updates go to them: the sharded exchange. Runs in the executor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ddlf.algorithms.encoding import EncodedUpdate
from ddlf.algorithms.weights import Weights
from ddlf.training.exchanges.peers import Unreached
from ddlf.training.exchanges.sharded.copies import Shapes
from ddlf.training.exchanges.sharded.plan import State
from ddlf.training.exchanges.sharded.worker import ShardEnd
from ddlf.training.roles.calling import CallingReplica
from ddlf.training.roles.statistics import moving
from ddlf.training.slot.app import App
from ddlf.training.slot.parts.fragments import exchanged
from ddlf.training.slot.task import Reply, SlotState, Task
from ddlf.training.slot.transfer import whole
from ddlf.worker.activity import Shard
from ddlf.worker.methods import concurrent, offered

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker


class ShardedReplica(CallingReplica):
    """One worker's copy of an app and its model, with its end of the sharded exchange.

    Args:
        worker: Worker that it is on.
        app: App as it came from the master.
        run: Name of the run, by which the other workers find their replicas.
    """

    _end: ShardEnd

    def __init__(self, worker: Worker, app: App, run: str) -> None:
        super().__init__(worker, app, run)
        self._end = ShardEnd(worker.id, self._ask, self.slots)
        self._own = type(app).train.__module__ != "ddlf.app"  # it may change what it is given, and what it returned

    # -- verbs of the master ------------------------------------------------------------------------------------------

    async def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """See ``Replica``; the weights are those of a generation that others have, but for ``ddlf check``."""
        if "generation" in task["weights"]:
            task = (await self._end.begin(Task.from_message(task), self._model.like)).to_message()
        return await super().train(task)

    async def measure(self, task: dict[str, Any]) -> Any:
        """See ``Replica``; the weights are those of a generation, and the statistics stay here: the answer is what makes them unusable, or None."""
        asked, like = Task.from_message(task), self._model.like
        await self._end.have(**asked.weights, like=like)
        weights = self._end.weights(asked.weights["generation"])
        found = await super().measure({**task, "weights": whole(weights)})
        names = [weight.path for weight in self.app.model.weights]
        return self._end.measured(asked, found, moving(self.app.model), names)

    @concurrent
    async def give(self, slot: int, number: int, groups: tuple[str, ...]) -> SlotState:
        """See ``Replica``; also of a copy."""
        left = self._end.copies.state(slot, number)
        return {name: left[name] for name in groups if name in left}

    @concurrent
    async def hold(
        self,
        generation: int,
        weights: Weights,
        state: Weights,
        codec: str,
        trainable: list[bool],
        means: SlotState | None = None,
    ) -> None:
        """See ``ShardEnd``."""
        await self._end.hold(generation, weights, state, codec, trainable, means)

    @concurrent
    async def hold_restored(self, generation: int, listed: dict[str, Any], codec: str, trainable: list[bool]) -> None:
        """See ``ShardEnd``."""
        await self._end.hold_restored(generation, listed, codec, trainable)

    @concurrent
    async def left_restored(self, slot: int, number: int, known: SlotState, lengths: dict[str, int], of: int) -> None:
        """See ``ShardEnd``."""
        await self._end.left_restored(slot, number, known, lengths, of)

    @concurrent
    async def merge(self, plan: dict[str, Any]) -> dict[str, Any]:
        """See ``ShardEnd``."""
        found = await self._end.merge(plan)
        if self._end.shard is not None:
            self._worker.on_shard(Shard(*self._end.shard, self._role[0]))
        return found

    async def close(self) -> None:
        """See ``Replica``."""
        self._worker.on_shard(None)
        await super().close()

    async def _weights_of(self, which: dict[str, Any]) -> Weights | None:
        if "generation" not in which:
            return await super()._weights_of(which)
        try:  # where they travel as a codec makes them, ``exact`` says who has parts of them as they are
            exact, generation = which["exact"], which["generation"]
            return await self._end.exact(generation, exact) if exact else self._end.weights(generation)
        except Unreached:
            return None

    @concurrent
    async def write(self, generation: int, begin: int, end: int, names: list[str], place: dict[str, Any]) -> Any:
        """See ``ShardEnd``."""
        return await self._end.write(generation, begin, end, names, place)

    @concurrent
    async def write_left(self, slot: int, number: int, groups: tuple[str, ...], place: dict[str, Any]) -> Any:
        """See ``ShardEnd``."""
        return await self._end.write_left(slot, number, groups, place)

    @concurrent
    async def write_mean(self, generation: int, group: str, place: dict[str, Any]) -> Any:
        """See ``ShardEnd``."""
        return await self._end.write_mean(generation, group, place)

    @concurrent
    async def compare(self, asked: dict[str, Any]) -> dict[str, Any]:
        """See ``ShardEnd``."""
        return await self._end.compare(asked)

    @concurrent
    async def lengths(self, generation: int, slot: int, groups: list[list[int]], factor: float) -> list[float]:
        """See ``ShardEnd``."""
        return await self._end.lengths(generation, slot, groups, factor)

    # -- verbs of other workers, and of the master when it wants the model ----------------------------------------------

    @offered
    async def update(self, generation: int, slot: int, begin: int, end: int) -> dict[str, Any]:
        """See ``ShardEnd``."""
        return await self._end.update(generation, slot, begin, end)

    @offered
    async def values(self, generation: int, begin: int, end: int, since: int | None = None) -> Weights | EncodedUpdate:
        """See ``ShardEnd``."""
        return await self._end.values(generation, begin, end, since)

    @offered
    async def peaks(self, generation: int) -> list[float]:
        """See ``ShardEnd``."""
        return await self._end.peaks(generation)

    @offered
    async def mean(self, generation: int, group: str, begin: int, end: int) -> Weights:
        """See ``ShardEnd``."""
        return await self._end.mean(generation, group, begin, end)

    @offered
    async def mean_shapes(self, generation: int, group: str) -> Shapes:
        """See ``ShardEnd``."""
        return await self._end.mean_shapes(generation, group)

    @offered
    async def kept(self, generation: int, begin: int, end: int) -> State:
        """See ``ShardEnd``."""
        return await self._end.kept(generation, begin, end)

    @offered
    async def shapes(self, slot: int, number: int, groups: list[str]) -> Shapes:
        """See ``Copies``."""
        return await self._end.copies.shapes(slot, number, groups)

    @offered
    async def left(self, slot: int, number: int, group: str, begin: int, end: int) -> Weights:
        """See ``Copies``."""
        return await self._end.copies.left(slot, number, group, begin, end)

    # -- what is done on the compute thread -----------------------------------------------------------------------------

    def carry(self, task: Task) -> Reply:
        """See ``Replica``; the update stays here, and the reply says what makes it unusable, if anything does."""
        if "generation" not in task.weights:
            return super().carry(task)
        weights = whole(self._end.weights(task.weights["generation"]), copy=self._own)
        reply = super().carry(dataclasses.replace(task, weights=weights))
        names = [weight.path for weight in self.app.model.weights]
        tensors = exchanged(task, self._model.like, self._model.lossless)
        return dataclasses.replace(reply, update=self._end.sent(task, reply.update, names, tensors, copy=self._own))
