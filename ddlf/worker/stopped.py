"""Whether a process was stopped (SIGSTOP). Runs in the daemon.

A process that computes and one that was stopped answer alike: not at all. Only the system can tell them apart, and a healthy one is never taken for
a stopped one: native code may hold the executor for as long as it likes.
"""

from __future__ import annotations

from pathlib import Path

LOOK_S = 0.5


def is_stopped(pid: int) -> bool:
    """Whether Linux says that a process is stopped by a signal. One that a debugger holds is not, nor is any where that cannot be known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b") ")[2][:1] == b"T"


class StoppedFor:
    """For how long a process has been found to be stopped, each time that somebody looked.

    Time in which nobody looked counts for nothing: then this process was stopped, too.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._pid: int | None = None

    def look(self, pid: int | None) -> float:
        """Look once more, ``LOOK_S`` after the last time; returns how long the same process has been stopped, in seconds."""
        stopped = pid is not None and is_stopped(pid)
        self.seconds = self.seconds + LOOK_S if stopped and pid == self._pid else 0.0
        self._pid = pid
        return self.seconds
