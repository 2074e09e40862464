"""Removes files of a run when its master has ended, also if the master was killed. Runs on the master."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

STOP_S = 5.0
SCRIPT = 'trap "" INT TERM HUP; read -r _; rm -f "$@"'
"""It waits for the end of its standard input, which comes when the master ends in any way."""


class Guard:
    """A shell that removes files when this process ends, or before, by ``close``.

    Args:
        paths: The files. They need not exist.
    """

    def __init__(self, *paths: Path) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", SCRIPT, "ddlf-guard", *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Remove the files now. Safe to call again."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a file system that does not answer
            self._process.wait(STOP_S)
