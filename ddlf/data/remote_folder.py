"""A place at a URL. What is read of it goes through the cache of this machine; what is written is made on a disk here and put there."""

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
from ddlf.data.manifest import Column, Manifest, PartitionFile
from ddlf.data.os_errors import explained
from ddlf.data.partition_file import COPY, Arrays, Bytes, columns_of, mapped_columns
from ddlf.data.place import LOCK, MAX_MANIFEST_BYTES, check_kept, check_version
from ddlf.data.store import Gone, Store
from ddlf.data.unfinished import Unfinished
from ddlf.errors import DatasetDamaged, DatasetError
from ddlf.events.record import size

VERSION = re.compile(r"v\d{4,9}")
KEY = "key"
"""In the folder here: what the name in the store has that was put there from it."""


class RemoteFolder:
    """A place that a driver of fsspec reaches.

    Args:
        url: Such as ``s3://bucket/folder``.
        cache: Where partition files are kept meanwhile; None is the user's usual one.
        store: What is at the URL; None is what a driver of fsspec finds there.

    Raises:
        ConfigError: The URL cannot be used.
        DatasetError: There is no driver for it.
    """

    def __init__(self, url: str, cache: Cache | None = None, store: Any = None) -> None:
        self._store = store or Store(url)
        self._cache = cache or Cache()
        self._work = self._cache.folder / "unfinished" / hashlib.sha256(str(self).encode()).hexdigest()[:16]
        self._seen, self._key = "", ""
        self._checked: set[str] = set()
        self._newest: Manifest | None = None
        self._beside: frozenset[str] | None = None

    def __str__(self) -> str:
        return str(self._store)

    def close(self) -> None:
        """See ``Place``."""
        self._store.close()

    def interrupt(self) -> None:
        """See ``Place``."""
        self._store.interrupt()

    def manifest(self, version: int = 0) -> Manifest:
        """See ``Place``."""
        try:
            found = self._manifest(manifest.NAME)
        except Gone:
            raise DatasetError(
                f"in {self} is no data set: there is no {manifest.NAME}", hint="make it with: ddlf data split"
            ) from None
        if version in (0, found.version):
            return self._kept(found)
        name = manifest.name_of(version)
        try:
            return self._kept(self._manifest(name))
        except Gone:
            check_kept(name, version, found.version, [], self)
            raise

    def _kept(self, found: Manifest) -> Manifest:
        """The same. Its files are those that are read from now on, each as often as any other."""
        if found != self._newest:
            self._newest, self._beside = found, None
        return found

    def _manifest(self, name: str) -> Manifest:
        data = self._store.read(name, 10**6)
        if len(data) > MAX_MANIFEST_BYTES:
            raise DatasetError(f"{self}/{name} has {size(len(data))}", hint=COPY)
        return manifest.read(data, f"{self}/{name}")

    def load(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """See ``Place``."""
        whole = self._whole(file)
        if hashlib.sha256(whole.data).hexdigest() != file.sha256:
            # The disk or the store gave something else: once more from the store, and that has to be right.
            self._cache.drop(file.sha256)
            whole = self._whole(file)
        return columns_of(whole, file, columns, self._said(file))

    def mapped(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """See ``Place``. Without room in the cache it is in memory."""
        path = self._near(file, mapped=True)
        if path is None:
            return self.load(file, columns)
        if file.sha256 not in self._checked:
            self.load(file, columns)
            self._checked.add(file.sha256)
        return mapped_columns(path, file, columns, self._said(file))

    def here(self, found: Manifest) -> list[bool]:
        """See ``Place``: what is in a store is there for all."""
        return [True] * len(found.files)

    def check(self, file: PartitionFile, columns: Mapping[str, Column]) -> None:
        """See ``Place``. The store is asked, not the cache."""
        columns_of(self._read(file), file, columns, self._said(file))

    def extra(self, found: Manifest) -> list[str]:
        """See ``Place``."""
        named = {file.name for file in found.files}
        folders = sorted({name.partition("/")[0] for name in named})
        try:
            there = [name for folder in folders for name in self._store.names(folder)]
        except DatasetError:  # a web server need not list what it has
            return []
        return [f"{self}/{name}" for name in there if name not in named]

    def _said(self, file: PartitionFile) -> str:
        return f"{self}/{file.name}"

    def _whole(self, file: PartitionFile) -> Bytes:
        path = self._near(file)
        return self._read(file) if path is None else np.fromfile(path, np.uint8)

    def _read(self, file: PartitionFile) -> Bytes:
        try:
            return np.frombuffer(self._exactly(file, self._store.read(file.name, file.nbytes)), np.uint8)
        except Gone:
            raise DatasetDamaged(f"{self._said(file)} is missing", hint=COPY) from None

    def _exactly(self, file: PartitionFile, data: bytes) -> bytes:
        if len(data) != file.nbytes:
            raise DatasetDamaged(
                f"{self._said(file)} has {len(data):,} bytes, not the {file.nbytes:,} of the manifest", hint=COPY
            )
        return data

    def _near(self, file: PartitionFile, *, mapped: bool = False) -> Path | None:
        """The file in the cache; its bytes are still to be compared. Those that are mapped have to be there for a while, whatever goes."""
        if self._beside is None:
            self._beside = frozenset(each.sha256 for each in self._newest.files) if self._newest else frozenset()
        try:
            return self._cache.path(
                file.sha256,
                file.nbytes,
                lambda path: self._store.fetch(file.name, file.nbytes, path),
                beside=() if mapped else self._beside,
                ends=self._store.ending(),
            )
        except Gone:
            raise DatasetDamaged(f"{self._said(file)} is missing", hint=COPY) from None

    # -- writing ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, *, after: int = 0, plan: Mapping[str, str] | None = None) -> Iterator[Unfinished]:
        """See ``Place``. Who writes is named in a file of the store, which one that was killed leaves there: it is known again by its folder here."""
        self._check_version(after)
        if not after and [name for name in self._store.names() if name != LOCK and not VERSION.fullmatch(name)]:
            raise DatasetError(f"{self} is not empty, and nothing is overwritten", hint="name another place")
        with explained(self._work, "write to"):
            self._work.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._alone():
                left = Unfinished(self._work, plan)
                try:
                    with self._named():
                        self._seen = self._store.mark(manifest.NAME) if after else ""
                        self._check_version(after)
                        self._tidy(after + 1 if left.goes_on else 0)
                        left.begin()
                        try:
                            yield left
                        except BaseException as error:
                            if not left.lasts(error) and self._is_mine():
                                self._tidy()
                            raise
                except BaseException as error:
                    if not left.lasts(error):
                        shutil.rmtree(self._work)
                    raise
                shutil.rmtree(self._work)  # last: without it a name in the store would be nobody's

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the only one on this machine."""
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
        """Have the name of this process in the store, where nobody else's is."""
        path = self._work / KEY
        if not path.exists():
            path.write_text(secrets.token_hex(8))
        self._key = path.read_text()
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            self._store.write(LOCK, json.dumps(who | {"key": self._key}).encode(), new=True)
        except FileExistsError:
            if not self._is_mine():  # else it is of a process that was killed here
                raise self._busy() from None
        try:
            yield
        except BaseException:
            with contextlib.suppress(DatasetError):  # who cannot reach the store is known again
                self._unname()
            raise
        self._unname()

    def _unname(self) -> None:
        if self._is_mine():
            self._store.remove(LOCK)

    def _is_mine(self) -> bool:
        return self._writer().get("key") == self._key

    def _writer(self) -> dict[str, Any]:
        """Who writes to the store, as far as that is known."""
        try:
            found = json.loads(self._store.read(LOCK, 1000))
        except (Gone, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _check_mine(self) -> None:
        """Refuse to write where somebody else does by now, who removed the name of this one."""
        if not self._is_mine():
            raise self._changed()

    def _changed(self) -> DatasetError:
        return DatasetError(f"somebody else has changed {self} meanwhile", hint="look at it, and run this again")

    def _busy(self) -> DatasetError:
        other = self._writer()
        name = f"{other['host']} since {other['since']}" if {"host", "since"} <= set(other) else "somebody"
        return DatasetError(
            f"{name} writes to {self}", hint=f"wait; if it was broken off, remove {self}/{LOCK} and run this again"
        )

    def _check_version(self, after: int) -> None:
        """Refuse what is not there in this version."""
        found = self.manifest() if after or manifest.NAME in self._store.names() else None
        check_version(found, after, self)

    def _tidy(self, making: int = 0) -> None:
        """Remove all but the version that there is, and what is there of the one that is being made; 0 for none."""
        names = self._store.names()
        kept = self.manifest().files if manifest.NAME in names else []
        folders = {file.name.partition("/")[0] for file in kept} | ({f"v{making:04}"} if making else set())
        for name in names:
            if (VERSION.fullmatch(name) and name not in folders) or manifest.BEFORE.fullmatch(name):
                self._store.remove(name)

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """See ``Place.new``."""
        path = self._work / "file"
        yield path
        self._check_mine()
        self._store.put(path, name)
        path.unlink()

    def mark(self, name: str) -> str:
        """See ``Place``."""
        return self._store.mark(name)

    def commit(self, new: Manifest) -> None:
        """See ``Place.commit``. A store that can do so writes the first manifest only where there is none, a later one only over the one before."""
        self._check_mine()
        if new.version > 1:
            before = self.manifest()
            self._store.write(manifest.name_of(before.version), before.spelled())
        try:
            self._store.write(manifest.NAME, new.spelled(), new=new.version == 1, over=self._seen)
        except FileExistsError:
            # It may have been this one, whose answer was lost on the way.
            if self._store.read(manifest.NAME, 10**6) != new.spelled():
                raise self._changed() from None

    def retire(self, before: Manifest) -> None:
        """See ``Place``."""
        self._store.remove(manifest.name_of(before.version))
        for folder in {file.name.partition("/")[0] for file in before.files}:
            self._store.remove(folder)
