"""Distributes the portions of one pass over all samples. Runs on the master; pure, except for the clock.

Each slot begins with its own portions. Then it takes portions of the slot that has the most left: those beside its last
one, else from the end. When no portion waits, a free slot also computes one that another slot has: at once if that slot
has not begun it, and otherwise if it takes much longer than usual. The first result counts.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from ddlf.training.slot.task import MetricCounts

LATE = 1.5
"""A portion is late after this many times the median time of a portion."""
MANY = 4
"""A slot takes two portions at once while this many or more wait for each slot. This saves messages."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Portion:
    """Some samples that one worker computes at once.

    Args:
        number: Its number in the pass, from 0.
        begin: The first sample.
        end: The index after the last sample.
        slot: The slot that it belongs to at first.
    """

    number: int
    begin: int
    end: int
    slot: int

    @property
    def samples(self) -> int:
        """The number of its samples."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Computed:
    """The report of a worker about a portion that it has computed. The gradient stays on the worker.

    Args:
        metrics: Keras's metrics of the portion.
        counted: The sums and counts of these metrics.
        peak: The largest absolute value of its gradient's share in that of all samples.
        seconds: Seconds of computing.
        moved: Path of an untrained weight that it changed; "" for none.
    """

    metrics: dict[str, float]
    counted: MetricCounts
    peak: float
    seconds: float
    moved: str = ""

    def to_message(self) -> list[Any]:
        """Return a short form, since the master receives one for each portion.

        Names are left out if they equal the names of the metrics, and single values of one type form one array.
        """
        names: Sequence[str | None] | None = self.counted.names
        state: Any = self.counted.state
        if names == list(self.metrics):
            names = None
        if len({array.dtype for array in state}) == 1 and not any(array.ndim for array in state):
            state = np.array(state)
        return [self.metrics, names, state, self.peak, self.seconds, *([self.moved] if self.moved else [])]

    @classmethod
    def of_message(cls, message: Sequence[Any]) -> Computed:
        """Return the report that ``to_message`` has made into a message."""
        metrics, names, state, *fields = message
        names = list(metrics) if names is None else names
        if isinstance(state, np.ndarray):
            state = [np.asarray(value) for value in state]
        return cls(metrics, MetricCounts(names, state), *fields)


def portions_of(samples: int, slots: int, size: int) -> list[Portion]:
    """Cut all samples into slots of nearly equal size, and each slot into portions of at most ``size`` samples."""
    portions: list[Portion] = []
    ends = [samples * slot // slots for slot in range(slots + 1)]
    for slot in range(slots):
        for begin in range(ends[slot], ends[slot + 1], size):
            portions.append(Portion(len(portions), begin, min(begin + size, ends[slot + 1]), slot))
    return portions


@dataclass(slots=True)
class Tally:
    """The work of one worker in a pass.

    Args:
        done: Number of portions with a result that counts.
        backup: Number of portions that another slot had, too, when this worker got them.
        dropped: Number of results that do not count.
    """

    done: int = 0
    backup: int = 0
    dropped: int = 0


@dataclass(slots=True)
class Pool(Generic[Result]):
    """The portions of one pass that are waiting, being computed, counted, or pushed.

    Args:
        portions: All portions of the pass, in the order of their numbers.
        clock: Returns seconds.

    Attributes:
        results: The result of each portion that counts, by number.
        tallies: The work of each worker, by its number.
        failure: Why the pass must begin again; None if it need not.
        news: An event that is set at the next change, and then replaced.
    """

    portions: Sequence[Portion]
    clock: Callable[[], float]
    results: dict[int, Result] = field(default_factory=dict)
    tallies: dict[int, Tally] = field(default_factory=dict)
    failure: Exception | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: list[list[Portion]] = field(default_factory=list)
    _at: dict[int, list[list[int]]] = field(default_factory=dict)  # slot -> what it has, in the order of computing
    _since: dict[int, float] = field(default_factory=dict)  # slot -> when it began the first of these
    _last: dict[int, int] = field(default_factory=dict)  # slot -> the last portion that it took
    _counted: dict[int, list[int]] = field(default_factory=dict)  # slot -> portions that count and are not pushed
    _took: list[float] = field(default_factory=list)
    _pushed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        slots = 1 + max(portion.slot for portion in self.portions)
        self._waiting = [[portion for portion in self.portions if portion.slot == slot] for slot in range(slots)]

    @property
    def is_over(self) -> bool:
        """Whether the shards have the gradient of every portion, or the pass must begin again."""
        return self.failure is not None or len(self._pushed) == len(self.portions)

    @property
    def is_counted(self) -> bool:
        """Whether every portion has a result that counts."""
        return len(self.results) == len(self.portions)

    def tally(self, worker: int) -> Tally:
        """Return the counts of a worker, to change them."""
        return self.tallies.setdefault(worker, Tally())

    @property
    def waits(self) -> bool:
        """Whether a portion waits for a worker."""
        return any(self._waiting)

    def take(self, slot: int) -> list[Portion]:
        """Return the next waiting portions for a slot: one, two while many wait, or none if none waits."""
        waiting = sum(map(len, self._waiting))
        count = min(waiting, 2 if waiting >= MANY * len(self._waiting) else 1)
        return self._give([self._next(slot) for _ in range(count)], slot)

    def _next(self, slot: int) -> Portion:
        """Take the waiting portion that suits a slot best off its list."""
        if slot < len(self._waiting) and self._waiting[slot]:
            portion = self._waiting[slot].pop(0)
        else:
            last, most = self._last.get(slot, -2), max(self._waiting, key=len)
            beside = [
                (waiting, candidate)
                for waiting in self._waiting
                for candidate in waiting
                if abs(candidate.number - last) == 1
            ]
            waiting, portion = beside[0] if beside else (most, most[-1])
            waiting.remove(portion)
        self._last[slot] = portion.number
        return portion

    def second(self, slot: int) -> tuple[list[Portion], float | None]:
        """Return a portion of another slot, for a second attempt; or none, and the seconds until one may be late.

        The seconds are None if nothing can become late before something else changes.
        """
        at = {of: [number for numbers in calls for number in numbers] for of, calls in self._at.items()}
        copies = [number for numbers in at.values() for number in numbers]
        own_numbers = at.get(slot, [])
        soonest: float | None = None
        for other, numbers in at.items():
            for index, number in reversed(list(enumerate(numbers))):
                if other == slot or number in own_numbers or number in self.results or copies.count(number) > 1:
                    continue
                if index == 0:
                    left = self._left_s(other)
                    if left is None or left > 0:
                        soonest = left if soonest is None else min(soonest, left or soonest)
                        continue
                self._last[slot] = number
                return self._give([self.portions[number]], slot), None
        return [], soonest

    def done(self, portions: Sequence[Portion], slot: int, results: Sequence[Result]) -> list[bool]:
        """Note the results of portions that a slot has taken together.

        Returns:
            For each one whether it counts; otherwise another slot was faster.
        """
        now = self.clock()
        numbers = [portion.number for portion in portions]
        self._took += [(now - self._since[slot]) / len(numbers)] * len(numbers)
        self._at[slot].remove(numbers)
        self._since[slot] = now
        counts = [number not in self.results for number in numbers]
        for number, result, is_first in zip(numbers, results, counts, strict=True):
            if is_first:
                self.results[number] = result
                self._counted.setdefault(slot, []).append(number)
        self._turn()
        return counts

    def unpushed(self, slot: int) -> list[int]:
        """Return the portions of a slot that count and were not pushed."""
        return list(self._counted.get(slot, ()))

    def pushed(self, slot: int, portions: Sequence[int]) -> None:
        """Note that the shards have the gradients of some portions, which a slot has pushed."""
        self._counted[slot] = [number for number in self._counted[slot] if number not in portions]
        self._pushed.update(portions)
        self._turn()

    def give_back(self, slot: int) -> None:
        """Let other workers compute the portions that are lost with the worker of a slot."""
        lost = self._counted.pop(slot, [])
        for number in lost:
            del self.results[number]
        elsewhere = {n for other, calls in self._at.items() if other != slot for numbers in calls for n in numbers}
        lost += [n for numbers in self._at.pop(slot, []) for n in numbers if n not in self.results]
        self._since.pop(slot, None)
        back = [self.portions[number] for number in lost if number not in elsewhere]
        for portion in back:
            self._waiting[portion.slot].append(portion)
            self._waiting[portion.slot].sort(key=lambda waiting: waiting.number)
        self._turn()

    def fail(self, error: Exception) -> None:
        """End the pass, because it must begin again."""
        self.failure = self.failure or error
        self._turn()

    def _give(self, portions: list[Portion], slot: int) -> list[Portion]:
        if portions:
            calls = self._at.setdefault(slot, [])
            if not calls:
                self._since[slot] = self.clock()
            calls.append([portion.number for portion in portions])
        return portions

    def _left_s(self, slot: int) -> float | None:
        """Return the seconds until a slot's first portion is late; None if no portion of the pass is done."""
        if not self._took:
            return None
        together = len(self._at[slot][0])
        return self._since[slot] + LATE * together * statistics.median(self._took) - self.clock()

    def _turn(self) -> None:
        self.news.set()
        self.news = asyncio.Event()
