"""How long a call may take, as one value. Runs on both sides."""

from __future__ import annotations

import time


class Deadline:
    """When a call has to be over. Made once, where somebody says how long it may take, and passed down to all that takes part of that time.

    Args:
        timeout_s: All its time; None is for ever.
    """

    __slots__ = ("_at", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Seconds until then, at least 0; None for ever."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def allows(self, longest_s: float) -> float:
        """The seconds that are left, but not more than so many."""
        left_s = self.left_s()
        return longest_s if left_s is None else min(longest_s, left_s)


NEVER = Deadline(None)
"""Of a call that may take for ever."""
