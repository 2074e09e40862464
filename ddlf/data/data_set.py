"""A data set at a location, used file by file for training, or as arrays. Runs on the master and on workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ddlf.algorithms.reading_order import Global, Shuffle, Window
from ddlf.data.location import DataLocation
from ddlf.data.manifest import Column, Manifest
from ddlf.data.partition_file import Arrays
from ddlf.data.remote_folder import open_location
from ddlf.errors import DatasetDamaged, DatasetError
from ddlf.events.record import size

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Decode = Callable[[dict[str, Any]], dict[str, Array]]
SOME = 64
"""Number of samples to decode at a time for a check."""
MAX_SOURCES = 2_000
"""Maximum number of files with their own fingerprint in a checkpoint, of about 40 bytes each. With more files, a
resumed run only compares a fingerprint of all files together."""


class Description(NamedTuple):
    """The text of ``ddlf data info`` about a data set.

    Args:
        lines: Lines for people.
        facts: The same as JSON data; None if there is only the text.
    """

    lines: Sequence[str]
    facts: Mapping[str, Any] | None = None


class DataSet(Mapping[str, Array]):
    """A data set of partition files. It is also a read-only mapping from column names to arrays, in the order of ids.

    Data is checked before use: every byte of a file is checked before any of its samples is returned. If the data set
    has one partition file, its columns are mapped from the disk. Otherwise a column is read into memory at its first
    use.

    Args:
        location: Folder that ``ddlf data split`` has written. A subclass without a location gives its manifest instead.
        decode: Turns a sample, a dict of its columns, into the arrays of a training sample, by name. None if the
            columns already are the training data.

    Attributes:
        manifest: The manifest of the version that was opened, even if there is a newer one by now.
        on_disk: Whether single rows can be read, without a whole partition file in memory.
        in_order: Whether only sequential reading is fast.
        inexact: The reason why the trained samples are unknown; empty if they are known.
        notes: Sentences for the log about how the data is read.
        sources: A fingerprint of each file that somebody else has written, by name, so that a resumed run can name the
            files that have changed. Empty for partition files, and for more than ``MAX_SOURCES`` files.

    Raises:
        DatasetError: There is no data set at the location.
    """

    on_disk, in_order, inexact = True, False, ""
    notes: Sequence[str] = ()
    sources: Mapping[str, str] = MappingProxyType({})

    def __init__(self, location: str | Path | Manifest, decode: Decode | None = None) -> None:
        if isinstance(location, Manifest):
            self.manifest = location
        else:
            self._location = open_location(location)
            self.manifest = self._location.manifest()
        self._decode = decode
        self._arrays: dict[str, Array] = {}
        self._damaged: dict[int, str] = {}
        self._versions = {0: self, self.manifest.version: self}
        self._available: Sequence[bool] = ()
        self._fallbacks: list[DataLocation] = []

    @classmethod
    def described(cls, location: Any, shuffle: Shuffle, workers: int) -> Description:
        """Return the text of ``ddlf data info`` about the data set at a location.

        Args:
            location: The argument of the class.
            shuffle: The rule that shuffles its samples, which decides the memory and disk of a worker.
            workers: Number of workers that train on it.

        Raises:
            DatasetError: The data set cannot be read.
        """
        data = cls(location, decode=dict)  # no column needs to be training data
        manifest = data.manifest
        sizes = manifest.sizes
        window = (
            0
            if isinstance(shuffle, Global)
            else int(sizes.max()) * manifest.row_bytes * (shuffle.files if isinstance(shuffle, Window) else 1)
        )
        needs = {
            "memory": min(window, manifest.samples * manifest.row_bytes),
            "bytes_an_epoch": manifest.nbytes // workers,
            "disk": manifest.nbytes if isinstance(shuffle, Global) else 0,
        }
        memory = (
            f"{size(needs['memory'])} of memory for data" if window else f"all files on a disk, {size(needs['disk'])}"
        )
        lines = [
            f"place     {data}, version {manifest.version}, content {manifest.content}",
            *manifest.lines(),
            f"a worker  of {workers}, {shuffle}: {memory}; reads {size(needs['bytes_an_epoch'])} an epoch",
        ]
        facts = {
            "content": manifest.content,
            "version": manifest.version,
            "samples": manifest.samples,
            "bytes": manifest.nbytes,
            "files": len(manifest.files),
            "largest_file": int(sizes.max()),
            "columns": {
                name: {"dtype": column.dtype, "shape": column.shape, "ragged": column.ragged}
                for name, column in manifest.columns.items()
            },
            "classes": list(manifest.classes),
            "worker": needs,
        }
        return Description(lines, facts)

    def in_version(self, version: int) -> DataSet:
        """Return the same samples in the files of another version; 0 means the version that was opened.

        Raises:
            DatasetError: The version no longer exists.
        """
        if version not in self._versions:
            manifest = self._location.manifest(version)
            if manifest.identity != self.manifest.identity:
                raise DatasetError(f"{self} now contains another data set", hint="start a new run with it")
            self._versions[version] = self._with_manifest(manifest)
        return self._versions[version]

    def newer(self, version: int) -> DataSet | None:
        """Return the same samples in the files of a newer version, or None.

        Args:
            version: The version to compare with.

        Raises:
            DatasetError: The location cannot be read.
        """
        manifest = self._location.manifest()
        if manifest.version <= version or manifest.identity != self.manifest.identity:
            return None
        return self._versions.setdefault(manifest.version, self._with_manifest(manifest))

    def _with_manifest(self, manifest: Manifest) -> DataSet:
        copied = copy(self)
        copied.manifest, copied._arrays, copied._available, copied._damaged = manifest, {}, (), {}
        return copied

    def availability(self) -> Sequence[bool]:
        """Return a list that tells for each partition file whether this machine can read it.

        A machine can read all files, unless the data set is spread over the disks of several machines.
        """
        if not self.manifest.hosts:
            return [True] * len(self.manifest.files)
        self._available = self._available or self._location.availability(self.manifest)
        return self._available

    def add_fallback(self, location: DataLocation) -> None:
        """Set a second location of the data set. This machine reads the files there that its own location lacks."""
        self._fallbacks[:] = [location]

    def piece(self, name: str, begin: int, nbytes: int) -> Array | None:
        """Return some bytes of a partition file for another machine; None if this machine has no such file.

        The other machine compares the whole file with the manifest.

        Args:
            name: Name of a file in any version that was opened here.
            begin: Position of the first byte.
            nbytes: Maximum number of bytes.
        """
        is_known = any(file.name == name for data in self._versions.values() for file in data.manifest.files)
        path = Path(str(self._location)).expanduser() / name
        if not is_known or not path.is_file():
            return None
        return np.fromfile(path, np.uint8, nbytes, offset=begin)

    def _location_of(self, number: int) -> DataLocation:
        return self._fallbacks[0] if self._fallbacks and not self.availability()[number] else self._location

    @property
    def first(self) -> int:
        """The number, from 0, of the first partition file that this machine has; 0 if it has none."""
        available = self.availability()
        return available.index(True) if any(available) else 0

    def __str__(self) -> str:
        return str(self._location)

    @cached_property
    def columns(self) -> Mapping[str, Column]:
        """The columns of training data. If there is ``decode``, they follow from the first sample that it can use."""
        if self._decode is None:
            return self.manifest.columns
        number = self.first
        return self._decoded_columns(number, self.mapped(number), self.manifest.files[number].samples)

    def _decoded_columns(self, number: int, arrays: Arrays, rows: int) -> dict[str, Column]:
        """Return the columns of the first of some samples that ``decode`` can use.

        Raises:
            DatasetError: ``decode`` can use none of them. The error is that of the first one.
        """
        first_error: DatasetError | None = None
        for row in range(rows):
            try:
                return columns_of_sample(self._decoded(number, arrays, row))
            except DatasetError as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    @property
    def row_bytes(self) -> int:
        """Bytes of a training sample."""
        return sum(column.row_bytes for column in self.columns.values())

    def training_rows(self, number: int, arrays: Arrays, rows: Any) -> Arrays:
        """Return some rows of a partition file as training data, after ``decode`` if there is one.

        Args:
            number: Number of the file, from 0.
            arrays: Columns of the file.
            rows: Numbers of the rows, shape ``(n,)``.

        Raises:
            DatasetError: ``decode`` fails for a sample, or its result differs in shape or type from the first one.
        """
        if self._decode is None:
            return {name: array[rows] for name, array in arrays.items()}
        stacked = {name: np.empty((len(rows), *column.shape), column.dtype) for name, column in self.columns.items()}
        for position, row in enumerate(rows.tolist()):
            sample = self._decoded(number, arrays, row)
            columns = columns_of_sample(sample)
            if columns != self.columns:
                raise DatasetError(
                    f"decode makes {columns_text(columns)} of {self._where(number, row)}, "
                    f"but {columns_text(self.columns)} of the first sample",
                    hint="return arrays of the same type and shape for all samples",
                )
            for name, array in sample.items():
                stacked[name][position] = array
        return stacked

    def _decoded(self, number: int, arrays: Arrays, row: int) -> dict[str, Array]:
        assert self._decode is not None
        try:
            return self._decode({name: array[row] for name, array in arrays.items()})
        except Exception as error:
            reason = error.message if isinstance(error, DatasetError) else f"{type(error).__name__}: {error}"
            raise DatasetError(
                f"decode cannot use {self._where(number, row)}: {reason}", hint="check the sample, and decode"
            ) from error

    def _where(self, number: int, row: int) -> str:
        file = self.manifest.files[number]
        return f"sample {file.first + row:,} (row {row:,} of {self}/{file.name})"

    def __getitem__(self, name: str) -> Array:
        if name not in self.columns:
            names = ", ".join(self.columns)
            raise DatasetError(f"{self} has no column {name!r}", hint=f"it has {names}")
        if name not in self._arrays:
            files = [self.mapped(number) for number in range(len(self.manifest.files))]
            if self._decode is not None:
                sizes = self.manifest.sizes.tolist()
                files = [
                    self.training_rows(n, file, np.arange(size))
                    for n, (file, size) in enumerate(zip(files, sizes, strict=True))
                ]
            parts = [file[name] for file in files]
            array: Array = np.asarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)
            array.flags.writeable = False
            self._arrays[name] = array
        return self._arrays[name]

    def damaged(self, number: int) -> str:
        """Return the reason why a partition file cannot be used; empty if it can be used. Each file is checked once.

        A file cannot be used if it is damaged, or if ``decode`` fails for one of its samples.

        Raises:
            DatasetError: The file cannot be read, so its state is unknown.
        """
        if number not in self._damaged:
            reason = ""
            try:
                arrays = self.mapped(number)
            except DatasetDamaged as error:
                reason = error.message
            else:
                reason = self._undecoded(number, arrays)
            if reason:
                log.warning("%s: its file is left out", reason)
            self._damaged[number] = reason
        return self._damaged[number]

    def _undecoded(self, number: int, arrays: Arrays) -> str:
        """Return the error of ``decode`` for a sample of a file; empty if it succeeds for all samples."""
        return "" if self._decode is None else self._untaken(number, arrays)

    def _untaken(self, number: int, arrays: Arrays) -> str:
        """Return the reason why a sample of a file cannot be used; empty if all samples can be used."""
        rows = np.arange(self.manifest.files[number].samples)
        for begin in range(0, len(rows), SOME):
            try:
                self.training_rows(number, arrays, rows[begin : begin + SOME])
            except DatasetError as error:
                return error.message
        return ""

    def head(self, count: int) -> Arrays:
        """Return the first samples that this machine has, at most ``count``, as training data."""
        number = self.first
        rows = np.arange(min(count, self.manifest.files[number].samples))
        return self.training_rows(number, self.mapped(number), rows)

    def interrupt(self) -> None:
        """End a thread's wait for the store or disk of this data set: the thread gets an error. Later requests work
        again.
        """
        for location in (self._location, *self._fallbacks):
            location.interrupt()

    def load(self, number: int) -> Arrays:
        """Read the columns of a partition file, from 0, into memory.

        Raises:
            DatasetError: The file is missing, or differs from the manifest.
        """
        return self._location_of(number).load(self.manifest.files[number], self.manifest.columns)

    def mapped(self, number: int, room: int | None = None) -> Arrays:
        """Return the columns of a partition file as arrays that are read from a disk row by row.

        Args:
            number: Number of the file, from 0.
            room: Bytes of memory that may be used if no disk has the file; None for no limit.

        Raises:
            ConfigError: The file needs more memory than ``room``.
        """
        return self._location_of(number).mapped(self.manifest.files[number], self.manifest.columns)

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


def columns_of_sample(arrays: Mapping[str, Array]) -> dict[str, Column]:
    """Return the description of the columns (types and shapes) that a sample's arrays form."""
    return {name: Column(array.dtype.name, array.shape) for name, array in arrays.items()}


def columns_of_batch(arrays: Mapping[str, Array]) -> dict[str, Column]:
    """Return the description of the columns (types and shapes) in a batch of arrays, whose first axis numbers the
    samples.
    """
    return {name: Column(array.dtype.name, array.shape[1:]) for name, array in arrays.items()}


def columns_text(columns: Mapping[str, Column]) -> str:
    """Return the names, types and shapes of columns as one text for an error."""
    return ", ".join(f"{name} of {column.dtype} {column.shape}" for name, column in columns.items())
