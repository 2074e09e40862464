"""A sink that works on a thread, so that slow disks and distant servers do not delay training. Runs on the master."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from ddlf.events import Event

log = logging.getLogger(__name__)

PAUSE_S = 0.2
"""Seconds between two batches. A kill loses the events of this time. If the thread woke for each event, short rounds
would be slower."""

Timed = tuple[float, Event]
"""Time of an event, in seconds since 1970, and the event."""


def reason(error: Exception) -> str:
    """Return the text of an error in a form that fits into the middle of a sentence."""
    if not (isinstance(error, OSError) and error.strerror):
        return str(error)
    return f"{error.strerror}, {error.filename}" if error.filename else error.strerror


class BackgroundWriter:
    """Passes all events in order to a function, in batches, on its own thread.

    Attributes:
        lost: Number of events that could not be written.

    Args:
        write: Writes a batch. If it raises, the batch is lost. The first error is logged, and later batches are tried.
        target: Name of the target, for the log, such as ``"the run's folder"``.
    """

    def __init__(self, write: Callable[[list[Timed]], None], target: str) -> None:
        self._write = write
        self._target = target
        self._queue: queue.SimpleQueue[Timed] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._has_logged = False
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name=f"ddlf {target}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Queue an event, and return at once. After ``close``, write it before the return."""
        self._queue.put((time.time(), event))
        if self._closing.is_set():
            self._take()

    def close(self, timeout_s: float) -> bool:
        """Write the queued events, and stop. Return whether all were written in time."""
        self._closing.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.wait(PAUSE_S):
            self._take()
        self._take()

    def _take(self) -> None:
        with self._lock:
            if batch := [self._queue.get() for _ in range(self._queue.qsize())]:
                try:
                    self._write(batch)
                except Exception as error:
                    self.lost += len(batch)
                    self.tell(error)

    def tell(self, error: Exception) -> None:
        """Log an error of ``write``, but only the first one, so that the log stays short."""
        if not self._has_logged:
            self._has_logged = True
            log.warning("%s cannot be written: %s; the run continues", self._target, reason(error))
