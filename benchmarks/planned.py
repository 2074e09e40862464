"""Compare what ``ddlf plan`` predicts with measured rounds.

    python -m benchmarks.planned [--settings 48] [--repeats 3] [--models mlp,lstm,cnn] [--seed 1]

The settings are drawn before the first measurement, and all are printed: model, batch, slots, mode, exchange, codec and
steps of a round. Each model is planned once. Then each setting trains for some rounds, in turns; the truth is the median
of the repeats. Bars: median error 12 %, 85 % of the settings within 25 %, 70 to 92 % of the 80 % intervals hold the
truth, and half of the intervals are narrower than +-20 %.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from apps.lstm import LSTM
from apps.mlp import MLP
from apps.mnist_cnn import MNISTCNN
from benchmarks.measure import some_of, table, turns
from ddlf import Cluster
from ddlf.extras.planner.model import Predicted, Setting, Way
from ddlf.extras.planner.planning import copy_of_app, plan
from ddlf.extras.planner.probe import Probe

SAMPLES, WORKERS = 24_000, 2
BATCHES = (32, 64, 100, 200, 500, 1000, 2000)
SECOND = (200,)
"""The second batch size that each plan measures, to predict the others."""
WAYS = (
    Way("sync", "star", "float32"),
    Way("sync", "star", "int8"),
    Way("async", "star", "float32"),
    Way("sync", "gradient", "float32"),
)


def fewer(base: type) -> type:
    """Return the app with a part of its samples, and the batch size that the probe begins with."""

    class Fewer(base):  # type: ignore[misc]
        verbose, batch_size = False, 100

        async def load_dataset(self) -> None:
            await super().load_dataset()
            self.x_train, self.y_train = self.x_train[:SAMPLES], self.y_train[:SAMPLES]

    return Fewer


MODELS = {"mlp": fewer(MLP), "lstm": fewer(LSTM), "cnn": fewer(MNISTCNN)}


def drawn(count: int, models: Sequence[str], seed: int) -> list[tuple[str, Setting]]:
    """Return settings of all models in turn, drawn by a seed."""
    chance, drawn_settings = random.Random(seed), list[tuple[str, Setting]]()
    while len(drawn_settings) < count:
        way, batch, slots = chance.choice(WAYS), chance.choice(BATCHES), chance.randint(1, WORKERS)
        longest = SAMPLES // (slots * batch)
        steps = 1 if way.is_one_step else chance.choice((min(longest, chance.randint(2, 10)), longest))
        candidate = models[len(drawn_settings) % len(models)], Setting(way=way, slots=slots, batch=batch, steps=steps)
        if longest >= 1 and candidate not in drawn_settings:
            drawn_settings.append(candidate)
    return drawn_settings


async def measure(
    name: str, settings: Sequence[Setting], repeats: int, budget_s: float
) -> list[tuple[Predicted, float]]:
    """Return the prediction and the truth of each setting of one model."""
    async with Cluster.local(WORKERS) as cluster:
        app = MODELS[name](cluster)
        result = await plan(app, budget_s, SECOND, lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True))
        print(f"{name}: planned in {result.spent_s:.1f} s", file=sys.stderr, flush=True)
        probe, truth = Probe(copy_of_app(app)), dict[Setting, list[float]]()
        probe.samples = SAMPLES
        for _, number in turns([str(index) for index in range(len(settings))], repeats):
            setting = settings[int(number)]
            measured = await probe.rounds(setting)
            assert measured is not None
            truth.setdefault(setting, []).append(measured.median)
    return [(result.model.predict(setting), statistics.median(truth[setting])) for setting in settings]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", type=some_of(MODELS), default=list(MODELS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=60.0)
    options = parser.parse_args(argv)
    settings = drawn(options.settings, options.models, options.seed)
    rows: list[list[str]] = [
        ["model", "way", "codec", "batch", "slots", "steps", "predicted (ms)", "80 %", "measured", "error"]
    ]
    errors, inside, narrow = list[float](), 0, 0
    for name in options.models:
        of_model = [setting for model, setting in settings if model == name]
        for setting, (predicted, truth) in zip(
            of_model, asyncio.run(measure(name, of_model, options.repeats, options.budget)), strict=True
        ):
            error = predicted.seconds / truth - 1.0
            errors.append(abs(error))
            inside += predicted.low <= truth <= predicted.high
            narrow += predicted.high <= 1.2 * predicted.seconds
            cells: list[Any] = [
                name,
                setting.way,
                setting.way.codec,
                setting.batch,
                setting.slots,
                f"{setting.steps:g}",
            ]
            interval = f"{predicted.low * 1e3:.1f}-{predicted.high * 1e3:.1f}"
            cells += [f"{predicted.seconds * 1e3:.1f}", interval, f"{truth * 1e3:.1f}", f"{error:+.0%}"]
            rows.append([str(cell) for cell in cells])
    count = len(errors)
    print(table(rows))
    print(
        f"\n{count} settings: median error {statistics.median(errors):.0%}, "
        f"{sum(error <= 0.25 for error in errors) / count:.0%} within 25 %, "
        f"{inside / count:.0%} in their interval, {narrow / count:.0%} of the intervals narrower than +-20 %"
    )


if __name__ == "__main__":
    main()
