"""Synchronous training. Runs on the master.

One round, with K slots and n samples (Phan and Do 2023, Algorithm 2, with all samples trained on and the merge weighted by them)::

    shuffle the indices with (seed, round); split them into K partitions P_j; send P_j and w to the worker of slot j
    worker: set weights w, fit P_j for worker_epochs, update g_j = w - w_j
    w <- outer(w, merge(g_1 .. g_K)), of those that are fit to count
    stop if is_convergent(record): the workers get STOP

Updates are summed in slot order, whatever the order of their arrival and whoever carried a slot, so equal seeds give equal bits. A slot whose worker
is lost is computed again by another one, from the same weights, indices, optimizer state and seeds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddlf.algorithms.partition import equal_sizes, partition, sizes_by_speed, smooth_speed
from ddlf.record import RoundRecord
from ddlf.roles.task import Reply
from ddlf.training.gather import gather
from ddlf.training.slots import end_all, run_slot

if TYPE_CHECKING:
    from ddlf.training.slots import Job


async def train(job: Job) -> list[RoundRecord]:
    """Train until ``master_epochs`` are over or the app says that it has converged.

    Args:
        job: The app, its cluster, where to start from and the settings of the run. ``job.progress`` holds the result.

    Returns:
        A record for each round.
    """
    progress = job.progress
    progress.begin_sync()
    schedule = progress.epochs
    progress.state = progress.state or {"outer": job.outer.init(progress.weights)}
    reporting: asyncio.Task[bool] | None = None
    for number, epochs in list(enumerate(schedule))[progress.round :]:
        begin = time.perf_counter()
        out, back = job.bytes_moved()
        lost = job.crew.losses
        job.crew.begin_round()
        job.grow(number)
        partitions = partition(await job.order(number), _sizes(job, progress.speeds))
        carry = partial(_carry, job, number, epochs, partitions)
        tasks = [asyncio.ensure_future(carry(slot)) for slot in range(job.slots)]
        try:
            # Everything here happens while the workers compute.
            if reporting is not None and await reporting:  # it waits for the test of the round before
                await end_all(tasks)
                break
            if number + 1 < len(schedule):
                await job.order(number + 1)
            gathered = await gather(job, tasks, carry)
        except BaseException:
            await end_all(tasks)
            raise
        outer, progress.weights = job.outer.update(
            progress.state["outer"], progress.weights, gathered.merged, job.trainable
        )
        progress.state = {"outer": outer}
        for slot, result in gathered.results.items():
            job.states.left(result)
            speed = result.samples * epochs / max(result.compute_s, 1e-9)
            progress.speeds[slot] = smooth_speed(progress.speeds[slot], speed)
            progress.ledger.add(partitions[slot], epochs, result.fed)
        for slot, weights in job.weights_out.held.items():
            job.states.holds(slot, weights)
        progress.round = number + 1
        progress.version += 1
        end = time.perf_counter()
        results = list(gathered.results.values())
        slowest = max(result.elapsed_s for result in results)
        compute = max(result.compute_s for result in results)
        moved = job.bytes_moved()
        record = RoundRecord(
            round=number + 1,
            rounds=len(schedule),
            version=progress.version,
            epochs=epochs,
            samples=sum(result.samples for result in results),
            seconds=end - begin,
            compute_s=compute,
            transfer_s=max(result.elapsed_s - result.compute_s for result in results),
            merge_s=end - gathered.arrived,
            wait_s=sum(slowest - result.elapsed_s for result in results) / len(results),
            bytes_out=moved[0] - out,
            bytes_back=moved[1] - back,
            error=sum(result.codec_error for result in results) / len(results),
            slots=job.slots,
            workers=tuple(result.worker for result in results),
            verdicts=gathered.verdicts,
            lost=job.crew.losses - lost,
            metrics=job.merge_metrics([(result.metrics, result.samples, result.counted) for result in results]),
        )
        progress.records.append(record)
        reporting = job.reporter.report(progress.weights, validate=True, last=number + 1 == len(schedule))
        await job.keep()
        if not job.reporter.is_testing and await reporting:
            break
    if reporting is not None:
        await reporting
    await job.stop_workers()
    return progress.records


async def _carry(
    job: Job, number: int, epochs: int, partitions: Sequence[Any], slot: int, avoid: frozenset[int] = frozenset()
) -> Reply:
    work = partial(run_slot, job, slot, number, epochs, partitions[slot], job.progress.weights)
    result: Reply = await job.crew.carry(slot, number, work, avoid=avoid)
    return result


def _sizes(job: Job, speeds: Sequence[float | None]) -> list[int]:
    """Samples of each slot: equal, or such that slots of these speeds end together."""
    measured = [speed for speed in speeds if speed is not None]
    if job.balance == "equal" or len(measured) < job.slots:
        return equal_sizes(job.samples, job.slots)
    return sizes_by_speed(job.samples, measured, minimum=min(job.batch_size, job.samples // job.slots))
