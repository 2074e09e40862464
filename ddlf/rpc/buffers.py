"""A pool that reuses the memory of received arrays. Runs in the executor and on the master.

The first access to new memory costs as much as a copy of the array. It costs several times more on a virtual machine
whose host has reclaimed the free pages (``docs/LAB.md``). A training run receives the same sizes every round, so it
reuses the memory of the last round. Users see ordinary arrays. An array belongs to the user as long as the user keeps
it or any view of it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np

MAX_FREE_BYTES = 256 * 1024**2
"""Maximum bytes of free memory that the pool keeps; arrays in use do not count. A larger array gets its own memory,
which returns to the system.
"""
MIN_BYTES = 32 * 1024**2
"""Smaller pieces come from the C library, which keeps pieces up to this size itself. A pool for them was measured and
gained nothing.
"""


class BufferPool:
    """A pool of free memory blocks by size, to receive arrays into. Safe to use from several threads.

    Args:
        max_free_bytes: Maximum bytes of free memory that the pool keeps.
    """

    def __init__(self, max_free_bytes: int = MAX_FREE_BYTES) -> None:
        self.free_bytes = 0
        self._max_free_bytes = max_free_bytes
        self._free: OrderedDict[int, list[memoryview]] = OrderedDict()  # by size, least recently used first
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray[Any, Any]:
        """Return writable memory of ``size`` bytes, not zeroed. It returns to the pool after its last reference is
        gone.
        """
        if not MIN_BYTES <= size <= self._max_free_bytes:
            return np.empty(size, np.uint8)
        with self._lock:
            memories = self._free.get(size)
            memory = memories.pop() if memories else None
            self.free_bytes -= size if memory else 0
        if memory is None:
            memory = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
        # NumPy lets a view refer to the array at the end of a chain of views. A memoryview ends the chain here. All
        # views of this array therefore refer to this object, and it is freed last.
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._give_back, memory).atexit = False
        return array

    def clear(self) -> None:
        """Return all free memory to the system."""
        with self._lock:
            self._free.clear()
            self.free_bytes = 0

    def _give_back(self, memory: memoryview) -> None:
        # A garbage collection may call this anywhere, also inside the blocks above. It must not wait for the lock. If
        # the lock is taken, the memory is freed instead of kept.
        if not self._lock.acquire(blocking=False):
            return
        try:
            size = len(memory)
            self._free.setdefault(size, []).append(memory)
            self._free.move_to_end(size)
            self.free_bytes += size
            while self.free_bytes > self._max_free_bytes:
                oldest, memories = next(iter(self._free.items()))
                if memories:
                    memories.pop()
                    self.free_bytes -= oldest
                if not memories:
                    del self._free[oldest]
        finally:
            self._lock.release()


POOL = BufferPool()
"""The pool of this process."""

GLIBC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables of a user who tunes the C library."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let the C library keep as much freed memory as the pool, for arrays below ``MIN_BYTES``.

    By itself, glibc returns freed memory beyond twice the largest piece that it has seen freed. The system would then have
    to provide the memory of many small arrays again in every round.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None and not any(name in os.environ for name in GLIBC):
        mallopt(M_MMAP_THRESHOLD, MIN_BYTES)
        mallopt(M_TRIM_THRESHOLD, MAX_FREE_BYTES)


keep_freed_memory()
