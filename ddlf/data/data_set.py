"""A data set at a place, as an app uses it: to train on file by file, or as arrays. Runs on the master and on workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data.manifest import Column, Manifest
from ddlf.data.open_place import open_place
from ddlf.data.partition_file import Arrays
from ddlf.data.place import Place
from ddlf.errors import DatasetDamaged, DatasetError

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Decode = Callable[[dict[str, Any]], dict[str, Array]]
SOME = 64
"""Samples that are decoded at a time where nobody takes them."""


class DataSet(Mapping[str, Array]):
    """A data set of partition files; also its columns by name, each with the samples in the order of their ids. Read-only.

    What is read is checked before: each byte of a file before the first of its samples is given to anybody. A column of one partition file is mapped
    from the disk; one of several is read into memory when it is first asked for.

    Args:
        place: Folder that ``ddlf data split`` has written; the manifest of what is at no place, whose samples another class gives.
        decode: Makes of a sample, its columns by name, the one that is trained on, as arrays by name; None if it is that already.

    Attributes:
        manifest: What is there; what was there when it was opened, though there is a newer version by now.
        on_disk: Whether rows can be read one by one, without a partition file in memory.
        in_order: Whether only reading from the beginning to the end is fast.
        inexact: Why nobody knows which samples were trained on; empty where that is known.
        notes: Sentences about how it is read, for the log.

    Raises:
        DatasetError: There is no data set.
    """

    on_disk, in_order, inexact = True, False, ""
    notes: Sequence[str] = ()

    def __init__(self, place: str | Path | Manifest, decode: Decode | None = None) -> None:
        if isinstance(place, Manifest):
            self.manifest = place
        else:
            self._place = open_place(place)
            self.manifest = self._place.manifest()
        self._decode = decode
        self._arrays: dict[str, Array] = {}
        self._damaged: dict[int, str] = {}
        self._versions = {0: self, self.manifest.version: self}
        self._here: Sequence[bool] = ()
        self._others: list[Place] = []

    def at(self, version: int) -> DataSet:
        """The same samples in the files of a version; 0 for that which was opened.

        Raises:
            DatasetError: It is there no more.
        """
        if version not in self._versions:
            found = self._place.manifest(version)
            if found.identity != self.manifest.identity:
                raise DatasetError(f"in {self} is another data set by now", hint="begin anew, with that one")
            self._versions[version] = self._of(found)
        return self._versions[version]

    def newer(self, version: int) -> DataSet | None:
        """The same samples in files that were made since; None if there are none.

        Args:
            version: That which is known.

        Raises:
            DatasetError: The place cannot be read.
        """
        found = self._place.manifest()
        if found.version <= version or found.identity != self.manifest.identity:
            return None
        return self._versions.setdefault(found.version, self._of(found))

    def _of(self, manifest: Manifest) -> DataSet:
        other = copy(self)
        other.manifest, other._arrays, other._here, other._damaged = manifest, {}, (), {}
        return other

    def here(self) -> Sequence[bool]:
        """Of each partition file whether this machine can read it: all, but where each of several has some of them on its own disk."""
        if not self.manifest.hosts:
            return [True] * len(self.manifest.files)
        self._here = self._here or self._place.here(self.manifest)
        return self._here

    def beside(self, others: Place) -> None:
        """Read from there what is not here."""
        self._others[:] = [others]

    def piece(self, name: str, begin: int, nbytes: int) -> Array | None:
        """Some bytes of a partition file, for another machine, which compares all of them with the manifest; None if it is not here.

        Args:
            name: Of any version that was opened here.
            begin: Place of the first.
            nbytes: How many at most.
        """
        known = any(file.name == name for data in self._versions.values() for file in data.manifest.files)
        path = Path(str(self._place)).expanduser() / name
        if not known or not path.is_file():
            return None
        return np.fromfile(path, np.uint8, nbytes, offset=begin)

    def _place_of(self, number: int) -> Place:
        return self._others[0] if self._others and not self.here()[number] else self._place

    @property
    def first(self) -> int:
        """Number of the first partition file that is here; 0 if none is."""
        here = self.here()
        return here.index(True) if any(here) else 0

    def __str__(self) -> str:
        return str(self._place)

    @cached_property
    def columns(self) -> Mapping[str, Column]:
        """What is trained on; the first sample that ``decode`` can use says what it makes."""
        if self._decode is None:
            return self.manifest.columns
        number, why = self.first, None
        arrays = self.mapped(number)
        for row in range(self.manifest.files[number].samples):
            try:
                first = self._decoded(number, arrays, row)
            except DatasetError as error:
                why = why or error
                continue
            return {name: Column(array.dtype.name, array.shape) for name, array in first.items()}
        assert why is not None
        raise why

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample as it is trained on."""
        return sum(column.row_bytes for column in self.columns.values())

    def taken(self, number: int, arrays: Arrays, rows: Any) -> Arrays:
        """Some rows of a partition file as they are trained on.

        Args:
            number: Which file, from 0.
            arrays: Its columns.
            rows: Numbers of the rows, shape ``(n,)``.

        Raises:
            DatasetError: ``decode`` cannot use one, or makes something else of it than of the first sample.
        """
        if self._decode is None:
            return {name: array[rows] for name, array in arrays.items()}
        whole = {name: np.empty((len(rows), *column.shape), column.dtype) for name, column in self.columns.items()}
        for place, row in enumerate(rows.tolist()):
            one = self._decoded(number, arrays, row)
            found = {name: Column(array.dtype.name, array.shape) for name, array in one.items()}
            if found != self.columns:
                raise DatasetError(
                    f"decode makes {_said(found)} of {self._where(number, row)}, but {_said(self.columns)} of the first sample",
                    hint="have it make arrays of one type and shape",
                )
            for name, array in one.items():
                whole[name][place] = array
        return whole

    def _decoded(self, number: int, arrays: Arrays, row: int) -> dict[str, Array]:
        assert self._decode is not None
        try:
            return self._decode({name: array[row] for name, array in arrays.items()})
        except Exception as error:
            said = error.message if isinstance(error, DatasetError) else f"{type(error).__name__}: {error}"
            raise DatasetError(
                f"decode cannot use {self._where(number, row)}: {said}", hint="look at the sample, and at decode"
            ) from error

    def _where(self, number: int, row: int) -> str:
        file = self.manifest.files[number]
        return f"sample {file.first + row:,} (row {row:,} of {self}/{file.name})"

    def __getitem__(self, name: str) -> Array:
        if name not in self.columns:
            there = ", ".join(self.columns)
            raise DatasetError(f"{self} has no column {name!r}", hint=f"it has {there}")
        if name not in self._arrays:
            files = [self.mapped(number) for number in range(len(self.manifest.files))]
            if self._decode is not None:
                sizes = self.manifest.sizes.tolist()
                files = [
                    self.taken(n, file, np.arange(size))
                    for n, (file, size) in enumerate(zip(files, sizes, strict=True))
                ]
            parts = [file[name] for file in files]
            array: Array = np.asarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)
            array.flags.writeable = False
            self._arrays[name] = array
        return self._arrays[name]

    def damaged(self, number: int) -> str:
        """Why a partition file, from 0, cannot be used, it or a sample that ``decode`` fails with; empty if it can. Each is looked at once.

        Raises:
            DatasetError: Nobody knows: it cannot be read.
        """
        if number not in self._damaged:
            why = ""
            try:
                arrays = self.mapped(number)
            except DatasetDamaged as error:
                why = error.message
            else:
                why = self._undecoded(number, arrays)
            if why:
                log.warning("%s: its file is left out", why)
            self._damaged[number] = why
        return self._damaged[number]

    def _undecoded(self, number: int, arrays: Arrays) -> str:
        """Why ``decode`` cannot use a sample of a file; empty if it can use all."""
        return "" if self._decode is None else self._untaken(number, arrays)

    def _untaken(self, number: int, arrays: Arrays) -> str:
        """Why a sample of a file cannot be taken; empty if all can."""
        rows = np.arange(self.manifest.files[number].samples)
        for begin in range(0, len(rows), SOME):
            try:
                self.taken(number, arrays, rows[begin : begin + SOME])
            except DatasetError as error:
                return error.message
        return ""

    def head(self, count: int) -> Arrays:
        """The first samples that are here, at most so many, as they are trained on."""
        number = self.first
        rows = np.arange(min(count, self.manifest.files[number].samples))
        return self.taken(number, self.mapped(number), rows)

    def interrupt(self) -> None:
        """Have a thread that waits for the place get an error. What is asked for later is done."""
        for place in (self._place, *self._others):
            place.interrupt()

    def load(self, number: int) -> Arrays:
        """The columns of a partition file, from 0, in memory.

        Raises:
            DatasetError: It is missing, or is not what the manifest says.
        """
        return self._place_of(number).load(self.manifest.files[number], self.manifest.columns)

    def mapped(self, number: int, room: int | None = None) -> Arrays:
        """The same, read from a disk row by row when it is used.

        Args:
            number: Which file, from 0.
            room: Bytes of memory that it may take where no disk has it; None for as many as it needs.

        Raises:
            ConfigError: It needs more.
        """
        return self._place_of(number).mapped(self.manifest.files[number], self.manifest.columns)

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


def _said(columns: Mapping[str, Column]) -> str:
    return ", ".join(f"{name} of {column.dtype} {column.shape}" for name, column in columns.items())
