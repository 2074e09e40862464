"""The records of a training like Keras's history: a dict of lists, a table, curves. Runs on the master."""

from __future__ import annotations

import csv
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any, SupportsIndex, overload

from ddlf.errors import ConfigError
from ddlf.events.record import RoundRecord

COLUMNS = (
    *("round", "version", "slot", "staleness", "epochs", "samples", "slots", "recomputed"),
    *("seconds", "compute_s", "transfer_s", "merge_s", "wait_s", "bytes_out", "bytes_back", "error"),
)
"""Columns of a table of records, before the metrics."""
SHOWN = 10
"""Number of rounds that a notebook shows: the first and the last half of it."""


class History(list[RoundRecord]):
    """The records of a training, in the order of their merges. A list with the attributes of Keras's ``History``."""

    @property
    def history(self) -> dict[str, list[float]]:
        """A list for each metric with one entry for each record, like Keras's ``History.history``.

        Metrics of validation data begin with ``val_``, metrics of test data with ``test_``. An entry is NaN if its
        record lacks the metric, for example between two tests.
        """
        columns: dict[str, list[float]] = {}
        for index, record in enumerate(self):
            for name, value in metrics(record).items():
                columns.setdefault(name, [float("nan")] * len(self))[index] = value
        return columns

    @property
    def epoch(self) -> list[int]:
        """The numbers of the rounds, or in asynchronous training of the updates. They stand for Keras's epochs."""
        return [_number(record) for record in self]

    @property
    def staleness(self) -> dict[int, int]:
        """The number of asynchronous updates for each staleness, in ascending order."""
        return dict(sorted(Counter(record.staleness for record in self if record.slot is not None).items()))

    def to_keras(self) -> dict[str, list[float]]:
        """``history``, ready for a ``DataFrame``: with the numbers of the rounds as ``"round"``."""
        return {"round": [record.round for record in self], **self.history}

    def to_csv(self, path: str | Path) -> None:
        """Write a row for each record: number, times in seconds, bytes, and all metrics.

        Args:
            path: Path of the file. An existing file is replaced.
        """
        rows = [row(record) for record in self]
        columns = dict.fromkeys((*COLUMNS, *(name for one in rows for name in one)))
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(columns), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def plot(self, *names: str) -> Any:
        """Draw a panel for each metric, with the curves of training, validation and test data.

        Args:
            names: Metrics to draw, without ``val_`` and ``test_``; by default all.

        Returns:
            A Matplotlib ``Figure``. A notebook shows it, and ``figure.savefig("curves.pdf")`` writes it.

        Raises:
            ConfigError: Matplotlib is not installed, or a metric does not exist.
        """
        metrics = self.history
        known = list(dict.fromkeys(_base(name) for name in metrics))
        if unknown := [name for name in names if name not in known]:
            hint = f"there are {', '.join(known)}" if known else "there are none yet"
            raise ConfigError(f"the history has no metric {unknown[0]!r}", hint=hint)
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ConfigError(
                "curves need Matplotlib, which is not installed", hint='pip install "ddlf[plots]"'
            ) from None
        panels = names or tuple(known)
        figure = Figure(figsize=(5.0 * max(len(panels), 1), 3.6), layout="constrained")
        for number, base in enumerate(panels, 1):
            axes = figure.add_subplot(1, len(panels), number)
            for name in (name for name in metrics if _base(name) == base):
                points = [(x, y) for x, y in zip(self.epoch, metrics[name], strict=True) if y == y]
                axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 40 else None)
            axes.set_xlabel("update" if self and self[0].slot is not None else "round")
            axes.set_ylabel(base)
            axes.grid(alpha=0.3)
            axes.legend()
        return figure

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        names = list(self.history)
        head = "".join(f"<th>{escape(name)}</th>" for name in ("round", *names, "seconds"))
        half = SHOWN // 2
        rows = [(_number(record), *(metrics(record).get(name) for name in names), record.seconds) for record in self]
        shown = rows if len(rows) <= SHOWN else [*rows[:half], (), *rows[-half:]]
        body = "".join(
            f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in one) or '<td>...</td>'}</tr>" for one in shown
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    @overload
    def __getitem__(self, index: SupportsIndex) -> RoundRecord: ...

    @overload
    def __getitem__(self, index: slice) -> History: ...

    def __getitem__(self, index: SupportsIndex | slice) -> RoundRecord | History:
        """Return a record, or a part of the history."""
        found = super().__getitem__(index)
        return History(found) if isinstance(found, list) else found


def metrics(record: RoundRecord) -> dict[str, float]:
    """Return all metrics of a record. Metrics of the test data begin with ``test_``."""
    return {**record.metrics, **{f"test_{name}": value for name, value in record.test.items()}}


def row(record: RoundRecord) -> dict[str, Any]:
    """Return a record as a row of a table: ``COLUMNS``, then its metrics."""
    return {**{name: getattr(record, name) for name in COLUMNS}, **metrics(record)}


def _number(record: RoundRecord) -> int:
    return record.round if record.slot is None else record.version


def _base(name: str) -> str:
    return name.removeprefix("val_").removeprefix("test_")


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value}" if isinstance(value, int) else f"{value:.4f}"
