"""Whether a peer lives, judged by when it was last heard. Pure: no clock, no socket, no task. Runs on both sides of a control connection.

The rules:
    1. Any message on the control connection is a sign of life, not only the answer to a heartbeat.
    2. Silence of ``suspect_after_s`` makes a peer suspect, of ``dead_after_s`` dead.
    3. Only time in which this side looked counts as silence. Whoever was itself stopped, suspended or blocked has heard nobody, which says nothing
       about them: after such a gap the peer gets the time for one heartbeat and its answer, however long it had been silent before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ddlf.errors import ConfigError

DEAD_AFTER_S = 4.0
"""Long enough for a Wi-Fi that changes its access point, short enough that nobody watches a hung run."""
HEARTBEATS_TO_DEATH = 8
MIN_HEARTBEATS = 3
"""One heartbeat may be late and one lost without a verdict."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When a peer is asked, suspected, and given up; seconds.

    Args:
        heartbeat_s: Between two signs of life.
        suspect_after_s: Silence after which a peer is suspected.
        dead_after_s: Silence after which it is given up; at least 3 x ``heartbeat_s``.

    Raises:
        ConfigError: They contradict each other; the text has the figures.
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
        """What is given, and the rest in proportion to ``dead_after_s``: an eighth and a half of it."""
        dead = DEAD_AFTER_S if dead_after_s is None else dead_after_s
        known = isinstance(dead, int | float)
        return cls(
            heartbeat_s=(dead / HEARTBEATS_TO_DEATH if known else 1.0) if heartbeat_s is None else heartbeat_s,
            suspect_after_s=(dead / 2 if known else 2.0) if suspect_after_s is None else suspect_after_s,
            dead_after_s=dead,
        )


State = Literal["alive", "suspect", "dead"]

GAP_HEARTBEATS = 2
"""A look that comes so many heartbeats after the last one came late: ordinary delays of a busy machine are far below one."""
GRACE_HEARTBEATS = 2
"""What a peer has left at least after a gap: one heartbeat to be asked, one to answer."""

MIN_LOOK_S = 0.001
"""So that a verdict that is due in less than the clock can tell does not make a loop spin."""


class Liveness:
    """One peer.

    Args:
        timing: When to suspect it and when to give it up.
        now: Any clock's reading in seconds, as in all methods; the clock must not go back.

    Attributes:
        state: The last verdict.
        last_heard: When it gave its last sign of life; moved on by what gaps took away.
    """

    def __init__(self, timing: Timing, now: float) -> None:
        self.timing = timing
        self.state: State = "alive"
        self.last_heard = now
        self._looked = now

    def heard(self, now: float) -> None:
        """The peer gave a sign of life."""
        self.last_heard = now
        self.state = "alive"

    def silent_s(self, now: float) -> float:
        """Seconds of silence that count."""
        return now - self.last_heard

    def judge(self, now: float) -> State:
        """Look at the peer. To be called at least once in every heartbeat."""
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
        """Seconds until the next look: a heartbeat, or less if the verdict changes before."""
        timing = self.timing
        silent = now - self.last_heard
        ends = [end - silent for end in (timing.suspect_after_s, timing.dead_after_s) if end > silent]
        return max(MIN_LOOK_S, min([timing.heartbeat_s, *ends]))
