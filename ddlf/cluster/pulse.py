"""Heartbeats of the master while user code blocks the event loop that normally sends them. Runs on the master.

User code may block the loop for longer than ``dead_after_s``: it imports Keras, downloads data, evaluates a model between
two awaits, or does not run the loop for a while. The master is not dead, because the loop may run again. Therefore one
thread for all workers watches whether heartbeats are sent. If not, it opens its own control connection in its own event
loop, and sends heartbeats there until the other loop continues. If the process is stopped or killed, the thread stops as
well. While the loop runs, the thread wakes up about twice per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial

from ddlf.errors import DDLFError
from ddlf.rpc.connection import Connection
from ddlf.rpc.messages import CONTROL_LIMITS, Kind, dumps

LATE_HEARTBEATS = 2
"""After this number of missing heartbeats the event loop counts as blocked."""


class Pulse:
    """Sends the heartbeats of this master to one worker while user code blocks the event loop that normally sends them.

    Args:
        dial: Opens an authenticated control connection to the worker, in the event loop that calls it.
        session: The master's id, under which it has the lease.
        heartbeat_s: Promised seconds between two heartbeats.
    """

    def __init__(self, dial: Callable[[], Awaitable[socket.socket]], session: bytes, heartbeat_s: float) -> None:
        self._dial = dial
        self._beat = dumps([[session], {}])
        self.heartbeat_s = heartbeat_s
        self.is_speaking = False
        self._loop = asyncio.get_running_loop()
        self.beaten()
        _watcher.add(self)

    def beaten(self) -> None:
        """Record that the event loop has sent a heartbeat itself."""
        self._last = time.monotonic()

    def end(self) -> None:
        """Stop watching, because the master has disconnected from the worker. Safe to call again."""
        _watcher.remove(self)

    @property
    def is_over(self) -> bool:
        """Whether the program has closed its event loop without closing the cluster. It will then never use its workers
        again.
        """
        return self._loop.is_closed()

    @property
    def is_late(self) -> bool:
        """Whether the event loop has missed several heartbeats."""
        return time.monotonic() - self._last > LATE_HEARTBEATS * self.heartbeat_s

    async def speak(self) -> None:
        """Send heartbeats until the event loop does so again. Runs in the thread's loop.

        On failure:
            The method ends, and the thread tries again a moment later.
        """
        self.is_speaking = True
        try:
            with contextlib.suppress(DDLFError, OSError):
                connection = Connection(
                    await self._dial(), lambda frame: None, lambda reason: None, limits=CONTROL_LIMITS
                )
                try:
                    while self.is_late and not self.is_over and _watcher.knows(self):
                        connection.send(Kind.REQUEST, 0, "beat", self._beat)
                        await asyncio.sleep(self.heartbeat_s)
                finally:
                    connection.close()
        finally:
            self.is_speaking = False


class _Watcher:
    """The thread that watches whether event loops send their heartbeats, for all workers. It ends when no ``Pulse`` is
    left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pulses: set[Pulse] = set()
        self._is_running = False
        self._wake: Callable[[], object] = lambda: None

    def add(self, pulse: Pulse) -> None:
        with self._lock:
            self._pulses.add(pulse)
            self._wake()  # The thread may be sleeping for the longer heartbeat interval of another worker.
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=lambda: asyncio.run(self._watch()), name="ddlf-pulse", daemon=True).start()

    def remove(self, pulse: Pulse) -> None:
        with self._lock:
            self._pulses.discard(pulse)

    def knows(self, pulse: Pulse) -> bool:
        return pulse in self._pulses

    async def _watch(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        news = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, news.set)
        while True:
            news.clear()
            with self._lock:
                self._wake = wake
                self._pulses = {pulse for pulse in self._pulses if not pulse.is_over}
                pulses = list(self._pulses)
                if not pulses:
                    self._is_running, self._wake = False, lambda: None
                    break
            for pulse in pulses:
                if pulse.is_late and not pulse.is_speaking:
                    pulse.is_speaking = True
                    task = asyncio.create_task(pulse.speak())
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), min(pulse.heartbeat_s for pulse in pulses))


_watcher = _Watcher()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watcher.__init__)  # type: ignore[misc]  # a fork does not copy the thread
