"""Opens the sources of data sets: arrays in files, folders of images, tables. Each yields its samples in order."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ddlf.data.manifest import NAME
from ddlf.data.os_errors import explained
from ddlf.data.rows import SampleSource
from ddlf.errors import ConfigError, DatasetError

KINDS = (".npz", ".npy", ".csv", ".parquet", ".tar", ".tfrecord", "arrays", "images", "placed")
"""The kinds of sources."""


def open_source(
    path: Path, *, columns: str = "", part: str = "", label: str = "", image_size: str = "", ragged: str = ""
) -> SampleSource:
    """Open the source of samples at a path, such as a folder of images.

    Args:
        path: A ``.npz`` or ``.npy`` file, a ``.csv`` table, or a Parquet, tar or TFRecord file; a folder of Parquet,
            tar, TFRecord or ``.npy`` files; a folder with one subfolder of images for each class; or a data set of
            partition files.
        columns: Chosen columns, separated by commas. ``new=old`` renames a column. Empty means all columns.
        part: ``"train"``, ``"val"`` or ``"test"``. It chooses the arrays whose names have this suffix, and names them
            ``x``, ``y`` and ``w``.
        label: Name of the column with the labels.
        image_size: Width and height for resizing all images, such as ``"64x64"``; empty if they have one size.
        ragged: Columns, separated by commas, whose rows have different lengths. Images and texts there stay bytes.

    Raises:
        DatasetError: The path holds no usable source.
        ConfigError: An option has no effect with this source.
    """
    if not path.exists():
        hint = "name a .npz, .npy or .csv file, or a folder"
        if ":/" in str(path):
            hint = "name a source on this machine; ddlf data repartition changes the files of a data set at a URL"
        raise DatasetError(f"there is no {path}", hint=hint)
    kind, files = _kind(path)
    encoded = (".parquet", ".tar", ".tfrecord")
    kinds_of_option = {
        "columns": (".npz", "arrays", *encoded),
        "part": (".npz", "arrays"),
        "label": (".csv", ".parquet"),
        "image_size": ("images", *encoded),
        "ragged": ("images", *encoded),
    }
    options = {"columns": columns, "part": part, "label": label, "image_size": image_size, "ragged": ragged}
    for name, value in options.items():
        if value and kind not in kinds_of_option[name] and kind in KINDS:
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
            from ddlf.data.location import Folder
            from ddlf.data.split import PartitionedSource

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
        f"{path} has an unknown format",
        hint="name a .npz, .npy, .csv, .parquet, .tar or .tfrecord file, or a folder",
    )


def state_of(path: Path, *options: str) -> str:
    """Return a hash of a source and its options, 16 hex digits, from names, sizes and times of its files.

    The hash changes when a file is written.

    Raises:
        DatasetError: The files cannot be inspected.
    """
    total = hashlib.sha256(repr((str(path.resolve()), options)).encode())
    with explained(path, "read"):
        folders = os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]
        for folder, _, names in sorted(folders):
            for name in sorted(names):
                about = os.stat(os.path.join(folder, name), follow_symlinks=True)
                total.update(f"{folder}/{name} {about.st_size} {about.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return total.hexdigest()[:16]


def _kind(path: Path) -> tuple[str, list[Path]]:
    """Return the kind of source at a path, such as Parquet files, and its files if the kind may have several."""
    if path.is_dir():
        if (path / NAME).exists():
            return "placed", []
        for kind, pattern in {
            "arrays": "*.npy",
            ".parquet": "*.parquet",
            ".tar": "*.tar*",
            ".tfrecord": "*.tfrec*",
        }.items():
            if files := sorted(file for file in path.glob(pattern) if file.is_file()):
                return kind, files
        return "images", []
    name = path.name.lower()
    for kind, within in {".tar": (".tar", ".tgz"), ".tfrecord": (".tfrec",)}.items():
        if any(part in name for part in within):
            return kind, [path]
    return path.suffix.lower(), [path]
