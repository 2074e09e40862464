"""The connection to a daemon, which always answers, with heartbeats: how silence is noticed.

Runs on the master, and on a worker that calls another one.
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
"""The id of every heartbeat, which nobody waits for."""
NO_ARGUMENTS = dumps([[], {}])


class Speaker(Protocol):
    """What speaks for this side while its event loop is held up."""

    def beaten(self) -> None:
        """The event loop sent a heartbeat."""

    def end(self) -> None:
        """The connection has ended."""


class ControlChannel(Channel):
    """A channel on which every message is a sign of life.

    Args:
        owner: Who has it.
        open: Makes the stream.
        ids: Numbers for requests.
        timing: When the worker is asked, suspected and given up.

    Attributes:
        liveness: The worker's.
    """

    def __init__(self, owner: Owner, open: Opener, ids: Iterator[int], timing: Timing) -> None:
        super().__init__(owner, open, ids)
        self.liveness = Liveness(timing, self._loop.time())
        self._pulse: Speaker | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin_heartbeats(self, pulse: Speaker | None, on_dead: Callable[[WorkerLost], None]) -> None:
        """Give signs of life, and look for those of the worker, until the connection ends.

        Args:
            pulse: What speaks for this side while its event loop is held up; None if nobody has to hear of it.
            on_dead: Called when the worker was silent for too long.
        """
        if self.stream.closed:
            return
        self._pulse = pulse
        self._look(on_dead)

    def _look(self, on_dead: Callable[[WorkerLost], None]) -> None:
        """Send a heartbeat, and find out that a worker is gone when nothing says so: its machine lost power, or the network in between broke."""
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
            # At the same moments for all workers: the loop wakes once for all heartbeats, and once or twice for all answers.
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
