"""Asynchronous training. Runs on the master.

Each of the K slots loops on its own (Phan and Do 2023, Algorithm 3)::

    read the current weights w and their version; send them with the slot's partition of this round
    on arrival of its update g:  w <- w - g / K,  version <- version + 1

A slot whose worker is lost begins its round again on another one, with the weights of then; what was lost was never applied.

The staleness of an update is the number of merges applied between reading the weights and applying it. All of this runs on one event loop, so
a merge needs no lock.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.algorithms.merge import RunningMerge
from ddlf.algorithms.partition import equal_sizes, partition, shuffled
from ddlf.training.record import RoundRecord
from ddlf.training.slots import SlotResult, end_all, mean_metrics, round_epochs, run_slot

if TYPE_CHECKING:
    from ddlf.cluster.proxy import ProxyWorker
    from ddlf.training.slots import Job


async def train(job: Job) -> list[RoundRecord]:
    """Train until every slot has done its rounds or the app says that it has converged.

    Args:
        job: As in ``sync.train``.

    Returns:
        A record for each update, in the order in which they were applied.
    """
    records: list[RoundRecord] = []
    schedule = round_epochs(job.master_epochs, job.worker_epochs)
    converged = False

    async def run(slot: int) -> None:
        nonlocal converged
        for number, epochs in enumerate(schedule):
            if converged:
                return
            begin = time.perf_counter()
            job.crew.meet_new_workers()
            # Every slot shuffles alike and takes its own part: in each round the parts are disjoint and complete.
            part = partition(shuffled(job.samples, job.seed, number), equal_sizes(job.samples, job.slots))[slot]

            async def attempt(
                worker: ProxyWorker, holds: bool, number: int = number, epochs: int = epochs, part: Any = part
            ) -> tuple[SlotResult, Any, int]:
                weights, version = job.weights, len(records)
                return await run_slot(job, slot, number, epochs, part, weights, worker, holds), weights, version

            result, weights, version = await job.crew.carry(slot, number, attempt)
            if converged or result.stopped:
                return
            merging = time.perf_counter()
            one = RunningMerge(1, like=weights)
            one.add(0, result.update, result.samples)
            share = [
                np.asarray(update / job.slots, update.dtype) if np.issubdtype(update.dtype, np.floating) else update
                for update in one.result()
            ]
            # The current weights, not those that were read: others may have merged meanwhile. New arrays, because the
            # old ones may still be on their way to a worker.
            _, job.weights = job.outer.update([], job.weights, share, job.trainable)
            job.optimizers[slot] = result.optimizer
            end = time.perf_counter()
            record = RoundRecord(
                round=number + 1,
                rounds=len(schedule),
                slot=slot + 1,
                version=len(records) + 1,
                staleness=len(records) - version,
                epochs=epochs,
                samples=result.samples,
                seconds=end - begin,
                compute_s=result.compute_s,
                transfer_s=result.elapsed - result.compute_s,
                merge_s=end - merging,
                bytes_out=result.bytes_out,
                bytes_back=result.bytes_back,
                workers=(result.worker,),
                error=result.error,
                metrics=mean_metrics([(result.metrics, result.samples)]),
            )
            records.append(record)
            if await job.report(record):
                converged = True
                await job.stop_workers()

    slots = [asyncio.ensure_future(run(slot)) for slot in range(job.slots)]
    try:
        await asyncio.gather(*slots)
    except BaseException:
        await end_all(slots)
        raise
    if not converged:
        await job.stop_workers()
    return records
