"""Data sets that a program makes while they are read: Keras's ``PyDataset``, ``tf.data`` pipelines, generators.

Runs on every node that has data. A batch of a ``PyDataset`` or a pipeline, or a part of a generator, takes the role of
a partition file: it has a number and a count of samples. So code that trains on files also trains on these data sets.
Samples do not travel: each node makes its own. Nodes compare shapes, counts and the first labels.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ddlf.data.data_set import DataSet, Decode, columns_of_batch, columns_text
from ddlf.data.manifest import KINDS, Manifest, PartitionFile, check_columns
from ddlf.data.partition_file import Arrays
from ddlf.data.trees import named
from ddlf.errors import AppError, DatasetError

Read = Callable[[int], Arrays]
MOST_BATCHES = 10**7
"""Maximum number of batches, because nodes compare a line for each batch."""


class Generated(DataSet):
    """A data set whose samples the user's code generates when they are needed.

    Args:
        name: The user's name of the data set, for errors.
        unit: Word for one unit: a batch or a part.
        first: Columns of the first batch.
        sizes: Number of samples of each unit, each > 0.
        read: Makes the unit with a number from 0.
        in_order: Whether only sequential reading is fast.
        inexact: The reason why the trained samples are unknown; empty if they are known.
        decode: The argument of ``DataSet``.
    """

    on_disk = False

    def __init__(
        self,
        name: str,
        unit: str,
        first: Arrays,
        sizes: Sequence[int],
        read: Read,
        *,
        in_order: bool,
        inexact: str,
        decode: Decode | None = None,
    ) -> None:
        self._name, self._unit, self._read, self._lock = name, unit, read, threading.Lock()
        self.in_order, self.inexact = in_order, inexact
        columns = columns_of_batch(first)
        try:
            check_columns(columns)
        except ValueError as error:
            raise DatasetError(f"{name}: {error}", hint="give arrays of numbers, with rows of one shape") from None
        row = sum(column.row_bytes for column in columns.values())
        # Random augmentation may change inputs, but labels show whether all nodes have the samples in one order.
        labels = [array for column, array in first.items() if column[0] == "y"] or list(first.values())
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in labels)).hexdigest()
        firsts = itertools.accumulate(sizes, initial=0)
        files = [
            PartitionFile(f"{unit} {number}", size, size * row, "" if number or inexact else digest, begin)
            for number, (size, begin) in enumerate(zip(sizes, firsts, strict=False))
        ]
        super().__init__(Manifest(columns, files), decode)

    def __str__(self) -> str:
        return self._name

    def load(self, number: int) -> Arrays:
        """Generate a unit (a batch or a part), and check its columns and its number of samples."""
        where = f"{self._unit} {number} of {self}"
        with self._lock:
            try:
                arrays = self._read(number)
            except (AppError, DatasetError):
                raise
            except Exception as error:
                raise DatasetError(
                    f"{where} cannot be made: {type(error).__name__}: {error}", hint="check the code that makes it"
                ) from error
        declared = self.manifest.files[number].samples
        check_alike(where, arrays, self.manifest.columns)
        if (samples := len(next(iter(arrays.values())))) != declared:
            raise DatasetError(
                f"{where} has {samples:,} samples, not {declared:,}", hint="yield as many samples as you declared"
            )
        return arrays

    def interrupt(self) -> None:
        """Do nothing: the user's code cannot be interrupted."""

    def newer(self, version: int) -> None:
        """Return None, because there is only one version."""

    def mapped(self, number: int, room: int | None = None) -> Arrays:
        """Generate a unit (a batch or a part) in memory, because generated data is on no disk."""
        return self.load(number)


def check_alike(where: str, arrays: Arrays, columns: Any) -> None:
    """Refuse a batch whose columns have other names, types or shapes than the first batch.

    Raises:
        DatasetError: The message compares both.
    """
    if (batch_columns := columns_of_batch(arrays)) != columns:
        raise DatasetError(
            f"{where} has {columns_text(batch_columns)}, but the first has {columns_text(columns)}",
            hint="give all batches the same shape and type",
        )


