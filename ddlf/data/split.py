"""Make partition files of a source, mixed as a whole, in memory that has a bound; what was broken off goes on where it was.

A global shuffle in two passes (Rao 1961, Sandelius 1962). The first throws each sample into one of as many buckets as there will be files, by
chance; the second shuffles each bucket by itself. One behind the other they are cut into files. Every order of all samples is as likely as any other,
as with one shuffle in memory. As many buckets as fit into memory are one heap, on the disk meanwhile if there are several. Chance belongs to buckets,
so the bits do not depend on the memory. Stratified, each label is dealt out to the buckets by itself: none has two more of it than another.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlf.data.manifest import MAX_CLASSES, Manifest, PartitionFile
from ddlf.data.os_errors import explained
from ddlf.data.partition_file import ENDS
from ddlf.data.place import Folder, Place, check_room
from ddlf.data.rows import Rows, Source, row_type
from ddlf.data.unfinished import Heaps, Unfinished
from ddlf.errors import ConfigError, DatasetDamaged, DatasetError
from ddlf.events.record import size
from ddlf.version import __version__

ORDER_BYTES = 24
"""For each sample in memory, beside its values: where it comes from and goes to."""
USUAL_FILE_BYTES = 64 * 10**6
"""Of a partition file: some hundred milliseconds of reading, and eight of them fit into the memory of any worker."""
OTHER = {
    "source": "another source, or of one that has changed",
    "options": "other options",
    "DDLF": "another version of DDLF",
}
"""What is said of what is different in a plan."""

Numbers = npt.NDArray[np.unsignedinteger[Any]]

PIECE = 1024
"""Samples that are taken out of a heap at a time."""
SPLIT = 4
"""What chance is used for; ``algorithms/reading_order.py`` has the other streams."""
NOTED_S = 20.0
"""How much of the first pass is done again at most, when it was broken off."""


def sizes_of(samples: int, row_bytes: int, *, files: int = 0, file_samples: int = 0, file_bytes: int = 0) -> list[int]:
    """Samples of each file: equal but for one.

    Args:
        samples: All of them.
        row_bytes: Bytes of one.
        files: How many files; 0 if something else says it.
        file_samples: At most so many samples in each; 0 if something else says it.
        file_bytes: At most so many bytes of samples in each; ``USUAL_FILE_BYTES`` if nothing says it.

    Raises:
        ConfigError: There would be a file without a sample.
    """
    if files > samples:
        raise ConfigError(f"{samples:,} samples cannot be split into {files:,} files", hint="make fewer files")
    if not files:
        if not file_samples:
            file_samples = (file_bytes or USUAL_FILE_BYTES) // row_bytes
            if not file_samples and file_bytes:
                raise ConfigError(f"a sample has {size(row_bytes)}, which no file of {size(file_bytes)} can hold")
        files = -(-samples // max(file_samples, 1))
    if files >= 10**9:
        raise ConfigError(f"that would be {files:,} files", hint="make them larger")
    return [samples // files + (file < samples % files) for file in range(files)]


def split(
    source: Source,
    place: Place,
    sizes: Sequence[int],
    *,
    after: Manifest | None = None,
    shuffle: bool = True,
    stratify: str = "",
    seed: int = 0,
    memory: int = 10**9,
    state: str = "",
    moved: Callable[[str, int, int], None] = lambda what, done, of: None,
    say: Callable[[str, str], None] = lambda what, text: None,
) -> Manifest:
    """Write a source to a place as a data set.

    Args:
        source: Where the samples come from.
        place: Empty, not there yet, or with what an earlier call left that was broken off.
        sizes: Samples of each file.
        after: What is there, of the same samples, of which this is the next version; None if there is nothing.
        shuffle: Whether they are mixed; else they stay in the source's order.
        stratify: Column of whole numbers of each of which every file is to have its share, as far as that can be.
        seed: Seed of the order, >= 0. The same source, sizes and seed give the same bytes, whatever the memory.
        memory: Bytes to work in.
        state: Another text whenever the source has other samples. What was broken off goes on where it was, if nothing but the memory is different;
            empty leaves nothing behind.
        moved: Is told what is done, and how many samples of how many.
        say: Is told a word and a sentence about what an earlier call left, or what this one leaves.

    Raises:
        ConfigError: The memory is not enough for one file.
        DatasetError: The source or the place cannot be used. What is left of what was made is no data set.
    """
    kind = row_type(source.columns)
    row = kind.itemsize + ORDER_BYTES
    least = 4 * max(sizes) * row
    if memory < least:
        raise ConfigError(
            f"a file of {max(sizes):,} samples needs {size(least)} of memory, but there are {size(memory)}",
            hint=f"give more with --memory, or make files of {max(memory // (4 * row), 1):,} samples at most",
        )
    if stratify:
        column = source.columns.get(stratify)
        if column is None or column.shape or np.dtype(column.dtype).kind not in "biu":
            there = [name for name, each in source.columns.items() if not each.shape and each.dtype[0] in "biu"]
            raise ConfigError(
                f"--stratify {stratify} names no column of labels",
                hint=f"whole numbers are: {', '.join(there) or 'none'}",
            )
    buckets = Buckets(source.samples, len(sizes), memory // 3 // row, seed, stratify)
    at_once = max(memory // 8 // row, 1)
    version = after.version + 1 if after else 1
    asked = (version, list(sizes), shuffle, stratify, seed, kind.descr)
    plan = {"source": state, "options": _hash(str(asked)), "DDLF": __version__} if state else {}
    kept = f"what is finished stays in {place}: the same command goes on with it"
    with place.writing(after=version - 1, plan=plan) as left, left.watched(lambda: say("kept", kept)):
        files = _finished(place, left, source, moved) if left.goes_on else []
        start = files[-1].first + files[-1].samples if files else 0
        spilled = np.dtype([("row", kind), ("bucket", np.uint32)])
        heaps = Heaps(left, buckets.heaps, spilled) if shuffle and len(buckets.heaps) > 1 else None
        _say_how(left, say, files, sizes, heaps, source.samples)
        need = (source.samples - start) * kind.itemsize if isinstance(place, Folder) else max(sizes) * kind.itemsize
        need += source.samples * spilled.itemsize - heaps.nbytes if heaps else 0
        with explained(place, "write to", need=need):
            check_room(left.folder, need)

            def read(first: int) -> Iterator[Rows]:
                pieces = _of_the_source(source.rows(at_once, first), left, placed=after is not None)
                return _told(pieces, source.samples, "reading", moved, first)

            if start == source.samples:
                rows: Iterator[Rows] = iter(())
            elif not shuffle:
                rows = read(start)
            elif heaps is None:
                rows = behind(start, buckets.shuffled(0, *buckets.held(read(0), kind)))
            else:
                if heaps.samples < source.samples:
                    buckets.deal(read(heaps.samples), heaps)
                rows = buckets.taken_up(heaps, start)
            for part in _told(_cut(rows, sizes[len(files) :], kind), source.samples, "writing", moved, start):
                first = files[-1].first + files[-1].samples if files else 0
                files.append(_written(part, place, f"v{version:04}/{len(files):05}.safetensors", first))
                if plan:
                    left.add([(files[-1], place.mark(files[-1].name))])
                if heaps is not None:
                    heaps.remove(first + len(part))
            result = Manifest(source.columns, files, version, tuple(source.classes), after.identity if after else "")
            place.commit(result)
    return result


def _finished(
    place: Place, left: Unfinished, source: Source, moved: Callable[[str, int, int], None]
) -> list[PartitionFile]:
    """Partition files that an earlier call finished, from the first one on, after each was looked at as it is at the place."""

    def is_there(noted: tuple[PartitionFile, str]) -> bool:
        file, mark = noted
        try:
            if not mark or place.mark(file.name) != mark:
                place.check(file, source.columns)
        except DatasetError:
            return False
        return True

    whole: list[tuple[PartitionFile, str]] = []
    noted = left.files()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        try:
            for each, fine in zip(noted, threads.map(is_there, noted), strict=True):
                if not fine:
                    break
                whole.append(each)
                moved("checking", each[0].first + each[0].samples, source.samples)
        finally:
            threads.shutdown(cancel_futures=True)
    left.add(whole, anew=True)
    return [file for file, _ in whole]


def _say_how(
    left: Unfinished,
    say: Callable[[str, str], None],
    files: Sequence[PartitionFile],
    sizes: Sequence[int],
    heaps: Heaps | None,
    samples: int,
) -> None:
    if left.other:
        say(
            "anew",
            f"what an earlier call left is of {' and '.join(OTHER[name] for name in left.other)}, and is removed",
        )
    if left.goes_on:
        dealt = f", {heaps.samples:,} of {samples:,} samples are read" if heaps else ""
        say("goes on", f"{len(files):,} of {len(sizes):,} files are there{dealt}")


def _of_the_source(pieces: Iterator[Rows], left: Unfinished, *, placed: bool) -> Iterator[Rows]:
    """The same pieces. A source that has to be mended is another one then, which nobody can go on with."""
    try:
        yield from pieces
    except Exception as error:
        if not placed or isinstance(error, DatasetDamaged):  # else a store may only be out of reach
            left.forget()
        raise


def _told(
    pieces: Iterable[Rows], samples: int, what: str, moved: Callable[[str, int, int], None], done: int = 0
) -> Iterator[Rows]:
    for rows in pieces:
        done += len(rows)
        moved(what, done, samples)
        yield rows


def _cut(pieces: Iterable[Rows], sizes: Sequence[int], kind: np.dtype[Any]) -> Iterator[Rows]:
    """The same samples in pieces of these sizes. The memory of a piece is used again for the next one."""
    whole, filled, number = np.empty(max(sizes, default=0), kind), 0, 0
    for rows in pieces:
        while len(rows):
            taken = rows[: sizes[number] - filled]
            whole[filled : filled + len(taken)] = taken
            filled, rows = filled + len(taken), rows[len(taken) :]
            if filled == sizes[number]:
                yield whole[:filled]
                filled, number = 0, number + 1


def _written(rows: Rows, place: Place, name: str, first: int) -> PartitionFile:
    """Write a partition file, which is where it should be when this returns."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    arrays = {}
    for column in rows.dtype.names or ():
        values = rows[column]
        if values.dtype.names:
            lengths = values["length"]
            arrays[column + ENDS] = np.cumsum(lengths)
            values = np.concatenate([row[:length] for row, length in zip(values["values"], lengths, strict=True)])
        arrays[column] = np.ascontiguousarray(values)
    with place.new(name) as path:
        path.touch()
        mode = (
            path.stat().st_mode & 0o777
        )  # who may read it is as for other new files; safetensors makes it the owner's
        try:
            save_file(arrays, path)
            path.chmod(mode)
        except SafetensorError as error:
            number = re.search(r"\(os error (\d+)\)", str(error))
            raise OSError(int(number[1]) if number else 0, str(error), str(path)) from error
        with open(path, "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    return PartitionFile(name, len(rows), *found, first)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Buckets:
    """Where each sample goes.

    Args:
        samples: All of them.
        buckets: How many there are.
        room: Samples that a heap may have.
        seed: Seed of the order.
        stratify: Column of labels, of each of which every bucket gets as many but for one; empty for pure chance.
    """

    def __init__(self, samples: int, buckets: int, room: int, seed: int, stratify: str = "") -> None:
        self._samples, self._buckets, self._seed, self._stratify = samples, buckets, seed, stratify
        self._dealers: dict[int, _Dealer] = {}
        each = samples / buckets
        fit = 1
        while fit < buckets and (fit + 1) * each + 6 * ((fit + 1) * each) ** 0.5 <= room:  # 6 standard deviations
            fit += 1
        if samples <= room:
            fit = buckets
        self.heaps = [range(first, min(first + fit, buckets)) for first in range(0, buckets, fit)]

    def _thrown(
        self, pieces: Iterable[Rows], first: int = 0, labels: Iterable[tuple[int, int]] = ()
    ) -> Iterator[tuple[Rows, Numbers]]:
        """Each piece with the bucket of each of its samples.

        Args:
            pieces: Samples in order.
            first: How many were thrown before.
            labels: Each label of these, and how many had it.
        """
        chance = _chance(self._seed, 0)
        # One draw of 64 bits for each sample: the same, however many come at a time.
        chance.bit_generator.advance(first)  # type: ignore[attr-defined]
        self._dealers = {}
        for label, count in labels:
            self._dealer(label).take(count)
        for rows in pieces:
            if self._stratify:
                yield rows, self._dealt_evenly(rows[self._stratify])
            else:
                yield rows, (chance.random(len(rows)) * self._buckets).astype(np.uint32)

    def _dealer(self, label: int) -> _Dealer:
        if label not in self._dealers:
            if len(self._dealers) >= MAX_CLASSES:
                raise ConfigError(f"--stratify {self._stratify}: there are more than {MAX_CLASSES:,} labels")
            self._dealers[label] = _Dealer(self._buckets, _chance(self._seed, 2, label % 2**64))
        return self._dealers[label]

    def _dealt_evenly(self, labels: npt.NDArray[Any]) -> Numbers:
        buckets = np.empty(len(labels), np.uint32)
        values, which = np.unique(labels, return_inverse=True)
        for number, label in enumerate(values.tolist()):
            mine = which == number
            buckets[mine] = self._dealer(int(label)).take(int(mine.sum()))
        return buckets

    def held(self, pieces: Iterable[Rows], kind: np.dtype[Any]) -> tuple[Rows, Numbers]:
        """All samples and their buckets in memory."""
        whole, whose, done = np.empty(self._samples, kind), np.empty(self._samples, np.uint32), 0
        for rows, buckets in self._thrown(pieces):
            whole[done : done + len(rows)], whose[done : done + len(rows)] = rows, buckets
            done += len(rows)
        return whole, whose

    def deal(self, pieces: Iterable[Rows], heaps: Heaps) -> None:
        """Throw the samples that are not there yet on their heaps, which are on a disk."""
        done, noted, fit = heaps.samples, time.monotonic(), len(self.heaps[0])
        for rows, buckets in self._thrown(pieces, done, heaps.labels.items()):
            heap = buckets // fit
            order = np.argsort(heap, kind="stable")
            ends = np.searchsorted(heap[order], np.arange(len(self.heaps) + 1))
            both = np.empty(len(rows), heaps.kind)
            both["row"], both["bucket"] = rows, buckets
            for number in range(len(self.heaps)):
                heaps.throw(number, both[order[ends[number] : ends[number + 1]]])
            done += len(rows)
            if (whole := done == self._samples) or time.monotonic() - noted >= NOTED_S:
                heaps.note(done, {label: each.taken for label, each in self._dealers.items()}, whole=whole)
                noted = time.monotonic()

    def taken_up(self, heaps: Heaps, start: int) -> Iterator[Rows]:
        """The shuffled samples of all heaps behind the first ``start``. A heap is removed when its last one was taken, and the next asked for."""
        begin = 0
        for number in range(len(self.heaps)):
            end = begin + heaps.length(number)
            if end > start:
                both = heaps.read(number)
                yield from behind(start - begin, self.shuffled(number, both["row"], both["bucket"]))
            begin = end

    def shuffled(self, heap: int, rows: Rows, buckets: Numbers) -> Iterator[Rows]:
        """The samples of a heap, those of each bucket by chance; some at a time."""
        order = np.argsort(buckets, kind="stable")
        ends = np.searchsorted(buckets[order], np.arange(self.heaps[heap].start, self.heaps[heap].stop + 1))
        for bucket, start, stop in zip(self.heaps[heap], ends, ends[1:], strict=False):
            _chance(self._seed, 1, bucket).shuffle(order[start:stop])
            for first in range(start, stop, PIECE):
                yield rows[order[first : min(first + PIECE, stop)]]


class _Dealer:
    """Gives the numbers of buckets, each once in an order by chance, then in another one, and so on."""

    def __init__(self, buckets: int, chance: np.random.Generator) -> None:
        self._buckets, self._chance = buckets, chance
        self._left = np.empty(0, np.uint32)
        self.taken = 0

    def take(self, count: int) -> Numbers:
        """The next so many."""
        self.taken += count
        rounds = range(-(-(count - len(self._left)) // self._buckets))
        parts = [self._left, *(self._chance.permutation(self._buckets).astype(np.uint32) for _ in rounds)]
        whole = np.concatenate(parts)
        self._left = whole[count:]
        return whole[:count]


def behind(first: int, pieces: Iterable[Rows]) -> Iterator[Rows]:
    """The pieces without so many of the first rows."""
    for rows in pieces:
        yield rows[max(first, 0) :]
        first -= len(rows)


def _chance(seed: int, *numbers: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed], spawn_key=(SPLIT, *numbers))))
