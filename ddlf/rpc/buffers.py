"""Memory for the arrays that come, used again when nobody holds them any more. Runs in the executor and on the master.

The first touch of fresh memory costs as much as the copy into it, and several times that on a virtual machine whose host has taken the free
pages back (``docs/contributing/LAB.md``). A training run receives the same sizes every round, so what the last round left is used again.
Users see ordinary arrays, theirs for as long as they keep them or any view of them.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np

MAX_FREE_BYTES = 256 * 1024**2
"""Kept for later; what arrays occupy is not counted. A larger array gets memory of its own, which goes back to the system."""
MIN_BYTES = 32 * 1024**2
"""Smaller pieces come from the C library, which keeps up to this size itself: a pool for them was measured and gained nothing."""


class BufferPool:
    """Memory by size. Safe to use from several threads.

    Args:
        max_free_bytes: How much to keep.
    """

    def __init__(self, max_free_bytes: int = MAX_FREE_BYTES) -> None:
        self.free_bytes = 0
        self._max_free_bytes = max_free_bytes
        self._free: OrderedDict[int, list[memoryview]] = OrderedDict()  # by size, least recently used first
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray[Any, Any]:
        """Writable memory of ``size`` bytes, not zeroed. It comes back by itself when the last reference to it is gone."""
        if not MIN_BYTES <= size <= self._max_free_bytes:
            return np.empty(size, np.uint8)
        with self._lock:
            memories = self._free.get(size)
            memory = memories.pop() if memories else None
            self.free_bytes -= size if memory else 0
        if memory is None:
            memory = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
        # NumPy lets a view refer to the array at the end of a chain of views. A memoryview ends the chain here: whatever is made of
        # this array refers to this very object, so its end is the end of them all.
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._give_back, memory).atexit = False
        return array

    def clear(self) -> None:
        """Give back to the system what is kept."""
        with self._lock:
            self._free.clear()
            self.free_bytes = 0

    def _give_back(self, memory: memoryview) -> None:
        # A garbage collection may run this anywhere, also inside the blocks above: it must not wait for the lock. Then the memory just goes.
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
"""The one of this process."""

# glibc hands freed memory back to the system beyond twice the largest piece that it has seen freed, so arrays below ``MIN_BYTES`` were
# touched anew in every round: a quarter of the master's processor time with 16 workers. One piece of the largest size that counts, never
# touched, moves that to 64 MiB.
np.empty(MIN_BYTES - 64 * 1024, np.uint8)
