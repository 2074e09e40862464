"""How soon each way to train together reaches an accuracy: in seconds, in samples and in bytes.

    python -m benchmarks.learning [--data digits|mnist|cifar10] [--rules average,gradient,diloco-10] [--target 0.95] [--epochs 4] [--samples N]
                                  [--batch-size 64] [--workers 2] [--seeds 3] [--plot learning.png]

Ways take turns, seed by seed. Some twenty times in a run the weights are kept, and tested when it is over: the first that reach the target count.
Seconds are those of rounds, the first of which, where Keras compiles, counts as the median one. So what is read is the ratio to the first way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

from apps.cifar10_cnn import CIFAR10CNN
from apps.digits_cnn import DigitsCNN
from apps.mnist_cnn import MNISTCNN
from benchmarks.measure import Spread, table, turns
from ddlf import Cluster

DATA: dict[str, tuple[type[Any], float]] = {
    "digits": (DigitsCNN, 0.1),
    "mnist": (MNISTCNN, 0.05),
    "cifar10": (CIFAR10CNN, 0.05),
}
"""Of each data set the app, and the learning rate of plain SGD."""
RULES: dict[str, dict[str, Any]] = {
    "average": {},
    "average-10": {"worker_steps": 10},
    "gradient": {"exchange": "gradient"},
    "gradient-int8": {"exchange": "gradient", "codec": "int8"},
    "diloco-10": {"outer": "diloco", "worker_steps": 10},
    "fedavgm-10": {"outer": "fedavgm:momentum=0.5", "worker_steps": 10},
    "fedadam-10": {"outer": "fedadam:learning_rate=0.01", "worker_steps": 10},
    "async": {"mode": "async"},
    "async-10": {"mode": "async", "worker_steps": 10},
}
"""Each way by its name: settings of a run. 10 is the number of batches between two exchanges, an epoch where there is none."""
LOOKS = 20


async def run(cluster: Cluster, rule: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train once; returns the accuracies over seconds, samples and bytes, and what it took to the target, None where it was not reached."""
    base, rate = DATA[options.data]

    class App(base):  # type: ignore[misc]
        verbose, learning_rate, worker_epochs = False, rate, 1

        async def load_dataset(self) -> None:
            await super().load_dataset()
            self.x_train, self.y_train = self.x_train[: options.samples], self.y_train[: options.samples]

        def on_round(self, record: Any) -> None:
            done = sum(entry.samples * entry.epochs for entry in self.history)
            if done >= len(kept) * options.epochs * len(self.x_train) / LOOKS:
                kept.append((len(self.history), done, self.model.get_weights()))

    kept: list[tuple[int, int, Any]] = []
    app = App(cluster)
    for name, value in {**RULES[rule], "seed": seed, "batch_size": options.batch_size}.items():
        setattr(app, name, value)
    app.master_epochs = options.epochs
    records = await app.train_model()
    seconds = [record.seconds for record in records]
    seconds[0] = statistics.median(seconds)
    if app.mode == "async":  # rounds of slots overlap
        seconds = [one / app.cluster.N for one in seconds]
    curve = []
    for rounds, samples, weights in kept:
        app.model.set_weights(weights)
        accuracy = (await app.evaluate_model())["accuracy"]
        moved = sum(record.bytes_out + record.bytes_back for record in records[:rounds])
        curve.append({"seconds": sum(seconds[:rounds]), "samples": samples, "bytes": moved, "accuracy": accuracy})
    reached = next((point for point in curve if point["accuracy"] >= options.target), None)
    return {"rule": rule, "seed": seed, "rounds": len(records), "curve": curve, "reached": reached}


def rows(runs: list[dict[str, Any]], names: list[str], target: float) -> list[list[str]]:
    """A table: medians over the seeds that reached the target, seconds also as the ratio to the first way of the same seed."""
    header = ["way", f"reached {target:.0%}", "seconds", f"of {names[0]}'s", "samples", "MB", "best accuracy"]
    found = [header]
    first = {one["seed"]: one["reached"] for one in runs if one["rule"] == names[0]}
    for name in names:
        mine = [one for one in runs if one["rule"] == name]
        there = [one for one in mine if one["reached"]]
        best = Spread.of([max(point["accuracy"] for point in one["curve"]) for one in mine]).text(".3f")
        cells = ["-"] * 4
        if there:
            ratios = [
                one["reached"]["seconds"] / first[one["seed"]]["seconds"] for one in there if first.get(one["seed"])
            ]
            cells = [
                Spread.of([one["reached"]["seconds"] for one in there]).text(".1f"),
                Spread.of(ratios).text(".2f") if ratios else "-",
                f"{statistics.median(one['reached']['samples'] for one in there):,.0f}",
                Spread.of([one["reached"]["bytes"] / 1e6 for one in there]).text(".1f"),
            ]
        found.append([name, f"{len(there)} of {len(mine)}", *cells, best])
    return found


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Write accuracy over seconds, samples and bytes, a line for each run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 5), layout="constrained", sharey=True)
    names = list(dict.fromkeys(one["rule"] for one in runs))
    for axis, unit in zip(axes, ("seconds", "samples", "bytes"), strict=True):
        for one in runs:
            number = names.index(one["rule"])
            label = one["rule"] if one is next(other for other in runs if other["rule"] == one["rule"]) else None
            points = [(point[unit], point["accuracy"]) for point in one["curve"]]
            axis.plot(*zip(*points, strict=True), color=f"C{number}", label=label)
        axis.set(xlabel=unit, xscale="log" if unit == "bytes" else "linear")
    axes[0].set(ylabel="test accuracy")
    axes[0].legend()
    figure.savefig(path)


async def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure in turns, print the table, and return the runs."""
    names = options.rules.split(",")
    runs = []
    async with Cluster.local(options.workers) as cluster:
        for seed, rule in turns(names, options.seeds):
            runs.append(await run(cluster, rule, seed, options))
            shown = {name: value for name, value in runs[-1].items() if name != "curve"}
            print(json.dumps(shown), flush=True)
    print(table(rows(runs, names, options.target)))
    if options.plot:
        plot(runs, options.plot)
    return runs


def parser() -> argparse.ArgumentParser:
    """What can be said on the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", choices=DATA, default="mnist")
    made.add_argument("--rules", default="average,average-10,gradient", help=f"of {', '.join(RULES)}")
    made.add_argument("--target", type=float, default=0.95, help="test accuracy")
    made.add_argument("--epochs", type=int, default=4)
    made.add_argument("--samples", type=int, default=None, help="of training; all by default")
    made.add_argument("--batch-size", type=int, default=64, help="of each worker")
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--plot", type=Path, default=None, help="a PNG; needs matplotlib")
    return made


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))
