"""What synchronous and asynchronous training share: the job, and carrying one slot through one round. Runs on the master."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddlf.algorithms.check import fault
from ddlf.algorithms.merge import Rule
from ddlf.algorithms.outer import OuterOptimizer
from ddlf.algorithms.partition import Indices, shuffled
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.events import SlotsChanged
from ddlf.roles import replica
from ddlf.roles.metrics import MetricMerge
from ddlf.roles.task import Reply, Task
from ddlf.training.crew import Crew
from ddlf.training.exchange import WeightsOut
from ddlf.training.keeper import Keeper
from ddlf.training.progress import Progress
from ddlf.training.reporting import Reporter
from ddlf.training.states import SlotStates
from ddlf.wire.messages import Request

Weights = list[np.ndarray[Any, Any]]

STOP_S = 2.0
"""How long a run waits at its end for workers to take STOP: one that is coming back, or is stopped, has nothing that counts any more."""


ORDERS = 4
"""So many rounds' orders of the samples are kept; each takes 1 to 8 bytes a sample."""
IN_A_THREAD = 100_000
"""So many samples take a millisecond to shuffle. More are shuffled while connections are served."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One training run.

    Args:
        run: Names it on the workers.
        cluster: Its workers carry the slots.
        crew: They, as they come and go.
        slots: K of the round that begins, or began last.
        grows: Whether workers that come meanwhile get slots of their own.
        progress: What the run has come to; the weights are in it.
        keeper: Writes checkpoints of it, if any are wanted.
        states: What each slot has left for its next round, and where that is.
        trainable: For each of them, whether it is trained; the others are averaged plainly.
        samples: n, in the data set of every node.
        master_epochs: Local epochs of the whole run.
        worker_epochs: Local epochs in a round.
        batch_size: Per worker.
        seed: Of the partitions and of everything random on the workers.
        names: Paths of the weights.
        rule: How the updates of a round become one.
        update_policy: What to do with an update that looks wrong.
        outer: How a merged update changes the weights.
        codec: Of the updates on their way back.
        weights_out: Of the weights on their way out.
        balance: ``"equal"`` partitions, or sizes that follow each slot's measured ``"speed"``.
        merge_metrics: Makes one of the metrics of several slots.
        reporter: Gives each record to the app's hooks.
    """

    run: str
    cluster: Cluster
    crew: Crew
    slots: int
    grows: bool
    progress: Progress
    states: SlotStates
    trainable: list[bool]
    samples: int
    master_epochs: int
    worker_epochs: int
    batch_size: int
    seed: int
    names: list[str]
    rule: Rule
    update_policy: str
    outer: OuterOptimizer
    codec: str
    weights_out: WeightsOut
    balance: str
    merge_metrics: MetricMerge
    reporter: Reporter
    keeper: Keeper | None = None
    orders: dict[int, asyncio.Future[Indices]] = field(default_factory=dict)

    def grow(self, number: int) -> range:
        """Have as many slots as there are workers from a round on, if they may become more; they never become fewer.

        Args:
            number: Of a round, from 0, that no slot has begun.

        Returns:
            The new slots. Each begins with a fresh optimizer.
        """
        before, workers = self.slots, min(self.crew.size, self.samples)
        if not self.grows or workers <= before:
            return range(0)
        self.slots = workers
        self.progress.slots_from.append((number, workers))
        self.progress.states += [{} for _ in range(before, workers)]
        self.progress.speeds += [None] * (workers - before)
        self.crew.emit(SlotsChanged(round=number + 1, slots=workers))
        return range(before, workers)

    async def order(self, number: int) -> Indices:
        """The samples in the order of a round, from 0. The last few are kept: slots of asynchronous training come for the same one."""
        if number not in self.orders:
            for old in list(self.orders)[: 1 - ORDERS]:
                del self.orders[old]
            self.orders[number] = asyncio.ensure_future(_order(self.samples, self.seed, number))
        return await asyncio.shield(self.orders[number])

    def check(self, slot: int, result: Reply) -> None:
        """Refuse an update that cannot be used whatever the others are.

        Raises:
            BadUpdate: Names the worker, the tensor and how many of its values are wrong.
        """
        found = fault(result.update, result.samples, self.progress.weights, self.names)
        if found is not None:
            raise found.error(slot + 1, f"worker {result.worker}")

    async def keep(self) -> None:
        """Write a checkpoint of what the run has come to, if that is due."""
        if self.keeper is not None:
            await self.keeper.keep(self.progress, self.states)

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes sent and received so far, by all workers."""
        workers = self.cluster.workers
        return sum(worker.bytes_sent for worker in workers), sum(worker.bytes_received for worker in workers)

    async def stop_workers(self) -> None:
        """Send STOP: what still trains ends at its next batch. The run does not wait for a worker that does not take it."""
        await self.cluster.options(on_error="return", timeout_s=STOP_S).run_method(replica.stop_training)


async def run_slot(
    job: Job,
    slot: int,
    number: int,
    epochs: int,
    indices: np.ndarray[Any, Any],
    weights: Weights,
    worker: ProxyWorker,
    holds: bool,
) -> Reply:
    """Send a slot's partition and the weights to a worker, and wait for the update.

    Args:
        job: The run.
        slot: Which, from 0.
        number: Of the round, from 0.
        epochs: Local ones.
        indices: Of the slot's samples.
        weights: To begin with.
        worker: That carries it.
        holds: Whether the slot's last round left its state on that worker.

    Raises:
        AppMissing: The worker has lost what the run gave it.
        ProtocolError: It trained on other samples than those it was given.
    """
    begin = time.perf_counter()
    out, back = worker.bytes_sent, worker.bytes_received
    task = Task(
        slot=slot,
        round=number,
        first_epoch=job.progress.starts[number],
        epochs=epochs,
        batch_size=job.batch_size,
        seed=job.seed,
        indices=indices,
        state=await job.states.of(slot, holds),
        weights=job.weights_out.encode(slot, weights, holds=holds),
        codec=job.codec,
        keep=job.states.keep,
        back=job.states.back,
    )
    answer = await worker.rpc(Request("run_method", replica.train_slot, job.run, task.to_message()))
    reply = Reply.from_message(answer, task, weights, job.samples, worker.name)
    return dataclasses.replace(
        reply,
        worker=worker.id,
        elapsed_s=time.perf_counter() - begin,
        bytes_out=worker.bytes_sent - out,
        bytes_back=worker.bytes_received - back,
    )


async def _order(samples: int, seed: int, number: int) -> Indices:
    if samples < IN_A_THREAD:
        return shuffled(samples, seed, number)
    return await asyncio.to_thread(shuffled, samples, seed, number)


async def end_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs and wait for it, so that nothing goes on behind an error."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
