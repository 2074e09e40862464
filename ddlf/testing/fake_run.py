"""A run without Keras, processes and network: for tests of training algorithms and their rules. Runs on the master, on its event loop.

The master's side is the real thing: settings, loops, rules, codecs, crew, checkpoints. Model and workers are made up of a few arrays. Everything that
a round depends on is in the bits of its update: weights, samples, seed, round, slot, local epochs, and what the slot's round before has left: a
momentum, a residual, the weights that it holds. So a run takes milliseconds, and whatever changes it shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from ddlf.algorithms.local_rules import LOCAL, Control
from ddlf.algorithms.reading_order import Portion
from ddlf.algorithms.weights import Weights, is_float
from ddlf.app import IApp
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import ConfigError, WorkerLost
from ddlf.events.history import History
from ddlf.rpc.messages import Request
from ddlf.testing.fake_downpour import SHARDED, VERBS, answered, carried_until_lost, gradient, leave, rows_of
from ddlf.testing.files import MadeUp
from ddlf.testing.turns import Turns
from ddlf.training import start
from ddlf.training.arrivals import MEASURED
from ddlf.training.crew import Crew
from ddlf.training.downpour.worker import End
from ddlf.training.exchanges.peers import over_links
from ddlf.training.exchanges.sharded.worker import ShardEnd
from ddlf.training.reporting import hooked
from ddlf.training.roles.metrics import NOTHING_COUNTED
from ddlf.training.roles.statistics import moving
from ddlf.training.slot.parts import batchnorm as apart
from ddlf.training.slot.parts import fragments
from ddlf.training.slot.task import APART, CONTROL, HELD, OPTIMIZER, OWN, RESIDUAL, KeptStates, Reply, Task
from ddlf.training.slot.transfer import read_weights, send_update


class FakeRun(IApp):
    """An app whose workers train a made-up model on samples that are only counted.

    Args:
        cluster: Workers; by default two, or with ``arrivals`` one for each slot.
        settings: Settings of the run, and the attributes below.

    Attributes:
        samples: Number of training samples.
        learning_rate: Step size of local training; 0 makes updates of zeros.
        files: Samples in each of the partition files that it trains on; none: it trains on arrays.
        start: Weights to begin with, by path. Codecs leave tensors of less than 1,024 bytes alone.
        frozen: Paths of the weights that are not trained. Those of integers or booleans must be.
        norms: Paths of the weights that belong to a layer that normalizes by batches.
        arrivals: Slots, from 1, in the order in which their updates arrive, in asynchronous training: each waits for its turn. None: as they come.
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
        self.model = FakeModel(self.start, self.frozen, self.learning_rate, self.norms)
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

    async def _train(self, mode: str, *given: int | None, fresh: bool) -> History:
        return await start.train(self, mode, *given, fresh=fresh, crew_of=_crew_of)


class BatchNormalization:
    """Called as that of Keras, by which it is found, with nothing but weights."""

    trainable = True

    def __init__(self, weights: list[Any], frozen: frozenset[str]) -> None:
        self.weights = weights
        self.non_trainable_weights = [weight for weight in weights if weight.path in frozen]
        self._non_trainable_variables = weights


class FakeModel:
    """Weights, and what the master asks of a Keras model."""

    built = True
    name = "fake"

    def __init__(
        self,
        start: dict[str, np.ndarray[Any, Any]],
        frozen: frozenset[str],
        learning_rate: float,
        norms: frozenset[str] = frozenset(),
    ) -> None:
        self.weights = [SimpleNamespace(path=p, shape=a.shape, dtype=str(a.dtype)) for p, a in start.items()]
        self.trainable_weights = [weight for weight in self.weights if weight.path not in frozen]
        self.non_trainable_weights = [weight for weight in self.weights if weight.path in frozen]
        self.optimizer = SimpleNamespace(get_config=lambda: {"name": "sgd", "learning_rate": learning_rate})
        theirs = [weight for weight in self.weights if weight.path in norms]
        self._layers = [BatchNormalization(theirs, frozen)] if theirs else []
        self.set_weights(list(start.values()))

    def _flatten_layers(self) -> list[BatchNormalization]:
        return self._layers

    def get_weights(self) -> Weights:
        """Copies, as Keras gives them."""
        return [array.copy() for array in self._arrays]

    def set_weights(self, arrays: Weights) -> None:
        """Take copies."""
        self._arrays = [np.array(array) for array in arrays]


