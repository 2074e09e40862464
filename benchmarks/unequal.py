"""Compare ways to train on machines of different speed, with one of two workers slowed down.

    python -m benchmarks.unequal [--slowdown 3] [--rounds 6] [--samples 12000] [--repeats 3] [--mode sync|async]

The ways are equal parts, parts by speed, and asynchronous training. Signals stop and continue the second worker, so
that it runs for 1/slowdown of the time. In an ideal round both workers compute all the time: undisturbed round x 2 / (1
+ 1 / slowdown).
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
    """The published CNN on a number of samples."""

    verbose = False
    samples = 60_000
    learning_rate = 0.05

    async def load_dataset(self) -> None:
        """Load MNIST and keep the first samples."""
        await super().load_dataset()
        self.x_train, self.y_train = self.x_train[: self.samples], self.y_train[: self.samples]


async def train(cluster: Cluster, options: argparse.Namespace, **attributes: Any) -> tuple[list[Any], float]:
    """Train once, and return the records and the test accuracy."""
    app = App(cluster)
    app.samples = options.samples
    for name, value in attributes.items():
        setattr(app, name, value)
    records = await app.train_model()
    return records, (await app.evaluate_model())["accuracy"]


async def main(options: argparse.Namespace) -> None:
    """Measure in turns and print medians over the repeats."""
    variants = {
        "sync": (False, {}),
        "equal parts": (True, {}),
        "parts by speed": (True, {"balance": "speed"}),
        "async": (False, {"mode": "async"}),
        "async beside": (True, {"mode": "async"}),
    }
    if options.mode:
        variants = {
            name: how for name, how in variants.items() if (options.mode == "async") == name.startswith("async")
        }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    accuracies: dict[str, list[float]] = {name: [] for name in variants}
    overheads: dict[str, list[float]] = {name: [] for name in variants}
    async with Cluster.local(2) as cluster:
        pid = (await cluster.status())[1].executor_pid
        await train(cluster, options, master_epochs=1)  # warm
        for repeat in range(options.repeats):
            for name, (slow, attributes) in variants.items():
                async with slowed(pid, options.slowdown) if slow else contextlib.nullcontext():
                    records, accuracy = await train(
                        cluster, options, master_epochs=options.rounds, seed=repeat, **attributes
                    )
                # In asynchronous runs, only the fast worker counts. With parts by speed, the first rounds measure the speeds.
                settled = [record for record in records if record.slot in (None, 1)][2:]
                seconds[name].append(statistics.median(record.seconds for record in settled))
                overheads[name].append(statistics.median(record.seconds - record.compute_s for record in settled))
                accuracies[name].append(accuracy)
    if options.mode != "async":
        show_sync(seconds, accuracies, options.slowdown)
    if options.mode != "sync":
        show_async(seconds, overheads, accuracies)


def show_sync(seconds: dict[str, list[float]], accuracies: dict[str, list[float]], slowdown: float) -> None:
    """Print what equal parts and parts by speed give."""
    ideal = [second * 2 / (1 + 1 / slowdown) for second in seconds["sync"]]
    print(
        f"sync, both at full speed: {show(seconds['sync'], ' s')} a round, accuracy {show(accuracies['sync'], '', 4)}"
    )
    for name in ("equal parts", "parts by speed"):
        ratios = [second / best for second, best in zip(seconds[name], ideal, strict=True)]
        print(
            f"  {name:<15} {show(seconds[name], ' s')}, {show(ratios, ' x ideal')}, accuracy {show(accuracies[name], '', 4)}"
        )


def show_async(
    seconds: dict[str, list[float]], overheads: dict[str, list[float]], accuracies: dict[str, list[float]]
) -> None:
    """Print what the worker that is not slowed loses."""
    losses = [100 * (b / a - 1) for a, b in zip(seconds["async"], seconds["async beside"], strict=True)]
    print(f"async, the other worker: {show(seconds['async'], ' s')} a round undisturbed")
    print(f"  beside the slowed one it loses {show(losses, ' %', 1)}: {' '.join(f'{loss:.1f}' for loss in losses)}")
    for name in ("async", "async beside"):
        print(f"  {name}: {show([1e3 * overhead for overhead in overheads[name]], ' ms', 1)} of a round not computing")
    points = [100 * (b - a) for a, b in zip(accuracies["async"], accuracies["async beside"], strict=True)]
    print(f"  accuracy {show(accuracies['async'], '', 4)} undisturbed, {show(points, ' points')} with one slowed")


def show(values: list[float], unit: str, digits: int = 2) -> str:
    """Return median and range as text."""
    return f"{statistics.median(values):.{digits}f}{unit} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slowdown", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--samples", type=int, default=12_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mode", choices=["sync", "async"], help="only what belongs to it")
    asyncio.run(main(parser.parse_args()))
