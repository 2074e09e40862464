"""The state of a training: all that the next round depends on, in memory and as a checkpoint. Lives on the master.

All random numbers follow from (seed, round, slot), so the round number is the state of the random numbers.

A round consists of whole local epochs, or of a part of one epoch (``worker_steps``). In the second case, the samples
in the order of their epoch are first cut into rounds and then into slots. So every epoch has every sample once, and a
round of one batch per slot equals one K times larger batch of a single process.
"""

from __future__ import annotations

import asyncio
import bisect
import copy
import hashlib
import itertools
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np

from ddlf.algorithms.partitioners import Owners
from ddlf.algorithms.reading_order import Portion
from ddlf.algorithms.weights import Weights
from ddlf.errors import ConfigError
from ddlf.events.facts import from_data
from ddlf.events.record import RoundRecord
from ddlf.training.checkpoints.contents import Checkpoint
from ddlf.training.checkpoints.progress_layout import KEPT, SLOTS, numbered, upgrade_layout, with_states
from ddlf.training.checkpoints.slices import Slices
from ddlf.training.samples.shares import ShareLedger
from ddlf.training.slot.task import OPTIMIZER, SlotState

MOST_ROUNDS = 5_000_000
"""Rounds are planned one by one: this many take 0.5 GB and some seconds."""


class Span(NamedTuple):
    """The samples of a round, as a range of positions in an order of all samples.

    Args:
        order: The number that determines the order of the samples: the round, or the epoch if a round is a part of one.
        begin: Position of the first sample.
        end: Position behind the last sample.
        version: The version of the partition files that is read, like in ``Portion``.
    """

    order: int
    begin: int
    end: int
    version: int = 0


class SampleLedger:
    """How often each sample of a run was trained on, in accepted updates. ``IApp.ledger`` shows it.

    A worker reports the samples that it trained on (their digest comes with its update). Only merged updates are
    counted. So the ledger shows whether a run trained on every sample exactly once in each local epoch, though workers
    came and went. If the user's ``train`` sets ``self.indices`` or ends early, the ledger counts the samples that
    ``replica.fit`` received. Samples that a ``train`` feeds to the model by itself are invisible: then its partition
    counts as trained on.

    Args:
        samples: n, the number of samples.

    Attributes:
        counts: Local epochs in which each sample was trained on, in merged updates; int32, shape (n,).
    """

    def __init__(self, samples: int) -> None:
        self.counts = np.zeros(samples, np.int32)

    @property
    def samples(self) -> int:
        """n, the number of samples in the data set."""
        return len(self.counts)

    def add(self, indices: np.ndarray[Any, Any], epochs: int, fed: np.ndarray[Any, Any] | None = None) -> None:
        """Count the samples of a slot's update, which was merged, as trained on.

        Args:
            indices: Indices of the slot's samples, shape (n_j,).
            epochs: Local epochs.
            fed: The samples of all epochs, shape (m,), if they differ from ``indices``.
        """
        if fed is not None:
            indices, epochs = fed, 1
        counts = self.counts.copy()  # the old array may be on its way into a checkpoint
        np.add.at(counts, indices, np.int32(epochs))
        self.counts = counts

    def is_exact(self, epochs: int) -> bool:
        """Return whether each sample was trained on exactly once in each of this number of local epochs."""
        return bool((self.counts == epochs).all())

    def summary(self) -> dict[str, Any]:
        """Return the least, the most and the mean of the counts, and their SHA-256."""
        counts = self.counts
        return {
            "samples": len(counts),
            "least": int(counts.min()),
            "most": int(counts.max()),
            "mean": float(counts.mean()),
            "exact": bool(counts.min() == counts.max()),
            "sha256": hashlib.sha256(counts.astype("<i4").tobytes()).hexdigest(),
        }


