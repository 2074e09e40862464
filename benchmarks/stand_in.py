"""A run whose workers exchange made-up updates, to measure the exchange alone with models of any size. No Keras.

The master's side is that of every run, and so is the exchange on the workers with its connections. Local training is
replaced by an update that is created once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from ddlf.algorithms.flat_weights import Rows
from ddlf.algorithms.push_rules import Cadence
from ddlf.testing import FakeRun
from ddlf.training import start
from ddlf.training.crew.crew import Crew
from ddlf.training.exchanges.sharded.replica import ShardedReplica
from ddlf.training.reporter import hooked
from ddlf.training.roles import REPLICA
from ddlf.training.samples.policy import CommonData
from ddlf.training.slot.parts import read_weights, send_update
from ddlf.training.slot.task import NOTHING_COUNTED, Reply, Task
from ddlf.training.strategies.downpour.client import ReplicaEntry, record, replicas_of
from ddlf.training.strategies.downpour.replica import DownpourReplica, batches_of, shares


def tensors(parameters: int) -> list[int]:
    """Return the sizes of the tensors of a model. One has 90 % of all values, like a table of words often has."""
    rest = parameters // 10
    return [parameters - rest, *([rest // 4] * 3), rest - rest // 4 * 3]


class Nothing:
    """Stands for the app of a replica."""

    def train(self) -> None:
        """Not called."""


class StandIn(ShardedReplica):
    """A replica without a model.

    Args:
        worker: Its worker.
        run: Name of the run.
        sizes: Sizes of the model's tensors.
    """

    def __init__(self, worker: Any, run: str, sizes: Sequence[int]) -> None:
        super().__init__(worker, Nothing(), run)
        self._like = like(sizes)
        self._update = [made_up(worker.id, size) for size in sizes]

    async def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """See ``Replica``."""
        request = Task.from_message(task)
        if "generation" in request.weights:
            request = await self.exchange.begin(request, self._like)
        reply: Reply = await self._worker.compute(self._carry, request)
        return reply.to_message()

    def _carry(self, task: Task) -> Reply:
        update, _, error = send_update(task.codec, self._update, [False] * len(self._like), None)
        if "generation" in task.weights:
            update = self.exchange.sent(task, update, [f"tensor{i}" for i in range(len(self._like))])
        else:
            read_weights(task.weights, None, self._like)
        return nothing(task, update=update, codec_error=error)

    async def stop(self) -> None:
        """See ``Replica``."""

    async def close(self) -> None:
        """See ``Role``."""


class PushingStandIn(DownpourReplica):
    """Replicas of Downpour without a model: each fetches, and pushes the same update again, as fast as it can.

    Args:
        worker: Its worker.
        run: Name of the run.
        sizes: Sizes of the model's tensors.
    """

    def __init__(self, worker: Any, run: str, sizes: Sequence[int]) -> None:
        super().__init__(worker, Nothing(), run)
        rows = Rows.of(like(sizes), [True] * len(sizes))
        self._stepper = SimpleNamespace(rows=rows)  # type: ignore[assignment]
        self._gradient = made_up(worker.id, sum(sizes))

    async def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """See ``Replica``; one fetch and one push in each step."""
        request = Task.from_message(task)
        steps = shares(batches_of(request), len(ReplicaEntry.from_message(request.weights).replicas))
        replicas = await replicas_of(self._servers.owners, request, steps, Cadence())
        for replica in replicas:
            while replica.done < replica.left:
                _, rest = await replica.take(None, 0.0)
                replica.done += 1
                await replica.push(self._gradient, rest)
            await replica.pushed()
        return nothing(request, pushed=record(replicas)).to_message()

    async def stop(self) -> None:
        """See ``Replica``."""

    async def close(self) -> None:
        """See ``Role``."""
        self._worker.on_shard(None)
        await self._servers.close()


def like(sizes: Sequence[int]) -> list[Any]:
    """Return arrays with these sizes that need no memory."""
    return [np.broadcast_to(np.zeros((), np.float32), (size,)) for size in sizes]


def made_up(seed: int, size: int) -> Any:
    """Return an array that repeats some values."""
    return np.resize(np.random.default_rng(seed).normal(scale=1e-3, size=1 << 16).astype(np.float32), size)


def nothing(task: Task, **more: Any) -> Reply:
    """Return the reply of a replica without computing."""
    how: dict[str, Any] = {"update": None, "codec_error": 0.0, "metrics": {"loss": 0.0}, **more}
    return Reply(
        task=task,
        samples=len(task.indices),
        fed=None,
        counted=NOTHING_COUNTED,
        compute_s=1e-3,
        wait_data_s=0.0,
        files=(),
        stopped=False,
        state={},
        **how,
    )


class StandInRun(FakeRun):
    """A run of these replicas.

    Args:
        cluster: Real workers, which are connected.
        parameters: Number of parameters of the model.
        settings: Settings of ``FakeRun``.
    """

    samples = 800

    def __init__(self, cluster: Any, parameters: int, **settings: Any) -> None:
        self.sizes = tensors(parameters)
        begin = {f"tensor{i}": np.zeros(size, np.float32) for i, size in enumerate(self.sizes)}
        if settings.get("mode") != "downpour":  # what an optimizer keeps is not made up
            settings = {"optimizer_state": "fresh", **settings}
        super().__init__(cluster, start=begin, slots=cluster.N, **settings)

    @property
    def stand_in(self) -> tuple[Any, ...]:
        """Return the class that workers open, and its arguments after the name of the run."""
        return (PushingStandIn if self.mode == "downpour" else StandIn), self.sizes

    def on_event(self, event: Any) -> None:
        """Ignore the event."""

    async def _train(self, mode: str, *arguments: int | None, fresh: bool) -> Any:
        return await start.train(self, mode, *arguments, fresh=fresh, crew_of=_crew_of)


@asynccontextmanager
async def _crew_of(app: StandInRun, seed: int, *, run: str, **how: Any) -> AsyncIterator[tuple[Crew, int]]:
    """Like ``ddlf.training.crew.opening.crew_of``, but no slot ever moves to a second worker."""

    async def open_worker(worker: Any) -> None:
        kind, *arguments = app.stand_in
        await worker.call((run, REPLICA), "open", kind, run, *arguments)

    app.run_context.name, app.run_context.content = run, "made up"
    app.run_context.data = data = CommonData()
    data.samples, data.content = app.samples, "made up"
    app.run_context.optimizer = {"optimizer": "SGD", "optimizer learning_rate": 0.1}
    async with (
        Crew(app.cluster, open_worker, app.run_context.emit, backups=False) as crew,
        hooked(app, crew.end),
    ):
        await crew.ready()
        try:
            yield crew, app.samples
        finally:
            closing = (worker.call((run, REPLICA), "close") for worker in app.cluster.workers)
            await asyncio.gather(*closing, return_exceptions=True)
