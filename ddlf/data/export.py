"""Checks that a data set is undamaged, and exports its samples to one file of another format, in the order of ids."""

from __future__ import annotations

import io
import os
import secrets
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data.arrow import load_pyarrow
from ddlf.data.location import DataLocation
from ddlf.data.manifest import Manifest, PartitionFile
from ddlf.data.os_errors import explained
from ddlf.data.partition_file import Arrays, Ragged
from ddlf.errors import DatasetError
from ddlf.worker.machine import cores

Parts = Callable[[], Iterator[Arrays]]
"""Yields the columns of each partition file, in order. It can be called repeatedly."""


def _npz(path: Path, manifest: Manifest, parts: Parts) -> None:
    with zipfile.ZipFile(path, "x") as archive:
        for name, column in manifest.columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                kind = np.dtype(column.dtype).newbyteorder("<")
                head = {"descr": kind.str, "fortran_order": False, "shape": (manifest.samples, *column.shape)}
                np.lib.format.write_array_header_2_0(member, head)
                for arrays in parts():
                    member.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)


def _tar(path: Path, manifest: Manifest, parts: Parts) -> None:
    """Write the samples to a tar file in WebDataset's form, which ``tar.py`` reads: ``x`` becomes ``.npy``, integer
    ``y`` becomes ``.cls``, and other columns keep their names.
    """
    number = 0
    with tarfile.open(path, "x") as archive:
        for arrays in parts():
            for row in range(len(next(iter(arrays.values())))):
                for name, array in arrays.items():
                    if name == "y" and not manifest.columns[name].shape and array.dtype.kind in "iu":
                        ending, data = "cls", str(int(array[row])).encode()
                    else:
                        file = io.BytesIO()
                        np.save(file, array[row])
                        ending, data = "npy" if name == "x" else f"{name}.npy", file.getvalue()
                    member = tarfile.TarInfo(f"{number:010}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
                number += 1


def _parquet(path: Path, manifest: Manifest, parts: Parts) -> None:
    pyarrow, writer = load_pyarrow(), None
    for arrays in parts():
        columns = {}
        for name, array in arrays.items():
            if isinstance(array, Ragged):
                if array.values.ndim > 1:
                    raise DatasetError(
                        f"column {name} has arrays of different lengths, which Parquet cannot store",
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


def _tfrecord(path: Path, manifest: Manifest, parts: Parts) -> None:
    """Write the samples to a TFRecord file as ``tf.train.Example``. These have no shapes, so each row becomes a vector.

    uint8 arrays become bytes, other integers and booleans int64, and floating-point numbers float32.
    """
    from ddlf.data.tfrecord import example_class, masked_checksum

    for name, column in manifest.columns.items():
        if column.dtype in ("float64", "uint64"):
            raise DatasetError(
                f"column {name} is {column.dtype}, which a tf.train.Example cannot hold", hint="export it as .parquet"
            )
    checksum, message = masked_checksum(), example_class()
    with open(path, "xb") as file:
        for arrays in parts():
            for row in range(len(next(iter(arrays.values())))):
                example = message()
                for name, array in arrays.items():
                    _set(example.features.feature.add(key=name).value, array[row])
                data = example.SerializeToString()
                length = struct.pack("<Q", len(data))
                file.write(length + struct.pack("<I", checksum(length)) + data + struct.pack("<I", checksum(data)))


def _set(feature: Any, value: np.ndarray[Any, Any]) -> None:
    if value.dtype == np.uint8 and value.ndim:
        feature.bytes_list.value.append(value.tobytes())
    elif value.dtype.kind == "f":
        feature.float_list.value.extend(np.asarray(value, np.float32).reshape(-1).tolist())
    else:
        feature.int64_list.value.extend(np.asarray(value, np.int64).reshape(-1).tolist())
        feature.int64_list.SetInParent()  # set the list even if it is empty, so that the type is kept


WRITERS: dict[str, Callable[[Path, Manifest, Parts], None]] = {
    ".npz": _npz,
    ".parquet": _parquet,
    ".tar": _tar,
    ".tfrecord": _tfrecord,
}
"""The writers by file ending."""


Moved = Callable[[str, int, int], None]


def damage(
    location: DataLocation, manifest: Manifest, moved: Moved = lambda action, done, of: None
) -> Iterator[DatasetError]:
    """Yield an error for each damaged or extra file at a location. Every byte is read, on all cores.

    Args:
        location: Location of the data set.
        manifest: Its manifest.
        moved: Receives the present step, the checked samples and all samples.
    """
    for path in location.extra(manifest):
        yield DatasetError(f"{path} does not belong to this data set", hint="remove it")
    done = 0
    with ThreadPoolExecutor(cores()) as threads:
        try:
            for file, error in zip(
                manifest.files,
                threads.map(lambda file: _damage_of(location, manifest, file), manifest.files),
                strict=True,
            ):
                done += file.samples
                moved("checking", done, manifest.samples)
                if error is not None:
                    yield error
        except KeyboardInterrupt:
            location.close()  # otherwise the threads would still wait for the store
            raise


def _damage_of(location: DataLocation, manifest: Manifest, file: PartitionFile) -> DatasetError | None:
    try:
        location.check(file, manifest.columns)
    except DatasetError as error:
        return error
    return None


def export(
    location: DataLocation, manifest: Manifest, target: Path, moved: Moved = lambda action, done, of: None
) -> None:
    """Write all samples into one file, in the order of their ids. Each partition file is checked first.

    Args:
        location: Location of the data set.
        manifest: Its manifest.
        target: Path of a new file: ``.npz``, ``.parquet``, ``.tar`` or ``.tfrecord``.
        moved: Receives the present step, the written samples and all samples.

    Raises:
        DatasetError: A file is damaged, or the target exists or cannot be written. No incomplete target remains.
    """
    if target.suffix not in WRITERS:
        raise DatasetError(f"{target} has an unknown format", hint=f"name it {', '.join(WRITERS)}")
    if target.parts[0].endswith(":"):  # a Path shortens s3:// to s3:/
        raise DatasetError(
            f"{target} is a URL, but an export writes a file on this machine", hint="name a path, and copy it"
        )
    if os.path.lexists(target):
        raise DatasetError(f"{target} already exists and is not overwritten", hint="name another file")
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    done = 0

    def parts() -> Iterator[Arrays]:
        nonlocal done
        for file in manifest.files:
            yield location.mapped(file, manifest.columns)
            done += file.samples
            moved("writing", min(done, manifest.samples), manifest.samples)

    with explained(target, "write", need=manifest.nbytes):
        try:
            WRITERS[target.suffix](temporary, manifest, parts)
            os.rename(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
