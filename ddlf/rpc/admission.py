"""How many strangers and how many friends: limits on connections before and after the handshake. Runs in the daemon and in the executor.

The numbers and their reasons are in ``docs/reference/protocol.md``, section 5.

A handshake takes milliseconds, so when there are too many at once the oldest one is not a real client's: it has to go, and the newcomer stays.
Somebody who opens connections and says nothing therefore takes places from himself only. Many real masters that begin at the same moment are
served: an address has a moment of grace before its oldest ones go.
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
from ddlf.rpc.frame import MAX_BODY_BYTES

MAX_HALF_OPEN = 64
MAX_HALF_OPEN_PER_ADDRESS = 8
GRACE_S = 0.25
MAX_CONNECTIONS = 1024
RESERVED_DESCRIPTORS = 64
LOG_EVERY_S = 60.0
MAX_LOGGED = 1000

_CHOSEN_BY_STRANGERS = re.compile(r"first bytes .*|\d\S*")
"""What can differ each time in lines of the same kind."""


def free_descriptors() -> int:
    """How many connections the process may have in all, so that what else it opens never lacks a descriptor."""
    try:
        import resource
    except ImportError:  # not POSIX
        return MAX_CONNECTIONS + MAX_HALF_OPEN
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(4, soft - RESERVED_DESCRIPTORS)


class Admission:
    """The handshakes in progress, and the places that are left for connections after them.

    Args:
        log: Takes a line for a person.
        connections: How many connections are open now.
    """

    def __init__(self, log: Callable[[str], None], connections: Callable[[], int]) -> None:
        self._log = log
        self._connections = connections
        self._greetings: dict[asyncio.Task[None], tuple[str, float]] = {}  # address and begin; the oldest first
        self._refused: dict[tuple[str, str], tuple[float, int]] = {}  # time of the last line, how often since
        free = free_descriptors()
        self.max_half_open = min(MAX_HALF_OPEN, free // 2)
        self.max_connections = min(MAX_CONNECTIONS, free - self.max_half_open)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The handshakes in progress."""
        return list(self._greetings)

    @property
    def has_place(self) -> bool:
        """Whether one more connection may be kept after its handshake."""
        return self._connections() < self.max_connections

    def start(self, greeting: Coroutine[Any, Any, None], address: str) -> asyncio.Task[None]:
        """Run a handshake as a task, which is returned; end the oldest one, of this address or of all, when there are too many."""
        loop = asyncio.get_running_loop()
        if len(self._greetings) >= self.max_half_open:
            self._end(next(iter(self._greetings)))
        task = loop.create_task(greeting)
        self._greetings[task] = (address, loop.time())
        task.add_done_callback(lambda task: self._greetings.pop(task, None))
        if len(self._of(address)) > MAX_HALF_OPEN_PER_ADDRESS:
            loop.call_later(GRACE_S, self._trim, address)
        return task

    def _of(self, address: str) -> list[asyncio.Task[None]]:
        return [task for task, (other, _) in self._greetings.items() if other == address]

    def _trim(self, address: str) -> None:
        """End the oldest handshakes of an address that had its grace."""
        grace_ended = asyncio.get_running_loop().time() - GRACE_S
        for task in self._of(address)[:-MAX_HALF_OPEN_PER_ADDRESS]:
            if self._greetings[task][1] <= grace_ended:
                self._end(task)

    def _end(self, task: asyncio.Task[None]) -> None:
        address, _ = self._greetings.pop(task)
        task.cancel()
        self.log_refusal(address, "too many handshakes at once, the oldest had to go")

    def log_refusal(self, address: str, reason: str) -> None:
        """Write a line, at most one a minute for each address and kind of reason: a port scanner must not fill the disk."""
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
        before = f" ({count} more since the last line)" if count else ""
        self._log(f"refused {address}: {reason}{before}")


class Budget:
    """Memory for bodies that are being received, of all connections of a process together.

    Args:
        total_bytes: How much. What is received completely is no longer counted: it is its owner's.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0

    def take(self, size: int) -> None:
        """Count ``size`` bytes.

        Raises:
            ProtocolError: There is no room for them.
        """
        if self.used_bytes + size > self.total_bytes:
            raise ProtocolError(
                f"no room for an array of {size:,} bytes: {self.used_bytes:,} of at most {self.total_bytes:,} "
                "are being received already",
                hint="send less at once",
            )
        self.used_bytes += size

    def give_back(self, size: int) -> None:
        """Count them no longer."""
        self.used_bytes -= size


def _most_memory() -> int:
    """Three quarters of this machine's memory, but always one message of the largest size."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        memory = 0
    return max(MAX_BODY_BYTES, memory * 3 // 4)


RECEIVING = Budget(_most_memory())
"""The one of this process."""