class FileLedger:
    """How often each sample of partition files was trained on. Its size does not grow with the number of samples.

    A slot reads a range of the order of an epoch. When the ranges cover an epoch, each sample has been trained on once
    more, and the ranges are dropped.

    Args:
        samples: n, the number of samples.
        sizes: Samples in each file; only ``counts`` needs them.
        times: How often every sample was trained on, without the open ranges.
        open: The ranges of incomplete epochs: a portion for each, and how often it was read.
        skipped: Damaged files that were left out: a portion, how often it was read, and the numbers of the files.

    Attributes:
        at: Returns the data set in another version, by its number; None if there is only one version.
        inexact: Why the samples in the data set are not exactly known; "" if they are.
    """

    def __init__(
        self,
        samples: int,
        sizes: Sequence[int] | np.ndarray[Any, Any] = (),
        times: int = 0,
        open: Sequence[tuple[Portion, int]] = (),
        skipped: Sequence[tuple[Portion, int, Sequence[int]]] = (),
    ) -> None:
        self.inexact = ""
        self.samples = samples
        self.sizes = sizes
        self.at: Callable[[int], Any] | None = None
        self._times = times
        self._open = list(open)
        self._skipped = [(portion, times, tuple(files)) for portion, times, files in skipped]

    def add(
        self,
        indices: Portion,
        epochs: int,
        fed: Sequence[Sequence[int]] | int | None = None,
        skipped: Sequence[int] = (),
    ) -> None:
        """Count the samples of a slot's update, which was merged, as trained on.

        Args:
            indices: The portion that the slot read.
            epochs: Local epochs.
            fed: The number of epochs in which it read the portion, if not all; or the ranges of it that count.
            skipped: Numbers of the files that were left out.
        """
        if fed is not None and not isinstance(fed, int):
            for begin, end in fed:
                self.add(indices[begin:end], epochs, skipped=skipped)
            return
        epochs = epochs if fed is None else fed
        if not epochs:
            return
        portion = replace(indices, again=(), end=indices.begin + len(indices))
        if skipped:
            self._skipped = [*self._skipped, (portion, epochs, tuple(skipped))]
        alike = [(open, times) for open, times in self._open if _epoch(open) == _epoch(portion)]
        if all(times == epochs for _, times in alike) and _is_all(
            [portion, *(open for open, _ in alike)], self.samples
        ):
            self._open = [entry for entry in self._open if entry not in alike]
            self._times += epochs
            return
        for number, (open, times) in enumerate(self._open):
            if (
                times == epochs
                and replace(open, end=portion.end) == replace(portion, begin=open.begin)
                and open.end == portion.begin
            ):
                longer = replace(open, end=portion.end), times
                self._open = [*self._open[:number], longer, *self._open[number + 1 :]]
                return
        self._open = [*self._open, (portion, epochs)]

    @property
    def counts(self) -> np.ndarray[Any, Any]:
        """How often each sample was trained on, as in ``SampleLedger``: int32, shape (n,).

        It is computed on request, with 4 bytes for each sample.
        """
        counts = np.full(self.samples, self._times, np.int32)
        for portion, times in self._open:
            np.add.at(counts, portion.ids(self._sizes_of(portion)), np.int32(times))
        for portion, times, numbers in self._skipped:
            sizes = np.asarray(self._sizes_of(portion), np.int64)
            firsts = np.cumsum(sizes) - sizes
            for files, rows in portion.blocks(sizes):
                left_out = np.isin(files, numbers)
                np.subtract.at(counts, firsts[files[left_out]] + rows[left_out], np.int32(times))
        return counts

    def _sizes_of(self, portion: Portion) -> Any:
        return self.sizes if self.at is None else self.at(portion.version).manifest.sizes

    def is_exact(self, epochs: int) -> bool:
        """Return whether each sample was trained on exactly once in each of this number of local epochs."""
        return self._times == epochs and not self._open and not self._skipped and not self.inexact

    def summary(self) -> dict[str, Any]:
        """Return the least, the most and the mean of the counts, and their SHA-256, computed from the ranges."""
        read = [times * len(portion) for portion, times in self._open]
        counts = self.counts if read or self._skipped else np.array([self._times])
        return {
            "samples": self.samples,
            "least": int(counts.min()),
            "most": int(counts.max()),
            "mean": float(counts.mean()) if self._skipped else self._times + sum(read) / self.samples,
            "exact": not read and not self._skipped and not self.inexact,
            **(
                {"skipped": sorted({file + 1 for *_, files in self._skipped for file in files})}
                if self._skipped
                else {}
            ),
            **({"inexact": self.inexact} if self.inexact else {}),
            "sha256": hashlib.sha256(repr(self.to_facts()).encode()).hexdigest(),
        }

    def to_facts(self) -> dict[str, Any]:
        """Return the ledger as JSON data, which a checkpoint stores."""
        open = [[portion.to_message() | {"again": []}, times] for portion, times in self._open]
        facts = {"samples": self.samples, "times": self._times, "open": open}
        left_out = [[portion.to_message() | {"again": []}, times, files] for portion, times, files in self._skipped]
        return facts | ({"skipped": left_out} if left_out else {})

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> FileLedger:
        """Return the ledger that a checkpoint has stored, without the sizes of the files."""
        open = [(Portion.from_message(portion), times) for portion, times in facts["open"]]
        skipped = [(Portion.from_message(portion), *more) for portion, *more in facts.get("skipped", ())]
        return cls(facts["samples"], times=facts["times"], open=open, skipped=skipped)


