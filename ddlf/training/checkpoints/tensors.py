"""Named arrays in a file of the safetensors format, bit for bit. Runs on the master.

The format stores a table of names, types and shapes as JSON, then the bytes. It does not detect damage, and it sorts
the names: the checkpoint adds hashes and order. The ``safetensors`` package reads and writes the files, which contain
nothing executable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.errors import CheckpointError
from ddlf.training.checkpoints.durable import damaged

Array = np.ndarray[Any, Any]

MAX_HEADER_BYTES = 10 * 2**20
"""Maximum size of the table: about 100,000 arrays. The first 8 bytes give its size, which is checked before parsing."""

TYPES = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
ML_TYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Types that NumPy gets from the package ``ml_dtypes``, which TensorFlow and JAX install."""

_WRITABLE = {*TYPES.values(), *ML_TYPES.values()}
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def plain(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays in the form that safetensors files require: contiguous and little-endian. Copy only if necessary.

    Raises:
        CheckpointError: A name or an array cannot be stored exactly.
    """
    table = sum(len(name.encode(errors="replace")) * 6 + 200 for name in arrays)  # 6: a byte as \u0000
    if table > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(arrays):,} arrays are too many for one file", hint="put them into several files")
    return {name: _plain(name, array) for name, array in arrays.items()}


def _plain(name: str, array: Array) -> Array:
    if name == "__metadata__" or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise CheckpointError(f"an array cannot have the name {name!r} in a checkpoint", hint="give it another one")
    if type(array) is not np.ndarray:
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise CheckpointError(f"{name!r} is a {kind}, not a NumPy array", hint="use numpy.asarray")
    if array.dtype.name not in _WRITABLE:
        raise CheckpointError(f"{name!r} has the type {array.dtype}, which a checkpoint cannot hold", hint="convert it")
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and not np.little_endian):
        array = array.byteswap().view(array.dtype.newbyteorder("<"))  # moves bytes, so that even a NaN keeps its bits
    return np.asarray(array, order="C")


def write(arrays: Mapping[str, Array], path: Path, facts: dict[str, str] | None = None) -> None:
    """Write arrays from ``plain``, and texts about them, to a new safetensors file. The file is not synced to the disk.

    Raises:
        OSError: The operating system refused.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        # Write to a file, not to bytes: this uses the arrays' own memory and releases the GIL for the event loop.
        save_file(dict(arrays), path, facts)
    except SafetensorError as error:
        if number := _SYSTEM_ERROR.search(str(error)):
            raise OSError(int(number[1]), str(error), str(path)) from error
        raise CheckpointError(f"cannot write {path}: {error}") from error


def read(data: bytes, path: Path) -> dict[str, Array]:
    """Return the arrays in a safetensors file, writable, in no particular order.

    Args:
        data: The file's bytes.
        path: The file's name, for error messages.

    Raises:
        CheckpointCorrupt: The file is not in the format, or its header exceeds the limit.
        CheckpointError: A type needs a package that is missing.
    """
    import safetensors

    header = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header > min(MAX_HEADER_BYTES, len(data) - 8):
        raise damaged(
            path, f"a header of at most {min(MAX_HEADER_BYTES, max(len(data) - 8, 0)):,} bytes", f"{header:,}"
        )
    try:
        return {
            name: np.frombuffer(entry["data"], _dtype(entry["dtype"])).reshape(entry["shape"])
            for name, entry in safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        }
    except (safetensors.SafetensorError, ValueError, OverflowError) as error:
        raise damaged(path, "the safetensors format", str(error)) from error


def _dtype(name: str) -> np.dtype[Any]:
    if name in TYPES:
        return np.dtype(TYPES[name]).newbyteorder("<")
    if name not in ML_TYPES:
        raise ValueError(f"the unknown type {name}")
    try:
        import ml_dtypes
    except ImportError as error:
        raise CheckpointError(
            f"a checkpoint with {ML_TYPES[name]} arrays cannot be read here", hint="pip install ml-dtypes"
        ) from error
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, ML_TYPES[name]))
    return dtype


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy type with this name.

    Raises:
        CheckpointError: The type needs a package that is missing, or checkpoints do not support it.
    """
    for table in (TYPES, ML_TYPES):
        for stored, type_name in table.items():
            if type_name == name:
                return _dtype(stored)
    raise CheckpointError(f"a checkpoint with {name[:40]!r} arrays cannot be read here")
