"""A sink that does what takes time on a thread: a disk that is slow, or a server that is far away, holds up no training. Runs on the master."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from ddlf.events import Event

log = logging.getLogger(__name__)

PAUSE_S = 0.2
"""Between two looks at what has happened. A kill costs as much of the newest; a thread that woke with each event would hold up short rounds."""

Timed = tuple[float, Event]
"""When it happened, in seconds since 1970, and what."""


def reason(error: Exception) -> str:
    """Return the text of an error, for the middle of a sentence."""
    if not (isinstance(error, OSError) and error.strerror):
        return str(error)
    return f"{error.strerror}, {error.filename}" if error.filename else error.strerror


class Behind:
    """Gives all events in order to a function, many at a time, on a thread of its own.

    Attributes:
        lost: Events that could not be written.

    Args:
        write: Takes them. When it raises, what it was given is lost; that is told once, and it is tried again with what comes.
        what: What it does, for that sentence: ``"the run's folder"``.
    """

    def __init__(self, write: Callable[[list[Timed]], None], what: str) -> None:
        self._write = write
        self._what = what
        self._queue: queue.SimpleQueue[Timed] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._told = False
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name=f"ddlf {what}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Take an event. Returns at once; after ``close``, when it is written."""
        self._queue.put((time.time(), event))
        if self._closing.is_set():
            self._take()

    def close(self, timeout_s: float) -> bool:
        """Write what there is. Returns whether that was done in time."""
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
        """Say once that something went wrong."""
        if not self._told:
            self._told = True
            log.warning("%s cannot be written: %s; the run goes on", self._what, reason(error))
