"""The temporary folder of one daemon. Runs in the daemon.

The folder contains methods, the executor's log and its temporary files. It is removed when the daemon ends. A killed
daemon cannot remove it, so each daemon has a lock on a file in its folder, which the system releases at its death. The
next daemon of the same user removes the folders whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "ddlf-"
LOCK = "lock"


class DaemonFolder:
    """A new folder that only this user can read.

    Attributes:
        path: Path of the folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        new = self.path / f"{LOCK}.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / LOCK)  # only from now on may another daemon examine the folder

    def remove(self) -> None:
        """Remove the folder and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned() -> list[Path]:
    """Remove the folders of this user's dead daemons, and return their paths."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # already gone, in use, or not such a folder
            facts = path.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
            finally:
                os.close(lock)
    return removed
