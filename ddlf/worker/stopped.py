"""Detects a stopped process (SIGSTOP). Runs in the daemon.

A computing process and a stopped process look alike: neither answers. Only the system can distinguish them. It never
reports a healthy process as stopped, so native code may block the executor for any time.
"""

from __future__ import annotations

from pathlib import Path

LOOK_S = 0.5


def is_stopped(pid: int) -> bool:
    """Return whether Linux reports that a signal has stopped a process. Return False for a process in a debugger, and
    if the state is unknown.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b") ")[2][:1] == b"T"


class StoppedFor:
    """Measures how long a process has been stopped, by repeated checks.

    Time without checks does not count, because then this process was stopped, too.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._pid: int | None = None

    def look(self, pid: int | None) -> float:
        """Check again, ``LOOK_S`` after the last check. Return how many seconds the same process has been stopped."""
        stopped = pid is not None and is_stopped(pid)
        self.seconds = self.seconds + LOOK_S if stopped and pid == self._pid else 0.0
        self._pid = pid
        return self.seconds
