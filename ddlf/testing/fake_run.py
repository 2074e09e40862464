"""A run without Keras, processes and network: for tests of training algorithms and their rules. Runs on the master, on
its event loop.

Both sides are the real thing: settings, loops, rules, codecs, crew, checkpoints, and on the workers ``Replica`` and
what slots keep between rounds.
Only the model is made up: ``NumpyModel``, a few arrays with random gradients. So a run takes milliseconds, and whatever
changes it shows in its bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.app import IApp
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import ConfigError, WorkerLost
from ddlf.events.history import History
from ddlf.rpc.messages import Request
from ddlf.testing.fake_downpour import RUN, answered, carried_until_lost, gradient, leave, rows_of
from ddlf.testing.files import MadeUp
from ddlf.training import start
from ddlf.training.arrivals import MEASURED
from ddlf.training.crew import Crew
from ddlf.training.downpour.server import Servers
from ddlf.training.exchanges.peers import Unreached, played_here
from ddlf.training.exchanges.sharded.worker import ShardedWorker
from ddlf.training.reporting import hooked
from ddlf.training.roles import COPIES, EXCHANGE, REPLICA, SERVERS
from ddlf.training.roles.statistics import moving
from ddlf.training.slot.numpy_model import CountedSamples, NumpyModel
from ddlf.training.slot.parts.fragments import exchanged
from ddlf.training.slot.replica import Replica
from ddlf.training.slot.task import KeptStates, Reply, Task
from ddlf.training.slot.transfer import whole
from ddlf.worker.hosting import Hosting


class FakeRun(IApp):
    """An app whose workers train a made-up model on samples that are only counted.

    Args:
        cluster: Workers; by default two, or with ``arrivals`` one for each slot.
        settings: Settings of the run, and the attributes below.

    Attributes:
        samples: Number of training samples.
        learning_rate: Step size of local training; 0 makes updates of zeros.
        compiled_with: The optimizer that the model says it is compiled with.
        files: Samples in each of the partition files that it trains on; none: it trains on arrays.
        start: Weights to begin with, by path. Codecs leave tensors of less than 1,024 bytes alone.
        frozen: Paths of the weights that are not trained. Those of integers or booleans must be.
        norms: Paths of the weights that belong to a layer that normalizes by batches.
        arrivals: Slots, from 1, in the order in which their updates arrive, in asynchronous training: each waits for
            its turn. None: as they come.
        events: What ``on_event`` was given.

    Example::

        run = FakeRun(mode="async", slots=2, arrivals=[1, 1, 2, 2], master_epochs=2, outer="nesterov")
        await run.train_model()
        assert [record.staleness for record in run.history] == [0, 0, 2, 0]
        print(run.model.get_weights())
    """

    verbose = False
    master_epochs = 4
    batch_size = 16
    samples = 203
    files: Sequence[int] = ()
    learning_rate = 0.1
    compiled_with = "SGD"
    start: dict[str, np.ndarray[Any, Any]] = {  # noqa: RUF012  never modified
        "layer/0": np.zeros((40, 30), np.float32),
        "layer/1": np.zeros(7, np.float32),
    }
    frozen: frozenset[str] = frozenset()
    norms: frozenset[str] = frozenset()
    arrivals: Sequence[int] | None = None

    def __init__(self, cluster: FakeCluster | None = None, **settings: Any) -> None:
        order = settings.get("arrivals", self.arrivals)
        workers: FakeCluster = cluster or FakeCluster(max(order) if order else 2)
        super().__init__(workers)  # type: ignore[arg-type]
        vars(self).update(settings)
        if self.files:
            self.samples, self.train_data = sum(self.files), getattr(self, "train_data", None) or MadeUp(self.files)
        self.model = model_of(self)
        self.events: list[Any] = []
        if order:
            if max(order) > workers.N:
                raise ConfigError(f"{workers.N} workers cannot carry {max(order)} slots that wait for each other")
            turns = Turns(order, self.max_staleness, MEASURED if self.balance == "speed" else 0)
            for worker in workers.workers:
                worker.turns = turns

    async def load_dataset(self) -> None:
        """Not called."""

    async def create_model(self) -> None:
        """Not called."""

    def on_event(self, event: Any) -> None:
        """Keep it."""
        self.events.append(event)

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        """See ``IApp``; the update is the one that the model has made: a difference of weights would be rounded."""
        self.model.set_weights(weights)
        metrics = self.replica.fit(worker_epochs, batch_size, list(self.worker_callbacks))
        return self.model.update, metrics

    async def _train(self, mode: str, *given: int | None, fresh: bool) -> History:
        return await start.train(self, mode, *given, fresh=fresh, crew_of=_crew_of)


def model_of(app: FakeRun) -> NumpyModel:
    """Return a new model of a run."""
    data = getattr(app, "train_data", None)
    return NumpyModel(
        app.start,
        app.frozen,
        app.learning_rate,
        app.norms,
        app.samples,
        None if data is None else lambda version: data.at(version).manifest.sizes,
    )


class FakeWorker:
    """A worker with a ``Replica`` of its own. A test replaces ``fit``, ``train`` or ``rpc`` to disturb it.

    Args:
        number: Number, from 1.

    Attributes:
        lost: Whether it is lost; ``reconnect`` brings it back, and then what it held is gone.
        asked: What the master asked for: names of functions with their arguments, a task as ``Task``.
        told: Messages of its replica about its progress.
        replica: Its replica of the run; none before ``open``.
        model: The model of that.
        compute_s: How long it says that a task took.
    """

    compute_s = 0.001
    host = "made up"

    def __init__(self, number: int) -> None:
        self.id = number
        self.facts = {"threads": 1}
        self.name = f"worker {number}"
        self.bytes_sent = self.bytes_received = 0
        self.lost = False
        self.carrying: asyncio.Future[Reply] | None = None
        self.asked: list[tuple[Any, ...]] = []
        self.told: list[dict[str, Any]] = []
        self.turns: Turns | None = None
        self.others: dict[int, FakeWorker] = {}

    def open(self, app: FakeRun) -> None:
        """Take part in a run, with nothing of before."""
        leave(self)
        own: FakeRun = object.__new__(type(app))
        vars(own).update(vars(app), _weights=None)  # those of the master's model
        self.model = own.model = model_of(app)
        self.model.steps = lambda *given: self.fit(*given)
        self.model.measures = lambda *given: self.measure(*given)
        stand_in: Any = self  # it has what the replica asks of a worker
        self.replica = Replica(stand_in, own)
        self.replica.use(self.model, CountedSamples())
        self.roles = Hosting(self)
        self.end: Any
        if app.mode == "downpour":
            self.end = Servers(self.id, RUN, self.roles, self.ask, lambda: rows_of(app))
            self.roles.play(RUN, SERVERS, self.end, of=REPLICA)
        else:
            self.end = ShardedWorker(self.id, self.ask, self.kept)
            self.roles.play(RUN, EXCHANGE, self.end, of=REPLICA)
            self.roles.play(RUN, COPIES, self.end.copies, of=REPLICA)
        self._app, self._like = app, list(app.start.values())

    @property
    def kept(self) -> KeptStates:
        """What slots have left here."""
        return self.replica.slots

    def tell(self, **facts: Any) -> None:
        """See ``Worker``."""
        self.told.append(facts)

    @property
    def connected(self) -> bool:
        """Whether it is there."""
        return not self.lost

    async def reconnect(self) -> None:
        """Come back."""
        leave(self)
        self.lost = False

    call, gradient = ProxyWorker.call, staticmethod(gradient)

    async def rpc(self, request: Request, timeout_s: float | None = None) -> Any:
        """Do what the master asks for."""
        await asyncio.sleep(0)
        if self.lost:
            raise WorkerLost("it was lost", worker=self.name)
        _, role, verb, *arguments = request.args
        if verb == "give":
            slot, number, groups = arguments
            self.asked.append((verb, slot, number, groups))
            return {name: group for name, group in self.end.copies.state(slot, number).items() if name in groups}
        if verb == "stop":
            return None
        if role != REPLICA or verb == "evaluate":
            self.asked.append((verb, *arguments))
            return await answered(self, role, verb, arguments)
        task = Task.from_message(arguments[0])
        self.asked.append((verb, task))
        if verb == "measure":
            if "generation" in task.weights:
                await self.end.have(**task.weights, like=self._like)
                found = self.replica.statistics(self._with_weights(task))
                return self.end.measured(task, found, moving(self.model), list(self._app.start))
            return self.replica.statistics(task)
        if self._app.mode == "downpour":
            return await carried_until_lost(self, self._app, task)
        if "generation" in task.weights:
            task = await self.end.begin(task, self._like)
        reply = self.train(task)
        if self.turns is not None:
            await self.turns.arrive(task.slot + 1)
        return reply.to_message()

    async def ask(self, worker: int, role: str, verb: str, *arguments: Any) -> Any:
        """Ask a role of a worker, this one's, too; see ``calls_of``."""
        if worker == self.id:
            return await played_here(self.roles, RUN, role, verb, *arguments)
        try:
            return await self._ask(worker, role, verb, *arguments)
        except WorkerLost as error:
            raise Unreached(worker, error.message, link=True) from error

    async def _ask(self, worker: int, role: str, verb: str, *arguments: Any) -> Any:
        other = self.others[worker]
        await asyncio.sleep(0)
        if self.lost or other.lost:
            raise WorkerLost("it was lost", worker=other.name)
        return await played_here(other.roles, RUN, role, verb, *arguments)

    def train(self, task: Task) -> Reply:
        """Carry one round of one slot."""
        if "generation" not in task.weights:
            return replace(self.replica.carry(task), compute_s=self.compute_s)
        reply = self.replica.carry(self._with_weights(task))
        tensors = exchanged(task, self._like, self.model.lossless)
        update = self.end.sent(task, reply.update, list(self._app.start), tensors)
        return replace(reply, task=task, update=update, compute_s=self.compute_s)

    def _with_weights(self, task: Task) -> Task:
        """Return a task of the sharded exchange with the weights that it names."""
        return replace(task, weights=whole(self.end.weights(task.weights["generation"])))

    def fit(self, task: Task, weights: Weights, momentum: Weights | None) -> tuple[Weights, Weights]:
        """See ``NumpyModel.step``."""
        return self.model.step(task, weights, momentum)

    def measure(self, task: Task, weights: Weights) -> Weights:
        """See ``NumpyModel.measure``."""
        return self.model.measure(task, weights)


