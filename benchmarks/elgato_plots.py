"""Draw the results of ``benchmarks.elgato`` as SVG, one file for each panel and model. It needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from benchmarks.elgato_results import WAYS, Predictions, Runs, speed_ups

STYLES = ("-", "--", ":", "-.")
"""Line styles of the batch sizes. Each way has a colour."""
Value = Callable[[int, str], float | None]


class Panels:
    """The panels of a study.

    Args:
        runs_of: The repeats of each setting.
        predictions: Predicted seconds of an epoch.
        folder: Made if it is not there.
    """

    def __init__(self, runs_of: Runs, predictions: Predictions, folder: Path) -> None:
        self._runs_of, self._predictions, self._folder = runs_of, predictions, folder

    def write(self) -> list[Path]:
        """Write all panels, and return their paths."""
        matplotlib.use("agg")  # writes files, needs no screen
        matplotlib.rcParams["svg.fonttype"] = "none"  # text, not its outlines
        self._folder.mkdir(parents=True, exist_ok=True)
        return [path for model in sorted({model for model, _, _ in self._runs_of}) for path in self._write(model)]

    def _write(self, model: str) -> list[Path]:
        runs_of = self._runs_of
        sizes = sorted({batch for name, batch, _ in runs_of if name == model})
        ways = [way for way in WAYS if any((model, batch, way) in runs_of for batch in sizes)]
        several = [way for way in ways if way not in ("fit", "one worker")]

        def seconds(batch: int, way: str) -> float | None:
            runs = runs_of.get((model, batch, way))
            return statistics.median(run.epoch_s for run in runs) if runs else None

        def predicted(batch: int, way: str) -> float | None:
            prediction = self._predictions.get((model, batch, way))
            return prediction and prediction.seconds

        def faster(batch: int, way: str) -> float | None:
            ups = speed_ups(runs_of, model, batch, way, "one worker")
            return statistics.median(ups) if ups else None

        def share(batch: int, way: str) -> float | None:
            runs = runs_of.get((model, batch, way))
            return 100 * statistics.median(run.share for run in runs) if runs else None

        paths = []
        figure, axes = _panel(model, "S, samples in a batch of a worker", "seconds of an epoch (x: predicted)")
        _lines(axes, sizes, ways, seconds, "o-")
        _lines(axes, sizes, ways, predicted, "x", named=False)
        axes.set(yscale="log", xticks=sizes)
        paths.append(self._save(figure, axes, f"{model}-seconds"))
        figure, axes = _panel(model, "S", "times as fast as one worker")
        _lines(axes, sizes, several, faster, "o-")
        axes.axhline(1.0, color="grey", linestyle="--")
        axes.set(xticks=sizes)
        paths.append(self._save(figure, axes, f"{model}-speed-up"))
        figure, axes = _panel(model, "S", "share of an epoch without training, %")
        _lines(axes, sizes, several, share, "o-")
        axes.set(xticks=sizes, ylim=(0, 100))
        paths.append(self._save(figure, axes, f"{model}-communication"))
        for per in ("epochs", "updates"):
            figure, axes = _panel(model, per, "test accuracy, %")
            self._learning(axes, model, sizes, ways, by_update=per == "updates")
            paths.append(self._save(figure, axes, f"{model}-accuracy-{per}"))
        return paths

    def _learning(self, axes: Any, model: str, sizes: Sequence[int], ways: Sequence[str], *, by_update: bool) -> None:
        for way in ways:
            for style, batch in zip(STYLES, sizes, strict=False):
                for run in self._runs_of.get((model, batch, way), ())[:1]:
                    x = [(run.updates if by_update else 1) * (number + 1) for number in range(len(run.accuracy))]
                    y = [100 * accuracy for accuracy in run.accuracy]
                    axes.plot(x, y, style, marker=".", color=_color(way), label=f"{way}, S {batch}")

    def _save(self, figure: Any, axes: Any, name: str) -> Path:
        axes.legend(fontsize="x-small")
        path = self._folder / f"{name}.svg"
        figure.savefig(path)
        pyplot.close(figure)
        return path


def _panel(model: str, x: str, y: str) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.set(xlabel=x, ylabel=y, title=model.upper())
    axes.grid(alpha=0.3)
    return figure, axes


def _color(way: str) -> str:
    return f"C{[*WAYS].index(way)}"


def _lines(
    axes: Any, sizes: Sequence[int], ways: Sequence[str], value: Value, style: str, *, named: bool = True
) -> None:
    """Draw a value over the batch sizes, for each way."""
    for way in ways:
        points = [(batch, y) for batch in sizes if (y := value(batch, way)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=_color(way), label=way if named else None)
