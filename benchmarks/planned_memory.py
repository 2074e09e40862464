"""Compare the memory that ``ddlf plan`` predicts with the memory of real workers. Linux.

    python -m benchmarks.planned_memory [--settings 12] [--limits 20] [--models mlp,lstm,cnn,wide] [--seed 1]

Models and batch sizes are drawn by a seed, and all are printed. The memory of each model is measured once, as a plan does.
Then a fresh worker trains three rounds of each setting; the truth is the most memory of its process. Then workers train
under limits that are drawn at least 20 % above or below the prediction; the truth is whether three rounds end. The
largest batch that fits into 1.5 times the memory of the smallest batch trains three rounds, too. Bars: each prediction
within 20 %, all limits right, each largest batch trains.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from typing import Any

from apps.lstm import LSTM
from apps.mlp import MLP
from apps.mnist_cnn import MNISTCNN
from benchmarks.footprint import Wide
from benchmarks.measure import some_of, table
from ddlf import Cluster
from ddlf.errors import DDLFError
from ddlf.events import WorkerLost
from ddlf.extras.planner.memory import MemoryModel
from ddlf.extras.planner.memory_probe import Memory, memory_of
from ddlf.extras.planner.planning import copy_of_app
from ddlf.extras.planner.trial import limit_memory, memory_peak

ROUNDS, STEPS, SAMPLES, WIDTH = 3, 8, 24_000, 3000
SECONDS = 120.0
"""Longest time to measure the memory of a model. Peaks do not depend on time, so other programs may run."""
BATCHES = (32, 64, 100, 200, 500, 1000, 2000)
FACTORS = (0.5, 0.6, 0.7, 0.79, 1.21, 1.3, 1.5, 2.0)


def limited(base: type) -> type:
    """Return the app with a part of its samples, and a limit of its worker's memory."""

    class Limited(base):  # type: ignore[misc]
        verbose, limit = False, None

        async def load_dataset(self) -> None:
            await super().load_dataset()
            self.x_train, self.y_train = self.x_train[:SAMPLES], self.y_train[:SAMPLES]

        async def create_model(self) -> None:
            await super().create_model()
            if self.limit is not None and hasattr(self, "worker"):
                limit_memory(self.limit)

    return Limited


class Large(Wide):
    """A dense network of 9 million weights, with enough samples."""

    def __init__(self, cluster: Any) -> None:
        super().__init__(cluster, WIDTH)

    async def load_dataset(self) -> None:
        """Make random samples."""
        import numpy as np

        chance = np.random.default_rng(1)
        self.x_train = chance.normal(size=(4000, self.width)).astype("float32")
        self.y_train = chance.integers(0, 10, 4000)

    async def create_model(self) -> None:
        """Make the network."""
        super().create_model()


MODELS = {"mlp": limited(MLP), "lstm": limited(LSTM), "cnn": limited(MNISTCNN), "wide": limited(Large)}


async def trained(name: str, batch: int, limit: int | None = None) -> int:
    """Return the most memory of a fresh worker that trains three rounds; 0 if it could not."""
    lost = list[Any]()
    async with Cluster.local(1) as cluster:
        app = MODELS[name](cluster)
        app.batch_size, app.worker_steps, app.limit, app.master_epochs = batch, STEPS, limit, 1000
        app.subscribe(lambda event: lost.append(event) if isinstance(event, WorkerLost) else None)
        records = 0

        def enough(record: Any) -> None:
            nonlocal records
            records += 1
            if records >= ROUNDS:
                app.stop_training()

        app.on_round = enough
        try:
            await app.train_model()
            pid = (await cluster.workers[0].status()).executor_pid
            most = memory_peak(pid)
        except DDLFError as error:
            print(f"{name}, batch {batch}, limit {limit}: {str(error)[:120]}", file=sys.stderr, flush=True)
            return 0
    return most if records >= ROUNDS and not lost else 0


async def measured(name: str, batch: int, limit: int | None = None) -> Memory:
    """Measure the memory of a model as a plan does."""
    async with Cluster.local(1) as cluster:
        app = MODELS[name](cluster)
        app.batch_size = batch
        await app.connect()
        result = await memory_of(copy_of_app(app), [batch], "star", SECONDS, limit=limit)
    assert result.peaks is not None, result.why
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=12)
    parser.add_argument("--limits", type=int, default=20)
    parser.add_argument("--models", type=some_of(MODELS), default=list(MODELS))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    chance, settings = random.Random(options.seed), list[tuple[str, int]]()
    while len(settings) < options.settings:
        candidate = options.models[len(settings) % len(options.models)], chance.choice(BATCHES)
        if candidate not in settings:
            settings.append(candidate)
    limits = [(*chance.choice(settings), chance.choice(FACTORS)) for _ in range(options.limits)]
    print("settings", settings, "limits", limits, file=sys.stderr, flush=True)
    models = {name: MemoryModel(result.peaks) for name in options.models if (result := _run(measured(name, 64))).peaks}
    rows, errors = [["model", "batch", "predicted (MB)", "80 %", "measured", "error"]], list[float]()
    for name, batch in settings:
        predicted, truth = models[name].predict(batch), _run(trained(name, batch))
        errors.append(predicted.count / truth - 1.0)
        interval = f"{predicted.low / 1e6:.0f}-{predicted.high / 1e6:.0f}"
        rows.append(
            [name, f"{batch}", f"{predicted.count / 1e6:.0f}", interval, f"{truth / 1e6:.0f}", f"{errors[-1]:+.0%}"]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows), flush=True)
    rows, right = [["model", "batch", "limit (MB)", "of predicted", "fits", "trained"]], 0
    for name, batch, factor in limits:
        predicted = models[name].predict(batch)
        limit = int(factor * predicted.count)
        fits, trains = predicted.count <= limit, _run(trained(name, batch, limit)) > 0
        right += fits == trains
        rows.append([name, f"{batch}", f"{limit / 1e6:.0f}", f"{factor:g}", str(fits), str(trains)])
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows), flush=True)
    rows, good = [["model", "limit (MB)", "largest", "confirmed", "failed", "trained"]], 0
    for name in options.models:
        limit = int(1.5 * models[name].predict(min(BATCHES)).count)
        result = _run(measured(name, 64, limit)).largest
        assert result is not None
        trains = result.batch > 0 and _run(trained(name, result.batch, limit)) > 0
        good += trains
        rows.append(
            [name, f"{limit / 1e6:.0f}", f"{result.batch}", f"{result.confirmed}", f"{result.failed}", f"{trains}"]
        )
    print(table(rows))
    inside = sum(abs(error) <= 0.2 for error in errors)
    print(
        f"\n{inside} of {len(errors)} within 20 %; {right} of {len(limits)} limits right; {good} of {len(options.models)} largest batches train"
    )


def _run(work: Any) -> Any:
    return asyncio.run(work)


if __name__ == "__main__":
    main()
