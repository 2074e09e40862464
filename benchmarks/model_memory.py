"""Measure whether workers and master free the models that they have trained before. Linux.

    python -m benchmarks.model_memory [--width 10000] [--trainings 12]

One local worker trains a new model in each training: a dense one with ``silu`` and momentum, which needs four bytes for each
weight, and as much for its optimizer. The output is the anonymous memory of the worker and of the master after the first
training, the most of it after any later one, and after the last one.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.measure import table
from ddlf import Cluster, IApp
from ddlf.extras.planner.trial import memory_now

INPUTS, OUTPUTS, SAMPLES = 1_000, 10, 128


class Wide(IApp):
    """A network with one large layer.

    Args:
        cluster: The worker.
        width: Outputs of the large layer.
    """

    verbose, seed, master_epochs, batch_size = False, 1, 2, 32

    def __init__(self, cluster: Any, width: int) -> None:
        super().__init__(cluster)
        self.width = width

    def load_dataset(self) -> None:
        """Make random samples."""
        chance = np.random.default_rng(0)
        self.x_train = chance.random((SAMPLES, INPUTS), np.float32)
        self.y_train = chance.random((SAMPLES, OUTPUTS), np.float32)

    def create_model(self) -> None:
        """Make the network."""
        import keras
        from keras import layers

        self.model = keras.Sequential(
            [keras.Input((INPUTS,)), layers.Dense(self.width, activation="silu"), layers.Dense(OUTPUTS)]
        )
        self.model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")


async def measured(width: int, trainings: int) -> list[tuple[int, int]]:
    """Train so many models. Return the bytes of the worker and of the master after each."""
    async with Cluster.local(1) as cluster:
        memory = []
        for _ in range(trainings):
            await Wide(cluster, width).train_model()
            pid = (await cluster.workers[0].status()).executor_pid
            memory.append((memory_now(pid), memory_now()))
        return memory


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=10_000)
    parser.add_argument("--trainings", type=int, default=12)
    options = parser.parse_args(argv)
    memory = asyncio.run(measured(options.width, options.trainings))
    rows = [["process", "after the first (MB)", "most (MB)", "after the last (MB)"]]
    for process, values in zip(("worker", "master"), zip(*memory, strict=True), strict=True):
        rows.append([process, *(f"{value / 2**20:,.0f}" for value in (values[0], max(values), values[-1]))])
    print(table(rows))


if __name__ == "__main__":
    main()
