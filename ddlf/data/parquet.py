"""A source of Parquet files with columns of numbers, vectors of one length, or encoded images. Needs pyarrow."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data import arrow
from ddlf.data.arrow import Where
from ddlf.data.images import Decoder, is_image
from ddlf.data.manifest import MAX_CLASSES, Column, check_columns
from ddlf.data.parquet_files import arrow_errors
from ddlf.data.rows import Rows, check_ragged, chosen, longest, row_type, set_cell
from ddlf.errors import ConfigError, DatasetError

MOST_ROWS = 4096
"""Maximum number of rows that are read at a time, because the size of a row is only known after reading it."""


class Parquet:
    """A source of samples with the columns of Parquet files.

    Args:
        path: The path that the user has named.
        files: The Parquet files at this path, in order. All must have the same columns.
        columns: The option of ``open_source``.
        label: Name of the column that becomes ``y``. Texts become class numbers, in the order of names.
        image_size: The option of ``open_source``.
        ragged: The option of ``open_source``.

    Raises:
        DatasetError: A file cannot be read or used, or pyarrow is missing.
        ConfigError: There is no column with a given name.
    """

    def __init__(
        self,
        path: Path,
        files: Sequence[Path],
        *,
        columns: str = "",
        label: str = "",
        image_size: str = "",
        ragged: str = "",
    ) -> None:
        self._arrow, self._files, self._decoder = arrow.load_pyarrow(), files, Decoder(image_size)
        self._path = path
        self.samples = 0
        available: list[str] = []
        for file in files:
            with self._opened(file) as opened:
                names = list(opened.schema_arrow.names)
                if available and names != available:
                    raise DatasetError(
                        f"{file} has the columns {', '.join(names)}, but {files[0]} has {', '.join(available)}",
                        hint="leave out the files that do not belong to this data set",
                    )
                available, self.samples = names, self.samples + opened.metadata.num_rows
        if not self.samples:
            raise DatasetError(f"{path} has no samples", hint="check the program that made it")
        if label and label not in available:
            message, hint = arrow.no_column(path, label, available)
            raise ConfigError(message, hint=hint)
        self._names = chosen(columns, available, path, {label: "y"} if label else {})
        self._ragged = {self._names[name] for name in check_ragged(ragged, list(self._names), path)}
        self.classes: Sequence[str] = self._classes(label) if label else ()
        self._number_of = {name: number for number, name in enumerate(self.classes)}
        self._label = label
        self.columns: dict[str, Column] = {}
        for name, array in next(self._pieces(1)).items():
            self.columns[name] = Column(array.dtype.name, array.shape[1:], self._names[name] in self._ragged)
        for name in [name for name, column in self.columns.items() if column.ragged]:
            most = longest(row for piece in self._pieces(MOST_ROWS) for row in piece[name])
            self.columns[name] = Column(self.columns[name].dtype, (most,), ragged=True)
        try:
            check_columns(self.columns)
        except ValueError as error:
            raise DatasetError(f"{path}: {error}", hint="name other columns with --columns") from None

    def rows(self, at_once: int, first: int = 0) -> Iterator[Rows]:
        """Yield the samples in order, from number ``first``, in pieces of at most ``at_once``."""
        for piece in self._pieces(min(at_once, MOST_ROWS), first):
            rows = np.empty(len(next(iter(piece.values()))), row_type(self.columns))
            for name, array in piece.items():
                column = self.columns[name]
                if column.ragged:
                    for number, row in enumerate(array):
                        set_cell(rows, name, number, row)
                    continue
                if (array.dtype.name, array.shape[1:]) != (column.dtype, column.shape):
                    raise DatasetError(
                        f"column {self._names[name]!r} has rows of {array.dtype.name} {array.shape[1:]} and of "
                        f"{column.dtype} {column.shape}",
                        hint="give all rows one shape beforehand; for images use --image-size 64x64",
                    )
                rows[name] = array
            yield rows

    def _opened(self, file: Path) -> Any:
        with arrow_errors(f"the Parquet file {file}"):
            return self._arrow.parquet.ParquetFile(file)

    def _pieces(self, at_once: int, first: int = 0) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        for file in self._files:
            with self._opened(file) as opened:
                if opened.metadata.num_rows <= first:
                    first -= opened.metadata.num_rows
                    continue
                batches, done = opened.iter_batches(at_once, columns=list(self._names.values())), 0
                while True:
                    with arrow_errors(str(file)):
                        group = next(batches, None)
                    if group is None:
                        break
                    batch, begin = group.slice(min(first, len(group))), done + first
                    done, first = done + len(group), max(first - len(group), 0)
                    if len(batch):
                        where = partial(_row_of, file, begin)
                        yield {name: self._array(batch.column(old), old, where) for name, old in self._names.items()}

    def _array(self, values: Any, name: str, where: Where) -> Any:
        """Convert a piece of an Arrow column to an array with a row for each sample, or to ``Ragged`` if lengths
        differ.
        """
        kind = arrow.kind_of(values.type)
        if name == self._label and self.classes:
            texts = arrow.blobs(values, name, where)
            return np.array([self._number_of[texts[row].tobytes().decode()] for row in range(len(texts))], np.int64)
        if name in self._ragged:
            if kind not in ("list", "bytes", "image", "text"):
                raise DatasetError(
                    f"{where(0)}: column {name!r} holds {values.type}, not rows of different lengths",
                    hint="leave it out of --ragged",
                )
            rows = arrow.blobs(values, name, where)
            for row in range(len(rows)) if kind in ("bytes", "image") else ():
                if is_image(data := rows[row].tobytes()):
                    self._decoder.checked(io.BytesIO(data), f"{where(row)}, {name}")
            return rows
        if kind in ("bytes", "image"):
            images = arrow.blobs(values, name, where)
            encoded = [images[row].tobytes() for row in range(len(images))]
            if not all(map(is_image, encoded)):
                raise DatasetError(f"{where(0)}: column {name!r} holds bytes that are not images", hint="convert it")
            pixels = [self._decoder.pixels(io.BytesIO(data), f"{where(n)}, {name}") for n, data in enumerate(encoded)]
            if len({(array.shape, array.dtype) for array in pixels}) > 1:
                raise DatasetError(
                    f"{where(0)}: column {name!r} has images of several sizes or modes", hint="use --image-size 64x64"
                )
            return np.stack(pixels)
        if kind not in ("number", "list"):
            raise DatasetError(
                f"{self._path}: column {name!r} holds {values.type}, not numbers",
                hint="name other columns with --columns, or name the text column with the labels with --label",
            )
        return arrow.numbers(values, name, where)

    def _classes(self, label: str) -> Sequence[str]:
        """Return the sorted texts of the label column; empty if the labels are numbers."""
        texts: set[str] = set()
        for file in self._files:
            with self._opened(file) as opened:
                kind = opened.schema_arrow.field(label).type
                if not (self._arrow.types.is_string(kind) or self._arrow.types.is_large_string(kind)):
                    return ()
                for batch in opened.iter_batches(MOST_ROWS, columns=[label]):
                    texts.update(text for text in batch.column(0).unique().to_pylist() if text is not None)
                    if "" in texts:
                        raise DatasetError(
                            f"{file}: column {label!r} has an empty text", hint="fill the text, or leave its row out"
                        )
                    if len(texts) > MAX_CLASSES:
                        raise DatasetError(
                            f"{file}: {label!r} has more than {MAX_CLASSES:,} texts", hint="name another label"
                        )
        return sorted(texts)


def _row_of(file: Path, begin: int, row: int) -> str:
    return f"{file}, row {begin + row:,}"
