"""Limits on the number of connections, before and after the handshake. Runs in the daemon and in the executor.

``docs/reference/protocol.md``, section 5, gives the numbers and their reasons.

A handshake takes milliseconds. So if too many are open at once, the oldest one does not belong to a real client: it is
ended, and the new one stays. A client that opens connections and sends nothing only loses its own connections. Many
real masters may begin at the same moment, so an address has a short grace period before its oldest handshakes are
ended.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from ddlf.errors import ProtocolError
from ddlf.rpc.messages import MAX_BODY_BYTES

MAX_HALF_OPEN = 64
MAX_HALF_OPEN_PER_ADDRESS = 8
GRACE_S = 0.25
MAX_CONNECTIONS = 1024
RESERVED_DESCRIPTORS = 64
LOG_EVERY_S = 60.0
MAX_LOGGED = 1000

_CHOSEN_BY_STRANGERS = re.compile(r"first bytes .*|\d\S*")
"""The parts of a log line that strangers choose. Lines that differ only in these parts are of the same kind."""


def free_descriptors() -> int:
    """Return the maximum number of connections that this process may keep, so that enough file descriptors stay free
    for other purposes.
    """
    try:
        import resource
    except ImportError:  # not POSIX
        return MAX_CONNECTIONS + MAX_HALF_OPEN
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(4, soft - RESERVED_DESCRIPTORS)


class Admission:
    """The handshakes in progress, and the number of connections that may still be accepted.

    Args:
        log: Receives each line of the log.
        connections: Returns the number of open connections.
        per_address: Number of handshakes that one address may have in progress for long.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        connections: Callable[[], int],
        *,
        per_address: int = MAX_HALF_OPEN_PER_ADDRESS,
    ) -> None:
        self._log = log
        self._per_address = per_address
        self._connections = connections
        self._greetings: dict[asyncio.Task[None], tuple[str, float]] = {}  # address and begin; the oldest first
        self._refused: dict[tuple[str, str], tuple[float, int]] = {}  # time of the last line, refusals since then
        free = free_descriptors()
        self.max_half_open = min(MAX_HALF_OPEN, free // 2)
        self.max_connections = min(MAX_CONNECTIONS, free - self.max_half_open)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of the handshakes in progress."""
        return list(self._greetings)

    @property
    def has_place(self) -> bool:
        """Whether the process may keep one more connection after its handshake."""
        return self._connections() < self.max_connections

    def start(self, greeting: Coroutine[Any, Any, None], address: str) -> asyncio.Task[None]:
        """Run a handshake as a task and return the task. If there are too many, end the oldest one of this address or
        of all.
        """
        loop = asyncio.get_running_loop()
        if len(self._greetings) >= self.max_half_open:
            self._end(next(iter(self._greetings)))
        task = loop.create_task(greeting)
        self._greetings[task] = (address, loop.time())
        task.add_done_callback(lambda task: self._greetings.pop(task, None))
        if len(self._greetings_from(address)) > self._per_address:
            loop.call_later(GRACE_S, self._trim, address)
        return task

    def _greetings_from(self, address: str) -> list[asyncio.Task[None]]:
        return [task for task, (other, _) in self._greetings.items() if other == address]

    def _trim(self, address: str) -> None:
        """End the oldest handshakes of an address after its grace period."""
        grace_ended = asyncio.get_running_loop().time() - GRACE_S
        for task in self._greetings_from(address)[: -self._per_address]:
            if self._greetings[task][1] <= grace_ended:
                self._end(task)

    def _end(self, task: asyncio.Task[None]) -> None:
        address, _ = self._greetings.pop(task)
        task.cancel()
        self.log_refusal(address, "too many handshakes at once, so the oldest connection was closed")

    def log_refusal(self, address: str, reason: str) -> None:
        """Log a refusal, at most once a minute for each address and kind of reason, so that a port scanner cannot fill
        the disk.
        """
        now = time.monotonic()
        key = (address, _CHOSEN_BY_STRANGERS.sub("#", reason))
        at, count = self._refused.get(key, (-LOG_EVERY_S, 0))
        if now - at < LOG_EVERY_S:
            self._refused[key] = (at, count + 1)
            return
        if len(self._refused) >= MAX_LOGGED:
            self._refused = {key: entry for key, entry in self._refused.items() if now - entry[0] < LOG_EVERY_S}
            if len(self._refused) >= MAX_LOGGED:
                return
        self._refused[key] = (now, 0)
        note = f" ({count} more since the last line)" if count else ""
        self._log(f"refused {address}: {reason}{note}")


class Budget:
    """Memory for message bodies that are being received, for all connections of a process together.

    Args:
        total_bytes: The limit. A body counts until it has arrived completely.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0

    def take(self, size: int) -> None:
        """Reserve ``size`` bytes of the budget for a message that begins to arrive.

        Raises:
            ProtocolError: The limit does not leave ``size`` bytes.
        """
        if self.used_bytes + size > self.total_bytes:
            raise ProtocolError(
                f"no room for an array of {size:,} bytes: {self.used_bytes:,} of at most {self.total_bytes:,} "
                "are being received already",
                hint="send less at once",
            )
        self.used_bytes += size

    def give_back(self, size: int) -> None:
        """Return ``size`` reserved bytes to the budget."""
        self.used_bytes -= size


def _most_memory() -> int:
    """Return three quarters of this machine's memory, in bytes, and at least the size of the largest message."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        memory = 0
    return max(MAX_BODY_BYTES, memory * 3 // 4)


RECEIVING = Budget(_most_memory())
"""The budget of this process."""
