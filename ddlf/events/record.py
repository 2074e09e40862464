"""The record of a round, with its metrics and costs, and the history, which is the list of all records.

The master makes the records, passes them to ``is_convergent`` and prints them.
"""

from __future__ import annotations

import csv
import logging
import shutil
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal, SupportsIndex, overload

from ddlf.errors import ConfigError

log = logging.getLogger(__name__)

WIDTH = 80
INDENT = " " * 10
MOST_METRICS = 8
"""Maximum number of metrics in a printed line. ``record.metrics`` has all metrics."""
WORTH_SAYING = 0.1
"""A printed line mentions the time without computation if it is a larger share of the round than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEvent:
    """An event about a slot or a worker, for ``IApp.on_event``.

    Args:
        kind: ``"start"`` and ``"finish"`` of a slot on a worker; ``"lost"``, ``"back"``, ``"joined"`` and ``"gone"``
            (for the rest of the run) of a worker; ``"backup"`` when a late slot is given to a second worker;
            ``"missed"`` when a round is merged without the private data of a worker that is away;
            ``"slots"`` when the number of slots grows; ``"waiting"`` when no worker is left;
            ``"rejected"`` and ``"clipped"`` of an update; ``"dropped"`` when the residual of a slot was lost with its
            worker; ``"overflow"`` when all gradients of a slot's round overflowed; ``"checkpoint"`` when one could
            not be written.
        round: Number of the round, from 1.
        slot: Number of the slot, from 1, or None.
        worker: Number of the worker, from 1, or None.
        text: Sentence for people; empty for ``"missed"`` with the reason of the round before.
    """

    kind: Literal[
        "start",
        "finish",
        "lost",
        "back",
        "joined",
        "gone",
        "backup",
        "missed",
        "slots",
        "waiting",
        "rejected",
        "clipped",
        "dropped",
        "overflow",
        "checkpoint",
    ]
    round: int
    slot: int | None = None
    worker: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round of synchronous training, or one arrival of an update in asynchronous training.

    Args:
        round: Number of the round, from 1. In asynchronous training each slot counts its own rounds.
        rounds: Rounds of the whole run.
        slot: Number of the slot of this update, from 1; None in synchronous training, where a record covers all slots.
        version: Number of commits so far. A commit is a round, or in asynchronous training an update, even if it
            waits in a buffer.
        staleness: Merges applied between reading the weights and applying the update; 0 in synchronous training. In
            Downpour, the largest staleness of the round's pushes.
        base: Number of merges in the weights that the slot began with; None in synchronous training and in records of
            0.1.0.
        rates: Learning rates in each local epoch, one for each optimizer, if callbacks set them in asynchronous
            training.
        epochs: Local epochs in this round.
        samples: Samples trained on in this round, each counted once.
        seconds: Seconds from sending the weights to computing the new ones.
        compute_s: Seconds of local training on the slowest worker.
        transfer_s: Seconds for moving weights and updates: the slowest worker's time without computation.
        merge_s: Seconds for merging on the master after the last update.
        wait_s: Seconds that workers waited for a slower worker, mean over workers.
        wait_data_s: Longest time in seconds that a worker's training waited for samples; 0 with arrays.
        bytes_out: Bytes sent to all workers.
        bytes_back: Bytes received from all workers.
        error: Relative L2 error of the update codec, mean over slots; 0 without loss.
        slots: Number of slots in this round; 0 in records of 0.1.0.
        workers: Number of the worker that computed each slot's update, in slot order.
        verdicts: A line for each update that was rejected, scaled down, or otherwise not accepted unchanged.
        recomputed: Number of slots that were computed again because their worker was lost.
        without: Slot, worker and samples of each slot that the round was merged without, because its worker, the only
            one with its data, was away. A slot whose worker has not come yet has worker 0. All slots, if a secure sum is
            void.
        skipped: Number, from 1, and missing samples of each damaged partition file that was skipped.
        pushes: For each push in Downpour: replica, from 0, number in the round, staleness at each server, and the
            number of earlier pushes at each server; -1 if the server has it from a lost incarnation.
        fetches: For each fetch in Downpour: the replica, and the number of earlier pushes at each server.
        metrics: Metrics of the last local epoch, mean over slots weighted by samples.
        test: Metrics of the test data with the weights after this round, if ``evaluate_every`` asks for them.
        epsilons: Epsilon of each member (peer, or slot with private data) after this round, if its updates get noise.
            ``metrics`` has the largest one as ``"epsilon"``.
    """

    round: int
    rounds: int
    slot: int | None = None
    version: int
    staleness: int = 0
    base: int | None = None
    rates: tuple[tuple[float, ...], ...] = ()
    epochs: int
    samples: int
    seconds: float
    compute_s: float
    transfer_s: float
    merge_s: float
    wait_s: float = 0.0
    wait_data_s: float = 0.0
    bytes_out: int
    bytes_back: int
    error: float = 0.0
    slots: int = 0
    workers: tuple[int, ...] = ()
    verdicts: tuple[str, ...] = ()
    recomputed: int = 0
    without: tuple[tuple[int, int, int], ...] = ()
    skipped: tuple[tuple[int, int], ...] = ()
    pushes: tuple[tuple[int, ...], ...] = ()
    fetches: tuple[tuple[int, ...], ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)
    epsilons: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Training loss; NaN when the model reports none."""
        return self.metrics.get("loss", float("nan"))

    @property
    def spread(self) -> int:
        """Largest difference between servers, in pushes, of one fetch in Downpour."""
        return max((max(versions) - min(versions) for _, *versions in self.fetches), default=0)

    @property
    def accuracy(self) -> float:
        """Training accuracy, under any name that contains ``acc``; NaN without one."""
        return accuracy(self.metrics)

    def __str__(self) -> str:
        """Return the printed lines of a record, with at most 80 columns each."""
        width = len(str(self.rounds))
        metrics = [f"{name} {shown(value)}" for name, value in self.metrics.items()]
        hidden = len(metrics) - MOST_METRICS
        parts = [
            f"round {self.round:>{width}}/{self.rounds}" + ("" if self.slot is None else f"  slot {self.slot}"),
            f"{self.seconds:6.2f} s",
            *metrics[:MOST_METRICS],
            *([f"and {hidden} more metrics"] if hidden > 0 else []),
            *(f"test_{name} {value:.4f}" for name, value in self.test.items()),
            f"{size(self.bytes_out)} out, {size(self.bytes_back)} back",
        ]
        if (waited := self.seconds - self.compute_s) > WORTH_SAYING * self.seconds:
            parts.append(f"{waited:.2f} s not computing")
        if self.wait_data_s > WORTH_SAYING * self.seconds:
            parts.append(f"{self.wait_data_s:.2f} s waiting for data")
        if self.error:
            parts.append(f"update error {self.error:.2%}")
        if self.recomputed:
            parts.append(f"{self.recomputed} computed again")
        parts += [f"without slot {slot} ({samples:,} samples)" for slot, _, samples in self.without]
        parts += self.verdicts
        if self.slot is not None:
            parts.append(f"staleness {self.staleness}")
        return wrapped(parts)


def shown(value: float) -> str:
    """Return a metric as text: four decimals, or three digits if it is small; a whole number as it is."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if not 0 < abs(value) < 0.001 else f"{value:.2e}"


