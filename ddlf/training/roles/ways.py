"""How fast the way from one worker to another is: what ``ddlf bench --pairs`` has workers measure. Runs in the executor."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.worker.methods import concurrent, offered

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker

WAYS = "ways"
"""What this role is called on workers."""
CALLS = 200
TRANSFERS = 3


class Ways:
    """One end of the ways between workers.

    Args:
        worker: Worker that it is on.
        run: Name of the run, by which the other ends are found.
    """

    def __init__(self, worker: Worker, run: str) -> None:
        self._worker = worker
        self._role = run, WAYS
        self._held = np.ones(0, np.uint8)

    @concurrent
    async def measure(self, other: int, size: int) -> list[float]:
        """Measure the way to another worker.

        Args:
            other: Its number.
            size: Bytes of a transfer.

        Returns:
            Seconds of a small call, the median and what 99 of 100 were below; MB/s to that worker, and from it.
        """
        peer, payload = self._worker.peers[other], np.ones(size, np.uint8)

        async def seconds(verb: str, argument: Any) -> float:
            begin = time.perf_counter()
            await peer.call(self._role, verb, argument)
            return time.perf_counter() - begin

        await seconds("take", b"")
        calls = sorted([await seconds("take", bytes(64)) for _ in range(CALLS)])
        latency = statistics.median(calls)
        speeds = []
        for verb, argument in (("take", payload), ("give", size)):
            await seconds(verb, argument)
            took = min([await seconds(verb, argument) for _ in range(TRANSFERS)])
            # A transfer includes one small round trip, which is no part of the speed of the way.
            speeds.append(size / max(took - latency, 0.1 * took) / 1e6)
        return [latency, calls[CALLS * 99 // 100], *speeds]

    @offered
    async def take(self, data: Any) -> None:
        """Receive."""

    @offered
    async def give(self, size: int) -> Any:
        """Send so many bytes, made before they are measured."""
        if len(self._held) != size:
            self._held = np.ones(size, np.uint8)
        return self._held

    async def close(self) -> None:
        """See ``Role``."""
