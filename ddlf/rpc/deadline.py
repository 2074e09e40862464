"""The point in time when a call gives up. Runs on both sides."""

from __future__ import annotations

import time


class Deadline:
    """The point in time when a call has to end. The caller that sets the limit creates it once and passes it to every
    step of the call.

    Args:
        timeout_s: All the time that the call has; None means no limit.
    """

    __slots__ = ("_at", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Return the remaining seconds, at least 0; None if there is no limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def allows(self, longest_s: float) -> float:
        """Return the remaining seconds, but at most ``longest_s``."""
        left_s = self.left_s()
        return longest_s if left_s is None else min(longest_s, left_s)


NEVER = Deadline(None)
"""The deadline of a call without a limit."""
