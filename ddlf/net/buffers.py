"""Memory for the arrays that come, used again when nobody holds them any more. Runs in the executor and on the master.

The first touch of fresh memory costs as much as the copy into it, and several times that on a virtual machine whose host has taken the free
pages back (``docs/performance.md``). A training run receives the same sizes every round, so what the last round left is used again. Users see
ordinary arrays, theirs for as long as they keep them or any view of them.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

MAX_FREE_BYTES = 256 * 1024**2
"""Kept for later; what arrays occupy is not counted. A larger array gets memory of its own, which goes back to the system."""
MIN_BYTES = 32 * 1024**2
"""Smaller pieces come from the C library, which keeps them itself: measured, a pool gains nothing below this size, where glibc stops doing so."""


class BufferPool:
    """Memory by size. Safe to use from several threads: each step on ``_free`` is one of the interpreter's own.

    Args:
        max_free_bytes: How much to keep.
    """

    def __init__(self, max_free_bytes: int = MAX_FREE_BYTES) -> None:
        self._max_free_bytes = max_free_bytes
        self._free: dict[int, memoryview] = {}  # by id, oldest first

    @property
    def free_bytes(self) -> int:
        """What is kept for later."""
        return sum(map(len, list(self._free.values())))

    def take(self, size: int) -> np.ndarray[Any, Any]:
        """Writable memory of ``size`` bytes, not zeroed. It comes back by itself when the last reference to it is gone."""
        if not MIN_BYTES <= size <= self._max_free_bytes:
            return np.empty(size, np.uint8)
        memory = self._find(size) or memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
        # NumPy lets a view refer to the array at the end of a chain of views. A memoryview ends the chain here: whatever is made of
        # this array refers to this very object, so its end is the end of them all.
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._give_back, memory).atexit = False
        return array

    def clear(self) -> None:
        """Give back to the system what is kept."""
        self._free.clear()

    def _find(self, size: int) -> memoryview | None:
        for key, memory in list(self._free.items()):
            if len(memory) == size and self._free.pop(key, None) is not None:
                return memory
        return None

    def _give_back(self, memory: memoryview) -> None:
        self._free[id(memory)] = memory
        for oldest in list(self._free):
            if self.free_bytes <= self._max_free_bytes:
                return
            self._free.pop(oldest, None)


POOL = BufferPool()
"""The one of this process."""
