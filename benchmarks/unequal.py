"""Machines of different speed: equal parts, parts that follow the speed, and asynchronous training, with one of two workers slowed.

    python -m benchmarks.unequal [--slowdown 3] [--rounds 8] [--samples 60000]

The second worker is stopped and continued by signals, so that it runs 1/slowdown of the time. The ideal round is the one in which both workers
compute all the time: undisturbed round x 2 / (1 + 1 / slowdown).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
from collections.abc import AsyncIterator
from typing import Any

from apps.mnist_cnn import MNISTCNN
from ddlf import Cluster

PERIOD_S = 0.06


@contextlib.asynccontextmanager
async def slowed(pid: int, slowdown: float) -> AsyncIterator[None]:
    """Let a process run only part of the time."""

    async def duty_cycle() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(PERIOD_S * (1 - 1 / slowdown))
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(PERIOD_S / slowdown)

    task = asyncio.ensure_future(duty_cycle())
    try:
        yield
    finally:
        task.cancel()
        os.kill(pid, signal.SIGCONT)


class App(MNISTCNN):
    """The published CNN on as many samples as wanted."""

    verbose = False
    samples = 60_000
    learning_rate = 0.05

    async def load_dataset(self) -> None:
        """Load MNIST and keep the first samples."""
        await super().load_dataset()
        self.x_train, self.y_train = self.x_train[: self.samples], self.y_train[: self.samples]


async def train(cluster: Cluster, options: argparse.Namespace, **attributes: Any) -> tuple[list[Any], float]:
    """One run; returns its records and the test accuracy."""
    app = App(cluster)
    app.samples = options.samples
    for name, value in attributes.items():
        setattr(app, name, value)
    records = await app.train_model()
    return records, (await app.evaluate_model())["accuracy"]


async def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    async with Cluster.local(2) as cluster:
        pid = (await cluster.status())[1]["executor_pid"]
        rounds = options.rounds
        await train(cluster, options, master_epochs=1)  # warm
        plain, plain_accuracy = await train(cluster, options, master_epochs=rounds)
        free, free_accuracy = await train(cluster, options, master_epochs=rounds, mode="async")
        async with slowed(pid, options.slowdown):
            equal, _ = await train(cluster, options, master_epochs=rounds)
            speed, speed_accuracy = await train(cluster, options, master_epochs=rounds, balance="speed")
            loose, loose_accuracy = await train(cluster, options, master_epochs=rounds, mode="async")
    settled = slice(2, None)  # the first rounds measure
    undisturbed = statistics.median(record.seconds for record in plain)
    ideal = undisturbed * 2 / (1 + 1 / options.slowdown)
    print(f"sync, both at full speed: {undisturbed:.2f} s a round, accuracy {plain_accuracy:.4f}")
    print(f"ideal with one slowed {options.slowdown:g}x: {ideal:.2f} s a round")
    for name, records in (("equal parts", equal), ("parts by speed", speed)):
        seconds = [record.seconds for record in records[settled]]
        print(
            f"  {name:<15} {statistics.median(seconds):6.2f} s ({min(seconds):.2f}-{max(seconds):.2f}),"
            f" {statistics.median(seconds) / ideal:.2f} x ideal"
        )
    print(
        f"  accuracy by speed {speed_accuracy:.4f}, {100 * (speed_accuracy - plain_accuracy):+.2f} points of undisturbed"
    )
    fast = [statistics.median(r.seconds for r in records if r.slot == 1) for records in (free, loose)]
    print(
        f"async, the other worker: {fast[0]:.2f} s a round undisturbed, {fast[1]:.2f} s beside the slowed one", end=""
    )
    print(f" ({100 * (fast[1] / fast[0] - 1):+.1f} %)")
    print(
        f"  accuracy {free_accuracy:.4f} undisturbed, {loose_accuracy:.4f} with one slowed"
        f" ({100 * (loose_accuracy - free_accuracy):+.2f} points)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slowdown", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--samples", type=int, default=60_000)
    asyncio.run(main(parser.parse_args()))
