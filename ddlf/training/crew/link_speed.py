"""Measures the speed of the links between workers for ``ddlf bench --pairs``. Runs in the executor."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.worker.calls import concurrent, offered

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker

WAYS = "ways"
"""Name of this role on workers."""
CALLS = 200
TRANSFERS = 3


class Ways:
    """One worker's end of its links to the other workers, for measurements.

    Args:
        worker: The role's worker.
        run: Name of the run. The worker finds the other ends by this name.
    """

    def __init__(self, worker: Worker, run: str) -> None:
        self._worker = worker
        self._role = run, WAYS
        self._payload = np.ones(0, np.uint8)

    @concurrent
    async def measure(self, other: int, size: int) -> list[float]:
        """Measure delay and speed of the link to another worker.

        Args:
            other: Number of the other worker.
            size: Bytes of a transfer.

        Returns:
            Median and 99th percentile of the seconds of a small call; MB/s to the other worker; MB/s from it.
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
            # Subtract the small round trip that each transfer includes: it is not part of the speed.
            speeds.append(size / max(took - latency, 0.1 * took) / 1e6)
        return [latency, calls[CALLS * 99 // 100], *speeds]

    @offered
    async def take(self, data: Any) -> None:
        """Receive data and drop them, so that the caller can measure how long sending takes."""

    @offered
    async def give(self, size: int) -> Any:
        """Return ``size`` bytes, so that the caller can measure how long receiving takes.

        The first call allocates them, before the measured calls.
        """
        if len(self._payload) != size:
            self._payload = np.ones(size, np.uint8)
        return self._payload

    async def close(self) -> None:
        """Do nothing. Every ``Role`` (an object that other workers can call) needs this method."""
