"""Measure how soon each way of training on several machines reaches an accuracy, in seconds, samples and bytes.

    python -m benchmarks.learning [--data digits|mnist|cifar10|text] [--rules average,gradient,diloco-10] [--target 0.95] [--epochs 4] [--samples N]
                                  [--batch-size 64] [--workers 2] [--seeds 3] [--link 100] [--plot learning.svg] [--json FILE] [--quiet FILE]

The ways run in turns, seed by seed. Each run keeps its weights about twenty times and tests them at its end. The first
weights that reach the target count. For text, a small transformer trains with Adam, and the accuracy is that of the
next byte. The file of ``--json`` is written after each run. The benchmark does not repeat runs that the file has, so an
interrupted study continues, and can be shown again with another target or link.

Seconds are the seconds of the rounds. The first round, in which Keras compiles, counts as the median round. Read the
ratio to the first way. On a busy machine, seconds are not reliable. For this case ``--quiet`` names the file of a study
that ran alone, and may be short (``--epochs 1 --looks 1 --seeds 1``). Seconds are then the samples times the time of a
sample in that study.

Seconds on a link are computed: the samples of a worker, each at the median time of a sample in the first way's local
training, plus all bytes one after another through the master's link of so many Mbit/s. They do not contain other costs
of a step.
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
from benchmarks.language import Language
from benchmarks.measure import mean_and_deviation, some_of, table, turns
from ddlf import Cluster
from ddlf.errors import DDLFError


class Text(Language):
    """The transformer with Adam at a constant rate, which it needs. With SCAFFOLD, it has plain SGD like the source of SCAFFOLD."""

    slots = None

    def optimizer(self) -> Any:
        import keras

        if self.local_rule == "scaffold":
            return keras.optimizers.SGD(0.5)
        return keras.optimizers.Adam(self.learning_rate)


DATA: dict[str, tuple[type[Any], float]] = {
    "digits": (DigitsCNN, 0.1),
    "mnist": (MNISTCNN, 0.05),
    "cifar10": (CIFAR10CNN, 0.05),
    "text": (Text, 0.005),
}
"""App and learning rate of each data set. The rate is for plain SGD, or for Adam on the text."""
RULES: dict[str, dict[str, Any]] = {
    "average": {},
    "average-10": {"worker_steps": 10},
    "gradient": {"exchange": "gradient", "optimizer_state": "kept"},
    "gradient-int8": {"exchange": "gradient", "optimizer_state": "kept", "codec": "int8"},
    "diloco-10": {"outer": "diloco", "worker_steps": 10},
    "nesterov-10": {"outer": "nesterov:learning_rate=1.0,momentum=0.5", "worker_steps": 10},
    "streaming-10": {"outer": "streaming:fragments=4", "worker_steps": 10},
    "fedavgm-10": {"outer": "fedavgm:momentum=0.5", "worker_steps": 10},
    "fedadagrad-10": {"outer": "fedadagrad:learning_rate=0.01", "worker_steps": 10},
    "fedadam-10": {"outer": "fedadam:learning_rate=0.01", "worker_steps": 10},
    "fedyogi-10": {"outer": "fedyogi:learning_rate=0.01", "worker_steps": 10},
    "fedprox-10": {"local_rule": "fedprox:0.1", "worker_steps": 10},
    "scaffold-10": {"local_rule": "scaffold", "worker_steps": 10},
    "int8-10": {"codec": "int8", "weights_codec": "delta:int8", "worker_steps": 10},
    "int4-10": {"codec": "int4-block", "weights_codec": "delta:int4-block", "worker_steps": 10},
    "powersgd-10": {"codec": "powersgd:rank=4", "worker_steps": 10},
    "async": {"mode": "async"},
    "async-10": {"mode": "async", "worker_steps": 10},
    "inverse-10": {"mode": "async", "staleness": "inverse", "worker_steps": 10},
    "fedasync-10": {"mode": "async", "arrival": "fedasync", "staleness": "polynomial:a=0.5", "worker_steps": 10},
    "fedbuff-10": {"mode": "async", "arrival": "fedbuff:size=2", "worker_steps": 10},
    "delayed-10": {"mode": "async", "arrival": "delayed:rate=1.0,momentum=0.5", "worker_steps": 10},
    "dcasgd-10": {"mode": "async", "arrival": "dcasgd", "worker_steps": 10},
    "elastic-10": {"mode": "async", "arrival": "elastic:alpha=0.45", "worker_steps": 10},
    "weighted-10": {"mode": "async", "arrival": "weighted", "worker_steps": 10},
}
"""Each way by its name: settings of a run. A number is the count of batches between two exchanges; the default is an epoch."""
SAME = ("data", "epochs", "samples", "batch_size", "workers", "test", "looks")
"""Options that are the same for all runs of a file."""


async def run(cluster: Cluster, rule: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train once. Return the accuracies over seconds, samples and bytes, and the cost of the target; None if it was missed."""
    base, rate = DATA[options.data]

    class App(base):  # type: ignore[misc]
        verbose, learning_rate, worker_epochs = False, rate, 1

        async def load_dataset(self) -> None:
            await super().load_dataset()
            self.x_train, self.y_train = self.x_train[: options.samples], self.y_train[: options.samples]
            self.x_test, self.y_test = self.x_test[: options.test], self.y_test[: options.test]

        def on_round(self, record: Any) -> None:
            done = sum(entry.samples * entry.epochs for entry in self.history)
            if done >= (len(snapshots) + 1) * options.epochs * len(self.x_train) / options.looks:
                snapshots.append((len(self.history), done, self.model.get_weights()))

    snapshots: list[tuple[int, int, Any]] = []
    app = App(cluster)
    for name, value in {**RULES[rule], "seed": seed, "batch_size": options.batch_size}.items():
        setattr(app, name, value)
    app.master_epochs = options.epochs
    records = await app.train_model()
    seconds = [record.seconds for record in records]
    seconds[0] = statistics.median(seconds)
    if app.mode == "async":  # rounds of slots overlap
        seconds = [value / app.cluster.N for value in seconds]
    curve = []
    for rounds, samples, weights in snapshots:
        app.model.set_weights(weights)
        accuracy = (await app.evaluate_model())["accuracy"]
        moved = sum(record.bytes_out + record.bytes_back for record in records[:rounds])
        curve.append({"seconds": sum(seconds[:rounds]), "samples": samples, "bytes": moved, "accuracy": accuracy})
    of_one = [record.compute_s / record.samples * (1 if app.mode == "async" else record.slots) for record in records]
    return {"rule": rule, "seed": seed, "rounds": len(records), "sample_s": of_one, "curve": curve}


