"""Measures the memory that a worker uses. Runs in the daemon."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ddlf.worker.machine import memory


def footprint(*pids: int | None) -> dict[str, int | None]:
    """Return bytes of memory: ``"used"`` by some processes, and ``"total"`` and ``"free"`` of the machine. Unknown
    values are None.
    """
    total, free = memory()
    return {"used": sum(map(_resident, pids)) or None, "total": total, "free": free}


def _resident(pid: int | None) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended, or this is not Linux
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
