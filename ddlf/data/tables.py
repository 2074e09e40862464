"""A source of samples from a CSV file of numbers. Its first line has the names of columns."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ddlf.data.manifest import MAX_CLASSES, Column
from ddlf.data.rows import Rows, row_type
from ddlf.errors import ConfigError, DatasetError


class Table:
    """A source of samples from a CSV file. Column ``x`` has all values of a line except the label. Column ``y`` has the
    label, if its column is named.

    Inputs are float32, or float64 if an integer has more digits than float32 keeps, such as 16777217. Labels are int64
    if all are integers, float32 if all are numbers, and otherwise the number of the class in the order of names.

    Args:
        path: The file. It is read completely here, because every line must be valid before anything is written.
        label: Name of the label column; empty for none.

    Raises:
        DatasetError: A line has more or fewer values than the first one, or there are no lines.
        ConfigError: There is no column with this name.
    """

    def __init__(self, path: Path, label: str = "") -> None:
        self._path = path
        lines = self._lines()
        head = next(lines, (0, []))[1]
        if label and label not in head:
            raise ConfigError(f"{path} has no column {label!r}", hint=f"it has {', '.join(head)}")
        if all(_is_number(name) for name in head):
            raise DatasetError(
                f"the first line of {path} has no names", hint="write the names of the columns into this line"
            )
        if repeated := next((name for name in head if name.strip() and head.count(name) > 1), ""):
            raise DatasetError(f"{path} has {head.count(repeated)} columns {repeated!r}", hint="give each its own name")
        self._label = head.index(label) if label else None
        self._inputs = [name for name in head if name != label or not label]
        self._width = len(head)
        self.samples, integral, numbers, wide = 0, True, True, False
        texts: set[str] = set()
        for number, line in lines:
            if len(line) != len(head):
                raise DatasetError(
                    f"line {number:,} of {path} has {len(line)} values, but there are {len(head)} names",
                    hint="correct this line",
                )
            self.samples += 1
            wide = wide or any(self._is_wide(text, number) for column, text in enumerate(line) if column != self._label)
            if self._label is not None:
                text = line[self._label]
                if not text.strip():  # one empty label would turn all labels into texts
                    raise DatasetError(
                        f"line {number:,} of {path} has no {label}", hint="fill the value, or leave the line out"
                    )
                integral = integral and _is_whole(text)
                numbers = numbers and (integral or _is_number(text))
                if len(texts) <= MAX_CLASSES:
                    texts.add(text)
        if not self.samples:
            raise DatasetError(f"{path} has no samples", hint="check the program that made it")
        if not numbers and len(texts) > MAX_CLASSES:
            raise DatasetError(f"{path}: {label!r} has more than {MAX_CLASSES:,} texts", hint="name another label")
        self.classes: Sequence[str] = [] if numbers else sorted(texts)
        inputs = self._width - (self._label is not None)
        self.columns = {"x": Column("float64" if wide else "float32", (inputs,))} if inputs else {}
        if self._label is not None:
            self.columns["y"] = Column("float32" if numbers and not integral else "int64", ())

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        try:
            with open(self._path, newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file, strict=True)
                for line in reader:
                    if line:
                        yield reader.line_num, line
        except (csv.Error, UnicodeDecodeError) as error:
            raise DatasetError(
                f"{self._path} is not a CSV file in UTF-8 ({error})", hint="save it as CSV in UTF-8"
            ) from None

    def _is_wide(self, text: str, number: int) -> bool:
        """Return whether float32 cannot represent an integer exactly.

        Raises:
            DatasetError: float64 cannot represent it exactly, either.
        """
        if len(text) < 8 or not _is_whole(text):  # float32 represents all integers up to 2^24
            return False
        if int(float(text)) != int(text):
            raise DatasetError(
                f"line {number:,} of {self._path}: {text.strip()} has more digits than float64 keeps",
                hint="leave the column out, if it only numbers the lines; or save it as .npz or Parquet",
            )
        return int(np.float32(text)) != int(text)

    def rows(self, at_once: int, first: int = 0) -> Iterator[Rows]:
        """Yield the samples in order, from number ``first``, in pieces of at most ``at_once``."""
        lines = itertools.islice(self._lines(), 1 + first, None)
        number_of = {name: number for number, name in enumerate(self.classes)}
        for start in range(first, self.samples, at_once):
            rows = np.empty(min(at_once, self.samples - start), row_type(self.columns))
            for row, (number, line) in zip(range(len(rows)), lines, strict=False):
                if self._label is not None:
                    label = line.pop(self._label)
                    rows["y"][row] = number_of[label] if self.classes else label
                if not line:
                    continue
                try:
                    rows["x"][row] = line
                except ValueError:
                    raise self._no_number(number, line) from None
            yield rows

    def _no_number(self, number: int, inputs: list[str]) -> DatasetError:
        """Return the error about a line with an input that is not a number."""
        name, text = next((name, text) for name, text in zip(self._inputs, inputs, strict=True) if not _is_float(text))
        if not text.strip():
            return DatasetError(
                f"line {number:,} of {self._path} has no {name}", hint="fill the value, or leave the line out"
            )
        return DatasetError(
            f"line {number:,} of {self._path}: {text!r} in the column {name!r} is not a number",
            hint="correct it" + ", or name the labels with --label" * (self._label is None),
        )


def _is_float(text: str) -> bool:
    """Return whether NumPy reads a text as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # Python reads 1_2 as 12, but in a table it is a name


def _is_whole(text: str) -> bool:
    try:
        return "_" not in text and -(2**63) <= int(text) < 2**63
    except ValueError:
        return False