def _is_all(portions: Sequence[Portion], samples: int) -> bool:
    """Return whether ranges of an epoch's order cover the whole epoch."""
    reached = 0
    for begin, length in sorted((portion.start + portion.begin, len(portion)) for portion in portions):
        if begin != reached:
            return False
        reached += length
    return reached == samples


def _epoch(portion: Portion) -> tuple[Any, ...]:
    """Return the facts about a portion (a range of an epoch's samples) that identify the order of its epoch."""
    return portion.shuffle, portion.seed, portion.epoch, portion.slots, portion.version


async def no_evaluation(*_: object) -> None:
    """Return None. This is the ``evaluate`` of weights that workers cannot evaluate, so the master must do it."""


@dataclass(slots=True, kw_only=True, eq=False)
class WeightsRef:
    """A reference to a group of arrays, such as the weights, on workers or in the slices of a checkpoint.

    The weights of a star run are plain arrays at the master. In other runs only the workers have the weights of the
    last round, or a checkpoint has them in slices that nobody has read yet. Then the progress has a reference.

    Args:
        like: Arrays with the shapes and types of the group. They may have no memory.
        group: Name of the group in checkpoints.
        slices: The slices of the checkpoint that has the arrays; None if only workers have them.
        first: Function that makes the first weights of a model, which nobody has made; None for other arrays.
        from_workers: Function that fetches the arrays from the workers; None if only the checkpoint has them.
        evaluate: Function that evaluates the weights on the workers; returns None if the master must do it.
        unread: The reason why code that cannot await does not get the arrays, and a hint.
    """

    like: Weights
    group: str
    slices: Slices | None = None
    first: Callable[[], Weights] | None = None
    from_workers: Callable[[], Awaitable[Weights]] | None = None
    evaluate: Callable[..., Awaitable[dict[str, float] | None]] = no_evaluation
    unread: tuple[str, str] = ("the weights of this round are on the workers", "")
    _read: Weights | None = field(default=None, init=False)

    async def fetch(self) -> Weights:
        """Return the arrays, fetched from the workers or else read from the checkpoint."""
        return await asyncio.to_thread(self.read) if self.from_workers is None else await self.from_workers()

    def read(self) -> Weights:
        """Return the arrays from the checkpoint, for code that cannot use ``await``. The first call reads the files.

        Raises:
            ConfigError: Only workers have the arrays.
        """
        if self._read is None and self.first is not None:
            self._read = self.first()
        if self._read is None:
            if self.slices is None:
                reason, hint = self.unread
                raise ConfigError(reason, hint=hint)
            self._read = list(self.slices.read()[self.group].values())
        return self._read


def local(weights: Weights | WeightsRef) -> Weights:
    """Return the weights as arrays. If they are only in a checkpoint, read them from there.

    Raises:
        ConfigError: Only workers have the arrays.
    """
    return weights.read() if isinstance(weights, WeightsRef) else weights


