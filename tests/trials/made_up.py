"""Training without Keras and without a network: the master's side is the real thing, workers and model are made up of a few arrays.

A run of thousands of rounds takes seconds, and everything that a round depends on is in its bits: weights, indices, seed, round, slot, the state of
the slot's optimizer (a momentum), what a codec has left, and what a worker holds of the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

import ddlf
from ddlf.errors import WorkerLost
from ddlf.roles import replica
from ddlf.roles.exchange import read_weights, send_update
from ddlf.roles.metrics import NOTHING_COUNTED
from ddlf.roles.task import HELD, OPTIMIZER, RESIDUAL, KeptStates, Reply, Task
from ddlf.training import start
from ddlf.training.crew import Crew
from ddlf.training.reporting import hooked
from ddlf.wire.messages import Request

SHAPES = ((40, 30), (7,))
"""The first is large enough for codecs."""


class Model:
    """Weights and what the master asks of a Keras model."""

    built = True
    name = "made-up"

    def __init__(self, learning_rate: float) -> None:
        self.weights = [
            SimpleNamespace(path=f"layer/{number}", shape=shape, dtype="float32") for number, shape in enumerate(SHAPES)
        ]
        self.trainable_weights = self.weights
        self.non_trainable_weights: list[Any] = []
        self.optimizer = SimpleNamespace(get_config=lambda: {"name": "sgd", "learning_rate": learning_rate})
        self._arrays = [np.zeros(shape, np.float32) for shape in SHAPES]

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Copies, as Keras gives them."""
        return [array.copy() for array in self._arrays]

    def set_weights(self, arrays: list[np.ndarray[Any, Any]]) -> None:
        """See Keras."""
        self._arrays = [np.array(array) for array in arrays]


class Worker:
    """Carries slots as a ``Replica`` does.

    Args:
        number: From 1.

    Attributes:
        lost: Whether it is lost: then what it held is gone, and ``reconnect`` brings it back.
        counting: Whether each update only adds 1 to every weight, of two slots.
        asked: What the master asked for, as function name and arguments.
        replies: What slots' rounds were answered with.
    """

    def __init__(self, number: int) -> None:
        self.id = number
        self.facts = {"threads": 1}
        self.name = f"worker {number}"
        self.bytes_sent = self.bytes_received = 0
        self.counting = False
        self.lost = False
        self.asked: list[Any] = []
        self.replies: list[Reply] = []
        self.open()

    def open(self) -> None:
        """Forget everything."""
        self.kept = KeptStates()

    async def reconnect(self) -> None:
        """Come back."""
        self.lost = False

    async def rpc(self, request: Request, timeout_s: float | None = None) -> Any:
        """Do what the master asks for."""
        await asyncio.sleep(0)
        if self.lost:
            raise WorkerLost("it was lost", worker=self.name)
        function, *arguments = request.args
        if function is replica.give_state:
            self.asked.append((function.__name__, *arguments))
            _, slot, number, groups = arguments
            return {name: group for name, group in self.kept.left(slot, number).items() if name in groups}
        task = Task.from_message(arguments[1])
        self.asked.append((function.__name__, task))
        reply = self.train(task)
        self.replies.append(reply)
        return reply.to_message()

    def train(self, task: Task) -> Reply:
        """One round of one slot."""
        state = self.kept.begin(task)
        weights = read_weights(task.weights, state.get(HELD), [np.zeros(shape, np.float32) for shape in SHAPES])
        update, momentum = self.made(task, weights, state.get(OPTIMIZER))
        encoded, residual, error = send_update(task.codec, update, [False] * len(update), state.get(RESIDUAL))
        left = {OPTIMIZER: momentum, RESIDUAL: residual, HELD: weights}
        self.kept.leave(task, left)
        return Reply(
            task=task,
            update=encoded,
            codec_error=error,
            samples=len(task.indices),
            fed=None,
            metrics={"loss": float(np.abs(weights[0]).mean())},
            counted=NOTHING_COUNTED,
            compute_s=0.001,
            stopped=False,
            state={name: left[name] for name in task.back},
        )

    def made(self, task: Task, weights: list[Any], momentum: list[Any] | None) -> tuple[list[Any], list[Any]]:
        """The update, and the state of the optimizer after it."""
        if self.counting:
            return [np.full(shape, -2.0, np.float32) for shape in SHAPES], []
        before = momentum or [np.zeros(shape, np.float32) for shape in SHAPES]
        random = np.random.default_rng((task.seed, task.round, task.slot, int(task.indices.sum())))
        slope = [0.1 * w + random.normal(size=w.shape).astype(np.float32) * task.epochs for w in weights]
        after = [np.float32(0.9) * m + g.astype(np.float32) for m, g in zip(before, slope, strict=True)]
        return [np.float32(0.1) * m for m in after], after


class Cluster:
    """Some workers.

    Args:
        workers: How many.
    """

    missing: tuple[Any, ...] = ()

    def __init__(self, workers: int = 2) -> None:
        self.workers = [Worker(number) for number in range(1, workers + 1)]

    @property
    def N(self) -> int:
        """How many."""
        return len(self.workers)

    def options(self, **_: Any) -> Cluster:
        """See ``Cluster``."""
        return self

    async def run_method(self, *_: Any) -> list[None]:
        """STOP: nothing here takes long."""
        return [None] * self.N

    def take_in(self, worker: Worker) -> None:
        """See ``Cluster``."""


class App(ddlf.IApp):
    """Trains the made-up model on made-up samples, which are only counted."""

    verbose = False
    master_epochs = 4
    batch_size = 16
    samples = 203
    learning_rate = 0.1

    def __init__(self, cluster: Any = None, **attributes: Any) -> None:
        super().__init__(Cluster() if cluster is None else cluster)
        vars(self).update(attributes)
        self.model = Model(self.learning_rate)
        self.events: list[Any] = []

    async def load_dataset(self) -> None:
        """Not called."""

    async def create_model(self) -> None:
        """Not called."""

    def on_event(self, event: Any) -> None:
        """Keep it."""
        self.events.append(event)


@contextmanager
def made_up() -> Iterator[None]:
    """Have apps trained with workers that need not be prepared."""

    @asynccontextmanager
    async def crew_of(app: Any, seed: int | None = None, *, backups: bool = True) -> AsyncIterator[tuple[Crew, int]]:
        async def open_worker(worker: Worker) -> None:
            worker.open()

        app._run, app._content = "a run", "made up"
        app._optimizer = {"optimizer": "SGD", "optimizer learning_rate": app.learning_rate}
        async with Crew(app.cluster, open_worker, app._tell, backups=backups) as crew, hooked(app, crew.end):
            await crew.ready()
            yield crew, app.samples

    # The second would import Keras.
    with mock.patch.object(start, "crew_of", crew_of), mock.patch.object(start, "check_test_data"):
        yield
