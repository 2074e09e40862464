"""Decides which worker gets the next call, from the length of each worker's queue. Runs on the master.

The functions are pure: they receive seconds as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar
from weakref import WeakSet

AHEAD_S = 0.02
"""Seconds of work that may wait on a worker, so that it stays busy while the master does something else."""
WORTH = 0.05
"""Share of a call's duration that the worker may idle after it. The master therefore sends no call behind a long call:
a call that is already on a worker cannot move to another worker."""
MOST = 100
"""Maximum number of calls that wait on a worker."""
RECENT = 0.1
"""Weight of the latest call in the moving average of durations."""


@dataclass(eq=False)
class Habit:
    """Measurements of the calls of one function.

    Attributes:
        seconds: Expected seconds on a worker; None before the first call has ended.
        bytes: Expected bytes in both directions. None before some worker's second call has ended, because a worker's
            first call carries the function.
        calls: Number of calls that have ended.
    """

    seconds: float | None = None
    bytes: float | None = None
    calls: int = 0

    def took(self, seconds: float) -> None:
        """Record the seconds that one call took on a worker."""
        self.calls += 1
        self.seconds = _moving_mean(self.seconds, seconds, max(RECENT, 1 / self.calls))

    def carried(self, bytes: float) -> None:
        """Record the bytes of one call, in both directions."""
        self.bytes = _moving_mean(self.bytes, bytes, RECENT)


W = TypeVar("W")


@dataclass(eq=False)
class Lane(Generic[W]):
    """The calls that one worker has received and not finished.

    Args:
        worker: The lane's worker.

    Attributes:
        open: Whether the lane accepts calls.
        hope_until: The time until which calls may wait for the return of a closed lane's worker.
        turns: Calls that run one after another, in the order of sending. Each has its expected seconds, or None if
            unknown.
        beside: Calls that run concurrently, as soon as they arrive.
        way_s: Seconds that a call takes in addition to its computation: both directions and the overhead in between.
        habits: Habits of the functions that the worker has received.
        carried: Bytes in both directions when the last call ended.
    """

    worker: W
    open: bool = True
    hope_until: float = inf
    turns: dict[object, float | None] = field(default_factory=dict)
    beside: set[object] = field(default_factory=set)
    way_s: float = 0.0
    habits: WeakSet[Habit] = field(default_factory=WeakSet)
    carried: int = 0

    def __post_init__(self) -> None:
        self._seconds, self._unknown = 0.0, 0  # sums over the turns

    @property
    def load(self) -> tuple[int, float, int]:
        """The work in this lane, to compare it with other lanes: the number of calls of unknown length, the seconds of
        the other turns, and the number of all calls.
        """
        return self._unknown, self._seconds, len(self.turns) + len(self.beside)

    def add_turn(self, call: object, seconds: float | None) -> None:
        """Add a call that runs after the earlier calls of this worker."""
        self.turns[call] = seconds
        self._seconds += seconds or 0.0
        self._unknown += seconds is None

    def end(self, call: object) -> None:
        """Remove a call from this lane, because it has ended. Safe to call again."""
        self.beside.discard(call)
        if call in self.turns:
            seconds = self.turns.pop(call)
            self._unknown -= seconds is None
            self._seconds = self._seconds - (seconds or 0.0) if self.turns else 0.0

    def has_turn(self, *, alone: bool) -> bool:
        """Return whether the lane should get another call that takes a turn.

        Args:
            alone: Whether the call needs an empty lane, because its timeout begins when it is sent.
        """
        if not self.turns:
            return True
        if alone or self._unknown or len(self.turns) > MOST:
            return False
        first = next(iter(self.turns.values())) or 0.0
        return self._seconds - (1 - WORTH) * first < AHEAD_S + 2 * self.way_s

    def is_first(self, call: object) -> bool:
        """Return whether the worker runs this call next, or runs it now."""
        return next(iter(self.turns), call) is call

    def measured_way(self, seconds: float) -> None:
        """Record the extra seconds of a call that met an empty lane: its duration minus its computation."""
        self.way_s = _moving_mean(self.way_s or None, seconds, RECENT)


def _moving_mean(mean: float | None, value: float, weight: float) -> float:
    return value if mean is None else mean + weight * (value - mean)
