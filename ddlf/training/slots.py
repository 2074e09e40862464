"""What synchronous and asynchronous training share: the job, and carrying one slot through one round. Runs on the master."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddlf.algorithms.outer import OuterOptimizer
from ddlf.cluster.cluster import Cluster
from ddlf.training import replica
from ddlf.training.exchange import WeightsOut, read_update
from ddlf.training.record import RoundRecord
from ddlf.wire.messages import Request

Weights = list[np.ndarray[Any, Any]]


@dataclass(slots=True, kw_only=True)
class Job:
    """One training run.

    Args:
        cluster: Its workers carry the slots: slot j is on worker j + 1.
        weights: Current global weights, one array for each of ``model.weights``. Replaced in each merge, never changed in place.
        trainable: For each of them, whether it is trained; the others are averaged plainly.
        samples: n, in the data set of every node.
        master_epochs: Local epochs of the whole run.
        worker_epochs: Local epochs in a round.
        batch_size: Per worker.
        seed: Of the partitions and of everything random on the workers.
        outer: How a merged update changes the weights.
        codec: Of the updates on their way back.
        weights_out: Of the weights on their way out.
        balance: ``"equal"`` partitions, or sizes that follow each slot's measured ``"speed"``.
        report: Takes each record; returns whether training has converged.
        evaluate_between: Evaluates the current weights while workers compute, in the rounds in which that is wanted.
    """

    cluster: Cluster
    weights: Weights
    trainable: list[bool]
    samples: int
    master_epochs: int
    worker_epochs: int
    batch_size: int
    seed: int
    outer: OuterOptimizer
    codec: str
    weights_out: WeightsOut
    balance: str
    report: Callable[[RoundRecord], Awaitable[bool]]
    evaluate_between: Callable[[int], Awaitable[dict[str, float]]]

    @property
    def slots(self) -> int:
        """K."""
        return self.cluster.N

    def bytes_moved(self, slot: int | None = None) -> tuple[int, int]:
        """Bytes sent and received so far, by all workers or by one slot's."""
        workers = self.cluster.workers if slot is None else [self.cluster.workers[slot]]
        return sum(worker.bytes_sent for worker in workers), sum(worker.bytes_received for worker in workers)

    async def stop_workers(self) -> None:
        """Send STOP: what still trains ends at its next batch."""
        await self.cluster.options(on_error="return").run_method(replica.stop_training)


@dataclass(frozen=True, slots=True)
class SlotResult:
    """What came back from one slot's round.

    Args:
        update: Weights before minus after.
        samples: Trained on.
        metrics: Of the last local epoch.
        error: Relative L2 error of the update as it travelled.
        compute_s: Seconds of local training, on the worker's clock.
        elapsed: Seconds from sending to having the update, on the master's.
        stopped: Whether it was ended early.
    """

    update: Weights
    samples: int
    metrics: dict[str, float]
    error: float
    compute_s: float
    elapsed: float
    stopped: bool


async def run_slot(
    job: Job, slot: int, number: int, epochs: int, indices: np.ndarray[Any, Any], weights: Weights
) -> SlotResult:
    """Send a slot's partition and the weights to its worker, and wait for the update."""
    begin = time.perf_counter()
    task = {
        "slot": slot,
        "round": number,
        "seed": job.seed,
        "epochs": epochs,
        "batch_size": job.batch_size,
        "indices": indices,
        "codec": job.codec,
        "weights": job.weights_out.encode(slot, weights),
    }
    reply = await job.cluster.workers[slot].rpc(Request("run_method", replica.train_slot, task))
    return SlotResult(
        update=read_update(reply["update"], weights),
        samples=reply["samples"],
        metrics=reply["metrics"],
        error=reply["error"],
        compute_s=reply["seconds"],
        elapsed=time.perf_counter() - begin,
        stopped=reply["stopped"],
    )


def round_epochs(master_epochs: int, worker_epochs: int) -> list[int]:
    """Local epochs of each round; the last round is shorter when ``master_epochs`` is no multiple."""
    full, rest = divmod(master_epochs, worker_epochs)
    return [worker_epochs] * full + [rest] * (rest > 0)


def mean_metrics(parts: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """The metrics of several slots as one, weighted by samples."""
    total = sum(samples for _, samples in parts)
    return {name: sum(metrics.get(name, 0.0) * samples for metrics, samples in parts) / total for name in parts[0][0]}


async def end_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs and wait for it, so that nothing goes on behind an error."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
