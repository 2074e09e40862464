"""Partition files that came from a store, on a disk of this machine, for all of the user's processes that want the same ones.

A file is named by its SHA-256, so it is the right one for whatever place names that hash; who reads it compares the bytes again. Who fetches one
holds a lock of its name, so each comes once to a machine. What was used longest ago goes when the cap is reached, but no file that the next epoch
wants as much as the one that would come in its place: of a data set that is larger than the cap a part stays, and the rest is not written at all.
To drop what was used longest ago would be to drop what is wanted next, each time. A process that is killed leaves a part of a file, which goes with
the next one: nobody holds its lock any more.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from ddlf.errors import ConfigError, DatasetError
from ddlf.events.record import size
from ddlf.training.settings.checks import count_of_bytes

log = logging.getLogger(__name__)

FOLDER, CAP = "DDLF_CACHE", "DDLF_CACHE_SIZE"
"""Variables of the environment: where it is, and how much it may hold, ``0`` for no cache."""
USUAL_SHARE = 0.5
"""Of what is free, and of what it holds already."""
LEFT = 0.05
"""Of a disk, which stays free."""
LEFT_BYTES = 10**9
"""The same at most."""
PART = re.compile(r"\.([0-9a-f]{64})-(\d+)-[0-9a-f]{8}")
"""A file that is being fetched: its hash, and how long it will be."""
WHOLE = re.compile(r"[0-9a-f]{64}")
AGAIN_S = 60.0
"""After which a cache that was full is looked at again."""
LOOK_S = 0.2
"""How often who waits for a lock looks whether it is to end."""


class Cache:
    """A folder of such files.

    Args:
        folder: It is made when it is needed; None is that of the environment, or the user's usual one.
        cap: Bytes that it may hold; None is that of the environment, or half of what is free.

    Raises:
        ConfigError: The environment says something that is no size.
    """

    def __init__(self, folder: Path | None = None, cap: int | None = None) -> None:
        self.folder = folder or _usual()
        self._cap = _of_environment() if cap is None else cap
        self._told, self._full_until = False, 0.0

    def path(
        self,
        sha256: str,
        nbytes: int,
        fetch: Callable[[Path], None],
        *,
        beside: Collection[str] = (),
        ends: Callable[[], bool] = lambda: False,
        exact: bool = True,
    ) -> Path | None:
        """A file of this hash, or of what was once so: who reads it compares the bytes.

        Args:
            sha256: Hash of the file.
            nbytes: Its size.
            fetch: Writes the file at the path that it is given. It is called if the file is not here.
            beside: Hashes of files that are wanted as often as this one, none of which makes room for it.
            ends: Whether to wait no longer for others that fetch.
            exact: Whether ``nbytes`` is the size; else it is an estimate.

        Returns:
            None if it has no room here: it is larger than the cap, those beside it fill that, or the disk is full, which is said once.

        Raises:
            DatasetError: What ``fetch`` raises; or waiting was ended.
        """
        if self._cap is not None and nbytes > self._cap:
            if self._cap:  # without one nothing is amiss
                self._say(f"{self.folder} may hold {size(self._cap)}, less than a file of {size(nbytes)}")
            return None
        try:
            path = self.folder / sha256
            if self._here(path, nbytes if exact else None):
                return path
            if beside and time.monotonic() < self._full_until:
                return None
            self._locks.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._held(sha256[:2], ends):
                if self._here(path, nbytes if exact else None):
                    return path
                part = self.folder / f".{sha256}-{nbytes}-{secrets.token_hex(4)}"
                with self._held("room", ends):
                    if not self._room(nbytes, sha256[:2], beside):
                        self._full_until = time.monotonic() + AGAIN_S
                        return None
                    part.touch(mode=0o600)
                try:
                    fetch(part)
                    os.replace(part, path)
                finally:
                    part.unlink(missing_ok=True)
                return path
        except OSError as error:
            why = "its disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
            self._say(f"{self.folder} cannot be used: {why}")
            return None

    def drop(self, sha256: str) -> None:
        """Remove a file that was found to be damaged."""
        with contextlib.suppress(OSError):
            (self.folder / sha256).unlink(missing_ok=True)

    @property
    def _locks(self) -> Path:
        return self.folder / "locks"

    def _here(self, path: Path, nbytes: int | None) -> bool:
        try:
            if nbytes not in (None, path.lstat().st_size) or path.is_symlink():
                return False
            os.utime(path)  # it was used just now
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def _held(self, name: str, ends: Callable[[], bool]) -> Iterator[None]:
        from filelock import FileLock, Timeout

        lock = FileLock(self._locks / name, timeout=LOOK_S)
        while True:
            try:
                lock.acquire()
                break
            except Timeout:
                if ends():
                    raise DatasetError(f"waiting for {self.folder} was ended", hint="read it again") from None
        try:
            yield
        finally:
            lock.release()

    def _is_free(self, name: str) -> bool:
        from filelock import FileLock, Timeout

        try:
            with FileLock(self._locks / name, timeout=0):
                return True
        except Timeout:
            return False

    def _room(self, nbytes: int, mine: str, beside: Collection[str]) -> bool:
        """Remove what was used longest ago until there is room. Who calls it holds the lock for that, so no fetch begins, and that named ``mine``."""
        held, whole = 0, []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):
                if found := PART.fullmatch(entry.name):
                    if found[1][:2] == mine or self._is_free(found[1][:2]):
                        os.unlink(entry.path)  # of a process that was killed
                    else:
                        held += int(found[2])
                elif WHOLE.fullmatch(entry.name):
                    about = entry.stat(follow_symlinks=False)
                    held += about.st_size
                    whole.append((entry.name in beside, about.st_mtime_ns, entry.path, about.st_size))
        disk = shutil.disk_usage(self.folder)
        cap = self._cap if self._cap is not None else int(USUAL_SHARE * (disk.free + held))
        free = disk.free - min(int(LEFT * disk.total), LEFT_BYTES) if disk.total else nbytes
        for stays, _, path, much in sorted(whole):
            if (held + nbytes <= cap and nbytes <= free) or (stays and held <= cap and free >= 0):
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            held, free = held - much, free + much
        fits = held + nbytes <= cap and nbytes <= free
        if not fits and not any(stays for stays, *_ in whole):
            self._say(f"no room in {self.folder} for a file of {size(nbytes)}")
        return fits

    def _say(self, what: str) -> None:
        if not self._told:
            log.warning("%s: partition files are fetched again whenever they are needed", what)
        self._told = True


def _usual() -> Path:
    import platformdirs

    if named := os.environ.get(FOLDER):
        return Path(named).expanduser()
    return Path(platformdirs.user_cache_dir("ddlf")) / "partition-files"


def _of_environment() -> int | None:
    text = os.environ.get(CAP, "")
    if not text:
        return None
    if text == "0":
        return 0
    try:
        return count_of_bytes(CAP, text)
    except ConfigError:
        raise ConfigError(f"{CAP} is {text!r}, which is no size", hint="write it as 20GB, or 0 for no cache") from None
