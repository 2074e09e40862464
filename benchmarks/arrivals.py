"""Measure how soon each asynchronous rule reaches an accuracy, on a simulated clock.

    python -m benchmarks.arrivals [--data digits|mnist|cifar10] [--rules published,fedasync] [--slots 4] [--slow 1] [--samples 4000] [--epochs 8]
                                  [--batch-size 64] [--rate 0.05] [--target 0.9] [--seeds 5] [--json FILE]

The default of ``train_async`` is based on this benchmark. It trains real models with DDLF's own rules, in one process.
Only the order of arrivals is simulated. The time of a slot is proportional to its samples, plus up to a tenth at
random. ``--slow`` multiplies the time of the last slot. The unit of time is the time that a slot needs for its part of
the samples.

With the same seed, all rules get the same initial weights, parts and times. The benchmark tests the weights twice in
each unit, and interpolates the accuracy linearly between two tests.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning import DATA
from benchmarks.measure import mean_and_deviation, some_of, table
from ddlf.algorithms.arrival import ARRIVAL, Arrived
from ddlf.algorithms.outer import OUTER
from ddlf.algorithms.partition import equal_sizes, partition, shuffled
from ddlf.algorithms.staleness import STALENESS
from ddlf.algorithms.weights import Weights

RULES: dict[str, tuple[str, str, str]] = {
    "published": ("published", "constant", "subtract"),
    "inverse": ("published", "inverse", "subtract"),
    "polynomial": ("published", "polynomial:a=0.5", "subtract"),
    "fedasync": ("fedasync:rate=0.6", "polynomial:a=0.5", "subtract"),
    "fedbuff": ("fedbuff:size=2", "polynomial:a=0.5", "subtract"),
    "delayed": ("delayed:rate=0.7,momentum=0.9", "constant", "subtract"),
    "delayed-gentle": ("delayed:rate=1.0,momentum=0.5", "constant", "subtract"),
    "nesterov": ("published", "constant", "nesterov:learning_rate=0.7,momentum=0.9"),
}
"""Each way by its name: arrival rule, staleness, outer optimizer. With more slots a larger buffer would be usual."""
Curve = list[tuple[float, float]]


class Trainer:
    """One model and its data.

    Args:
        options: The parsed options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        import keras

        from ddlf.training.slot.feed import make_feed

        base, rate = DATA[options.data]
        self.app = base(None)
        self.app.learning_rate = options.rate or rate
        asyncio.run(self.app.load_dataset())
        x, y = self.app.x_train[: options.samples], self.app.y_train[: options.samples]
        self.samples = len(x)
        self._feed = make_feed((x, y), options.batch_size)
        test = self.app.x_test[: options.test], self.app.y_test[: options.test]
        self._test = make_feed(test, 500)
        self._test.set_order(np.arange(len(test[0])))
        asyncio.run(self.app.create_model())
        self.model = self.app.model
        optimizer = keras.optimizers.SGD(self.app.learning_rate)
        self.model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"], steps_per_execution=8)

    def begin(self, seed: int) -> Weights:
        """Return the first weights of a seed."""
        import keras

        keras.utils.set_random_seed(seed)
        asyncio.run(self.app.create_model())
        weights: Weights = self.app.model.get_weights()
        return weights

    def train(self, weights: Weights, order: Any) -> tuple[Weights, float]:
        """Return the update of one local epoch, and its accuracy."""
        self.model.set_weights(weights)
        self._feed.set_order(order)
        history = self.model.fit(self._feed.dataset, shuffle=False, verbose=0)
        pairs = zip(weights, self.model.get_weights(), strict=True)
        return [before - after for before, after in pairs], history.history["accuracy"][-1]

    def test(self, weights: Weights) -> float:
        """Return the accuracy on the test samples."""
        self.model.set_weights(weights)
        return float(self.model.evaluate(self._test.dataset, verbose=0)[1])


