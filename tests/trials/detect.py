"""Measure how soon the loss of a worker, and of a master, is detected.

    python -m tests.trials.detect [--kills 50] [--stops 20] [--partitions 10] [--json out.json] [--only kill stop partition]

The trial kills executors and daemons: idle ones, in the middle of a computation, and in the middle of a frame with a
200 MB array. It also uses SIGSTOP and silent partitions, with the default times and with ``dead_after_s=1``. For these
faults it measures both sides: when the master's request ends, and when the worker accepts another master. Partitions need
root and network namespaces. Times are seconds after the fault.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ddlf import Cluster, ExecutorCrashed, LeaseError, ProxyWorker, WorkerLost
from tests.patience import PATIENCE_S
from tests.trials.machines import Link, inside
from tests.trials.options import read_options
from tests.trials.workers import Workers, resume, stop

ARRAY_BYTES = 200_000_000
KILL_BAR_S = 0.3
BARS_S = {4.0: 4.5, 1.0: 1.5}
"""The longest allowed time in seconds after a silence, for each ``dead_after_s``."""


def spin() -> None:
    """Compute indefinitely. This function runs on the worker."""
    while True:
        pass


def give() -> Any:
    """Return a large array. This function runs on the worker."""
    return np.ones(ARRAY_BYTES, np.uint8)


def row(label: str, seconds: list[float], bar_s: float, **facts: Any) -> dict[str, Any]:
    """Print one line of the result, and return its values by name."""
    values = sorted(seconds)
    result = {
        "what": label,
        "n": len(values),
        "p50_s": values[len(values) // 2],
        "p99_s": values[min(len(values) - 1, math.ceil(0.99 * len(values)) - 1)],
        "max_s": values[-1],
        "bar_s": bar_s,
        **facts,
    }
    print(
        f"{label:<58} n {result['n']:>3}  p50 {result['p50_s']:6.3f}  p99 {result['p99_s']:6.3f}  max {result['max_s']:6.3f}  bar {bar_s:g}"
        + "".join(f"  {name} {value}" for name, value in facts.items()),
        flush=True,
    )
    return result


async def until(condition: Callable[[], Any], limit_s: float = PATIENCE_S) -> None:
    """Wait until a condition is true that no event announces."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def busy(worker: ProxyWorker) -> None:
    """Wait until the worker runs a method."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await worker.status()).busy:
            pass


async def one_kill(worker: ProxyWorker, pid: int, situation: str) -> tuple[float, str | None] | None:
    """Kill a process of the worker. Return the seconds until the master noticed, and the signal that it received. Return
    None if the answer arrived before the kill.
    """
    if situation == "idle":
        standing = worker._link.link_state
        standing.changed.clear()
        begin = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(standing.changed.wait(), PATIENCE_S)
        return time.perf_counter() - begin, standing.crash.signal if standing.crash else None
    if situation == "busy":
        call = asyncio.ensure_future(worker.run_method(spin))
        await busy(worker)
    else:
        at = random.uniform(0.05, 0.8) * ARRAY_BYTES + worker.bytes_received
        call = asyncio.ensure_future(worker.run_method(give))
        await until(lambda: worker.bytes_received >= at or call.done())
    begin = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    try:
        await asyncio.wait_for(call, PATIENCE_S)
    except (ExecutorCrashed, WorkerLost) as error:
        return time.perf_counter() - begin, getattr(error, "signal", None)
    return None


async def wait_for_executor(worker: ProxyWorker) -> None:
    """Wait until an executor answers. The next request may still report the killed executor."""
    while True:
        try:
            await worker.run_method(os.getpid)
        except ExecutorCrashed:
            continue
        return


async def kills(count: int) -> list[dict[str, Any]]:
    """Kill executors and daemons, and return a row for each situation."""
    rows = []
    with Workers() as workers:
        for target in ("executor", "daemon"):
            for situation in ("idle", "busy", "in mid-frame"):
                seconds, signals = [], set()
                process, port = workers.start()
                async with Cluster(["127.0.0.1"], port, token_file=workers.token_file) as cluster:
                    worker = cluster.workers[0]
                    for _ in range(count):
                        noticed = None
                        while noticed is None:
                            await wait_for_executor(worker)
                            status = await worker.status()
                            pid = status.executor_pid if target == "executor" else status.pid
                            noticed = await one_kill(worker, pid, situation)
                            if target == "daemon":
                                process.wait()
                                process, port = await asyncio.to_thread(workers.start, port=port)
                                await worker.reconnect(PATIENCE_S)
                        seconds.append(noticed[0])
                        signals.add(noticed[1])
                    facts = {"signal": signals.pop() if len(signals) == 1 else signals} if target == "executor" else {}
                    rows.append(row(f"kill -9 of the {target}, {situation}", seconds, KILL_BAR_S, **facts))
                process.kill()
    return rows


async def lost(worker: ProxyWorker, call: asyncio.Future[Any], begin: float) -> float:
    """Wait for the end of a request to a lost worker, and return the seconds since ``begin``."""
    try:
        await asyncio.wait_for(call, PATIENCE_S)
    except (
        WorkerLost,
        LeaseError,
    ):  # with only its sending direction cut, the master hears that another one has the lease
        return time.perf_counter() - begin
    raise AssertionError("the request has a result")


def released(host: str, port: int, token: bytes, namespace: str, begin: float) -> float:
    """Ask for the worker as another master until it accepts, and return the seconds since ``begin``."""

    async def ask() -> float:
        while True:
            other = ProxyWorker(host, port, token)
            try:
                await other.connect_control()
                return time.perf_counter() - begin
            except LeaseError:
                await asyncio.sleep(0.02)
            finally:
                await other.close()

    with inside(namespace) if namespace else contextlib.nullcontext():
        return asyncio.run(ask())


MASTER = """
import asyncio, sys
from ddlf import Cluster
async def main():
    cluster = Cluster(["127.0.0.1"], int(sys.argv[1]), token_file=sys.argv[2], dead_after_s=float(sys.argv[3]))
    await cluster.connect()
    print("connected", flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


async def stops(count: int, dead_after_s: float) -> list[dict[str, Any]]:
    """Freeze workers, then masters, and return a row for each."""
    bar = BARS_S[dead_after_s]
    noticed_s, freed_s = [], []
    with Workers() as workers:
        process, port = workers.start()
        async with Cluster(["127.0.0.1"], port, token_file=workers.token_file, dead_after_s=dead_after_s) as cluster:
            worker = cluster.workers[0]
            for _ in range(count):
                call = asyncio.ensure_future(worker.run_method(spin))
                await busy(worker)
                await asyncio.sleep(random.uniform(0, worker.timing.heartbeat_s))
                begin = time.perf_counter()
                stop(process.pid)
                noticed_s.append(await lost(worker, call, begin))
                resume(process.pid)
                await worker.reconnect(60)
        for _ in range(count):
            master = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", MASTER, str(port), str(workers.token_file), str(dead_after_s)),
                stdout=asyncio.subprocess.PIPE,
            )
            assert master.stdout is not None
            await master.stdout.readline()
            await asyncio.sleep(random.uniform(0.5, 1))
            begin = time.perf_counter()
            stop(master.pid)
            freed_s.append(await asyncio.to_thread(released, "127.0.0.1", port, workers.token, "", begin))
            master.kill()
            await master.wait()
    label = f"dead_after_s={dead_after_s:g}"
    return [
        row(f"SIGSTOP of the worker, noticed by the master, {label}", noticed_s, bar),
        row(f"SIGSTOP of the master, worker free for another, {label}", freed_s, bar),
    ]


