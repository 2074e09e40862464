"""Runs without Keras, processes and a network, for tests of training algorithms and their rules.

Runs on the master's event loop. The code under test is real: settings, loops, rules, codecs, crew and checkpoints on
the master, ``Replica`` and slot states on the workers. Only the model is fake: ``NumpyModel`` has a few arrays and
random gradients. So a run takes milliseconds, and every change of an algorithm changes its bits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import numpy as np

from ddlf.algorithms.flat_weights import Row, Rows
from ddlf.algorithms.push_rules import Cadence
from ddlf.algorithms.weights import Weights
from ddlf.app import IApp
from ddlf.cluster.link import Notice
from ddlf.cluster.proxy import ProxyWorker
from ddlf.data.data_set import DataSet
from ddlf.data.manifest import Column, Manifest, PartitionFile
from ddlf.errors import ConfigError, ExecutorCrashed, WorkerLost
from ddlf.events.record import History
from ddlf.rpc.messages import Request
from ddlf.training import start
from ddlf.training.crew.crew import Crew
from ddlf.training.registry import EXCHANGE, MODE, spread
from ddlf.training.reporter import hooked
from ddlf.training.roles import REPLICA, SERVERS
from ddlf.training.samples.policy import CommonData
from ddlf.training.slot.gradients import GradientModel
from ddlf.training.slot.numpy_model import CountedSamples, NumpyModel
from ddlf.training.slot.replica import Replica
from ddlf.training.slot.task import NOTHING_COUNTED, KeptStates, Reply, Task
from ddlf.training.strategies.arrivals import MEASURED
from ddlf.training.strategies.downpour.client import ReplicaEntry, record, replicas_of
from ddlf.training.strategies.downpour.replica import planned, shares
from ddlf.training.strategies.downpour.server import Servers
from ddlf.training.strategies.downpour.settings import DownpourSettings
from ddlf.worker.calls import Hosting
from ddlf.worker.peers import Unreached
from ddlf.worker.status import ExecutorInfo

RUN = "made up"
"""Name of the run of the fake workers' roles."""
LOOK_S = 0.002
"""Seconds between two checks whether a fake worker is lost."""


