"""The folder of a data set: what is in it, and one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ddlf.errors import DatasetError, DDLFError
from ddlf.record import size
from ddlf.storage import manifest
from ddlf.storage.manifest import Column, Manifest, PartitionFile

LOCK = ".ddlf-data.lock"
"""Beside the manifest; only in folders that ``ddlf data`` has made, so it also says whose leftovers may be removed."""
READ_BYTES = 2**20
MAX_HEADER_BYTES = 2**20
"""Of a partition file: a name, a type and a shape for each column."""
MAX_MANIFEST_BYTES = 2**30


Arrays = dict[str, np.ndarray[Any, Any]]


class Place(Protocol):
    """What whoever reads a data set uses of the place where it is."""

    def manifest(self) -> Manifest:
        """What is at this place."""

    def load(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """The columns of a partition file in memory; the bytes that are given are those that were checked.

        Args:
            file: From the manifest.
            columns: Those that it must have.

        Returns:
            Read-only arrays, a row for each sample.

        Raises:
            DatasetError: It is missing, or is not what the manifest says.
        """

    def mapped(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """The same on a disk of this machine, read row by row when it is used. It is checked when it is first mapped, and again when it changed."""


def open_place(text: str | Path) -> Place:
    """The place that a user names.

    Args:
        text: A folder.

    Raises:
        DatasetError: It is none.
    """
    return Folder(text)


class Folder:
    """A place on a disk of this machine, or on one that it has mounted.

    Args:
        text: As the user names it.

    Raises:
        DatasetError: It is a URL.
    """

    def __init__(self, text: str | Path) -> None:
        if "://" in str(text):
            raise DatasetError(f"{text} is a URL", hint="name a folder; mount the storage to use it as one")
        self.path = Path(text).expanduser()
        self._checked: dict[str, tuple[int, ...]] = {}

    def __str__(self) -> str:
        return str(self.path)

    def manifest(self) -> Manifest:
        """What is at this place.

        Raises:
            DatasetError: There is no data set, or its manifest is damaged.
        """
        path = self.path / manifest.NAME
        with explained(self.path, "read"):
            if not self.path.is_dir():
                raise DatasetError(f"there is no folder {self.path}", hint="make a data set with: ddlf data split")
            if not os.path.lexists(path):
                broken = (self.path / LOCK).exists()
                what = "a data set that was not finished" if broken else "no data set: there is no manifest.json"
                raise DatasetError(f"in {self.path} is {what}", hint="make it with: ddlf data split")
            if (file := self._plain(path)) > MAX_MANIFEST_BYTES:
                raise DatasetError(f"{path} has {size(file)}, which no manifest has", hint="bring it back from a copy")
            return manifest.read(path.read_bytes(), str(path))

    def load(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """See ``Place``."""
        path = self._found(file)
        with explained(path, "read"):
            whole = np.fromfile(path, np.uint8)
        return columns_of(whole, file, columns, str(path))

    def mapped(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """See ``Place``."""
        path = self._found(file)
        with explained(path, "read"):
            found = path.stat()
        now = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if self._checked.get(file.name) != now:
            self.check(file)
            self._checked[file.name] = now
        return self.arrays(file, columns)

    def arrays(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """The columns of a partition file, mapped from the disk: read when they are used, and not checked for damage.

        Args:
            file: From the manifest.
            columns: Those that it must have.

        Raises:
            DatasetError: It is missing, or not of the size, the form or the columns that the manifest says.
        """
        path = self._found(file)
        with explained(path, "read"):
            whole = np.memmap(path, np.uint8, "r")
        return _columns_of(whole, file, columns, str(path))

    def check(self, file: PartitionFile) -> None:
        """Compare every byte of a file with the manifest.

        Raises:
            DatasetError: It is missing or damaged.
        """
        path = self._found(file)
        with explained(path, "read"), open(path, "rb", buffering=0) as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != file.sha256:
            raise DatasetError(f"{path} is damaged: it has not the SHA-256 of the manifest", hint=COPY)

    def _found(self, file: PartitionFile) -> Path:
        path = self.path / file.name
        with explained(path, "read"):
            if not os.path.lexists(path):
                raise DatasetError(f"{path} is missing", hint=COPY)
            if path.parent.is_symlink():
                raise DatasetError(f"{path.parent} is a link", hint="a data set has its files in its own folder")
            found = self._plain(path)
        if found != file.nbytes:
            raise DatasetError(f"{path} has {found:,} bytes, not the {file.nbytes:,} of the manifest", hint=COPY)
        return path

    def _plain(self, path: Path) -> int:
        """The size of a file that is no link, device or folder."""
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            what = "a link" if stat.S_ISLNK(found.st_mode) else "no file"
            raise DatasetError(f"{path} is {what}", hint="a data set has its files in its own folder")
        return found.st_size

    def extra(self, found: Manifest) -> list[Path]:
        """Files in the folders of the manifest's files that it does not name."""
        named = {file.name for file in found.files}
        folders = {name.partition("/")[0] for name in named}
        there = [path for folder in sorted(folders) for path in sorted((self.path / folder).iterdir())]
        return [path for path in there if str(path.relative_to(self.path)) not in named]

    @contextlib.contextmanager
    def writing(self) -> Iterator[int]:
        """Be the only one who makes a data set here. What is half made is removed, whether now or by whoever begins next.

        Yields:
            Number of the version to make.

        Raises:
            DatasetError: The folder holds something, somebody else writes there, or it cannot be written.
        """
        from filelock import FileLock, Timeout

        with explained(self.path, "write to"):
            if os.path.lexists(self.path) and not self.path.is_dir():
                raise DatasetError(f"{self.path} is a file", hint="name a folder that is empty or not there yet")
            made = not self.path.exists()
            if not made and any(self.path.iterdir()) and not (self.path / LOCK).is_file():
                raise DatasetError(f"{self.path} is not empty, and nothing is overwritten", hint="name another folder")
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(self.path / LOCK, timeout=0):
                    if os.path.lexists(self.path / manifest.NAME):
                        raise DatasetError(f"in {self.path} is a data set already", hint="name another folder")
                    self._tidy()
                    try:
                        yield 1
                    except BaseException:
                        self._tidy()
                        raise
            except Timeout:
                raise DatasetError(
                    f"somebody else writes to {self.path} just now", hint="wait, or name another folder"
                ) from None
            except BaseException:
                if made:  # nothing is left where nothing was
                    (self.path / LOCK).unlink(missing_ok=True)
                    with contextlib.suppress(OSError):
                        self.path.rmdir()
                raise

    def _tidy(self) -> None:
        for path in self.path.glob("v[0-9][0-9][0-9][0-9]*"):
            shutil.rmtree(path)
        for path in self.path.glob(f".{manifest.NAME}-*"):
            path.unlink()

    def commit(self, new: Manifest) -> None:
        """Make a version the one that there is, by one rename, when all of its files are on the disk."""
        for folder in {str(Path(file.name).parent) for file in new.files}:
            synced(self.path / folder)
        temporary = self.path / f".{manifest.NAME}-{secrets.token_hex(4)}"
        with open(temporary, "xb") as file:
            file.write(new.spelled())
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self.path / manifest.NAME)
        synced(self.path)


