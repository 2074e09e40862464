"""A data set at a place, as an app uses it: to train on file by file, or as arrays. Runs on the master and on workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.errors import DatasetError
from ddlf.storage.files import Arrays
from ddlf.storage.place import open_place

Array = np.ndarray[Any, Any]


class DataSet(Mapping[str, Array]):
    """A data set of partition files; also its columns by name, each with the samples in the order of their ids. Read-only.

    What is read is checked before: each byte of a file before the first of its samples is given to anybody. A column of one partition file is mapped
    from the disk; one of several is read into memory when it is first asked for.

    Args:
        place: Folder that ``ddlf data split`` has written.

    Attributes:
        manifest: What is there.

    Raises:
        DatasetError: There is no data set.
    """

    def __init__(self, place: str | Path) -> None:
        self._place = open_place(place)
        self.manifest = self._place.manifest()
        self._arrays: dict[str, Array] = {}

    def __str__(self) -> str:
        return str(self._place)

    def __getitem__(self, name: str) -> Array:
        if name not in self.manifest.columns:
            there = ", ".join(self.manifest.columns)
            raise DatasetError(f"{self} has no column {name!r}", hint=f"it has {there}")
        if name not in self._arrays:
            parts = [self.mapped(number)[name] for number in range(len(self.manifest.files))]
            array: Array = np.asarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)
            array.flags.writeable = False
            self._arrays[name] = array
        return self._arrays[name]

    def load(self, number: int) -> Arrays:
        """The columns of a partition file, from 0, in memory.

        Raises:
            DatasetError: It is missing, or is not what the manifest says.
        """
        return self._place.load(self.manifest.files[number], self.manifest.columns)

    def mapped(self, number: int) -> Arrays:
        """The same, read from a disk row by row when it is used."""
        return self._place.mapped(self.manifest.files[number], self.manifest.columns)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.columns)

    def __len__(self) -> int:
        return len(self.manifest.columns)
