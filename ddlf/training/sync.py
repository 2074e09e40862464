"""Synchronous training. Runs on the master.

One round, with K slots and n samples (Phan and Do 2023, Algorithm 2, with all samples trained on and the merge weighted by them)::

    shuffle the indices with (seed, round); split them into K partitions P_j; send P_j and w to the worker of slot j
    worker: set weights w, fit P_j for worker_epochs, update g_j = w - w_j
    w <- outer(w, merge(g_1 .. g_K))
    stop if is_convergent(record): the workers get STOP

Updates are summed in slot order, whatever the order of their arrival and whoever carried a slot, so equal seeds give equal bits. A slot whose worker
is lost is computed again by another one, from the same weights, indices, optimizer state and seeds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddlf.algorithms.merge import RunningMerge
from ddlf.algorithms.partition import equal_sizes, partition, shuffled, sizes_by_speed, smooth_speed
from ddlf.training.record import RoundRecord
from ddlf.training.slots import SlotResult, end_all, mean_metrics, round_epochs, run_slot

if TYPE_CHECKING:
    from ddlf.training.slots import Job


async def train(job: Job) -> list[RoundRecord]:
    """Train until ``master_epochs`` are over or the app says that it has converged.

    Args:
        job: The app, its cluster, the weights to start from and the settings of the run. ``job.weights`` holds the result.

    Returns:
        A record for each round.
    """
    records: list[RoundRecord] = []
    schedule = round_epochs(job.master_epochs, job.worker_epochs)
    state = job.outer.init(job.weights)
    indices = shuffled(job.samples, job.seed, 0)
    speeds: list[float | None] = [None] * job.slots
    for number, epochs in enumerate(schedule):
        begin = time.perf_counter()
        out, back = job.bytes_moved()
        lost = job.crew.losses
        job.crew.begin_round()
        merge = RunningMerge(job.slots, like=job.weights)
        partitions = partition(indices, _sizes(job, speeds))
        tasks = [
            asyncio.ensure_future(
                job.crew.carry(
                    slot, number, partial(run_slot, job, slot, number, epochs, partitions[slot], job.weights)
                )
            )
            for slot in range(job.slots)
        ]
        try:
            # Everything here happens while the workers compute.
            test = await job.evaluate_between(number)
            if number + 1 < len(schedule):
                indices = shuffled(job.samples, job.seed, number + 1)
            merged_at = await _merge_as_they_come(tasks, merge)
        except BaseException:
            await end_all(tasks)
            raise
        results = [task.result() for task in tasks]
        state, job.weights = job.outer.update(state, job.weights, merge.result(), job.trainable)
        job.optimizers = [result.optimizer for result in results]
        speeds = [
            smooth_speed(old, result.samples * epochs / max(result.compute_s, 1e-9))
            for old, result in zip(speeds, results, strict=True)
        ]
        end = time.perf_counter()
        slowest = max(result.elapsed for result in results)
        compute = max(result.compute_s for result in results)
        moved = job.bytes_moved()
        record = RoundRecord(
            round=number + 1,
            rounds=len(schedule),
            version=number + 1,
            epochs=epochs,
            samples=sum(result.samples for result in results),
            seconds=end - begin,
            compute_s=compute,
            transfer_s=max(result.elapsed - result.compute_s for result in results),
            merge_s=end - merged_at,
            wait_s=sum(slowest - result.elapsed for result in results) / len(results),
            bytes_out=moved[0] - out,
            bytes_back=moved[1] - back,
            error=sum(result.error for result in results) / len(results),
            workers=tuple(result.worker for result in results),
            lost=job.crew.losses - lost,
            metrics=mean_metrics([(result.metrics, result.samples) for result in results]),
            test=test,
        )
        records.append(record)
        if await job.report(record):
            break
    await job.stop_workers()
    return records


def _sizes(job: Job, speeds: Sequence[float | None]) -> list[int]:
    """Samples of each slot: equal, or such that slots of these speeds end together."""
    measured = [speed for speed in speeds if speed is not None]
    if job.balance == "equal" or len(measured) < job.slots:
        return equal_sizes(job.samples, job.slots)
    return sizes_by_speed(job.samples, measured, minimum=min(job.batch_size, job.samples // job.slots))


async def _merge_as_they_come(tasks: list[asyncio.Task[SlotResult]], merge: RunningMerge) -> float:
    """Give each update to the merge when it arrives; return when the last one did."""
    slots = {task: slot for slot, task in enumerate(tasks)}
    waiting = set(tasks)
    arrived = time.perf_counter()
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        arrived = time.perf_counter()
        for task in sorted(done, key=slots.__getitem__):
            result = task.result()
            merge.add(slots[task], result.update, result.samples)
    return arrived
