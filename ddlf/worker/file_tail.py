"""Reads the lines that are added to a file while other processes write it. Runs in the daemon."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO

from ddlf.worker.output_capture import NOTHING, append_to_line, shown_line

READ_BYTES = 128 * 1024
"""Maximum bytes of lines that one look returns. If more was added, only the newest lines are returned."""


class GrowingFile:
    """A file that other processes write, such as the standard error of an executor.

    Args:
        file: The file, which this object only reads.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._fd = os.dup(file.fileno())
        self._at = 0
        self._unfinished = NOTHING

    def close(self) -> None:
        """Close this object's view of the file."""
        os.close(self._fd)

    def skip(self) -> None:
        """Leave out all that is in the file now."""
        self._at, self._unfinished = os.fstat(self._fd).st_size, NOTHING

    def new_lines(self, *, to_its_end: bool = False) -> tuple[Sequence[str], int]:
        """Return the lines that were added since the last call, and the number of bytes that were left out before them.

        Args:
            to_its_end: Whether to return a last line without a line end, too, because the file does not grow any more.
        """
        size = os.fstat(self._fd).st_size
        left_out = max(0, size - self._at - READ_BYTES)
        if left_out:
            self._at, self._unfinished = self._at + left_out, NOTHING
        data = os.pread(self._fd, READ_BYTES, self._at)
        self._at += len(data)
        if left_out:  # begin with a whole line
            cut = data.find(b"\n") + 1
            data, left_out = data[cut:], left_out + cut
        *whole_lines, last = data.split(b"\n")
        lines = []
        for line in whole_lines:
            lines.append(shown_line(*append_to_line(self._unfinished, line)))
            self._unfinished = NOTHING
        self._unfinished = append_to_line(self._unfinished, last)
        if to_its_end and self._unfinished[0]:
            lines.append(shown_line(*self._unfinished))
            self._unfinished = NOTHING
        return [line.decode(errors="backslashreplace") for line in lines], left_out
