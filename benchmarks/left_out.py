"""Measure what two secure sums of rounds in a row tell about a worker that is missing in the second one.

    python -m benchmarks.left_out [--rounds 30] [--seeds 3]

Workers train a network (784-50-10, ReLU) on their own parts of MNIST for one epoch in each round, and a server adds up
their updates. In each round in turn, the benchmark supposes that one worker is missing. The guess at its update of the
round before is the sum of that round, less the sum of this round without it. The table has the cosine of the guess with
the true update of this worker, and the largest cosine with the update of another one. A guess that tells nothing about
the worker is as near to others. The training is written in NumPy, as nothing here depends on a framework.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.measure import Spread, table
from ddlf.data.datasets import load_mnist

Array = npt.NDArray[np.float32]
HIDDEN, RATE, BATCH = 50, 0.1, 32
SETTINGS = ((4, 2000, False), (4, 2000, True), (50, 400, False))
"""Workers, samples of each, and whether each worker has other labels."""
SHOWN = (2, 5, 10, 20, 30)
"""Rounds, from 1, in which a worker is missing."""


def trained(weights: Sequence[Array], x: Array, y: Array, chance: np.random.Generator) -> list[Array]:
    """Return the weights after one epoch of gradient descent.

    Args:
        weights: Kernel and bias of both layers.
        x: Samples, shape (n, 784).
        y: One-hot labels, shape (n, 10).
        chance: Shuffles the samples.
    """
    weights = [weight.copy() for weight in weights]
    order = chance.permutation(len(x))
    for begin in range(0, len(x), BATCH):
        rows = order[begin : begin + BATCH]
        hidden = np.maximum(x[rows] @ weights[0] + weights[1], 0)
        scores = np.exp((logits := hidden @ weights[2] + weights[3]) - logits.max(1, keepdims=True))
        error = (scores / scores.sum(1, keepdims=True) - y[rows]) / len(rows)
        back = (error @ weights[2].T) * (hidden > 0)
        gradients = [x[rows].T @ back, back.sum(0), hidden.T @ error, error.sum(0)]
        weights = [weight - RATE * gradient for weight, gradient in zip(weights, gradients, strict=True)]
    return weights


def guesses(workers: int, samples: int, other_labels: bool, rounds: int, seed: int) -> dict[int, tuple[float, float]]:
    """Return the cosines of the guess with the update of the missing worker, and with the nearest other one, by round."""
    (x, y), _ = load_mnist()
    chance = np.random.default_rng(seed)
    order = chance.permutation(len(x))[: workers * samples]
    if other_labels:
        order = order[np.argsort(y[order].argmax(1), kind="stable")]
    parts = [(x[part].reshape(len(part), -1), y[part]) for part in np.array_split(order, workers)]
    sizes = ((784, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))
    weights = [chance.normal(0, 0.05, size).astype(np.float32) * (len(size) == 2) for size in sizes]
    cosines_of, before = dict[int, tuple[float, float]](), np.zeros(0)
    for number in range(1, rounds + 1):
        updates = [
            [new - old for new, old in zip(trained(weights, *part, chance), weights, strict=True)] for part in parts
        ]
        now = np.stack([np.concatenate([array.ravel() for array in update]) for update in updates])
        if number in SHOWN:
            guess = before.sum(0) - now[1:].sum(0)
            cosines = before @ guess / np.linalg.norm(before, axis=1) / np.linalg.norm(guess)
            cosines_of[number] = float(cosines[0]), float(cosines[1:].max())
        before = now
        weights = [weight + sum(update[index] for update in updates) / workers for index, weight in enumerate(weights)]
    return cosines_of


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(argv)
    rows = [["workers", "labels", "missing in round", "its own update", "the nearest other one"]]
    for workers, samples, other_labels in SETTINGS:
        runs = [guesses(workers, samples, other_labels, options.rounds, seed) for seed in range(options.seeds)]
        for number in runs[0]:
            own_cosine, other_cosine = (Spread.of([run[number][index] for run in runs]).text(".2f") for index in (0, 1))
            rows.append([f"{workers}", "other ones" if other_labels else "all", f"{number}", own_cosine, other_cosine])
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
