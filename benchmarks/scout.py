"""Compare the learning rates of ``ddlf scout`` with the best of a grid of full runs, or measure its speed.

    python -m benchmarks.scout [--long] [--models digits] [--optimizers sgd,momentum,adam] [--splits 2] [--kept FILE]
    python -m benchmarks.scout --speed [--models digits,cnn] [--repeats 3]

A case is a model, an optimizer and a split of the data. The truth is the test accuracy of full runs: the mean of two
seeds, at each rate of a grid and at each rate that a method chooses. A rate of the grid that is far below the best one with
the first seed has no second run, because it cannot be the best. Beside the scout are two rules of a range test, in
which the rate rises from step to step: its steepest point, and a tenth of its minimum. The bar: within 1 point of the best
rate of the grid in 22 of 24 cases, and never more than 3 points below. The short form has the digits only.

With ``--speed``, searches on one worker, searches on two, and full runs on two take turns. Each worker has one thread. The
bar: two workers search 1.7 times as fast as one, and a search takes at most 60 s or 15 % of the run. All searches of a
model must give the same bits; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from apps.digits_cnn import DigitsCNN
from apps.lstm import LSTM
from apps.mlp import MLP
from apps.mnist_cnn import MNISTCNN
from benchmarks.measure import Spread, some_of, table, turns
from ddlf import Cluster
from ddlf.extras.scout.scouting import scout

RATES = [float(f"{10 ** (power / 2):.2g}") for power in range(-10, 2)]
"""The grid: 12 rates from 1e-5 to 3.2."""
SEEDS = (0, 1)
SAMPLES = 12_000
"""Training samples of MNIST."""
WITHIN, NEVER_BELOW = 0.01, 0.03
FAR_BELOW = 0.05
"""A rate is not tried with the second seed if its accuracy with the first one is this much below the best."""
OPTIMIZERS = ("sgd", "momentum", "adam")
SWEEP, SWEEP_STEPS, SMOOTH = (1e-6, 10.0), 100, 0.9
"""The range test: its rates, its steps, and the share of the earlier loss in the smoothed one."""
SKIPPED = (10, 5)
"""Steps at both ends of a range test without a slope, like in fastai."""


def optimizer(kind: str, rate: float) -> Any:
    """Return an optimizer of Keras."""
    import keras

    match kind:
        case "sgd":
            return keras.optimizers.SGD(rate)
        case "momentum":
            return keras.optimizers.SGD(rate, momentum=0.9)
        case _:
            return keras.optimizers.Adam(rate)


def case(base: type, epochs: int, batch: int) -> type:
    """Return an app with a split of its data and an optimizer by name."""

    class Case(base):  # type: ignore[misc]
        verbose = False
        master_epochs, worker_epochs, batch_size = epochs, 1, batch
        kind, number, learning_rate = "sgd", 0, 0.01

        async def load_dataset(self) -> None:
            await super().load_dataset()
            x, y = (np.concatenate([getattr(self, f"{part}_train"), getattr(self, f"{part}_test")]) for part in "xy")
            order = np.random.default_rng(self.number).permutation(len(x))
            train, test = (SAMPLES, 5_000) if len(x) > 2 * SAMPLES else (len(x) * 4 // 5, len(x) // 5)
            for name, rows in (("train", order[:train]), ("test", order[train : train + test])):
                setattr(self, f"x_{name}", x[rows])
                setattr(self, f"y_{name}", y[rows])

        async def create_model(self) -> None:
            await super().create_model()
            self.model.compile(optimizer(self.kind, self.learning_rate), self.model.loss, metrics=["accuracy"])

    return Case


MODELS = {
    "digits": case(DigitsCNN, 12, 16),
    "mlp": case(MLP, 5, 64),
    "lstm": case(LSTM, 5, 64),
    "cnn": case(MNISTCNN, 5, 64),
}


async def _prepared(name: str, kind: str, split: int, rate: float, seed: int) -> Any:
    import keras

    app = MODELS[name](None)
    app.kind, app.number, app.learning_rate = kind, split, rate
    await app.load_dataset()
    keras.utils.set_random_seed(seed)
    await app.create_model()
    return app


async def trained(name: str, kind: str, split: int, rate: float, seed: int) -> float:
    """Return the test accuracy of a full run of plain Keras."""
    app = await _prepared(name, kind, split, rate, seed)
    app.model.fit(app.x_train, app.y_train, app.batch_size, app.master_epochs, verbose=0)
    return float(app.model.evaluate(app.x_test, app.y_test, 512, verbose=0, return_dict=True)["accuracy"])


async def swept(name: str, kind: str, split: int) -> tuple[float, float]:
    """Return the rates of two rules for a range test: the steepest point, and a tenth of the minimum."""
    app = await _prepared(name, kind, split, SWEEP[0], 0)
    order = np.random.default_rng(0).permutation(len(app.x_train))
    rates = np.geomspace(*SWEEP, SWEEP_STEPS)
    losses, mean = [], 0.0
    for step, rate in enumerate(rates):
        rows = order[np.arange(step * app.batch_size, (step + 1) * app.batch_size) % len(order)]
        app.model.optimizer.learning_rate = rate
        app.model.reset_metrics()
        loss = float(app.model.train_on_batch(app.x_train[rows], app.y_train[rows], return_dict=True)["loss"])
        mean = SMOOTH * mean + (1 - SMOOTH) * loss
        losses.append(mean / (1 - SMOOTH ** (step + 1)))
        if not math.isfinite(loss) or losses[-1] > 4 * min(losses):
            break
    losses = [loss for loss in losses if math.isfinite(loss)]
    first, last = SKIPPED
    slopes = np.gradient(losses)[first : len(losses) - last]
    return float(rates[first + int(np.argmin(slopes))]), float(rates[int(np.argmin(losses))]) / 10


CONTENDERS = ("one worker", "two workers", "run")
"""Searches, and full runs on two workers, which ``--speed`` measures in turns."""


@dataclass(frozen=True, slots=True)
class Timed:
    """The seconds of the searches and runs of one model, by repeat.

    Args:
        trials: Seconds of the trials of a search, by contender.
        whole: Seconds of the whole search with its start, or of the whole run, by contender.
        scores: The distinct results of all searches. There should be only one.
    """

    trials: dict[str, list[float]]
    whole: dict[str, list[float]]
    scores: set[str]


async def timed(name: str, repeats: int) -> Timed:
    """Return the seconds of searches and runs that take turns on the same two workers."""
    result = Timed(
        {contender_name: [] for contender_name in CONTENDERS},
        {contender_name: [] for contender_name in CONTENDERS},
        set(),
    )
    async with Cluster.local(2) as cluster:
        await cluster.map(abs, [1, 2])  # the processes of the workers have begun
        for repeat, contender in turns(CONTENDERS, repeats):
            app = MODELS[name](cluster.options(workers=[1]) if contender == "one worker" else cluster)
            app.threads = 1
            begin = time.perf_counter()
            if contender == "run":
                await app.train_model()
            else:
                facts = (await scout(app, say=lambda text: None)).to_data()
                result.trials[contender].append(facts.pop("seconds"))
                result.scores.add(json.dumps(facts, sort_keys=True))
            result.whole[contender].append(time.perf_counter() - begin)
            print(f"{name} {repeat + 1}: {contender} {result.whole[contender][-1]:.1f} s", file=sys.stderr, flush=True)
    return result


def speed_rows(timed_models: dict[str, Timed]) -> list[list[str]]:
    """Return the table of the speeds of all models. The ratios are from the same repeats."""
    rows = [
        ["model", "trials on one, s", "on two, s", "ratio", "search on two, s", "run on two, s", "share", "same bits"]
    ]
    for name, timed_model in timed_models.items():
        first, second, _ = (timed_model.trials[contender] for contender in CONTENDERS)
        _, search, run = (timed_model.whole[contender] for contender in CONTENDERS)
        ratios = [alone / both for alone, both in zip(first, second, strict=True)]
        shares = [some / whole for some, whole in zip(search, run, strict=True)]
        times = [Spread.of(seconds).text(".1f") for seconds in (first, second, search, run)]
        same = "yes" if len(timed_model.scores) == 1 else "no"
        rows.append([name, *times[:2], Spread.of(ratios).text(), *times[2:], Spread.of(shares).text(".0%"), same])
    return rows


async def measure(name: str, kind: str, split: int, workers: int, earlier: dict[str, float]) -> dict[str, Any]:
    """Return the rates of all methods for a case, and the accuracies of full runs by rate. Known ones are not measured."""
    async with Cluster.local(workers) as cluster:
        app = MODELS[name](cluster)
        app.kind, app.number = kind, split
        report = await scout(app, say=lambda text: None)
        steepest, tenth = (await cluster.map(swept, [name], [kind], [split]))[0]
        chosen = {
            "scout": report.verdict.rate,
            "smallest loss": report.verdict.best,
            "steepest": steepest,
            "minimum / 10": tenth,
        }
        rates = [rate for rate in sorted({*RATES, *chosen.values()}) if str(rate) not in earlier]
        scores = dict[float, list[float]]()
        for seed in SEEDS:
            best = max((scores_of_rate[0] for scores_of_rate in scores.values()), default=0.0)
            again = [
                rate
                for rate in rates
                if seed == SEEDS[0] or rate in chosen.values() or scores[rate][0] > best - FAR_BELOW
            ]
            arguments = [(name, kind, split, rate, seed) for rate in again]
            for rate, score in zip(again, await cluster.starmap(trained, arguments) if arguments else [], strict=True):
                scores.setdefault(rate, []).append(score)
    return {
        "case": [name, kind, split],
        "chosen": chosen,
        "accuracy": earlier | {str(rate): float(np.mean(some)) for rate, some in scores.items()},
        "scouted": report.to_data(),
    }


def rows_of(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the table of all cases, with the points that each method loses."""
    methods = list(results[0]["chosen"])
    rows = [["model", "optimizer", "split", "best rate", "accuracy", *methods, "seconds"]]
    for result in results:
        best = max(RATES, key=lambda rate: result["accuracy"][str(rate)])
        top = result["accuracy"][str(best)]
        cells = [*map(str, result["case"]), f"{best:g}", f"{top:.1%}"]
        for method in methods:
            rate = result["chosen"][method]
            cells.append(f"{rate:.2g} ({100 * (result['accuracy'][str(rate)] - top):+.1f})")
        rows.append([*cells, f"{result['scouted']['seconds']:.0f}"])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="also the models on MNIST, for hours")
    parser.add_argument("--models", type=some_of(MODELS), default=None)
    parser.add_argument("--optimizers", type=some_of({name: name for name in OPTIMIZERS}), default=list(OPTIMIZERS))
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--kept", type=Path, help="JSON file with all losses and accuracies; accuracies in it are not measured again"
    )
    parser.add_argument("--speed", action="store_true", help="measure the seconds of searches instead")
    parser.add_argument("--repeats", type=int, default=3, help="of --speed")
    options = parser.parse_args(argv)
    if options.speed:
        speeds = {name: asyncio.run(timed(name, options.repeats)) for name in options.models or ("digits", "cnn")}
        print(table(speed_rows(speeds)))
        sys.exit(any(len(timed_model.scores) > 1 for timed_model in speeds.values()))
    earlier = json.loads(options.kept.read_text()) if options.kept and options.kept.exists() else []
    earlier_accuracy = {tuple(result["case"]): result["accuracy"] for result in earlier}
    results = []
    for name in options.models or (list(MODELS) if options.long else ["digits"]):
        for kind in options.optimizers:
            for split in range(options.splits):
                case_known = earlier_accuracy.get((name, kind, split), {})
                results.append(asyncio.run(measure(name, kind, split, options.workers, case_known)))
                print(table(rows_of(results[-1:])), file=sys.stderr, flush=True)
                if options.kept:
                    done = [result["case"] for result in results]
                    options.kept.write_text(
                        json.dumps([*results, *(result for result in earlier if result["case"] not in done)])
                    )
    print(table(rows_of(results)))
    for method in results[0]["chosen"]:
        lost = [
            max(result["accuracy"][str(rate)] for rate in RATES) - result["accuracy"][str(result["chosen"][method])]
            for result in results
        ]
        close = sum(points <= WITHIN for points in lost)
        print(f"{method}: {close} of {len(lost)} within 1 point, at most {100 * max(lost):.1f} below")


if __name__ == "__main__":
    main()