COPY = "bring it back from a copy, or split the data set again"


def columns_of(whole: np.ndarray[Any, Any], file: PartitionFile, columns: Mapping[str, Column], where: str) -> Arrays:
    """The arrays in the bytes of a partition file, which are compared with the manifest. Read-only.

    Args:
        whole: All bytes of the file, as uint8.
        file: From the manifest.
        columns: Those that it must have.
        where: Its name, for errors.

    Raises:
        DatasetError: It is damaged, or has other columns.
    """
    if hashlib.sha256(whole.data).hexdigest() != file.sha256:
        raise DatasetError(f"{where} is damaged: it has not the SHA-256 of the manifest", hint=COPY)
    whole.flags.writeable = False
    return _columns_of(whole, file, columns, where)


def _columns_of(whole: np.ndarray[Any, Any], file: PartitionFile, columns: Mapping[str, Column], where: str) -> Arrays:
    """Views of the arrays in a file of the safetensors format: 8 bytes with the length of the header, the header as JSON, the bytes of the arrays."""
    import json

    try:
        length = int.from_bytes(whole[:8].tobytes(), "little")
        if length > min(MAX_HEADER_BYTES, len(whole) - 8):
            raise ValueError("its header is too long")
        head = json.loads(whole[8 : 8 + length].tobytes())
        head.pop("__metadata__", None)
        if set(head) != set(columns):
            raise ValueError(f"it has {', '.join(sorted(head))}")
        found = {}
        for name, column in columns.items():
            entry, kind = head[name], np.dtype(column.dtype)
            code = "BOOL" if kind.kind == "b" else f"{kind.kind.upper()}{8 * kind.itemsize}"
            start, stop = entry["data_offsets"]
            wanted = [file.samples, *column.shape]
            if entry["dtype"] != code or entry["shape"] != wanted or stop - start != file.samples * column.row_bytes:
                raise ValueError(f"{name} is {entry['dtype']} of shape {entry['shape']}")
            if not 0 <= start <= stop <= len(whole) - 8 - length:
                raise ValueError(f"{name} is not in it")
            found[name] = whole[8 + length + start : 8 + length + stop].view(kind.newbyteorder("<")).reshape(wanted)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DatasetError(f"{where} has other columns than the manifest ({error})", hint=COPY) from None
    return found


def synced(folder: Path) -> None:
    """Wait until a folder's names are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot, and need not
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained(path: Path, doing: str, *, need: int = 0) -> Iterator[None]:
    """Turn what the operating system says into a sentence.

    Args:
        path: What it happens to.
        doing: What is done, as ``"write to"``.
        need: Bytes that are wanted, for a full disk.

    Raises:
        DatasetError: In place of any OSError that is not DDLF's.
    """
    try:
        yield
    except DDLFError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            much = f"; {size(need)} are needed" if need else ""
            raise DatasetError(f"no space in {path}{much}", hint="free some, or name another folder") from error
        hint = "name another one" if error.errno == errno.EROFS else "look at its owner and mode"
        raise DatasetError(f"cannot {doing} {path}: {error.strerror or error}", hint=hint) from error
