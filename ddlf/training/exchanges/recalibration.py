"""Moving statistics of the merged weights, which the workers compute after each merge. Runs on the master.

``ddlf.training.slot.batchnorm`` has the method.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.merge import Rule
from ddlf.algorithms.weights import Weights, fault
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import ConfigError
from ddlf.training.context import App
from ddlf.training.crew.recovery import end_all
from ddlf.training.run import Run
from ddlf.training.slot.batchnorm import batch_norms, moving
from ddlf.training.slot.task import Reply, Task


async def recalibrated(run: Run, weights: Weights, replies: Sequence[Reply], merge: Rule) -> Weights:
    """Return the merged weights with new moving statistics of batch normalization, for ``batchnorm="recalibrated"``.

    Each slot computes the statistics over the samples of its round. The merge rule for updates merges their differences
    to the merged statistics. With the mean, the result is the statistics of all samples of the round. They depend only
    on weights, samples and seed, so they have the same bits on any worker.

    Args:
        run: The run.
        weights: The merged weights.
        replies: The replies that were merged.
        merge: The merge rule.

    Raises:
        BadUpdate: Statistics are unusable.
    """
    indices = run.facts.statistics
    new = list(weights)
    old = [weights[index] for index in indices]
    begin = time.perf_counter()
    whole = run.exchange.weights_out.encode_whole
    assert whole is not None  # the master has merged the weights
    message = whole(weights)
    statistics: list[Weights] = await carried(run, [measuring(message, reply) for reply in replies], _measure)
    names = [run.facts.names[index] for index in indices]
    merging = merge.start(len(statistics), old, names)
    for number, (reply, measured) in enumerate(zip(replies, statistics, strict=True)):
        if problem := fault(measured, reply.samples, old, names):
            raise problem.error(reply.slot + 1, f"worker {reply.worker}")
        merging.add(number, [w - value for w, value in zip(old, measured, strict=True)], reply.samples, checked=True)
    run.arrived += time.perf_counter() - begin  # do not count this time as merging
    for index, w, difference in zip(indices, old, merging.result(), strict=True):
        new[index] = np.asarray(w - difference, w.dtype)
    return new


def measuring(weights: Mapping[str, Any], reply: Reply) -> Task:
    """Return the task that makes a worker measure moving statistics for given weights over a reply's samples."""
    return dataclasses.replace(reply.task, weights=weights, state=None, shared={}, control=None)


async def carried(run: Run, tasks: Sequence[Task], measure: Callable[..., Awaitable[Any]]) -> list[Any]:
    """Have each task measured by some worker, and return the measured statistics in order."""

    async def measure_task(task: Task) -> Any:
        work = partial(measure, run, task)
        return await run.carry_near_data(task.slot, task.round, task.indices, work, is_round=False)

    measurements = [asyncio.ensure_future(measure_task(task)) for task in tasks]
    try:
        return await asyncio.gather(*measurements)
    except BaseException:
        await end_all(measurements)
        raise


async def _measure(run: Run, task: Task, worker: ProxyWorker, holds: bool) -> Any:
    return list(await run.exchange.measure(task, worker))


def norms_of(app: App, setting: str) -> dict[str, tuple[int, ...]]:
    """Return the indices of the weights that slots keep to themselves, or that are recalibrated.

    The value of ``batchnorm`` decides which.

    Raises:
        ConfigError: The model has no such weights.
    """
    if setting == "averaged":
        return {}
    indices, kind = (batch_norms(app.model), "layer") if setting == "local" else (moving(app.model), "trained layer")
    if not indices:
        raise ConfigError(
            f"batchnorm={setting!r} has no effect: the model has no {kind} that normalizes by batches",
            hint="leave batchnorm at 'averaged'",
        )
    return {"local_weights" if setting == "local" else "statistics": indices}
