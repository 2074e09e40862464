"""Makes partition files from a source, shuffled as a whole, in bounded memory. An interrupted split can continue.

The global shuffle has two passes (Rao 1961, Sandelius 1962). The first pass throws each sample into a random bucket;
there are as many buckets as files. The second pass shuffles each bucket. The concatenated buckets are cut into files.
Every order of all samples is equally likely, like with one shuffle in memory.

A heap is a group of buckets that fits into memory. If there are several heaps, they wait on the disk. Random numbers
belong to buckets, so the bits do not depend on the memory. A stratified split deals each label evenly to the buckets:
the counts of a label in two buckets differ by at most 1.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlf.data.location import HEAPS, DataLocation, Folder, Unfinished, check_room, read_note, write_note
from ddlf.data.manifest import MAX_CLASSES, Manifest, PartitionFile
from ddlf.data.os_errors import explained
from ddlf.data.partition_file import ENDS
from ddlf.data.rows import Rows, SampleSource, row_type, set_cell
from ddlf.errors import ConfigError, DatasetDamaged, DatasetError
from ddlf.events.record import size
from ddlf.version import __version__
from ddlf.worker.machine import cores

ORDER_BYTES = 24
"""Bytes in memory for each sample in addition to its values: its origin and its destination."""
USUAL_FILE_BYTES = 64 * 10**6
"""Default size of a partition file. It is read in some 100 ms, and eight fit into the memory of any worker."""
OTHER = {
    "source": "another source, or a changed one",
    "options": "other options",
    "DDLF": "another version of DDLF",
}
"""Texts about the differences between two plans."""

Numbers = npt.NDArray[np.unsignedinteger[Any]]

PIECE = 1024
"""Number of samples that are taken from a heap at a time."""
SPLIT = 4
"""Key of this module's random streams; ``algorithms/reading_order.py`` has the others."""
NOTED_S = 20.0
"""Maximum seconds of the first pass that are repeated after an interruption."""


