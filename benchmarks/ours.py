"""DDLF as a contender: one of its apps on local workers, with the defaults of ``ddlf run``. Runs on the master."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.workload import Outcome, Weights, Workload


def missing(**settings: Any) -> str | None:
    """Return an error about settings that this version of DDLF lacks, or None."""
    from ddlf.training.registry import SETTINGS

    unknown = [name for name in settings if name not in ("workers", "threads") and name not in SETTINGS]
    return f"this DDLF has no setting {', '.join(unknown)}" if unknown else None


def run(workload: Workload, *, workers: int | None = None, threads: int | None = None, **settings: Any) -> Outcome:
    """Train a workload with DDLF.

    Args:
        workload: What to train.
        workers: Number of workers; None for the workload's number.
        threads: Threads of each worker; by default DDLF's choice.
        settings: Attributes of the app.
    """
    return asyncio.run(_run(workload, workers or workload.workers, threads, settings))


async def _run(workload: Workload, workers: int, threads: int | None, settings: dict[str, Any]) -> Outcome:
    from ddlf import Cluster
    from ddlf.events import Committed, Event, SlotStarted

    ready = 0.0
    snapshots: list[tuple[float, Weights]] = []

    def note(event: Event) -> None:
        nonlocal ready
        if isinstance(event, SlotStarted):
            ready = ready or time.monotonic()
        elif isinstance(event, Committed) and workload.curve:
            snapshots.append((time.monotonic(), app.model.get_weights()))

    async with Cluster.local(workers, threads=threads) as cluster:
        app = workload.app_class()(cluster)
        app.subscribe(note)
        app.verbose = False
        for name, value in settings.items():
            setattr(app, name, value)
        app.master_epochs, app.worker_epochs = workload.epochs, workload.local_epochs
        app.batch_size, app.seed = workload.batch_size, workload.seed
        records = await app.train_model()
        end = time.monotonic()
    return Outcome(
        ready=ready,
        end=end,
        weights=app.model.get_weights(),
        bytes_out=sum(record.bytes_out for record in records),
        bytes_back=sum(record.bytes_back for record in records),
        snapshots=snapshots,
        notes={
            "first_round_s": records[0].seconds,
            "compute_s": sum(record.compute_s for record in records) / (1 if app.mode == "sync" else workers),
        },
    )
