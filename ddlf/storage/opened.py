"""A data set at a place as arrays. Runs on the master and on workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.errors import DatasetError
from ddlf.storage.place import Folder
from ddlf.storage.verify import damage

Array = np.ndarray[Any, Any]


class DataSet(Mapping[str, Array]):
    """The columns of a data set by name, each with the samples in the order of their ids. Read-only.

    A column of one partition file is mapped from the disk; one of several is read into memory when it is first asked for.

    Args:
        place: Folder that ``ddlf data split`` has written.

    Attributes:
        manifest: What is there.

    Raises:
        DatasetError: There is no data set, or a file of it is damaged: every byte is checked first.
    """

    def __init__(self, place: str | Path) -> None:
        self._folder = Folder(place)
        self.manifest = self._folder.manifest()
        for error in damage(self._folder, self.manifest):
            raise error
        self._arrays: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self.manifest.columns:
            there = ", ".join(self.manifest.columns)
            raise DatasetError(f"{self._folder} has no column {name!r}", hint=f"it has {there}")
        if name not in self._arrays:
            parts = [self._folder.arrays(file, self.manifest.columns)[name] for file in self.manifest.files]
            array: Array = np.asarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)
            array.flags.writeable = False
            self._arrays[name] = array
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.columns)

    def __len__(self) -> int:
        return len(self.manifest.columns)
