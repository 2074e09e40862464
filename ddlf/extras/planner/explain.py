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
        where = f" of worker {self.worker}" if self.worker is not None else ""
        found = [
            f"rounds    {self.measured:.3g} s each, predicted {self.predicted:.3g} s ({self.low:.3g}-{self.high:.3g})"
        ]
        shown = {name: seconds for name, seconds in self.parts.items() if seconds > 0.0}
        if self.measured > self.high and shown:
            found.append("more      " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in shown.items()))
        more = f" ({self.detail})" if self.detail else ""
        return [*found, f"{self.cause}{where}: {SENTENCES[self.cause]}{more}"]


@dataclass(slots=True)
class _OfWorker:
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
class _Seen:
    """The facts of a run that explain its rounds.

    Attributes:
        predicted: The prediction; None without one.
        rounds: The rounds of each slot; under None, the common rounds.
        most: The most samples of a round of each slot, likewise.
        lost: How often a worker was lost.
        late: Number of slots that a second worker had to compute, because the first one was late.
        evaluation_s: Seconds of evaluations on the master or on workers.
        writing_s: Seconds of checkpoints.
        median_s: The median that the run itself has measured with a better clock.
        is_over: Whether training has ended, so that later evaluations do not count.
    """

    predicted: RoundsPredicted | None = None
    rounds: dict[int | None, list[_Round]] = field(default_factory=lambda: defaultdict(list))
    most: dict[int | None, int] = field(default_factory=lambda: defaultdict(int))
    lost: int = 0
    late: int = 0
    evaluation_s: float = 0.0
    writing_s: float = 0.0
    median_s: float = 0.0
    is_over: bool = False

    @property
    def whole(self) -> dict[int | None, list[_Round]]:
        """The rounds of each slot without shorter last rounds of epochs. Slots without such rounds are missing."""
        found = {slot: [one for one in all if one.work >= WHOLE * self.most[slot]] for slot, all in self.rounds.items()}
        return {slot: all for slot, all in found.items() if all}

    @property
    def workers(self) -> dict[int, _OfWorker]:
        """The seconds and bytes of each worker in these rounds, by its number."""
        found = dict[int, _OfWorker]()
        for update in (update for all in self.whole.values() for one in all for update in one.updates):
            costs = found.setdefault(update.worker, _OfWorker())
            costs.compute.append(update.compute_s)
            costs.transfer.append(update.transfer_s)
            costs.swapped.append(update.swapped)
        return found


def explain(events: Iterable[tuple[float, Event]], *, evaluates_there: bool = False) -> Explained | None:
    """Explain the rounds of a run; None if they were not predicted, or if there are too few of them.

    Args:
        events: The events of the run, with their times in seconds.
        evaluates_there: Whether workers evaluate, so that moving updates takes the time of evaluations, too.
    """
    seen = _seen(events)
    predicted = seen.predicted
    whole = seen.whole
    if predicted is None or not whole or not seen.workers:
        return None
    between = {slot: median(one.between for one in all) for slot, all in whole.items()}
    slot, measured = max(between.items(), key=lambda found: found[1])
    measured = seen.median_s if slot is None and seen.median_s else measured
    records = [one.record for one in whole[slot]]
    parts, worker, detail = _parts(seen, predicted, records, measured, evaluates_there)
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


def _seen(events: Iterable[tuple[float, Event]]) -> _Seen:
    """Collect these facts from the events. The first rounds, which compile, do not count."""
    seen, before = _Seen(), dict[int | None, float]()
    rounds, updates = Counter[int | None](), Counter[int]()
    waiting = list[UpdateArrived]()
    for when, event in events:
        match event:
            case RoundsPredicted():
                seen, waiting = _Seen(predicted=event), []  # the command was started again
                for first in (before, rounds, updates):
                    first.clear()
            case UpdateArrived():
                updates[event.worker] += 1
                if updates[event.worker] > FIRST_ROUNDS:
                    waiting.append(event)
            case Committed(record=record):
                slot = record.slot
                own = tuple(one for one in waiting if slot in (None, one.slot))
                waiting = [one for one in waiting if slot not in (None, one.slot)]
                rounds[slot] += 1
                seen.most[slot] = max(seen.most[slot], record.samples * record.epochs)
                if rounds[slot] > FIRST_ROUNDS:
                    seen.rounds[slot].append(_Round(record, when - before[slot], own))
                before[slot] = when
            case WorkerLost():
                seen.lost += 1
            case SlotBackedUp():
                seen.late += 1
            case PhaseEnded(what="evaluating" | "validating") if not seen.is_over:
                seen.evaluation_s += event.seconds
            case CheckpointWritten():
                seen.writing_s += event.seconds
            case RoundsMeasured() if event.rounds:
                seen.median_s = event.seconds
            case RunEnded():
                seen.is_over = True
    return seen


def _parts(
    seen: _Seen, predicted: RoundsPredicted, records: list[RoundRecord], measured: float, evaluates_there: bool
) -> tuple[dict[str, float], dict[str, int], dict[str, str]]:
    """Return the seconds that each cause adds to a round, the worker that it is about, and more about it."""
    rounds, workers = len(seen.rounds[records[0].slot]), seen.workers
    loading = median(record.wait_data_s for record in records)
    compute = {number: median(one.compute) for number, one in workers.items()}
    transfer = {number: median(one.transfer) for number, one in workers.items()}
    swapped = {number: median(one.swapped) for number, one in workers.items()}
    slowest, farthest = (max(found, key=found.__getitem__) for found in (compute, transfer))
    more = max(compute[slowest] - loading - predicted.compute_s, 0.0)
    others = [seconds for number, seconds in compute.items() if number != slowest]
    of_all = not others or median(others) - loading - predicted.compute_s > ALIKE * more
    is_late = seen.late > MOST_OF * rounds
    if is_late:  # the first worker's time for it is in no update
        more, of_all = max(measured - predicted.seconds, more), False
    moving = max(transfer[farthest] - (predicted.seconds - predicted.compute_s), 0.0)
    idle = max(measured - median(record.seconds for record in records), 0.0)
    again = median(max(one.seconds - one.compute_s - one.transfer_s - one.merge_s, 0.0) for one in records)
    evaluation = seen.evaluation_s / rounds
    evaluates = min(evaluation, idle)
    if evaluates_there and evaluation > ALIKE * moving:
        evaluates, moving = evaluates + moving, 0.0
    swaps = max(swapped, key=swapped.__getitem__)
    parts = dict.fromkeys(("link", "straggler", "data", "wait", "swapping", "computing"), 0.0)
    computing = "swapping" if swapped[swaps] >= SWAPPED else "computing" if of_all else "straggler"
    parts |= {computing: more, "link": moving, "data": loading + evaluates, "wait": idle - min(evaluation, idle)}
    if not is_late:  # no update has the time of slots that were computed again, because their worker was lost
        parts["wait"] += again
    detail = {
        "data": f"loading {loading:.3g} s, evaluation {evaluates:.3g} s a round",
        "wait": f"checkpoints take {seen.writing_s / rounds:.3g} s a round, and {seen.lost} times a worker was lost",
        "swapping": f"{size(round(swapped[swaps]))} a round",
    }
    worker = {"swapping": swaps} if is_late else {"swapping": swaps, "straggler": slowest}
    near = [seconds for number, seconds in transfer.items() if number != farthest]
    if near and median(near) < ALIKE * transfer[farthest]:
        worker["link"] = farthest
    return parts, worker, detail


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