async def partitions(count: int, dead_after_s: float) -> list[dict[str, Any]]:
    """Cut the cable silently, in both directions or in one, and return a row for each side."""
    bar = BARS_S[dead_after_s]
    noticed_s, freed_s = [], []
    with Link() as link, Workers() as workers, inside(link.a):
        _, port = workers.start(host=link.address_b, namespace=link.b)
        async with Cluster([link.address_b], port, token_file=workers.token_file, dead_after_s=dead_after_s) as cluster:
            worker = cluster.workers[0]
            for number in range(count):
                call = asyncio.ensure_future(worker.run_method(spin))
                await busy(worker)
                await asyncio.sleep(random.uniform(0, worker.timing.heartbeat_s))
                begin = time.perf_counter()
                link.cut(*((), (link.a,), (link.b,))[number % 3])
                noticed, free = await asyncio.gather(
                    lost(worker, call, begin),
                    asyncio.to_thread(released, link.address_b, port, workers.token, link.b, begin),
                )
                noticed_s.append(noticed)
                freed_s.append(free)
                link.mend()
                # Another master had the worker meanwhile, so this one needs a new lease.
                await worker.close()
                await worker.reconnect(60)
    label = f"dead_after_s={dead_after_s:g}"
    return [
        row(f"silent partition, noticed by the master, {label}", noticed_s, bar),
        row(f"silent partition, worker free for another, {label}", freed_s, bar),
    ]


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the chosen kinds of faults, and return all rows."""
    rows: list[dict[str, Any]] = []
    if "kill" in options.only:
        rows += await kills(options.kills)
    for dead_after_s in options.dead_after:
        if "stop" in options.only:
            rows += await stops(options.stops, dead_after_s)
        if "partition" in options.only:
            rows += await partitions(options.partitions, dead_after_s)
    return rows


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print the rows, and return them."""
    options = read_options(
        __doc__,
        argv,
        kills=50,
        stops=20,
        partitions=10,
        dead_after=[*BARS_S],
        only=["kill", "stop", "partition"],
        json=Path,
    )
    rows = asyncio.run(measure(options))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    sys.exit(any(result["p99_s"] > result["bar_s"] for result in main()))