def batch_of(where: str, batch: Any) -> Arrays:
    """Convert a batch in the form of Keras's ``fit``, such as ``(x, y)``, to columns by name.

    Raises:
        DatasetError: The object is not a batch.
    """
    parts = batch if isinstance(batch, tuple) else (batch,)
    if not 1 <= len(parts) <= 3:
        raise DatasetError(f"{where} is a tuple of {len(parts)}", hint="give (x,), (x, y) or (x, y, sample_weight)")
    try:
        arrays = named({name: part for name, part in zip("xyw", parts, strict=False) if part is not None})
        bad = next((name for name, array in arrays.items() if array.dtype.kind not in KINDS or not array.ndim), None)
    except (TypeError, ValueError):  # the rows have different lengths
        arrays, bad = {}, "x"
    if bad is not None or not any(name[0] == "x" for name in arrays):
        kind = type(parts[0]).__name__
        raise DatasetError(
            f"{where} has no arrays of numbers for {bad or 'x'} (a {kind})", hint="give arrays as fit does"
        )
    if len(lengths := {len(array) for array in arrays.values()}) > 1 or not max(lengths):
        lengths_text = ", ".join(f"{name} has {len(array)} rows" for name, array in arrays.items())
        raise DatasetError(f"{where}: {lengths_text}", hint="give every sample one row in each array")
    return arrays


def as_data_set(name: str, value: Any) -> DataSet | None:
    """Convert a ``PyDataset``, a pipeline or another iterable of batches in an app's attribute to a data set. Return
    None for other values, such as arrays.

    Args:
        name: Name of the app's attribute.
        value: Value of the attribute.

    Raises:
        DatasetError: The data cannot be used.
    """
    if isinstance(value, DataSet):
        return value
    keras, tf = sys.modules.get("keras"), sys.modules.get("tensorflow")
    if keras is not None and isinstance(value, keras.utils.PyDataset):
        return _from_pydataset(name, value)
    if tf is not None and isinstance(value, tf.data.Dataset):
        return _from_pipeline(name, value, tf)
    if inspect.isgenerator(value) or inspect.isgeneratorfunction(value):
        raise DatasetError(
            f"{name} is a generator, which can be read only once",
            hint=f"write self.{name} = ddlf.data.generated(function, samples): each slot calls the function for its part",
        )
    return None


def _from_pydataset(name: str, data: Any) -> Generated:
    try:
        batches = data.num_batches
    except NotImplementedError:  # the object defines neither num_batches nor a length
        batches = None
    if batches is None:
        raise DatasetError(f"{name} does not say how many batches it has", hint="give it __len__")
    return _from_batches(
        name, batches, lambda number: batch_of(f"batch {number} of {name}", data[number]), in_order=False
    )


def _from_batches(name: str, batches: int, read: Read, *, in_order: bool) -> Generated:
    """Return a data set of numbered batches. All batches except the last one have the size of the first batch."""
    if not 0 < batches <= MOST_BATCHES:
        raise DatasetError(f"{name} has {batches:,} batches", hint=f"1 to {MOST_BATCHES:,} can be used")
    first, last = read(0), read(batches - 1)
    _check_order(name, first, read(0))
    sizes = [*[_rows(first)] * (batches - 1), _rows(last)]
    return Generated(name, "batch", first, sizes, read, in_order=in_order, inexact="")


