"""The journal of a weight ledger: entries and sets in files that only grow. Runs on the server.

An entry is on the disk before anything that follows from it is sent. Entries that come together share one sync.

Layout of a record, little-endian::

    u32  "DPJ1", or "DPJ+" if the record was written together with the one before it
    u32  CRC-32 of everything after this field
    u32  length of the JSON text
    u32  0
    u64  length of the set, or 0
    ...  JSON text, padded with spaces to a multiple of 8
    ...  the set, as ``sets.py`` describes it

Files, in the folder of the run:

| file | content |
|---|---|
| ``journal-000001`` and later | records; the first is a snapshot of the ledger, so that older files are not needed |
| ``history-000001.jsonl`` | the entries of a journal file that was deleted because no set in it is needed |

A power cut may leave incomplete records at the end of the newest file. Nobody has an answer that followed from them, so
``open_journal`` removes them. Any other damage is an error: a record with "DPJ1" after it was written when everything
before was on the disk.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from ddlf.peers.entries import WITH_SET, Entry, entry_from_data, entry_to_data
from ddlf.training.checkpoints.durable import damaged, explained, replace, sync, write_new

FIRST, NEXT = b"DPJ1", b"DPJ+"
"""The beginning of the first record of a write, and of the others."""
MAGICS = tuple(int.from_bytes(magic, "little") for magic in (FIRST, NEXT))
PREFIX = struct.Struct("<IIIIQ")
MOST_JSON_BYTES = 64 * 2**20
LEAST_FILE_BYTES = 32 * 2**20
SETS_IN_FILE = 32
"""A file is followed by the next one when it has this number of sets, and the least number of bytes."""
GROWTH = 4
"""Sets that are still needed are copied into the newest file when the files have this many times their bytes."""
MOST_PARTS = 1024
"""Most parts in one call of the system: ``IOV_MAX`` of Linux and of macOS."""
FILE = re.compile(r"journal-(\d{6})")
SNAPSHOT, KEPT = "Snapshot", "Kept"
"""Kinds of records besides entries: the state of the ledger, and a set from an older file."""
NO_ENTRIES = tuple(f'{{"kind":"{kind}"'.encode() for kind in (SNAPSHOT, KEPT))
"""The beginnings of their texts."""


class Extent(NamedTuple):
    """The place of a set: number of the file, offset and length in bytes."""

    file: int
    offset: int
    length: int


@dataclass(kw_only=True)
class Content:
    """The content of the files of a journal.

    Attributes:
        snapshot: The state of the ledger at the beginning of the newest complete file; None in an empty folder.
        entries: The entries since then.
        extents: Where each set is.
    """

    snapshot: dict[str, Any] | None = None
    entries: list[Entry] = field(default_factory=list)
    extents: dict[int, Extent] = field(default_factory=dict)


class Journal:
    """The files of a journal, opened to write. One thread at a time uses it.

    Args:
        folder: The folder of the run.
        number: Number of the newest file; 0 if there is none.
        size: Its size in bytes.
        extents: Where each set is.
    """

    def __init__(self, folder: Path, number: int, size: int, extents: Mapping[int, Extent]) -> None:
        self.folder = folder
        self.syncs = 0
        self._number = number
        self._size = size
        self._extents = dict(extents)
        self._sets = sum(extent.file == number for extent in extents.values())
        self._unused: list[int] = []
        self._file = -1
        if number:
            self._file = os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file. Safe to call again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def append(self, entries: Sequence[tuple[Entry, bytes]], heads: Sequence[bytes] = ()) -> None:
        """Write entries, each with the bytes of its set or without bytes. After the return, they survive a power cut.

        Args:
            entries: The entries.
            heads: Their heads, as far as ``head_of`` was called already; empty bytes for the others.

        Raises:
            CheckpointError: They could not be written, for example because the disk is full.

        On failure:
            None of them is in the journal.
        """
        parts, at = list[bytes](), self._size
        extents = {}
        for (entry, data), prepared in zip(entries, heads or [b""] * len(entries), strict=True):
            head = prepared or head_of(entry, data)
            head = _as_next(head) if parts else head
            if isinstance(entry, WITH_SET):
                extents[entry.set] = Extent(self._number, at + len(head), len(data))
            parts += (head, data)
            at += len(head) + len(data)
        self._write(parts, at)
        self._extents |= extents
        self._sets += len(extents)

    @property
    def is_long(self) -> bool:
        """Whether ``begin_file`` should be called."""
        return self._size >= LEAST_FILE_BYTES and self._sets >= SETS_IN_FILE

    def begin_file(self, state: Mapping[str, Any], needed: Mapping[int, bytes]) -> None:
        """Begin a new file with a snapshot. ``archive`` may then delete older files without a needed set.

        Args:
            state: The state of the ledger after all entries of the journal.
            needed: The bytes of all sets that are needed.

        Raises:
            CheckpointError: The disk refused.

        On failure:
            The journal continues in the old file.
        """
        number = self._number + 1
        parts, extents = list[bytes](), {}
        parts.append(_head({"kind": SNAPSHOT, "state": state}, b""))
        at = len(parts[0])
        for set, data in self._to_copy(needed).items():
            head = _as_next(_head({"kind": KEPT, "set": set}, data))
            extents[set] = Extent(number, at + len(head), len(data))
            parts += (head, data)
            at += len(head) + len(data)
        path = self._path(number)
        with explained(self.folder, "write the journal in", need=at):
            try:
                write_new(path, *parts)
                sync(self.folder)
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            self.close()
            self._file, self._number, self._size = file, number, at
            self._extents = {set: extent for set, extent in self._extents.items() if set in needed} | extents
            self._sets = len(extents)
            used = {extent.file for extent in self._extents.values()} | {number}
            self._unused = [old for old in _numbers(self.folder) if old not in used]

    def archive(self) -> None:
        """Delete files without a needed set, but keep their entries as text. Another thread may append meanwhile.

        Raises:
            CheckpointError: The disk refused. The next call tries again.
        """
        with explained(self.folder, "write the history in"):
            while self._unused:
                _to_history(self.folder, self._unused[0])
                self._unused.pop(0)

    def read(self, set: int) -> bytes:
        """Return the bytes of a set."""
        extent = self._extents[set]
        with open(self._path(extent.file), "rb") as file:
            file.seek(extent.offset)
            return file.read(extent.length)

    def _to_copy(self, needed: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the needed sets of old files, if these files have become too large for their needed sets."""
        sizes = {number: self._path(number).stat().st_size for number in _numbers(self.folder)}
        needed_bytes = sum(map(len, needed.values()))
        excess = sum(sizes.values()) - GROWTH * needed_bytes - GROWTH * LEAST_FILE_BYTES
        result: dict[int, bytes] = {}
        for number, size in sizes.items():
            if excess <= 0:
                break
            result |= {set: data for set, data in needed.items() if self._extents[set].file == number}
            excess -= size
        return result

    def _write(self, parts: Sequence[bytes], size: int) -> None:
        with explained(self.folder, "write the journal in", need=size - self._size):
            try:
                _write_at(self._file, parts, self._size)
                _sync_data(self._file)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._size)
                raise
        self._size = size
        self.syncs += 1

    def _path(self, number: int) -> Path:
        return self.folder / f"journal-{number:06d}"


