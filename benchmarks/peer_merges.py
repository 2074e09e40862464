"""Measure how soon peers that meet reach an accuracy on MNIST, for each merge of two peers.

    python -m benchmarks.peer_merges [--target 0.97] [--slots 4] [--repeats 4] [--rules "one peer,average,weighted"] [--steps 5] [--epochs 3]
    python -m benchmarks.peer_merges --target 0.3 --samples 3000 --looks 5 --repeats 1 --rules "one peer,average"       # the short form

The output is in updates and in seconds, as mean and spread over the repeats. Model and criterion are those of WebNN
(Goin, Cotton, Zhao 2018): two convolutions of 8 and 16 filters, batches of 64, and plain SGD. The target is reached
when the mean of the last 5 validations reaches it. Here the peers are slots that meet at the master after some batches.
Each validation tests the master's weights with 2,500 test images.

The rules run in turns, repeat by repeat. Seconds are the seconds of the rounds. The first round of each slot, in which
Keras compiles, counts as its median round. Read the ratio to ``one peer`` in the same repeat, which has a core for
itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
from typing import Any

import ddlf
from benchmarks.measure import mean_and_deviation, table, turns
from ddlf import Cluster
from ddlf.errors import BadUpdate

ONE = "one peer"
RULES: dict[str, dict[str, Any]] = {
    ONE: {},
    "published": {},
    **{name: {"arrival": name} for name in ("average", "weighted", "mimic", "copy", "elastic")},
}
"""Each contender by its name: settings of a run. The published one subtracts each update by its share of a round."""
LAST = 5


class Meets(ddlf.IApp):
    """The network of 5,994 parameters that the source trains on MNIST."""

    verbose = False
    mode = "async"
    batch_size = 64
    learning_rate = 0.15
    samples = None

    async def load_dataset(self) -> None:
        """Load MNIST, and keep the first training samples and every fourth test sample."""
        (self.x_train, self.y_train), (self.x_test, self.y_test) = ddlf.load_mnist()
        self.x_train, self.y_train = self.x_train[: self.samples], self.y_train[: self.samples]
        self.x_test, self.y_test = self.x_test[::4], self.y_test[::4]

    async def create_model(self) -> None:
        """Two convolutions and a dense layer."""
        import keras
        from keras import layers

        hidden = [
            part
            for filters in (8, 16)
            for part in (layers.Conv2D(filters, 5, activation="relu"), layers.MaxPooling2D(2))
        ]
        self.model = keras.Sequential(
            [keras.Input((28, 28, 1)), *hidden, layers.Flatten(), layers.Dense(10, activation="softmax")]
        )
        self.model.compile(keras.optimizers.SGD(self.learning_rate), "categorical_crossentropy", metrics=["accuracy"])


async def run(cluster: Cluster, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train once, until the target or the last epoch; returns updates and seconds to the target, if it was reached, and the best accuracy."""
    peers = 1 if name == ONE else options.slots
    app = Meets(cluster.options(workers=[1]) if name == ONE else cluster)
    settings = {
        **RULES[name],
        "slots": peers,
        "seed": seed,
        "samples": options.samples,
        "master_epochs": options.epochs,
        "worker_steps": options.steps,
        "evaluate_every": options.looks,
        "converge": f"target:test_accuracy,{options.target},last={LAST}",
    }
    for setting, value in settings.items():
        setattr(app, setting, value)
    with contextlib.suppress(BadUpdate):  # NaN: it has diverged
        await app.train_model()
    records = app.history
    rounds = {slot: [entry.seconds for entry in records if entry.slot == slot] for slot in range(1, peers + 1)}
    usual = {slot: statistics.median(seconds) for slot, seconds in rounds.items() if seconds}
    first = {slot: next(entry for entry in records if entry.slot == slot) for slot in usual}
    seconds, tests, reached = 0.0, [], {}
    for record in records:
        seconds += (usual[record.slot] if record is first[record.slot] else record.seconds) / peers
        if record.test:
            tests.append(record.test["accuracy"])
        if len(tests) >= LAST and statistics.fmean(tests[-LAST:]) >= options.target and not reached:
            reached = {"updates": record.version, "seconds": seconds}
    staleness = statistics.fmean([record.staleness for record in records] or [0])
    return {"rule": name, "seed": seed, **reached, "best": max(tests, default=float("nan")), "staleness": staleness}


def rows(runs: list[dict[str, Any]], names: list[str], options: argparse.Namespace) -> list[list[str]]:
    """Return a table: mean and deviation over the repeats that reached the target, and the ratio of seconds to one peer."""
    cells_of_rows = [
        [
            "rule",
            f"reached {options.target:.0%}",
            "updates",
            "of each peer",
            "seconds",
            f"of {ONE}'s",
            "staleness",
            "best",
        ]
    ]
    alone = {run["seed"]: run["seconds"] for run in runs if run["rule"] == ONE and "seconds" in run}
    for name in names:
        own_runs = [run for run in runs if run["rule"] == name]
        reached_runs = [run for run in own_runs if "updates" in run]
        ratios = [run["seconds"] / alone[run["seed"]] for run in reached_runs if run["seed"] in alone]
        cells = ["-"] * 4
        if reached_runs:
            updates_of_peer = statistics.fmean(run["updates"] for run in reached_runs) / (
                1 if name == ONE else options.slots
            )
            cells = [
                mean_and_deviation([run["updates"] for run in reached_runs], ".0f"),
                f"{updates_of_peer:.0f}",
                mean_and_deviation([run["seconds"] for run in reached_runs], ".1f"),
                mean_and_deviation(ratios) if ratios else "-",
            ]
        staleness = f"{statistics.fmean(run['staleness'] for run in own_runs):.1f}"
        best = mean_and_deviation([run["best"] for run in own_runs], ".3f")
        cells_of_rows.append([name, f"{len(reached_runs)} of {len(own_runs)}", *cells, staleness, best])
    return cells_of_rows


async def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure in turns, print the table, and return the runs."""
    runs = []
    async with Cluster.local(options.slots) as cluster:
        for seed, name in turns(options.rules, options.repeats):
            runs.append(await run(cluster, name, seed, options))
            print(runs[-1], flush=True)
    print(table(rows(runs, options.rules, options)))
    return runs


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rules", type=lambda text: text.split(","), default=list(RULES), help=f"of {', '.join(RULES)}"
    )
    parser.add_argument("--target", type=float, default=0.97, help="test accuracy to reach, as the mean of the last 5")
    parser.add_argument("--slots", type=int, default=4, help="peers, each with its own worker")
    parser.add_argument("--repeats", type=int, default=4, help="number of runs with different seeds")
    parser.add_argument("--steps", type=int, default=5, help="batches between two meetings")
    parser.add_argument("--looks", type=int, default=10, help="updates between two validations")
    parser.add_argument("--epochs", type=int, default=3, help="maximum number of epochs to reach the target")
    parser.add_argument("--samples", type=int, default=None, help="number of training samples; all by default")
    return parser


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))
