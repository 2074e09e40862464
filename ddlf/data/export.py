"""Writes all samples of a data set to one file of another format, in the order of their ids."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data.manifest import Manifest
from ddlf.data.partition_file import Arrays, Ragged
from ddlf.errors import DatasetError

Parts = Callable[[], Iterator[Arrays]]
"""Yields the columns of each partition file, in order. It can be called repeatedly."""


def _npz(path: Path, found: Manifest, parts: Parts) -> None:
    with zipfile.ZipFile(path, "x") as archive:
        for name, column in found.columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                kind = np.dtype(column.dtype).newbyteorder("<")
                head = {"descr": kind.str, "fortran_order": False, "shape": (found.samples, *column.shape)}
                np.lib.format.write_array_header_2_0(member, head)
                for arrays in parts():
                    member.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)


def _tar(path: Path, found: Manifest, parts: Parts) -> None:
    """Write the form that ``tar.py`` reads: ``x`` is ``.npy``, integers ``y`` are ``.cls``, others keep their names."""
    number = 0
    with tarfile.open(path, "x") as archive:
        for arrays in parts():
            for row in range(len(next(iter(arrays.values())))):
                for name, array in arrays.items():
                    if name == "y" and not found.columns[name].shape and array.dtype.kind in "iu":
                        ending, data = "cls", str(int(array[row])).encode()
                    else:
                        file = io.BytesIO()
                        np.save(file, array[row])
                        ending, data = "npy" if name == "x" else f"{name}.npy", file.getvalue()
                    member = tarfile.TarInfo(f"{number:010}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
                number += 1


def _parquet(path: Path, found: Manifest, parts: Parts) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DatasetError(
            "Parquet files need pyarrow, which is not installed", hint="install it: pip install 'ddlf[parquet]'"
        ) from None
    writer = None
    for arrays in parts():
        columns = {}
        for name, array in arrays.items():
            if isinstance(array, Ragged):
                if array.values.ndim > 1:
                    raise DatasetError(
                        f"column {name} has rows of different lengths of arrays, which Parquet cannot hold",
                        hint="export it as .tar",
                    )
                ends = pyarrow.array(np.concatenate([[0], array.ends]))
                columns[name] = pyarrow.LargeListArray.from_arrays(ends, pyarrow.array(array.values))
                continue
            values = pyarrow.array(np.ascontiguousarray(array).reshape(-1))
            for length in reversed(array.shape[1:]):
                values = pyarrow.FixedSizeListArray.from_arrays(values, length)
            columns[name] = values
        table = pyarrow.table(columns)
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def _tfrecord(path: Path, found: Manifest, parts: Parts) -> None:
    """Write examples. They have no shapes, so each row becomes a vector.

    uint8 arrays become bytes, other integers and booleans int64, and floating-point numbers float32.
    """
    from ddlf.data.tfrecord import masked_checksum

    for name, column in found.columns.items():
        if column.dtype in ("float64", "uint64"):
            raise DatasetError(
                f"column {name} is {column.dtype}, which a tf.train.Example cannot hold", hint="export it as .parquet"
            )
    checksum = masked_checksum()
    with open(path, "xb") as file:
        for arrays in parts():
            for row in range(len(next(iter(arrays.values())))):
                features = b"".join(
                    _field(1, _field(1, name.encode()) + _field(2, _feature(array[row])))
                    for name, array in arrays.items()
                )
                data = _field(1, features)
                length = struct.pack("<Q", len(data))
                file.write(length + struct.pack("<I", checksum(length)) + data + struct.pack("<I", checksum(data)))


def _feature(value: np.ndarray[Any, Any]) -> bytes:
    if value.dtype == np.uint8 and value.ndim:
        return _field(1, _field(1, value.tobytes()))
    if value.dtype.kind == "f":
        return _field(2, _field(1, np.asarray(value, "<f4").tobytes()))
    numbers = np.asarray(value, np.int64).reshape(-1).view(np.uint64)
    return _field(3, _field(1, b"".join(map(_varint, numbers.tolist()))))


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


WRITERS: dict[str, Callable[[Path, Manifest, Parts], None]] = {
    ".npz": _npz,
    ".parquet": _parquet,
    ".tar": _tar,
    ".tfrecord": _tfrecord,
}
"""The writers by file ending."""
