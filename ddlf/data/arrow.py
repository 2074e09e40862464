"""Turns Arrow columns into arrays: numbers, vectors and tensors of one shape, bytes of any length. Needs pyarrow."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ddlf.data.partition_file import Ragged
from ddlf.errors import DatasetError

Where = Callable[[int], str]
"""Describes a row of a piece of a column for error messages, given its number in the piece."""
FILL = "fill the value, or leave the row out"
VIEWS = {"string_view": "text", "binary_view": "bytes"}
"""Types that pyarrow 15 has no functions for."""


def load_pyarrow() -> Any:
    """Return the package pyarrow, with its Parquet module.

    Raises:
        DatasetError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DatasetError(
            "Parquet files need pyarrow, which is not installed", hint="install it: pip install 'ddlf[parquet]'"
        ) from None
    return pyarrow


def no_column(where: object, name: str, columns: Iterable[str]) -> tuple[str, str]:
    """Return the message and hint of an error about a missing column. The hint lists the existing columns, the most
    similar first.
    """
    names = list(columns)
    if (count := names.count(name)) > 1:
        return f"{where} has {count} columns {name!r}", "give each column its own name"
    matches = difflib.get_close_matches(name, names, n=1)
    return (
        f"{where} has no column {name!r}",
        f"it has {', '.join([*matches, *(column for column in names if column not in matches)])}",
    )


def kind_of(kind: Any) -> str:
    """Return the kind of values that an Arrow type holds: ``number``, ``list``, ``image``, ``bytes``, ``text``, or
    ``other``.
    """
    types = load_pyarrow().types
    kind = _plain(kind)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return "number"
    if _is_list(kind):
        inner = kind_of(kind.value_type)
        return "list" if inner in ("number", "list") else "other"
    if types.is_struct(kind):  # the form of images in Hugging Face data sets
        return "image" if kind.get_field_index("bytes") >= 0 else "other"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "bytes"
    if str(kind) in VIEWS:
        return VIEWS[str(kind)]
    return "text" if types.is_string(kind) or types.is_large_string(kind) else "other"


def _plain(kind: Any) -> Any:
    """Return the Arrow type of the values. Some Arrow types, such as dictionaries, only describe how values are stored."""
    arrow = load_pyarrow()
    if isinstance(kind, arrow.BaseExtensionType):
        return _plain(kind.storage_type)
    return _plain(kind.value_type) if arrow.types.is_dictionary(kind) else kind


def is_fixed(kind: Any) -> bool:
    """Return whether an Arrow type itself fixes the length of its lists, at each depth, so that rows form an array."""
    kind = _plain(kind)
    return not _is_list(kind) or (load_pyarrow().types.is_fixed_size_list(kind) and is_fixed(kind.value_type))


def _is_list(kind: Any) -> bool:
    types = load_pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _checked(values: Any, name: str, where: Where) -> Any:
    """Check that a column has a value in each row, and return its values as a plain Arrow array.

    Raises:
        DatasetError: A row has no value; the message names the first such row.
    """
    arrow = load_pyarrow()
    if isinstance(values.type, arrow.BaseExtensionType):
        values = values.storage
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise DatasetError(f"{where(row)}: column {name!r} has no value", hint=FILL)
    return values.dictionary_decode() if arrow.types.is_dictionary(values.type) else values


def numbers(values: Any, name: str, where: Where) -> np.ndarray[Any, Any]:
    """Convert an Arrow column of numbers, lists of equal length or tensors to a NumPy array of shape ``(rows, ...)``.
    Types are kept.

    Args:
        values: An Arrow array.
        name: Name of the column, for errors.
        where: Describes a row, for errors.

    Raises:
        DatasetError: A row has no value, or lists have different lengths.
    """
    arrow = load_pyarrow()
    shape: tuple[int, ...] = (len(values),)
    tensor: tuple[int, ...] = ()
    if isinstance(values.type, arrow.FixedShapeTensorType):
        permuted = values.type.permutation
        if permuted is not None and list(permuted) != sorted(permuted):
            raise DatasetError(
                f"{where(0)}: column {name!r} has tensors whose axes are permuted", hint="write them in C order"
            )
        tensor = tuple(values.type.shape)
    values, row_of = _checked(values, name, where), where
    while _is_list(values.type):
        if not arrow.types.is_fixed_size_list(values.type):
            lengths = values.value_lengths().to_numpy()
            if len(lengths) and (odd_rows := np.flatnonzero(lengths != lengths[0])).size:
                raise DatasetError(
                    f"{row_of(int(odd_rows[0]))}: column {name!r} has a list of {lengths[odd_rows[0]]} values, "
                    f"but {lengths[0]} in the rows before",
                    hint="make all lists equally long beforehand, or make arrays of them with decode=",
                )
        flat = values.flatten()
        width = len(flat) // max(len(values), 1)
        row_of, shape = _outer(row_of, max(width, 1)), (*shape, width)
        values = _checked(flat, name, row_of)
    array: np.ndarray[Any, Any] = np.asarray(values.to_numpy(zero_copy_only=False)).reshape(shape)
    return array.reshape(shape[0], *tensor) if tensor else array


def _outer(where: Where, width: int) -> Where:
    """Return a function that describes, for errors, the row of a value in a flattened column of lists of this length."""
    return lambda number: where(number // width)


def blobs(values: Any, name: str, where: Where) -> Ragged:
    """Convert an Arrow column to rows of any length: encoded images as bytes, texts as UTF-8, or lists of numbers of
    different lengths.

    Args:
        values: An Arrow array.
        name: Name of the column, for errors.
        where: Describes a row, for errors.

    Raises:
        DatasetError: A row has no value.
    """
    arrow = load_pyarrow()
    types = arrow.types
    values = _checked(values, name, where)
    if types.is_struct(values.type):
        import pyarrow.compute

        values = _checked(pyarrow.compute.struct_field(values, "bytes"), name, where)
    if _is_list(values.type):
        ends = np.cumsum(values.value_lengths().to_numpy(), dtype=np.int64)
        inner = values.flatten()
        return _ragged(numbers(inner, name, lambda number: where(int(np.searchsorted(ends, number, "right")))), ends)
    if str(values.type) in VIEWS:
        values = values.cast(arrow.large_string() if VIEWS[str(values.type)] == "text" else arrow.large_binary())
    if types.is_fixed_size_binary(values.type) or types.is_string(values.type) or types.is_binary(values.type):
        values = values.cast(arrow.large_binary())
    elif types.is_large_string(values.type):
        values = values.view(arrow.large_binary())
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    values_of_column = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return _ragged(values_of_column[bounds[0] : bounds[-1]], bounds[1:] - bounds[0])


def _ragged(values: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> Ragged:
    return Ragged(values, ends, max(int(np.diff(ends, prepend=0).max(initial=0)), 1))
