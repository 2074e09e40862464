"""The results of ``benchmarks.elgato``: the runs of each setting, their file, their table, and the claims of the study."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.measure import Spread, machine
from ddlf.extras.planner.model import Predicted, Way

WORKERS = 2
STAR, ASYNC, GRADIENT = (
    Way("sync", "star", "float32"),
    Way("async", "star", "float32"),
    Way("sync", "gradient", "float32"),
)
WAYS: dict[str, tuple[Way, int]] = {
    "fit": (STAR, 0),
    "one worker": (STAR, 1),
    "towers": (GRADIENT, WORKERS),
    "two sync": (STAR, WORKERS),
    "two async": (ASYNC, WORKERS),
}
"""Each way, and its number of workers; 0 is Keras alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training.

    Args:
        model: A name in ``MODELS`` of ``benchmarks.elgato``.
        way: A name in ``WAYS``.
        batch: S, the batch of each worker.
        repeat: Number of the repeat, and seed.
        seconds: Seconds of each epoch.
        accuracy: Test accuracy after each epoch.
        updates: Updates of the weights in an epoch, of one worker.
        computing: Seconds of an epoch in which a worker trains, after the first epoch; None if unknown.
    """

    model: str
    way: str
    batch: int
    repeat: int
    seconds: list[float]
    accuracy: list[float]
    updates: int
    computing: float | None

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch, without the first one, in which Keras compiles."""
        return statistics.median(self.seconds[1:])

    @property
    def share(self) -> float:
        """The share of an epoch in which workers do not train."""
        return 0.0 if self.computing is None else max(0.0, 1.0 - self.computing / statistics.fmean(self.seconds[1:]))


Runs = dict[tuple[str, int, str], list[Run]]
"""The repeats of each model, batch and way."""
Predictions = dict[tuple[str, int, str], Predicted]


def by_setting(runs: Sequence[Run]) -> Runs:
    """Return the repeats of each setting, in the order of the repeats."""
    runs_of: Runs = {}
    for run in sorted(runs, key=lambda run: run.repeat):
        runs_of.setdefault((run.model, run.batch, run.way), []).append(run)
    return runs_of


def speed_ups(runs_of: Runs, model: str, batch: int, way: str, base: str) -> list[float]:
    """Return how many times as fast a way is as another one, in each repeat that has both."""
    base_seconds = {run.repeat: run.epoch_s for run in runs_of.get((model, batch, base), ())}
    return [
        base_seconds[run.repeat] / run.epoch_s
        for run in runs_of.get((model, batch, way), ())
        if run.repeat in base_seconds
    ]


def rows(runs_of: Runs, predictions: Predictions) -> list[list[str]]:
    """Return the table."""
    head = ["model", "S", "way", "s/epoch", "predicted", "80 %", "error", "of one worker", "of fit", "not training"]
    shown = [[*head, "updates", "accuracy %"]]
    for (model, batch, way), runs in runs_of.items():
        seconds = Spread.of([run.epoch_s for run in runs])
        prediction = predictions.get((model, batch, way))
        cells = ["-", "-", "-"]
        if prediction is not None:
            error = prediction.seconds / seconds.median - 1.0
            cells = [
                f"{prediction.seconds:.2f}",
                f"{prediction.low:.2f}-{prediction.high:.2f}",
                f"{error:+.0%}",
            ]
        for base in ("one worker", "fit"):
            ups = speed_ups(runs_of, model, batch, way, base)
            cells.append(Spread.of(ups).text() if ups else "-")
        accuracy = 100 * statistics.median(run.accuracy[-1] for run in runs)
        share = "-" if runs[0].computing is None else f"{100 * statistics.median(run.share for run in runs):.0f} %"
        shown.append([model, str(batch), way, seconds.text(), *cells, share, str(runs[0].updates), f"{accuracy:.1f}"])
    return shown


def bars(runs_of: Runs) -> list[tuple[str, bool]]:
    """Return what the study says about towers, and whether these runs show it. Settings without runs are left out."""

    def up(model: str, batch: int) -> float | None:
        ups = speed_ups(runs_of, model, batch, "towers", "one worker")
        return statistics.median(ups) if ups else None

    def share(model: str, batch: int) -> float | None:
        runs = runs_of.get((model, batch, "towers"))
        return statistics.median(run.share for run in runs) if runs else None

    statements = list[tuple[str, bool]]()
    for batch in sorted({batch for _, batch, _ in runs_of}):
        if (mlp := up("mlp", batch)) is not None:
            statements.append((f"MLP, S {batch}: towers are slower than one worker: {mlp:.2f}x", mlp < 1.0))
        least = {100: 1.1, 500: 1.4}.get(batch)
        if least is not None and (lstm := up("lstm", batch)) is not None:
            statements.append(
                (f"LSTM, S {batch}: towers are {least} times as fast as one worker: {lstm:.2f}x", lstm > least)
            )
        shares = share("mlp", batch), share("lstm", batch)
        if shares[0] is not None and shares[1] is not None:
            text = f"S {batch}: communication takes a smaller share of the LSTM: {shares[1]:.0%} of {shares[0]:.0%}"
            statements.append((text, shares[1] < shares[0]))
    for model in sorted({model for model, _, _ in runs_of}):
        of_batches = [
            value for batch in sorted({b for _, b, _ in runs_of}) if (value := share(model, batch)) is not None
        ]
        if len(of_batches) > 1:
            falls = all(later < before for before, later in pairwise(of_batches))
            text = " ".join(f"{value:.0%}" for value in of_batches)
            statements.append((f"{model.upper()}: the share of communication falls with the batch: {text}", falls))
    return statements


def read(path: Path | None) -> tuple[list[Run], Predictions]:
    """Return the runs and the predictions in a file; none without one."""
    if path is None or not path.exists():
        return [], {}
    stored = json.loads(path.read_text())
    runs = [Run(**fields) for fields in stored["runs"]]
    return runs, {(model, batch, way): Predicted(**fields) for model, batch, way, fields in stored["plans"]}


def write(path: Path | None, runs: Sequence[Run], predictions: Predictions) -> None:
    """Write runs and predictions to a file, if there is one. It is complete at each moment."""
    if path is None:
        return
    plans = [[*key, asdict(value)] for key, value in predictions.items()]
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"runs": [asdict(run) for run in runs], "plans": plans, "machine": machine()}))
    new.replace(path)
