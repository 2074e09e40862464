"""What a data set can be made of: arrays in files, folders of images, tables. Each gives its samples in order, some at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ddlf.data.manifest import NAME, Column
from ddlf.data.os_errors import explained
from ddlf.errors import ConfigError, DatasetError

Rows = np.ndarray[Any, Any]
"""Structured array of shape (n,) with a field for each column."""


class Source(Protocol):
    """What every source has.

    Attributes:
        columns: By name.
        samples: How many there are, > 0.
        classes: Names of classes, by number of the label.
    """

    columns: dict[str, Column]
    samples: int
    classes: Sequence[str]

    def rows(self, at_once: int, first: int = 0) -> Iterator[Rows]:
        """All samples in order but the first so many, as structured arrays of at most ``at_once``."""


def row_type(columns: dict[str, Column]) -> np.dtype[Any]:
    """A sample as one value: a field for each column; of a ragged one its length and what it has, with room for the longest."""
    fields: list[Any] = []
    for name, column in columns.items():
        kind = np.dtype(column.dtype).newbyteorder("<")
        values = (kind, column.shape)
        fields.append((name, [("length", np.dtype("<i8")), ("values", *values)]) if column.ragged else (name, *values))
    return np.dtype(fields)


def put(rows: Rows, name: str, number: int, array: np.ndarray[Any, Any]) -> None:
    """Set a column of one row."""
    if rows.dtype[name].names is None:
        rows[name][number] = array
    else:
        rows[name]["length"][number] = len(array)
        rows[name]["values"][number, : len(array)] = array


def longest(arrays: Iterable[Sequence[Any] | np.ndarray[Any, Any]]) -> int:
    """Of some rows of different lengths; at least 1."""
    return max(1, *map(len, arrays))


def chosen(
    columns: str, there: Sequence[str], path: Path, usual: Mapping[str, str], what: str = "column"
) -> dict[str, str]:
    """New names of the columns that are meant, with their old ones.

    Args:
        columns: See ``open_source``.
        there: Old names of all of them.
        path: Of what, for errors.
        usual: New names of some, by old name, where ``columns`` says nothing.
        what: Word for one of them.

    Raises:
        ConfigError: There is no such column, or one name is given twice.
    """
    if not columns:
        return {usual.get(name, name): name for name in there}
    pairs = [(name.partition("=")[0], name.partition("=")[2] or name) for name in columns.split(",")]
    for _, old in pairs:
        if old not in there:
            raise ConfigError(f"{path} has no {what} {old!r}", hint=f"it has {', '.join(there)}")
    if len({new for new, _ in pairs}) != len(pairs):
        raise ConfigError(f"--columns {columns} gives one name twice")
    return dict(pairs)


def check_ragged(ragged: str, columns: Sequence[str], path: Path) -> set[str]:
    """Names of the columns whose rows have different lengths.

    Raises:
        ConfigError: There is no such column.
    """
    names = set(filter(None, ragged.split(",")))
    for name in sorted(names.difference(columns)):
        raise ConfigError(f"--ragged {ragged}: {path} has no column {name!r}", hint=f"it has {', '.join(columns)}")
    return names


KINDS = (".npz", ".npy", ".csv", ".parquet", ".tar", ".tfrecord", "arrays", "images", "placed")
"""What a source can be."""


def open_source(
    path: Path, *, columns: str = "", part: str = "", label: str = "", image_size: str = "", ragged: str = ""
) -> Source:
    """Find out what a path holds.

    Args:
        path: A ``.npz`` or ``.npy`` file, a ``.csv`` table, a Parquet, tar or TFRecord file, a folder of several of these, one of ``.npy`` files,
            one with a folder of images for each class, or a data set of partition files.
        columns: Columns that are meant, with commas; ``new=old`` gives one another name. Empty for all.
        part: ``"train"``, ``"val"`` or ``"test"``: the arrays whose names end with that, as ``x``, ``y`` and ``w``.
        label: Name of the table's column that is the label.
        image_size: Width and height that all images are brought to, as ``"64x64"``; empty if they have one size.
        ragged: Columns, with commas, whose rows have different lengths. Images and texts there stay the bytes that they are.

    Raises:
        DatasetError: It holds nothing that can be used.
        ConfigError: An option has no use with this source.
    """
    if not path.exists():
        hint = "name a .npz, .npy or .csv file, or a folder"
        if ":/" in str(path):
            hint = "a source is on this machine; a data set at a URL gets other files by: ddlf data repartition"
        raise DatasetError(f"there is no {path}", hint=hint)
    kind, files = _kind(path)
    encoded = (".parquet", ".tar", ".tfrecord")
    of = {
        "columns": (".npz", "arrays", *encoded),
        "part": (".npz", "arrays"),
        "label": (".csv", ".parquet"),
        "image_size": ("images", *encoded),
        "ragged": ("images", *encoded),
    }
    given = {"columns": columns, "part": part, "label": label, "image_size": image_size, "ragged": ragged}
    for name, value in given.items():
        if value and kind not in of[name] and kind in KINDS:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect with {path}", hint="leave it out")
    with explained(path, "read"):
        if kind in (".npy", ".npz", "arrays"):
            from ddlf.data.arrays import Arrays

            return Arrays(path, columns=columns, part=part)
        if kind == "images":
            from ddlf.data.images import Images

            return Images(path, image_size, ragged)
        if kind == ".csv":
            from ddlf.data.tables import Table

            return Table(path, label)
        if kind == "placed":
            from ddlf.data.place import Folder
            from ddlf.data.repartition import PartitionedSource

            return PartitionedSource(Folder(path))
        if kind == ".parquet":
            from ddlf.data.parquet import Parquet

            return Parquet(path, files, columns=columns, label=label, image_size=image_size, ragged=ragged)
        if kind == ".tar":
            from ddlf.data.tar import open_tar

            return open_tar(path, files, columns=columns, image_size=image_size, ragged=ragged)
        if kind == ".tfrecord":
            from ddlf.data.tfrecord import open_tfrecord

            return open_tfrecord(path, files, columns=columns, image_size=image_size, ragged=ragged)
    raise DatasetError(
        f"{path} is of no kind that is known",
        hint="name a .npz, .npy, .csv, .parquet, .tar or .tfrecord file, or a folder",
    )


def state_of(path: Path, *options: str) -> str:
    """What there is at a path, by names, sizes and times, and how it is read: 16 hex digits, others when a file was written to since.

    Raises:
        DatasetError: It cannot be looked at.
    """
    total = hashlib.sha256(repr((str(path.resolve()), options)).encode())
    with explained(path, "read"):
        folders = os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]
        for folder, _, names in sorted(folders):
            for name in sorted(names):
                found = os.stat(os.path.join(folder, name), follow_symlinks=True)
                total.update(f"{folder}/{name} {found.st_size} {found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return total.hexdigest()[:16]


def _kind(path: Path) -> tuple[str, list[Path]]:
    """What a path holds, and its files where there may be several."""
    if path.is_dir():
        if (path / NAME).exists():
            return "placed", []
        for kind, pattern in {
            "arrays": "*.npy",
            ".parquet": "*.parquet",
            ".tar": "*.tar*",
            ".tfrecord": "*.tfrec*",
        }.items():
            if found := sorted(file for file in path.glob(pattern) if file.is_file()):
                return kind, found
        return "images", []
    name = path.name.lower()
    for kind, within in {".tar": (".tar", ".tgz"), ".tfrecord": (".tfrec",)}.items():
        if any(part in name for part in within):
            return kind, [path]
    return path.suffix.lower(), [path]
