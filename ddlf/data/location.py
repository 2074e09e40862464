"""The location of a data set, which is a folder or a URL: the interface of all locations, and a folder as a location.
A location has one writer at a time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ddlf.data import manifest
from ddlf.data.manifest import Column, Manifest, PartitionFile
from ddlf.data.os_errors import explained
from ddlf.data.partition_file import COPY, Arrays, columns_of, mapped_columns
from ddlf.errors import DatasetDamaged, DatasetError
from ddlf.events.record import size

LOCK = ".ddlf-data.lock"
"""Lock file beside the manifest. Only ``ddlf data`` makes this file, so it also shows that unfinished files in the
folder may be removed."""
READ_BYTES = 2**20
MAX_MANIFEST_BYTES = 2**30
WORK = "v0000"
"""Folder beside the versions, for data that is only needed while a version is made."""
PLAN, FILES, HEAPS = "plan.json", "files.jsonl", "heaps.json"
"""Notes of an unfinished version: its plan, its finished files, and the heaps of its first pass."""
FREE_BYTES = 32 * 10**6
"""Number of bytes to leave free on a disk."""


class Unfinished:
    """A folder for the unfinished version of a data set that is being written: its finished files, and notes about
    them. If the writer is interrupted, a later one can continue.

    Args:
        folder: The folder; ``begin`` creates it.
        plan: Describes the source and the result, as texts by name. Without a plan, the work cannot be continued.

    Attributes:
        folder: The folder.
        goes_on: Whether the folder has unfinished work with the same plan.
        other: Names of the texts in which the plan of the unfinished work differs.
    """

    def __init__(self, folder: Path, plan: Mapping[str, str] | None = None) -> None:
        self.folder, self._plan = folder, dict(plan or {})
        noted = read_note(folder / PLAN)
        self.goes_on = bool(plan) and noted == self._plan
        noted_plan = noted if isinstance(noted, dict) else {}
        self.other = [name for name, text in self._plan.items() if noted_plan and noted_plan.get(name) != text]

    def begin(self) -> None:
        """Begin the work: create the folder, and write the plan (a description of source and result)."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._plan and not self.goes_on:
            write_note(self.folder / PLAN, self._plan)

    def lasts(self, error: BaseException) -> bool:
        """Return whether a later writer can continue the work after this error."""
        noted = any((self.folder / name).exists() for name in (FILES, HEAPS))
        return noted and (self.folder / PLAN).exists() and isinstance(error, KeyboardInterrupt | DatasetError)

    @contextlib.contextmanager
    def watched(self, say: Callable[[], None]) -> Iterator[None]:
        """Call ``say``, which tells the user, if the ``with`` block fails and a later call can continue its work."""
        try:
            yield
        except BaseException as error:
            if self.lasts(error):
                say()
            raise

    def forget(self) -> None:
        """Remove the plan, so that no writer continues the work."""
        (self.folder / PLAN).unlink(missing_ok=True)

    def files(self) -> list[tuple[PartitionFile, str]]:
        """Return the finished partition files in order, each with its ``DataLocation.mark``."""
        files = []
        with contextlib.suppress(OSError, ValueError, TypeError):  # the last line may be incomplete
            for line in (self.folder / FILES).read_text().splitlines():
                mark, facts = json.loads(line)
                files.append((PartitionFile(**facts), str(mark)))
        return files

    def add(self, files: Iterable[tuple[PartitionFile, str]], *, anew: bool = False) -> None:
        """Record finished partition files. ``anew`` replaces all earlier records."""
        with open(self.folder / FILES, "w" if anew else "a") as file:
            file.writelines(json.dumps([mark, asdict(entry)]) + "\n" for entry, mark in files)
            file.flush()
            os.fsync(file.fileno())


