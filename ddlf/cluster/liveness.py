"""Whether a peer lives, judged by when it was last heard. Pure: no clock, no socket, no task. Runs on both sides of a control connection.

The rules:
    1. Any message on the control connection is a sign of life, not only the answer to a heartbeat.
    2. Silence of ``suspect_after_s`` makes a peer suspect, of ``dead_after_s`` dead.
    3. Only time in which this side looked counts as silence. Whoever was itself stopped, suspended or blocked has heard nobody, which says nothing
       about them: after such a gap the peer gets the time for one heartbeat and its answer, however long it had been silent before.
"""

from __future__ import annotations

from typing import Literal

from ddlf.timing import Timing

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
