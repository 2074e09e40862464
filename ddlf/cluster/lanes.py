"""Who does the next call: what each worker has to do already, and for how long. Pure: seconds are arguments. Runs on the master."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar
from weakref import WeakSet

AHEAD_S = 0.02
"""Work that may wait on a worker, so that it has some while the master is busy with something else."""
WORTH = 0.05
"""Share of a call's time that the worker may idle after it. Behind a longer one nothing is sent: there it could go to no other worker any more."""
MOST = 100
"""Calls that are sent to a worker ahead of their turn."""
RECENT = 0.1
"""Weight of the last of many calls in what is expected of the next."""


@dataclass(eq=False)
class Habit:
    """What calls of one function are like.

    Attributes:
        seconds: Seconds that they take on a worker; None before the first has ended.
        bytes: There and back; None before the second of a worker has ended, since the first brings the function along.
        calls: How many have ended.
    """

    seconds: float | None = None
    bytes: float | None = None
    calls: int = 0

    def took(self, seconds: float) -> None:
        """Note how long one took."""
        self.calls += 1
        self.seconds = _mixed(self.seconds, seconds, max(RECENT, 1 / self.calls))

    def carried(self, bytes: float) -> None:
        """Note what went there and back for one."""
        self.bytes = _mixed(self.bytes, bytes, RECENT)


W = TypeVar("W")


@dataclass(eq=False)
class Lane(Generic[W]):
    """What one worker has to do of what was given out.

    Args:
        worker: Worker whose lane it is.

    Attributes:
        open: Whether it can be given anything.
        hope_until: Time until which it may be waited for while it is not.
        turns: Calls that take turns on the worker, in the order in which they were sent, with the seconds that each is expected to take; None where
            that is not known.
        beside: Calls that run as soon as they come.
        way_s: What a call takes beside its computation: there, back, and in between.
        known: The functions that it has been sent, by what is known of them.
        carried: Bytes that had gone there and back when the last call ended.
    """

    worker: W
    open: bool = True
    hope_until: float = inf
    turns: dict[object, float | None] = field(default_factory=dict)
    beside: set[object] = field(default_factory=set)
    way_s: float = 0.0
    known: WeakSet[Habit] = field(default_factory=WeakSet)
    carried: int = 0

    def __post_init__(self) -> None:
        self._seconds, self._unknown = 0.0, 0  # the sum of the turns

    @property
    def load(self) -> tuple[int, float, int]:
        """What it has to do: calls of unknown length, seconds of the others, and calls."""
        return self._unknown, self._seconds, len(self.turns) + len(self.beside)

    def add_turn(self, call: object, seconds: float | None) -> None:
        """Note a call that takes its turn."""
        self.turns[call] = seconds
        self._seconds += seconds or 0.0
        self._unknown += seconds is None

    def end(self, call: object) -> None:
        """Forget a call. Safe to call again."""
        self.beside.discard(call)
        if call in self.turns:
            seconds = self.turns.pop(call)
            self._unknown -= seconds is None
            self._seconds = self._seconds - (seconds or 0.0) if self.turns else 0.0

    def has_turn(self, *, alone: bool) -> bool:
        """Whether it is to have another call that takes its turn.

        Args:
            alone: Whether that call is to find nothing before it, since its time begins when it is sent.
        """
        if not self.turns:
            return True
        if alone or self._unknown or len(self.turns) > MOST:
            return False
        first = next(iter(self.turns.values())) or 0.0
        return self._seconds - (1 - WORTH) * first < AHEAD_S + 2 * self.way_s

    def is_first(self, call: object) -> bool:
        """Whether it is this call's turn."""
        return next(iter(self.turns), call) is call

    def measured_way(self, seconds: float) -> None:
        """Note what a call that found nothing before it took beside its computation."""
        self.way_s = _mixed(self.way_s or None, seconds, RECENT)


def _mixed(before: float | None, now: float, weight: float) -> float:
    return now if before is None else before + weight * (now - before)
