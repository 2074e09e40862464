"""Judges whether a peer is alive, from the time of its last message. Pure: no clock, no socket, no task.

Runs on both sides of a control connection. The rules:

    1. Any message on the control connection is a sign of life, not only the answer to a heartbeat.
    2. A peer is suspect after ``suspect_after_s`` of silence, and dead after ``dead_after_s``.
    3. Silence counts only while this side was watching. A process that was stopped, suspended or blocked could hear
       nobody, which proves nothing about its peers. After such a gap, the peer always gets the time for one heartbeat
       and its answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ddlf.errors import ConfigError

DEAD_AFTER_S = 4.0
"""Long enough for Wi-Fi to change its access point, short enough that nobody waits at a hung run."""
HEARTBEATS_TO_DEATH = 8
MIN_HEARTBEATS = 3
"""One heartbeat may be late and one lost before a peer is declared dead."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When to send heartbeats, when to suspect a peer and when to give it up. All times are in seconds.

    Args:
        heartbeat_s: Time between two signs of life.
        suspect_after_s: A peer with a longer silence is suspected.
        dead_after_s: A peer with a longer silence is given up; at least 3 x ``heartbeat_s``.

    Raises:
        ConfigError: The values contradict each other. The text has the numbers.
    """

    heartbeat_s: float = DEAD_AFTER_S / HEARTBEATS_TO_DEATH
    suspect_after_s: float = DEAD_AFTER_S / 2
    dead_after_s: float = DEAD_AFTER_S

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "suspect_after_s", "dead_after_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a finite number of seconds > 0, got {value!r}")
        if self.dead_after_s < MIN_HEARTBEATS * self.heartbeat_s:
            raise ConfigError(
                f"dead_after_s ({self.dead_after_s:g} s) must be at least {MIN_HEARTBEATS} x heartbeat_s ({self.heartbeat_s:g} s)"
            )
        if not self.heartbeat_s < self.suspect_after_s < self.dead_after_s:
            raise ConfigError(
                f"suspect_after_s ({self.suspect_after_s:g} s) must be between heartbeat_s ({self.heartbeat_s:g} s) "
                f"and dead_after_s ({self.dead_after_s:g} s)"
            )

    @classmethod
    def of(
        cls,
        heartbeat_s: float | None = None,
        suspect_after_s: float | None = None,
        dead_after_s: float | None = None,
    ) -> Timing:
        """Return a timing with defaults for missing values: an eighth and a half of ``dead_after_s``."""
        dead = DEAD_AFTER_S if dead_after_s is None else dead_after_s
        known = isinstance(dead, int | float)
        return cls(
            heartbeat_s=(dead / HEARTBEATS_TO_DEATH if known else 1.0) if heartbeat_s is None else heartbeat_s,
            suspect_after_s=(dead / 2 if known else 2.0) if suspect_after_s is None else suspect_after_s,
            dead_after_s=dead,
        )


State = Literal["alive", "suspect", "dead"]

GAP_HEARTBEATS = 2
"""A longer time between two checks is a gap. Ordinary delays of a busy machine are far below one heartbeat."""
GRACE_HEARTBEATS = 2
"""The least time that a peer gets after a gap: one heartbeat to be asked, one to answer."""

MIN_LOOK_S = 0.001
"""A verdict may be due in less time than the clock resolves. This minimum keeps a loop from spinning."""


class Liveness:
    """The state of one peer.

    Args:
        timing: When to suspect the peer and when to give it up.
        now: The reading of any monotonic clock, in seconds. All methods use the same clock.

    Attributes:
        state: The last verdict.
        last_heard: The time of the last sign of life, moved forward by the length of gaps.
    """

    def __init__(self, timing: Timing, now: float) -> None:
        self.timing = timing
        self.state: State = "alive"
        self.last_heard = now
        self._looked = now

    def heard(self, now: float) -> None:
        """Record a sign of life of the peer."""
        self.last_heard = now
        self.state = "alive"

    def silent_s(self, now: float) -> float:
        """Return the seconds of silence that count."""
        return now - self.last_heard

    def judge(self, now: float) -> State:
        """Judge the peer. Call this at least once in every heartbeat."""
        timing = self.timing
        looked, self._looked = self._looked, now
        if now - looked > GAP_HEARTBEATS * timing.heartbeat_s:
            before = max(0.0, looked - self.last_heard)
            allowed = timing.dead_after_s - GRACE_HEARTBEATS * timing.heartbeat_s
            self.last_heard = max(self.last_heard, now - min(before, allowed))
        silent = now - self.last_heard
        self.state = (
            "dead" if silent >= timing.dead_after_s else "suspect" if silent >= timing.suspect_after_s else "alive"
        )
        return self.state

    def next_look_s(self, now: float) -> float:
        """Return the seconds until the next check: a heartbeat, or less if the verdict changes earlier."""
        timing = self.timing
        silent = now - self.last_heard
        ends = [end - silent for end in (timing.suspect_after_s, timing.dead_after_s) if end > silent]
        return max(MIN_LOOK_S, min([timing.heartbeat_s, *ends]))
