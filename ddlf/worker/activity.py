"""What the executor is doing, in a page of memory that its daemon reads. Runs in both processes of a worker.

The executor writes a few bytes before and after each method; the daemon reads them when somebody asks. That costs no system call, so a small call
stays small, and it works while the executor loops forever or holds the GIL. The daemon writes one field back: the request to interrupt.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from typing import NamedTuple

_RUNNING = struct.Struct("<Qd120s")  # request id (0: idle), monotonic start in seconds, name
_INTERRUPT = struct.Struct("<Q")
_INTERRUPT_AT = 256
PAGE_BYTES = 4096


class Running(NamedTuple):
    """A method that runs now.

    Args:
        id: Of its request.
        name: Of the method.
        seconds: Since it started.
    """

    id: int
    name: str
    seconds: float


class Activity:
    """The shared page.

    Args:
        fd: Descriptor of the page, from ``create``; it stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, PAGE_BYTES)

    @staticmethod
    def create() -> int:
        """Make an empty page and return its descriptor. It has no name in the file system."""
        with tempfile.TemporaryFile() as file:
            file.truncate(PAGE_BYTES)
            return os.dup(file.fileno())

    def begin(self, id: int, name: str) -> None:
        """Say that a method starts. The system's monotonic clock is the same in both processes."""
        _RUNNING.pack_into(self._page, 0, id, time.monotonic(), name.encode(errors="replace")[:120])

    def end(self) -> None:
        """Say that it ended."""
        self._page[:8] = b"\0\0\0\0\0\0\0\0"

    def running(self) -> Running | None:
        """What runs now; None when nothing does."""
        id, since, name = _RUNNING.unpack_from(self._page, 0)
        if id == 0:
            return None
        return Running(id, name.rstrip(b"\0").decode(errors="replace"), time.monotonic() - since)

    def ask_interrupt(self, id: int) -> None:
        """Name the request that the next SIGINT is meant for, so that a late signal does not hit the one after it."""
        _INTERRUPT.pack_into(self._page, _INTERRUPT_AT, id)

    def interrupted(self) -> int:
        """The request that is to be interrupted; 0 for none."""
        return int(_INTERRUPT.unpack_from(self._page, _INTERRUPT_AT)[0])

    def clear(self) -> None:
        """Start anew, for a new executor."""
        self._page[:PAGE_BYTES] = bytes(PAGE_BYTES)
