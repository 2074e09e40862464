"""The bytes of partition files, and the arrays in them. Pure, but for the disk that they are mapped from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.errors import DatasetError
from ddlf.storage.explained import explained
from ddlf.storage.manifest import Column, PartitionFile

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Arrays = dict[str, np.ndarray[Any, Any]]

MAX_HEADER_BYTES = 2**20
"""Of a partition file: a name, a type and a shape for each column."""
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
    return _columns_of(whole, file, columns, where)


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
        raise DatasetError(f"{where} is damaged: it has not the SHA-256 of the manifest", hint=COPY)
    whole.flags.writeable = False
    return _columns_of(whole, file, columns, where)


def _columns_of(whole: Bytes, file: PartitionFile, columns: Mapping[str, Column], where: str) -> Arrays:
    """Views of the arrays in a file of the safetensors format: 8 bytes with the length of the header, the header as JSON, the bytes of the arrays."""
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
