"""Measure whether a worker answers while it works: ``python -m benchmarks.load [--seconds 5] [--json FILE]``.

The benchmark measures the round trips of ``ping`` and ``status`` to the daemon, one every 5 ms. It measures them on an
idle worker, while a method computes on every core, while arrays of 100 MB travel in both directions on the data
connection, and while an app trains on every core. The same master sends the requests, transfers the arrays and trains
the app.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import APPS, Workload
from ddlf import Cluster

EVERY_S = 0.005


def compute(seconds: float) -> None:
    """Block the event loop of the executor, like training without a thread. Runs on the worker."""
    a = np.ones((400, 400), np.float32)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        a = a @ a * 0.0 + 1.0


def echo(value: Any) -> Any:
    """Runs on the worker."""
    return value


@contextlib.asynccontextmanager
async def nothing(cluster: Cluster, seconds: float) -> AsyncIterator[None]:
    """Create no load."""
    yield


@contextlib.asynccontextmanager
async def computing(cluster: Cluster, seconds: float) -> AsyncIterator[None]:
    """Let every worker compute."""
    task = asyncio.ensure_future(cluster.run_method(compute, seconds=seconds + 1))
    await asyncio.sleep(0.3)
    yield
    await task


@contextlib.asynccontextmanager
async def streaming(cluster: Cluster, seconds: float) -> AsyncIterator[None]:
    """Send 100 MB to the first worker and back, repeatedly."""
    array = np.ones(25_000_000, np.float32)
    going = True

    async def stream() -> None:
        while going:
            await cluster.options(workers=[1]).run_method(echo, value=array)

    task = asyncio.ensure_future(stream())
    await asyncio.sleep(0.3)
    yield
    going = False
    await task


@contextlib.asynccontextmanager
async def training(cluster: Cluster, seconds: float, *, workload: Workload) -> AsyncIterator[None]:
    """Train an app of DDLF, one round after another."""

    class UntilMeasured(workload.app_class()):  # type: ignore[misc]
        def is_convergent(self, record: Any) -> bool:
            self._first_round.set()
            return self._measured

    app = UntilMeasured(cluster)
    app.verbose = False
    app.batch_size = workload.batch_size
    app._first_round, app._measured = asyncio.Event(), False  # with underscores, so that they stay here
    task = asyncio.ensure_future(app.train_sync(master_epochs=10**6))
    compiled = asyncio.ensure_future(app._first_round.wait())
    await asyncio.wait([task, compiled], return_when=asyncio.FIRST_COMPLETED)
    yield
    app._measured = True
    await task


async def measure(seconds: float, workload: Workload) -> dict[str, dict[str, float]]:
    """Return the median, the 99th percentile and the maximum in milliseconds, for each load and request."""
    results = {}
    async with Cluster.local(os.cpu_count() or 1) as cluster:
        worker = cluster.workers[0]
        loads = {"nothing": nothing, "computing": computing, "streaming": streaming}
        for kind, load in (loads | {"training": functools.partial(training, workload=workload)}).items():
            async with load(cluster, seconds):
                times: dict[str, list[float]] = {"ping": [], "status": []}
                end = time.perf_counter() + seconds
                while time.perf_counter() < end:
                    for name, ask in (("ping", worker.ping), ("status", worker.status)):
                        begin = time.perf_counter()
                        await ask()
                        times[name].append((time.perf_counter() - begin) * 1e3)
                        await asyncio.sleep(EVERY_S)
            for name, values in times.items():
                p50, p99 = np.percentile(values, [50, 99])
                results[f"{name}, {kind}"] = {
                    "p50_ms": p50,
                    "p99_ms": p99,
                    "max_ms": max(values),
                    "n": len(values),
                }
    return results


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5, help="of each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--data", choices=APPS, default="mnist", help="what is trained")
    parser.add_argument("--samples", type=int, default=6000, help="of each round, for all workers")
    options = parser.parse_args(argv)
    results = asyncio.run(measure(options.seconds, Workload(data=options.data, samples=options.samples)))
    for name, f in results.items():
        print(
            f"{name:<18} p50 {f['p50_ms']:7.2f} ms  p99 {f['p99_ms']:7.2f} ms  max {f['max_ms']:7.2f} ms  of {f['n']}"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
