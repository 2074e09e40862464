"""Draw the results of ``benchmarks.training`` as PNG: time to accuracy, and speed-up over workers.

It needs matplotlib: ``pip install ddlf[bench]``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    raise SystemExit("--plots needs matplotlib: pip install 'ddlf[bench]'") from None

matplotlib.use("agg")  # writes files, needs no screen
from matplotlib import pyplot


def write(runs: Sequence[dict[str, Any]], folder: Path, ours: str, single: str, workers: int) -> list[Path]:
    """Write the figures and return their paths.

    Args:
        runs: As ``benchmarks.training.run_all`` returns them.
        folder: Made if it is not there.
        ours: Contender with all workers.
        single: The same with one worker.
        workers: How many ``ours`` has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [time_to_accuracy(runs, folder / "time-to-accuracy.png")]
    if {ours, single} <= {run["name"] for run in runs}:
        paths.append(speed_up(runs, folder / "speed-up.png", ours, single, workers))
    return paths


def time_to_accuracy(runs: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw a line for each run, from the time at which its processes were ready. Each contender has a colour."""
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    names = list(dict.fromkeys(run["name"] for run in runs if run["curve"]))
    for number, name in enumerate(names):
        for run in runs:
            if run["name"] == name:
                seconds, accuracy = zip(*run["curve"], strict=True)
                label = name if run["repeat"] == 0 else None
                axes.plot(seconds, [100 * a for a in accuracy], "o-", color=f"C{number}", label=label, alpha=0.8)
    axes.set(xlabel="seconds since all processes were ready", ylabel="accuracy on the test data, %")
    axes.grid(alpha=0.3)
    axes.legend()
    return _save(figure, path)


def speed_up(runs: Sequence[dict[str, Any]], path: Path, ours: str, single: str, workers: int) -> Path:
    """Draw the median time of one worker with one thread, divided by the time of several workers, and the ideal speed-up."""
    single_s, ours_s = (
        statistics.median(run["seconds"] for run in runs if run["name"] == name) for name in (single, ours)
    )
    figure, axes = pyplot.subplots(figsize=(5, 4), layout="constrained")
    axes.plot([1, workers], [1, workers], "--", color="grey", label="ideal")
    axes.plot([1, workers], [1, single_s / ours_s], "o-", label=f"DDLF: {single_s / ours_s:.2f} with {workers} workers")
    axes.set(xlabel="workers, one thread each", ylabel="speed-up", xticks=range(1, workers + 1), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
