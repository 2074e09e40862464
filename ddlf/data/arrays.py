"""A source of samples in NumPy files: ``.npz``, ``.npy``, or a folder of ``.npy`` files. It never unpickles anything."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from ddlf.data.manifest import KINDS, Column, check_columns
from ddlf.data.rows import Rows, chosen, row_type
from ddlf.errors import ConfigError, DatasetError

MAX_MEMBERS = 1000


class Arrays:
    """A source of samples whose columns are the arrays of NumPy files, with one row for each sample.

    Args:
        path: File or folder.
        columns: The option of ``open_source``.
        part: The option of ``open_source``. By default ``"train"`` if there is an array ``x_train``; otherwise all
            arrays belong to one part.

    Raises:
        DatasetError: An array cannot be used.
        ConfigError: No array has a name that was given.
    """

    classes: Sequence[str] = ()

    def __init__(self, path: Path, *, columns: str = "", part: str = "") -> None:
        self._path = path
        try:
            self._open: dict[str, Callable[[], Any]] = self._members()
            names = self._chosen(columns, part)
            heads = {new: self._head(old) for new, old in names.items()}
        except (ConfigError, DatasetError):
            raise
        except (zipfile.BadZipFile, EOFError, ValueError, KeyError) as error:
            raise DatasetError(f"{path} cannot be read ({error})", hint="copy it again") from None
        self._names = names
        lengths = {new: shape[0] for new, (shape, _) in heads.items()}
        if len(set(lengths.values())) > 1:
            raise DatasetError(
                f"{path}: " + ", ".join(f"{name} has {length:,} rows" for name, length in lengths.items()),
                hint="name the arrays that belong together with --columns",
            )
        self.samples: int = next(iter(lengths.values()))
        if not self.samples:
            raise DatasetError(f"{path} has no samples", hint="check the program that made it")
        self.columns = {new: Column(kind.name, shape[1:]) for new, (shape, kind) in heads.items()}
        try:
            check_columns(self.columns)
        except ValueError as error:
            raise DatasetError(f"{path}: {error}", hint="save arrays of numbers") from None

    def _members(self) -> dict[str, Callable[[], Any]]:
        if self._path.is_dir():
            return {file.stem: partial(open, file, "rb") for file in sorted(self._path.glob("*.npy"))}
        if self._path.suffix.lower() == ".npy":
            return {"x": partial(open, self._path, "rb")}
        self._archive = zipfile.ZipFile(self._path)
        names = self._archive.namelist()
        if len(names) > MAX_MEMBERS or len(set(names)) != len(names):
            raise DatasetError(f"{self._path} has {len(names):,} members, or a duplicate", hint="save the arrays again")
        return {name.removesuffix(".npy"): partial(self._archive.open, name) for name in names if name.endswith(".npy")}

    def _chosen(self, columns: str, part: str) -> dict[str, str]:
        """Return the arrays that the options choose, as a dict from new names to the names in the file."""
        names = list(self._open)
        if columns and part:
            raise ConfigError("--columns and --part both choose arrays", hint="leave one of them out")
        if not columns and not part and "x_train" in names:
            part = "train"
        if part:
            chosen_names = {name.removesuffix(f"_{part}"): name for name in names if name.endswith(f"_{part}")}
            if not chosen_names:
                raise ConfigError(f"{self._path} has no array of {part}: it has {', '.join(names)}")
            return chosen_names
        return chosen(columns, names, self._path, {}, "array")

    def _head(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and type of an array in the files, after checking that its bytes are complete and in row
        order.
        """
        with self._open[name]() as file:
            shape, by_column, kind = read_header(file)
            size = self._archive.getinfo(f"{name}.npy").file_size if hasattr(self, "_archive") else _size(file)
            actual = size - file.tell()
        if kind.hasobject or kind.kind not in KINDS:
            raise DatasetError(
                f"{self._path}: {name} holds {'Python objects' if kind.hasobject else kind}, not numbers",
                hint="save arrays of numbers"
                + ", as numpy.unique(y, return_inverse=True)[1] has of names" * (kind.kind in "SU"),
            )
        if not shape:
            raise DatasetError(
                f"{self._path}: {name} is a single number, not an array", hint="leave it out with --columns"
            )
        claimed = int(np.prod([*shape, kind.itemsize], dtype=object))
        if claimed != actual:
            raise DatasetError(
                f"{self._path}: {name} claims {claimed:,} bytes, but has {actual:,}",
                hint="copy it again",
            )
        if by_column and len(shape) > 1:
            raise DatasetError(
                f"{self._path}: {name} is saved column by column", hint="save it with numpy.ascontiguousarray"
            )
        return shape, kind

    def rows(self, at_once: int, first: int = 0) -> Iterator[Rows]:
        """Yield the samples in order, from number ``first``, in pieces of at most ``at_once``."""
        with contextlib.ExitStack() as stack:
            opened = {}
            for new, old in self._names.items():
                file = opened[new] = stack.enter_context(self._open[old]())
                opened[new] = (file, read_header(file)[2])
                file.seek(first * prod(self.columns[new].shape) * opened[new][1].itemsize, os.SEEK_CUR)
            for start in range(first, self.samples, at_once):
                rows = np.empty(min(at_once, self.samples - start), row_type(self.columns))
                for name, (file, kind) in opened.items():
                    shape = (len(rows), *self.columns[name].shape)
                    try:
                        rows[name] = np.frombuffer(_exactly(file, prod(shape) * kind.itemsize), kind).reshape(shape)
                    except (zipfile.BadZipFile, EOFError, ValueError) as error:
                        raise DatasetError(f"{self._path} cannot be read ({error})", hint="copy it again") from None
                yield rows


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a ``.npy`` file: the shape, whether values are stored column by column, and their type.

    Raises:
        ValueError: The file has another format.
    """
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version} of the format")
    header: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(file)
    return header


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise EOFError("it ends too early")
    return data


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size
