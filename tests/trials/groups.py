"""Compare Downpour whose replicas are groups of workers with Downpour on whole models.

    python -m tests.trials.groups [--seeds 3] [--rounds 12]

The app ``digits_cnn`` trains with 2 slots, whole on 2 workers, and in 2 stages on 4 workers. The accuracy on the test
data after all rounds is the result. The exit code is 1 if the mean accuracy of the groups is more than 1 point lower.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence

from apps.digits_cnn import DigitsCNN
from ddlf import Cluster
from tests.trials.options import read_options

POINTS = 0.01


async def accuracy(split: str | None, seed: int, rounds: int, workers: int) -> float:
    """Return the accuracy of one run."""
    async with Cluster.local(workers) as cluster:
        app = DigitsCNN(cluster)
        app.mode, app.slots, app.split = "downpour", 2, split
        app.seed, app.master_epochs, app.worker_epochs, app.verbose, app.threads = seed, rounds, 1, False, 1
        await app.train_model()
        assert app.ledger.is_exact(rounds)
        return float((await app.evaluate_model())["accuracy"])


def compare(seeds: int, rounds: int) -> list[tuple[float, float]]:
    """Return the accuracy of whole models and of groups for each seed, and print them."""
    print("| seed | whole | groups |\n|---|---|---|")
    accuracies = []
    for seed in range(seeds):
        whole = asyncio.run(accuracy(None, seed, rounds, 2))
        groups = asyncio.run(accuracy("stages:2", seed, rounds, 4))
        accuracies.append((whole, groups))
        print(f"| {seed} | {whole:.2%} | {groups:.2%} |", flush=True)
    return accuracies


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial, and print its results. Return the exit code."""
    options = read_options(__doc__, argv, seeds=3, rounds=12)
    whole, groups = map(statistics.mean, zip(*compare(options.seeds, options.rounds), strict=True))
    print(f"| mean | {whole:.2%} | {groups:.2%} |")
    return 0 if groups >= whole - POINTS else 1


if __name__ == "__main__":
    sys.exit(main())
