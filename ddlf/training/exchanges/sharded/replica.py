"""A replica of the sharded exchange: it fetches weights from workers, and offers its updates. Runs in the executor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ddlf.algorithms.weights import Weights
from ddlf.training.context import App
from ddlf.training.exchanges.replica import HoldingReplica
from ddlf.training.exchanges.sharded.plan import COPIES, EXCHANGE, EvaluatedWeights, HeldWeights
from ddlf.training.exchanges.sharded.worker import ShardedWorker
from ddlf.training.roles import REPLICA
from ddlf.training.slot.batchnorm import moving
from ddlf.training.slot.parts import exchanged_tensors, message_of_whole
from ddlf.training.slot.task import Reply, SlotState, Task
from ddlf.worker.activity import Shard
from ddlf.worker.calls import concurrent
from ddlf.worker.peers import Unreached, calls_of

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker


class ShardedReplica(HoldingReplica):
    """One worker's copy of an app and its model, which also stores and computes weights in the sharded exchange.

    Args:
        worker: The replica's worker.
        app: App that the master sent.
        run: Name of the run. Other workers find their replicas by it.

    Attributes:
        exchange: This worker's part of the exchange.
    """

    def __init__(self, worker: Worker, app: App, run: str) -> None:
        super().__init__(worker, app, run)
        ask = calls_of(worker.id, worker.peers, worker.roles.call, run)
        self.exchange = ShardedWorker(worker.id, ask, self.slots, lambda shard: worker.on_shard(Shard(*shard, run)))
        worker.roles.play(run, EXCHANGE, self.exchange, of=REPLICA)
        worker.roles.play(run, COPIES, self.exchange.copies, of=REPLICA)
        # A user's train may change its arguments and its result.
        self._has_own_train = type(app).train.__module__ != "ddlf.app"

    # -- verbs of the master ------------------------------------------------------------------------------------------

    async def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """Train a slot for one round, like ``Replica.train``.

        Fetch the weights that the task names from other workers first, except in ``ddlf check``.
        """
        if "generation" in task["weights"]:
            task = (await self.exchange.begin(Task.from_message(task), self._model.like)).to_message()
        return await super().train(task)

    async def measure(self, message: dict[str, Any]) -> Any:
        """Measure moving statistics of batch normalization for weights that workers have.

        Keep the statistics on this worker. Return the reason why they are unusable, or None. If ``exchange='auto'`` has
        chosen the star, return the statistics, like ``Replica.measure``.
        """
        if "generation" not in message["weights"]:
            return await super().measure(message)
        task, like = Task.from_message(message), self._model.like
        reference = HeldWeights.from_message(task.weights)
        await self.exchange.have(reference, like)
        weights = self.exchange.weights(reference.generation)
        statistics = await super().measure({**message, "weights": message_of_whole(weights)})
        names = [weight.path for weight in self.app.model.weights]
        return self.exchange.measured(task, statistics, moving(self.app.model), names)

    @concurrent
    async def give(self, slot: int, number: int, groups: tuple[str, ...]) -> SlotState:
        """Return groups of a slot's state, like ``Replica.give``, but also from a backup of another worker's slot."""
        left = self.exchange.copies.state(slot, number)
        return {name: left[name] for name in groups if name in left}

    async def close(self) -> None:
        """Remove this worker's range from ``ddlf status``, then do what ``Replica.close`` does."""
        self._worker.on_shard(None)
        await super().close()

    async def _weights_of(self, reference: dict[str, Any]) -> Weights | None:
        if "generation" not in reference:
            return await super()._weights_of(reference)
        evaluated = EvaluatedWeights.from_message(reference)
        try:
            if evaluated.exact:
                return await self.exchange.exact(evaluated.generation, evaluated.exact)
            return self.exchange.weights(evaluated.generation)
        except Unreached:
            return None

    # -- on the compute thread ----------------------------------------------------------------------------------------

    def carry(self, task: Task) -> Reply:
        """Train a slot for one round, and keep the update on this worker.

        The reply contains no update, but the reason why it is unusable, or None.
        """
        if "generation" not in task.weights:
            return super().carry(task)
        reference = HeldWeights.from_message(task.weights)
        weights = message_of_whole(self.exchange.weights(reference.generation), copy=self._has_own_train)
        reply = super().carry(dataclasses.replace(task, weights=weights))
        names = [weight.path for weight in self.app.model.weights]
        tensors = exchanged_tensors(task, self._model.like, self._model.lossless)
        return dataclasses.replace(
            reply, update=self.exchange.sent(task, reply.update, names, tensors, copy=self._has_own_train)
        )
