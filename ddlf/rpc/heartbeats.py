"""Notices when the other side of a control connection is lost. Runs on both sides; a daemon always answers.

The rules:

    1. Any message on the control connection is a sign of life, not only the answer to a heartbeat.
    2. A peer is suspect after ``suspect_after_s`` of silence, and dead after ``dead_after_s``.
    3. Silence counts only while this side was watching. A process that was stopped, suspended or blocked could hear
       nobody, which proves nothing about its peers. After such a gap, the peer always gets the time for one heartbeat
       and its answer.

``Liveness`` applies the rules without a clock, a socket or a task. ``ControlChannel`` sends the heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from ddlf.errors import ConfigError, WorkerLost
from ddlf.rpc.connection import Channel, Opener, Owner
from ddlf.rpc.messages import Frame, Kind, dumps

DEAD_AFTER_S = 4.0
"""A peer is lost after this time of silence, by default. It is long enough for a change of the Wi-Fi access point, and
short enough that nobody waits for a hung run."""
HEARTBEATS_TO_DEATH = 8
MIN_HEARTBEATS = 3
"""Minimum number of heartbeats until a peer is declared dead: one heartbeat may be late, and one may be lost."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times for heartbeats, for the suspicion of a silent peer, and for its loss. All times are in seconds.

    Args:
        heartbeat_s: Time between two signs of life.
        suspect_after_s: A peer with a longer silence is suspected.
        dead_after_s: A peer with a longer silence is declared dead; at least 3 x ``heartbeat_s``.

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
        is_number = isinstance(dead, int | float)
        return cls(
            heartbeat_s=(dead / HEARTBEATS_TO_DEATH if is_number else 1.0) if heartbeat_s is None else heartbeat_s,
            suspect_after_s=(dead / 2 if is_number else 2.0) if suspect_after_s is None else suspect_after_s,
            dead_after_s=dead,
        )


State = Literal["alive", "suspect", "dead"]

GAP_HEARTBEATS = 2
"""A longer time between two checks is a gap. Ordinary delays of a busy machine are far below one heartbeat."""
GRACE_HEARTBEATS = 2
"""Minimum time for a peer after a gap, in heartbeats: one for the question, one for the answer."""

MIN_LOOK_S = 0.001
"""Minimum seconds until the next check. A verdict may be due in less time than the clock resolves, and the loop must
not spin."""


class Liveness:
    """Judges from its signs of life whether the other side of a connection (the peer) is alive, suspect or dead.

    Args:
        timing: Times for the suspicion and the loss of the peer.
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
        """Return the seconds of the peer's silence, without the gaps in which this side was not watching."""
        return now - self.last_heard

    def judge(self, now: float) -> State:
        """Return whether the peer is alive, suspect or dead at this time. Call this at least once in every heartbeat."""
        timing = self.timing
        looked, self._looked = self._looked, now
        if now - looked > GAP_HEARTBEATS * timing.heartbeat_s:
            silence_s = max(0.0, looked - self.last_heard)
            allowed = timing.dead_after_s - GRACE_HEARTBEATS * timing.heartbeat_s
            self.last_heard = max(self.last_heard, now - min(silence_s, allowed))
        silent = now - self.last_heard
        self.state = (
            "dead" if silent >= timing.dead_after_s else "suspect" if silent >= timing.suspect_after_s else "alive"
        )
        return self.state

    def next_look_s(self, now: float) -> float:
        """Return the seconds until the next check: a heartbeat, or less if the verdict changes earlier."""
        timing = self.timing
        silent = now - self.last_heard
        due_s = [end - silent for end in (timing.suspect_after_s, timing.dead_after_s) if end > silent]
        return max(MIN_LOOK_S, min([timing.heartbeat_s, *due_s]))


PROBES = 2


def end_when_silent(sock: socket.socket, dead_after_s: float) -> None:
    """Have the kernel reset the connection if the other side acknowledges no data for ``dead_after_s`` seconds, where
    the system supports this.

    The kernel notices missing acknowledgements, which a process cannot see. It does not notice a stopped process, whose
    kernel continues to acknowledge. Use this only for connections that the other side always reads, because a full
    buffer also counts as silence.
    """
    options = {
        "TCP_USER_TIMEOUT": round(dead_after_s * 1000),  # Linux: sent data that is not acknowledged
        "TCP_KEEPIDLE": max(1, round(dead_after_s / 2)),  # an idle connection; macOS calls it TCP_KEEPALIVE
        "TCP_KEEPALIVE": max(1, round(dead_after_s / 2)),
        "TCP_KEEPINTVL": max(1, round(dead_after_s / 2 / PROBES)),
        "TCP_KEEPCNT": PROBES,
    }
    with contextlib.suppress(OSError):  # not a TCP socket, or already closed
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


HEARTBEAT_ID = 0
"""The id of every heartbeat. Nobody waits for the answer."""
NO_ARGUMENTS = dumps([[], {}])


class Speaker(Protocol):
    """Sends heartbeats for this side while its event loop is blocked."""

    def beaten(self) -> None:
        """Record that the event loop has sent a heartbeat."""

    def end(self) -> None:
        """Stop, because the connection has ended."""


class ControlChannel(Channel):
    """A channel whose messages all count as signs of life.

    Args:
        owner: The object that owns the channel.
        open: Makes the stream.
        ids: Numbers for requests.
        timing: Times for heartbeats, for the suspicion of a silent worker, and for its loss.

    Attributes:
        liveness: Judges whether the worker is alive.
    """

    def __init__(self, owner: Owner, open: Opener, ids: Iterator[int], timing: Timing) -> None:
        super().__init__(owner, open, ids)
        self.liveness = Liveness(timing, self._loop.time())
        self._pulse: Speaker | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin_heartbeats(self, pulse: Speaker | None, on_dead: Callable[[WorkerLost], None]) -> None:
        """Send heartbeats and check the worker's heartbeats, until the connection ends.

        Args:
            pulse: Sends signs of life while this event loop is blocked. None if the other side does not need them.
            on_dead: Called when the worker has been silent for too long.
        """
        if self.stream.closed:
            return
        self._pulse = pulse
        self._beat(on_dead)

    def _beat(self, on_dead: Callable[[WorkerLost], None]) -> None:
        """Send a heartbeat, and check how long the worker has been silent.

        This detects losses that no error reports: the machine lost power, or the network broke.
        """
        now = self._loop.time()
        if self.liveness.judge(now) == "dead":
            silent_s = self.liveness.silent_s(now)
            text = f"no heartbeat for {silent_s:.1f} s"
            on_dead(WorkerLost(text, worker=self._owner.name, last_seen_s=silent_s))
            return
        if self._pulse is not None:
            self._pulse.beaten()
        with suppress(ConnectionError):
            self.stream.send(Kind.REQUEST, HEARTBEAT_ID, "ping", NO_ARGUMENTS)
            # All workers use the same times. The loop wakes once for all heartbeats, and once or twice for all
            # answers.
            period = self.liveness.timing.heartbeat_s
            aligned = period - now % period
            wait = min(self.liveness.next_look_s(now), aligned if aligned > period / 4 else aligned + period)
            self._timer = self._loop.call_later(wait, self._beat, on_dead)

    def _on_frame(self, frame: Frame) -> None:
        self.liveness.heard(self._loop.time())
        super()._on_frame(frame)

    def _on_close(self, reason: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pulse is not None:
            self._pulse.end()
        super()._on_close(reason)
