"""Has the memory of training measured beside a worker. Runs on the master.

The worker on the machine with the least free memory starts a child process for it, see ``child``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddlf.app import IApp
from ddlf.errors import DDLFError
from ddlf.extras.planner.child import measure_here
from ddlf.extras.planner.measurement_files import largest_of, peaks_of
from ddlf.extras.planner.memory import Largest, Peaks
from ddlf.extras.planner.probe import Probe
from ddlf.extras.planner.trial import memory_peak
from ddlf.rpc.code import pickle_object
from ddlf.training.slot.build import NumberFormat, number_format

PART = 1 / 3
"""The most of the budget for measuring memory."""
NEEDED_PART = 0.5
"""The most of it if the choice depends on memory. Then the largest batch is confirmed, too."""
LEAST_S = 30.0
"""With a smaller budget, memory is measured only if the choice depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of a worker, or why it is unknown.

    Args:
        peaks: The measured memory; None if it could not be measured.
        largest: The largest batch that fits into the limit; None without a limit.
        problem: Why it could not be measured; empty otherwise.
    """

    peaks: Peaks | None = None
    largest: Largest | None = None
    problem: str = ""


async def memory_of(
    app: IApp, batches: Sequence[int], exchange: str, seconds: float, *, limit: int | None, is_goal: bool = False
) -> Memory:
    """Measure the memory of a worker with an app.

    Args:
        app: The app, connected to its cluster. It must not be used for anything else.
        batches: Batch sizes to begin with.
        exchange: How updates travel.
        seconds: The most seconds that it may take.
        limit: The most bytes of a worker, to find the largest batch.
        is_goal: Whether to take the memory of the machine for a limit if there is none.
    """
    assert app.cluster is not None
    workers = [worker for worker in app.cluster.workers if worker.connected]
    if not workers:
        return Memory(problem="no worker is connected")
    memory = {worker.id: (await worker.status()).memory for worker in workers}
    workers_of_host = Counter(worker.host for worker in workers)

    def share(worker: Any) -> float:
        used, free = memory[worker.id].used or 0, memory[worker.id].free
        return used + free / workers_of_host[worker.host] if free else float("inf")

    worker = min(workers, key=share)
    if worker.executor.gpus:
        return Memory(problem=f"{worker.name} computes on a card, and only the memory of the machine is measured")
    of_machine = limit is None and is_goal and share(worker) < float("inf")
    limit = int(share(worker)) if of_machine else limit
    format = number_format()
    request = {
        "worker": worker.id,
        "workers": app.cluster.N,
        "batches": list(batches),
        "exchange": exchange,
        "limit": limit,
        "seconds": seconds,
        "format": None if format in (None, NumberFormat("float32")) else list(format),
    }
    try:
        result = await worker.run_method(measure_here, pickle_object(Probe(app).app), request)
    except DDLFError as error:  # for example, a worker of an earlier release
        return Memory(problem=str(error))
    if "why" in result:
        return Memory(problem=result["why"])
    largest = None if result["largest"] is None else replace(largest_of(result["largest"]), of_machine=of_machine)
    return Memory(peaks=peaks_of(result["peaks"]), largest=largest)


def with_master(peaks: Peaks) -> Peaks:
    """Return measured memory with the most bytes of this process so far, the master."""
    with contextlib.suppress(OSError, KeyError):  # not Linux
        return replace(peaks, master=memory_peak())
    return peaks