def slices_of(weights: Weights | WeightsRef) -> Slices | None:
    """Return the slices of the checkpoint that has the weights; None if the weights are not in a checkpoint."""
    return weights.slices if isinstance(weights, WeightsRef) else None


def is_unmade(weights: Weights | WeightsRef) -> bool:
    """Return whether the weights are first weights that nobody has made."""
    return isinstance(weights, WeightsRef) and weights.first is not None


def shapes(weights: Weights | WeightsRef) -> Weights:
    """Return arrays with the shapes and types of the weights, without reading the weights."""
    return weights.like if isinstance(weights, WeightsRef) else weights


SHALLOW = (
    *("epochs", "sizes", "starts", "offsets", "states", "speeds", "records"),
    *("slots_from", "versions_from", "state", "remote_state", "ledger"),
)
"""Attributes of ``Progress`` that change in place, so a snapshot copies them."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """The whole state of a training after a round of synchronous, or an update of asynchronous training.

    Its arrays are replaced, never changed in place, so a thread can write them while training continues.
    Rounds, slots and epochs are numbered from 0.

    Args:
        weights: The global weights, one array for each of ``model.weights``; a reference if workers have them.
        ledger: How often each sample was trained on.
        training: Random name of this training, which it keeps when it is resumed.
        version: The number of commits; also the number of the checkpoint.
        merges: The number of commits that changed the weights.
        round: Completed rounds of synchronous training.
        slot_rounds: Completed rounds of each slot in asynchronous training; empty in synchronous training.
        epochs: Local epochs of each round, done or planned; 1 for a round that is a part of an epoch.
        sizes: Samples of each round that is a part of an epoch; 0 for all remaining samples of the epoch. The last
            round of an epoch may have fewer.
        starts: Whole local epochs before each round and after the last one.
        offsets: Samples of the current epoch that earlier rounds have used, before each round and after the last one.
        portion: Samples of each slot in future rounds that are parts of epochs; 0 if rounds are whole epochs.
        together: Samples of all slots in such a round, if the user set this number instead.
        planned_epochs: Local epochs of the whole training, as last planned.
        converged: Whether ``is_convergent`` has ended the training.
        reason: Why the loop itself has ended the training early; "" if it has not. Not stored.
        spent: Whether the privacy budget has ended the training. Not stored.
        state: Arrays that the strategy's loop keeps between its commits, by name.
        remote_state: References to such arrays that only workers or a checkpoint have.
        states: The slot state of each slot for its next round, by name of the slot part.
        speeds: Smoothed samples per second of each slot; None while unknown.
        settings: Settings of the run that reached this state.
        compiled: Description of the optimizer of the master's model; not stored.
        owners: The slot of each sample in the whole run; None if each round cuts new parts. Not stored: it follows
            from the settings.
        rates: Learning rates for each local epoch of the next round, if callbacks have set them; later epochs use the
            current rates.
        callbacks: The states of callbacks on the master, from ``CallbackStates``; None if callbacks start fresh.
        begun: The number of epochs whose begin was reported to callbacks.
        reported_records: The number of records in the epoch metrics that were reported to callbacks; None if it is not needed.
        slots_from: Pairs of a first round and K from that round on; more than one if slots were added. Each round has
            all samples once.
        parts_from: Pairs of a first round and the samples of each slot from that round on (with files, in the epoch),
            if parts are unequal.
        versions_from: Pairs of a first round and the version of partition files from that round on; empty with arrays.
        dropped: Maps (slot, round) of each rejected asynchronous update to the worker that made it.
        records: The records of all rounds so far.
    """

    weights: Weights | WeightsRef
    ledger: Any  # SampleLedger | FileLedger | ShareLedger
    training: str = field(default_factory=lambda: secrets.token_hex(8))
    version: int = 0
    merges: int = 0
    round: int = 0
    slot_rounds: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    portion: int = 0
    together: int = 0
    planned_epochs: int = 0
    converged: bool = False
    reason: str = ""
    spent: bool = False
    state: dict[str, Weights] = field(default_factory=dict)
    remote_state: dict[str, WeightsRef] = field(default_factory=dict)
    states: list[SlotState] = field(default_factory=list)
    speeds: list[float | None] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    compiled: dict[str, Any] = field(default_factory=dict)
    owners: Owners | None = None
    rates: list[list[float]] = field(default_factory=list)
    callbacks: list[Any] | None = None
    begun: int = 0
    reported_records: int | None = None
    slots_from: list[tuple[int, int]] = field(default_factory=list)
    parts_from: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    versions_from: list[tuple[int, int]] = field(default_factory=list)
    dropped: dict[tuple[int, int], int] = field(default_factory=dict)
    records: list[RoundRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots_from = list(self.slots_from) or [(0, len(self.states))]
        self.sizes = list(self.sizes) or [0] * len(self.epochs)
        self._lay_out()

    @property
    def ended(self) -> str:
        """Why the training has ended, as a sentence; "" if it has not, or was stopped from outside."""
        if self.reason or not (self.is_complete or self.converged):
            return self.reason
        return (
            f"all {self.planned_epochs} epochs are done"
            if self.is_complete
            else "is_convergent, converge or a callback stopped it"
        )

    @property
    def optimizers(self) -> list[Weights | None]:
        """The optimizer state of each slot; None before the slot's first round, and if it is not kept."""
        return [state.get(OPTIMIZER) for state in self.states]

    def slots_in(self, number: int) -> int:
        """Return K, the number of slots, in a round."""
        return next(slots for first, slots in reversed(self.slots_from) if first <= number)

    def parts_in(self, number: int) -> tuple[int, ...]:
        """Return how many samples each slot has in a round of whole epochs; empty if parts are equal."""
        return next((parts for first, parts in reversed(self.parts_from) if first <= number), ())

    def version_in(self, number: int) -> int:
        """Return the version of the partition files that a round reads.

        It is 0 for the version first opened, and for arrays.
        """
        return next((version for first, version in reversed(self.versions_from) if first <= number), 0)

    def plan(self, epochs: int, worker_epochs: int, *, more: bool, portion: int = 0, together: int = 0) -> None:
        """Plan the remaining rounds: their local epochs and samples.

        Rounds that any slot has done stay, so that all slots have the same rounds. A partly done epoch is completed
        before others begin.

        Args:
            epochs: Local epochs of the whole training, or the additional ones.
            worker_epochs: Local epochs of a round; the last round has the remainder.
            more: Whether ``epochs`` is the number of additional epochs.
            portion: Samples of each slot in a round, if rounds are parts of epochs.
            together: Maximum samples of all slots in a round, instead of ``portion``; rounds are as equal as possible.
        """
        self._forget(self.reached)
        paced, begun, self.portion = self.parts_from and (portion or self.portion), self.offsets[-1] > 0, portion
        self.together = -(-self.samples // -(-self.samples // together)) if together else 0
        self.parts_from += [(self.reached, ())] if paced else []
        remaining = epochs + begun if more else max(0, epochs - self.starts[-1])
        self._add(remaining, worker_epochs, begun=begun and remaining > 0)
        self.planned_epochs = self.starts[-1]

    def add_slots(self, number: int, slots: int) -> None:
        """Increase the number of slots from a round on, which must begin an epoch.

        The samples of that and later rounds are divided again.

        New slots begin without a slot state.
        """
        new = slots - len(self.states)
        self.slots_from.append((number, slots))
        self.states += [{} for _ in range(new)]
        self.speeds += [None] * new
        if any(self.sizes[number:]):
            epochs = self.starts[-1] - self.starts[number]
            self._forget(number)
            self._add(epochs, 1)

    def cut(self, number: int, parts: tuple[int, ...]) -> None:
        """Set how many samples each slot has from a round on that no slot has begun; () makes the parts equal."""
        epochs, begun = self.starts[-1] - self.starts[number], self.offsets[number] > 0
        self.parts_from.append((number, parts))
        self._forget(number)
        self._add(epochs, 1, begun=begun)

    def _forget(self, number: int) -> None:
        """Drop the planned rounds from a round's number on."""
        self.epochs, self.sizes = self.epochs[:number], self.sizes[:number]
        self._lay_out()

    def _add(self, epochs: int, worker_epochs: int, *, begun: bool = False) -> None:
        """Plan rounds for more epochs. ``begun`` says whether the first of them is partly done.

        Raises:
            ConfigError: The training would have too many rounds.
        """
        size = self.portion and sum(self.parts_in(len(self.epochs)))
        size = size or self.together or self.portion * len(self.states)
        whole = math.ceil(self.samples / size) if size else 1
        if len(self.epochs) + epochs * whole // (1 if size else worker_epochs) > MOST_ROUNDS:
            raise ConfigError(
                f"{epochs:,} epochs are more than the {MOST_ROUNDS:,} rounds that a training can have",
                hint="ask for fewer epochs, or for longer rounds; a training can be continued later",
            )
        if size:
            rest = math.ceil((self.samples - self.offsets[-1]) / size)
            new = [1] * (rest * begun + whole * (epochs - begun))
        else:
            full, rest = divmod(epochs - begun, worker_epochs)
            new = [1] * begun + [worker_epochs] * full + [rest] * (rest > 0)
        self.epochs, self.sizes = self.epochs + new, self.sizes + [size] * len(new)
        self._lay_out()

    def _lay_out(self) -> None:
        """Compute where each round begins (``starts`` and ``offsets``) from ``epochs`` and ``sizes``."""
        self.starts, self.offsets = [0], [0]
        samples = self.samples if any(self.sizes) else 0
        epoch = offset = 0
        for epochs, size in zip(self.epochs, self.sizes, strict=True):
            offset += size
            if not size or offset >= samples:
                epoch, offset = epoch + epochs, 0
            self.starts.append(epoch)
            self.offsets.append(offset)

    @property
    def samples(self) -> int:
        """n, the number of samples of all slots."""
        samples: int = self.ledger.samples
        return samples

    def span(self, number: int) -> Span:
        """Return the samples of a round, as a range of an order."""
        begin, size = self.offsets[number], self.sizes[number]
        end = min(begin + size, self.samples) if size else self.samples
        return Span(self.starts[number] if begin or size else number, begin, end, self.version_in(number))

    def ends_epoch(self, number: int) -> bool:
        """Return whether every sample has been trained on equally often after a round."""
        return self.offsets[number + 1] == 0

    def begins_epoch(self, number: int) -> bool:
        """Return whether every sample has been trained on equally often before a round."""
        return self.offsets[number] == 0

    def updates_of_epoch(self, number: int) -> int:
        """Return how many updates of slots use every sample once, in rounds of this round's size.

        If a round has several epochs, they use every sample that many times.
        """
        full, rest = divmod(self.samples, self.sizes[number] or self.samples)
        return full * len(self.states) + min(rest, len(self.states))

    def tasks_in(self, number: int) -> int:
        """Return how many slots train in a round. If not all do, these are the first ones.

        At the end of an epoch fewer samples than slots may remain.
        """
        span = self.span(number)
        return min(self.slots_in(number), span.end - span.begin)

    def following(self, slot: int, number: int) -> int:
        """Return the next round, from ``number`` on, in which a slot trains; the number of rounds if there is none."""
        rounds = range(number, len(self.epochs))
        return next((round_number for round_number in rounds if slot < self.tasks_in(round_number)), len(self.epochs))

    def preceding(self, slot: int, number: int) -> int:
        """Return the last round before ``number`` in which a slot trained; -1 if there is none."""
        return next(
            (round_number for round_number in range(number - 1, -1, -1) if slot < self.tasks_in(round_number)), -1
        )

    @property
    def reached(self) -> int:
        """The number of rounds that the fastest slot has completed."""
        return max(self.slot_rounds, default=self.round)

    @property
    def epochs_done(self) -> int:
        """Completed local epochs, that is, how often all samples were trained on.

        Asynchronous slots are counted together.
        """
        rounds = self.slot_rounds or [self.round]
        done = sum(self.starts[number] * self.samples + self.offsets[number] for number in rounds)
        return done // (self.samples * len(rounds))

    @property
    def next_epochs(self) -> range:
        """The numbers of the epochs in the next round."""
        done = self.epochs_done
        return range(done, self.starts[min(bisect.bisect_right(self.starts, done), len(self.epochs))])

    def snapshot(self) -> Self:
        """Return a copy of the state that later rounds do not change."""
        then = copy.copy(self)
        for name in SHALLOW:
            setattr(then, name, copy.copy(getattr(self, name)))
        return then

    def go_back(self, then: Self) -> None:
        """Restore the state of a snapshot. The records and the ledger stay the same objects, since others have them."""
        records, ledger = self.records, self.ledger
        del records[len(then.records) :]
        vars(ledger).update(vars(then.ledger))
        then = then.snapshot()  # later rounds do not change the argument
        for entry in fields(self):
            setattr(self, entry.name, getattr(then, entry.name))
        self.records, self.ledger = records, ledger

    def set_back(self, then: Self) -> None:
        """Restore the state of a snapshot, with its weights in this process."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(then, entry.name))
        if not is_unmade(self.weights):
            self.fetch()

    def fetch(self) -> None:
        """Read the weights and the loop's state into this process if they are only in a checkpoint."""
        self.weights = local(self.weights)
        self.state = self.local_state()
        self.remote_state = {}

    def local_state(self) -> dict[str, Weights]:
        """Return the arrays that the loop keeps. Arrays that are only in a checkpoint are read."""
        return self.state | {name: group.read() for name, group in self.remote_state.items()}

    def group(self, name: str) -> Weights | WeightsRef | None:
        """Return the arrays that the loop keeps under a name, or a reference to them; None if there are none."""
        return self.remote_state.get(name, self.state.get(name))

    def keep(self, name: str, group: Weights | WeightsRef) -> None:
        """Store arrays that the loop keeps under a name, in place of older ones."""
        self.drop(name)
        if isinstance(group, WeightsRef):
            self.remote_state[name] = group
        else:
            self.state[name] = group

    def drop(self, name: str) -> None:
        """Remove the arrays that the loop keeps under a name, if there are any."""
        self.state.pop(name, None)
        self.remote_state.pop(name, None)

    @property
    def is_complete(self) -> bool:
        """Whether every slot has completed all planned rounds."""
        return min(self.slot_rounds, default=self.round) >= len(self.epochs)

    def begin_sync(self) -> None:
        """Prepare to continue synchronously, with the round after the fastest slot's last one."""
        self.round, self.slot_rounds = self.reached, []

    def begin_async(self) -> None:
        """Prepare to continue asynchronously: each slot continues with its own next round."""
        if not self.slot_rounds:
            self.slot_rounds = [self.following(slot, self.round) for slot in range(len(self.states))]

    def to_checkpoint(self, names: Sequence[str], slices: Slices | None = None) -> Checkpoint:
        """Return the state in the form that a checkpoint stores, without its records. Later rounds do not change it.

        Args:
            names: Names of the weights, for people who read the file.
            slices: The parts that workers have already written.
        """
        on_workers = {} if slices is None else {**dict.fromkeys(slices.sliced), **slices.arrays}
        weights: dict[str, Any] = {}
        if "weights" not in on_workers:
            weights = {
                f"{i:04d} {name}": array for i, (name, array) in enumerate(zip(names, local(self.weights), strict=True))
            }
        arrays: dict[str, dict[str, Any]] = {
            **({} if "weights" in on_workers else {"weights": weights}),
            **({"ledger": {"counts": self.ledger.counts}} if isinstance(self.ledger, SampleLedger) else {}),
            **{KEPT + name: numbered(group) for name, group in self.state.items() if KEPT + name not in on_workers},
            **({} if slices is None else slices.arrays),
            **({} if self.callbacks is None else {"callbacks": numbered(self.callbacks)}),
        }
        facts = {
            "settings": dict(self.settings),
            "training": self.training,
            "merges": self.merges,
            "round": self.round,
            "slot_rounds": list(self.slot_rounds),
            "slots_from": [list(entry) for entry in self.slots_from],
            "epochs": self._done(),
            "asked": self.planned_epochs,
            "converged": self.converged and not self.spent,  # a larger budget continues
            "speeds": list(self.speeds),
            **({"parts_from": [[first, list(parts)] for first, parts in self.parts_from]} if self.parts_from else {}),
            **({"versions_from": [list(entry) for entry in self.versions_from]} if self.versions_from else {}),
            "dropped": [[*slot_and_round, worker] for slot_and_round, worker in self.dropped.items()],
            **({} if isinstance(self.ledger, SampleLedger) else {"ledger": self.ledger.to_facts()}),
            **(
                {}
                if self.reported_records is None
                else {"rates": self.rates, "begun": self.begun, "told": self.reported_records}
            ),
        }
        checkpoint = Checkpoint(round=self.version, arrays=arrays, facts=facts, slices=slices)
        return with_states(checkpoint, self.states, () if slices is None else slices.left)

    def _done(self) -> list[list[int]]:
        """Return the completed rounds in a short form for a checkpoint.

        Equal rounds are one entry: their count, their local epochs, and their size if they are parts of an epoch.
        """
        done = itertools.islice(zip(self.epochs, self.sizes, strict=True), self.reached)
        return [
            [len(list(equal)), epochs, *([size] if size else [])] for (epochs, size), equal in itertools.groupby(done)
        ]

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint) -> Progress:
        """Return the state that a checkpoint has stored. Accepts checkpoints of older versions, which store less."""
        arrays, facts = checkpoint.arrays, checkpoint.facts
        if "states" not in facts:
            arrays, facts = upgrade_layout(arrays, facts)
        ledger: Any = SampleLedger(0)
        if (ledger_facts := facts.get("ledger")) is not None:
            ledger = (
                ShareLedger.from_facts(ledger_facts)
                if "shares" in ledger_facts
                else FileLedger.from_facts(ledger_facts)
            )
        else:
            ledger.counts = np.array(arrays["ledger"]["counts"])
        slot_rounds = list(facts["slot_rounds"])
        progress = Progress(
            weights=list(arrays["weights"].values()),
            ledger=ledger,
            version=checkpoint.round,
            merges=facts.get("merges", checkpoint.round),
            round=facts.get("round", 0 if slot_rounds else checkpoint.round),
            slot_rounds=slot_rounds,
            slots_from=[(first, slots) for first, slots in facts.get("slots_from", ())],
            parts_from=[(first, tuple(parts)) for first, parts in facts.get("parts_from", ())],
            versions_from=[(first, version) for first, version in facts.get("versions_from", ())],
            planned_epochs=facts.get("asked", 0),
            converged=facts.get("converged", False),
            state={
                name.removeprefix(KEPT): list(group.values()) for name, group in arrays.items() if name.startswith(KEPT)
            },
            states=[
                {
                    name: [arrays.get(SLOTS + name, {}).get(f"slot {slot:04d} {i:04d}") for i in range(length)]
                    for name, length in groups.items()
                }
                for slot, groups in enumerate(facts["states"])
            ],
            rates=facts.get("rates", []),
            callbacks=list(arrays["callbacks"].values()) if "callbacks" in arrays else None,
            begun=facts.get("begun", 0),
            reported_records=facts.get("told"),
            speeds=list(facts["speeds"]) or [None] * len(facts["states"]),
            settings=dict(facts["settings"]),
            dropped={(slot, number): worker for slot, number, worker in facts.get("dropped", ())},
            records=[from_data(RoundRecord, record) for record in facts["records"]]
            if "records" in facts
            else list(checkpoint.records),
        )
        progress.training = facts.get("training", progress.training)
        if "epochs" in facts:
            done = [(epochs, *size) for count, epochs, *size in facts["epochs"] for _ in range(count)]
            progress.epochs, progress.sizes = [entry[0] for entry in done], [sum(entry[1:]) for entry in done]
        elif progress.reached:
            # Older format: all rounds have ``worker_epochs`` epochs, except the last, which has the remainder.
            usual = facts["settings"]["worker_epochs"]
            before = usual * (progress.reached - 1)
            last = min(usual, max(1, int(ledger.counts.max(initial=0)) - before))
            progress.epochs, progress.sizes = [usual] * (progress.reached - 1) + [last], [0] * progress.reached
        progress._lay_out()
        return progress