def read_note(path: Path) -> Any:
    """Return the content of a note, a small JSON file about unfinished work; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def write_note(path: Path, facts: Any) -> None:
    """Write a note, a small JSON file about unfinished work, so that readers see either the old or the new one."""
    temporary = path.with_suffix(".new")
    with open(temporary, "w") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class DataLocation(Protocol):
    """The interface of the location of a data set, a folder or a URL. Each process opens its own ``DataLocation``, with
    its machine's access rights.
    """

    def manifest(self, version: int = 0) -> Manifest:
        """Return the manifest (content list) of the data set at this location.

        Args:
            version: Number of the version; 0 for the newest.

        Raises:
            DatasetError: There is no data set, the version no longer exists, or the manifest is damaged.
        """

    def load(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """Read the columns of a partition file into memory. The returned bytes have been checked.

        Args:
            file: The file's entry in the manifest.
            columns: Columns that the file must have.

        Returns:
            Read-only arrays, with a row for each sample.

        Raises:
            DatasetError: The file is missing, or differs from the manifest.
        """

    def mapped(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """Return the columns of a partition file, mapped from a disk of this machine, so that rows are read on use.

        The file is checked when it is first mapped, and again after it has changed.
        """

    def availability(self, version: Manifest) -> Sequence[bool]:
        """Return a list that tells for each file of a version whether this machine has it, without reading the files."""

    def check(self, file: PartitionFile, columns: Mapping[str, Column]) -> None:
        """Compare every byte of a file at the location with the manifest.

        Raises:
            DatasetError: The file is missing or damaged.
        """

    def extra(self, version: Manifest) -> Sequence[object]:
        """Return the files in the version's folders that the manifest does not name."""

    def close(self) -> None:
        """End the waits of threads for this location with an error, and refuse later requests."""

    def interrupt(self) -> None:
        """End the waits of threads for this location with an error. Later requests work again."""

    def writing(
        self, *, after: int = 0, plan: Mapping[str, str] | None = None
    ) -> contextlib.AbstractContextManager[Unfinished]:
        """Let the caller write a data set to this location, as its only writer, within the ``with`` block.

        If the writing is interrupted and has a plan, the finished files stay until a writer with another plan begins.
        Otherwise they are removed.

        Args:
            after: Version of the present data set; 0 if there must be none.
            plan: The plan for ``Unfinished``.

        Returns:
            The work of an earlier writer with the same plan, in a folder on this machine.

        Raises:
            DatasetError: The location holds other files, has another writer, or cannot be written.
        """

    def new(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Yield a local path for writing a partition file. After the block, the file is durable at the location."""

    def mark(self, name: str) -> str:
        """Return a mark of a file, such as an ETag, that changes when the file is written. It is empty if the
        location has no such marks.
        """

    def commit(self, new: Manifest) -> None:
        """Make a version the newest one, in one step, after all its files are written. ``new`` is its manifest.

        The manifest of the previous version is kept beside it.
        """

    def retire(self, before: Manifest) -> None:
        """Remove the manifest and the files of a version that is no longer the newest."""


class Folder:
    """A location that is a folder on a local or mounted disk.

    Args:
        text: The user's name of the folder.
    """

    def __init__(self, text: str | Path) -> None:
        self.path = Path(text).expanduser()
        self._checked: dict[str, tuple[int, ...]] = {}

    def __str__(self) -> str:
        return str(self.path)

    def close(self) -> None:
        """Do nothing, because no thread waits for a disk."""

    def interrupt(self) -> None:
        """Do nothing, because no thread waits for a disk."""

    def manifest(self, version: int = 0) -> Manifest:
        """Return the manifest of a version; 0 for the newest."""
        newest = self._read(manifest.NAME)
        if version in (0, newest.version):
            return newest
        return self._read(check_kept(manifest.name_of(version), version, newest.version, os.listdir(self.path), self))

    def _read(self, name: str) -> Manifest:
        path = self.path / name
        with explained(self.path, "read"):
            if self.path.is_file():
                raise DatasetError(
                    f"{self.path} is a file, not a folder of partition files",
                    hint=f"make partition files of it: ddlf data split {self.path} FOLDER",
                )
            if not self.path.is_dir():
                raise DatasetError(f"there is no folder {self.path}", hint="make a data set with: ddlf data split")
            if not os.path.lexists(path):
                if (self.path / LOCK).exists():
                    problem, hint = "an unfinished data set", "run the same ddlf data split again to continue"
                else:
                    problem, hint = "no data set: there is no manifest.json", "make it with: ddlf data split"
                raise DatasetError(f"{self.path} has {problem}", hint=hint)
            if (file := self._plain(path)) > MAX_MANIFEST_BYTES:
                raise DatasetError(
                    f"{path} has {size(file)}, which is too large for a manifest", hint="restore it from a copy"
                )
            return manifest.read(path.read_bytes(), str(path))

    def load(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """Read the columns of a partition file into memory, and check every byte."""
        path = self._checked_path(file)
        with explained(path, "read"):
            content = np.fromfile(path, np.uint8)
        return columns_of(content, file, columns, str(path))

    def mapped(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """Map the columns of a partition file. It is checked the first time, and again if the file has changed."""
        path = self._checked_path(file)
        with explained(path, "read"):
            about = path.stat()
        now = (about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        if self._checked.get(file.name) != now:
            self.check(file, columns)
            self._checked[file.name] = now
        return self.arrays(file, columns)

    def availability(self, version: Manifest) -> list[bool]:
        """Return a list that tells for each file of a version whether the folder has a file of that name."""
        folders = {file.name.partition("/")[0] for file in version.files}
        names = {f"{folder}/{name}" for folder in folders for name in _names(self.path / folder)}
        return [file.name in names for file in version.files]

    def arrays(self, file: PartitionFile, columns: Mapping[str, Column]) -> Arrays:
        """Map the columns of a file after checking its size, form and columns, but not its bytes."""
        path = self._checked_path(file)
        return mapped_columns(path, file, columns, str(path))

    def check(self, file: PartitionFile, columns: Mapping[str, Column]) -> None:
        """Compare every byte of a file with the manifest."""
        path = self._checked_path(file)
        with explained(path, "read"), open(path, "rb", buffering=0) as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != file.sha256:
            raise DatasetDamaged(f"{path} is damaged: its SHA-256 is not that of the manifest", hint=COPY)
        self.arrays(file, columns)

    def _checked_path(self, file: PartitionFile) -> Path:
        path = self.path / file.name
        with explained(path, "read"):
            if not os.path.lexists(path):
                raise DatasetDamaged(f"{path} is missing", hint=COPY)
            if path.parent.is_symlink():
                raise DatasetError(f"{path.parent} is a link", hint="a data set has its files in its own folder")
            nbytes = self._plain(path)
        if nbytes != file.nbytes:
            raise DatasetDamaged(f"{path} has {nbytes:,} bytes, not the {file.nbytes:,} of the manifest", hint=COPY)
        return path

    def _plain(self, path: Path) -> int:
        """Return the size of a file, after checking that it is a regular file, not a link, a device or a folder."""
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            kind = "a link" if stat.S_ISLNK(about.st_mode) else "no file"
            raise DatasetError(f"{path} is {kind}", hint="a data set has its files in its own folder")
        return about.st_size

    def extra(self, version: Manifest) -> list[Path]:
        """Return the files in the version's folders that the manifest does not name."""
        named = {file.name for file in version.files}
        folders = {name.partition("/")[0] for name in named}
        paths = [path for folder in sorted(folders) for path in sorted((self.path / folder).glob("*"))]
        return [path for path in paths if str(path.relative_to(self.path)) not in named]

    @contextlib.contextmanager
    def writing(self, *, after: int = 0, plan: Mapping[str, str] | None = None) -> Iterator[Unfinished]:
        """Let the caller write a data set into this folder, as its only writer, within the ``with`` block."""
        from filelock import FileLock, Timeout

        with explained(self.path, "write to"):
            if after:
                self.manifest()
            if os.path.lexists(self.path) and not self.path.is_dir():
                raise DatasetError(f"{self.path} is a file", hint="name an empty or a new folder")
            is_new = not self.path.exists()
            if not (is_new or after) and any(self.path.iterdir()) and not (self.path / LOCK).is_file():
                raise DatasetError(f"{self.path} is not empty, and DDLF overwrites nothing", hint="name another folder")
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(self.path / LOCK, timeout=0):
                    check_version(self._present_manifest(after), after, self)
                    unfinished = Unfinished(self.path / WORK, plan)
                    self._tidy(after + 1 if unfinished.goes_on else 0)
                    try:
                        unfinished.begin()
                        yield unfinished
                    except BaseException as error:
                        if not unfinished.lasts(error):
                            self._tidy()
                        raise
                    shutil.rmtree(unfinished.folder)
            except Timeout:
                raise DatasetError(
                    f"another process is writing to {self.path}", hint="wait, or name another folder"
                ) from None
            except BaseException:
                if is_new and os.listdir(self.path) == [LOCK]:  # leave no empty folder behind
                    (self.path / LOCK).unlink(missing_ok=True)
                    with contextlib.suppress(OSError):
                        self.path.rmdir()
                raise

    def _present_manifest(self, after: int) -> Manifest | None:
        return self.manifest() if after or os.path.lexists(self.path / manifest.NAME) else None

    def _tidy(self, making: int = 0) -> None:
        """Remove all versions except the present one and the one that is being made; ``making`` 0 means none."""
        present = self._present_manifest(0)
        folders = {file.name.partition("/")[0] for file in present.files} if present else set()
        folders |= {WORK, f"v{making:04}"} if making else set()
        for path in self.path.glob("v[0-9][0-9][0-9][0-9]*"):
            if path.name not in folders:
                shutil.rmtree(path)
        for path in self.path.iterdir():
            if path.name.startswith(f".{manifest.NAME}-") or manifest.BEFORE.fullmatch(path.name):
                path.unlink()

    def mark(self, name: str) -> str:
        """Return an empty mark: unlike a store, a disk has no reliable mark that changes with a file. Readers compare
        the bytes instead.
        """
        return ""

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """Yield the path of a partition file, and flush the file to the disk afterwards."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        yield path
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())

    def commit(self, new: Manifest) -> None:
        """Make a version the newest one, and keep the manifest of the previous one."""
        for folder in {str(Path(file.name).parent) for file in new.files}:
            synced(self.path / folder)
        if new.version > 1:
            before = self.manifest()
            self._write(manifest.name_of(before.version), before)
        self.put(new)

    def put(self, new: Manifest) -> None:
        """Replace the manifest file of the data set in one step, so that readers see either the old or the new one."""
        self._write(manifest.NAME, new)
        synced(self.path)

    def _write(self, name: str, content: Manifest) -> None:
        temporary = self.path / f".{manifest.NAME}-{secrets.token_hex(4)}"
        with open(temporary, "xb") as file:
            file.write(content.spelled())
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self.path / name)

    def retire(self, before: Manifest) -> None:
        """Remove the manifest and the files of an older version."""
        (self.path / manifest.name_of(before.version)).unlink(missing_ok=True)
        for folder in {file.name.partition("/")[0] for file in before.files}:
            shutil.rmtree(self.path / folder)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # an error will appear when a file is read
        return []


def synced(folder: Path) -> None:
    """Flush a folder's list of file names to the disk, so that new files survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network file systems do not support this, and need no flush
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_kept(name: str, version: int, newest: int, names: Sequence[str], where: object) -> str:
    """Return the file name of the manifest of a version, or refuse a version that no longer exists or does not exist
    here yet.

    Returns:
        The name of the manifest.

    Raises:
        DatasetError: The version does not exist here.
    """
    if name not in names:
        if version > newest:
            raise DatasetError(
                f"{where} has version {newest} of the data set, but version {version} is needed",
                hint="send this version to the machine: ddlf data send",
            )
        raise DatasetError(
            f"version {version} of the data set in {where} no longer exists: it was repartitioned since",
            hint="start a new run, or resume from a checkpoint of the present version",
        )
    return name


def check_version(present: Manifest | None, after: int, where: object) -> None:
    """Refuse to write a new version unless the present version of the data set is the expected one.

    Raises:
        DatasetError: There is already a data set, or another version.
    """
    if present is not None and not after:
        raise DatasetError(f"{where} already has a data set", hint="name another place")
    if present is not None and present.version != after:
        raise DatasetError(f"another writer has changed {where} meanwhile", hint="check it, and run this again")


def check_room(folder: Path, need: int) -> None:
    """Refuse to write more than the disk can hold, if the disk reports its free bytes.

    Raises:
        OSError: The error that the full disk itself would cause later.
    """
    total, _, free = shutil.disk_usage(folder)
    if total and free < need + FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
