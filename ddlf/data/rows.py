"""The interface of sources, which yield the samples of files, and the structured arrays that hold these samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ddlf.data.manifest import Column
from ddlf.errors import ConfigError

Rows = np.ndarray[Any, Any]
"""Structured array of shape (n,) with a field for each column."""


class SampleSource(Protocol):
    """The interface of a source of samples, such as a folder of images, that can be written as a data set.

    Attributes:
        columns: The columns by name.
        samples: Number of samples, > 0.
        classes: Names of classes, by the number of the label.
    """

    columns: dict[str, Column]
    samples: int
    classes: Sequence[str]

    def rows(self, at_once: int, first: int = 0) -> Iterator[Rows]:
        """Yield the samples from number ``first`` on, in order, as structured arrays of at most ``at_once``."""


def row_type(columns: dict[str, Column]) -> np.dtype[Any]:
    """Return NumPy's structured type for a sample, with a field for each column.

    The field of a ragged column has a length, and values with room for the longest row.
    """
    fields: list[Any] = []
    for name, column in columns.items():
        kind = np.dtype(column.dtype).newbyteorder("<")
        values = (kind, column.shape)
        fields.append((name, [("length", np.dtype("<i8")), ("values", *values)]) if column.ragged else (name, *values))
    return np.dtype(fields)


def set_cell(rows: Rows, name: str, number: int, array: np.ndarray[Any, Any]) -> None:
    """Set one column of one row of a structured array of samples."""
    if rows.dtype[name].names is None:
        rows[name][number] = array
    else:
        rows[name]["length"][number] = len(array)
        rows[name]["values"][number, : len(array)] = array


def longest(arrays: Iterable[Sequence[Any] | np.ndarray[Any, Any]]) -> int:
    """Return the length of the longest of some rows with different lengths; at least 1."""
    return max(1, *map(len, arrays))


def chosen(
    columns: str, available: Sequence[str], path: Path, usual: Mapping[str, str], word: str = "column"
) -> dict[str, str]:
    """Return the columns that the user's option chooses, as a dict from new names to the names in the source.

    Args:
        columns: The option of ``open_source``.
        available: All names in the source.
        path: Path of the source, for errors.
        usual: New names of some columns, by old name, used if ``columns`` is empty.
        word: Word for a column, for errors.

    Raises:
        ConfigError: There is no column with a given name, or a new name is given twice.
    """
    if not columns:
        return {usual.get(name, name): name for name in available}
    pairs = [(name.partition("=")[0], name.partition("=")[2] or name) for name in columns.split(",")]
    for _, old in pairs:
        if old not in available:
            raise ConfigError(f"{path} has no {word} {old!r}", hint=f"it has {', '.join(available)}")
    if len({new for new, _ in pairs}) != len(pairs):
        raise ConfigError(f"--columns {columns} gives one name twice")
    return dict(pairs)


def check_ragged(ragged: str, columns: Sequence[str], path: Path) -> set[str]:
    """Return the names of the columns whose rows have different lengths.

    Raises:
        ConfigError: There is no column with a given name.
    """
    names = set(filter(None, ragged.split(",")))
    for name in sorted(names.difference(columns)):
        raise ConfigError(f"--ragged {ragged}: {path} has no column {name!r}", hint=f"it has {', '.join(columns)}")
    return names
