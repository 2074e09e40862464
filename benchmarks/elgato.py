"""Repeat a study of an MLP and an LSTM on one and two processors, with the plan's prediction beside each measurement.

    python -m benchmarks.elgato [--short] [--models mlp,lstm] [--batches 100,500,1000,2000] [--epochs 3] [--repeats 3]
                                [--plots DIR] [--json FILE]
    python -m benchmarks.elgato_links   # the same models on links of 10, 100 and 1000 Mbit/s, 1 to 16 workers

The models are ``apps/mlp.py`` and ``apps/lstm.py``, trained by plain gradient descent on 50,000 images of MNIST. Each
process computes on one thread. The ways take turns: ``fit`` without DDLF, one worker, two towers
(``exchange="gradient"``: one batch a worker, one exchange a step), and two workers that exchange weights once an epoch,
synchronously and asynchronously. S is the batch of each worker, so N towers make V / (N S) updates of V samples.

Seconds are those of an epoch after the first one, in which Keras compiles. The share of communication is the part of
these seconds in which workers do not train. Each model is planned once, before all its runs. The benchmark prints an
estimate of its time after the plans: probably 50 minutes on two idle cores, and a few with ``--short``. It
writes the file of ``--json`` after each run, and does not repeat the runs that the file has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from apps.lstm import LSTM
from apps.mlp import MLP
from benchmarks.elgato_results import (
    WAYS,
    WORKERS,
    Predictions,
    Run,
    bars,
    by_setting,
    read,
    rows,
    write,
)
from benchmarks.measure import machine, run_child, some_of, table, turns
from benchmarks.workload import SINGLE_THREADED, batches
from ddlf import Cluster
from ddlf.errors import ConfigError
from ddlf.events import Committed, Event, TrainingBegan
from ddlf.extras.planner.choice import epoch, epoch_of_fit
from ddlf.extras.planner.model import Predicted, Setting
from ddlf.extras.planner.planning import plan
from ddlf.extras.planner.result import Plan

SAMPLES, BATCHES = 50_000, (100, 500, 1000, 2000)


def studied(base: type, samples: int, seed: int) -> type:
    """Return an app with the first samples of its data, and first weights by a seed."""

    class Studied(base):  # type: ignore[misc]
        verbose = False

        async def load_dataset(self) -> None:
            await super().load_dataset()
            self.x_train, self.y_train = self.x_train[:samples], self.y_train[:samples]

        async def create_model(self) -> None:
            import keras

            keras.utils.set_random_seed(seed)
            await super().create_model()

    return Studied


MODELS: dict[str, type] = {"mlp": MLP, "lstm": LSTM}


def updates(samples: int, workers: int, batch: int) -> int:
    """Return how often the weights change in an epoch: V / (N S)."""
    return -(-samples // (max(workers, 1) * batch))


@dataclass(slots=True)
class Epochs:
    """Receives the events of a run, and records time and weights at the end of each epoch.

    Args:
        app: The app.
    """

    app: Any
    ends: list[float]
    weights: list[Any]
    samples: int = 0
    done: int = 0
    computing: float = 0.0

    def hear(self, event: Event) -> None:
        """Receive an event of the run."""
        if isinstance(event, TrainingBegan):
            self.samples = event.samples
            self.ends.append(time.perf_counter())
        elif isinstance(event, Committed):
            record = event.record
            if len(self.weights) >= 1:  # the first epoch compiles
                self.computing += record.compute_s / (1 if record.slot is None else WORKERS)
            self.done += record.samples * record.epochs
            if self.done >= self.samples * (len(self.weights) + 1):
                self.ends.append(time.perf_counter())
                self.weights.append(self.app.model.get_weights())


async def train(
    cluster: Cluster, model: str, way: str, batch: int, repeat: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Train on workers, and return seconds and accuracy of each epoch, and the seconds of computing."""
    how, slots = WAYS[way]
    app = studied(MODELS[model], options.samples, repeat)(cluster)
    app.mode, app.exchange, app.codec, app.slots = how.mode, how.exchange, how.codec, slots
    app.batch_size, app.master_epochs, app.seed = batch, options.epochs, repeat
    heard = Epochs(app, [], [])
    app.subscribe(heard.hear)
    await app.train_model()
    return {
        "seconds": [end - begin for begin, end in pairwise(heard.ends)],
        "accuracy": list(accuracies(app, heard.weights)),
        "computing": heard.computing / (options.epochs - 1),
    }


def accuracies(app: Any, weights: Sequence[Any]) -> Iterator[float]:
    """Yield the test accuracy of an app's model with each of these weights."""
    for arrays in weights:
        app.model.set_weights(arrays)
        metrics = app.model.evaluate(app.x_test, app.y_test, batch_size=1000, verbose=0, return_dict=True)
        yield float(metrics["accuracy"])


