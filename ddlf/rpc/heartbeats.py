"""The connection to a daemon, which uses heartbeats to notice that the other side is silent. A daemon always answers.

Runs on the master, and on a worker that calls another worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from ddlf.errors import WorkerLost
from ddlf.rpc.channel import Channel, Opener, Owner
from ddlf.rpc.frame import Frame
from ddlf.rpc.liveness import Liveness, Timing
from ddlf.rpc.messages import Kind
from ddlf.rpc.values import dumps

HEARTBEAT_ID = 0
"""The id of every heartbeat. Nobody waits for the answer."""
NO_ARGUMENTS = dumps([[], {}])


class Speaker(Protocol):
    """Sends signs of life for this side while its event loop is blocked."""

    def beaten(self) -> None:
        """Note that the event loop has sent a heartbeat."""

    def end(self) -> None:
        """Stop, because the connection has ended."""


class ControlChannel(Channel):
    """A channel whose messages all count as signs of life.

    Args:
        owner: The object that has the channel.
        open: Makes the stream.
        ids: Numbers for requests.
        timing: When to send heartbeats, when to suspect the worker and when to give it up.

    Attributes:
        liveness: Judges whether the worker is alive.
    """

    def __init__(self, owner: Owner, open: Opener, ids: Iterator[int], timing: Timing) -> None:
        super().__init__(owner, open, ids)
        self.liveness = Liveness(timing, self._loop.time())
        self._pulse: Speaker | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin_heartbeats(self, pulse: Speaker | None, on_dead: Callable[[WorkerLost], None]) -> None:
        """Send signs of life and watch for the worker's, until the connection ends.

        Args:
            pulse: Sends signs of life while this event loop is blocked. None if the other side does not need them.
            on_dead: Called when the worker has been silent for too long.
        """
        if self.stream.closed:
            return
        self._pulse = pulse
        self._look(on_dead)

    def _look(self, on_dead: Callable[[WorkerLost], None]) -> None:
        """Send a heartbeat and judge the worker's silence.

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
            # All workers share the same moments. The loop wakes once for all heartbeats, and once or twice for all
            # answers.
            period = self.liveness.timing.heartbeat_s
            aligned = period - now % period
            wait = min(self.liveness.next_look_s(now), aligned if aligned > period / 4 else aligned + period)
            self._timer = self._loop.call_later(wait, self._look, on_dead)

    def _on_frame(self, frame: Frame) -> None:
        self.liveness.heard(self._loop.time())
        super()._on_frame(frame)

    def _ended(self, reason: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pulse is not None:
            self._pulse.end()
        super()._ended(reason)
