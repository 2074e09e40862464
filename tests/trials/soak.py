"""Check that memory, descriptors, threads and tasks of master, daemon and executor do not grow under long use.

    python -m tests.trials.soak [--calls 2000000] [--cycles 1000] [--minutes 15] [--transfers 300] [--rounds 50]

There are three parts, each with its own real ``ddlf-worker``: small calls on clusters that connect and close one after
another, arrays of 16 MB in both directions, and rounds of training (digits CNN). 0 leaves a part out. The calls are
spread over 15 minutes, in which a slope of 1 MiB an hour gives 250 KiB. Without pauses they would take a minute, in which
this slope gives only 17 KiB. The memory of an allocator changes by more than that.

Each part begins with a warm-up: 2,000 clusters with a call each, then a fifth of the part. Then the trial reads the
private memory of each process 80 times. The slope is the median of the slopes between all pairs of readings (Theil and
Sen), so a single step of an allocator does not decide. ``grown`` is the median of the last fifth of the readings minus
the median of the first fifth. The trial also counts Python's own allocations. They include leaks, but not the memory that
an allocator keeps for later.

The exit code is 1 if the memory of the calls has a slope of more than 1 MiB an hour, or if a descriptor, a thread or a
task remains after a part.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import psutil

from apps.digits_cnn import DigitsCNN
from benchmarks.measure import table
from ddlf import Cluster
from ddlf.worker.process import EXECUTOR_NAME
from tests.trials.options import read_options
from tests.trials.workers import Workers

SAMPLES = 100
WARM_UP = 0.2
CALLERS = 4
SETTLE_S = 1.0
"""Seconds until the sockets of a closed cluster and the connection of its heartbeat thread have ended. They need at most half
of this time."""
SLOPE_MIB_PER_HOUR = 1.0


def add(a: int, b: int) -> int:
    """Add two numbers. This function runs on the worker."""
    return a + b


def echo(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array. This function runs on the worker."""
    return array


def tasks() -> Counter[str]:
    """Count the running tasks of this event loop, by the names of their coroutines."""
    gc.collect()
    return Counter(f"master tasks of {task.get_coro().__qualname__}" for task in asyncio.all_tasks())  # type: ignore[union-attr]


