"""What workers wrote in a run, read from the files of the run's folder: that of each of them, or all together in the order of time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

from ddlf.runs import folder

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
        self._read: dict[Path, int] = {}

    def new(self) -> Iterator[Line]:
        """The lines that were added since the last time, without one that is not whole yet."""
        return heapq.merge(*(self._of(path) for path in sorted(self._folder.glob(self._pattern))))

    def _of(self, path: Path) -> Iterator[Line]:
        with open(path, "rb") as file:
            file.seek(self._read.get(path, 0))
            for data in file:
                if not data.endswith(b"\n"):
                    return
                self._read[path] = self._read.get(path, 0) + len(data)
                line = data[:-1].decode(errors="backslashreplace")
                yield line[:STAMP], path.stem, line[STAMP + 2 :]