class FakeWorker:
    """Carries slots as a worker's ``Replica`` does. A test replaces ``fit``, ``train`` or ``rpc`` to disturb it.

    Args:
        number: Number, from 1.

    Attributes:
        lost: Whether it is lost; ``reconnect`` brings it back, and then what it held is gone.
        asked: What the master asked for: names of functions with their arguments, a task as ``Task``.
        kept: What slots have left here.
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
        self.kept = KeptStates()
        self.turns: Turns | None = None
        self.others: dict[int, FakeWorker] = {}

    def open(self, app: FakeRun) -> None:
        """Take part in a run, with nothing of before."""
        leave(self)
        self.kept, self.ask = KeptStates(), over_links(self._ask)
        self.end: Any = ShardEnd(self.id, self.ask, self.kept)
        if app.mode == "downpour":
            self.end = End(self.id, self.ask, lambda: rows_of(app))
        self._app, self._like = app, list(app.start.values())

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
        _, _, verb, *arguments = request.args
        if verb == "give":
            slot, number, groups = arguments
            self.asked.append((verb, slot, number, groups))
            return {name: group for name, group in self.end.copies.state(slot, number).items() if name in groups}
        if verb == "stop":
            return None
        if verb in (*SHARDED, *VERBS, "evaluate"):
            self.asked.append((verb, *arguments))
            return await answered(self, verb, arguments)
        task = Task.from_message(arguments[0])
        self.asked.append((verb, task))
        if verb == "measure":
            if "generation" in task.weights:
                await self.end.have(**task.weights, like=self._like)
                found = self.measure(task, self.end.weights(task.weights["generation"]))
                return self.end.measured(task, found, moving(vars(self._app)["model"]), list(self._app.start))
            return self.measure(task, read_weights(task.weights, None, self._like))
        if self._app.mode == "downpour":
            return await carried_until_lost(self, self._app, task)
        if "generation" in task.weights:
            task = await self.end.begin(task, self._like)
        reply = self.train(task)
        if self.turns is not None:
            await self.turns.arrive(task.slot + 1)
        return reply.to_message()

    async def _ask(self, worker: int, verb: str, *arguments: Any) -> Any:
        other = self.others[worker]
        await asyncio.sleep(0)
        if self.lost or other.lost:
            raise WorkerLost("it was lost", worker=other.name)
        if verb in ("shard", "copy"):
            return await getattr(other.end, verb)(*arguments)
        return await other.end.answer(verb, *arguments)

    def train(self, task: Task) -> Reply:
        """One round of one slot."""
        before = self.kept.begin(task)
        told, sharded = task.weights, "generation" in task.weights
        weights = self.end.weights(told["generation"]) if sharded else read_weights(told, before.get(HELD), self._like)
        exact = [path in self._app.frozen or i in task.apart for i, path in enumerate(self._app.start)]
        own, momentum = before.get(OWN), before.get(OPTIMIZER)
        begun = apart.begin(fragments.begin(task, weights, own, exact), before.get(APART))
        update, momentum = self.fit(task, begun, momentum)
        update, control = self.corrected(task, begun, update, before.get(CONTROL))
        update, aside = apart.end(task, weights, begun, update)
        update, own = fragments.end(task, weights, begun, update)
        tensors = fragments.exchanged(task, weights, exact)
        encoded, residual, error = send_update(task.codec, update, exact, before.get(RESIDUAL), tensors)
        left: dict[str, list[Any]] = {OPTIMIZER: momentum, RESIDUAL: residual, HELD: weights, OWN: own, APART: aside}
        left[CONTROL] = control
        self.kept.leave(task, left)
        return Reply(
            task=task,
            update=self.end.sent(task, encoded, list(self._app.start), tensors) if sharded else encoded,
            codec_error=error,
            samples=len(task.indices),
            fed=None,
            metrics={"loss": float(np.abs(weights[0]).mean()), "accuracy": accuracy_of(weights)},
            counted=NOTHING_COUNTED,
            compute_s=self.compute_s,
            wait_data_s=0.0,
            files=(),
            stopped=False,
            state={name: left[name] for name in task.back},
        )

    def samples_of(self, task: Task) -> Any:
        """Numbers of a task's samples."""
        if not isinstance(task.indices, Portion):
            return task.indices
        return task.indices.ids(self._app.train_data.at(task.indices.version).manifest.sizes)

    def measure(self, task: Task, weights: Weights) -> Weights:
        """Moving statistics ``s + learning_rate * (mean(samples) / n + |mean of the first weight|)``, with ``s`` what they were."""
        found = np.mean(self.samples_of(task)) / self._app.samples + np.abs(np.mean(weights[0]))
        return [
            np.asarray(weights[place] + self._app.learning_rate * found, weights[place].dtype)
            for place in moving(vars(self._app)["model"])
        ]

    def fit(self, task: Task, weights: Weights, momentum: Weights | None) -> tuple[Weights, Weights]:
        """Train locally; with ``w`` a weight, per tensor of floats::

            g = 0.1 w + epochs * N(0, 1),  m <- 0.9 m + g,  update = learning_rate * m

        The update of integers and booleans is of ones, which nobody may apply.

        Returns:
            The update (weights before minus weights after) and the momentum.
        """
        chance = np.random.default_rng((task.seed, task.round, task.slot, int(self.samples_of(task).sum())))
        update, after = [], []
        for w, m in zip(weights, momentum or [np.zeros_like(w) for w in weights], strict=True):
            if is_float(w):
                g = 0.1 * w + np.asarray(chance.normal(size=w.shape), w.dtype) * task.epochs
                m = np.asarray(w.dtype.type(0.9) * m + np.asarray(g, w.dtype))
                update.append(np.asarray(w.dtype.type(self._app.learning_rate) * m))
            else:
                update.append(np.ones_like(w))
            after.append(m)
        return update, after

    def corrected(
        self, task: Any, weights: Weights, update: Weights, control: Control | None
    ) -> tuple[Weights, Control]:
        """A second step, whose gradient is what the local rule adds to it, and no other.

        Returns:
            The update of both, and the slot's control after them.
        """
        rule, stepped = LOCAL.read(task.local), []
        after: Control = []
        for place, (path, w, u) in enumerate(zip(self._app.start, weights, update, strict=True)):
            if task.local == "plain" or path in self._app.frozen:
                stepped.append(u)
                after.append(None)
                continue
            both = [None if one is None else one[place] for one in (control, task.control)]
            mine, mean = (np.zeros_like(w) if one is None else one for one in both)
            rate = w.dtype.type(self._app.learning_rate)
            stepped.append(np.asarray(u + rate * rule.correction(w - u, rule.held(w, mine, mean)), w.dtype))
            after.append(rule.left(mine, mean, stepped[-1], 1, float(rate)))
        return stepped, after


def accuracy_of(weights: Weights) -> float:
    """What a fake worker says of the weights that it began with."""
    return float(1 / (1 + np.abs(weights[0]).mean()))


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
    app: FakeRun, seed: int, *, backups: bool, run: str, mode: str, fresh: bool
) -> AsyncIterator[tuple[Crew, int]]:
    """As ``opening.crew_of``, with workers that need no preparation."""

    async def open_worker(worker: Any) -> None:
        worker.open(app)

    app._run, app._content = run, "made up"
    app._optimizer = {"optimizer": "SGD", "optimizer learning_rate": app.learning_rate}
    cluster: Any = app.cluster
    async with (
        Crew(cluster, open_worker, app._tell, backups=backups, wait_s=app.wait_for_workers_s) as crew,
        hooked(app, crew.end),
    ):
        await crew.ready()
        try:
            yield crew, app.samples
        finally:
            for worker in cluster.workers:
                leave(worker)
