"""Run interleaved repeats, and print their medians with spread as tables. Pure functions, except ``run_child``.

The speed of a shared machine changes from minute to minute. So the contenders take turns: each repeat runs every
contender once. The benchmark computes a ratio within each repeat, and shows the median of these ratios. Each repeat
begins with a different contender.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def turns(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """Yield ``(repeat, name)``, every name once in each repeat, the order rotated by one from repeat to repeat."""
    for repeat in range(repeats):
        first = repeat % max(1, len(names))
        for name in (*names[first:], *names[:first]):
            yield repeat, name


def some_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a type for argparse: a list of these names, with commas between them."""
    known_names = list(names)

    def read(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known_names]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose of {', '.join(known_names)}")
        return text.split(",")

    return read


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one thing.

    Args:
        median: The median of all values.
        low: The smallest value.
        high: The largest value.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, form: str = ".2f") -> str:
        """Return ``median (low-high)``, or only the median if all values are equal."""
        if f"{self.low:{form}}" == f"{self.high:{form}}":
            return f"{self.median:{form}}"
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"


def mean_and_deviation(values: Sequence[float], form: str = ".2f") -> str:
    """Return ``mean ± sample standard deviation``; for one value, only the value."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{statistics.mean(values):{form}} ± {statistics.stdev(values):{form}}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the lines of a Markdown table, padded for reading as text.

    Args:
        rows: The first one is the header. All columns but the first are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *further_cells = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in further_cells)]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|")
    return "\n".join(lines)


def run_child(module: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """Run ``python -m module arguments`` and return the JSON object of its last line.

    Returns:
        That, and as ``others_cores`` how many cores others used meanwhile on average (None where ``/proc/stat`` does not say). Figures of a run
        that was disturbed say little.

    Raises:
        RuntimeError: It failed or took too long; the text has the end of what it wrote.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # importing TensorFlow takes three times as long without bytecode
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    command = [sys.executable, "-m", module, *arguments]
    begin, busy, own_s = time.monotonic(), busy_s(), _own_s()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, cwd=ROOT, env=environment
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{module} {arguments[0]} took longer than {timeout_s:g} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        end = "\n".join([*lines, *done.stderr.splitlines()][-30:])
        raise RuntimeError(f"{module} {arguments[0]} ended with exit code {done.returncode}:\n{end}")
    result: dict[str, Any] = json.loads(lines[-1])
    others_s = None if busy is None else (busy_s() or 0.0) - busy - (_own_s() - own_s)
    return {**result, "others_cores": others_s and max(0.0, others_s) / (time.monotonic() - begin)}


def busy_s() -> float | None:
    """Return the total busy seconds of all cores since the machine started; None if the system does not report them."""
    try:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
        )
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Return the processor seconds of this process and of all its ended descendants."""
    return sum(os.times()[:4])


def machine() -> dict[str, Any]:
    """Return facts about this machine and its packages, to store with the figures."""
    cpu = platform.processor() or platform.machine()
    try:
        info = Path("/proc/cpuinfo").read_text()
        cpu = next(line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    facts = {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version()}
    for package in ("keras", "tensorflow-cpu", "tensorflow", "pyspark", "numpy"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts
