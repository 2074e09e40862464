"""What a data set can be made of: arrays in files, folders of images, tables. Each gives its samples in order, some at a time."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ddlf.data.manifest import NAME
from ddlf.data.os_errors import explained
from ddlf.data.rows import Source
from ddlf.errors import ConfigError, DatasetError

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