def finish(runs: list[dict[str, Any]], first: str, options: argparse.Namespace) -> None:
    """Add to each point of the curves its seconds on the link, and to each run its first point that reached the target, or None."""
    quiet = json.loads(options.quiet.read_text())["runs"] if options.quiet else []
    cost = statistics.median(seconds for done in quiet or runs if done["rule"] == first for seconds in done["sample_s"])
    paces: dict[str, list[float]] = {}
    for done in quiet:
        paces.setdefault(done["rule"], []).append(done["curve"][-1]["seconds"] / done["curve"][-1]["samples"])
    if quiet and (missing := {done["rule"] for done in runs} - paces.keys()):
        raise SystemExit(
            f"{options.quiet} has no run of {', '.join(sorted(missing))}: its seconds are of all ways or of none"
        )
    for done in runs:
        for point in done["curve"]:
            point["on the link"] = point["samples"] / options.workers * cost + point["bytes"] * 8e-6 / options.link
            if quiet:
                point["seconds"] = point["samples"] * statistics.median(paces[done["rule"]])
        done["reached"] = next((point for point in done["curve"] if point["accuracy"] >= options.target), None)


def rows(runs: list[dict[str, Any]], names: list[str], options: argparse.Namespace) -> list[list[str]]:
    """Return a table: mean and deviation over the seeds that reached the target, and the ratio of seconds to the first way."""
    link = f"seconds at {options.link:g} Mbit/s"
    cells = [["way", f"reached {options.target:.0%}", "seconds", "of the first's", link, "samples", "MB", "best %"]]
    first = {run["seed"]: run["reached"] for run in runs if run["rule"] == names[0]}
    for name in names:
        own_runs = [run for run in runs if run["rule"] == name]
        reached_runs = [run for run in own_runs if run["reached"]]
        ratios = [
            run["reached"]["seconds"] / first[run["seed"]]["seconds"] for run in reached_runs if first.get(run["seed"])
        ]

        def cell(of: str, unit: float = 1.0, form: str = ".1f", runs: list[Any] = reached_runs) -> str:
            return mean_and_deviation([run["reached"][of] / unit for run in runs], form) if runs else "-"

        best = [100 * max(point["accuracy"] for point in run["curve"]) for run in own_runs if run["curve"]]
        cells.append(
            [
                name,
                f"{len(reached_runs)} of {len(own_runs)}",
                cell("seconds"),
                mean_and_deviation(ratios) if ratios else "-",
                cell("on the link"),
                cell("samples", form=",.0f"),
                cell("bytes", 1e6),
                mean_and_deviation(best, ".1f") if best else "-",
            ]
        )
    return cells


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Write accuracy over samples, bytes and seconds on the link, the mean of each way over its seeds."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, not its outlines
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 5), layout="constrained", sharey=True)
    names = list(dict.fromkeys(run["rule"] for run in runs))
    for axis, unit in zip(axes, ("samples", "bytes", "on the link"), strict=True):
        for number, name in enumerate(names):
            curves = [run["curve"] for run in runs if run["rule"] == name and run["curve"]]
            looks = min(map(len, curves), default=0)
            means = {
                key: [statistics.mean(curve[look][key] for curve in curves) for look in range(looks)]
                for key in (unit, "accuracy")
            }
            axis.plot(
                means[unit], means["accuracy"], ("-", "--", ":")[number // 10], color=f"C{number % 10}", label=name
            )
        label = "seconds on the link" if unit == "on the link" else unit
        axis.set(xlabel=label, xscale="linear" if unit == "samples" else "log")
    axes[0].set(ylabel="test accuracy")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path)


