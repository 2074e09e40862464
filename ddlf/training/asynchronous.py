"""Asynchronous training. Runs on the master.

Each of the K slots loops on its own (Phan and Do 2023, Algorithm 3)::

    read the current weights w and their version; send them with the slot's partition of this round
    on arrival of its update g:  w <- outer(w, g / K),  version <- version + 1

By default ``outer`` subtracts. One with momentum has one velocity for all slots, which each update moves by its share of a round::

    v <- m v + g / K,  w <- w - rate (g / K + m v)

An update that is rejected is dropped: it is told by an event, its samples are not in the ledger, and its slot goes on with its next round.

A slot whose worker is lost begins its round again on another one, with the weights of then; what was lost was never applied.

The staleness of an update is the number of merges applied between reading the weights and applying it. All of this runs on one event loop, so
a merge needs no lock.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.algorithms.check import Verdict, scaled
from ddlf.algorithms.merge import RunningMerge
from ddlf.algorithms.partition import equal_sizes, partition
from ddlf.algorithms.weights import is_float
from ddlf.record import RoundRecord
from ddlf.roles.task import Reply
from ddlf.training.gather import tell_clipped, verdict_of
from ddlf.training.slots import run_slot

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
    progress = job.progress
    records = progress.records
    progress.begin_async()
    schedule = progress.epochs
    progress.state = progress.state or {"outer": job.outer.init(progress.weights)}
    begun = list(progress.slot_rounds)
    stopping = False
    latest: dict[int, Reply] = {}  # of each slot the last update that counted, to compare with

    async def told(reporting: asyncio.Task[bool]) -> None:
        nonlocal stopping
        if await reporting and not stopping:
            stopping = True
            await job.stop_workers()

    def grow() -> None:
        """New workers get slots that begin with the first round that nobody has begun: it and those after it are cut into more parts."""
        first = max(begun)
        for slot in job.grow(first) if first < len(schedule) else ():
            progress.slot_rounds.append(first)
            begun.append(first)
            tasks.create_task(run(slot))

    async def run(slot: int) -> None:
        reported: asyncio.Task[None] | None = None
        for number, epochs in list(enumerate(schedule))[progress.slot_rounds[slot] :]:
            if stopping:
                return
            begin = time.perf_counter()
            job.crew.meet_new_workers()
            grow()
            begun[slot] = number + 1
            # Every slot shuffles alike and takes its own part: in each round the parts are disjoint and complete.
            slots = progress.slots_in(number)
            part = partition(await job.order(number), equal_sizes(job.samples, slots))[slot]

            async def attempt(
                worker: ProxyWorker, holds: bool, number: int = number, epochs: int = epochs, part: Any = part
            ) -> tuple[Reply, Any, int]:
                weights, version = progress.weights, progress.version
                return await run_slot(job, slot, number, epochs, part, weights, worker, holds), weights, version

            result, weights, version = await job.crew.carry(slot, number, attempt)
            if reported is not None:
                await reported  # so at most K records wait for a test, each with its weights
            if stopping or result.stopped:
                return
            merging = time.perf_counter()
            verdict = _verdict(job, slot, result, latest)
            if verdict.action == "reject":
                progress.slot_rounds[slot] = number + 1
                continue
            latest[slot] = result
            one = RunningMerge(1, like=weights)
            one.add(0, scaled(result.update, verdict.factor), result.samples, checked=True)
            share = [
                np.asarray(update / slots, update.dtype) if is_float(update) else update for update in one.result()
            ]
            # The current weights, not those that were read: others may have merged meanwhile. New arrays, because the
            # old ones may still be on their way to a worker.
            outer, progress.weights = job.outer.update(progress.state["outer"], progress.weights, share, job.trainable)
            progress.state = {"outer": outer}
            job.states.left(result)
            progress.ledger.add(part, epochs, result.fed)
            if slot in job.weights_out.held:
                job.states.holds(slot, job.weights_out.held[slot])
            progress.slot_rounds[slot] = number + 1
            progress.version += 1
            end = time.perf_counter()
            record = RoundRecord(
                round=number + 1,
                rounds=len(schedule),
                slot=slot + 1,
                version=progress.version,
                staleness=progress.version - 1 - version,
                epochs=epochs,
                samples=result.samples,
                seconds=end - begin,
                compute_s=result.compute_s,
                transfer_s=result.elapsed_s - result.compute_s,
                merge_s=end - merging,
                bytes_out=result.bytes_out,
                bytes_back=result.bytes_back,
                slots=slots,
                workers=(result.worker,),
                verdicts=() if verdict.action == "accept" else (str(verdict),),
                error=result.codec_error,
                metrics=result.metrics,
            )
            records.append(record)
            # As often as all samples were trained on, the validation data is evaluated.
            reporting = job.reporter.report(
                progress.weights,
                validate=progress.version % job.slots == 0,
                last=all(done == len(schedule) for done in progress.slot_rounds),
            )
            reported = tasks.create_task(told(reporting))
            await job.keep()

    try:
        async with asyncio.TaskGroup() as tasks:
            for slot in range(job.slots):
                tasks.create_task(run(slot))
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    if not stopping:
        await job.stop_workers()
    return records


def _verdict(job: Job, slot: int, result: Reply, latest: dict[int, Reply]) -> Verdict:
    """Whether an update counts, compared with the last one of each other slot."""
    if job.update_policy == "stop":
        job.check(slot, result)
        return Verdict(slot=slot + 1)
    verdict = verdict_of(job, {**latest, slot: result})[slot]
    if verdict.action == "reject":
        job.crew.distrust(slot, result.worker, str(verdict))
    else:
        job.crew.trust(result.worker)
    if verdict.action == "clip":
        tell_clipped(job, slot, result, verdict)
    return verdict
