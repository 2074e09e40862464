"""A worker in Downpour SGD: it carries replicas, which share its model, and owns shards, which answer meanwhile. Runs in the executor.

The replicas of a slot take turns in one ``fit``, some batches each: whose turn it is is drawn at random from the seed. Between two steps a callback
has the model become another replica, hands over what is to be pushed, and takes the weights that were fetched.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from ddlf.algorithms.push_rules import Cadence
from ddlf.algorithms.weights import Weights
from ddlf.errors import AppError
from ddlf.training.downpour.client import ModelReplica
from ddlf.training.downpour.stepper import Stepper
from ddlf.training.downpour.turns import Stopped, Turns
from ddlf.training.downpour.worker import End, record, shares
from ddlf.training.exchanges.peers import Unreached
from ddlf.training.roles.calling import CallingReplica
from ddlf.training.slot.app import App, run_train
from ddlf.training.slot.keras_model import KerasModel
from ddlf.training.slot.parts.callbacks import WorkerCallbacks
from ddlf.training.slot.parts.optimizer import OptimizerState
from ddlf.training.slot.replica import MOVED_EVERY_S
from ddlf.training.slot.task import MOST_FILES, Reply, Task
from ddlf.worker.activity import Shard
from ddlf.worker.methods import concurrent, offered

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker

LOOK_S = 0.2
"""How often the thread that computes looks whether it is to stop, while it waits for shards."""


class DownpourReplica(CallingReplica):
    """One worker's copy of an app and its model, with its end of Downpour.

    Args:
        worker: Worker that it is on.
        app: App as it came from the master.
        run: Name of the run, by which the other workers find their replicas.
    """

    PARTS = (OptimizerState, WorkerCallbacks)

    _end: End
    _model: KerasModel

    def __init__(self, worker: Worker, app: App, run: str) -> None:
        super().__init__(worker, app, run)
        self._end = End(worker.id, self._ask, lambda: self._stepper.rows)
        self._stepper: Stepper
        self._cadence: Cadence
        self._turns: Turns | None = None  # of this round
        self._loop: asyncio.AbstractEventLoop

    @property
    def turn(self) -> int:
        """Number of the replica, from 0, that the model is: for Keras's callbacks, while ``fit`` goes on."""
        assert self._turns is not None
        return self._turns.now

    # -- verbs ----------------------------------------------------------------------------------------------------------

    async def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """See ``Replica``."""
        self._loop = asyncio.get_running_loop()
        return await super().train(task)

    @concurrent
    async def own(self, epoch: int, shard: int, facts: dict[str, Any], falls: list[list[int]]) -> None:
        """See ``End``."""
        await self._end.own(epoch, shard, facts, falls)
        self._show()

    @concurrent
    async def arrange(self, *arguments: Any) -> None:
        """See ``End``."""
        await self._end.arrange(*arguments)
        self._show()

    @concurrent
    async def take_over(self, epoch: int, shard: int, falls: list[list[int]], whole: bool) -> list[list[int]]:
        """See ``End``."""
        found = await self._end.take_over(epoch, shard, falls, whole)
        self._show()
        return found

    @concurrent
    async def release(self, epoch: int, shard: int, following: int, to: list[int]) -> str:
        """See ``End``."""
        return await self._end.release(epoch, shard, following, to)

    @concurrent
    async def snapshot(self, epoch: int, shard: int) -> dict[str, Any]:
        """See ``End``."""
        return await self._end.snapshot(epoch, shard)

    @concurrent
    async def mark(self, epoch: int, shard: int, moment: int) -> None:
        """See ``End``."""
        await self._end.mark(epoch, shard, moment)

    @concurrent
    async def write(self, epoch: int, shard: int, part: Any, names: list[str], place: dict[str, Any]) -> Any:
        """See ``End``."""
        return await self._end.write(epoch, shard, part, names, place)

    @concurrent
    async def versions(self) -> list[list[int]]:
        """See ``End``."""
        self._show()
        return await self._end.versions()

    async def _weights_of(self, which: dict[str, Any]) -> Weights | None:
        if "moment" not in which:
            return await super()._weights_of(which)
        return await self._end.marked(which["moment"], which["others"])

    async def close(self) -> None:
        """See ``Replica``."""
        self._worker.on_shard(None)
        await self._end.close()
        await super().close()

    @offered
    async def shard(self, epoch: int, shard: int, verb: str, *arguments: Any) -> Any:
        """See ``End``."""
        return await self._end.shard(epoch, shard, verb, *arguments)

    @offered
    async def copy(self, epoch: int, shard: int, facts: dict[str, Any]) -> None:
        """See ``End``."""
        await self._end.copy(epoch, shard, facts)

    def _show(self) -> None:
        """Have ``ddlf status`` say what is kept here: of several shards the first, and how many more."""
        shards, copies = self._end.shards, len(self._end.copies)
        if not shards and not copies:
            self._worker.on_shard(None)
            return
        first = next(iter(shards.values()), None)
        begin, end, version = (0, 0, 0) if first is None else (*first.how["part"], first.version)
        of = self._stepper.rows.sizes[0]
        self._worker.on_shard(Shard(begin, end, of, version, self._role[0], len(shards), copies))

    # -- on the compute thread ------------------------------------------------------------------------------------------

    def build(self) -> dict[str, Any]:
        """See ``Replica``; the model gets another optimizer."""
        facts = super().build()
        self._stepper = Stepper(self.app.model)
        self._model.stepped_by_another()
        self._cadence = Cadence(n_fetch=self.app.n_fetch, n_push=self.app.n_push)  # type: ignore[attr-defined]
        return facts

    def carry(self, task: Task) -> Reply:
        """Carry the replicas of a slot through one round."""
        begin = time.perf_counter()
        round = self._begin_round(task)
        self.app.indices, self._turns = task.indices, None
        metrics: dict[str, float] = {}
        pushed: dict[str, Any] = {}
        replicas: list[ModelReplica] = []
        try:
            replicas += self._replicas_of(task)
            turns = self._turns = self._turns_of(task, replicas)
            _, metrics = run_train(self.app, turns.begin(), task.epochs, task.batch_size)
            turns.finish()
        except Stopped:
            self.stopping = True
        except Unreached as error:
            pushed = {"peer": error.worker, "why": error.why}
        finally:
            for one in replicas:
                self._loop.call_soon_threadsafe(one.end)
        fault = None if self._turns is None else self._turns.fault
        left = self._end_round(round, [])
        wait_data_s, files = self._samples.told()
        return Reply(
            task=task,
            update=fault,
            codec_error=0.0,
            samples=len(task.indices),
            fed=None if self._turns is None else self._turns.fed(),
            metrics=metrics,
            counted=self._model.counted(metrics),
            compute_s=time.perf_counter() - begin,
            wait_data_s=wait_data_s,
            files=files[:MOST_FILES],
            stopped=self.stopping and fault is None,
            state={name: left[name] for name in task.back},
            pushed={**pushed, **record(replicas), "refused": 0 if self._turns is None else self._turns.refused},
        )

    def _replicas_of(self, task: Task) -> list[ModelReplica]:
        steps = shares(batches_of(task), len(task.weights["replicas"]))
        found: list[ModelReplica] = self._wait(self._end.replicas(task, steps, self._cadence))
        return found

    def _turns_of(self, task: Task, replicas: list[ModelReplica]) -> Turns:
        apart = math.gcd(self._cadence.n_fetch, self._cadence.n_push)
        return Turns(
            self.app.model,
            self._stepper,
            task,
            batches_of(task),
            replicas,
            self._model.steps_at_once(apart if len(replicas) == 1 else 1),
            self._wait,
            lambda: self.stopping,
            self.app.update_policy == "stop",  # type: ignore[attr-defined]
        )

    def fit(self, epochs: int, batch_size: int, callbacks: Iterable[Any] = ()) -> dict[str, float]:
        """See ``Replica``; the order of the batches is that of the replicas' turns.

        Raises:
            AppError: An own ``train`` has changed what is trained on, or has trained twice.
        """
        task, turns = self._task, self._turns
        assert turns is not None  # train is called when they are there
        if self.app.indices is not task.indices or (epochs, batch_size) != (1, task.batch_size) or self._fed:
            raise AppError(
                f"{type(self.app).__name__}.train is to call replica.fit(1, batch_size) once in Downpour, with the samples that it was given",
                hint="leave out train, or train in mode 'async'",
            )
        order = turns.samples(task.indices, batch_size)
        if not len(order):
            return {}
        feed, first = self._samples.feed(batch_size), task.first_epoch
        feed.set_order(order)

        def begin_epoch(epoch: int) -> None:
            self._fed.append(order)

        def end_batch(epoch: int, batch: int, logs: Any) -> bool:
            if (now := time.monotonic()) - self._told >= MOVED_EVERY_S:
                self._told = now
                self._tell(epoch, min((batch + 1) * batch_size, len(order)), logs)
            return self.stopping

        numbers, begun = range(first, first + 1), self._fit_begins()
        model, data, telling = self._model, feed.dataset, [*callbacks, turns.callback()]
        return self._samples.during(lambda: model.fit(data, numbers, telling, begin_epoch, end_batch, begun))

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine comes to that runs on the event loop, which the thread that computes waits for.

        Raises:
            Stopped: Training is to end meanwhile.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        while True:
            try:
                return future.result(LOOK_S)
            except TimeoutError:
                if future.done():
                    raise
                if self.stopping:
                    future.cancel()
                    raise Stopped from None


def batches_of(task: Task) -> int:
    """Into how many batches the samples of a round are cut."""
    return math.ceil(len(task.indices) / task.batch_size)
