"""A place at a URL. What is read of it goes through the cache of this machine; what is written is made on a disk here and put there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from ddlf.errors import ConfigError, DatasetDamaged, DatasetError
from ddlf.record import size
from ddlf.storage import manifest
from ddlf.storage.cache import Cache
from ddlf.storage.explained import explained
from ddlf.storage.files import COPY, Arrays, Bytes, columns_of, mapped_columns
from ddlf.storage.manifest import Column, Manifest, PartitionFile
from ddlf.storage.place import LOCK, MAX_MANIFEST_BYTES, check_kept, check_room, check_version
from ddlf.storage.store import Gone, Store

VERSION = re.compile(r"v\d{4,9}")


class Bucket:
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
        self._checked: set[str] = set()

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
            return found
        name = manifest.name_of(version)
        try:
            return self._manifest(name)
        except Gone:
            check_kept(name, version, found.version, [], self)
            raise

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
        path = self._near(file)
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

    def _near(self, file: PartitionFile) -> Path | None:
        """The file in the cache; its bytes are still to be compared."""
        try:
            return self._cache.path(
                file.sha256, file.nbytes, lambda path: self._store.fetch(file.name, file.nbytes, path)
            )
        except Gone:
            raise DatasetDamaged(f"{self._said(file)} is missing", hint=COPY) from None

    # -- writing ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, *, after: int = 0) -> Iterator[None]:
        """See ``Place``. Who writes is named in a file of the store; one that was killed leaves it there."""
        self._check_version(after)
        if not after and [name for name in self._store.names() if name != LOCK and not VERSION.fullmatch(name)]:
            raise DatasetError(f"{self} is not empty, and nothing is overwritten", hint="name another place")
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        mine = json.dumps(who | {"key": secrets.token_hex(8)}).encode()
        try:
            self._store.write(LOCK, mine, new=True)
        except FileExistsError:
            try:
                other = json.loads(self._store.read(LOCK, 1000))
                name = f"{other['host']} since {other['since']}"
            except (Gone, ValueError, KeyError, TypeError):
                name = "somebody"
            raise DatasetError(
                f"{name} writes to {self}", hint=f"wait; if it was broken off, remove {self}/{LOCK} and run this again"
            ) from None
        try:
            kept = self._check_version(after)
            self._tidy(kept)
            try:
                yield
            except BaseException:
                self._tidy(kept)
                raise
        finally:
            self._store.remove(LOCK)

    def _check_version(self, after: int) -> Manifest | None:
        """What is there, if that is of this version."""
        found = self.manifest() if after or manifest.NAME in self._store.names() else None
        check_version(found, after, self)
        return found

    def _tidy(self, kept: Manifest | None) -> None:
        folders = {file.name.partition("/")[0] for file in kept.files} if kept else set()
        for name in self._store.names():
            if (VERSION.fullmatch(name) and name not in folders) or manifest.BEFORE.fullmatch(name):
                self._store.remove(name)

    @contextlib.contextmanager
    def scratch(self, need: int) -> Iterator[Path]:
        """See ``Place``."""
        where = Path(tempfile.gettempdir())
        with explained(where, "write to", need=need):
            check_room(where, need)
            with tempfile.TemporaryDirectory(prefix="ddlf-") as folder:
                yield Path(folder)

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """See ``Place.new``."""
        with self.scratch(0) as folder:
            path = folder / "file"
            yield path
            self._store.put(path, name)

    def commit(self, new: Manifest) -> None:
        """See ``Place.commit``. The first manifest of a place is written only where there is none; a store that can do so sees to it."""
        if new.version > 1:
            before = self.manifest()
            self._store.write(manifest.name_of(before.version), before.spelled())
        try:
            self._store.write(manifest.NAME, new.spelled(), new=new.version == 1)
        except FileExistsError:
            raise DatasetError(f"in {self} is a data set by now", hint="name another place") from None

    def retire(self, before: Manifest) -> None:
        """See ``Place``."""
        self._store.remove(manifest.name_of(before.version))
        for folder in {file.name.partition("/")[0] for file in before.files}:
            self._store.remove(folder)


def path_of(url: str) -> Path | None:
    """The folder that a ``file://`` URL names; None for others.

    Raises:
        ConfigError: It is on another machine.
    """
    found = urlsplit(url)
    if found.scheme != "file":
        return None
    if found.netloc not in ("", "localhost"):
        raise ConfigError(f"{url} names a folder of another machine", hint="mount it, and name the folder here")
    return Path(unquote(found.path))
