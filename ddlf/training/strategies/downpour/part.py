"""A part of a model as a part of a replica in Downpour: it fetches and pushes the weights of its layers only.

Runs in the executor. All parts of a replica fetch and push at the same steps, each from and to the servers of its
layers. Between two fetches a part steps with the compiled optimizer's learning rate, as a whole replica does.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ddlf.algorithms.flat_weights import Row, Rows
from ddlf.algorithms.push_rules import Cadence, is_finite
from ddlf.errors import BadUpdate
from ddlf.training.context import App
from ddlf.training.evaluation.metrics import scalars
from ddlf.training.exchanges.split.inbox import Stopped
from ddlf.training.exchanges.split.orders import PartOrder, PartTask
from ddlf.training.exchanges.split.part import ModelPart
from ddlf.training.exchanges.split.replica import SplitReplica
from ddlf.training.roles import REPLICA, SERVERS
from ddlf.training.slot.build import ModelReport
from ddlf.training.slot.keras_model import reseed
from ddlf.training.slot.optimizers import innermost, write_rates
from ddlf.training.slot.pushes import RoundPushes
from ddlf.training.slot.variables import set_value
from ddlf.training.strategies.downpour.client import ModelReplica, PartEntry, SomeOwners, record
from ddlf.training.strategies.downpour.replica import Stepper, wait
from ddlf.training.strategies.downpour.server import Servers
from ddlf.worker.peers import calls_of

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker

T = TypeVar("T")


class PartStepper(Stepper):
    """The weights of a part, and its optimizer, which sums the gradients and takes plain SGD steps.

    Args:
        model: The model, whose optimizer is one of ``Stepper.replacement_of``.
        rows: Layout of the whole model's weights as rows.
        indices: Numbers of the part's weights.
        trained: The variables of the optimizer.
    """

    def __init__(self, model: Any, rows: Rows, indices: Sequence[int], trained: Sequence[Any]) -> None:
        own_weights = {*indices}
        own_rows = Rows(
            rows.like, [i for i in rows.trained if i in own_weights], [i for i in rows.rest if i in own_weights]
        )
        self._begin_with(model, own_rows, model.optimizer, trained)


class DownpourPart(SplitReplica):
    """One worker's part of an app's model in Downpour, and the servers on this worker.

    Args:
        worker: The replica's worker.
        app: App that the master sent.
        run: Name of the run.
    """

    def __init__(self, worker: Worker, app: App, run: str) -> None:
        super().__init__(worker, app, run)
        self._rows: Rows
        self._stepper: PartStepper
        self._client: ModelReplica | None = None
        self._base: Row = np.zeros(0, np.float32)  # untrained values at the last push or take
        ask = calls_of(worker.id, worker.peers, worker.roles.call, run)
        self._servers = Servers(worker.id, run, worker.roles, ask, lambda: self._rows, worker.on_shard)
        worker.roles.play(run, SERVERS, self._servers, of=REPLICA)

    async def close(self) -> None:
        """Close the servers on this worker, then do what ``SplitReplica.close`` does."""
        self._worker.on_shard(None)
        await self._servers.close()
        await super().close()

    # -- on the compute thread ----------------------------------------------------------------------------------------

    def build(self, seed: int | None = None) -> ModelReport:
        """Build the model without memory, and replace its optimizer by one that sums gradients."""
        report = super().build(seed)
        model = self.app.model
        trained = {id(weight) for weight in model.trainable_weights}
        like = [np.broadcast_to(np.zeros((), str(weight.dtype)), tuple(weight.shape)) for weight in model.weights]
        self._rows = Rows.of(like, [id(weight) in trained for weight in model.weights])
        model.optimizer = Stepper.replacement_of(innermost(model.optimizer))
        return report

    def _become(self, order: PartOrder) -> ModelPart:
        """Make this worker's part, unless it has it already. The servers have its weights."""
        number = order.part
        if self._part is not None and self._part.number != number:
            self._rebuild(self._seed)
        if self._part is None:
            model = self.app.model

            def fill(index: int) -> None:
                like = self._rows.like[index]
                set_value(model.weights[index], np.zeros(like.shape, like.dtype))

            part = self._make_part(number, order, fill)
            self._stepper = PartStepper(model, self._rows, self._plan.parts[number].weights, part.trained)
        assert self._part is not None
        return self._part

    def _keep(self, part: ModelPart, version: int) -> None:
        """Do nothing: the servers have the state."""

    def _pushed(self) -> RoundPushes:
        assert self._client is not None
        return record([self._client])

    def _rounds(self, part: ModelPart, part_task: PartTask, order: PartOrder) -> dict[str, float]:
        """Train a round, and fetch and push weights meanwhile. Return the metrics, if this part has the loss."""
        assert order.entry is not None
        task, entry = part_task.task, PartEntry.from_message(order.entry)
        size, count = task.batch_size, len(task.indices)
        steps, cadence = -(-count // size), Cadence(n_fetch=self.app.n_fetch, n_push=self.app.n_push)
        client = self._client = ModelReplica(
            id=entry.id,
            life=entry.life,
            round=task.round,
            steps=steps,
            owners=SomeOwners(self._servers.owners, entry.shards),
            cadence=cadence,
            numbers=[entry.numbers[shard] for shard in entry.shards],
            epochs=[entry.epochs[shard] for shard in entry.shards],
            begins=min(entry.numbers),
        )
        stepper, skipped = self._stepper, steps - client.left
        try:
            reseed(self.app.model, (task.seed, task.round, task.slot, part.number))
            if task.rates:
                write_rates(self.app.model, task.rates[0])
            stepper.begin(task.round * steps)
            stepper.begin_at(task.position, client.left)
            part.begin_round()
            stage = self._stage = self._begin(part, order)
            part.begin_epoch()
            remaining = task.indices[skipped * size :]
            self._fed.append(remaining)
            batches = self._batches(part, replace(task, indices=remaining))
            for number in range(skipped, steps):
                if self.stopping:
                    raise Stopped
                if cadence.takes(client.done):
                    self._take(client)
                batch, samples = next(batches), min(size, count - number * size)
                if number == skipped:
                    part.prepare(batch)
                stage.train(batch, samples, (task.seed, task.round, 0, number, *([task.slot] * (task.slot > 0))))
                client.done += 1
                if cadence.pushes(client.done - 1, client.left):
                    self._push(client, entry.all)
                self._tell_moved(part, task.first_epoch, number * size + samples)
            self._wait(client.pushed())
        finally:
            self._loop.call_soon_threadsafe(client.end)
        return scalars(self.app.model.get_metrics_result()) if part.is_last and client.left else {}

    def _take(self, client: ModelReplica) -> None:
        stepper = self._stepper
        unpushed = None if client.done % client.cadence.n_push == 0 else stepper.unpushed()
        own_change = self._base - stepper.rest() if client.done else np.float32(0)
        weights, rest = self._wait(client.take(unpushed, stepper.rate))
        self._base = rest
        stepper.set(weights, rest - own_change)

    def _push(self, client: ModelReplica, replicas: int) -> None:
        stepper = self._stepper
        gradient, rest = stepper.unpushed(), stepper.rest()
        stepper.take_up(None)
        change = np.float32(1 / replicas) * (self._base - rest)
        if not (is_finite(gradient) and is_finite(change)):
            raise BadUpdate(
                f"push {client.next + 1} of replica {client.id + 1} has NaN or infinite values",
                hint="lower the learning rate of the model, or that of push_rule",
            )
        self._base = rest
        self._wait(client.push(gradient, change))

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, wait for it on the thread that trains, and return its result.

        Raises:
            Stopped: Training must stop before the coroutine has ended.
        """
        return wait(coroutine, self._loop, lambda: self.stopping, Stopped)
