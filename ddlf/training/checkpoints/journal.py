"""What rounds were like: lines of JSON in one file beside the checkpoints, which only grows. Runs on the master.

A checkpoint names how much of the file belongs to it, by lines, bytes and the SHA-256 of these bytes. So a checkpoint costs the same however many
rounds there were, and one that is older, or was left by a killed writer, has its own beginning of the file. What is behind the beginning that a run
goes on from is of rounds that it will do again, and goes with the first new line.

A record that changes after it was written, because its test came later, has another line; the last one of a version counts.

The lines are told, not trained with: a run whose journal is damaged goes on without them.
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
    """How much of a journal belongs to a checkpoint.

    Args:
        lines: How many, at least one for each record.
        bytes: Their bytes.
        sha256: Of these bytes.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    lines: int = 0
    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()


class Journal:
    """A journal that is written.

    Args:
        file: File, which need not exist.

    Attributes:
        lines: How many are in it.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines = 0
        self._bytes = 0
        self._digest = hashlib.sha256()

    def go_on_after(self, extent: Extent) -> None:
        """Write behind this beginning, which was read and found whole."""
        data = self.file.read_bytes()[: extent.bytes] if extent.bytes else b""
        self.lines, self._bytes, self._digest = extent.lines, extent.bytes, hashlib.sha256(data)

    def with_lines(self, lines: list[bytes]) -> Extent:
        """What the journal will be after ``append``."""
        digest = self._digest.copy()
        digest.update(b"".join(lines))
        return Extent(
            lines=self.lines + len(lines), bytes=self._bytes + sum(map(len, lines)), sha256=digest.hexdigest()
        )

    def append(self, lines: list[bytes]) -> None:
        """Write records at the end; when this returns, they survive a power cut.

        On failure:
            Nothing of it counts, and it may be tried again.
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
    """The records of a checkpoint.

    Raises:
        CheckpointCorrupt: They are not, byte for byte, what was written.
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
    except (ValueError, TypeError, KeyError) as error:  # whole, but written by another version
        raise damaged(file, "records of rounds", str(error)) from error


def spelled(records: Iterable[RoundRecord]) -> list[bytes]:
    """The lines of records, each with its end."""
    return [json.dumps(to_data(record)).encode() + b"\n" for record in records]
