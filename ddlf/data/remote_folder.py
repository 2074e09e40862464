"""Opens the location that a user names: a folder, or a URL with an fsspec driver.

Reads go through this machine's cache. Files are written to a local disk, and then uploaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data import manifest
from ddlf.data.cache import Cache
from ddlf.data.location import LOCK, MAX_MANIFEST_BYTES, DataLocation, Folder, Unfinished, check_kept, check_version
from ddlf.data.manifest import Column, Manifest, PartitionFile
from ddlf.data.os_errors import explained
from ddlf.data.partition_file import COPY, Arrays, Bytes, columns_of, mapped_columns
from ddlf.data.store import Gone, Store, path_of
from ddlf.errors import DatasetDamaged, DatasetError
from ddlf.events.record import size

VERSION = re.compile(r"v\d{4,9}")
KEY = "key"
"""Local file with the key of the writer, which is also in the store's lock file."""


class RemoteFolder:
    """A location that is a URL, such as a bucket, read and written with an fsspec driver.

    Args:
        url: The URL, such as ``s3://bucket/folder``.
        cache: Cache for partition files; None means the user's default cache.
        store: The store at the URL; None lets an fsspec driver open it.

    Raises:
        ConfigError: The URL is invalid.
        DatasetError: There is no driver for the URL.
    """

    def __init__(self, url: str, cache: Cache | None = None, store: Any = None) -> None:
        self._store = store or Store(url)
        self._cache = cache or Cache()
        self._work = self._cache.folder / "unfinished" / hashlib.sha256(str(self).encode()).hexdigest()[:16]
        self._manifest_mark, self._key = "", ""
        self._checked: set[str] = set()
        self._newest: Manifest | None = None
        self._protected: frozenset[str] | None = None

    def __str__(self) -> str:
        return str(self._store)

    def close(self) -> None:
        """End the waits of threads for the store with an error, and refuse later requests."""
        self._store.close()

    def interrupt(self) -> None:
        """End the waits of threads for the store with an error. Later requests work again."""
        self._store.interrupt()

    def manifest(self, version: int = 0) -> Manifest:
        """Return the manifest of a version; 0 for the newest."""
        try:
            newest = self._manifest(manifest.NAME)
        except Gone:
            raise DatasetError(
                f"{self} has no data set: there is no {manifest.NAME}", hint="make it with: ddlf data split"
            ) from None
        if version in (0, newest.version):
            return self._remember(newest)
        name = manifest.name_of(version)
        try:
            return self._remember(self._manifest(name))
        except Gone:
            check_kept(name, version, newest.version, [], self)
            raise

    def _remember(self, version: Manifest) -> Manifest:
        """Return this manifest, and record that the files of its version are read from now on, each equally often. The
        cache uses this to decide which files to keep.
        """
        if version != self._newest:
            self._newest, self._protected = version, None
        return version

    def _manifest(self, name: str) -> Manifest:
        data = self._store.read(name, 10**6)
        if len(data) > MAX_MANIFEST_BYTES:
            raise DatasetError(f"{self}/{name} has {size(len(data))}", hint=COPY)
        return manifest.read(data, f"{self}/{name}")

    def load(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """Read the columns of a partition file into memory, through the cache, and check every byte."""
        content = self._content(file)
        if hashlib.sha256(content.data).hexdigest() != file.sha256:
            # The disk or the store returned wrong bytes. Fetch the file once more. If it is wrong again, raise an
            # error.
            self._cache.drop(file.sha256)
            content = self._content(file)
        return columns_of(content, file, columns, self._full_name(file))

    def mapped(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """Map the columns of a partition file from the cache. Without room in the cache, read them into memory."""
        path = self._cached_path(file, mapped=True)
        if path is None:
            return self.load(file, columns)
        if file.sha256 not in self._checked:
            self.load(file, columns)
            self._checked.add(file.sha256)
        return mapped_columns(path, file, columns, self._full_name(file))

    def availability(self, version: Manifest) -> list[bool]:
        """Return true for each file, because every machine can read a store."""
        return [True] * len(version.files)

    def check(self, file: PartitionFile, columns: Mapping[str, Column]) -> None:
        """Compare every byte of a file in the store, not in the cache, with the manifest."""
        columns_of(self._read(file), file, columns, self._full_name(file))

    def extra(self, version: Manifest) -> list[str]:
        """Return the files in the version's folders that the manifest does not name."""
        named = {file.name for file in version.files}
        folders = sorted({name.partition("/")[0] for name in named})
        try:
            names = [name for folder in folders for name in self._store.names(folder)]
        except DatasetError:  # a web server may be unable to list files
            return []
        return [f"{self}/{name}" for name in names if name not in named]

    def _full_name(self, file: PartitionFile) -> str:
        return f"{self}/{file.name}"

    def _content(self, file: PartitionFile) -> Bytes:
        path = self._cached_path(file)
        return self._read(file) if path is None else np.fromfile(path, np.uint8)

    def _read(self, file: PartitionFile) -> Bytes:
        try:
            return np.frombuffer(self._exactly(file, self._store.read(file.name, file.nbytes)), np.uint8)
        except Gone:
            raise DatasetDamaged(f"{self._full_name(file)} is missing", hint=COPY) from None

    def _exactly(self, file: PartitionFile, data: bytes) -> bytes:
        if len(data) != file.nbytes:
            raise DatasetDamaged(
                f"{self._full_name(file)} has {len(data):,} bytes, not the {file.nbytes:,} of the manifest", hint=COPY
            )
        return data

    def _cached_path(self, file: PartitionFile, *, mapped: bool = False) -> Path | None:
        """Return the path of a partition file in this machine's cache, after fetching it if necessary; None if the
        cache has no room. The caller must check its bytes.

        A file that will be mapped may displace any other file, because it must stay for a while.
        """
        if self._protected is None:
            self._protected = frozenset(unit.sha256 for unit in self._newest.files) if self._newest else frozenset()
        try:
            return self._cache.path(
                file.sha256,
                file.nbytes,
                lambda path: self._store.fetch(file.name, file.nbytes, path),
                protected=() if mapped else self._protected,
                ends=self._store.ending(),
            )
        except Gone:
            raise DatasetDamaged(f"{self._full_name(file)} is missing", hint=COPY) from None

    # -- writing ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, *, after: int = 0, plan: Mapping[str, str] | None = None) -> Iterator[Unfinished]:
        """Let the caller write a data set to this location, as its only writer, within the ``with`` block.

        A lock file in the store names the writer. A killed writer leaves it behind, and the same machine recognises it
        by the key in its local folder.
        """
        self._check_version(after)
        if not after and [name for name in self._store.names() if name != LOCK and not VERSION.fullmatch(name)]:
            raise DatasetError(f"{self} is not empty, and DDLF overwrites nothing", hint="name another place")
        with explained(self._work, "write to"):
            self._work.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._alone():
                unfinished = Unfinished(self._work, plan)
                try:
                    with self._named():
                        self._manifest_mark = self._store.mark(manifest.NAME) if after else ""
                        self._check_version(after)
                        self._tidy(after + 1 if unfinished.goes_on else 0)
                        unfinished.begin()
                        try:
                            yield unfinished
                        except BaseException as error:
                            if not unfinished.lasts(error) and self._is_mine():
                                self._tidy()
                            raise
                except BaseException as error:
                    if not unfinished.lasts(error):
                        shutil.rmtree(self._work)
                    raise
                # Remove the key last, because it proves that the lock file in the store belongs to this machine.
                shutil.rmtree(self._work)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes of this machine from writing here during a ``with`` block, by a local lock."""
        from filelock import FileLock, Timeout

        lock = FileLock(self._work.with_suffix(".lock"), timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise self._busy() from None
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Hold the lock file in the store during a ``with`` block. It keeps other machines from writing here."""
        path = self._work / KEY
        if not path.exists():
            path.write_text(secrets.token_hex(8))
        self._key = path.read_text()
        writer = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            self._store.write(LOCK, json.dumps(writer | {"key": self._key}).encode(), new=True)
        except FileExistsError:
            if not self._is_mine():  # otherwise a killed process of this machine left the lock file behind
                raise self._busy() from None
        try:
            yield
        except BaseException:
            # if the store is unreachable now, the next writer on this machine uses the local key
            with contextlib.suppress(DatasetError):
                self._unname()
            raise
        self._unname()

    def _unname(self) -> None:
        if self._is_mine():
            self._store.remove(LOCK)

    def _is_mine(self) -> bool:
        return self._writer().get("key") == self._key

    def _writer(self) -> dict[str, Any]:
        """Return the facts in the store's lock file; empty if there is none or it is unreadable."""
        try:
            facts = json.loads(self._store.read(LOCK, 1000))
        except (Gone, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def _check_mine(self) -> None:
        """Refuse to write after the lock file was removed, because there may be another writer."""
        if not self._is_mine():
            raise self._changed()

    def _changed(self) -> DatasetError:
        return DatasetError(f"another writer has changed {self} meanwhile", hint="check it, and run this again")

    def _busy(self) -> DatasetError:
        writer = self._writer()
        name = f"{writer['host']} since {writer['since']}" if {"host", "since"} <= set(writer) else "somebody"
        return DatasetError(
            f"{name} writes to {self}", hint=f"wait; if that writer has ended, remove {self}/{LOCK} and run this again"
        )

    def _check_version(self, after: int) -> None:
        """Refuse to write a new version unless the present version of the data set is the expected one."""
        present = self.manifest() if after or manifest.NAME in self._store.names() else None
        check_version(present, after, self)

    def _tidy(self, making: int = 0) -> None:
        """Remove all versions except the present one and the one that is being made; ``making`` 0 means none."""
        names = self._store.names()
        present = self.manifest().files if manifest.NAME in names else []
        folders = {file.name.partition("/")[0] for file in present} | ({f"v{making:04}"} if making else set())
        for name in names:
            if (VERSION.fullmatch(name) and name not in folders) or manifest.BEFORE.fullmatch(name):
                self._store.remove(name)

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """Yield a local path for writing a partition file, and upload the file afterwards."""
        path = self._work / "file"
        yield path
        self._check_mine()
        self._store.put(path, name)
        path.unlink()

    def mark(self, name: str) -> str:
        """Return a mark of a file, such as an ETag, that changes when the file is written. It is empty if the store has
        no such marks.
        """
        return self._store.mark(name)

    def commit(self, new: Manifest) -> None:
        """Make a version the newest one, and keep the manifest of the previous one.

        If the store supports conditions, the first manifest is only written where none exists, and a later one only
        over its predecessor.
        """
        self._check_mine()
        if new.version > 1:
            before = self.manifest()
            self._store.write(manifest.name_of(before.version), before.spelled())
        try:
            self._store.write(manifest.NAME, new.spelled(), new=new.version == 1, over=self._manifest_mark)
        except FileExistsError:
            # This writer itself may have written the manifest, if the store's answer was lost on the way.
            if self._store.read(manifest.NAME, 10**6) != new.spelled():
                raise self._changed() from None

    def retire(self, before: Manifest) -> None:
        """Remove the manifest and the files of an older version."""
        self._store.remove(manifest.name_of(before.version))
        for folder in {file.name.partition("/")[0] for file in before.files}:
            self._store.remove(folder)


def open_location(text: str | Path) -> DataLocation:
    """Open the location that a user names: a folder, or a URL.

    Args:
        text: A folder, or a URL with an fsspec driver.

    Raises:
        ConfigError: The URL is invalid.
        DatasetError: There is no driver for the URL.
    """
    if "://" not in str(text):
        return Folder(text)
    path = path_of(str(text))
    return RemoteFolder(str(text)) if path is None else Folder(path)
