"""Measure what noise costs: accuracy against epsilon, and beside it what the final model tells about its samples.

    python -m benchmarks.private_accuracy [--who workers,peers] [--seeds 3] [--file private.jsonl] [--plot private.svg]
    python -m benchmarks.private_accuracy --data digits --samples 240 --workers 2 --peers 4 --rounds 1 --noises 2 --no-plain --seeds 1

``workers``: 4 private workers with ``privacy_unit='sample'``, so epsilon holds for a single sample. ``peers``: 50 Python
peers in two processes, and a server that clips their updates and noises the sum of each round, so epsilon holds for a
whole peer. Both have the same samples, model and test set. One more run of each seed has no noise.

Two tests attack the final model. Both guess that a sample was trained on if its loss is below the median, and half of
their samples were. So 50 % is a blind guess.

- **members**: training samples, beside other samples of the same kind.
- **canaries**: planted training samples with a wrong label, beside others with a wrong label that nobody has trained on.

The second line above is the short form. Each run is appended to ``--file``. Runs that the file has are not repeated, so
an interrupted study continues.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ddlf
from benchmarks.cluster_peer import Server, in_folder
from benchmarks.measure import ROOT, mean_and_deviation, some_of, table
from ddlf.data import datasets
from ddlf.training.checkpoints.releases import ReleaseAccount, Terms

CLIP = 1.0
IN_PROCESS = 25
"""Most peers of a process."""
TEXT = """
digits:input shape=[{width}];
digits:output shape=[10];
digits:layers Dense(units={hidden}, activation=relu), Dense(units=10, activation=softmax);
digits:loss SCE;
train:optimizer SGD(learning_rate={rate});
train:metrics accuracy;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run of the study. Runs with equal settings are repeats.

    Args:
        who: ``"workers"`` or ``"peers"``.
        noise: Noise multiplier; None without noise.
        seed: Seed of the samples and of the first weights.
        data: Data set.
        samples: Training samples of all members together.
        canaries: Number of these samples with a wrong label.
        members: Number of workers or peers.
        rounds: Rounds.
        epochs: Local epochs in a round.
        batch: Samples in a batch.
        rate: Learning rate of plain SGD.
        hidden: Units of the hidden layer.
    """

    who: str
    noise: float | None
    seed: int
    data: str
    samples: int
    canaries: int
    members: int
    rounds: int
    epochs: int
    batch: int
    rate: float
    hidden: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run.

    Args:
        epsilon: Largest epsilon of a sample of a worker, or of a peer; None without noise.
        accuracy: On the test set.
        members: Share of right guesses about ordinary samples.
        canaries: Share of right guesses about samples with a wrong label.
    """

    epsilon: float | None
    accuracy: float
    members: float
    canaries: float