class FakeCluster:
    """Some workers.

    Args:
        workers: How many.
    """

    missing: tuple[Any, ...] = ()
    threads = None

    def __init__(self, workers: int = 2) -> None:
        self.workers = [FakeWorker(number) for number in range(1, workers + 1)]
        for worker in self.workers:
            worker.others = {other.id: other for other in self.workers}

    @property
    def N(self) -> int:
        """How many."""
        return len(self.workers)

    def take_in(self, worker: FakeWorker) -> None:
        """See ``Cluster``."""

    async def introduced(self, workers: Any, run: str) -> list[Any]:
        """They know each other."""
        return []


@asynccontextmanager
async def _crew_of(
    app: FakeRun, seed: int, *, backups: bool, run: str, replica: object, equal_threads: bool, fresh: bool
) -> AsyncIterator[tuple[Crew, int]]:
    """As ``opening.crew_of``, with workers that need no preparation."""

    async def open_worker(worker: Any) -> None:
        worker.open(app)

    app.run_context.name, app.run_context.content = run, "made up"
    app.run_context.optimizer = {"optimizer": app.compiled_with, "optimizer learning_rate": app.learning_rate}
    cluster: Any = app.cluster
    async with (
        Crew(cluster, open_worker, app.run_context.emit, backups=backups, wait_s=app.wait_for_workers_s) as crew,
        hooked(app, crew.end),
    ):
        await crew.ready()
        try:
            yield crew, app.samples
        finally:
            for worker in cluster.workers:
                leave(worker)


