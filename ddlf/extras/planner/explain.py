"""Explains the difference between the predicted and the measured rounds of a run, from its events. Pure functions.

A round takes longer than predicted by parts that the events show: the slowest worker trains longer, or a worker and its
link need more time to move weights and updates, or workers wait for something else. The largest part is the
cause if it explains most of the difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from ddlf.events import (
    CheckpointWritten,
    Committed,
    Event,
    PhaseEnded,
    RoundsMeasured,
    RoundsPredicted,
    RunEnded,
    SlotBackedUp,
    UpdateArrived,
    WorkerLost,
)
from ddlf.events.record import RoundRecord, size
from ddlf.extras.planner.probe import FIRST_ROUNDS

Cause = Literal[
    "link", "straggler", "data", "wait", "swapping", "computing", "within its interval", "faster", "unclear"
]
SENTENCES: dict[str, str] = {
    "link": "weights and updates take longer to move: look at the network, or at other programs that use it",
    "straggler": "one worker trains more slowly than the others: look for other programs there, or train without it",
    "data": "rounds wait for data, or for the evaluation of test and validation data",
    "wait": "rounds wait for checkpoints, hooks or callbacks on the master, or slots of lost workers are computed again",
    "swapping": "a machine reads memory back from its disk: give it less work, or take a smaller batch",
    "computing": "all workers train more slowly than when they were measured: look for other programs, or plan again",
    "within its interval": "there is nothing to explain",
    "faster": "the measurements may be of a busy time: ddlf plan --again measures again",
    "unclear": "no single part explains the difference",
}
"""The meaning of each cause, with advice."""
MOST_OF = 0.5
"""The cause explains at least such a part of the difference."""
CLEARER = 1.5
"""The cause explains at least so many times as much as the next part."""
ALIKE = 0.5
"""If the other workers need at least such a part of the slowest worker's additional time, too, all are slower."""
SWAPPED = 1 << 20
"""Bytes from swap in a round that count as swapping."""
WHOLE = 0.9
"""A round with a smaller part of the usual samples is the last one of an epoch. The prediction is not about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Why rounds of a run took longer than predicted.

    Args:
        cause: The name of the cause.
        predicted: Predicted seconds of a round.
        low: Lower end of the 80 % interval.
        high: Its upper end.
        measured: Measured seconds of a round; in asynchronous training, of a round of the slowest slot.
        parts: For each cause, the seconds of a round that it adds.
        worker: Number of the worker that the cause is about; None if it is about all workers or none.
        detail: More about the cause; may be empty.
    """

    cause: Cause
    predicted: float
    low: float
    high: float
    measured: float
    parts: dict[str, float]
    worker: int | None = None
    detail: str = ""

    @property
    def lines(self) -> list[str]:
        """The explanation as lines to print."""
        worker_text = f" of worker {self.worker}" if self.worker is not None else ""
        lines = [
            f"rounds    {self.measured:.3g} s each, predicted {self.predicted:.3g} s ({self.low:.3g}-{self.high:.3g})"
        ]
        shown = {name: seconds for name, seconds in self.parts.items() if seconds > 0.0}
        if self.measured > self.high and shown:
            lines.append("more      " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in shown.items()))
        detail_text = f" ({self.detail})" if self.detail else ""
        return [*lines, f"{self.cause}{worker_text}: {SENTENCES[self.cause]}{detail_text}"]


@dataclass(slots=True)
class _WorkerCosts:
    """The seconds and bytes that one worker needed for its rounds."""

    compute: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    swapped: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Round:
    """A round after the first ones, which compile.

    Attributes:
        record: Its record.
        between: Seconds between its end and the end of the round before.
        updates: Its updates, without the first ones of each worker.
    """

    record: RoundRecord
    between: float
    updates: tuple[UpdateArrived, ...]

    @property
    def work(self) -> int:
        """The samples that it trains on, counted in each epoch."""
        return self.record.samples * self.record.epochs