class FakeRun(IApp):
    """An app whose workers train a fake model. Its samples have no content.

    Args:
        cluster: The fake workers; by default two, or with ``arrivals`` one for each slot.
        settings: Settings of the run, also in groups, and the attributes below.

    Attributes:
        samples: Number of training samples.
        learning_rate: Step size of local training; 0 makes zero updates.
        compiled_with: Name of the optimizer that the model reports.
        files: Number of samples in each partition file; empty to train on arrays.
        start: Initial weights, by path. Codecs do not compress tensors of less than 1,024 bytes.
        frozen: Paths of weights that are not trained. Integer and boolean weights must be frozen.
        norms: Paths of weights that belong to batch normalization.
        arrivals: Slots, from 1, in the order of their updates' arrival in asynchronous training. Each update waits for
            its turn. None does not control the order.
        events: All events that ``on_event`` received.

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
        vars(self).update(spread(settings))
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
        """Do nothing; a fake run never calls it."""

    async def create_model(self) -> None:
        """Do nothing; a fake run never calls it."""

    def on_event(self, event: Any) -> None:
        """Append the event to ``events``."""
        self.events.append(event)

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        """Train like ``IApp.train``. Return the update that the model itself computes, because a difference of weights
        would be rounded."""
        self.model.set_weights(weights)
        metrics = self.replica.fit(worker_epochs, batch_size, list(self.worker_callbacks))
        return self.model.update, metrics

    async def _train(self, mode: str, *arguments: int | None, fresh: bool) -> History:
        return await start.train(self, mode, *arguments, fresh=fresh, crew_of=_crew_of)


def model_of(app: FakeRun) -> NumpyModel:
    """Return a new ``NumpyModel`` with the initial weights of a fake run."""
    data = getattr(app, "train_data", None)
    model = NumpyModel(
        app.start,
        app.frozen,
        app.learning_rate,
        app.norms,
        app.samples,
        None if data is None else lambda version: data.in_version(version).manifest.sizes,
    )
    if role_of(app).MODEL is GradientModel:
        model.gradient = model.gradient_of
    return model


class MadeUp:
    """A fake data set of partition files, with the attributes that training needs.

    Args:
        sizes: Number of samples of each file.
        version: Number of the version.
        hosts: The attribute of ``Manifest``.

    Attributes:
        manifest: The attribute of ``DataSet``.
        on_disk: The attribute of ``DataSet``.
        in_order: The attribute of ``DataSet``.
        inexact: The attribute of ``DataSet``.
        sources: The attribute of ``DataSet``.
    """

    on_disk, in_order, inexact = True, False, ""
    sources = DataSet.sources

    def __init__(self, sizes: Sequence[int], version: int = 1, hosts: int = 0) -> None:
        files, first = [], 0
        for number, samples in enumerate(sizes):
            name = f"v{version:04}/{number:05}.safetensors"
            files.append(PartitionFile(name, samples, samples, "0" * 64, first))
            first += samples
        self.manifest = Manifest({"x": Column("uint8", ())}, files, version, hosts=hosts)
        self._versions = [self]

    def repartition(self, sizes: Sequence[int]) -> None:
        """Add a next version of the data set, with the same samples in files of other sizes."""
        self._versions.append(MadeUp(sizes, len(self._versions) + 1))

    def in_version(self, version: int) -> MadeUp:
        """Return the data set in another version; 0 means this one."""
        return self._versions[version - 1] if version else self

    def newer(self, version: int) -> MadeUp | None:
        """Return the newest version if it is newer than ``version``, else None."""
        return self._versions[-1] if len(self._versions) > version else None


def gradient(app: FakeRun, task: Task, samples: Any, weights: Row) -> Row:
    """Return the made-up gradient of a batch: ``0.1 w + N(0, 1)``, with noise from the task's seed and the batch's
    samples.
    """
    chance = np.random.default_rng((task.seed, task.round, int(samples.sum()), len(samples)))
    values: Row = np.float32(0.1) * weights + chance.normal(size=weights.size).astype(np.float32)
    return values * np.float32(app.learning_rate > 0)


def rows_of(app: FakeRun) -> Rows:
    """Return the layout of a fake model's weights as one row of numbers: the part of the row that each weight has."""
    return Rows.of(list(app.start.values()), [path not in app.frozen for path in app.start])


def mean_of(weights: Any) -> float:
    """Return the mean of all values, the result of a fake evaluation."""
    return float(np.concatenate([np.ravel(array) for array in weights]).mean(dtype=np.float64))


