"""Measure how well many replicas of Downpour SGD learn on real workers, for each push rule and each order of replicas.

    python -m benchmarks.replicas [--seeds 3] [--replicas 16] [--workers 2] [--samples 60000] [--ways downpour,default] [--orders random,turns]
    python -m benchmarks.replicas --seeds 1 --samples 3000 --replicas 4      # the short form

The network is that of ``apps/mnist_distbelief.py``, with 784-100-10 units, and trains for one pass over the samples.
The rates are the best rates of one replica. ``benchmarks/downpour.py`` tests the same rules without Keras and workers,
in a simulated order. With ``turns``, the replicas of a worker step one after another. With ``random``, they are drawn.
The order between workers is not controlled.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

from apps.mnist_distbelief import WAYS, Mnist
from benchmarks.measure import some_of, table
from ddlf import Cluster

ORDERS = ("random", "turns")
DOWNPOUR = [way for way, settings in WAYS.items() if settings["mode"] == "downpour"]


def one_after_the_other(steps: Sequence[int], length: int, chance: Any, *, alone: int = 0) -> list[int]:
    """Like ``ddlf.algorithms.push_rules.turns``, but in a fixed order."""
    left, drawn = list(steps), [0] * min(alone, steps[0])
    left[0] -= len(drawn)
    while any(left):
        for replica, count in enumerate(left):
            drawn += [replica] * min(length, count)
            left[replica] -= min(length, count)
    last = len(steps) - 1
    drawn.append(drawn.pop(len(drawn) - drawn[::-1].index(last) - 1))  # whose last batch may be smaller
    return drawn


class Replicas(Mnist):
    """The demo's network for one pass, without early stopping."""

    verbose = False
    master_epochs = 1
    evaluate_every = 0
    order = "random"

    def create_model(self) -> None:
        """Build the model. On a worker, also set the order of replicas for all runs there, so each run sets it again."""
        from ddlf.algorithms import push_rules
        from ddlf.training.strategies.downpour import replica

        super().create_model()
        self.callbacks = []
        vars(replica)["turns"] = one_after_the_other if self.order == "turns" else push_rules.turns


async def accuracy(cluster: Cluster, way: str, order: str, seed: int, options: argparse.Namespace) -> tuple[float, int]:
    """Return the test accuracy in percent, and the largest staleness of a push."""
    app = Replicas(cluster)
    settings = {"replicas": options.replicas, "samples": options.samples, "seed": seed, "order": order, **WAYS[way]}
    for name, value in settings.items():
        setattr(app, name, value)
    records = await app.train_model()
    return 100 * (await app.evaluate_model())["accuracy"], max(record.staleness for record in records)


async def main(options: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """Train each way and print a table; returns the accuracies of the seeds, by way and order."""
    results: dict[tuple[str, str], list[float]] = {}
    async with Cluster.local(options.workers) as cluster:
        for seed in range(options.seeds):
            for order in options.orders:
                for way in options.ways:
                    reached, stale = await accuracy(cluster, way, order, seed, options)
                    results.setdefault((way, order), []).append(reached)
                    print(f"seed {seed}, {order}, {way}: {reached:.1f} %, staleness up to {stale}", flush=True)
    rows = [
        [way, *(f"{statistics.mean(all_of):.1f} ({min(all_of):.1f}-{max(all_of):.1f})" for all_of in columns)]
        for way in options.ways
        for columns in [[results[way, order] for order in options.orders]]
    ]
    print(
        f"\n{options.replicas} replicas on {options.workers} workers, {options.samples} samples, {options.seeds} seeds"
    )
    print(table([["%", *options.orders], *rows]))
    return results


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--ways", type=some_of(DOWNPOUR), default=["downpour", "default"])
    parser.add_argument("--orders", type=some_of(ORDERS), default=list(ORDERS))
    return parser


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))
