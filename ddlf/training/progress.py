"""What a training has come to: all that its next round depends on, in memory and as a checkpoint. Lives on the master.

Everything random follows from (seed, round, slot), so the number of the round is the state of the random numbers.

A round is of whole local epochs, or of a part of one (``worker_steps``). Then the samples in the order of their epoch are cut into rounds first and
into slots after that, so every epoch has every sample once, and a round of one batch of each slot is the K-fold batch of one process.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

import numpy as np

from ddlf.algorithms.partitioners import Owners
from ddlf.algorithms.weights import Weights
from ddlf.errors import ConfigError
from ddlf.events.facts import from_data
from ddlf.events.record import RoundRecord
from ddlf.training.checkpoints.contents import Checkpoint
from ddlf.training.checkpoints.slices import Slices
from ddlf.training.ledger import FileLedger, Ledger
from ddlf.training.slot.task import OPTIMIZER, SlotState
from ddlf.training.stored import KEPT, SLOTS, as_of_now, numbered, with_states

MOST_ROUNDS = 5_000_000
"""They are planned one by one: these take 0.5 GB and some seconds."""


class Span(NamedTuple):
    """The samples of a round: ``order[begin:end]``.

    Args:
        order: Number that their order follows from: that of the round, of a part of an epoch that of the epoch.
        begin: Place of the first in it.
        end: Place behind the last.
        version: Of partition files the version that is read, as in ``Portion``.
    """

    order: int
    begin: int
    end: int
    version: int = 0


SHALLOW = (
    *("epochs", "sizes", "starts", "offsets", "states", "speeds", "records"),
    *("slots_from", "versions_from", "state", "ledger"),
)
"""Attributes of ``Progress`` that a snapshot copies: they change in place."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """The state after a round of synchronous training, or after an update of asynchronous training.

    Arrays in it are replaced, never changed in place, so that they can be written while training goes on.

    Args:
        weights: Global ones, one array for each of ``model.weights``.
        ledger: Which samples were trained on.
        training: Random name of this training, which stays its own when it is resumed.
        version: Commits; the number of the checkpoint.
        merges: Those of them that brought other weights.
        round: Rounds completed, of synchronous training.
        slot_rounds: Rounds that each slot completed, of asynchronous training; empty in synchronous training.
        epochs: Local epochs of each round, done or planned; 1 of a round that is part of one.
        sizes: Samples of each of them, if it is part of an epoch: as many, or what is left of the epoch; 0 for all that are left of it.
        starts: Local epochs before each of them and after the last, whole ones.
        offsets: Samples of the epoch that has begun there, before each of them and after the last.
        portion: Samples of each slot in rounds to come that are parts of epochs; 0 if they are of whole ones.
        together: The same of all slots, if that is what was asked for.
        asked: Local epochs that the whole training was to have when it was last planned.
        converged: Whether ``is_convergent`` has ended it.
        state: What the algorithm keeps between its commits, by name.
        states: What each slot has left for its next round, by name of the group.
        speeds: Samples a second of each slot, smoothed; None before they are known.
        settings: Settings of the run that has come to this.
        compiled: The optimizer of the master's model, described; not stored.
        owners: Whose each sample is in the whole run; None if parts are cut anew in each round. Not stored: it follows from the settings.
        rates: Learning rates of the optimizer for each local epoch of the round that begins, if callbacks have set them; behind it those of now.
        callbacks: What callbacks on the master keep, as ``CallbackStates`` gives it; None if they begin anew.
        begun: Epochs of which callbacks were told that they begin.
        told: Records that were among the metrics of an epoch that callbacks were told of; None if that does not matter.
        slots_from: The round from which on, from 0, and K in it; more than one if slots were added. Each round has all samples once.
        parts_from: The round from which on, from 0, and how many samples each slot has in it, or of files in its epoch, if parts are not equal.
        versions_from: The round from which on, from 0, and the version of partition files that is read; none with arrays.
        dropped: Of each slot and round of asynchronous training, both from 0, whose update was rejected, the worker that had made it.
        records: Records of all rounds so far.
    """

    weights: Weights
    ledger: Any  # Ledger | FileLedger
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
    asked: int = 0
    converged: bool = False
    state: dict[str, Weights] = field(default_factory=dict)
    states: list[SlotState] = field(default_factory=list)
    speeds: list[float | None] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    compiled: dict[str, Any] = field(default_factory=dict)
    owners: Owners | None = None
    rates: list[list[float]] = field(default_factory=list)
    callbacks: list[Any] | None = None
    begun: int = 0
    told: int | None = None
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
    def optimizers(self) -> list[Weights | None]:
        """State of each slot's optimizer; None before its first round, and when it is not kept."""
        return [state.get(OPTIMIZER) for state in self.states]

    def slots_in(self, number: int) -> int:
        """K in a round, from 0."""
        return next(slots for first, slots in reversed(self.slots_from) if first <= number)

    def parts_in(self, number: int) -> tuple[int, ...]:
        """Samples of each slot in a whole round, from 0; none if parts are equal."""
        return next((parts for first, parts in reversed(self.parts_from) if first <= number), ())

    def version_in(self, number: int) -> int:
        """Version of the partition files that are read in a round, from 0; 0 for that which was opened, and of arrays."""
        return next((version for first, version in reversed(self.versions_from) if first <= number), 0)

    def plan(self, epochs: int, worker_epochs: int, *, more: bool, portion: int = 0, together: int = 0) -> None:
        """Set the rounds to come. Those that a slot has done stay as they were, so that every slot has the same rounds.

        An epoch of which some rounds are done is ended before others begin.

        Args:
            epochs: Local epochs of the whole training, or those to come.
            worker_epochs: Local epochs of a round; the last one is shorter when they are no multiple.
            more: Whether ``epochs`` are those to come.
            portion: Samples of each slot in a round, if rounds are parts of epochs.
            together: At most so many of all slots, instead; rounds are equal but for what cannot be.
        """
        self._forget(self.reached)
        paced, begun, self.portion = self.parts_from and (portion or self.portion), self.offsets[-1] > 0, portion
        self.together = -(-self.samples // -(-self.samples // together)) if together else 0
        self.parts_from += [(self.reached, ())] if paced else []
        left = epochs + begun if more else max(0, epochs - self.starts[-1])
        self._add(left, worker_epochs, begun=begun and left > 0)
        self.asked = self.starts[-1]

    def plan_again(self, rounds: Mapping[int, int], worker_epochs: int) -> None:
        """Plan whole local epochs for some rounds, from 0, as they were once, and behind them as many as are left."""
        asked = self.starts[-1]
        planned = [rounds.get(number, worker_epochs) for number in range(min(max(rounds) + 1, asked))]
        if sum(planned) <= asked and not any(self.sizes):
            self.epochs, self.sizes = planned, [0] * len(planned)
            self._add(asked - sum(planned), worker_epochs)

    def add_slots(self, number: int, slots: int) -> None:
        """Have more slots from a round on, from 0, that begins an epoch: it and those after it are cut anew. New slots begin with nothing."""
        new = slots - len(self.states)
        self.slots_from.append((number, slots))
        self.states += [{} for _ in range(new)]
        self.speeds += [None] * new
        if any(self.sizes[number:]):
            epochs = self.starts[-1] - self.starts[number]
            self._forget(number)
            self._add(epochs, 1)

    def cut(self, number: int, parts: tuple[int, ...]) -> None:
        """Have parts of so many samples from a round on, from 0, that no slot has begun; equal ones with none."""
        epochs, begun = self.starts[-1] - self.starts[number], self.offsets[number] > 0
        self.parts_from.append((number, parts))
        self._forget(number)
        self._add(epochs, 1, begun=begun)

    def _forget(self, number: int) -> None:
        """Plan nothing from a round on."""
        self.epochs, self.sizes = self.epochs[:number], self.sizes[:number]
        self._lay_out()

    def _add(self, epochs: int, worker_epochs: int, *, begun: bool = False) -> None:
        """Plan more epochs, of which the first has begun or not.

        Raises:
            ConfigError: They have more rounds than can be planned.
        """
        size = self.portion and sum(self.parts_in(len(self.epochs)))
        size = size or self.together or self.portion * len(self.states)
        whole = math.ceil(self.samples / size) if size else 1
        if len(self.epochs) + epochs * whole // (1 if size else worker_epochs) > MOST_ROUNDS:
            raise ConfigError(
                f"{epochs:,} epochs are more than the {MOST_ROUNDS:,} rounds that a training can have",
                hint="ask for fewer epochs, or for longer rounds; a training can be gone on with",
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
        """Find where each round begins."""
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
        """n, of all slots."""
        samples: int = self.ledger.samples
        return samples

    def span(self, number: int) -> Span:
        """The samples of a round, from 0."""
        begin, size = self.offsets[number], self.sizes[number]
        end = min(begin + size, self.samples) if size else self.samples
        return Span(self.starts[number] if begin or size else number, begin, end, self.version_in(number))

    def ends_epoch(self, number: int) -> bool:
        """Whether with a round, from 0, every sample was trained on as often as every other."""
        return self.offsets[number + 1] == 0

    def begins_epoch(self, number: int) -> bool:
        """Whether before a round, from 0, every sample was trained on as often as every other."""
        return self.offsets[number] == 0

    def updates_of_epoch(self, number: int) -> int:
        """Updates of all slots in which every sample is trained on once, as rounds are cut there; of rounds of several epochs as often."""
        full, rest = divmod(self.samples, self.sizes[number] or self.samples)
        return full * len(self.states) + min(rest, len(self.states))

    def tasks_in(self, number: int) -> int:
        """Slots that train in a round, from 0, the first of all: what is left at the end of an epoch may be fewer samples than slots."""
        span = self.span(number)
        return min(self.slots_in(number), span.end - span.begin)

    def following(self, slot: int, number: int) -> int:
        """The first round, from a number on, in which a slot trains; that behind the last one if there is none."""
        rounds = range(number, len(self.epochs))
        return next((one for one in rounds if slot < self.tasks_in(one)), len(self.epochs))

    def preceding(self, slot: int, number: int) -> int:
        """The last round before another one in which a slot trained; -1 if there is none."""
        return next((one for one in range(number - 1, -1, -1) if slot < self.tasks_in(one)), -1)

    @property
    def reached(self) -> int:
        """Rounds that the foremost slot has completed."""
        return max(self.slot_rounds, default=self.round)

    @property
    def epochs_done(self) -> int:
        """Local epochs that are over: how often all samples were trained on, in asynchronous training by all slots together."""
        rounds = self.slot_rounds or [self.round]
        done = sum(self.starts[number] * self.samples + self.offsets[number] for number in rounds)
        return done // (self.samples * len(rounds))

    @property
    def next_epochs(self) -> range:
        """The numbers of the epochs that come next: those of a round."""
        done = self.epochs_done
        return range(done, self.starts[min(bisect.bisect_right(self.starts, done), len(self.epochs))])

    def snapshot(self) -> Self:
        """What the training has come to, as it is now."""
        then = copy.copy(self)
        for name in SHALLOW:
            setattr(then, name, copy.copy(getattr(self, name)))
        return then

    def set_back(self, then: Self) -> None:
        """Go back to a snapshot, with its weights in this process."""
        for one in fields(self):
            setattr(self, one.name, getattr(then, one.name))
        self.fetch()

    def fetch(self) -> None:
        """Read into this process what is only in a checkpoint."""
        self.weights = list(self.weights)
        self.state = {name: list(group) for name, group in self.state.items()}

    @property
    def is_complete(self) -> bool:
        """Whether every slot has done all that is planned."""
        return min(self.slot_rounds, default=self.round) >= len(self.epochs)

    def begin_sync(self) -> None:
        """Go on synchronously: with the round after the foremost slot's last one."""
        self.round, self.slot_rounds = self.reached, []

    def begin_async(self) -> None:
        """Go on asynchronously: with each slot's own next round."""
        if not self.slot_rounds:
            self.slot_rounds = [self.following(slot, self.round) for slot in range(len(self.states))]

    def to_checkpoint(self, names: Sequence[str], slices: Slices | None = None) -> Checkpoint:
        """As it is stored, but for its records; a snapshot, which what comes after does not change.

        Args:
            names: Names of the weights, for people who look into the file.
            slices: What others have written of it already.
        """
        there = {} if slices is None else {**dict.fromkeys(slices.sliced), **slices.arrays}
        weights: dict[str, Any] = {}
        if "weights" not in there:
            weights = {f"{i:04d} {name}": one for i, (name, one) in enumerate(zip(names, self.weights, strict=True))}
        arrays: dict[str, dict[str, Any]] = {
            **({} if "weights" in there else {"weights": weights}),
            **({"ledger": {"counts": self.ledger.counts}} if isinstance(self.ledger, Ledger) else {}),
            **{KEPT + name: numbered(group) for name, group in self.state.items() if KEPT + name not in there},
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
            "asked": self.asked,
            "converged": self.converged,
            "speeds": list(self.speeds),
            **({"parts_from": [[first, list(parts)] for first, parts in self.parts_from]} if self.parts_from else {}),
            **({"versions_from": [list(entry) for entry in self.versions_from]} if self.versions_from else {}),
            "dropped": [[*which, worker] for which, worker in self.dropped.items()],
            **({"ledger": self.ledger.to_facts()} if isinstance(self.ledger, FileLedger) else {}),
            **({} if self.told is None else {"rates": self.rates, "begun": self.begun, "told": self.told}),
        }
        checkpoint = Checkpoint(round=self.version, arrays=arrays, facts=facts, slices=slices)
        return with_states(checkpoint, self.states, () if slices is None else slices.left)

    def _done(self) -> list[list[int]]:
        """The rounds that are done: how many that are equal, their local epochs, and of parts of epochs their size."""
        done = itertools.islice(zip(self.epochs, self.sizes, strict=True), self.reached)
        return [
            [len(list(equal)), epochs, *([size] if size else [])] for (epochs, size), equal in itertools.groupby(done)
        ]

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint) -> Progress:
        """What was stored, also by a version that stored less."""
        arrays, facts = checkpoint.arrays, checkpoint.facts
        if "states" not in facts:
            arrays, facts = as_of_now(arrays, facts)
        ledger: Any = FileLedger.from_facts(facts["ledger"]) if "ledger" in facts else Ledger(0)
        if isinstance(ledger, Ledger):
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
            asked=facts.get("asked", 0),
            converged=facts.get("converged", False),
            state={
                name.removeprefix(KEPT): list(group.values()) for name, group in arrays.items() if name.startswith(KEPT)
            },
            states=[
                {
                    name: [arrays[SLOTS + name].get(f"slot {slot:04d} {i:04d}") for i in range(length)]
                    for name, length in groups.items()
                }
                for slot, groups in enumerate(facts["states"])
            ],
            rates=facts.get("rates", []),
            callbacks=list(arrays["callbacks"].values()) if "callbacks" in arrays else None,
            begun=facts.get("begun", 0),
            told=facts.get("told"),
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
            progress.epochs, progress.sizes = [one[0] for one in done], [sum(one[1:]) for one in done]
        elif progress.reached:
            # Every round had as many but the last, which had what is left of the foremost samples' count.
            usual = facts["settings"]["worker_epochs"]
            before = usual * (progress.reached - 1)
            last = min(usual, max(1, int(ledger.counts.max(initial=0)) - before))
            progress.epochs, progress.sizes = [usual] * (progress.reached - 1) + [last], [0] * progress.reached
        progress._lay_out()
        return progress