Rows = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Inputs and labels."""


class Samples:
    """The samples of a run: the training samples, similar samples that nobody trains on, and the test set."""

    def __init__(self, of: Setting) -> None:
        (x, y), (x_test, y_test) = datasets.with_classes(of.data)
        if len(x) < 2 * of.samples:
            raise SystemExit(f"{of.data} has {len(x):,} samples, and the tests need twice the --samples {of.samples:,}")
        random = np.random.default_rng(of.seed)
        order = random.permutation(len(x))[: 2 * of.samples]
        x, y = x[order].reshape(len(order), -1), y[order]
        wrong = np.arange(len(order)) % of.samples < of.canaries
        y = np.where(wrong, (y + random.integers(1, 10, len(y))) % 10, y).astype(y.dtype)
        is_member = np.arange(len(order)) < of.samples
        self.width = x.shape[1]
        self.train: Rows = x[is_member], y[is_member]
        self.test: Rows = x_test.reshape(len(x_test), -1), y_test
        self._other_rows: Rows = x[~is_member], y[~is_member]
        self._canaries = of.canaries

    def write(self, folder: Path, members: int) -> None:
        """Write the file of each worker or peer. Each has its share of the canaries."""
        x, y = self.train
        for number in range(members):
            np.savez(folder / f"{number + 1}.npz", x_train=x[number::members], y_train=y[number::members])

    def judged(self, model: Any, epsilon: float | None) -> Result:
        """Return accuracy and right guesses of a final model."""
        (inside, _), (outside, _), (_, right) = (
            self._predicted(model, *rows) for rows in (self.train, self._other_rows, self.test)
        )
        few = self._canaries
        return Result(
            epsilon=epsilon,
            accuracy=float(np.mean(right)),
            members=right_guesses(inside[few:], outside[few:]),
            canaries=right_guesses(inside[:few], outside[:few]),
        )

    @staticmethod
    def _predicted(model: Any, x: Any, y: Any) -> tuple[Any, Any]:
        """Return the loss of each sample, and whether the model is right."""
        p = np.asarray(model.predict(x, verbose=0, batch_size=1024), np.float64)
        return -np.log(np.maximum(p[np.arange(len(y)), y], 1e-300)), p.argmax(1) == y


def right_guesses(inside: np.ndarray[Any, Any], outside: np.ndarray[Any, Any]) -> float:
    """Return the share of right guesses of a test that takes losses below the median for those of members.

    Args:
        inside: Losses of samples that the model was trained on.
        outside: Losses of equally many others.
    """
    middle = np.median(np.concatenate([inside, outside]))
    return float((np.mean(inside < middle) + np.mean(outside >= middle)) / 2)


class Owned(ddlf.IApp):
    """The model of the study on workers. Each worker reads its own file."""

    verbose, advice = False, "off"
    private = True
    folder = "."
    width, hidden, rate = 784, 32, 0.5

    async def load_dataset(self) -> None:
        """Read the file of this worker."""
        with np.load(f"{self.folder}/{self.worker.id}.npz") as arrays:
            self.x_train, self.y_train = arrays["x_train"], arrays["y_train"]

    async def create_model(self) -> None:
        """Two dense layers."""
        import keras

        layers = keras.layers.Dense(self.hidden, activation="relu"), keras.layers.Dense(10, activation="softmax")
        self.model = keras.Sequential([keras.Input((self.width,)), *layers])
        self.model.compile(keras.optimizers.SGD(self.rate), "sparse_categorical_crossentropy")


async def with_workers(of: Setting, samples: Samples, folder: Path) -> Result:
    """Train private workers that noise their steps."""
    async with ddlf.Cluster.local(of.members) as cluster:
        app = Owned(cluster)
        noised = {"update_clip": CLIP, "noise_multiplier": of.noise, "privacy_unit": "sample"}
        settings = {
            "folder": str(folder),
            "width": samples.width,
            "hidden": of.hidden,
            "rate": of.rate,
            "seed": of.seed,
            "master_epochs": of.rounds * of.epochs,
            "worker_epochs": of.epochs,
            "batch_size": of.batch,
            **({} if of.noise is None else noised),
        }
        for name, value in settings.items():
            setattr(app, name, value)
        history = await app.train_sync()
        return samples.judged(app.model, None if of.noise is None else max(history[-1].epsilons.values()))


async def with_peers(of: Setting, samples: Samples, folder: Path) -> Result:
    """Train Python peers by a server that noises the sums of their updates."""
    return await asyncio.to_thread(_with_peers, of, samples, folder)


def _with_peers(of: Setting, samples: Samples, folder: Path) -> Result:
    (folder / "model.nnm").write_text(TEXT.format(width=samples.width, hidden=of.hidden, rate=of.rate))
    updates = of.epochs * -(-of.samples // of.members // of.batch)
    ways = ["--way", "rounds", "--merge", "mean", "--quorum", of.members, "--deadline-s", 600, "--seed", of.seed]
    noised = [] if of.noise is None else ["--clip", CLIP, "--noise", of.noise, "--trust", "server"]
    server = Server(folder, *ways, *noised, "--updates", updates, "--batch-size", of.batch, peers=of.members)
    peers = [f"{link}={folder / f'{number}.npz'}" for number, link in enumerate(server.links, 1)]
    words = [sys.executable, "-m", "benchmarks.private_peers", "--updates", str(updates * of.rounds)]
    processes = -(-of.members // IN_PROCESS)
    running = [subprocess.Popen([*words, *peers[part::processes]], cwd=ROOT) for part in range(processes)]
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError("peers have failed")
    file = server.stop()
    import keras

    epsilon = None
    if of.noise is not None:
        account = ReleaseAccount.resume(file.parent, Terms(unit="peer", clip=CLIP))
        if account.accountant.releases != of.rounds:
            raise RuntimeError(f"{account.accountant.releases} releases in {of.rounds} rounds")
        epsilon = account.accountant.worst()
    return samples.judged(keras.saving.load_model(file, compile=False), epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How members train.

    Args:
        rounds: Rounds.
        epochs: Local epochs in a round.
        batch: Samples in a batch.
        rate: Learning rate of plain SGD.
    """

    rounds: int
    epochs: int
    batch: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One curve.

    Args:
        title: Its name in the table and in the picture.
        train: Trains a run.
        noises: Usual noise multipliers.
        noised: How members train with noise.
        plain: How they train without noise: longer and in small batches, as people do who want accuracy.
    """

    title: str
    train: Callable[[Setting, Samples, Path], Coroutine[Any, Any, Result]]
    noises: tuple[float, ...]
    noised: Way
    plain: Way


KINDS = {
    "workers": Kind(
        title="private workers, epsilon of a sample",
        train=with_workers,
        noises=(1.0, 2.0, 4.0, 8.0, 16.0),
        noised=Way(rounds=20, epochs=2, batch=250, rate=0.5),
        plain=Way(rounds=20, epochs=2, batch=16, rate=0.1),
    ),
    "peers": Kind(
        title="peers, epsilon of a peer",
        train=with_peers,
        noises=(0.5, 1.0, 2.0, 4.0, 8.0),
        noised=Way(rounds=20, epochs=5, batch=16, rate=0.1),
        plain=Way(rounds=40, epochs=20, batch=16, rate=0.1),
    ),
}


def settings(members_kind: str, options: argparse.Namespace) -> list[Setting]:
    """Return the runs of one curve, seed by seed."""
    kind = KINDS[members_kind]
    members = options.workers if members_kind == "workers" else options.peers
    settings = []
    for seed in range(options.seeds):
        for noise in (*options.plain * (None,), *(kind.noises if options.noises is None else options.noises)):
            way = kind.plain if noise is None else kind.noised
            settings.append(
                Setting(
                    who=members_kind,
                    noise=noise,
                    seed=seed,
                    data=options.data,
                    samples=options.samples // members * members,
                    canaries=options.samples // 20,
                    members=members,
                    rounds=options.rounds or way.rounds,
                    epochs=options.epochs or way.epochs,
                    batch=way.batch,
                    rate=way.rate,
                    hidden=options.hidden,
                )
            )
    return settings


def read(file: Path | None) -> dict[Setting, Result]:
    """Return the runs that a file has."""
    if file is None or not file.exists():
        return {}
    lines = map(json.loads, file.read_text().splitlines())
    return {Setting(**line["of"]): Result(**line["found"]) for line in lines}


async def run(of: Setting) -> Result:
    """Make one run in its own folder."""
    with in_folder() as folder:
        samples = Samples(of)
        samples.write(folder, of.members)
        return await KINDS[of.who].train(of, samples, folder)


def points(results_of: dict[Setting, Result]) -> list[tuple[str, float | None, list[Result]]]:
    """Return the results of all seeds for each curve and noise, in the order of the runs."""
    grouped: dict[tuple[str, float | None], list[Result]] = {}
    for of, result in results_of.items():
        grouped.setdefault((of.who, of.noise), []).append(result)
    return [(kind, noise, results) for (kind, noise), results in grouped.items()]


def rows(results_of: dict[Setting, Result]) -> list[list[str]]:
    """Return the rows of a table: means and deviations over the seeds."""
    table_rows = [["run", "z", "epsilon", "accuracy, %", "members, % right", "canaries, % right", "seeds"]]
    for kind, noise, results in points(results_of):
        epsilons = [result.epsilon for result in results if result.epsilon is not None]
        shares = [
            mean_and_deviation([100 * getattr(result, name) for result in results], ".1f")
            for name in ("accuracy", "members", "canaries")
        ]
        table_rows.append(
            [
                KINDS[kind].title,
                "none" if noise is None else f"{noise:g}",
                f"{statistics.fmean(epsilons):.2f}" if epsilons else "-",
                *shares,
                str(len(results)),
            ]
        )
    return table_rows


def plot(results_of: dict[Setting, Result], path: Path) -> None:
    """Draw accuracy and right guesses over epsilon: the mean and the range of the seeds."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, not its outlines
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    labels = {
        "accuracy": "accuracy on the test set, %",
        "canaries": "canaries: right guesses, %",
        "members": "other samples: right guesses, %",
    }
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        for number, kind in enumerate(KINDS):
            own_points = [(noise, results) for curve_kind, noise, results in points(results_of) if curve_kind == kind]
            curve = sorted(
                (results[0].epsilon, [100 * getattr(result, name) for result in results])
                for noise, results in own_points
                if noise
            )
            if curve:
                epsilons, values = zip(*curve, strict=True)
                means = [statistics.fmean(column) for column in values]
                spread = [[mean - min(column) for mean, column in zip(means, values, strict=True)]]
                spread += [[max(column) - mean for mean, column in zip(means, values, strict=True)]]
                axis.errorbar(epsilons, means, spread, fmt="o-", capsize=3, color=f"C{number}", label=KINDS[kind].title)
            for plain in (results for noise, results in own_points if noise is None):
                level = statistics.fmean(100 * getattr(result, name) for result in plain)
                axis.axhline(
                    level, ls="--", color=f"C{number}", label=f"{KINDS[kind].title.partition(',')[0]}, no noise"
                )
        if name != "accuracy":
            axis.axhline(50, color="grey", lw=0.8)
        axis.set(xscale="log", xlabel="epsilon at delta = 1e-5", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path)