class Turns:
    """Who may have its update arrive: the first of the order, when all others wait, may not go on yet, or compute
    nothing more."""

    def __init__(self, order: Sequence[int], bound: int | None, measured: int = 0) -> None:
        self._left = list(order)
        self._bound = len(order) if bound is None else bound
        self._measured = measured
        self._done = dict.fromkeys(order, 0)
        self._waiting: dict[int, asyncio.Event] = {}
        for slot in order:
            if slot not in self._going():
                paced = f" and {measured} rounds of all that are measured first" if measured else ""
                raise ConfigError(
                    f"with max_staleness={bound}{paced} slot {slot} cannot be so far ahead as arrivals say"
                )
            self._done[slot] += 1
        self._done = dict.fromkeys(order, 0)

    async def arrive(self, slot: int) -> None:
        """Wait until it is a slot's turn."""
        waiting = self._waiting[slot] = asyncio.Event()
        self._next()
        await waiting.wait()
        del self._left[0], self._waiting[slot]
        self._done[slot] += 1
        self._next()

    def _next(self) -> None:
        if self._left and self._waiting.keys() == set(self._left) & self._going():
            self._waiting[self._left[0]].set()

    def _going(self) -> set[int]:
        """Slots that are not too far ahead.

        None goes on behind the rounds that are measured before all have done them.
        """
        least = min(self._done.values())
        most = least + self._bound
        if least < self._measured:
            most = min(most, self._measured - 1)
        return {slot for slot, done in self._done.items() if done <= most}