def _from_pipeline(name: str, data: Any, tf: Any) -> Generated:
    batches = int(data.cardinality())
    if batches == tf.data.INFINITE_CARDINALITY:
        raise DatasetError(f"{name} has no end", hint="end it with .take(batches), or leave out .repeat()")
    if batches == tf.data.UNKNOWN_CARDINALITY:
        raise DatasetError(
            f"{name} does not say how many batches it has",
            hint="end it with .apply(tf.data.experimental.assert_cardinality(batches)), or see ddlf.data.generated",
        )

    def begin(number: int) -> Iterator[Any]:
        with tf.device("CPU:0"):
            return iter(data.skip(number))

    reached = -1
    remaining: Iterator[Any] = iter(())

    def read(number: int) -> Arrays:
        nonlocal reached, remaining
        if number != reached:
            remaining = begin(number)
        try:
            batch = next(remaining)
        except StopIteration:
            raise DatasetError(
                f"{name} ends before batch {number} of {batches}", hint="yield as many batches as it declares"
            ) from None
        reached = number + 1
        return batch_of(f"batch {number} of {name}", batch)

    return _from_batches(name, batches, read, in_order=True)


def generated(function: Callable[[int], Iterable[Any]], samples: Sequence[int], *, endless: bool = False) -> Generated:
    """Return a data set whose parts a function generates. ``ddlf.data.generated`` describes the arguments."""
    name = getattr(function, "__name__", type(function).__name__)
    sizes = list(samples) if isinstance(samples, Sequence) else [samples]
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise AppError(
            f"samples of the parts that {name} generates must be whole numbers > 0, got {samples!r}",
            hint="for instance ddlf.data.generated(function, [50_000, 50_000])",
        )
    if not callable(function) or inspect.isgenerator(function):
        raise AppError(f"{name} is not a function", hint="give one that takes the number of a part, and yields batches")
    unfinished: dict[int, Iterator[Arrays]] = {}

    def batches(part: int) -> Iterator[Arrays]:
        for number, batch in enumerate(function(part)):
            yield batch_of(f"batch {number} of part {part} of {name}", batch)

    def read(part: int) -> Arrays:
        declared, count, received = sizes[part], 0, list[Arrays]()
        remaining = unfinished.pop(part, None) or batches(part)
        while count < declared:
            batch = next(remaining, None)
            if batch is None and endless and received:
                raise DatasetError(
                    f"part {part} of {name} has an end, after {count:,} more samples", hint="leave out endless"
                )
            if batch is None:
                amount = f"{count:,} samples, not {declared:,}" if received else "nothing"
                raise DatasetError(f"part {part} of {name} yields {amount}", hint="give the true number in samples")
            check_alike(f"part {part} of {name}", batch, data_set.manifest.columns)
            received.append(batch)
            count += _rows(batch)
        rows = {column: np.concatenate([batch[column] for batch in received]) for column in received[0]}
        if endless:
            surplus = {column: array[declared:] for column, array in rows.items()}
            unfinished[part] = itertools.chain([surplus], remaining) if count > declared else remaining
            return {column: array[:declared] for column, array in rows.items()}
        if count > declared or next(remaining, None) is not None:
            raise DatasetError(
                f"part {part} of {name} yields more than {declared:,} samples", hint="give the true number in samples"
            )
        return rows

    first = next(batches(0), None)
    if first is None:
        raise DatasetError(f"part 0 of {name} yields nothing", hint="have it yield batches: (x, y)")
    if not endless:
        _check_order(f"the first value that {name} yields", first, next(batches(0), first))
    reason = f"{name} is endless, so the trained samples are unknown: the ledger is not exact"
    data_set = Generated(name, "part", first, sizes, read, in_order=False, inexact=reason if endless else "")
    return data_set


def _rows(batch: Arrays) -> int:
    return len(next(iter(batch.values())))


def _check_order(name: str, first: Arrays, second: Arrays) -> None:
    """Refuse data whose order changes with each pass, because then some samples would be trained on twice or never."""
    labels = [column for column in first if column[0] == "y"]
    if not all(np.array_equal(first[column], second[column]) for column in labels):
        raise DatasetError(
            f"{name} has another order in each pass", hint="leave out its shuffle: the setting shuffle mixes samples"
        )