async def main(options: argparse.Namespace) -> None:
    """Make the runs that the file lacks, and print the table."""
    earlier = read(options.file)
    results_of: dict[Setting, Result] = {}
    for of in (of for kind in options.who for of in settings(kind, options)):
        if of in earlier:
            results_of[of] = earlier[of]
            continue
        results_of[of] = await run(of)
        line = json.dumps({"of": asdict(of), "found": asdict(results_of[of])})
        print(line, flush=True)
        if options.file is not None:
            with options.file.open("a") as file:
                file.write(f"{line}\n")
    print(table(rows(results_of)))
    if options.plot is not None:
        plot(results_of, options.plot)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--who", type=some_of(KINDS), default=",".join(KINDS), help="curves")
    parser.add_argument("--data", default="mnist", help="data set: mnist or digits")
    parser.add_argument("--samples", type=int, default=4_000, help="training samples of all together")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--peers", type=int, default=50)
    parser.add_argument("--rounds", type=int, help="rounds of each run (default: of each curve)")
    parser.add_argument("--epochs", type=int, help="local epochs in a round (default: of each curve)")
    parser.add_argument("--plain", action=argparse.BooleanOptionalAction, default=True, help="also train without noise")
    parser.add_argument("--hidden", type=int, default=32, help="units of the hidden layer")
    parser.add_argument("--noises", type=_numbers, help="noise multipliers, with commas (default: five of each curve)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--file", type=Path, help="a file with a line of JSON for each run")
    parser.add_argument("--plot", type=Path, help="an SVG or PNG; needs matplotlib")
    return parser


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))
