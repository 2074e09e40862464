"""What a training run has come to: all that its next round depends on, in memory and as a checkpoint. Lives on the master.

Everything random follows from (seed, round, slot), so the number of the round is the state of the random numbers.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddlf.errors import CheckpointError, CheckpointMismatch, LeaseError
from ddlf.training.checkpoint import Checkpoint, CheckpointFolder
from ddlf.training.ledger import Ledger
from ddlf.training.record import RoundRecord

Weights = list[np.ndarray[Any, Any]]

MAX_FAILURES = 3
"""So many checkpoints in a row that could not be written end the run: it would run for days for nothing."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """The state after a round of synchronous training, or after an update of asynchronous training.

    Arrays in it are replaced, never changed in place, so that they can be written while training goes on.

    Args:
        weights: Global ones, one array for each of ``model.weights``.
        ledger: Which samples were trained on.
        round: Rounds completed; in asynchronous training updates applied.
        slot_rounds: Rounds that each slot completed; of asynchronous training.
        outer: State of the outer optimizer.
        optimizers: State of each slot's inner optimizer; None before its first round.
        speeds: Samples a second of each slot, smoothed; None before they are known.
        held: What each slot's worker holds, when weights travel as differences.
        lost: What a biased codec has lost so far of each slot's updates, for each tensor; empty unless the run was resumed from here.
        records: Of all rounds so far.
    """

    weights: Weights
    ledger: Ledger
    round: int = 0
    slot_rounds: list[int] = field(default_factory=list)
    outer: Weights = field(default_factory=list)
    optimizers: list[Weights | None] = field(default_factory=list)
    speeds: list[float | None] = field(default_factory=list)
    held: dict[int, Weights] = field(default_factory=dict)
    lost: dict[int, list[Any]] = field(default_factory=dict)
    records: list[RoundRecord] = field(default_factory=list)

    def to_checkpoint(self, names: Sequence[str], settings: dict[str, Any]) -> Checkpoint:
        """As it is stored.

        Args:
            names: Of the weights, for people who look into the file.
            settings: Of the run; a run with others is not resumed from here.
        """
        arrays: dict[str, dict[str, Any]] = {
            "weights": {
                f"{i:04d} {name}": array for i, (name, array) in enumerate(zip(names, self.weights, strict=True))
            },
            "outer": {f"{i:04d}": array for i, array in enumerate(self.outer)},
            "ledger": {"counts": self.ledger.counts},
        }
        for group, slots in (("optimizer", dict(enumerate(self.optimizers))), ("held", self.held), ("lost", self.lost)):
            arrays[group] = {
                f"slot {slot:04d} {i:04d}": array
                for slot, state in slots.items()
                for i, array in enumerate(state or [])
                if array is not None
            }
        facts = {
            "settings": settings,
            "speeds": self.speeds,
            "slot_rounds": self.slot_rounds,
            "begun": [state is not None for state in self.optimizers],
            "records": [_plain(record) for record in self.records],
        }
        return Checkpoint(round=self.round, arrays=arrays, facts=facts)

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint) -> Progress:
        """What was stored."""
        arrays, facts = checkpoint.arrays, checkpoint.facts
        ledger = Ledger(0)
        ledger.counts = np.array(arrays["ledger"]["counts"])
        optimizers = _by_slot(arrays["optimizer"])
        weights = list(arrays["weights"].values())
        return Progress(
            weights=weights,
            ledger=ledger,
            round=checkpoint.round,
            slot_rounds=list(facts["slot_rounds"]),
            outer=list(arrays["outer"].values()),
            optimizers=[
                list(optimizers.get(slot, {}).values()) if begun else None for slot, begun in enumerate(facts["begun"])
            ],
            speeds=list(facts["speeds"]),
            held={slot: list(state.values()) for slot, state in _by_slot(arrays["held"]).items()},
            lost={
                slot: [state.get(i) for i in range(len(weights))] for slot, state in _by_slot(arrays["lost"]).items()
            },
            records=[_record(record) for record in facts["records"]],
        )


def _plain(record: RoundRecord) -> dict[str, Any]:
    return {**dataclasses.asdict(record), "workers": list(record.workers), "verdicts": list(record.verdicts)}


def _record(facts: dict[str, Any]) -> RoundRecord:
    return RoundRecord(**{**facts, "workers": tuple(facts["workers"]), "verdicts": tuple(facts["verdicts"])})


def _by_slot(group: Any) -> dict[int, dict[int, Any]]:
    slots: dict[int, dict[int, Any]] = {}
    for name, array in group.items():
        _, slot, number = name.split(" ")
        slots.setdefault(int(slot), {})[int(number)] = array
    return slots


class Keeper:
    """Writes checkpoints while training goes on.

    Args:
        folder: Opened for writing.
        every: Write after so many rounds.
        names: Of the weights.
        settings: Of the run.
        report: Takes a sentence about each checkpoint that could not be written.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        every: int,
        names: Sequence[str],
        settings: dict[str, Any],
        report: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._every = every
        self._names = names
        self._settings = settings
        self._report = report
        self._writing: asyncio.Future[Any] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._saved = -1
        self._failures = 0

    def is_due(self, round: int) -> bool:
        """Whether a checkpoint is written after so many rounds."""
        return round % self._every == 0

    async def keep(self, progress: Progress) -> None:
        """Begin to write, if it is due; the one before is waited for.

        Raises:
            LeaseError: Another master took the job over; nothing was written.
            CheckpointError: The third one in a row that could not be written.
        """
        if self.is_due(progress.round):
            async with self._one_at_a_time:  # slots of asynchronous training come here on their own
                await self.finish()
                self._begin(progress)

    async def last(self, progress: Progress) -> None:
        """Write what is not written yet, at the end of training or when it is interrupted, and let the folder go."""
        try:
            await self.finish()
            if self._saved != progress.round:
                self._begin(progress)
                await self.finish()
        finally:
            await asyncio.to_thread(self._folder.close)

    def resumed_at(self, round: int) -> None:
        """Say that this round is in the folder already."""
        self._saved = round

    def _begin(self, progress: Progress) -> None:
        self._saved = progress.round
        checkpoint = progress.to_checkpoint(self._names, self._settings)
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._folder.save, checkpoint))

    async def finish(self) -> None:
        """Wait until the one that is being written is on the disk."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            self._writing = writing
            raise
        except LeaseError:
            raise
        except CheckpointError as error:
            self._saved = -1
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise
            self._report(f"{error}; training goes on, the checkpoint before is whole")
        else:
            self._failures = 0


def check_settings(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on from a run that was another one.

    Raises:
        CheckpointMismatch: The text says what differs.
    """
    rows = [
        f"  {name}: {saved.get(name)!r} in the checkpoint, {now.get(name)!r} now"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]
    if rows:
        raise CheckpointMismatch(
            "the run would not be the one that the checkpoint is of (use the same settings, or begin anew in another "
            "folder):\n" + "\n".join(rows[:10])
        )
