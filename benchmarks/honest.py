"""Measure how much honest updates of one round differ. The limits of ``ddlf.algorithms.update_check`` must accept them.

    python -m benchmarks.honest [--rounds 10] [--samples 6000] [--only digits-sgd]

Each setting trains like ``train_sync``, but without a network, with partitions from equal to 90:7:2:1. A line of the
output has these figures over all rounds and slots:

- the longest and the shortest norm, relative to the median of the other slots, corrected for the number of samples;
- the lowest median cosine with the other slots, where these agree with each other (by more than 0.3), and anywhere;
- the share of updates with a sign flip that the check would find;
- the number of updates that the default limits reject.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.workload import Weights, Workload
from ddlf.algorithms.merge import Mean, merged
from ddlf.algorithms.pairwise import cosines, norm
from ddlf.algorithms.partition import partition, shuffled
from ddlf.algorithms.update_check import Limits, judge

SHARES = ((0.25, 0.25, 0.25, 0.25), (0.55, 0.35, 0.08, 0.02), (0.90, 0.07, 0.02, 0.01), (0.34, 0.33, 0.33))
SETTINGS = {
    "digits-sgd": ("digits", "SGD", 0.1, 32),
    "digits-fast": ("digits", "SGD", 0.3, 8),
    "digits-adam": ("digits", "Adam", 0.001, 32),
    "mnist-sgd": ("mnist", "SGD", 0.01, 64),
    "mnist-adam": ("mnist", "Adam", 0.001, 32),
}

Round = dict[int, tuple[Weights, int]]


def rounds(name: str, shares: tuple[float, ...], options: argparse.Namespace) -> Iterator[Round]:
    """Train; yield the updates and samples of each round, by slot."""
    import keras

    data, optimizer, learning_rate, batch_size = SETTINGS[name]
    app: Any = Workload(data=data, samples=options.samples).load()
    model = app.model
    model.compile(getattr(keras.optimizers, optimizer)(learning_rate), "categorical_crossentropy")
    weights, n = model.get_weights(), len(app.x_train)
    sizes = [max(1, int(share * n)) for share in shares]
    sizes[0] += n - sum(sizes)
    for number in range(options.rounds):
        updates: Round = {}
        for slot, part in enumerate(partition(shuffled(n, 0, number), sizes)):
            model.set_weights(weights)
            model.fit(app.x_train[part], app.y_train[part], batch_size=batch_size, verbose=0)
            after = model.get_weights()
            updates[slot] = [a - b for a, b in zip(weights, after, strict=True)], len(part)
        yield updates
        mean = merged(Mean(), *zip(*updates.values(), strict=True))
        weights = [w - g for w, g in zip(weights, mean, strict=True)]


def figures(updates: Round) -> Iterator[tuple[float, float, float, float]]:
    """Yield for each slot: the ratios of its norm to the bounds for long and for short updates, its median cosine with the
    other slots, and the median cosine between the other slots.
    """
    norms = np.array([norm(update) for update, _ in updates.values()])
    samples = np.array([n for _, n in updates.values()])
    cosine = cosines([update for update, _ in updates.values()])
    for slot in range(len(updates)):
        other_slots = np.delete(np.arange(len(updates)), slot)
        share = samples[slot] / np.median(samples[other_slots])
        high, low = statistics.median_high(norms[other_slots]), statistics.median_low(norms[other_slots])
        between = cosine[np.ix_(other_slots, other_slots)][np.triu_indices(len(other_slots), 1)]
        yield (
            norms[slot] / high / max(1, share),
            norms[slot] / low / min(1, share),
            float(np.median(cosine[slot, other_slots])),
            float(np.median(between)),
        )


def main(options: argparse.Namespace) -> list[tuple[float, float]]:
    """Measure and print a line for each setting; returns the longest and shortest of each."""
    extremes = []
    print(
        f"{'setting':<13}{'updates':>8}{'longest':>9}{'shortest':>10}{'cosine':>8}{'anywhere':>10}{'flips found':>13}  rejected"
    )
    for name in SETTINGS if options.only is None else [options.only]:
        rows, rejected = [], 0
        for shares in SHARES:
            for updates in rounds(name, shares, options):
                rows += list(figures(updates))
                verdicts = judge(updates, updates[0][0], "reject").values()
                rejected += sum(verdict.action == "reject" for verdict in verdicts)
        longest, shortest, cosine, agreement = np.array(rows).T
        agreed, limit = agreement > Limits().opposite, Limits().opposite
        print(
            f"{name:<13}{len(rows):>8}{longest.max():>9.2f}{shortest.min():>10.3f}{cosine[agreed].min():>8.2f}{cosine.min():>10.2f}"
            f"{np.mean(agreed & (cosine > limit)):>13.0%}  {rejected}",
            flush=True,
        )
        extremes.append((float(longest.max()), float(shortest.min())))
    return extremes


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--only", choices=SETTINGS)
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
