"""Measure the time and the bytes of a step: plain training, merged local training, and gradient exchange in each step.

    python -m benchmarks.step [--data mnist] [--samples 6000] [--batch-size 64] [--workers 2] [--epochs 2] [--repeats 2]

All ways use the same number of samples in a step. So a batch of plain ``fit`` in one process is as large as the batches
of all workers together. The result of a run is the median over its steps, or over its rounds divided by their steps. So
the first ones, which compile, do not count. The ways run in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from typing import Any

from benchmarks.learning import DATA
from benchmarks.measure import Spread, table, turns
from ddlf import Cluster

PLAIN = "plain fit"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "updates each epoch": {},
    "updates each 10 steps": {"worker_steps": 10},
    "gradients": {"exchange": "gradient"},
    "gradients int8": {"exchange": "gradient", "codec": "int8"},
}
"""Each way by its name: settings of a run."""


async def step(cluster: Cluster, way: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return the milliseconds and bytes of a step."""
    base, rate = DATA[options.data]

    class App(base):  # type: ignore[misc]
        verbose, learning_rate, worker_epochs = False, rate, 1
        batch_size, master_epochs = options.batch_size, options.epochs

        async def load_dataset(self) -> None:
            await super().load_dataset()
            self.x_train, self.y_train = self.x_train[: options.samples], self.y_train[: options.samples]

        def on_round(self, record: Any) -> None:
            ends.append(time.perf_counter())

    app = App(cluster)
    for name, value in WAYS[way].items():
        setattr(app, name, value)
    ends: list[float] = []
    if way == PLAIN:
        await app.prepare()
        await asyncio.to_thread(fit, app, options, ends)
        moved, steps = 0, 1
    else:
        records = await app.train_model()
        moved = statistics.median(record.bytes_out + record.bytes_back for record in records)
        steps = -(-max(record.samples for record in records) // (options.batch_size * options.workers))
    between = [after - before for before, after in itertools.pairwise(ends)]
    return 1000 * statistics.median(between) / steps, moved / steps


def fit(app: Any, options: argparse.Namespace, ends: list[float]) -> None:
    """Train in this process, and note when each step has ended."""
    import keras

    batch = options.batch_size * options.workers
    timer = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    app.model.fit(app.x_train, app.y_train, batch, options.epochs, verbose=0, callbacks=[timer])


async def main(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Measure in turns, print the table, and return milliseconds and bytes by way."""
    times_of: dict[str, list[tuple[float, float]]] = {way: [] for way in options.ways}
    async with Cluster.local(options.workers) as cluster:
        for _, way in turns(options.ways, options.repeats):
            times_of[way].append(await step(cluster, way, options))
            print(way, *times_of[way][-1], flush=True)
    lines = [["way", "ms a step", f"of {options.ways[0]}", "bytes a step"]]
    for way, steps in times_of.items():
        times = [ms for ms, _ in steps]
        ratios = [ms / first for ms, (first, _) in zip(times, times_of[options.ways[0]], strict=True)]
        moved = f"{statistics.median(moved for _, moved in steps):,.0f}"
        lines.append([way, Spread.of(times).text(".1f"), Spread.of(ratios).text(), moved])
    print(table(lines))
    return times_of


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA, default="mnist")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--samples", type=int, default=6000, help="of training")
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3, help="of each run; two or more")
    parser.add_argument("--repeats", type=int, default=2)
    return parser


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))
