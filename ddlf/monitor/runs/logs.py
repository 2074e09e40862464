"""Reads the output of the workers of a run from its log files: of one worker, or of all workers in order of time. A
sign in each line tells what user code has written from all other output.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from pathlib import Path

from ddlf.monitor.runs import folder

STAMP = len("2026-11-22 12:00:00.000")
OF_USER_CODE, OF_WORKER = "  ", " |"
"""Between the time and the text of a line: of user code, and of native code, the worker or DDLF."""

Line = tuple[str, str, str]
"""The time when the line arrived at the master, as text that sorts by time; the worker; the line."""


class Reader:
    """Reads the logs of a run repeatedly.

    Args:
        path: Folder of the run.
        worker: Name of the worker whose log to read; None for all.
        everything: Whether to return also lines that user code has not written.
    """

    def __init__(self, path: Path, worker: str | None = None, *, everything: bool = False) -> None:
        self._everything = everything
        self._folder = path / folder.LOGS
        self._pattern = f"{folder.file_name(worker)}.log" if worker else "*.log"
        self._read: dict[int, int] = {}  # inode -> bytes read: a renamed file keeps its inode

    @property
    def writers(self) -> list[str]:
        """Names of all workers that wrote something, as in the names of the files."""
        return sorted(path.stem for path in self._folder.glob("*.log"))

    def new(self) -> Iterator[Line]:
        """Return the lines that were added since the last call, without an incomplete last line."""
        return heapq.merge(*(self._of(path) for path in sorted(self._folder.glob(self._pattern))))

    def _of(self, path: Path) -> Iterator[Line]:
        for part in (path.with_name(path.name + folder.BEFORE), path):
            try:
                file = open(part, "rb")  # noqa: SIM115
            except FileNotFoundError:  # there is no older part
                continue
            with file:
                facts = os.fstat(file.fileno())
                begin = self._read.get(facts.st_ino, 0)
                done = begin if begin <= facts.st_size else 0  # a new file may get the inode of a removed one
                file.seek(done)
                for data in file:
                    if not data.endswith(b"\n"):
                        break
                    done = self._read[facts.st_ino] = done + len(data)
                    line = data[:-1].decode(errors="backslashreplace")
                    text = line[STAMP:]
                    if self._everything or not text.startswith(OF_WORKER):
                        yield line[:STAMP], path.stem, text[len(OF_WORKER) :]