def open_journal(folder: Path) -> tuple[Journal, Content]:
    """Open the journal in a folder, which may be empty. Remove an incomplete end, which a power cut has left.

    Raises:
        CheckpointCorrupt: The files are damaged in another way.
    """
    content, size, number = Content(), 0, 0
    numbers = _numbers(folder)
    for number in numbers:
        path = folder / f"journal-{number:06d}"
        is_last = number == numbers[-1]
        size = 0
        for data, extent, end in _records(path, number):
            if size == 0 and data["kind"] != SNAPSHOT:
                raise damaged(path, "a snapshot at its beginning", str(data["kind"]))
            size = end
            if data["kind"] == SNAPSHOT:
                content.snapshot, content.entries = data["state"], []
            elif data["kind"] == KEPT:
                content.extents[data["set"]] = extent
            else:
                try:
                    entry = entry_from_data(data)
                except ValueError as error:
                    raise damaged(path, "entries of this version", str(error)) from error
                content.entries.append(entry)
                if isinstance(entry, WITH_SET):
                    content.extents[entry.set] = extent
        if size < path.stat().st_size:
            if not is_last or _was_continued(path, size):
                raise damaged(path, f"{path.stat().st_size:,} bytes of records", f"damage at byte {size:,}")
            with explained(folder, "repair the journal in"):
                if size == 0:  # the snapshot itself is incomplete: the file before it has everything
                    path.unlink()
                    sync(folder)
                    return open_journal(folder)
                os.truncate(path, size)
                sync(path)
    if numbers and not size:
        (folder / f"journal-{number:06d}").unlink()
        return open_journal(folder)
    return Journal(folder, number, size, content.extents), content


