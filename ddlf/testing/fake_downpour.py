"""Downpour on a fake worker: shards, fetches, pushes and turns are real, only gradients are fake.

Runs on the master's event loop.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np

from ddlf.algorithms.flat_weights import Row, Rows
from ddlf.algorithms.push_rules import Cadence
from ddlf.data.app import UserApp
from ddlf.errors import WorkerLost
from ddlf.training.evaluation.metrics import NOTHING_COUNTED
from ddlf.training.slot.task import Reply, Task
from ddlf.training.strategies.downpour.client import record, replicas_of
from ddlf.training.strategies.downpour.replica import planned, shares
from ddlf.training.strategies.downpour.server import Servers
from ddlf.worker.peers import Unreached

RUN = "made up"
"""Name of the run of the fake workers' roles."""
LOOK_S = 0.002
"""Seconds between two checks whether a fake worker is lost."""


def gradient(app: UserApp, task: Task, samples: Any, weights: Row) -> Row:
    """Return ``0.1 w + N(0, 1)``, with noise from the task's seed and the batch's samples."""
    chance = np.random.default_rng((task.seed, task.round, int(samples.sum()), len(samples)))
    found: Row = np.float32(0.1) * weights + chance.normal(size=weights.size).astype(np.float32)
    return found * np.float32(app.learning_rate > 0)


def rows_of(app: UserApp) -> Rows:
    """Return the row layout of a fake model."""
    return Rows.of(list(app.start.values()), [path not in app.frozen for path in app.start])


async def carried(worker: Any, app: UserApp, task: Task) -> Reply:
    """Carry a slot's round, like ``DownpourReplica`` on a worker.

    Args:
        worker: The fake worker. Its ``gradient`` has the signature of this module's function.
        app: The run.
        task: The task of the round.
    """
    rows = rows_of(app)
    cadence = Cadence(n_fetch=app.n_fetch, n_push=app.n_push)
    size = task.batch_size
    batches, samples = math.ceil(len(task.indices) / size), worker.model.samples_of(task)
    replicas: list[Any] = []
    pushed: dict[str, Any] = {"refused": 0}
    try:
        replicas = await replicas_of(worker.end.owners, task, shares(batches, len(task.weights["replicas"])), cadence)
        order, chosen = planned(task, replicas, batches)
        now: dict[int, tuple[Row, Row]] = {}
        owed: dict[int, Row] = {}
        alone = task.weights["alone"] * app.n_push
        for place, batch in zip(order, chosen, strict=True):
            one = replicas[place]
            if cadence.takes(one.done):
                now[place] = await one.take(owed.get(place), app.learning_rate)
            weights, rest = now[place]
            found = worker.gradient(app, task, samples[batch * size : (batch + 1) * size], weights)
            owed[place] = owed.get(place, np.zeros(rows.sizes[0], np.float32)) + found
            now[place] = weights - np.float32(app.learning_rate) * found, rest
            one.done += 1
            if cadence.pushes(one.done - 1, one.left):
                await one.push(owed.pop(place), np.zeros_like(rest))
            alone -= 1
            if not alone:
                await one.pushed()
            await asyncio.sleep(0)
        for one in replicas:
            await one.pushed()
    except Unreached as error:
        pushed |= {"peer": error.worker, "why": error.why}
    finally:
        for one in replicas:
            one.end()
    if worker.lost:
        raise WorkerLost("it was lost", worker=worker.name)
    worker.kept.begin(task)
    worker.kept.leave(task, {})
    return Reply(
        task=task,
        update=None,
        codec_error=0.0,
        samples=len(task.indices),
        fed=None,
        metrics={"loss": 1.0},
        counted=NOTHING_COUNTED,
        compute_s=worker.compute_s,
        wait_data_s=0.0,
        files=(),
        stopped=False,
        state={},
        pushed=pushed | record(replicas),
    )


async def carried_until_lost(worker: Any, app: UserApp, task: Task) -> dict[str, Any]:
    """Carry a slot's round, and return the reply's message. A loss ends the wait at once, but not the work itself.

    Raises:
        WorkerLost: The worker was lost meanwhile.
    """
    worker.carrying = asyncio.ensure_future(carried(worker, app, task))
    while not worker.carrying.done() and not worker.lost:
        await asyncio.wait({worker.carrying}, timeout=LOOK_S)
    if worker.lost:
        raise WorkerLost("it was lost", worker=worker.name)
    message: dict[str, Any] = worker.carrying.result().to_message()
    return message


async def answered(worker: Any, role: str, verb: str, arguments: Any) -> Any:
    """Return the answer of a fake worker's role to the master.

    Raises:
        WorkerLost: The worker was lost meanwhile.
    """
    if verb == "evaluate":
        answer: Any = await evaluated(worker, *arguments)
    else:
        answer = await worker.roles.find(RUN, role, verb).function(*arguments)
    if worker.lost:
        raise WorkerLost("it was lost", worker=worker.name)
    return answer


async def evaluated(worker: Any, which: Any, part: str, *of_data: Any) -> dict[str, float] | None:
    """Return the mean of all values of the weights that the master names, as ``loss``."""
    weights = await (worker.end.marked(**which) if "moment" in which else worker.end.exact(**which))
    return None if weights is None else {"loss": mean_of(weights)}


def mean_of(weights: Any) -> float:
    """Return the mean of all values, the result of a fake evaluation."""
    return float(np.concatenate([np.ravel(one) for one in weights]).mean(dtype=np.float64))


def leave(worker: Any) -> None:
    """End the work of a run on a fake worker."""
    if isinstance(end := getattr(worker, "end", None), Servers):
        worker.ending = asyncio.ensure_future(end.close())
    if worker.carrying is not None:
        worker.carrying.cancel()
