"""The journal: a file with one line of JSON for each round, beside the checkpoints, which only grows.

Runs on the master.

A checkpoint refers to the first lines of the file: it stores their number, their size in bytes and their SHA-256. So
the cost of a checkpoint does not depend on the number of rounds, and every checkpoint has its own part of the file.
When a run resumes from a checkpoint, the later lines belong to rounds that it will repeat. The first new line replaces
them.

A record can change after it was written, because its evaluation ends later. It then gets another line, and the last
line of each version counts.

Records are reports and do not affect training: a run whose journal is damaged continues without them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ddlf.events.facts import from_data, to_data
from ddlf.events.record import RoundRecord
from ddlf.training.checkpoints.durable import damaged, sync

JOURNAL = "records.jsonl"


class Extent(BaseModel):
    """The first lines of a journal, which belong to a checkpoint.

    Args:
        lines: Number of lines, at least one for each record.
        bytes: Size of these lines.
        sha256: Hash of these bytes.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    lines: int = 0
    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()


class Journal:
    """A journal (the file with the records of all rounds) that this process writes.

    Args:
        file: The file, which need not exist.

    Attributes:
        lines: Number of its lines.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines = 0
        self._bytes = 0
        self._digest = hashlib.sha256()

    def go_on_after(self, extent: Extent) -> None:
        """Let the next records follow the lines that belong to a checkpoint, which were read and are undamaged."""
        data = self.file.read_bytes()[: extent.bytes] if extent.bytes else b""
        self.lines, self._bytes, self._digest = extent.lines, extent.bytes, hashlib.sha256(data)

    def with_lines(self, lines: list[bytes]) -> Extent:
        """Return the extent (number, size and hash of lines) that the journal will have after ``append``."""
        digest = self._digest.copy()
        digest.update(b"".join(lines))
        return Extent(
            lines=self.lines + len(lines), bytes=self._bytes + sum(map(len, lines)), sha256=digest.hexdigest()
        )

    def append(self, lines: list[bytes]) -> None:
        """Append records of rounds to the file. After the return, they survive a power cut.

        On failure:
            None of the records counts, and the call may be repeated.
        """
        if not lines:
            return
        data = b"".join(lines)
        new = not self.file.exists()
        with open(os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
            file.truncate(self._bytes)
            file.seek(self._bytes)
            file.write(data)
            file.flush()
            sync(self.file)
        if new:
            sync(self.file.parent)
        self._digest.update(data)
        self.lines, self._bytes = self.lines + len(lines), self._bytes + len(data)


def read(file: Path, extent: Extent) -> list[RoundRecord]:
    """Return the records of the rounds that belong to a checkpoint.

    Raises:
        CheckpointCorrupt: The bytes differ from the written ones.
    """
    if not extent.lines:
        return []
    try:
        with open(file, "rb") as opened:
            data = opened.read(extent.bytes)
    except FileNotFoundError as error:
        raise damaged(file, "a file", "nothing", text=f"{file} is missing") from error
    if len(data) != extent.bytes:
        raise damaged(file, f"{extent.bytes:,} bytes", f"{len(data):,} bytes")
    digest = hashlib.sha256(data).hexdigest()
    if digest != extent.sha256:
        raise damaged(file, f"SHA-256 {extent.sha256}", f"SHA-256 {digest}")
    try:
        records = [from_data(RoundRecord, json.loads(line)) for line in data.splitlines()]
        return list({record.version: record for record in records}.values())
    except (ValueError, TypeError, KeyError) as error:  # undamaged, but written by another version
        raise damaged(file, "records of rounds", str(error)) from error


def spelled(records: Iterable[RoundRecord]) -> list[bytes]:
    """Encode records of rounds as JSON lines, each with its line end."""
    return [json.dumps(to_data(record)).encode() + b"\n" for record in records]