def history(folder: Path) -> Iterator[Entry]:
    """Yield all entries of a run from its beginning: first the entries of deleted files, then the entries of the journal."""
    files = {int(path.name[8:14]): path for path in folder.glob("history-*.jsonl")}
    files |= {number: folder / f"journal-{number:06d}" for number in _numbers(folder)}
    for number, path in sorted(files.items()):
        if path.suffix:
            lines = path.read_text(encoding="utf-8").splitlines()
            yield from (entry_from_data(from_json(line)) for line in lines)
        else:
            records = (data for data, _, _ in _records(path, number))
            yield from (entry_from_data(data) for data in records if data["kind"] not in (SNAPSHOT, KEPT))


def _to_history(folder: Path, number: int) -> None:
    """Delete a file of the journal, but keep its entries as text. Its sets, which are most of it, are not read."""
    path = folder / f"journal-{number:06d}"
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        texts = [data[begin:end].rstrip() for _, begin, end, _ in _complete_records(data)]
    entries = [text for text in texts if not text.startswith(NO_ENTRIES)]
    replace(folder / f"history-{number:06d}.jsonl", b"".join(line + b"\n" for line in entries))
    path.unlink()


def _numbers(folder: Path) -> list[int]:
    return sorted(int(match[1]) for path in folder.iterdir() if (match := FILE.fullmatch(path.name)))


def head_of(entry: Entry, data: bytes) -> bytes:
    """Return the record of an entry with a set, without the bytes of the set."""
    return _head(entry_to_data(entry), data)


def _head(data: Mapping[str, Any], set: bytes) -> bytes:
    """Return everything of a record before its set."""
    text = to_json(data, inf_nan_mode="strings")
    text += b" " * (-len(text) % 8)
    checked = struct.pack("<IIQ", len(text), 0, len(set)) + text
    crc = zlib.crc32(set, zlib.crc32(checked))
    return FIRST + struct.pack("<I", crc) + checked


def _as_next(head: bytes) -> bytes:
    """Return the head of a record for a write that begins with another record."""
    return NEXT + head[len(NEXT) :]


def _write_at(descriptor: int, parts: Sequence[bytes], at: int) -> None:
    """Write bytes one after another at a place of a file. They are not joined: a copy holds up other threads."""
    for first in range(0, len(parts), MOST_PARTS):
        batch = parts[first : first + MOST_PARTS]
        written, size = os.pwritev(descriptor, batch, at), sum(map(len, batch))
        at += size
        if written < size:  # as when the disk is nearly full
            remaining = memoryview(b"".join(batch))[written:]
            while remaining:
                remaining = remaining[os.pwrite(descriptor, remaining, at - len(remaining)) :]


def _records(path: Path, number: int) -> Iterator[tuple[dict[str, Any], Extent, int]]:
    """Yield the complete records of a file: its JSON data, the extent of its set, and the offset of its end."""
    if not path.stat().st_size:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for crc, begin, set, end in _complete_records(data):
            if not _is_sound(data, crc, begin, end):
                return
            yield from_json(data[begin:set]), Extent(number, set, end - set), end


def _is_sound(data: mmap.mmap, crc: int, begin: int, end: int) -> bool:
    """Return whether a record has its CRC. Its text begins at ``begin``."""
    with memoryview(data) as view, view[begin - PREFIX.size + 8 : end] as covered:
        return zlib.crc32(covered) == crc


def _was_continued(path: Path, at: int) -> bool:
    """Return whether a later write follows an unreadable record at this offset, so that a power cut has not torn it."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while (at := data.find(FIRST, at + 1)) >= 0:
            crc, begin, _, end = next(_complete_records(data, at), (0, at, at, at))
            if end > at and _is_sound(data, crc, begin, end):
                return True
    return False


def _complete_records(data: mmap.mmap, at: int = 0) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each complete record of a file its CRC, and the offsets of its text, of its set, and of its end.

    Args:
        data: The file.
        at: The offset of the first record.
    """
    while at + PREFIX.size <= len(data):
        magic, crc, text, zero, length = PREFIX.unpack_from(data, at)
        begin = at + PREFIX.size
        end = begin + text + length
        if magic not in MAGICS or zero or text > MOST_JSON_BYTES or end > len(data):
            return
        yield crc, begin, begin + text, end
        at = end


def needed_sets(journal: Journal, sets: Collection[int]) -> dict[int, bytes]:
    """Return the bytes of sets from the files of the journal."""
    return {set: journal.read(set) for set in sorted(sets)}


def _sync_data(descriptor: int) -> None:
    """Wait until the bytes of a file are on the disk."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)
