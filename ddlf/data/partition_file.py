"""The bytes of partition files, and the arrays in them. Pure, but for the disk that they are mapped from."""

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
"""Rows of each column: an array, or ``Ragged``."""

MAX_HEADER_BYTES = 2**20
"""Of a partition file: a name, a type and a shape for each column."""
ENDS = ":ends"
"""Behind a column's name: where each of its rows of different lengths ends. No column has a name with that."""
COPY = "bring it back from a copy, or split the data set again"


def mapped_columns(path: Path, file: PartitionFile, columns: Mapping[str, Column], where: str) -> Arrays:
    """The arrays of a partition file, mapped from the disk: read when they are used, and not checked for damage.

    Args:
        path: The file.
        file: From the manifest.
        columns: Those that it must have.
        where: Its name, for errors.

    Raises:
        DatasetError: It is not of the form or the columns that the manifest says.
    """
    with explained(path, "read"):
        whole = np.memmap(path, np.uint8, "r")
    return arrays_of(whole, file, columns, where)


def columns_of(whole: Bytes, file: PartitionFile, columns: Mapping[str, Column], where: str) -> Arrays:
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
        raise DatasetDamaged(f"{where} is damaged: it has not the SHA-256 of the manifest", hint=COPY)
    whole.flags.writeable = False
    return arrays_of(whole, file, columns, where)


def arrays_of(whole: Bytes, file: PartitionFile, columns: Mapping[str, Column], where: str) -> Arrays:
    """Views of the arrays in a file of the safetensors format: 8 bytes with the length of the header, the header as JSON, the bytes of the arrays.

    Args:
        whole: All bytes of the file.
        file: From the manifest.
        columns: Those that it must have.
        where: Its name, for errors.

    Raises:
        DatasetDamaged: It has other arrays.
    """
    try:
        length = int.from_bytes(whole[:8].tobytes(), "little")
        if length > min(MAX_HEADER_BYTES, len(whole) - 8):
            raise ValueError("its header is too long")
        head = json.loads(whole[8 : 8 + length].tobytes())
        head.pop("__metadata__", None)
        ragged = {name + ENDS for name, column in columns.items() if column.ragged}
        if set(head) != {*columns, *ragged}:
            raise ValueError(f"it has {', '.join(sorted(head))}")
        found: Arrays = {}
        body = whole[8 + length :]
        for name, column in columns.items():
            if not column.ragged:
                found[name] = _array(body, head, name, column.dtype, [file.samples, *column.shape])
                continue
            ends = _array(body, head, name + ENDS, "int64", [file.samples])
            lengths = np.diff(ends, prepend=0)
            if lengths.min() < 0 or lengths.max() > column.shape[0]:
                raise ValueError(f"rows of {name} end where they cannot")
            values = _array(body, head, name, column.dtype, [int(ends[-1]), *column.shape[1:]])
            found[name] = Ragged(values, ends, column.shape[0])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DatasetDamaged(f"{where} has other columns than the manifest ({error})", hint=COPY) from None
    return found


def _array(body: Bytes, head: dict[str, Any], name: str, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    """View of an array that has to be of this type and shape."""
    entry, kind = head[name], np.dtype(dtype)
    code = "BOOL" if kind.kind == "b" else f"{kind.kind.upper()}{8 * kind.itemsize}"
    start, stop = entry["data_offsets"]
    if entry["dtype"] != code or entry["shape"] != shape or stop - start != prod(shape) * kind.itemsize:
        raise ValueError(f"{name} is {entry['dtype']} of shape {entry['shape']}")
    if not 0 <= start <= stop <= len(body):
        raise ValueError(f"{name} is not in it")
    return body[start:stop].view(kind.newbyteorder("<")).reshape(shape)


class Ragged:
    """Rows of different lengths, one behind the other.

    Args:
        values: All of them, shape ``(sum of lengths, ...)``.
        ends: Where each row ends, rising.
        longest: Length that rows are brought to with zeros, where several are taken at once.
    """

    def __init__(self, values: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], longest: int) -> None:
        self.values, self.ends = values, ends
        self.dtype, self.shape = values.dtype, (len(ends), longest, *values.shape[1:])

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, key: Any) -> np.ndarray[Any, Any]:
        """A row as it is, or some rows of one length."""
        if isinstance(key, int | np.integer):
            return self.values[self.ends[key - 1] if key else 0 : self.ends[key]]
        numbers = np.arange(len(self))[key]
        whole = np.zeros((len(numbers), *self.shape[1:]), self.dtype)
        for row, number in zip(whole, numbers.tolist(), strict=True):
            one = self[number]
            row[: len(one)] = one
        return whole

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self[:] if dtype is None else self[:].astype(dtype)