def wrapped(parts: list[str]) -> str:
    """Join the parts of a record's text to lines of at most 80 columns. Further lines begin with spaces."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) > WIDTH:
            lines.append(INDENT + part)
        else:
            lines[-1] += f"  {part}"
    return "\n".join(lines)


def fitted(text: str) -> str:
    """Return text for standard output: wrapped at the width of a terminal, unchanged elsewhere."""
    if not sys.stdout.isatty():
        return text
    columns = max(shutil.get_terminal_size().columns, 40)
    lines = (
        textwrap.wrap(line, columns, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False)
        if len(line) > columns
        else [line]
        for line in text.split("\n")
    )
    return "\n".join(line for broken in lines for line in broken)


def print_at_once(text: str) -> None:
    """Print text at once, wrapped by ``fitted``. A full disk costs the line and a warning, but not the training.

    Raises:
        BrokenPipeError: The reader has closed the pipe.
    """
    try:
        print(fitted(text), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        log.warning("a line could not be printed: %s", error.strerror)


def accuracy(metrics: dict[str, float]) -> float:
    """Return the first metric whose name contains ``acc``; NaN without one."""
    return next((value for name, value in metrics.items() if "acc" in name), float("nan"))


def size(count: int) -> str:
    """Return a number of bytes with three digits: ``"412 MB"``, ``"2.06 MB"``."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            number = count / factor
            return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"
    return f"{count} B"


