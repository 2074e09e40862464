"""Make partition files of a source, mixed as a whole, in memory that has a bound.

A global shuffle in two passes (Rao 1961, Sandelius 1962). The first throws each sample into one of as many buckets as there will be files, by
chance; the second shuffles each bucket by itself. One behind the other they are cut into files. Every order of all samples is as likely as any other,
as with one shuffle in memory. As many buckets as fit into memory are one heap, on the disk meanwhile if there are several. Chance belongs to buckets,
so the bits do not depend on the memory. Stratified, each label is dealt out to the buckets by itself: none has two more of it than another.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlf.errors import ConfigError
from ddlf.record import size
from ddlf.storage.explained import explained
from ddlf.storage.files import ENDS
from ddlf.storage.manifest import MAX_CLASSES, Manifest, PartitionFile
from ddlf.storage.place import Place
from ddlf.storage.sources import Rows, Source, row_type

Numbers = npt.NDArray[np.unsignedinteger[Any]]

ORDER_BYTES = 24
"""For each sample in memory, beside its values: where it comes from and goes to."""
USUAL_FILE_BYTES = 64 * 10**6
"""Of a partition file: some hundred milliseconds of reading, and eight of them fit into the memory of any worker."""
PIECE = 1024
"""Samples that are taken out of a heap at a time."""
SPLIT = 4
"""What chance is used for; ``algorithms/reading.py`` has the other streams."""


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
    moved: Callable[[str, int, int], None] = lambda what, done, of: None,
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
        moved: Is told what is done, and how many samples of how many.

    Raises:
        ConfigError: The memory is not enough for one file.
        DatasetError: The source or the place cannot be used. Nothing is left of what was made.
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
    need = source.samples * kind.itemsize * (1 + (shuffle and len(buckets.heaps) > 1))
    version = after.version + 1 if after else 1
    with place.writing(after=version - 1), ExitStack() as stack, explained(place, "write to", need=need):
        scratch = stack.enter_context(place.scratch(need))
        rows = _told(source.rows(at_once), source.samples, "reading", moved)
        if shuffle and len(buckets.heaps) == 1:
            rows = buckets.shuffled(0, *buckets.held(rows, kind))
        elif shuffle:
            rows = buckets.dealt(rows, kind, scratch)
        files: list[PartitionFile] = []
        for part in _told(_cut(rows, sizes, kind), source.samples, "writing", moved):
            first = files[-1].first + files[-1].samples if files else 0
            files.append(_written(part, place, f"v{version:04}/{len(files):05}.safetensors", first))
        result = Manifest(source.columns, files, version, tuple(source.classes), after.identity if after else "")
        stack.close()
        place.commit(result)
    return result


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
        each = samples / buckets
        fit = 1
        while fit < buckets and (fit + 1) * each + 6 * ((fit + 1) * each) ** 0.5 <= room:  # 6 standard deviations
            fit += 1
        if samples <= room:
            fit = buckets
        self.heaps = [range(first, min(first + fit, buckets)) for first in range(0, buckets, fit)]

    def _thrown(self, pieces: Iterable[Rows]) -> Iterator[tuple[Rows, Numbers]]:
        """Each piece with the bucket of each of its samples."""
        chance = _chance(self._seed, 0)
        dealers: dict[Any, _Dealer] = {}
        for rows in pieces:
            if self._stratify:
                yield rows, self._dealt_evenly(rows[self._stratify], dealers)
                continue
            # One draw of 64 bits for each sample: the same, however many come at a time.
            yield rows, (chance.random(len(rows)) * self._buckets).astype(np.uint32)

    def _dealt_evenly(self, labels: npt.NDArray[Any], dealers: dict[Any, _Dealer]) -> Numbers:
        buckets = np.empty(len(labels), np.uint32)
        values, which = np.unique(labels, return_inverse=True)
        for number, label in enumerate(values.tolist()):
            if label not in dealers:
                if len(dealers) >= MAX_CLASSES:
                    raise ConfigError(f"--stratify {self._stratify}: there are more than {MAX_CLASSES:,} labels")
                dealers[label] = _Dealer(self._buckets, _chance(self._seed, 2, int(label) % 2**64))
            mine = which == number
            buckets[mine] = dealers[label].take(int(mine.sum()))
        return buckets

    def held(self, pieces: Iterable[Rows], kind: np.dtype[Any]) -> tuple[Rows, Numbers]:
        """All samples and their buckets in memory."""
        whole, whose, done = np.empty(self._samples, kind), np.empty(self._samples, np.uint32), 0
        for rows, buckets in self._thrown(pieces):
            whole[done : done + len(rows)], whose[done : done + len(rows)] = rows, buckets
            done += len(rows)
        return whole, whose

    def dealt(self, pieces: Iterable[Rows], kind: np.dtype[Any], scratch: Path) -> Iterator[Rows]:
        """The shuffled samples, by way of a file for each heap."""
        spilled = np.dtype([("row", kind), ("bucket", np.uint32)])
        fit = len(self.heaps[0])
        for rows, buckets in self._thrown(pieces):
            heap = buckets // fit
            order = np.argsort(heap, kind="stable")
            ends = np.searchsorted(heap[order], np.arange(len(self.heaps) + 1))
            both = np.empty(len(rows), spilled)
            both["row"], both["bucket"] = rows, buckets
            for number in range(len(self.heaps)):
                with open(scratch / str(number), "ab") as file:
                    file.write(both[order[ends[number] : ends[number + 1]]].data)
        for number in range(len(self.heaps)):
            both = np.fromfile(scratch / str(number), spilled)
            (scratch / str(number)).unlink()
            yield from self.shuffled(number, both["row"], both["bucket"])

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

    def take(self, count: int) -> Numbers:
        """The next so many."""
        rounds = range(-(-(count - len(self._left)) // self._buckets))
        parts = [self._left, *(self._chance.permutation(self._buckets).astype(np.uint32) for _ in rounds)]
        whole = np.concatenate(parts)
        self._left = whole[count:]
        return whole[:count]


def _told(pieces: Iterable[Rows], samples: int, what: str, moved: Callable[[str, int, int], None]) -> Iterator[Rows]:
    done = 0
    for rows in pieces:
        done += len(rows)
        moved(what, done, samples)
        yield rows


def _cut(pieces: Iterable[Rows], sizes: Sequence[int], kind: np.dtype[Any]) -> Iterator[Rows]:
    """The same samples in pieces of these sizes. The memory of a piece is used again for the next one."""
    whole, filled, number = np.empty(max(sizes), kind), 0, 0
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


def _chance(seed: int, *numbers: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed], spawn_key=(SPLIT, *numbers))))
