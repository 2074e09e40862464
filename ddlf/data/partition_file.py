"""Reads the arrays in the bytes of a partition file, which holds some samples of a data set. Pure, except that files
are mapped from a disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data.manifest import Column, PartitionFile
from ddlf.data.os_errors import explained
from ddlf.errors import DatasetDamaged

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Arrays = dict[str, Any]
"""The rows of each column, as an array or as ``Ragged``."""

MAX_HEADER_BYTES = 2**20
"""Limit for the header of a partition file, which has a name, a type and a shape for each column."""
ENDS = ":ends"
"""Suffix of a ragged column's name, for the array with the end of each row. No column name may contain a colon."""
COPY = "bring it back from a copy, or split the data set again"


def mapped_columns(path: Path, file: PartitionFile, columns: Mapping[str, Column], where: str) -> Arrays:
    """Return the arrays of a partition file, mapped from the disk. They are read on use, and not checked for damage.

    Args:
        path: Path of the file.
        file: The file's entry in the manifest.
        columns: Columns that the file must have.
        where: Name of the file, for errors.

    Raises:
        DatasetError: The form or the columns differ from the manifest.
    """
    with explained(path, "read"):
        content = np.memmap(path, np.uint8, "r")
    return arrays_of(content, file, columns, where)


def columns_of(content: Bytes, file: PartitionFile, columns: Mapping[str, Column], where: str) -> Arrays:
    """Return the arrays in the bytes of a partition file, read-only, after comparing the bytes with the manifest.

    Args:
        content: All bytes of the file, as uint8.
        file: The file's entry in the manifest.
        columns: Columns that the file must have.
        where: Name of the file, for errors.

    Raises:
        DatasetError: The file is damaged, or has other columns.
    """
    if hashlib.sha256(content.data).hexdigest() != file.sha256:
        raise DatasetDamaged(f"{where} is damaged: its SHA-256 is not that of the manifest", hint=COPY)
    content.flags.writeable = False
    return arrays_of(content, file, columns, where)


def arrays_of(content: Bytes, file: PartitionFile, columns: Mapping[str, Column], where: str) -> Arrays:
    """Return the arrays in the bytes of a partition file, which is in the safetensors format, as views of these bytes.

    The format is: 8 bytes with the length of the header, the header as JSON, and the bytes of the arrays.

    Args:
        content: All bytes of the file.
        file: The file's entry in the manifest.
        columns: Columns that the file must have.
        where: Name of the file, for errors.

    Raises:
        DatasetDamaged: The file has other arrays.
    """
    try:
        length = int.from_bytes(content[:8].tobytes(), "little")
        if length > min(MAX_HEADER_BYTES, len(content) - 8):
            raise ValueError("its header is too long")
        head = json.loads(content[8 : 8 + length].tobytes())
        head.pop("__metadata__", None)
        ragged = {name + ENDS for name, column in columns.items() if column.ragged}
        if set(head) != {*columns, *ragged}:
            raise ValueError(f"it has {', '.join(sorted(head))}")
        arrays: Arrays = {}
        body = content[8 + length :]
        for name, column in columns.items():
            if not column.ragged:
                arrays[name] = _array(body, head, name, column.dtype, [file.samples, *column.shape])
                continue
            ends = _array(body, head, name + ENDS, "int64", [file.samples])
            lengths = np.diff(ends, prepend=0)
            if lengths.min() < 0 or lengths.max() > column.shape[0]:
                raise ValueError(f"the positions where the rows of {name} end do not fit its values")
            values = _array(body, head, name, column.dtype, [int(ends[-1]), *column.shape[1:]])
            arrays[name] = Ragged(values, ends, column.shape[0])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DatasetDamaged(f"{where} has other columns than the manifest ({error})", hint=COPY) from None
    return arrays


def _array(body: Bytes, head: dict[str, Any], name: str, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    """Return a view of one array in a partition file, after checking its type, its shape and its position."""
    entry, kind = head[name], np.dtype(dtype)
    code = "BOOL" if kind.kind == "b" else f"{kind.kind.upper()}{8 * kind.itemsize}"
    start, stop = entry["data_offsets"]
    if entry["dtype"] != code or entry["shape"] != shape or stop - start != prod(shape) * kind.itemsize:
        raise ValueError(f"{name} is {entry['dtype']} of shape {entry['shape']}")
    if not 0 <= start <= stop <= len(body):
        raise ValueError(f"{name} is not in it")
    return body[start:stop].view(kind.newbyteorder("<")).reshape(shape)


class Ragged:
    """Rows of different lengths, stored one after another.

    Args:
        values: The values of all rows, shape ``(sum of lengths, ...)``.
        ends: End of each row in ``values``, ascending.
        longest: Padded length of rows, with zeros at the end, when several rows are read at once.
    """

    def __init__(self, values: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], longest: int) -> None:
        self.values, self.ends = values, ends
        self.dtype, self.shape = values.dtype, (len(ends), longest, *values.shape[1:])

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, key: Any) -> np.ndarray[Any, Any]:
        """Return one row with its own length, or several rows padded to ``longest``."""
        if isinstance(key, int | np.integer):
            return self.values[self.ends[key - 1] if key else 0 : self.ends[key]]
        numbers = np.arange(len(self))[key]
        padded = np.zeros((len(numbers), *self.shape[1:]), self.dtype)
        for row, number in zip(padded, numbers.tolist(), strict=True):
            values = self[number]
            row[: len(values)] = values
        return padded

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self[:] if dtype is None else self[:].astype(dtype)
