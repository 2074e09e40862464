"""What a data set can be made of: arrays in files, folders of images, tables. Each gives its samples in order, some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ddlf.errors import ConfigError, DatasetError
from ddlf.storage.explained import explained
from ddlf.storage.manifest import Column

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

    def rows(self, at_once: int) -> Iterator[Rows]:
        """All samples in order, as structured arrays of at most so many."""


def row_type(columns: dict[str, Column]) -> np.dtype[Any]:
    """A sample as one value: a field for each column."""
    return np.dtype(
        [(name, np.dtype(column.dtype).newbyteorder("<"), column.shape) for name, column in columns.items()]
    )


def open_source(path: Path, *, columns: str = "", part: str = "", label: str = "", image_size: str = "") -> Source:
    """Find out what a path holds.

    Args:
        path: A ``.npz`` or ``.npy`` file, a ``.csv`` table, a folder of ``.npy`` files, or one with a folder of images for each class.
        columns: Arrays of an archive that are meant, with commas; ``new=old`` gives one another name. Empty for all.
        part: ``"train"``, ``"val"`` or ``"test"``: the arrays whose names end with that, as ``x``, ``y`` and ``w``.
        label: Name of the table's column that is the label.
        image_size: Width and height that all images are brought to, as ``"64x64"``; empty if they have one size.

    Raises:
        DatasetError: It holds nothing that can be used.
        ConfigError: An option has no use with this source.
    """
    if not path.exists():
        raise DatasetError(f"there is no {path}", hint="name a .npz, .npy or .csv file, or a folder")
    folder = path.is_dir()
    kind = "arrays" if folder and any(path.glob("*.npy")) else "images" if folder else path.suffix.lower()
    of = {"columns": (".npz", "arrays"), "part": (".npz", "arrays"), "label": (".csv",), "image_size": ("images",)}
    for name, value in {"columns": columns, "part": part, "label": label, "image_size": image_size}.items():
        if value and kind not in of[name]:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect with {path}", hint="leave it out")
    with explained(path, "read"):
        if kind in (".npy", ".npz", "arrays"):
            from ddlf.storage.arrays import Arrays

            return Arrays(path, columns=columns, part=part)
        if kind == "images":
            from ddlf.storage.images import Images

            return Images(path, image_size)
        if kind == ".csv":
            from ddlf.storage.tables import Table

            return Table(path, label)
    raise DatasetError(f"{path} is of no kind that is known", hint="name a .npz, .npy or .csv file, or a folder")
