"""What workers wrote in a run, read from the files of the run's folder: those of each of them, or all together in the order of time."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from pathlib import Path

from ddlf.monitor.runs import folder

STAMP = len("2026-11-22 12:00:00.000")

Line = tuple[str, str, str]
"""When it came to the master, as text that sorts; who wrote it; what."""


class Reader:
    """Reads the files of a run, again and again.

    Args:
        path: Folder of the run.
        worker: Name of the worker whose file alone is read; None for all.
    """

    def __init__(self, path: Path, worker: str | None = None) -> None:
        self._folder = path / folder.LOGS
        self._pattern = f"{folder.file_name(worker)}.log" if worker else "*.log"
        self._read: dict[int, int] = {}  # number of a file on its disk -> bytes: it keeps that under another name

    @property
    def writers(self) -> list[str]:
        """Names of all workers that wrote something, as their files have them."""
        return sorted(path.stem for path in self._folder.glob("*.log"))

    def new(self) -> Iterator[Line]:
        """The lines that were added since the last time, without one that is not whole yet."""
        return heapq.merge(*(self._of(path) for path in sorted(self._folder.glob(self._pattern))))

    def _of(self, path: Path) -> Iterator[Line]:
        for part in (path.with_name(path.name + folder.BEFORE), path):
            try:
                file = open(part, "rb")  # noqa: SIM115
            except FileNotFoundError:  # there is none before it
                continue
            with file:
                facts = os.fstat(file.fileno())
                begin = self._read.get(facts.st_ino, 0)
                done = begin if begin <= facts.st_size else 0  # a new file may get the number of one that went
                file.seek(done)
                for data in file:
                    if not data.endswith(b"\n"):
                        break
                    done = self._read[facts.st_ino] = done + len(data)
                    line = data[:-1].decode(errors="backslashreplace")
                    yield line[:STAMP], path.stem, line[STAMP + 2 :]