def run(trainer: Trainer, rule: str, seed: int, options: argparse.Namespace) -> Curve:
    """Train once, and return times and accuracies."""
    arrival, staleness, outer = (
        family.read(text) for family, text in zip((ARRIVAL, STALENESS, OUTER), RULES[rule], strict=True)
    )
    weights, slots = trainer.begin(seed), options.slots
    state = {"outer": outer.init(weights), **arrival.init(weights)}
    chance = np.random.default_rng(seed)
    # Drawn before the first arrival, so that they do not depend on the rule.
    longer = 1 + 0.1 * chance.random((slots, options.epochs))
    longer[-1] *= options.slow
    waiting: list[tuple[float, int, int, Weights, int, dict[str, Weights]]] = []
    merges, curve, left = 0, [(0.0, trainer.test(weights))], slots * options.epochs

    def begin(slot: int, round: int, now: float) -> None:
        start = arrival.begin(state, weights, slot)
        heapq.heappush(waiting, (now + longer[slot, round], slot, round, start, merges, dict(state)))

    for slot in range(slots):
        begin(slot, 0, 0.0)
    while waiting:
        now, slot, round, start, version, before = heapq.heappop(waiting)
        while now > len(curve) / 2:
            curve.append((len(curve) / 2, trainer.test(weights)))
        part = partition(shuffled(trainer.samples, seed, round), equal_sizes(trainer.samples, slots))[slot]
        update, accuracy = trainer.train(start, part)
        left -= 1
        arrived = Arrived(
            update=update,
            start=start,
            before=before,
            slot=slot,
            slots=slots,
            factor=staleness(merges - version),
            trainable=[True] * len(weights),
            outer=outer,
            accuracy=accuracy,
            last=not left,
        )
        changed, after = arrival.arrive(state, weights, arrived)
        merges += after is not weights
        state.update(changed)
        weights = after
        if round + 1 < options.epochs:
            begin(slot, round + 1, now)
    return [*curve, (now, trainer.test(weights))]


def reached(curve: Curve, target: float) -> float | None:
    """Return the first time at which an accuracy was reached; None if it was not reached."""
    for (t, low), (u, high) in itertools.pairwise(curve):
        if high >= target:
            return t if low >= target else t + (u - t) * (target - low) / (high - low)
    return None


def rows(runs: list[dict[str, Any]], target: float) -> Iterator[list[str]]:
    """Return a table: mean and deviation over seeds, and the ratio to the time of the first rule with the same seed."""
    times = {(run["rule"], run["seed"]): reached(run["curve"], target) for run in runs}
    names = list(dict.fromkeys(run["rule"] for run in runs))
    yield ["rule", f"reached {target:.0%}", "time", f"of {names[0]}'s", "accuracy at the end %"]
    for name in names:
        own_runs = [run for run in runs if run["rule"] == name]
        times_to_target = {run["seed"]: time for run in own_runs if (time := times[name, run["seed"]]) is not None}
        ratios = [time / first for seed, time in times_to_target.items() if (first := times[names[0], seed])]
        yield [
            name,
            f"{len(times_to_target)} of {len(own_runs)}",
            mean_and_deviation(list(times_to_target.values())) if times_to_target else "-",
            mean_and_deviation(ratios) if ratios else "-",
            mean_and_deviation([100 * run["curve"][-1][1] for run in own_runs], ".1f"),
        ]


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train with every rule and seed, print a table, and return the runs."""
    trainer, runs = Trainer(options), []
    for seed in range(options.seeds):
        for rule in options.rules:
            runs.append({"rule": rule, "seed": seed, "curve": run(trainer, rule, seed, options)})
            print(json.dumps({**runs[-1], "curve": [round(a, 4) for _, a in runs[-1]["curve"]]}), flush=True)
    if options.json:
        options.json.write_text(json.dumps(runs))
    print(table(list(rows(runs, options.target))))
    return runs


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA, default="mnist")
    parser.add_argument("--rules", type=some_of(RULES), default=list(RULES), help=f"of {', '.join(RULES)}")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--slow", type=float, default=1.0, help="how many times as long the last slot takes")
    parser.add_argument("--samples", type=int, default=4000, help="of training")
    parser.add_argument("--test", type=int, default=1000, help="samples of a test")
    parser.add_argument("--epochs", type=int, default=8, help="of each slot")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rate", type=float, default=None, help="of plain SGD; by default that of benchmarks.learning")
    parser.add_argument("--target", type=float, default=0.9, help="test accuracy")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
