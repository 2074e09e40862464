"""What the executor is doing, in a page of memory that its daemon reads. Runs in both processes of a worker.

The executor writes a few bytes before and after each method; the daemon reads them when somebody asks. That costs no system call, so a small call
stays small, and it works while the executor loops forever or holds the GIL. The daemon writes into the same page which requests are to end, and
which master has the worker.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from typing import NamedTuple

_RUNNING = struct.Struct("<Qd120s")  # id of the last request that began (0: none), monotonic start in seconds, name
_ID = struct.Struct("<Q")
_ENDED_BIT = 1 << 63  # of that id: it has ended
_ENDED_BYTE_AT = 7
_BESIDE_AT = 232  # the highest id of a concurrent method that has begun
_USED_AT = 240
_ASKED_AT = 248  # how often the end of a request was asked for
_ENDED = struct.Struct("<64Q")  # for which requests, the last 64
_ENDED_AT = 256
_HELD = struct.Struct("<QQ")  # data sets, and their bytes
_HELD_AT = 800
_SHARD = struct.Struct("<QQQQ32sQQ")  # as the fields of Shard; values of the whole model are 0 if there is none
_SHARD_AT = 832
_LEASE_AT = 1024
_LEASE_BYTES = 24
_LEASE_END = _LEASE_AT + _LEASE_BYTES
_WRITERS = 128
_WRITTEN = struct.Struct(f"@{_WRITERS}Q")  # native: each is read and written in one piece
_WRITTEN_AT = 2048
PAGE_BYTES = 4096


class Running(NamedTuple):
    """A method that runs now.

    Args:
        id: Number of its request.
        name: Name of the method.
        seconds: Since it started.
    """

    id: int
    name: str
    seconds: float


class Shard(NamedTuple):
    """A slice of a run's weights that is kept here.

    Args:
        begin: Number of its first value, of all values of the model one after the other.
        end: Number of the one behind its last.
        of: Values of the model.
        version: Of its values.
        run: Name of the run.
        shards: How many slices there are, of which this is one; 0 if there are only copies.
        copies: Copies of other workers' slices.
    """

    begin: int
    end: int
    of: int
    version: int
    run: str
    shards: int = 1
    copies: int = 0


class Activity:
    """The shared page.

    Args:
        fd: Descriptor of the page, from ``create``; it stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, PAGE_BYTES)
        self._asked = 0  # when ``_to_end`` was read
        self._to_end: frozenset[int] = frozenset()

    def close(self) -> None:
        """Let go of the page."""
        self._page.close()

    @staticmethod
    def create() -> int:
        """Make an empty page and return its descriptor. It has no name in the file system."""
        with tempfile.TemporaryFile() as file:
            file.truncate(PAGE_BYTES)
            return os.dup(file.fileno())

    def begin(self, id: int, name: str) -> None:
        """Say that a method starts. The system's monotonic clock is the same in both processes."""
        self._page[_USED_AT] = 1
        _RUNNING.pack_into(self._page, 0, id, time.monotonic(), name.encode(errors="replace")[:120])

    def hold(self, count: int, nbytes: int) -> None:
        """Say how many data sets there are now, and how many bytes they have."""
        _HELD.pack_into(self._page, _HELD_AT, count, nbytes)

    @property
    def held(self) -> tuple[int, int]:
        """What ``hold`` said last."""
        count, nbytes = _HELD.unpack_from(self._page, _HELD_AT)
        return count, nbytes

    def show_shard(self, shard: Shard | None) -> None:
        """Say which slice of a run's weights is kept here now."""
        begin, end, of, version, run, *counts = shard or (0, 0, 0, 0, "", 0, 0)
        _SHARD.pack_into(self._page, _SHARD_AT, begin, end, of, version, run.encode(errors="replace")[:32], *counts)

    @property
    def shard(self) -> Shard | None:
        """What ``show_shard`` said last."""
        begin, end, of, version, run, *counts = _SHARD.unpack_from(self._page, _SHARD_AT)
        return Shard(begin, end, of, version, run.rstrip(b"\0").decode(errors="replace"), *counts) if of else None

    @property
    def written(self) -> int:
        """How many lines this executor and its children have written, as ``counted`` says."""
        return sum(_WRITTEN.unpack_from(self._page, _WRITTEN_AT))

    def counted(self) -> memoryview:
        """How many lines this process has written, to be changed in place: that is what costs least. Few processes at a time have the same one."""
        at = _WRITTEN_AT + 8 * (os.getpid() % _WRITERS)
        return memoryview(self._page)[at : at + 8].cast("Q")

    def begin_beside(self, id: int) -> None:
        """Say that a concurrent method starts, which may be before its turn."""
        if id > self.beside:
            _ID.pack_into(self._page, _BESIDE_AT, id)

    @property
    def beside(self) -> int:
        """The highest id of a concurrent method that has begun: a request with a higher one than that and than the one that runs has not."""
        id: int = _ID.unpack_from(self._page, _BESIDE_AT)[0]
        return id

    @property
    def begun(self) -> int:
        """The id of the last method that has begun, whether it runs or has ended; 0 if none has."""
        id: int = _ID.unpack_from(self._page, 0)[0]
        return id & ~_ENDED_BIT

    def end(self) -> None:
        """Say that it ended."""
        self._page[_ENDED_BYTE_AT] |= _ENDED_BIT >> 56

    def shown(self) -> bytes:
        """What the page says now, for ``show``."""
        return self._page[: _RUNNING.size]

    def show(self, shown: bytes) -> None:
        """Say again what ``shown`` said: a concurrent method came in between."""
        self._page[: _RUNNING.size] = shown

    def running(self) -> Running | None:
        """What runs now; None when nothing does."""
        id, since, name = _RUNNING.unpack_from(self._page, 0)
        if id == 0 or id & _ENDED_BIT:
            return None
        return Running(id, name.rstrip(b"\0").decode(errors="replace"), time.monotonic() - since)

    @property
    def used(self) -> bool:
        """Whether this executor has run a method, or was told by ``use``."""
        return self._page[_USED_AT] != 0

    def use(self) -> None:
        """Say that the executor may hold something that a new one would not."""
        self._page[_USED_AT] = 1

    def ask_end(self, id: int) -> None:
        """Say that a request is to end, whether it runs or has not started yet. The last 64 are known.

        The next SIGINT is meant for it, so a late signal does not hit the request after it.
        """
        (asked,) = _ID.unpack_from(self._page, _ASKED_AT)
        _ID.pack_into(self._page, _ENDED_AT + asked * _ID.size % _ENDED.size, id)
        _ID.pack_into(self._page, _ASKED_AT, asked + 1)  # last, so that who sees it sees the id

    def is_to_end(self, id: int) -> bool:
        """Whether the daemon asked for the end of this request."""
        (asked,) = _ID.unpack_from(self._page, _ASKED_AT)
        if asked != self._asked:  # rarely: to look through the page for each call costs more than all else in this file
            self._to_end = frozenset(_ENDED.unpack_from(self._page, _ENDED_AT))
            self._asked = asked  # last, because a signal may come in between and ask again
        return id in self._to_end

    def grant(self, lease: bytes) -> None:
        """Say whose requests the executor is to run, by the key of a lease; nobody's if it is empty."""
        self._page[_LEASE_AT:_LEASE_END] = lease.ljust(_LEASE_BYTES, b"\0")

    def holds(self, lease: bytes) -> bool:
        """Whether this key, which is not empty, is the one of the lease."""
        return self._page[_LEASE_AT:_LEASE_END] == lease

    @property
    def lease(self) -> bytes:
        """The key of the lease; zeros while the worker is free."""
        return self._page[_LEASE_AT:_LEASE_END]

    def clear(self) -> None:
        """Start anew, for a new executor. The lease is the daemon's and stays."""
        self._page[:_LEASE_AT] = bytes(_LEASE_AT)
        self._page[_WRITTEN_AT : _WRITTEN_AT + _WRITTEN.size] = bytes(_WRITTEN.size)
