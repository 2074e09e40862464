"""What a round was like. Made on the master; returned to the user, given to ``is_convergent`` and printed."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
from dataclasses import dataclass, field
from typing import Literal

log = logging.getLogger(__name__)

COLUMNS = 80
INDENT = " " * 10
MOST_METRICS = 8
"""In a line for people. ``record.metrics`` has all of them."""
WORTH_SAYING = 0.1
"""Of a round's time that no worker computed in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEvent:
    """Something that happened to a slot or a worker during training; ``IApp.on_event`` gets it.

    Args:
        kind: ``"start"`` and ``"finish"`` of a slot on a worker; ``"lost"``, ``"back"``, ``"joined"`` and ``"gone"`` (for the rest of the run) of a
            worker; ``"backup"`` when a late slot is given to a second worker; ``"slots"`` when there are more of them from a round on;
            ``"waiting"`` when no worker is left; ``"rejected"`` and ``"clipped"`` of an update; ``"dropped"`` when the residual of a slot was lost
            with its worker; ``"checkpoint"`` when one could not be written.
        round: Number of the round, from 1.
        slot: Number of the slot, from 1, or None.
        worker: Number of the worker, from 1, or None.
        text: Sentence for people.
    """

    kind: Literal[
        "start",
        "finish",
        "lost",
        "back",
        "joined",
        "gone",
        "backup",
        "slots",
        "waiting",
        "rejected",
        "clipped",
        "dropped",
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
        slot: Number of the slot whose update it was, from 1; None in synchronous training, where it is all of them.
        version: Commits so far: of a round, or in asynchronous training of an update, also of one that waits in a buffer.
        staleness: Merges applied between reading the weights and applying the update; 0 in synchronous training; of Downpour the largest of the
            round's pushes.
        base: Merges in the weights that the slot began with; None in synchronous training, and in records of 0.1.0.
        rates: Learning rates of the optimizer, or of each of several, in each local epoch, of asynchronous training whose callbacks have set them.
        epochs: Local epochs in this round.
        samples: Samples trained on in this round, each counted once.
        seconds: Seconds from sending the weights to having the new ones.
        compute_s: Seconds of that in local training, on the slowest worker.
        transfer_s: Seconds of that for moving weights and updates: the slowest worker's time that was not computation.
        merge_s: Seconds of that for merging on the master after the last update came.
        wait_s: Mean of the seconds that workers had nothing to do because another one was slower.
        wait_data_s: Seconds that local training waited for samples to be read, on the worker that waited longest; 0 with arrays.
        bytes_out: Bytes sent to all workers.
        bytes_back: Bytes received from all workers.
        error: Relative L2 error that the codec of the updates made, mean over slots; 0 when they travel exactly.
        slots: Number of slots in this round; 0 in records of 0.1.0.
        workers: Number of the worker whose update of each slot counts, in slot order.
        verdicts: A line for each update that was not simply accepted.
        recomputed: Copies of slots that ended with their worker and were computed again.
        skipped: Damaged partition files that were left out, numbered from 1, and with each how many samples of the round.
        pushes: Of Downpour, for each push of the round: the replica, from 0, its number in the round, its staleness at each shard, and how many
            pushes each shard had taken before; -1 where that had it of a life that was lost.
        fetches: Of Downpour, for each fetch of the round: the replica, and how many pushes each shard had taken before. They differ by their spread.
        metrics: Metrics of local training in its last epoch, mean over slots weighted by samples.
        test: Metrics of the test data with the weights after this round, when they are evaluated on the way (``evaluate_every``).
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
    skipped: tuple[tuple[int, int], ...] = ()
    pushes: tuple[tuple[int, ...], ...] = ()
    fetches: tuple[tuple[int, ...], ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Training loss; NaN when the model reports none."""
        return self.metrics.get("loss", float("nan"))

    @property
    def spread(self) -> int:
        """By how many pushes the shards differed at most in what a replica fetched, in Downpour."""
        return max((max(seen) - min(seen) for _, *seen in self.fetches), default=0)

    @property
    def accuracy(self) -> float:
        """Training accuracy under whichever name the model has for it; NaN when it reports none."""
        return accuracy(self.metrics)

    def __str__(self) -> str:
        """What is printed for it: a line, or as many of at most 80 columns as there is to say."""
        width = len(str(self.rounds))
        metrics = [f"{name} {value:.4f}" for name, value in self.metrics.items()]
        more = len(metrics) - MOST_METRICS
        parts = [
            f"round {self.round:>{width}}/{self.rounds}" + ("" if self.slot is None else f"  slot {self.slot}"),
            f"{self.seconds:6.2f} s",
            *metrics[:MOST_METRICS],
            *([f"and {more} more metrics"] if more > 0 else []),
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
        parts += self.verdicts
        if self.slot is not None:
            parts.append(f"staleness {self.staleness}")
        return wrapped(parts)


def wrapped(parts: list[str]) -> str:
    """Parts of a line, on as many as they need; each further one begins with spaces."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) > COLUMNS:
            lines.append(INDENT + part)
        else:
            lines[-1] += f"  {part}"
    return "\n".join(lines)


def fitted(text: str) -> str:
    """Text for standard output: on a terminal with its lines broken between words, anywhere else as it is."""
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


def put(text: str) -> None:
    """Print text, as ``fitted`` has it, at once. On a full disk the line is lost, which is told on standard error, and no training.

    Raises:
        BrokenPipeError: Nobody reads it any more.
    """
    try:
        print(fitted(text), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        log.warning("a line could not be printed: %s", error.strerror)


def accuracy(metrics: dict[str, float]) -> float:
    """The accuracy among metrics, whatever the model calls it; NaN when there is none."""
    return next((value for name, value in metrics.items() if "acc" in name), float("nan"))


def size(count: int) -> str:
    """A number of bytes for people, of three digits: ``"412 MB"``, ``"2.06 MB"``."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            number = count / factor
            return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"
    return f"{count} B"