def sizes_of(samples: int, row_bytes: int, *, files: int = 0, file_samples: int = 0, file_bytes: int = 0) -> list[int]:
    """Return the number of samples of each file. The numbers differ by at most 1.

    Args:
        samples: Total number of samples.
        row_bytes: Bytes of a sample.
        files: Number of files; 0 if another argument decides.
        file_samples: Maximum number of samples in a file; 0 if another argument decides.
        file_bytes: Maximum bytes of the samples in a file; ``USUAL_FILE_BYTES`` if no argument decides.

    Raises:
        ConfigError: A file would have no samples, or the number of files would be too large.
    """
    if files > samples:
        raise ConfigError(f"{samples:,} samples cannot be split into {files:,} files", hint="make fewer files")
    if not files:
        if not file_samples:
            file_samples = (file_bytes or USUAL_FILE_BYTES) // row_bytes
            if not file_samples and file_bytes:
                raise ConfigError(
                    f"a sample has {size(row_bytes)}, which does not fit into a file of {size(file_bytes)}"
                )
        files = -(-samples // max(file_samples, 1))
    if files >= 10**9:
        raise ConfigError(f"that would be {files:,} files", hint="make the files larger")
    return [samples // files + (file < samples % files) for file in range(files)]


def split(
    source: SampleSource,
    location: DataLocation,
    sizes: Sequence[int],
    *,
    after: Manifest | None = None,
    shuffle: bool = True,
    stratify: str = "",
    seed: int = 0,
    memory: int = 10**9,
    state: str = "",
    moved: Callable[[str, int, int], None] = lambda action, done, of: None,
    say: Callable[[str, str], None] = lambda label, text: None,
) -> Manifest:
    """Write the samples of a source to a location, a folder or a URL, as a data set of partition files.

    Args:
        source: Source of the samples.
        location: An empty or new location, or one with the work of an interrupted call.
        sizes: Number of samples of each file.
        after: The present manifest, if this is the next version of the same samples; None for a new data set.
        shuffle: Whether to shuffle the samples. Otherwise they keep the source's order.
        stratify: Column of integers. Every file gets its share of each value, as far as possible.
        seed: Seed of the order, >= 0. The same source, sizes and seed give the same bytes, whatever the memory.
        memory: Bytes of memory to use.
        state: A text that changes with the source's samples. An interrupted call can then be continued if only the
            memory is different. Empty leaves nothing behind.
        moved: Receives the present step, the finished samples and all samples.
        say: Receives a word and a sentence about unfinished work of an earlier call, or of this call.

    Raises:
        ConfigError: The memory is too small for one file.
        DatasetError: The source or the location cannot be used. An interrupted split leaves no data set behind.
    """
    kind = row_type(source.columns)
    row = kind.itemsize + ORDER_BYTES
    least = 4 * max(sizes) * row
    if memory < least:
        raise ConfigError(
            f"a file of {max(sizes):,} samples needs {size(least)} of memory, but there are {size(memory)}",
            hint=f"allow more with --memory, or make files of at most {max(memory // (4 * row), 1):,} samples",
        )
    if stratify:
        column = source.columns.get(stratify)
        if column is None or column.shape or np.dtype(column.dtype).kind not in "biu":
            labels = [
                name
                for name, candidate in source.columns.items()
                if not candidate.shape and candidate.dtype[0] in "biu"
            ]
            raise ConfigError(
                f"--stratify {stratify} is not a column of labels",
                hint=f"whole numbers are: {', '.join(labels) or 'none'}",
            )
    buckets = Buckets(source.samples, len(sizes), memory // 3 // row, seed, stratify)
    at_once = max(memory // 8 // row, 1)
    version = after.version + 1 if after else 1
    arguments = (version, list(sizes), shuffle, stratify, seed, kind.descr)
    plan = {"source": state, "options": _hash(str(arguments)), "DDLF": __version__} if state else {}
    advice = f"finished files stay in {location}; run the same command to continue"
    with location.writing(after=version - 1, plan=plan) as unfinished, unfinished.watched(lambda: say("kept", advice)):
        files = _finished(location, unfinished, source, moved) if unfinished.goes_on else []
        start = files[-1].first + files[-1].samples if files else 0
        spilled = np.dtype([("row", kind), ("bucket", np.uint32)])
        heaps = Heaps(unfinished, buckets.heaps, spilled) if shuffle and len(buckets.heaps) > 1 else None
        _say_how(unfinished, say, files, sizes, heaps, source.samples)
        need = (source.samples - start) * kind.itemsize if isinstance(location, Folder) else max(sizes) * kind.itemsize
        need += source.samples * spilled.itemsize - heaps.nbytes if heaps else 0
        with explained(location, "write to", need=need):
            check_room(unfinished.folder, need)

            def read(first: int) -> Iterator[Rows]:
                pieces = _pieces_of_source(source.rows(at_once, first), unfinished, placed=after is not None)
                return _reported(pieces, source.samples, "reading", moved, first)

            if start == source.samples:
                rows: Iterator[Rows] = iter(())
            elif not shuffle:
                rows = read(start)
            elif heaps is None:
                rows = without_first(start, buckets.shuffled(0, *buckets.read_all(read(0), kind)))
            else:
                if heaps.samples < source.samples:
                    buckets.deal(read(heaps.samples), heaps)
                rows = buckets.taken_up(heaps, start)
            for part in _reported(_cut(rows, sizes[len(files) :], kind), source.samples, "writing", moved, start):
                first = files[-1].first + files[-1].samples if files else 0
                files.append(_written(part, location, f"v{version:04}/{len(files):05}.safetensors", first))
                if plan:
                    unfinished.add([(files[-1], location.mark(files[-1].name))])
                if heaps is not None:
                    heaps.remove(first + len(part))
            result = Manifest(source.columns, files, version, tuple(source.classes), after.identity if after else "")
            location.commit(result)
    return result


def _finished(
    location: DataLocation, unfinished: Unfinished, source: SampleSource, moved: Callable[[str, int, int], None]
) -> list[PartitionFile]:
    """Return the partition files that an interrupted earlier call has finished, in order, after checking each one at
    the location.
    """

    def is_there(noted: tuple[PartitionFile, str]) -> bool:
        file, mark = noted
        try:
            if not mark or location.mark(file.name) != mark:
                location.check(file, source.columns)
        except DatasetError:
            return False
        return True

    intact: list[tuple[PartitionFile, str]] = []
    noted = unfinished.files()
    with ThreadPoolExecutor(cores()) as threads:
        try:
            for entry, fine in zip(noted, threads.map(is_there, noted), strict=True):
                if not fine:
                    break
                intact.append(entry)
                moved("checking", entry[0].first + entry[0].samples, source.samples)
        finally:
            threads.shutdown(cancel_futures=True)
    unfinished.add(intact, anew=True)
    return [file for file, _ in intact]


def _say_how(
    unfinished: Unfinished,
    say: Callable[[str, str], None],
    files: Sequence[PartitionFile],
    sizes: Sequence[int],
    heaps: Heaps | None,
    samples: int,
) -> None:
    if unfinished.other:
        say(
            "anew",
            f"the unfinished data set of an earlier call has {' and '.join(OTHER[name] for name in unfinished.other)}, and is removed",
        )
    if unfinished.goes_on:
        dealt = f", {heaps.samples:,} of {samples:,} samples are read" if heaps else ""
        say("continues", f"{len(files):,} of {len(sizes):,} files are finished{dealt}")


def _pieces_of_source(pieces: Iterator[Rows], unfinished: Unfinished, *, placed: bool) -> Iterator[Rows]:
    """Pass on the pieces of a source. If reading fails because the source is damaged, remove the unfinished work,
    because the repaired source will differ.
    """
    try:
        yield from pieces
    except Exception as error:
        if not placed or isinstance(error, DatasetDamaged):  # in other cases a store may only be unreachable
            unfinished.forget()
        raise


def _reported(
    pieces: Iterable[Rows], samples: int, action: str, moved: Callable[[str, int, int], None], done: int = 0
) -> Iterator[Rows]:
    for rows in pieces:
        done += len(rows)
        moved(action, done, samples)
        yield rows


def _cut(pieces: Iterable[Rows], sizes: Sequence[int], kind: np.dtype[Any]) -> Iterator[Rows]:
    """Cut the samples into pieces of these sizes, one for each file. All pieces share one block of memory."""
    buffer, filled, number = np.empty(max(sizes, default=0), kind), 0, 0
    for rows in pieces:
        while len(rows):
            part = rows[: sizes[number] - filled]
            buffer[filled : filled + len(part)] = part
            filled, rows = filled + len(part), rows[len(part) :]
            if filled == sizes[number]:
                yield buffer[:filled]
                filled, number = 0, number + 1


def _written(rows: Rows, location: DataLocation, name: str, first: int) -> PartitionFile:
    """Write a partition file. It is durable at the location when this function returns."""
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
    with location.new(name) as path:
        path.touch()
        mode = path.stat().st_mode & 0o777  # the default mode of new files; safetensors would restrict it to the owner
        try:
            save_file(arrays, path)
            path.chmod(mode)
        except SafetensorError as error:
            number = re.search(r"\(os error (\d+)\)", str(error))
            raise OSError(int(number[1]) if number else 0, str(error), str(path)) from error
        with open(path, "rb", buffering=0) as file:
            size_and_hash = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    return PartitionFile(name, len(rows), *size_and_hash, first)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Buckets:
    """Decides randomly into which bucket each sample goes, and shuffles buckets. Together, this shuffles all samples.

    Args:
        samples: Total number of samples.
        buckets: Number of buckets.
        room: Maximum number of samples in a heap.
        seed: Seed of the order.
        stratify: Column of labels. For each label, the numbers of its samples in two buckets differ by at most 1. Empty
            for a purely random choice.
    """

    def __init__(self, samples: int, buckets: int, room: int, seed: int, stratify: str = "") -> None:
        self._samples, self._buckets, self._seed, self._stratify = samples, buckets, seed, stratify
        self._dealers: dict[int, _Dealer] = {}
        expected = samples / buckets
        fit = 1
        # The room is for the expected size plus 6 standard deviations.
        while fit < buckets and (fit + 1) * expected + 6 * ((fit + 1) * expected) ** 0.5 <= room:
            fit += 1
        if samples <= room:
            fit = buckets
        self.heaps = [range(first, min(first + fit, buckets)) for first in range(0, buckets, fit)]

    def _thrown(
        self, pieces: Iterable[Rows], first: int = 0, labels: Iterable[tuple[int, int]] = ()
    ) -> Iterator[tuple[Rows, Numbers]]:
        """Yield each piece of samples with the number of each sample's bucket.

        Args:
            pieces: Samples in order.
            first: Number of samples that were thrown before.
            labels: Each label of these earlier samples, with its count.
        """
        chance = _chance(self._seed, 0)
        # Each sample draws 64 bits, so the result does not depend on the sizes of pieces.
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
        values, label_numbers = np.unique(labels, return_inverse=True)
        for number, label in enumerate(values.tolist()):
            has_label = label_numbers == number
            buckets[has_label] = self._dealer(int(label)).take(int(has_label.sum()))
        return buckets

    def read_all(self, pieces: Iterable[Rows], kind: np.dtype[Any]) -> tuple[Rows, Numbers]:
        """Read all samples into memory, and return them with the number of each sample's bucket."""
        samples, buckets_of, done = np.empty(self._samples, kind), np.empty(self._samples, np.uint32), 0
        for rows, buckets in self._thrown(pieces):
            samples[done : done + len(rows)], buckets_of[done : done + len(rows)] = rows, buckets
            done += len(rows)
        return samples, buckets_of

    def deal(self, pieces: Iterable[Rows], heaps: Heaps) -> None:
        """Append the remaining samples to their heaps, which are files on a disk."""
        done, noted, fit = heaps.samples, time.monotonic(), len(self.heaps[0])
        for rows, buckets in self._thrown(pieces, done, heaps.labels.items()):
            heap = buckets // fit
            order = np.argsort(heap, kind="stable")
            ends = np.searchsorted(heap[order], np.arange(len(self.heaps) + 1))
            spilled = np.empty(len(rows), heaps.kind)
            spilled["row"], spilled["bucket"] = rows, buckets
            for number in range(len(self.heaps)):
                heaps.throw(number, spilled[order[ends[number] : ends[number + 1]]])
            done += len(rows)
            if (whole := done == self._samples) or time.monotonic() - noted >= NOTED_S:
                heaps.note(done, {label: dealer.dealt for label, dealer in self._dealers.items()}, whole=whole)
                noted = time.monotonic()

    def taken_up(self, heaps: Heaps, start: int) -> Iterator[Rows]:
        """Yield the shuffled samples of all heaps, from number ``start`` on."""
        begin = 0
        for number in range(len(self.heaps)):
            end = begin + heaps.length(number)
            if end > start:
                spilled = heaps.read(number)
                yield from without_first(start - begin, self.shuffled(number, spilled["row"], spilled["bucket"]))
            begin = end

    def shuffled(self, heap: int, rows: Rows, buckets: Numbers) -> Iterator[Rows]:
        """Yield the samples of a heap, bucket by bucket, each in random order, some at a time."""
        order = np.argsort(buckets, kind="stable")
        ends = np.searchsorted(buckets[order], np.arange(self.heaps[heap].start, self.heaps[heap].stop + 1))
        for bucket, start, stop in zip(self.heaps[heap], ends, ends[1:], strict=False):
            _chance(self._seed, 1, bucket).shuffle(order[start:stop])
            for first in range(start, stop, PIECE):
                yield rows[order[first : min(first + PIECE, stop)]]


class _Dealer:
    """Deals the numbers of buckets like cards, for a stratified split: each number once in random order, then each
    again in another order, and so on.
    """

    def __init__(self, buckets: int, chance: np.random.Generator) -> None:
        self._buckets, self._chance = buckets, chance
        self._left = np.empty(0, np.uint32)
        self.dealt = 0

    def take(self, count: int) -> Numbers:
        """Return the next ``count`` numbers of buckets."""
        self.dealt += count
        rounds = range(-(-(count - len(self._left)) // self._buckets))
        parts = [self._left, *(self._chance.permutation(self._buckets).astype(np.uint32) for _ in rounds)]
        numbers = np.concatenate(parts)
        self._left = numbers[count:]
        return numbers[:count]


def without_first(first: int, pieces: Iterable[Rows]) -> Iterator[Rows]:
    """Yield pieces of samples without the first ``first`` samples, which an earlier call has already handled."""
    for rows in pieces:
        yield rows[max(first, 0) :]
        first -= len(rows)


def _chance(seed: int, *numbers: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed], spawn_key=(SPLIT, *numbers))))


class Heaps:
    """Samples that wait on a disk to be shuffled. Each heap, a group of buckets that fits into memory, has a file.

    Files of an earlier call are used again if they have the noted hashes.

    Args:
        unfinished: The unfinished data set, with the folder of the heaps.
        buckets: Buckets of each heap.
        kind: Type of a sample with its bucket.

    Attributes:
        kind: Type of a sample with its bucket.
        samples: Number of samples that are durable on the disk.
        labels: Count of each label among them, for a stratified split.
    """

    def __init__(self, unfinished: Unfinished, buckets: Sequence[range], kind: np.dtype[Any]) -> None:
        self._folder, self.kind = unfinished.folder, kind
        count, self._buckets_per_heap = len(buckets), len(buckets[0])
        self.samples, self.labels = 0, dict[int, int]()
        self._lengths, self._hashes = [0] * count, [hashlib.sha256() for _ in range(count)]
        self._noted = [""] * count
        noted: Any = unfinished.goes_on and read_note(unfinished.folder / HEAPS)
        same = noted and (noted["each"], len(noted["lengths"])) == (self._buckets_per_heap, count)
        if not same or not self._take_over(noted):
            (unfinished.folder / HEAPS).unlink(missing_ok=True)
            for path in unfinished.folder.glob("heap-*"):
                path.unlink()

    def _take_over(self, noted: dict[str, Any]) -> bool:
        lengths, hashes = noted["lengths"], noted["hashes"]
        # After a complete pass some heaps may have been removed. The others are checked when they are read.
        if not noted["whole"]:
            digests = [hashlib.sha256() for _ in lengths]
            for heap, length in enumerate(lengths):
                with contextlib.suppress(FileNotFoundError), open(self._path(heap), "r+b") as file:
                    while length > 0 and (data := file.read(min(length, 2**20))):
                        digests[heap].update(data)
                        length -= len(data)
                    file.truncate(lengths[heap])
            if [digest.hexdigest() for digest in digests] != hashes:
                return False
            self._hashes = digests
        self._lengths, self._noted = lengths, hashes
        self.samples, self.labels = noted["samples"], dict(noted["labels"])
        return True

    @property
    def nbytes(self) -> int:
        """The bytes of all samples in the files of the heaps."""
        return sum(self._lengths)

    def throw(self, heap: int, rows: Rows) -> None:
        """Append samples to the file of a heap."""
        with open(self._path(heap), "ab") as file:
            file.write(rows.data)
        self._hashes[heap].update(rows.data)
        self._lengths[heap] += rows.nbytes

    def note(self, samples: int, labels: Mapping[int, int], *, whole: bool) -> None:
        """Make all samples on the heaps durable, and write a note about them.

        Args:
            samples: Number of these samples.
            labels: Count of each label among them.
            whole: Whether these are all samples of the source.
        """
        for heap in range(len(self._lengths)):
            with contextlib.suppress(FileNotFoundError), open(self._path(heap), "rb") as file:
                os.fsync(file.fileno())
        self._noted = [digest.hexdigest() for digest in self._hashes]
        self.samples, self.labels = samples, dict(labels)
        facts = {"samples": samples, "whole": whole, "each": self._buckets_per_heap, "labels": list(labels.items())}
        write_note(self._folder / HEAPS, facts | {"lengths": self._lengths, "hashes": self._noted})

    def length(self, heap: int) -> int:
        """Return the number of samples in the file of a heap."""
        return self._lengths[heap] // self.kind.itemsize

    def read(self, heap: int) -> Rows:
        """Read all samples of a heap, a group of buckets, from its file.

        Raises:
            DatasetDamaged: The file differs from the thrown samples.
        """
        path = self._path(heap)
        rows: Rows = np.fromfile(path, self.kind) if path.exists() else np.empty(0, self.kind)
        if hashlib.sha256(rows.data).hexdigest() != self._noted[heap]:
            (self._folder / HEAPS).unlink()
            raise DatasetDamaged(
                f"{path}, which has samples of an unfinished data set, is damaged", hint="run the command again"
            )
        return rows

    def remove(self, samples: int) -> None:
        """Remove the files of all heaps that end within the first ``samples`` samples."""
        for heap, end in enumerate(np.cumsum(self._lengths) // self.kind.itemsize):
            if end <= samples:
                self._path(heap).unlink(missing_ok=True)

    def _path(self, heap: int) -> Path:
        return self._folder / f"heap-{heap}"


class PartitionedSource:
    """The samples of an existing data set as a source, to write them again in files of other sizes. They come in the
    order of their ids.

    Args:
        location: Location of the data set.

    Raises:
        DatasetError: There is no data set.
    """

    def __init__(self, location: DataLocation) -> None:
        self._location = location
        self.manifest = location.manifest()
        self.columns = dict(self.manifest.columns)
        self.samples = self.manifest.samples
        self.classes: Sequence[str] = self.manifest.classes

    def rows(self, at_once: int, first: int = 0) -> Iterator[Rows]:
        """Yield the samples in order, from number ``first``, in pieces of at most ``at_once``."""
        for file in self.manifest.files:
            if file.first + file.samples <= first:
                continue
            arrays = self._location.mapped(file, self.columns)
            for start in range(max(first - file.first, 0), file.samples, at_once):
                rows = np.empty(min(at_once, file.samples - start), row_type(self.columns))
                for name, array in arrays.items():
                    if not self.columns[name].ragged:
                        rows[name] = array[start : start + at_once]
                        continue
                    for number in range(len(rows)):
                        set_cell(rows, name, number, array[start + number])
                yield rows


def repartition(
    location: DataLocation,
    source: PartitionedSource,
    sizes: Sequence[int],
    *,
    memory: int = 10**9,
    moved: Callable[[str, int, int], None] = lambda action, done, of: None,
    say: Callable[[str, str], None] = lambda label, text: None,
) -> Manifest:
    """Write the samples of a data set into files of other sizes, in the order of their ids, as its next version.

    Readers of the previous version are not disturbed: its files stay until the next version is made, or until
    ``DataLocation.retire`` is called.

    Args:
        location: Location of the data set.
        source: The data set at this location, as a source.
        sizes: Number of samples of each file.
        memory: Bytes of memory to use.
        moved: Receives the present step, the finished samples and all samples.
        say: Receives a word and a sentence about unfinished work of an earlier call, or of this call.

    Raises:
        ConfigError: The memory is too small for one file, or the files already have these sizes.
        DatasetError: A file is damaged, or there is another writer. In this case the present version stays.
    """
    if list(sizes) == source.manifest.sizes.tolist():
        raise ConfigError(f"{location} has {len(sizes):,} files of these sizes already", hint="name other sizes")
    previous, state = source.manifest, source.manifest.content
    return split(
        source, location, sizes, shuffle=False, memory=memory, state=state, moved=moved, say=say, after=previous
    )