@dataclass(slots=True)
class _RunFacts:
    """The facts of a run that explain its rounds.

    Attributes:
        predicted: The prediction; None without one.
        rounds: The rounds of each slot; under None, the common rounds.
        most: The most samples of a round of each slot, likewise.
        lost: How often a worker was lost.
        backups: Number of slots that a second worker had to compute, because the first one was late.
        evaluation_s: Seconds of evaluations on the master or on workers.
        writing_s: Seconds of checkpoints.
        median_s: The median that the run itself has measured with a better clock.
        is_over: Whether training has ended, so that later evaluations do not count.
    """

    predicted: RoundsPredicted | None = None
    rounds: dict[int | None, list[_Round]] = field(default_factory=lambda: defaultdict(list))
    most: dict[int | None, int] = field(default_factory=lambda: defaultdict(int))
    lost: int = 0
    backups: int = 0
    evaluation_s: float = 0.0
    writing_s: float = 0.0
    median_s: float = 0.0
    is_over: bool = False

    @property
    def whole_rounds(self) -> dict[int | None, list[_Round]]:
        """The rounds of each slot without shorter last rounds of epochs. Slots without such rounds are missing."""
        rounds = {
            slot: [slot_round for slot_round in slot_rounds if slot_round.work >= WHOLE * self.most[slot]]
            for slot, slot_rounds in self.rounds.items()
        }
        return {slot: slot_rounds for slot, slot_rounds in rounds.items() if slot_rounds}

    @property
    def workers(self) -> dict[int, _WorkerCosts]:
        """The seconds and bytes of each worker in these rounds, by its number."""
        workers = dict[int, _WorkerCosts]()
        for update in (
            update
            for slot_rounds in self.whole_rounds.values()
            for slot_round in slot_rounds
            for update in slot_round.updates
        ):
            costs = workers.setdefault(update.worker, _WorkerCosts())
            costs.compute.append(update.compute_s)
            costs.transfer.append(update.transfer_s)
            costs.swapped.append(update.swapped)
        return workers


def explain(events: Iterable[tuple[float, Event]], *, evaluates_there: bool = False) -> Explained | None:
    """Explain the rounds of a run; None if they were not predicted, or if there are too few of them.

    Args:
        events: The events of the run, with their times in seconds.
        evaluates_there: Whether workers evaluate, so that moving updates takes the time of evaluations, too.
    """
    facts = _facts_of(events)
    predicted = facts.predicted
    rounds = facts.whole_rounds
    if predicted is None or not rounds or not facts.workers:
        return None
    between = {slot: median(slot_round.between for slot_round in slot_rounds) for slot, slot_rounds in rounds.items()}
    slot, measured = max(between.items(), key=lambda item: item[1])
    measured = facts.median_s if slot is None and facts.median_s else measured
    records = [slot_round.record for slot_round in rounds[slot]]
    parts, worker, detail = _parts(facts, predicted, records, measured, evaluates_there)
    return Explained(
        cause=(cause := _cause(parts, measured, predicted)),
        predicted=predicted.seconds,
        low=predicted.low,
        high=predicted.high,
        measured=measured,
        parts=parts,
        worker=worker.get(cause),
        detail=detail.get(cause, ""),
    )


def _facts_of(events: Iterable[tuple[float, Event]]) -> _RunFacts:
    """Collect these facts from the events. The first rounds, which compile, do not count."""
    facts, before = _RunFacts(), dict[int | None, float]()
    rounds, updates = Counter[int | None](), Counter[int]()
    waiting = list[UpdateArrived]()
    for when, event in events:
        match event:
            case RoundsPredicted():
                facts, waiting = _RunFacts(predicted=event), []  # the command was started again
                for first in (before, rounds, updates):
                    first.clear()
            case UpdateArrived():
                updates[event.worker] += 1
                if updates[event.worker] > FIRST_ROUNDS:
                    waiting.append(event)
            case Committed(record=record):
                slot = record.slot
                updates_of_slot = tuple(update for update in waiting if slot in (None, update.slot))
                waiting = [update for update in waiting if slot not in (None, update.slot)]
                rounds[slot] += 1
                facts.most[slot] = max(facts.most[slot], record.samples * record.epochs)
                if rounds[slot] > FIRST_ROUNDS:
                    facts.rounds[slot].append(_Round(record, when - before[slot], updates_of_slot))
                before[slot] = when
            case WorkerLost():
                facts.lost += 1
            case SlotBackedUp():
                facts.backups += 1
            case PhaseEnded(what="evaluating" | "validating") if not facts.is_over:
                facts.evaluation_s += event.seconds
            case CheckpointWritten():
                facts.writing_s += event.seconds
            case RoundsMeasured() if event.rounds:
                facts.median_s = event.seconds
            case RunEnded():
                facts.is_over = True
    return facts