async def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure in turns what the file does not have, print the table, and return the runs."""
    names, same = options.rules, {name: getattr(options, name) for name in SAME}
    stored = {"of": same, "runs": []}
    if options.json and options.json.exists():
        stored = json.loads(options.json.read_text())
        if stored["of"] != same:
            raise SystemExit(f"{options.json} has runs of {stored['of']}, not of {same}: name another file")
    runs_of = {(done["seed"], done["rule"]): done for done in stored["runs"]}
    all_turns = list(turns(names, options.seeds))
    if missing := [turn for turn in all_turns if turn not in runs_of]:
        async with Cluster.local(options.workers) as cluster:
            for seed, rule in missing:
                try:
                    result = await run(cluster, rule, seed, options)
                except DDLFError as error:  # such as an update that is not finite: measure the other rules
                    result = {
                        "rule": rule,
                        "seed": seed,
                        "rounds": 0,
                        "sample_s": [],
                        "curve": [],
                        "failed": str(error),
                    }
                runs_of[seed, rule] = result
                print(json.dumps({**result, "sample_s": None, "curve": result["curve"][-1:]}), flush=True)
                if options.json:
                    new = options.json.with_suffix(".new")
                    new.write_text(json.dumps({"of": same, "runs": list(runs_of.values())}))
                    new.replace(options.json)
    runs = [runs_of[turn] for turn in all_turns]
    finish(runs, names[0], options)
    print(table(rows(runs, names, options)))
    if options.plot:
        plot(runs, options.plot)
    return runs


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA, default="mnist")
    parser.add_argument(
        "--rules", type=some_of(RULES), default="average,average-10,gradient", help=f"of {', '.join(RULES)}"
    )
    parser.add_argument("--target", type=float, default=0.95, help="test accuracy")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=None, help="of training; all by default")
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--test", type=int, default=None, help="samples of a test; all by default")
    parser.add_argument(
        "--link", type=float, default=100.0, help="Mbit/s of the master's link whose seconds are computed"
    )
    parser.add_argument("--looks", type=int, default=20, help="how often the weights of a run are tested")
    parser.add_argument("--plot", type=Path, default=None, help="an SVG or PNG; needs matplotlib")
    parser.add_argument("--json", type=Path, default=None, help="file for all curves; an existing file is continued")
    parser.add_argument("--quiet", type=Path, default=None, help="file of --json from a quiet machine, for the seconds")
    return parser


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))