COLUMNS = (
    *("round", "version", "slot", "staleness", "epochs", "samples", "slots", "recomputed"),
    *("seconds", "compute_s", "transfer_s", "merge_s", "wait_s", "bytes_out", "bytes_back", "error"),
)
"""Columns of a table of records, before the metrics."""
SHOWN = 10
"""Maximum number of rounds that a notebook shows: half from the beginning, half from the end."""


class History(list[RoundRecord]):
    """The records of a training, in the order of their merges.

    It is a list with the attributes of Keras's ``History``. It can also write a table and draw curves.

    Attributes:
        ended: Why the training has ended, as a sentence; "" if it has failed, or if ``stop_training`` has ended it.
    """

    ended = ""

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
        columns = dict.fromkeys((*COLUMNS, *(name for values in rows for name in values)))
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
        metric_names = list(dict.fromkeys(_base(name) for name in metrics))
        if unknown := [name for name in names if name not in metric_names]:
            hint = f"it has {', '.join(metric_names)}" if metric_names else "the history has no metrics yet"
            raise ConfigError(f"the history has no metric {unknown[0]!r}", hint=hint)
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ConfigError(
                "curves need Matplotlib, which is not installed", hint='pip install "ddlf[plots]"'
            ) from None
        panels = names or tuple(metric_names)
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
        """Return the records as an HTML table, which a notebook shows."""
        names = list(self.history)
        head = "".join(f"<th>{escape(name)}</th>" for name in ("round", *names, "seconds"))
        half = SHOWN // 2
        rows = [(_number(record), *(metrics(record).get(name) for name in names), record.seconds) for record in self]
        shown = rows if len(rows) <= SHOWN else [*rows[:half], (), *rows[-half:]]
        body = "".join(
            f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in cells) or '<td>...</td>'}</tr>" for cells in shown
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    @overload
    def __getitem__(self, index: SupportsIndex) -> RoundRecord: ...

    @overload
    def __getitem__(self, index: slice) -> History: ...

    def __getitem__(self, index: SupportsIndex | slice) -> RoundRecord | History:
        """Return a record, or a part of the history."""
        result = super().__getitem__(index)
        return History(result) if isinstance(result, list) else result


def metrics(record: RoundRecord) -> dict[str, float]:
    """Return all metrics of a record. Metrics of the test data begin with ``test_``."""
    return {**record.metrics, **{f"test_{name}": value for name, value in record.test.items()}}


def row(record: RoundRecord) -> dict[str, Any]:
    """Return a record as a row of a table, by column: the quantities in ``COLUMNS``, then its metrics."""
    return {**{name: getattr(record, name) for name in COLUMNS}, **metrics(record)}


def _number(record: RoundRecord) -> int:
    return record.round if record.slot is None else record.version


def _base(name: str) -> str:
    return name.removeprefix("val_").removeprefix("test_")


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value}" if isinstance(value, int) else f"{value:.4f}"
