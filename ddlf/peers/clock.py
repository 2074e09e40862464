"""The clock of a server of peers: seconds since 1970 that never go back. Runs on the server.

The clock of a machine is set back when it was wrong. Leases, deadlines and quotas compare times, and would then last longer
by this step: a server would read nothing for hours. A step forward is like a time in which the machine was asleep.
"""

from __future__ import annotations

import threading
import time


class Clock:
    """Seconds since 1970 that continue at the usual speed when the clock of the system is set back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added_s = 0.0
        self._last = 0.0

    def now(self) -> float:
        """Return the time, which is not below any time that was returned before."""
        with self._lock:
            system = time.time()
            self._added_s = max(self._added_s, self._last - system)
            self._last = system + self._added_s
            return self._last

    def continue_after(self, at: float) -> None:
        """Return no time below this one from now on: an earlier server had it on its clock."""
        with self._lock:
            self._last = max(self._last, at)


_clock = Clock()
now, continue_after = _clock.now, _clock.continue_after
