"""A page of shared memory in which the daemon, the process that always answers, reads what the executor, the process
that runs user code, is doing. Runs in both processes of a worker.

The executor writes a few bytes before and after each method. The daemon reads them when a master asks. This needs no
system call, so a small call stays cheap. It also works while the executor loops forever or holds the GIL. In the same
page the daemon writes which requests have to end, and which master has the worker.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from dataclasses import astuple, dataclass
from typing import NamedTuple

_RUNNING = struct.Struct("<Qd120s")  # id of the last request that began (0: none), monotonic start in seconds, name
_ID = struct.Struct("<Q")
_ENDED_BIT = 1 << 63  # this bit in the id means that the request has ended
_ENDED_BYTE_AT = 7
_BESIDE_AT = 232  # the highest id of a concurrent method that has begun
_USED_AT = 240
_ASKED_AT = 248  # how often the end of a request was requested
_ENDED = struct.Struct("<64Q")  # the last 64 requests that have to end
_ENDED_AT = 256
_DATASETS = struct.Struct("<QQ")  # number of data sets, and their bytes
_DATASETS_AT = 800
_SHARD = struct.Struct("<QQQQ32sQQ")  # the fields of Shard; a model of 0 values stands for no shard
_SHARD_AT = 832
_PART = struct.Struct("<QQQQQ32s")  # the fields of HeldPart; an empty name of a run stands for no part
_PART_AT = 912
_LEASE_AT = 1024
_LEASE_BYTES = 24
_LEASE_END = _LEASE_AT + _LEASE_BYTES
_WRITERS = 128
_WRITTEN = struct.Struct(f"@{_WRITERS}Q")  # native: each counter is read and written in one piece
_WRITTEN_AT = 2048
PAGE_BYTES = 4096


class Running(NamedTuple):
    """The method that the executor runs at the moment.

    Args:
        id: Number of its request.
        name: Name of the method.
        seconds: Seconds since it started.
    """

    id: int
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a run's weights that is kept on this worker.

    Args:
        begin: Index of its first value, among all values of the model one after another.
        end: Index after its last value.
        of: Number of all values of the model.
        version: Version of its values.
        run: Name of the run.
        shards: Number of parts that the weights are split into; 0 if this worker keeps only copies.
        copies: Number of copies of other workers' parts.
    """

    begin: int
    end: int
    of: int
    version: int
    run: str
    shards: int = 1
    copies: int = 0


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of a model that a worker trains.

    Args:
        number: Number of the part, from 1; 0 if this worker has only copies.
        of: Number of the parts of the model; 0 if this worker has only copies.
        nbytes: Bytes of its weights and optimizer.
        version: Version of its weights.
        copies: Number of copies of other workers' parts.
        run: Name of the run.
    """

    number: int
    of: int
    nbytes: int
    version: int
    copies: int
    run: str


class Activity:
    """The page of memory that the daemon and the executor of a worker share.

    Args:
        fd: Descriptor of the page, from ``create``. The caller still owns it.
    """

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, PAGE_BYTES)
        self._ends_read = 0  # the value of the counter when ``_to_end`` was read
        self._to_end: frozenset[int] = frozenset()

    def close(self) -> None:
        """Release this process's view of the shared page."""
        self._page.close()

    @staticmethod
    def create() -> int:
        """Create an empty page and return its file descriptor. The page has no name in the file system."""
        with tempfile.TemporaryFile() as file:
            file.truncate(PAGE_BYTES)
            return os.dup(file.fileno())

    def begin(self, id: int, name: str) -> None:
        """Record that a method starts, and when. The system's monotonic clock is the same in both processes."""
        self._page[_USED_AT] = 1
        _RUNNING.pack_into(self._page, 0, id, time.monotonic(), name.encode(errors="replace")[:120])

    def show_datasets(self, count: int, nbytes: int) -> None:
        """Record the number of loaded data sets, and their size in bytes."""
        _DATASETS.pack_into(self._page, _DATASETS_AT, count, nbytes)

    @property
    def datasets(self) -> tuple[int, int]:
        """The number of data sets and their bytes, as recorded by ``show_datasets``."""
        count, nbytes = _DATASETS.unpack_from(self._page, _DATASETS_AT)
        return count, nbytes

    def show_shard(self, shard: Shard | None) -> None:
        """Record which part of a run's weights this worker keeps now."""
        begin, end, of, version, run, *counts = astuple(shard) if shard is not None else (0, 0, 0, 0, "", 0, 0)
        _SHARD.pack_into(self._page, _SHARD_AT, begin, end, of, version, run.encode(errors="replace")[:32], *counts)

    @property
    def shard(self) -> Shard | None:
        """The part of a run's weights that ``show_shard`` has recorded; None if there is none."""
        begin, end, of, version, run, *counts = _SHARD.unpack_from(self._page, _SHARD_AT)
        return Shard(begin, end, of, version, run.rstrip(b"\0").decode(errors="replace"), *counts) if of else None

    def show_part(self, part: HeldPart | None) -> None:
        """Record which part of a model this worker has now."""
        *numbers, run = astuple(part) if part is not None else (0, 0, 0, 0, 0, "")
        _PART.pack_into(self._page, _PART_AT, *numbers, run.encode(errors="replace")[:32])

    @property
    def part(self) -> HeldPart | None:
        """The part of a model that ``show_part`` has recorded; None if there is none."""
        number, of, nbytes, version, copies, run = _PART.unpack_from(self._page, _PART_AT)
        name = run.rstrip(b"\0").decode(errors="replace")
        return HeldPart(number, of, nbytes, version, copies, name) if name else None

    @property
    def written(self) -> int:
        """The number of lines that this executor and its children have written: the sum of all counters of
        ``counted``."""
        return sum(_WRITTEN.unpack_from(self._page, _WRITTEN_AT))

    def counted(self) -> memoryview:
        """Return the counter of the lines of this process. The caller changes the counter in place, because this is
        fastest.

        Processes share a counter only if their process ids have the same remainder, which is rare.
        """
        at = _WRITTEN_AT + 8 * (os.getpid() % _WRITERS)
        return memoryview(self._page)[at : at + 8].cast("Q")

    def begin_beside(self, id: int) -> None:
        """Record that a concurrent method, which runs beside another method, starts. It may start before earlier
        requests.
        """
        if id > self.beside:
            _ID.pack_into(self._page, _BESIDE_AT, id)

    @property
    def beside(self) -> int:
        """The highest request number of a concurrent method that has begun. A request whose number is higher than this
        one and than the running method's has not begun.
        """
        id: int = _ID.unpack_from(self._page, _BESIDE_AT)[0]
        return id

    @property
    def begun(self) -> int:
        """The id of the last method that has begun, whether it still runs or has ended; 0 if none has begun."""
        id: int = _ID.unpack_from(self._page, 0)[0]
        return id & ~_ENDED_BIT

    def end(self) -> None:
        """Record that the running method has ended."""
        self._page[_ENDED_BYTE_AT] |= _ENDED_BIT >> 56

    def shown(self) -> bytes:
        """Return the bytes that record the running method, so that ``show`` can restore them later."""
        return self._page[: _RUNNING.size]

    def show(self, shown: bytes) -> None:
        """Restore a record from ``shown`` after a concurrent method has overwritten it."""
        self._page[: _RUNNING.size] = shown

    def running(self) -> Running | None:
        """Return the running method; None if no method runs."""
        id, since, name = _RUNNING.unpack_from(self._page, 0)
        if id == 0 or id & _ENDED_BIT:
            return None
        return Running(id, name.rstrip(b"\0").decode(errors="replace"), time.monotonic() - since)

    @property
    def used(self) -> bool:
        """Whether this executor has run a method, or ``use`` was called."""
        return self._page[_USED_AT] != 0

    def use(self) -> None:
        """Record that the executor may have state that would be lost if it were replaced."""
        self._page[_USED_AT] = 1

    def ask_end(self, id: int) -> None:
        """Record that a request has to end, whether it runs or has not started yet. The page keeps the last 64 such
        requests.

        The next SIGINT is meant for this request, so a late signal does not hit the request after it.
        """
        (count,) = _ID.unpack_from(self._page, _ASKED_AT)
        _ID.pack_into(self._page, _ENDED_AT + count * _ID.size % _ENDED.size, id)
        _ID.pack_into(self._page, _ASKED_AT, count + 1)  # last, so that a reader of the counter sees the id

    def is_to_end(self, id: int) -> bool:
        """Return whether the daemon asked for the end of this request."""
        (count,) = _ID.unpack_from(self._page, _ASKED_AT)
        if count != self._ends_read:  # rare; reading the list for each call would be slow
            self._to_end = frozenset(_ENDED.unpack_from(self._page, _ENDED_AT))
            self._ends_read = count  # last, because a signal may come in between and ask again
        return id in self._to_end

    def grant(self, lease: bytes) -> None:
        """Record the key of the lease whose requests the executor may run. With an empty key it runs no requests."""
        self._page[_LEASE_AT:_LEASE_END] = lease.ljust(_LEASE_BYTES, b"\0")

    def holds(self, lease: bytes) -> bool:
        """Return whether this key is the key of the present lease, which proves that its sender may use the worker."""
        return self._page[_LEASE_AT:_LEASE_END] == lease

    def read_lease(self) -> bytes:
        """Return the key of the lease; zeros while the worker is free."""
        return self._page[_LEASE_AT:_LEASE_END]

    def clear(self) -> None:
        """Reset the page for a new executor. The lease belongs to the daemon and stays."""
        self._page[:_LEASE_AT] = bytes(_LEASE_AT)
        self._page[_WRITTEN_AT : _WRITTEN_AT + _WRITTEN.size] = bytes(_WRITTEN.size)