def _parts(
    facts: _RunFacts, predicted: RoundsPredicted, records: list[RoundRecord], measured: float, evaluates_there: bool
) -> tuple[dict[str, float], dict[str, int], dict[str, str]]:
    """Return the seconds that each cause adds to a round, the worker that it is about, and more about it."""
    rounds, workers = len(facts.rounds[records[0].slot]), facts.workers
    loading = median(record.wait_data_s for record in records)
    compute = {number: median(costs.compute) for number, costs in workers.items()}
    transfer = {number: median(costs.transfer) for number, costs in workers.items()}
    swapped = {number: median(costs.swapped) for number, costs in workers.items()}
    slowest, farthest = (max(times, key=times.__getitem__) for times in (compute, transfer))
    extra = max(compute[slowest] - loading - predicted.compute_s, 0.0)
    others_compute = [seconds for number, seconds in compute.items() if number != slowest]
    of_all = not others_compute or median(others_compute) - loading - predicted.compute_s > ALIKE * extra
    is_late = facts.backups > MOST_OF * rounds
    if is_late:  # the first worker's time for it is in no update
        extra, of_all = max(measured - predicted.seconds, extra), False
    moving = max(transfer[farthest] - (predicted.seconds - predicted.compute_s), 0.0)
    idle = max(measured - median(record.seconds for record in records), 0.0)
    repeated = median(
        max(record.seconds - record.compute_s - record.transfer_s - record.merge_s, 0.0) for record in records
    )
    evaluation = facts.evaluation_s / rounds
    evaluates = min(evaluation, idle)
    if evaluates_there and evaluation > ALIKE * moving:
        evaluates, moving = evaluates + moving, 0.0
    swaps = max(swapped, key=swapped.__getitem__)
    parts = dict.fromkeys(("link", "straggler", "data", "wait", "swapping", "computing"), 0.0)
    computing = "swapping" if swapped[swaps] >= SWAPPED else "computing" if of_all else "straggler"
    parts |= {computing: extra, "link": moving, "data": loading + evaluates, "wait": idle - min(evaluation, idle)}
    if not is_late:  # no update has the time of slots that were computed again, because their worker was lost
        parts["wait"] += repeated
    details = {
        "data": f"loading {loading:.3g} s, evaluation {evaluates:.3g} s a round",
        "wait": f"checkpoints take {facts.writing_s / rounds:.3g} s a round, and {facts.lost} times a worker was lost",
        "swapping": f"{size(round(swapped[swaps]))} a round",
    }
    causing = {"swapping": swaps} if is_late else {"swapping": swaps, "straggler": slowest}
    others_transfer = [seconds for number, seconds in transfer.items() if number != farthest]
    if others_transfer and median(others_transfer) < ALIKE * transfer[farthest]:
        causing["link"] = farthest
    return parts, causing, details


def _cause(parts: dict[str, float], measured: float, predicted: RoundsPredicted) -> Cause:
    """Return the name of the cause."""
    if measured < predicted.low:
        return "faster"
    if measured <= predicted.high:
        return "within its interval"
    (largest, seconds), (_, next_one) = sorted(parts.items(), key=lambda part: -part[1])[:2]
    if seconds >= MOST_OF * (measured - predicted.seconds) and seconds >= CLEARER * next_one:
        cause: Cause = largest  # type: ignore[assignment]  # the names of the parts are causes
        return cause
    return "unclear"
