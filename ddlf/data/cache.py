"""A cache of partition files from a store, on a disk of this machine. All processes of a user share it.

Each file is named by its SHA-256, so it fits any data set that names that hash. Readers compare the bytes again. A
process that fetches a file holds a lock with its name, so each file is fetched once for a machine.

When the cap is reached, the least recently used file is removed, unless it belongs to the same data set as the new
file. So if a data set is larger than the cap, a part of it stays in the cache and the rest is not written. Otherwise
the cache would always remove the file that is needed next. A killed process leaves an incomplete file. The next fetch
removes it, because its lock is free.
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
from ddlf.settings.checks import count_of_bytes

log = logging.getLogger(__name__)

FOLDER, CAP = "DDLF_CACHE", "DDLF_CACHE_SIZE"
"""Environment variables: the folder of the cache, and its size, where ``0`` means no cache."""
USUAL_SHARE = 0.5
"""Default cap, as a share of the free bytes plus the bytes in the cache."""
LEFT = 0.05
"""The cache leaves this share of a disk free."""
LEFT_BYTES = 10**9
"""The cache leaves at most this number of bytes free."""
PART = re.compile(r"\.([0-9a-f]{64})-(\d+)-[0-9a-f]{8}")
"""Name of a file that is being fetched: its hash and its final size."""
WHOLE = re.compile(r"[0-9a-f]{64}")
AGAIN_S = 60.0
"""Seconds until a full cache is checked again."""
LOOK_S = 0.2
"""Seconds between two checks during a wait for a lock."""


class Cache:
    """A folder on this machine with copies of partition files (parts of data sets) from a store.

    Args:
        folder: Created when it is needed. None means the folder from the environment, or the user's default one.
        cap: Maximum bytes. None means the size from the environment, or half of the free space.

    Raises:
        ConfigError: The size in the environment is invalid.
    """

    def __init__(self, folder: Path | None = None, cap: int | None = None) -> None:
        self.folder = folder or _usual()
        self._cap = _cap_of_environment() if cap is None else cap
        self._was_logged, self._full_until = False, 0.0

    def path(
        self,
        sha256: str,
        nbytes: int,
        fetch: Callable[[Path], None],
        *,
        protected: Collection[str] = (),
        ends: Callable[[], bool] = lambda: False,
        exact: bool = True,
    ) -> Path | None:
        """Return the path of the file with this hash. Readers must compare its bytes with the hash.

        Args:
            sha256: Hash of the file.
            nbytes: Size of the file.
            fetch: Writes the file to the path that it gets. It is called if the file is not in the cache.
            protected: Hashes of the files that must not be removed to make room for this file, because they are needed
                equally often.
            ends: Returns whether the wait for other fetches must end.
            exact: Whether ``nbytes`` is the exact size, and not an estimate.

        Returns:
            The path; None if there is no room for the file: it is larger than the cap, the files in ``protected`` fill the
            cap, or the disk is full. A warning gives the reason once.

        Raises:
            DatasetError: ``fetch`` raised it, or ``ends`` stopped the wait.
        """
        if self._cap is not None and nbytes > self._cap:
            if self._cap:  # a cap of 0 was chosen, so there is nothing to warn about
                self._say(f"{self.folder} may hold {size(self._cap)}, less than a file of {size(nbytes)}")
            return None
        try:
            path = self.folder / sha256
            if self._is_cached(path, nbytes if exact else None):
                return path
            if protected and time.monotonic() < self._full_until:
                return None
            self._locks.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked(sha256[:2], ends):
                if self._is_cached(path, nbytes if exact else None):
                    return path
                part = self.folder / f".{sha256}-{nbytes}-{secrets.token_hex(4)}"
                with self._locked("room", ends):
                    if not self._room(nbytes, sha256[:2], protected):
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
            reason = "its disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
            self._say(f"{self.folder} cannot be used: {reason}")
            return None

    def drop(self, sha256: str) -> None:
        """Remove a damaged file from the cache."""
        with contextlib.suppress(OSError):
            (self.folder / sha256).unlink(missing_ok=True)

    @property
    def _locks(self) -> Path:
        return self.folder / "locks"

    def _is_cached(self, path: Path, nbytes: int | None) -> bool:
        try:
            if nbytes not in (None, path.lstat().st_size) or path.is_symlink():
                return False
            os.utime(path)  # marks it as just used
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def _locked(self, name: str, ends: Callable[[], bool]) -> Iterator[None]:
        from filelock import FileLock, Timeout

        lock = FileLock(self._locks / name, timeout=LOOK_S)
        while True:
            try:
                lock.acquire()
                break
            except Timeout:
                if ends():
                    raise DatasetError(f"the wait for {self.folder} was ended", hint="read the data again") from None
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

    def _room(self, nbytes: int, own_lock: str, protected: Collection[str]) -> bool:
        """Remove the least recently used files from the cache until there is room for a new one.

        The caller holds the lock ``room``, so no other fetch begins, and the lock ``mine``.
        """
        used, files = 0, []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):
                if part := PART.fullmatch(entry.name):
                    if part[1][:2] == own_lock or self._is_free(part[1][:2]):
                        os.unlink(entry.path)  # left by a killed process
                    else:
                        used += int(part[2])
                elif WHOLE.fullmatch(entry.name):
                    about = entry.stat(follow_symlinks=False)
                    used += about.st_size
                    files.append((entry.name in protected, about.st_mtime_ns, entry.path, about.st_size))
        disk = shutil.disk_usage(self.folder)
        cap = self._cap if self._cap is not None else int(USUAL_SHARE * (disk.free + used))
        free = disk.free - min(int(LEFT * disk.total), LEFT_BYTES) if disk.total else nbytes
        for stays, _, path, nbytes_freed in sorted(files):
            if (used + nbytes <= cap and nbytes <= free) or (stays and used <= cap and free >= 0):
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used, free = used - nbytes_freed, free + nbytes_freed
        fits = used + nbytes <= cap and nbytes <= free
        if not fits and not any(stays for stays, *_ in files):
            self._say(f"no room in {self.folder} for a file of {size(nbytes)}")
        return fits

    def _say(self, cause: str) -> None:
        if not self._was_logged:
            log.warning("%s: partition files are fetched again whenever they are needed", cause)
        self._was_logged = True


def _usual() -> Path:
    import platformdirs

    if named := os.environ.get(FOLDER):
        return Path(named).expanduser()
    return Path(platformdirs.user_cache_dir("ddlf")) / "partition-files"


def _cap_of_environment() -> int | None:
    text = os.environ.get(CAP, "")
    if not text:
        return None
    if text == "0":
        return 0
    try:
        return count_of_bytes(CAP, text)
    except ConfigError:
        raise ConfigError(
            f"{CAP} is {text!r}, which is not a size", hint="write it as 20GB, or 0 for no cache"
        ) from None
