"""A cache of data sets in the memory of an executor, a worker's process. It finds data by its content, and outlives a
run. Runs on workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ddlf.data.trees import leaves
from ddlf.worker.machine import memory

USUAL_MEMORY = 2**34
"""Assumed bytes of memory on systems that do not report it."""
KEPT_USES = 2
"""Number of runs whose data sets stay: the present run and the one before."""


class ArrayCache(dict[str, Any]):
    """A cache of arrays, or of lists, tuples and dicts of arrays. The key is a hash of their content, or a name.

    Args:
        max_bytes: Limit for all data together. Above it, data of earlier runs is freed. By default a quarter of this
            machine's memory.
        tell: Receives the number of data sets and their bytes after each change.
    """

    def __init__(self, max_bytes: int | None = None, tell: Callable[[int, int], None] | None = None) -> None:
        super().__init__()
        self._tell = tell
        self._max_bytes = (memory()[0] or USUAL_MEMORY) // 4 if max_bytes is None else max_bytes
        self._uses: list[frozenset[str]] = []

    def use(self, names: Iterable[str]) -> None:
        """Record the data that a run uses, and free data that only older runs used.

        Args:
            names: Names of the run's data. They may be missing from the cache.
        """
        now = frozenset(names)
        self._uses = [*(earlier for earlier in self._uses if earlier != now), now][-KEPT_USES:]
        self._free()
        while len(self._uses) > 1 and self.nbytes > self._max_bytes:
            self._uses.pop(0)
            self._free()

    def make_room(self) -> None:
        """Free the data that the next ``use`` would free in any case, before new data is loaded."""
        self._uses = self._uses[1 - KEPT_USES :]
        self._free()

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._changed()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._changed()

    def clear(self) -> None:
        """Free all data in the cache."""
        super().clear()
        self._changed()

    def _free(self) -> None:
        for name in set(self).difference(*self._uses):
            del self[name]

    def _changed(self) -> None:
        if self._tell is not None:
            self._tell(len(self), self.nbytes)

    @property
    def nbytes(self) -> int:
        """The total bytes of all arrays in the cache."""
        return sum(array.nbytes for value in list(self.values()) for _, array in leaves(value))


def unchanging(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a read-only view of an array. The cache finds arrays by their content, so they must not change."""
    view = array.view()
    view.flags.writeable = False
    return view
