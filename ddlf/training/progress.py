"""What a training has come to: all that its next round depends on, in memory and as a checkpoint. Lives on the master.

Everything random follows from (seed, round, slot), so the number of the round is the state of the random numbers.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddlf.checkpoints.checkpoint import Checkpoint
from ddlf.facts import from_data
from ddlf.record import RoundRecord
from ddlf.training.ledger import Ledger

Weights = list[np.ndarray[Any, Any]]


@dataclass(slots=True, kw_only=True)
class Progress:
    """The state after a round of synchronous training, or after an update of asynchronous training.

    Arrays in it are replaced, never changed in place, so that they can be written while training goes on.

    Args:
        weights: Global ones, one array for each of ``model.weights``.
        ledger: Which samples were trained on.
        training: Random name of this training, which stays its own when it is resumed.
        version: Merges applied; the number of the checkpoint.
        round: Rounds completed, of synchronous training.
        slot_rounds: Rounds that each slot completed, of asynchronous training; empty in synchronous training.
        epochs: Local epochs of each round, done or planned.
        starts: Local epochs before each of them.
        asked: Local epochs that the whole training was to have when it was last planned.
        converged: Whether ``is_convergent`` has ended it.
        outer: State of the outer optimizer.
        optimizers: State of each slot's inner optimizer; None before its first round, and when it is not kept.
        speeds: Samples a second of each slot, smoothed; None before they are known.
        held: Weights that each slot's worker holds, when they travel as differences.
        lost: Residual of each slot, for each tensor: what a biased codec still owes of its updates.
        settings: Of the run that has come to this.
        compiled: The optimizer of the master's model, described; not stored.
        slots_from: The round from which on, from 0, and K in it; more than one if slots were added. Each round has all samples once.
        records: Of all rounds so far.
    """

    weights: Weights
    ledger: Ledger
    training: str = field(default_factory=lambda: secrets.token_hex(8))
    version: int = 0
    round: int = 0
    slot_rounds: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    asked: int = 0
    converged: bool = False
    outer: Weights = field(default_factory=list)
    optimizers: list[Weights | None] = field(default_factory=list)
    speeds: list[float | None] = field(default_factory=list)
    held: dict[int, Weights] = field(default_factory=dict)
    lost: dict[int, list[Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    compiled: dict[str, Any] = field(default_factory=dict)
    slots_from: list[tuple[int, int]] = field(default_factory=list)
    records: list[RoundRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots_from = list(self.slots_from) or [(0, len(self.optimizers))]

    def slots_in(self, number: int) -> int:
        """K in a round, from 0."""
        return next(slots for first, slots in reversed(self.slots_from) if first <= number)

    def plan(self, epochs: int, worker_epochs: int, *, more: bool) -> None:
        """Set the local epochs of the rounds to come. Those that a slot has done stay as they were, so that every slot has the same rounds.

        Args:
            epochs: Local epochs of the whole training, or those to come.
            worker_epochs: Local epochs of a round; the last one is shorter when they are no multiple.
            more: Whether ``epochs`` are those to come.
        """
        done = self.epochs[: self.reached]
        left = epochs if more else max(0, epochs - sum(done))
        full, rest = divmod(left, worker_epochs)
        self.epochs = done + [worker_epochs] * full + [rest] * (rest > 0)
        self.starts = [0, *itertools.accumulate(self.epochs)]
        self.asked = self.starts[-1]

    @property
    def reached(self) -> int:
        """Rounds that the foremost slot has completed."""
        return max(self.slot_rounds, default=self.round)

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
            self.slot_rounds = [self.round] * len(self.optimizers)

    def to_checkpoint(self, names: Sequence[str]) -> Checkpoint:
        """As it is stored, but for its records; a snapshot, which what comes after does not change.

        Args:
            names: Of the weights, for people who look into the file.
        """
        arrays: dict[str, dict[str, Any]] = {
            "weights": {
                f"{i:04d} {name}": array for i, (name, array) in enumerate(zip(names, self.weights, strict=True))
            },
            "outer": {f"{i:04d}": array for i, array in enumerate(self.outer)},
            "ledger": {"counts": self.ledger.counts},
            "optimizer": arrays_of_slots(dict(enumerate(self.optimizers))),
            "held": arrays_of_slots(self.held),
            "lost": arrays_of_slots(self.lost),
        }
        facts = {
            "settings": dict(self.settings),
            "training": self.training,
            "round": self.round,
            "slot_rounds": list(self.slot_rounds),
            "slots_from": [list(entry) for entry in self.slots_from],
            "epochs": [[len(list(equal)), epochs] for epochs, equal in itertools.groupby(self.epochs[: self.reached])],
            "asked": self.asked,
            "converged": self.converged,
            "speeds": list(self.speeds),
            "begun": [state is not None for state in self.optimizers],
        }
        return Checkpoint(round=self.version, arrays=arrays, facts=facts)

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint) -> Progress:
        """What was stored, also by a version that stored less."""
        arrays, facts = checkpoint.arrays, checkpoint.facts
        ledger = Ledger(0)
        ledger.counts = np.array(arrays["ledger"]["counts"])
        optimizers = _by_slot(arrays["optimizer"])
        weights = list(arrays["weights"].values())
        slot_rounds = list(facts["slot_rounds"])
        progress = Progress(
            weights=weights,
            ledger=ledger,
            version=checkpoint.round,
            round=facts.get("round", 0 if slot_rounds else checkpoint.round),
            slot_rounds=slot_rounds,
            slots_from=[(first, slots) for first, slots in facts.get("slots_from", ())],
            asked=facts.get("asked", 0),
            converged=facts.get("converged", False),
            outer=list(arrays["outer"].values()),
            optimizers=[
                list(optimizers.get(slot, {}).values()) if begun else None for slot, begun in enumerate(facts["begun"])
            ],
            speeds=list(facts["speeds"]) or [None] * len(facts["begun"]),
            held={slot: list(state.values()) for slot, state in _by_slot(arrays["held"]).items()},
            lost={
                slot: [state.get(i) for i in range(len(weights))] for slot, state in _by_slot(arrays["lost"]).items()
            },
            settings=dict(facts["settings"]),
            records=[from_data(RoundRecord, record) for record in facts["records"]]
            if "records" in facts
            else list(checkpoint.records),
        )
        progress.training = facts.get("training", progress.training)
        if "epochs" in facts:
            progress.epochs = [epochs for count, epochs in facts["epochs"] for _ in range(count)]
        elif progress.reached:
            # Every round had as many but the last, which had what is left of the foremost samples' count.
            usual = facts["settings"]["worker_epochs"]
            before = usual * (progress.reached - 1)
            last = min(usual, max(1, int(ledger.counts.max(initial=0)) - before))
            progress.epochs = [usual] * (progress.reached - 1) + [last]
        return progress


def arrays_of_slots(slots: dict[int, Any]) -> dict[str, Any]:
    """The arrays of each slot, by names that say which they are; None has none."""
    return {
        f"slot {slot:04d} {i:04d}": array
        for slot, state in slots.items()
        for i, array in enumerate(state or [])
        if array is not None
    }


def _by_slot(group: Any) -> dict[int, dict[int, Any]]:
    slots: dict[int, dict[int, Any]] = {}
    for name, array in group.items():
        _, slot, number = name.split(" ")
        slots.setdefault(int(slot), {})[int(number)] = array
    return slots
