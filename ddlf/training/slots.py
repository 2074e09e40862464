"""What synchronous and asynchronous training share: the job, and carrying one slot through one round. Runs on the master."""

from __future__ import annotations

import asyncio
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
from ddlf.errors import ProtocolError
from ddlf.events import SlotsChanged
from ddlf.roles import replica
from ddlf.roles.metrics import MetricMerge
from ddlf.training.crew import Crew
from ddlf.training.exchange import WeightsOut, read_update
from ddlf.training.keeper import Keeper
from ddlf.training.progress import Progress
from ddlf.training.reporting import Reporter
from ddlf.training.residuals import Residuals
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
        residuals: What a biased codec still owes of each slot's updates, and where that is.
        trainable: For each of them, whether it is trained; the others are averaged plainly.
        samples: n, in the data set of every node.
        master_epochs: Local epochs of the whole run.
        worker_epochs: Local epochs in a round.
        batch_size: Per worker.
        seed: Of the partitions and of everything random on the workers.
        keep_optimizer: Whether a slot's optimizer goes on from where its last round left it.
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
    residuals: Residuals
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
    keep_optimizer: bool = True
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
        self.progress.optimizers += [None] * (workers - before)
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

    def left(self, slot: int, number: int, result: SlotResult) -> None:
        """Take note of what a slot's round, from 0, has left for its next one; its update was merged."""
        self.progress.optimizers[slot] = result.optimizer
        self.residuals.left(slot, number, result.worker)

    def check(self, slot: int, result: SlotResult) -> None:
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
            await self.keeper.keep(self.progress, self.residuals)

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes sent and received so far, by all workers."""
        workers = self.cluster.workers
        return sum(worker.bytes_sent for worker in workers), sum(worker.bytes_received for worker in workers)

    async def stop_workers(self) -> None:
        """Send STOP: what still trains ends at its next batch. The run does not wait for a worker that does not take it."""
        await self.cluster.options(on_error="return", timeout_s=STOP_S).run_method(replica.stop_training)


@dataclass(frozen=True, slots=True)
class SlotResult:
    """What came back from one slot's round.

    Args:
        update: Weights before minus after.
        samples: Trained on.
        metrics: Of the last local epoch.
        counted: By the model's metrics in it, as ``metrics.read_state`` gives it.
        error: Relative L2 error of the update as it travelled.
        compute_s: Seconds of local training, on the worker's clock.
        elapsed: Seconds from sending to having the update, on the master's.
        stopped: Whether it was ended early.
        fed: Samples that ``replica.fit`` was given, once for each epoch, shape (m,); None if they were the partition's.
        optimizer: The state of the optimizer after it; None if it is not kept.
        worker: Who carried it.
        bytes_out: Sent for it.
        bytes_back: Received.
    """

    update: Weights
    samples: int
    metrics: dict[str, float]
    counted: Any
    error: float
    compute_s: float
    elapsed: float
    stopped: bool
    fed: np.ndarray[Any, Any] | None
    optimizer: Weights | None
    worker: int
    bytes_out: int
    bytes_back: int


async def run_slot(
    job: Job,
    slot: int,
    number: int,
    epochs: int,
    indices: np.ndarray[Any, Any],
    weights: Weights,
    worker: ProxyWorker,
    holds: bool,
) -> SlotResult:
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
    state = job.progress.optimizers[slot]
    fresh = state is None or not job.keep_optimizer
    task = {
        "run": job.run,
        "optimizer": "fresh" if fresh else "held" if holds else state,
        "keep_optimizer": job.keep_optimizer,
        "residual": await job.residuals.of(slot, worker.id, holds),
        "slot": slot,
        "round": number,
        "epoch": job.progress.starts[number],
        "seed": job.seed,
        "epochs": epochs,
        "batch_size": job.batch_size,
        "indices": indices,
        "codec": job.codec,
        "weights": job.weights_out.encode(slot, weights, holds=holds),
    }
    reply = await worker.rpc(Request("run_method", replica.train_slot, task))
    if reply["digest"] != replica.digest(indices):
        raise ProtocolError("trained on other samples than it was given", worker=worker.name)
    return SlotResult(
        update=read_update(reply["update"], weights),
        samples=reply["samples"],
        metrics=reply["metrics"],
        counted=reply["counted"],
        error=reply["error"],
        compute_s=reply["seconds"],
        elapsed=time.perf_counter() - begin,
        stopped=reply["stopped"],
        fed=_checked(reply.get("fed"), job.samples, worker),
        optimizer=[np.asarray(array) for array in reply["optimizer"]] if job.keep_optimizer else None,
        worker=worker.id,
        bytes_out=worker.bytes_sent - out,
        bytes_back=worker.bytes_received - back,
    )


def _checked(fed: Any, samples: int, worker: ProxyWorker) -> np.ndarray[Any, Any] | None:
    if fed is None:
        return None
    if not isinstance(fed, np.ndarray) or fed.dtype != np.int64 or fed.ndim != 1 or not fed.size:
        raise ProtocolError("says no numbers of samples that it trained on", worker=worker.name)
    if fed.min() < 0 or fed.max() >= samples:
        raise ProtocolError(f"says that it trained on samples that none of {samples:,} is", worker=worker.name)
    return fed


async def _order(samples: int, seed: int, number: int) -> Indices:
    if samples < IN_A_THREAD:
        return shuffled(samples, seed, number)
    return await asyncio.to_thread(shuffled, samples, seed, number)


async def end_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs and wait for it, so that nothing goes on behind an error."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