def fit(model: str, batch: int, repeat: int, samples: int, epochs: int) -> None:
    """Train with ``fit`` alone, in this process on one thread, and print the same as ``train`` returns."""
    os.environ.update(SINGLE_THREADED)
    app: Any = studied(MODELS[model], samples, repeat)()
    asyncio.run(app.load_dataset())
    asyncio.run(app.create_model())
    import keras

    ends, weights = list[float](), list[Any]()

    class Note(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            ends.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ends.append(time.perf_counter())
            weights.append(self.model.get_weights())

    data = batches(app.x_train, app.y_train, batch, shuffle_seed=repeat)
    app.model.fit(data, shuffle=False, epochs=epochs, verbose=0, callbacks=[Note()])
    seconds = [end - begin for begin, end in pairwise(ends)]
    print(json.dumps({"seconds": seconds, "accuracy": list(accuracies(app, weights)), "computing": None}))


def predicted(result: Plan, way: str, batch: int) -> Predicted:
    """Return what a plan predicts for an epoch."""
    how, slots = WAYS[way]
    if not slots:
        return epoch_of_fit(result.model, batch, result.samples, how)
    steps = 1.0 if how.is_one_step else result.samples / (slots * batch)
    return epoch(result.model, Setting(way=how, slots=slots, batch=batch, steps=steps), result.samples)


# -- the command ----------------------------------------------------------------------------------------------------------


async def plans_of(cluster: Cluster, model: str, options: argparse.Namespace) -> Predictions:
    """Plan one model, and return the predictions for all its batches and ways; none if the measurements were too few."""
    app = studied(MODELS[model], options.samples, 0)(cluster)
    app.batch_size = options.batches[0]
    further_batches = options.batches[1:][-1:]  # the planner is to predict those between
    try:
        result = await plan(
            app, options.budget, further_batches, lambda text: print(f"{model}: {text}", flush=True), again=True
        )
    except ConfigError as error:  # a busy machine: the measurements are worth more than their predictions
        print(f"{model}: no predictions: {error}", flush=True)
        return {}
    return {
        (model, batch, way): predicted(result, way, batch)
        for batch in options.batches
        for way in options.ways
        if WAYS[way][0] in result.model.ways
    }


async def run_of(cluster: Cluster, model: str, way: str, batch: int, repeat: int, options: argparse.Namespace) -> Run:
    """Train once."""
    facts = dict(model=model, batch=batch, repeat=repeat)
    workers = WAYS[way][1]
    if workers:
        measured = await train(cluster, way=way, options=options, **facts)
    else:
        words = json.dumps({**facts, "samples": options.samples, "epochs": options.epochs})
        measured = await asyncio.to_thread(run_child, "benchmarks.elgato", "--fit", words, timeout_s=3600)
        measured.pop("others_cores")
    return Run(way=way, updates=updates(options.samples, workers, batch), **facts, **measured)


async def study(options: argparse.Namespace) -> tuple[list[Run], Predictions]:
    """Plan each model, then run all ways in turns."""
    runs, predictions = read(options.json)
    planned = {model for model, _, _ in predictions}
    done = {(run.model, run.batch, run.way, run.repeat) for run in runs}
    names = [f"{way}/{batch}" for batch in options.batches for way in options.ways]
    async with Cluster.local(WORKERS, threads=1) as cluster:
        for model in options.models:
            if model not in planned:
                predictions |= await plans_of(cluster, model, options)
        print(f"the runs with a prediction take about {estimate(options, predictions, done) / 60:.0f} min", flush=True)
        for repeat, name in turns(names, options.repeats):
            way, _, size = name.partition("/")
            for model in options.models:
                if (model, int(size), way, repeat) in done:
                    continue
                run = await run_of(cluster, model, way, int(size), repeat, options)
                runs.append(run)
                write(options.json, runs, predictions)
                print(
                    f"{model} S {size} {way}, repeat {repeat + 1}: {run.epoch_s:.2f} s an epoch, "
                    f"accuracy {100 * run.accuracy[-1]:.1f} %",
                    flush=True,
                )
    return runs, predictions


START_S = 6.0
"""Approximate time of a run without its epochs. In this time, Keras compiles and tests the weights."""


def estimate(options: argparse.Namespace, predictions: Predictions, done: set[tuple[str, int, str, int]]) -> float:
    """Return about how many seconds the runs take that are not done."""
    seconds = 0.0
    for (model, batch, way), prediction in predictions.items():
        left = sum((model, batch, way, repeat) not in done for repeat in range(options.repeats))
        seconds += left * (START_S + options.epochs * prediction.seconds)
    return seconds


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="6,000 samples, 2 batch sizes, 2 epochs, 1 repeat")
    parser.add_argument("--models", type=some_of(MODELS), default=list(MODELS))
    parser.add_argument("--ways", type=some_of(WAYS), default=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=lambda text: [int(number) for number in text.split(",")])
    parser.add_argument("--samples", type=int)
    parser.add_argument("--epochs", type=int, help="2 or more; the first one compiles (default: 3)")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--budget", type=float, help="seconds of a plan (default: 120)")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write an SVG for each panel; needs matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all runs; continues from it")
    parser.add_argument("--fit", type=json.loads, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = arguments()
    options = parser.parse_args(argv)
    if options.fit is not None:
        fit(**options.fit)
        return
    options.batches = options.batches or ([100, 500] if options.short else list(BATCHES))
    options.samples = options.samples or (6_000 if options.short else SAMPLES)
    options.epochs = options.epochs or (2 if options.short else 3)
    options.repeats = options.repeats or (1 if options.short else 3)
    options.budget = options.budget or (30.0 if options.short else 120.0)
    if options.epochs < 2:
        parser.error("--epochs must be 2 or more: the first epoch compiles, and does not count")
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    runs, predictions = asyncio.run(study(options))
    runs_of = by_setting(runs)
    print(table(rows(runs_of, predictions)))
    for text, holds in bars(runs_of):
        print(f"{'as the study' if holds else 'NOT as the study'}: {text}")
    if options.plots:
        from benchmarks.elgato_plots import Panels  # needs matplotlib

        for path in Panels(runs_of, predictions, options.plots).write():
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
