"""Check that a busy worker is not declared dead.

    python -m tests.trials.false_deaths [--minutes 10] [--workers 4] [--dead-after 4 1] [--method compute|train|gil] [--json out.json]

There are more workers than cores, and all compute without a pause. From time to time the master blocks its own event
loop. The trial counts how often a worker's state was ``suspect``, and how many requests were lost. It also measures the
longest time without a message from a worker while the master listened. The exit code is 1 if a worker was declared
dead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ddlf import Cluster, DDLFError, ProxyWorker
from tests.trials.options import read_options

LOOK_EVERY_S = 0.05
HOLD_UP_EVERY_S = 10.0


def compute(seconds: float) -> int:
    """Multiply matrices. This function runs on the worker."""
    matrix = np.ones((500, 500))
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        matrix = matrix @ matrix
        matrix /= matrix.max()
        count += 1
    return count


def gil(seconds: float) -> int:
    """Hold the interpreter's lock in native code for a long time. This function runs on the worker."""
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        re.match(r"(a+)+$", "a" * 24 + "b")
        count += 1
    return count


def train(self: Any, seconds: float) -> int:
    """Fit a small Keras model again and again. This function runs on the worker."""
    import keras

    if not hasattr(self, "fitted"):
        self.fitted = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)])
        self.fitted.compile("sgd", "mse")
    x, y = np.ones((4096, 64), "f4"), np.ones((4096, 10), "f4")
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        self.fitted.fit(x, y, batch_size=64, verbose=0)
        count += 1
    return count


METHODS: dict[str, Callable[..., int]] = {"compute": compute, "train": train, "gil": gil}


class Watch:
    """Counts the changes of the states of workers."""

    def __init__(self, workers: list[ProxyWorker]) -> None:
        self._workers = workers
        self.suspects = 0
        self.deaths = 0
        self.longest_silence_s = 0.0

    async def run(self) -> None:
        """Look at the states again and again, until cancelled."""
        before = ["alive"] * len(self._workers)
        looked = time.monotonic()
        while True:
            on_time, looked = time.monotonic() - looked < 4 * LOOK_EVERY_S, time.monotonic()
            for index, worker in enumerate(self._workers):
                state = worker.state
                if state != before[index]:
                    self.suspects += state == "suspect"
                    self.deaths += state == "dead"
                before[index] = state
                if on_time and worker.silent_s is not None:
                    self.longest_silence_s = max(self.longest_silence_s, worker.silent_s)
            await asyncio.sleep(LOOK_EVERY_S)


async def load(worker: ProxyWorker, method: Callable[..., int], until: float, lost: list[str]) -> int:
    """Keep one worker busy, note the errors of lost requests, and return the number of finished rounds."""
    rounds = 0
    while time.monotonic() < until:
        try:
            rounds += await worker.run_method(method, seconds=2.0)
        except DDLFError as error:
            lost.append(str(error))
            await worker.reconnect(60)
    return rounds


async def hold_up(dead_after_s: float) -> None:
    """Block the master's event loop again and again, for longer than ``dead_after_s``."""
    while True:
        await asyncio.sleep(HOLD_UP_EVERY_S)
        time.sleep(1.5 * dead_after_s)  # noqa: ASYNC251


async def measure(options: argparse.Namespace, dead_after_s: float) -> dict[str, Any]:
    """Measure one setting, print its values, and return them by name."""
    async with Cluster.local(options.workers, threads=2, dead_after_s=dead_after_s) as cluster:
        method = METHODS[options.method]
        if options.method == "train":
            await cluster.run_method(method, seconds=0)
        watch = Watch(cluster.workers)
        tasks = [asyncio.create_task(watch.run()), asyncio.create_task(hold_up(dead_after_s))]
        lost: list[str] = []
        until = time.monotonic() + options.minutes * 60
        rounds = await asyncio.gather(*(load(worker, method, until, lost) for worker in cluster.workers))
        for task in tasks:
            task.cancel()
        epochs = [worker.epoch for worker in cluster.workers]
    values = {
        "dead_after_s": dead_after_s,
        "minutes": options.minutes,
        "workers": options.workers,
        "method": options.method,
        "deaths": watch.deaths,
        "suspects": watch.suspects,
        "lost_requests": lost,
        "longest_silence_s": watch.longest_silence_s,
        "rounds": sum(rounds),
        "leases_granted_anew": sum(epochs) - len(epochs),
    }
    print("  ".join(f"{name} {value}" for name, value in values.items()), flush=True)
    return values


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure and print all settings, and return their values."""
    options = read_options(__doc__, argv, minutes=10.0, workers=4, dead_after=[4.0], method=(*METHODS,), json=Path)
    results = [asyncio.run(measure(options, dead_after_s)) for dead_after_s in options.dead_after]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    sys.exit(any(result["deaths"] or result["lost_requests"] for result in main()))
