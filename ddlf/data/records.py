"""A source of samples that are read one by one from tar or TFRecord files. Each sample has a few named arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data.images import on_all_cores
from ddlf.data.manifest import KINDS, Column, check_columns
from ddlf.data.rows import Rows, check_ragged, chosen, longest, row_type, set_cell
from ddlf.errors import DatasetError

AT_ONCE = 256
"""Number of samples that are read before all cores decode them."""
Record = Mapping[str, Callable[..., np.ndarray[Any, Any]]]
"""Functions that make the arrays of a sample, by name. With ``encoded=True`` they return images and texts as bytes."""


class Records:
    """A source of samples that are read one by one. The first one determines the columns, which all others must have.

    Args:
        path: File or folder, for errors.
        samples: Number of samples.
        read: Yields all samples in order, each with a text about its position.
        columns: The option of ``open_source``.
        usual: New names for columns in the files, if ``columns`` is empty.
        ragged: The option of ``open_source``.

    Raises:
        DatasetError: There are no samples, or they contain no numbers.
        ConfigError: There is no column with a given name.
    """

    classes: Sequence[str] = ()

    def __init__(
        self,
        path: Path,
        samples: int,
        read: Callable[[], Generator[tuple[str, Record], None, None]],
        columns: str = "",
        usual: Mapping[str, str] | None = None,
        ragged: str = "",
    ) -> None:
        if not samples:
            raise DatasetError(f"{path} has no samples", hint="check the program that made it")
        self.samples, self._read = samples, read
        with closing(read()) as records:
            self._first, first = next(records)
        self._names = chosen(columns, list(first), path, usual or {})
        self._ragged = check_ragged(ragged, list(self._names), path)
        self.columns: dict[str, Column] = {}
        for name, old in self._names.items():
            array = self._array(name, first)
            if array.dtype.kind not in KINDS:
                raise DatasetError(
                    f"{self._first}: {old} is neither a number nor an image",
                    hint="name others with --columns, or convert it",
                )
            self.columns[name] = Column(array.dtype.name, array.shape)
        for name in self._ragged:  # the length of the longest row is known only after all samples have been read
            # otherwise, after an error, the file would stay open until the next garbage collection
            with closing(read()) as records:
                column, most = self.columns[name], longest(self._array(name, record) for _, record in records)
            self.columns[name] = Column(column.dtype, (most, *column.shape[1:]), ragged=True)
        try:
            check_columns(self.columns)
        except ValueError as error:
            raise DatasetError(f"{self._first}: {error}", hint="name others with --columns") from None

    def rows(self, at_once: int, first: int = 0) -> Iterator[Rows]:
        """Yield the samples in order, from number ``first``, in pieces of at most ``at_once``."""
        with closing(self._read()) as every:
            records = itertools.islice(every, first, None)
            for start in range(first, self.samples, at_once):
                rows = np.empty(min(at_once, self.samples - start), row_type(self.columns))
                for done in range(0, len(rows), AT_ONCE):
                    part = list(itertools.islice(records, min(AT_ONCE, len(rows) - done)))
                    for number, arrays in enumerate(on_all_cores(lambda entry: self._sample(*entry), part), done):
                        for name, array in arrays.items():
                            set_cell(rows, name, number, array)
                yield rows

    def _array(self, name: str, record: Record) -> np.ndarray[Any, Any]:
        make = record[self._names[name]]
        return make(encoded=True) if name in self._ragged else make()

    def _sample(self, where: str, record: Record) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays of a sample, which must have the types and shapes of the first sample."""
        arrays = {}
        for name, old in self._names.items():
            if old not in record:
                raise DatasetError(f"{where} has no {old}, but {self._first} has", hint="leave it out with --columns")
            array, column = self._array(name, record), self.columns[name]
            shape = (*column.shape[:1], *array.shape[1:]) if column.ragged and array.shape else array.shape
            if (array.dtype.name, shape) != (column.dtype, column.shape):
                raise DatasetError(
                    f"{where}: {old} is {array.dtype.name} of shape {array.shape}, but that of {self._first} is "
                    f"{column.dtype} of shape {column.shape}",
                    hint="give all samples one shape beforehand; for images use --image-size 64x64",
                )
            arrays[name] = array
        return arrays