class FakeWorker:
    """A worker with its own ``Replica``. A test replaces ``fit``, ``train`` or ``rpc`` to disturb it.

    Args:
        number: Number of the worker, from 1.

    Attributes:
        lost: Whether the worker is lost. ``reconnect`` brings it back without its state.
        asked: The master's requests: names of functions with their arguments, and tasks as ``Task``.
        told: The replica's messages about its progress.
        replica: The replica of the run; missing before ``open``.
        model: The replica's model.
        compute_s: Reported seconds of each task.
    """

    compute_s = 0.001
    host = "made up"
    crash: ExecutorCrashed | None = None
    notice: Notice | None = None
    on_leaving: Callable[[], None] | None = None

    def __init__(self, number: int) -> None:
        self.id = number
        self.executor = ExecutorInfo(threads=1)
        self.name = f"worker {number}"
        self.bytes_sent = self.bytes_received = 0
        self.lost = False
        self.carrying: asyncio.Future[Reply] | None = None
        self.end: Any = None
        self.asked: list[tuple[Any, ...]] = []
        self.told: list[dict[str, Any]] = []
        self.turns: Turns | None = None
        self.others: dict[int, FakeWorker] = {}
        self.peers = _Peers(self)

    def open(self, app: FakeRun) -> None:
        """Take part in a run, without any earlier state."""
        self.leave()
        own_app: FakeRun = object.__new__(type(app))
        vars(own_app).update(vars(app))
        vars(own_app).pop("run_context", None)  # a worker's model receives the master's weights only in tasks
        self.model = own_app.model = model_of(app)
        self.model.steps = lambda *arguments: self.fit(*arguments)
        self.model.measures = lambda *arguments: self.measure(*arguments)
        stand_in: Any = self  # it has the attributes that the replica needs
        self.roles, self._app = Hosting(self), app
        self.replica = role_of(app)(stand_in, own_app, RUN)
        self.replica.use(self.model, CountedSamples())
        self._carry = self.replica.carry
        vars(self.replica)["carry"] = lambda task: self.train(task)
        self.roles.play(RUN, REPLICA, self.replica, of=REPLICA)
        if is_downpour(app):
            self.end = Servers(self.id, RUN, self.roles, self.ask, lambda: rows_of(app))
            self.roles.play(RUN, SERVERS, self.end, of=REPLICA)

    @property
    def kept(self) -> KeptStates:
        """The states of slots, such as optimizer states, that are on this worker."""
        return self.replica.slots

    async def compute(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do some work at once: a fake worker has no compute thread."""
        return work(*arguments)

    def on_shard(self, shard: object) -> None:
        """Do nothing, because ``ddlf status`` shows no fake worker."""

    def on_part(self, part: object) -> None:
        """Do nothing, because ``ddlf status`` shows no fake worker."""

    def tell(self, **facts: Any) -> None:
        """Record a message of the replica."""
        self.told.append(facts)

    @property
    def connected(self) -> bool:
        """Whether the worker is not lost."""
        return not self.lost

    async def release(self) -> None:
        """End this worker, which has announced its end."""
        self.lost = True

    async def reconnect(self) -> None:
        """Bring this lost worker back, without its state."""
        self.leave()
        self.lost, self.notice = False, None

    call, gradient = ProxyWorker.call, staticmethod(gradient)

    async def rpc(self, request: Request, timeout_s: float | None = None) -> Any:
        """Execute a request of the master."""
        await asyncio.sleep(0)
        self._check_lost()
        _, role, verb, *arguments = request.args
        if verb == "stop":
            return None
        if role != REPLICA or verb not in ("train", "measure"):
            self.asked.append((verb, *arguments))
            return await self._answer(role, verb, arguments)
        task = Task.from_message(arguments[0])
        self.asked.append((verb, task))
        if verb == "measure":
            return await self.replica.measure(arguments[0])
        if is_downpour(self._app):
            return await self._push_until_lost(task)
        reply = await self.replica.train(arguments[0])
        if self.turns is not None:
            await self.turns.arrive(task.slot + 1)
        return reply

    async def ask(self, worker: int, role: str, verb: str, *arguments: Any) -> Any:
        """Call a role on a worker, which may be this one."""
        if worker == self.id:
            return await self.roles.call(RUN, role, verb, *arguments)
        try:
            return await self._ask(worker, role, verb, *arguments)
        except WorkerLost as error:
            raise Unreached(worker, error.message, link=True) from error

    async def _ask(self, worker: int, role: str, verb: str, *arguments: Any) -> Any:
        callee = self.others[worker]
        await asyncio.sleep(0)
        if self.lost or callee.lost:
            raise WorkerLost("it was lost", worker=callee.name)
        return await callee.roles.call(RUN, role, verb, *arguments)

    async def _push(self, task: Task) -> Reply:
        """Train one round of a slot with Downpour, like ``DownpourReplica`` does on a worker. Only gradients are fake."""
        app, rows = self._app, rows_of(self._app)
        cadence = Cadence(n_fetch=app.n_fetch, n_push=app.n_push)
        size = task.batch_size
        batches, samples = math.ceil(len(task.indices) / size), self.model.samples_of(task)
        replicas: list[Any] = []
        entry, unreached = ReplicaEntry.from_message(task.weights), None
        try:
            replicas = await replicas_of(self.end.owners, task, shares(batches, len(entry.replicas)), cadence)
            order, chosen = planned(task, replicas, batches)
            now: dict[int, tuple[Row, Row]] = {}
            owed: dict[int, Row] = {}
            alone = entry.alone * app.n_push
            for index, batch in zip(order, chosen, strict=True):
                replica = replicas[index]
                if cadence.takes(replica.done):
                    now[index] = await replica.take(owed.get(index), app.learning_rate)
                weights, rest = now[index]
                gradient = self.gradient(app, task, samples[batch * size : (batch + 1) * size], weights)
                owed[index] = owed.get(index, np.zeros(rows.sizes[0], np.float32)) + gradient
                now[index] = weights - np.float32(app.learning_rate) * gradient, rest
                replica.done += 1
                if cadence.pushes(replica.done - 1, replica.left):
                    await replica.push(owed.pop(index), np.zeros_like(rest))
                alone -= 1
                if not alone:
                    await replica.pushed()
                await asyncio.sleep(0)
            for replica in replicas:
                await replica.pushed()
        except Unreached as error:
            unreached = error
        finally:
            for replica in replicas:
                replica.end()
        self._check_lost()
        self.kept.begin(task)
        self.kept.store(task, {})
        return Reply(
            task=task,
            update=None,
            codec_error=0.0,
            samples=len(task.indices),
            fed=None,
            metrics={"loss": 1.0},
            counted=NOTHING_COUNTED,
            compute_s=self.compute_s,
            wait_data_s=0.0,
            files=(),
            stopped=False,
            state={},
            pushed=record(replicas, unreached=unreached),
        )

    async def _push_until_lost(self, task: Task) -> dict[str, Any]:
        """Train one round of a slot with Downpour, and return the message of the reply. If the worker is lost, the wait
        ends at once, but not the work.
        """
        self.carrying = asyncio.ensure_future(self._push(task))
        while not self.carrying.done() and not self.lost:
            await asyncio.wait({self.carrying}, timeout=LOOK_S)
        self._check_lost()
        message: dict[str, Any] = self.carrying.result().to_message()
        return message

    async def _answer(self, role: str, verb: str, arguments: Sequence[Any]) -> Any:
        """Return the answer of a role to the master."""
        function = self.evaluate if verb == "evaluate" else self.roles.find(RUN, role, verb).function
        assert function is not None
        answer = await function(*arguments)
        self._check_lost()
        return answer

    async def evaluate(self, weights_ref: Any, part: str, *of_data: Any) -> dict[str, float] | None:
        """Return the mean of all values of the weights that the master names, as ``loss``."""
        weights = await (
            self.end.marked(weights_ref["moment"], weights_ref["others"])
            if "moment" in weights_ref
            else self.replica._weights_of(weights_ref)
        )
        return None if weights is None else {"loss": mean_of(weights)}

    def leave(self) -> None:
        """End the work of a run."""
        if isinstance(self.end, Servers):
            self.ending = asyncio.ensure_future(self.end.close())
        if self.carrying is not None:
            self.carrying.cancel()

    def _check_lost(self) -> None:
        if self.lost:
            raise WorkerLost("it was lost", worker=self.name)

    def train(self, task: Task) -> Reply:
        """Train one round of one slot, as a worker does."""
        return replace(self._carry(task), compute_s=self.compute_s)

    def fit(self, task: Task, weights: Weights, momentum: Weights | None) -> tuple[Weights, Weights]:
        """Compute a training step, by default the one of ``NumpyModel.step``."""
        return self.model.step(task, weights, momentum)

    def measure(self, task: Task, weights: Weights) -> Weights:
        """Measure the statistics of batch normalization, by default with ``NumpyModel.measure``."""
        return self.model.measure(task, weights)


class _Peers:
    """The other workers, as a fake worker's roles call them: ``peers[2].call((RUN, role), verb)``."""

    def __init__(self, worker: FakeWorker, number: int = 0) -> None:
        self._worker, self._number = worker, number

    def __getitem__(self, number: int) -> _Peers:
        return _Peers(self._worker, number)

    def refuse_silent(self) -> None:
        """Do nothing, because no fake worker is ever silent."""

    async def call(self, role: tuple[str, str], verb: str, *arguments: Any) -> Any:
        return await self._worker._ask(self._number, role[1], verb, *arguments)


class FakeCluster:
    """A cluster of fake workers.

    Args:
        workers: Number of workers.
    """

    missing: tuple[Any, ...] = ()
    threads = None

    def __init__(self, workers: int = 2) -> None:
        self.workers = [FakeWorker(number) for number in range(1, workers + 1)]
        for worker in self.workers:
            worker.others = {peer.id: peer for peer in self.workers}

    @property
    def N(self) -> int:
        """Number of workers."""
        return len(self.workers)

    @property
    def places(self) -> int:
        """Number of workers: all are there from the start."""
        return self.N

    def take_in(self, worker: FakeWorker) -> None:
        """Do nothing, because no fake worker is ever missing."""

    async def introduced(self, workers: Any, run: str) -> list[Any]:
        """Return no failed pairs, because fake workers always reach each other."""
        return []


@asynccontextmanager
async def _crew_of(
    app: FakeRun, seed: int, *, backups: bool, run: str, replica: object, equal_threads: bool, fresh: bool
) -> AsyncIterator[tuple[Crew, int]]:
    """Yield a crew of the fake workers, like ``opening.crew_of`` does for real ones. Fake workers need no preparation."""

    async def open_worker(worker: Any) -> None:
        worker.open(app)

    app.run_context.name, app.run_context.content = run, "made up"
    app.run_context.data = data = CommonData()
    data.samples, data.content = app.samples, "made up"
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
                worker.leave()


class Turns:
    """Decides which slot's update arrives next at the master, for ``FakeRun.arrivals``.

    The next slot is the first one of the remaining order. Its turn comes when all remaining slots wait, except slots
    that are too far ahead.
    """

    def __init__(self, order: Sequence[int], bound: int | None, measured: int = 0) -> None:
        self._left = list(order)
        self._bound = len(order) if bound is None else bound
        self._measured = measured
        self._done = dict.fromkeys(order, 0)
        self._waiting: dict[int, asyncio.Event] = {}
        for slot in order:
            if slot not in self._active_slots():
                paced = f" and {measured} rounds of all that are measured first" if measured else ""
                raise ConfigError(
                    f"with max_staleness={bound}{paced} slot {slot} cannot be as far ahead as arrivals require"
                )
            self._done[slot] += 1
        self._done = dict.fromkeys(order, 0)

    async def arrive(self, slot: int) -> None:
        """Wait until the update of this slot may arrive next."""
        waiting = self._waiting[slot] = asyncio.Event()
        self._next()
        await waiting.wait()
        del self._left[0], self._waiting[slot]
        self._done[slot] += 1
        self._next()

    def _next(self) -> None:
        if self._left and self._waiting.keys() == set(self._left) & self._active_slots():
            self._waiting[self._left[0]].set()

    def _active_slots(self) -> set[int]:
        """Return the slots that may still send updates, because they are not too far ahead of the others.

        No slot continues past the measured rounds before all slots have finished them.
        """
        least = min(self._done.values())
        most = least + self._bound
        if least < self._measured:
            most = min(most, self._measured - 1)
        return {slot for slot, done in self._done.items() if done <= most}


def role_of(app: IApp) -> type[Replica]:
    """Return the class that trains on workers. The part of Downpour's replicas that trains is in ``FakeWorker``."""
    if is_downpour(app):
        return Replica
    mode, exchange = MODE("mode", app.mode), EXCHANGE("exchange", app.exchange)
    role: type[Replica] = resolve_name(MODE.kind(mode).role or EXCHANGE.kind(exchange).role)
    return role


def is_downpour(app: IApp) -> bool:
    """Return whether an app trains with Downpour, whose weights are on servers."""
    return issubclass(MODE.kind(app.mode), DownpourSettings)
