"""Moving statistics of the merged weights, which the workers compute after each merge. Runs on the master; ``ddlf.roles.statistics`` says how."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.check import fault
from ddlf.algorithms.merge import Rule
from ddlf.algorithms.weights import Weights
from ddlf.cluster.proxy import ProxyWorker
from ddlf.roles.task import Reply, Task
from ddlf.training.rounds import end_all
from ddlf.training.run import Run


async def recalibrated(run: Run, weights: Weights, replies: Sequence[Reply], merge: Rule) -> Weights:
    """The weights with moving statistics of their own, if the run is to have such.

    Each slot computes them over the samples of its round; what they differ by from the merged ones becomes one by the same rule as updates: with
    the mean they are those of all samples of the round. What depends on nothing but weights, samples and seed is the same bits on any worker.

    Args:
        run: The run.
        weights: Weights that were merged.
        replies: What they came of.
        merge: How updates become one.

    Raises:
        BadUpdate: Statistics cannot be used.
    """
    places = run.facts.statistics
    if not places:
        return weights
    new = list(weights)
    old = [weights[place] for place in places]
    for place, array in zip(
        places, await statistics(run, run.exchange.whole(weights), old, replies, merge), strict=True
    ):
        new[place] = array
    return new


async def statistics(run: Run, weights: dict[str, Any], old: Weights, replies: Sequence[Reply], merge: Rule) -> Weights:
    """Moving statistics of weights.

    Args:
        run: The run.
        weights: The weights, as tasks say which.
        old: Moving statistics in them.
        replies, merge: As of ``recalibrated``.

    Raises:
        BadUpdate: Statistics cannot be used.
    """
    begin = time.perf_counter()
    tasks = [dataclasses.replace(r.task, weights=weights, state=None, shared={}, control=None) for r in replies]
    carrying = [asyncio.ensure_future(_carried(run, task)) for task in tasks]
    try:
        found: list[Weights] = await asyncio.gather(*carrying)
    except BaseException:
        await end_all(carrying)
        raise
    names = [run.facts.names[place] for place in run.facts.statistics]
    into = merge.start(len(found), old, names)
    for place, (reply, mine) in enumerate(zip(replies, found, strict=True)):
        if wrong := fault(mine, reply.samples, old, names):
            raise wrong.error(reply.slot + 1, f"worker {reply.worker}")
        into.add(place, [w - one for w, one in zip(old, mine, strict=True)], reply.samples, checked=True)
    run.arrived += time.perf_counter() - begin  # it was no merging
    return [np.asarray(w - moved, w.dtype) for w, moved in zip(old, into.result(), strict=True)]


async def _carried(run: Run, task: Task) -> Any:
    work, near = run.nearby.around(task.indices, partial(_measure, run, task)), run.nearby.of(task.indices)
    return await run.crew.carry(task.slot, task.round, work, leaves=False, near=near)


async def _measure(run: Run, task: Task, worker: ProxyWorker, holds: bool) -> Weights:
    return await run.exchange.measure(task, worker)
