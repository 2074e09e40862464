"""A worker that prints a million lines while it trains: what the master needs for them, whether none is missing uncounted, and what training pays.

    python -m tests.trials.printing [--lines 1000000] [--rounds 20] [--samples 400000]

Each second round writes the same lines into a stream of its own, which nobody follows, to the same file: the rounds in between are compared with
those. Bars: lines and those that were counted as dropped are all lines; the master grows by less than 16 MiB; training is at most 2% slower.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import sys
from typing import Any

import numpy as np
import psutil

import ddlf
from ddlf.events import WorkerWrote

BATCH = 64


class Printing(ddlf.IApp):
    """Softmax regression on made-up data, which prints lines after each batch."""

    verbose, echo = False, False
    batch_size = BATCH

    def __init__(self, cluster: ddlf.Cluster, samples: int, lines: int) -> None:
        super().__init__(cluster)
        self.samples, self.lines = samples, lines

    async def load_dataset(self) -> None:
        random = np.random.default_rng(0)
        self.x_train = random.normal(size=(self.samples, 50)).astype("float32")
        self.y_train = (self.x_train.sum(axis=1) > 0).astype("float32")

    async def create_model(self) -> None:
        import keras

        class Lines(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                for number in range(app.lines * batch // batches, app.lines * (batch + 1) // batches):
                    print("batch", batch, "line", number, file=app.stream)

        app, batches = self, -(-self.samples // BATCH)
        self.model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(1, activation="sigmoid")])
        self.model.compile("sgd", "binary_crossentropy")
        self.worker_callbacks = [Lines()]
        self.own = io.TextIOWrapper(io.BufferedWriter(io.FileIO(2, "w", closefd=False)), line_buffering=True)

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        self.stream = sys.stdout if self.replica.round % 2 else self.own
        return super().train(weights, worker_epochs, batch_size)


async def trial(lines: int, rounds: int, samples: int) -> dict[str, float]:
    """Train, and count.

    Args:
        lines: Of all rounds that are followed.
        rounds: Rounds, half of which are followed.
        samples: Samples of each round.

    Returns:
        Lines that were printed, came and were dropped; MiB by which the master has grown since the second round;
        seconds of a round of each kind (median).
    """
    came, dropped = 0, 0
    grown: list[float] = []

    def count(event: Any) -> None:
        nonlocal came, dropped
        if isinstance(event, WorkerWrote):
            came += len(event.lines)
            dropped += event.dropped

    each = lines // ((rounds + 1) // 2)
    cluster = ddlf.Cluster.local(1)
    cluster.subscribe(count)
    async with cluster:
        app = Printing(cluster, samples, each)
        app.on_round = lambda record: grown.append(psutil.Process().memory_info().rss / 2**20)  # type: ignore[method-assign]
        records = await app.train_sync(rounds)
    seconds = [record.compute_s for record in records]
    return {
        "printed": each * ((rounds + 1) // 2),
        "came": came,
        "dropped": dropped,
        "grown_mib": max(grown) - grown[1],
        "followed_s": statistics.median(seconds[2::2]),
        "alone_s": statistics.median(seconds[1::2]),
    }


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=400_000)
    options = parser.parse_args(argv)
    row = asyncio.run(trial(options.lines, options.rounds, options.samples))
    slower = row["followed_s"] / row["alone_s"] - 1
    print(
        f"{row['printed']:,.0f} lines printed: {row['came']:,.0f} came, {row['dropped']:,.0f} were counted; the master grew by "
        f"{row['grown_mib']:.1f} MiB; a round took {row['followed_s']:.2f} s, {row['alone_s']:.2f} s with nobody following: {slower:+.1%}"
    )
    return row


if __name__ == "__main__":
    found = main()
    is_well = found["came"] + found["dropped"] == found["printed"] and found["grown_mib"] < 16
    sys.exit(0 if is_well and found["followed_s"] <= 1.02 * found["alone_s"] else 1)
