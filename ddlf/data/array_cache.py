"""Data sets that stay in an executor's memory from one run to the next, found by content. Runs on workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.data.trees import leaves

if TYPE_CHECKING:
    import numpy as np

KEPT_USES = 2
"""Data sets of so many runs stay: that of this run and of the one before."""


class ArrayCache(dict[str, Any]):
    """Arrays, or lists, tuples and dicts of them, by a hash of their content or by name.

    Args:
        max_bytes: Earlier runs' data leaves as soon as all together is more; by default a quarter of this machine's memory.
        tell: Takes the number of data sets and their bytes whenever some came or left.
    """

    def __init__(self, max_bytes: int | None = None, tell: Callable[[int, int], None] | None = None) -> None:
        super().__init__()
        self._tell = tell
        self._max_bytes = _quarter_of_memory() if max_bytes is None else max_bytes
        self._uses: list[frozenset[str]] = []

    def use(self, names: Iterable[str]) -> None:
        """Say what a run uses; what only older runs used is freed.

        Args:
            names: Names of its data; they need not be here yet.
        """
        now = frozenset(names)
        self._uses = [*(earlier for earlier in self._uses if earlier != now), now][-KEPT_USES:]
        self._free()
        while len(self._uses) > 1 and self.nbytes > self._max_bytes:
            self._uses.pop(0)
            self._free()

    def make_room(self) -> None:
        """Free what would leave anyway when other data comes."""
        self._uses = self._uses[1 - KEPT_USES :]
        self._free()

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._changed()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._changed()

    def clear(self) -> None:
        """Free all."""
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
        """Bytes of all arrays."""
        return sum(array.nbytes for value in list(self.values()) for _, array in leaves(value))


def _quarter_of_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (AttributeError, ValueError, OSError):  # not every system says
        return 4 << 30


def unchanging(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory as an array that cannot be written to: it is found by its content later."""
    view = array.view()
    view.flags.writeable = False
    return view
