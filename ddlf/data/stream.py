"""Reads the samples of partition files ahead of use, on a thread, in bounded memory. A portion gives the samples and
their order.

Runs on workers and on the master.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from ddlf.algorithms.reading_order import SHUFFLE, Global, Portion, Turned, Unshuffled, Window
from ddlf.data.data_set import DataSet
from ddlf.data.partition_file import Arrays, Ragged
from ddlf.errors import ConfigError
from ddlf.events.record import size
from ddlf.worker.machine import memory

AHEAD = 2
"""Number of chunks that are read ahead while one is used."""
LOADS, MOST_LOADS = 2, 8
"""Minimum and maximum number of files that are read into memory concurrently."""
LOAD_BYTES = 2**25
"""Bytes of files that are read into memory concurrently, if that is more than ``LOADS`` files. Many small row groups at
once hide the latency of a store."""
SHARE = 10
"""A chunk takes at most this fraction of ``data_memory``. The chunks ahead, the present one and the copies of it then
take half of ``data_memory``."""
MOST_BYTES = 2**25
"""Maximum bytes of a chunk. Larger chunks would not be faster."""
FIRST_BATCHES = 8
"""Batches of the first chunk, so that training begins soon. Each chunk is twice as large as the previous one, up to the
full size."""
LEAST_BATCHES = 8
"""Number of batches that must fit into ``data_memory``."""
USUAL = 2**30
"""Upper limit for the default of ``data_memory``."""


class StreamClosed(Exception):
    """Raised in a thread that waits for samples when the stream is closed."""


def usual_memory() -> int:
    """Return the default of ``data_memory`` in bytes: an eighth of the memory of this machine or its container."""
    return min((memory()[0] or 8 * USUAL) // 8, USUAL)


class SampleStream:
    """One pass over some samples, as chunks of whole batches. The next chunks are read while one is used.

    A stream reads at most ``AHEAD`` chunks ahead, so it waits for a slow consumer.

    Args:
        data: The data set.
        portion: The samples to read, and their order.
        batch_size: Samples in a batch. Each chunk except the last one has a multiple of it.
        memory: Bytes for all data that is read and not yet trained on. A window of files is held in memory if it takes
            at most half of this; otherwise rows are read from the disk on use.
        before: An earlier pass over the same data with the same memory. Files that earlier passes have left in memory,
            up to half of the memory, are not read again.
        skipped: Numbers from 0 of partition files to leave out.

    Attributes:
        left_out: Number of samples that are left out, by number of their file.
        samples: Number of samples that are read.
        begun: Whether the iteration has begun.
        wait_s: Seconds of waiting for chunks.
        files: Numbers of the opened files, in the order of opening.

    Raises:
        ConfigError: The memory is too small for batches.
    """

    def __init__(
        self,
        data: DataSet,
        portion: Portion | Turned,
        batch_size: int,
        memory: int,
        before: SampleStream | None = None,
        skipped: Collection[int] = (),
    ) -> None:
        self._data, self._portion, self._room = data, portion, memory // 2
        self._sizes = data.manifest.sizes
        self._skipped = np.array(sorted(skipped), np.int64)
        self.left_out: dict[int, int] = {}
        for numbers, _ in portion.blocks(self._sizes) if len(self._skipped) else ():
            for number, count in zip(
                *np.unique(numbers[np.isin(numbers, self._skipped)], return_counts=True), strict=True
            ):
                self.left_out[int(number)] = self.left_out.get(int(number), 0) + int(count)
        self.samples = portion.samples - sum(self.left_out.values())
        row = data.row_bytes
        if (least := LEAST_BATCHES * min(batch_size, portion.samples) * row) > memory:
            raise ConfigError(
                f"data_memory is {size(memory)}, too little for batches of {batch_size} samples of {size(row)} each",
                hint=f"set at least {least} bytes, or make batches smaller",
            )
        self._chunk = max(min(memory // SHARE, MOST_BYTES) // row // batch_size, 1) * batch_size
        self._next = FIRST_BATCHES * batch_size
        rule = SHUFFLE.read(portion.shuffle)
        files = min((rule.files if isinstance(rule, Window) else 1) * portion.windows, len(self._sizes))
        window = sum(sorted(file.nbytes for file in data.manifest.files)[-files:])
        # Rows of generated data cannot be read singly.
        self._whole = not data.on_disk and (
            isinstance(rule, Global) or (data.in_order and not isinstance(rule, Unshuffled))
        )
        if not data.on_disk and (need := data.manifest.nbytes if self._whole else window) > self._room:
            amount = "all of it" if self._whole else "its largest part" if files == 1 else f"{files} of its parts"
            raise ConfigError(
                f"{data} is read with shuffle={str(rule)!r}. Then {amount} has to fit into half of data_memory: "
                f"{size(need)} in {size(self._room)}",
                hint="increase data_memory, make smaller parts, use shuffle='none', or make partition files: ddlf data split",
            )
        self._loads = not data.on_disk or (not isinstance(rule, Global) and window <= self._room)
        goes_on = before is not None and before._data is data and before._loads and self._loads
        self._open: dict[int, Arrays] = before._open if before is not None and goes_on else {}
        self.begun, self.wait_s, self._loading = False, 0.0, False
        self.files: list[int] = []
        self._closed: Future[Any] = Future()
        self._thread = ThreadPoolExecutor(1, "read")
        self._source = self._chunks()
        self._ahead: deque[Future[Any]] = deque(self._thread.submit(next, self._source, None) for _ in range(AHEAD))

    def __iter__(self) -> Iterator[Arrays]:
        """Yield the rows of each column, chunk by chunk.

        Raises:
            StreamClosed: The stream was closed meanwhile.
            DatasetError: A file is missing or damaged.
        """
        self.begun = True
        try:
            while True:
                begin = time.perf_counter()
                wait((self._ahead[0], self._closed), return_when=FIRST_COMPLETED)
                self.wait_s += time.perf_counter() - begin
                if self._closed.done():
                    raise StreamClosed
                rows = self._ahead.popleft().result()
                if rows is None:
                    return
                self._ahead.append(self._thread.submit(next, self._source, None))
                yield rows
                del rows
        finally:
            self.close()
            self._ahead.clear()

    def close(self) -> None:
        """Stop reading. A waiting thread is woken at once. Any thread may call this."""
        with contextlib.suppress(InvalidStateError):
            self._closed.set_result(None)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._loading:
            self._data.interrupt()  # otherwise the process could not end until the store answers

    def _chunks(self) -> Iterator[Arrays]:
        remaining = self.samples
        chunk, filled = self._empty(remaining), 0
        for files, rows in self._portion.blocks(self._sizes):
            if self.left_out:
                read = ~np.isin(files, self._skipped)
                files, rows = files[read], rows[read]
            self._open_all(np.unique(files).tolist())
            begin = 0
            while begin < len(rows):
                if self._closed.done():
                    return
                piece = slice(begin, begin + min(len(rows) - begin, self._length(chunk) - filled))
                self._gather(chunk, filled, files[piece], rows[piece])
                filled, begin = filled + piece.stop - begin, piece.stop
                if filled == self._length(chunk):
                    remaining -= filled
                    yield chunk
                    chunk, filled = self._empty(remaining), 0

    def _empty(self, remaining: int) -> Arrays:
        columns, length = self._data.columns.items(), min(self._next, self._chunk, remaining)
        self._next *= 2
        return {name: np.empty((length, *column.shape), column.dtype) for name, column in columns}

    @staticmethod
    def _length(rows: Arrays) -> int:
        return len(next(iter(rows.values())))

    def _open_all(self, numbers: list[int]) -> None:
        """Open these files. If there is room, keep the most recently read other files open."""
        if self._whole:
            numbers = list(range(len(self._sizes)))
        sizes = [file.nbytes for file in self._data.manifest.files]
        free, retained = self._room - sum(sizes[number] for number in numbers), list[int]()
        for number in reversed(self._open):
            if number not in numbers:
                free -= sizes[number]
                if free < 0 or not (self._loads and self._data.on_disk):
                    break
                retained.append(number)
        open_already = [number for number in numbers if number in self._open]
        # Free dropped files before reading the next ones; both together would need twice the memory.
        self._open = {number: self._open[number] for number in (*reversed(retained), *open_already)}
        missing = [number for number in numbers if number not in self._open]
        self._loading = True
        try:
            for number, arrays in self._read(missing, sizes):
                if self._closed.done():
                    return
                self.files.append(number)
                self._open[number] = arrays
                self._check_room(len(numbers), sizes)
        finally:
            self._loading = False

    def _read(self, numbers: list[int], sizes: list[int]) -> Iterator[tuple[int, Arrays]]:
        """Yield the columns of each file, one file after another. Files that go into memory are read a few at a time,
        to hide a store's latency.
        """
        if not self._loads or not self._data.on_disk or self._data.manifest.hosts:
            for number in numbers:
                if not self._closed.done():
                    room = self._room - self._in_memory(sizes)
                    yield number, self._data.load(number) if self._loads else self._data.mapped(number, room)
            return
        at_once = LOAD_BYTES // max((sizes[number] for number in numbers), default=1)
        with ThreadPoolExecutor(min(max(at_once, LOADS), MOST_LOADS), "load") as threads:
            try:
                tasks = [threads.submit(self._load_unless_closed, number) for number in numbers]
                yield from ((number, task.result()) for number, task in zip(numbers, tasks, strict=True))
            finally:
                threads.shutdown(cancel_futures=True)

    def _load_unless_closed(self, number: int) -> Arrays:
        return {} if self._closed.done() else self._data.load(number)

    def _check_room(self, files: int, sizes: list[int]) -> None:
        """Refuse files of a store that fit neither into the cache nor into the memory for data."""
        if self._loads or (need := self._in_memory(sizes)) <= self._room:
            return
        raise ConfigError(
            f"{files} files of {self._data} that are read together have no room in the cache of this machine, and {size(need)} of them "
            f"none in half of data_memory, {size(self._room)}",
            hint=f"make smaller ones: ddlf data repartition {self._data} --file-bytes {max(self._room // files, 1)}; or give more "
            "data_memory, or the cache more (DDLF_CACHE_SIZE)",
        )

    def _in_memory(self, sizes: list[int]) -> int:
        """Return the bytes of open files that are in memory, not mapped from a disk."""
        return sum(sizes[number] for number, arrays in self._open.items() if not any(map(_is_mapped, arrays.values())))

    def _gather(self, chunk: Arrays, filled: int, files: Any, rows: Any) -> None:
        """Copy rows of open files into the arrays ``chunk``, from row ``filled`` on."""
        for number in np.unique(files).tolist():
            where = np.flatnonzero(files == number)
            chosen, where = rows[where], where + filled
            for name, array in self._data.training_rows(number, self._open[number], chosen).items():
                chunk[name][where] = array


def _is_mapped(array: Any) -> bool:
    """Return whether an array is mapped from a disk."""
    return isinstance(array.values if isinstance(array, Ragged) else array, np.memmap)