class Watch:
    """Reads the memory of master, daemon and executor again and again.

    Args:
        daemon: The process id of the daemon. The executor is its child.
        count: Number of steps of the part.
    """

    def __init__(self, daemon: int, count: int) -> None:
        self._processes = {"master": psutil.Process(), "daemon": psutil.Process(daemon)}
        self._every = max(1, count // SAMPLES)
        self._warm_up = int(count * WARM_UP)
        self._done = 0
        self.at: list[float] = []
        self.memory: dict[str, list[int]] = {"master": [], "daemon": [], "executor": []}
        self.counts: list[dict[str, int]] = []
        self.blocks: list[int] = []

    def executor(self) -> psutil.Process | None:
        """Return the current executor."""
        below = self._processes["daemon"].children(recursive=True)
        return next((process for process in below if process.name().startswith(EXECUTOR_NAME)), None)

    def step(self) -> None:
        """Count a step. Read the memory after each hundredth of the steps."""
        self._done += 1
        if self._done > self._warm_up and self._done % self._every == 0:
            self.at.append(time.monotonic())
            executor = self.executor()
            for name, process in {**self._processes, "executor": executor}.items():
                self.memory[name].append(process.memory_full_info().uss if process else 0)

    def count(self) -> None:
        """Count descriptors, threads and tasks. Call this when no request is open, best after ``settle``."""
        counts = {}
        for name, process in {**self._processes, "executor": self.executor()}.items():
            counts[f"{name} descriptors"] = process.num_fds() if process else 0
            counts[f"{name} threads"] = process.num_threads() if process else 0
        self.counts.append({**counts, **tasks()})
        self.blocks.append(sys.getallocatedblocks())

    def results(self, name: str) -> tuple[float, float]:
        """Return the slope of a process's private memory in MiB an hour, and its growth in KiB."""
        pairs = itertools.combinations(zip(self.at, self.memory[name], strict=True), 2)
        slopes = [(after - before) / (late - early) for (early, before), (late, after) in pairs if late > early]
        fifth = max(1, len(self.at) // 5)
        grown = statistics.median(self.memory[name][-fifth:]) - statistics.median(self.memory[name][:fifth])
        return (statistics.median(slopes) if slopes else 0.0) * 3600 / 2**20, grown / 1024


async def settle() -> None:
    """Wait until sockets and threads that end by themselves have ended."""
    gc.collect()  # before the pause: in a large process it takes so long that the heartbeat thread opens a connection
    await asyncio.sleep(SETTLE_S)


Part = Callable[[Workers, int, int, argparse.Namespace], Awaitable[Watch]]


async def calls(workers: Workers, daemon: int, port: int, options: argparse.Namespace) -> Watch:
    """Let clusters connect, make a few thousand calls with some in parallel, and close."""
    for _ in range(options.warm_up):
        async with Cluster(["127.0.0.1"], port, token_file=workers.token_file) as cluster:
            assert await cluster.run_method(add, a=1, b=1) == [2]
    watch, begin = Watch(daemon, options.cycles), time.monotonic()
    for cycle in range(options.cycles):
        await asyncio.sleep(begin + cycle * options.minutes * 60 / options.cycles - time.monotonic())
        async with Cluster(["127.0.0.1"], port, token_file=workers.token_file) as cluster:
            await cluster.add_method(add)
            worker, numbers = cluster.workers[0], iter(range(options.calls // options.cycles))

            async def some(worker: Any = worker, numbers: Iterator[int] = numbers) -> None:
                for number in numbers:
                    assert await worker.run("add", a=number, b=1) == number + 1

            await asyncio.gather(*(some() for _ in range(CALLERS)))
        watch.step()
        if cycle == options.cycles // 10:
            await settle()
            watch.count()
    await settle()
    watch.count()
    return watch


async def transfers(workers: Workers, daemon: int, port: int, options: argparse.Namespace) -> Watch:
    """Send arrays of 16 MB to the worker and back."""
    watch = Watch(daemon, options.transfers)
    array = np.arange(2_000_000, dtype=np.float64)
    async with Cluster(["127.0.0.1"], port, token_file=workers.token_file) as cluster:
        for transfer in range(options.transfers):
            [back] = await cluster.run_method(echo, array=array)
            assert back[-1] == array[-1]
            del back
            watch.step()
            if transfer == options.transfers // 10:
                await settle()
                watch.count()
        await settle()
        watch.count()
    return watch


async def rounds(workers: Workers, daemon: int, port: int, options: argparse.Namespace) -> Watch:
    """Run rounds of synchronous training."""
    watch = Watch(daemon, options.rounds)

    def on_round(record: Any) -> None:
        watch.step()
        if record.round in (max(1, options.rounds // 10), options.rounds - 1):  # the last round differs
            watch.count()

    async with Cluster(["127.0.0.1"], port, token_file=workers.token_file) as cluster:
        app = DigitsCNN(cluster)
        app.verbose, app.master_epochs, app.worker_epochs = False, options.rounds, 1
        app.on_round = on_round  # type: ignore[method-assign]
        await app.train_model()
    return watch


PARTS: dict[str, Part] = {"calls": calls, "transfers": transfers, "rounds": rounds}


async def soak(options: argparse.Namespace) -> int:
    """Run all parts, each with a new worker, and print the table. Return the exit code."""
    rows = [["part", "process", "MB", "MiB an hour", "grown KiB", "minutes", "left behind"]]
    problems = []
    for name, part in PARTS.items():
        if not getattr(options, name):
            continue
        with Workers() as workers:
            process, port = workers.start()
            watch = await part(workers, process.pid, port, options)
        before, after = watch.counts
        leaks = {counter: after.get(counter, 0) - before.get(counter, 0) for counter in before | after}
        for role in watch.memory:
            slope, grown = watch.results(role)
            growth = {
                counter.partition(" ")[2]: more for counter, more in leaks.items() if more and counter.startswith(role)
            }
            summary = ", ".join(f"{more:+} {counter}" for counter, more in growth.items())
            minutes = (watch.at[-1] - watch.at[0]) / 60
            rows.append(
                [
                    name,
                    role,
                    f"{watch.memory[role][-1] / 1e6:.1f}",
                    f"{slope:+.2f}",
                    f"{grown:+.0f}",
                    f"{minutes:.1f}",
                    summary or "-",
                ]
            )
            if name == "calls" and slope > SLOPE_MIB_PER_HOUR:
                problems.append(f"{name}: the memory of the {role} grows by {slope:.2f} MiB an hour")
        print(
            f"{name}: {watch.blocks[-1] - watch.blocks[0]:+,} of {watch.blocks[0]:,} blocks of Python's memory on the master"
        )
        problems += [f"{name}: {more} {counter} more" for counter, more in leaks.items() if more > 0]
    print(table(rows))
    print(*problems, sep="\n")
    return 1 if problems else 0


def main(argv: list[str] | None = None) -> int:
    """Read the command line and run the trial. Return the exit code."""
    default = dict(calls=2_000_000, cycles=1_000, minutes=15.0, warm_up=2000, transfers=300, rounds=50)
    return asyncio.run(soak(read_options(__doc__, argv, **default)))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.exit(main())
