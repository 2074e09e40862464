"""Parquet files as a data set, without conversion. A row group takes the role of a partition file.

Row groups are numbered in the order of file names, and within a file by position. Parts of slots, the ledger and the
reading order use these numbers, so code that trains on partition files also trains on row groups. All nodes compare one
fingerprint. It covers the files' names, sizes and marks, the hashes of their footers, and the definition of columns.

A row group is read batch by batch into arrays, and only the wanted columns are fetched from the store. The arrays are
kept in the machine's cache if they come from a store, or if the row groups that are read together do not fit into
memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from ddlf.algorithms.reading_order import Shuffle
from ddlf.data import arrow
from ddlf.data.arrow import Where, kind_of, no_column
from ddlf.data.cache import Cache
from ddlf.data.data_set import MAX_SOURCES, SOME, Array, DataSet, Decode, Description
from ddlf.data.images import Decoder, on_all_cores
from ddlf.data.manifest import Column, Manifest, PartitionFile, check_columns
from ddlf.data.parquet_files import COPY, FileVersion, ParquetFiles, arrow_errors
from ddlf.data.partition_file import ENDS, Arrays, Bytes, Ragged, arrays_of
from ddlf.errors import AppError, ConfigError, DatasetDamaged, DatasetError
from ddlf.events.record import size

Columns = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""Names of columns in the files: one name, several names whose columns become one vector, or a dict of these for
several inputs."""

PIECE_BYTES = 2**22
"""Bytes of rows that are read at a time."""
BUFFER_BYTES = 2**23
"""Bytes that are read at a time from all columns of a row group, unless it is read in one piece."""
LONGEST = 2**40
"""Stated length of the longest row of a column of bytes. The true length is unknown."""
KEPT_FOOTERS = 2**24
"""Maximum bytes of footers in memory. Other footers are read again with their row groups."""
DIGEST_BYTES = 32
FEWEST_GROUPS = 8
SMALL_BYTES, LARGE_BYTES = 2**18, 2**28
"""Row groups with sizes between these limits are suitable."""
CONVERT = "write it as numbers, bytes or lists of numbers: times as seconds, decimals as float64, the fields of a struct as columns"


@dataclass(frozen=True)
class Field:
    """A column of the data set, with the names of the Parquet columns that it is made from.

    Args:
        name: Name in the data set: ``x``, ``y``, ``w``, or a leaf of a tree such as ``x['left']``.
        sources: Names in the files.
        kind: ``number`` for numbers, ``image`` for encoded images, ``bytes`` for values that ``decode`` gets unchanged,
            ``label`` for texts that are names of classes.
        classes: Names of classes of a label.
    """

    name: str
    sources: tuple[str, ...]
    kind: str
    classes: tuple[str, ...] = ()

    @property
    def is_blob(self) -> bool:
        """Whether the stored rows have different lengths."""
        return self.kind in ("image", "bytes")

    def read(self, batch: Any, where: Where) -> Array | Ragged:
        """Return the rows of this field in an Arrow batch, as an array or as ``Ragged``.

        Args:
            batch: A batch with all source columns.
            where: Describes a row of the batch, for errors.

        Raises:
            DatasetError: A row has no value, or an unsuitable one.
        """
        if self.is_blob:
            return arrow.blobs(batch.column(self.sources[0]), self.sources[0], where)
        if self.kind == "label":
            return self._numbered(arrow.blobs(batch.column(self.sources[0]), self.sources[0], where), where)
        arrays = [arrow.numbers(batch.column(name), name, where) for name in self.sources]
        return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1)

    def _numbered(self, texts: Ragged, where: Where) -> Array:
        number_of = {name.encode(): number for number, name in enumerate(self.classes)}
        numbers = np.empty(len(texts), np.int64)
        for row in range(len(texts)):
            text = texts[row].tobytes()
            if text not in number_of:
                problem = f"{text.decode(errors='replace')!r}, which is not one of classes" if text else "an empty text"
                raise DatasetError(f"{where(row)}: column {self.sources[0]!r} has {problem}", hint=arrow.FILL)
            numbers[row] = number_of[text]
        return numbers


@dataclass(frozen=True)
class RowGroup:
    """The position of a row group, which is a part of a Parquet file: its file and its number.

    Args:
        head: Its file.
        number: Its number in the file, from 0.
        rows: Its number of rows, > 0.
    """

    head: FileVersion
    number: int
    rows: int


class RowGroups(DataSet):
    """A data set of Parquet files, whose row groups take the role of partition files.

    Args:
        location: A file, a folder, a glob or several files, local or at a URL.
        x: Columns of inputs. A list of names is one input, with the columns side by side; a dict has several inputs.
        y: Columns of labels.
        w: Column with the weights of samples.
        classes: Names of classes, if the label is a text. The number of a class is its index in the list.
        image_size: All images are resized to this width and height.
        decode: The argument of ``DataSet``. It gets images, texts and lists of different lengths unchanged.
        storage_options: Arguments for the driver of the URL.

    Raises:
        DatasetError: Files or columns cannot be used.
        ConfigError: An argument cannot be used.
    """

    def __init__(
        self,
        location: str | Path | Sequence[str],
        *,
        x: Columns | None = None,
        y: Columns | None = None,
        w: Columns | None = None,
        classes: Sequence[str] = (),
        image_size: tuple[int, int] | None = None,
        decode: Decode | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.files = ParquetFiles(location, storage_options)
        heads = self.files.heads()
        schemas = [metadata.schema.to_arrow_schema() for _, metadata in heads]
        columns_of = _chosen_columns({"x": x, "y": y, "w": w}, schemas[0].names, str(self.files))
        self._fields = [self._field(name, names, schemas[0], classes, decode) for name, names in columns_of.items()]
        for (head, _), schema in zip(heads[1:], schemas[1:], strict=True):
            self._check_schema(head, schema, schemas[0])
        if classes and not any(field.kind == "label" for field in self._fields):
            raise ConfigError("classes= has no effect: no label is a text", hint="leave it out")
        if image_size and not any(field.kind == "image" for field in self._fields):
            raise ConfigError(
                "image_size= has no effect: no column has images that are decoded here", hint="leave it out"
            )
        self._groups = [
            RowGroup(head, number, rows)
            for head, metadata in heads
            for number in range(metadata.num_row_groups)
            if (rows := metadata.row_group(number).num_rows)
        ]
        if not self._groups:
            raise DatasetError(f"{self.files} has no rows", hint="check the program that made them")
        self._leaves = self._leaves_in(schemas[0])
        self._footers, self._footer_bytes, self._lock = dict[str, Any](), 0, threading.Lock()
        for head, metadata in heads:
            self._keep(head, metadata)
        self._decoder = Decoder("" if image_size is None else f"{image_size[0]}x{image_size[1]}")
        self._decode = decode
        self._cache, self._whole = Cache(), set[int]()
        self._first = self._read_first()
        self._stored = {
            field.name: Column(
                array.dtype.name, (LONGEST, *array.shape[2:]) if field.is_blob else array.shape[1:], field.is_blob
            )
            for field, array in zip(self._fields, self._first.values(), strict=True)
        }
        self.columns = columns = self._training_columns()
        try:
            check_columns(columns)
        except ValueError as error:
            raise DatasetError(f"{self.files}: {error}", hint="name other columns") from None
        metadata_of = {head.name: metadata for head, metadata in heads}
        recipe = repr((self._fields, columns, image_size))
        units, first = list[PartitionFile](), 0
        for group in self._groups:
            nbytes = self._bytes_of(metadata_of[group.head.name].row_group(group.number), group.rows)
            facts = [group.head.name, group.head.nbytes, group.head.mark, group.head.footer, group.number, recipe]
            digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
            units.append(PartitionFile(f"{group.head.name}#{group.number}", group.rows, nbytes, digest, first))
            first += group.rows
        names = tuple(classes) or _class_names(schemas[0], self._fields)
        super().__init__(Manifest(columns, units, classes=names), decode)
        self.notes = self._notes(schemas[0])
        if len(heads) <= MAX_SOURCES:
            self.sources = {head.name: head.fingerprint for head, _ in heads}
        self._all = frozenset(unit.sha256 for unit in units)

    def __str__(self) -> str:
        return str(self.files)

    @classmethod
    def described(cls, location: Any, shuffle: Shuffle, workers: int) -> Description:
        """Return the text of ``ddlf data info`` about the files. Only the footers are read, so no column is chosen."""
        return Description([*_lines(location)])

    # -- columns ------------------------------------------------------------------------------------------------------

    def _field(
        self, name: str, names: tuple[str, ...], schema: Any, classes: Sequence[str], decode: Decode | None
    ) -> Field:
        """Return the field that reads a column.

        Raises:
            DatasetError: The files have no such column, or its type is not supported.
        """
        kinds = {}
        for source in names:
            if schema.get_field_index(source) < 0:
                message, hint = no_column(self.files, source, schema.names)
                if any(f"{source}=" in file for file in self.files.names):
                    hint = "write it into the files: columns that only the names of folders have are not read"
                raise DatasetError(message, hint=hint)
            kinds[source] = kind_of(schema.field(source).type)
        if len(names) > 1:
            if bad := next((source for source, kind in kinds.items() if kind != "number"), None):
                raise DatasetError(
                    f"{self.files}: {bad!r} holds {schema.field(bad).type}, and only columns of numbers are put side by side",
                    hint="make each of the other columns its own input: x={'left': 'a', 'right': 'b'}",
                )
            return Field(name, names, "number")
        source, kind = names[0], kinds[names[0]]
        if decode is not None and kind in ("list", "image", "bytes", "text"):
            fixed = kind == "list" and arrow.is_fixed(schema.field(source).type)
            return Field(name, names, "number" if fixed else "bytes")
        if kind in ("number", "list"):
            return Field(name, names, "number")
        if kind in ("image", "bytes"):
            return Field(name, names, "image")
        if kind == "text" and name[0] == "y" and classes:
            return Field(name, names, "label", tuple(classes))
        if kind == "text" and name[0] == "y":
            raise DatasetError(
                f"{self.files}: the label {source!r} is a text",
                hint="name the classes in the order of their numbers: classes=['cat', 'dog']",
            )
        raise DatasetError(
            f"{self.files}: column {source!r} holds {schema.field(source).type}, not numbers", hint=CONVERT
        )

    def _check_schema(self, head: FileVersion, schema: Any, expected: Any) -> None:
        for field in self._fields:
            for name in field.sources:
                if schema.get_field_index(name) < 0:
                    message, hint = no_column(self.files.full_name(head.name), name, schema.names)
                    raise DatasetError(message, hint=f"{hint}; name the files that belong together")
                kind, first = schema.field(name).type, expected.field(name).type
                if not kind.equals(first) and (kind_of(kind) != kind_of(first) or kind_of(kind) in ("number", "list")):
                    raise DatasetError(
                        f"{self.files.full_name(head.name)}: column {name!r} holds {kind}, but {first} in {self.files.names[0]}",
                        hint="write all files with one schema; DDLF casts nothing silently",
                    )

    def _leaves_in(self, schema: Any) -> list[str]:
        """Return the names of the Parquet columns to read from the files. For images, only the bytes are read."""
        names = dict.fromkeys(name for field in self._fields for name in field.sources)
        return [f"{name}.bytes" if kind_of(schema.field(name).type) == "image" else name for name in names]

    def _read_first(self) -> Arrays:
        """Read some rows from the beginning of the data set, which determine types and shapes."""
        pieces = self._pieces(0, SOME)
        try:
            return next(pieces)
        finally:
            pieces.close()

    def _training_columns(self) -> dict[str, Column]:
        """Return the description of the columns of training data, from the first rows."""
        if self._decode is not None:
            return self._decoded_columns(0, self._first, min(SOME, self._groups[0].rows))
        columns = {}
        for field in self._fields:
            array = self._first[field.name]
            if field.kind == "image":
                pixels = self._pixels(field, self._first, 0, 0)
                columns[field.name] = Column(pixels.dtype.name, pixels.shape)
            else:
                columns[field.name] = Column(array.dtype.name, array.shape[1:])
        return columns

    def _notes(self, schema: Any) -> list[str]:
        """Return a sentence for each input that combines columns of different types."""
        notes = []
        for field in self._fields:
            kinds = sorted({str(schema.field(name).type) for name in field.sources})
            if len(kinds) > 1:
                dtype = self._stored[field.name].dtype
                notes.append(f"{field.name} of {self} has columns of {', '.join(kinds)} side by side, all as {dtype}")
        return notes

    # -- row groups ---------------------------------------------------------------------------------------------------

    def _where(self, number: int, row: int, *, begin: int = 0) -> str:
        group = self._groups[number]
        return f"{self.files.full_name(group.head.name)}, row group {group.number}, row {begin + row:,}"

    def _metadata(self, head: FileVersion) -> Any:
        metadata = self._footers.get(head.name)
        return self._keep(head, self.files.metadata(head)) if metadata is None else metadata

    def _keep(self, head: FileVersion, metadata: Any) -> Any:
        with self._lock:
            self._footers[head.name] = metadata
            while (
                len(self._footers) > 1
                and sum(footer.serialized_size for footer in self._footers.values()) > KEPT_FOOTERS
            ):
                del self._footers[next(iter(self._footers))]
        return metadata

    def _chunks(self, row_group: Any) -> list[Any]:
        """Return the entries of the Parquet footer for those columns of a row group that the data set uses."""
        chunks = [row_group.column(number) for number in range(row_group.num_columns)]
        return [
            chunk
            for chunk in chunks
            if any(chunk.path_in_schema == leaf or chunk.path_in_schema.startswith(f"{leaf}.") for leaf in self._leaves)
        ]

    def _bytes_of(self, row_group: Any, rows: int) -> int:
        """Return the bytes of a row group in memory. For encoded images and texts, the footer has the size."""
        fixed = sum(rows * (8 if column.ragged else column.row_bytes) for column in self._stored.values())
        blobs = {f"{name}." for field in self._fields if field.is_blob for name in field.sources}
        chunks = self._chunks(row_group)
        return fixed + sum(
            int(chunk.total_uncompressed_size)
            for chunk in chunks
            if any(f"{chunk.path_in_schema}.".startswith(name) for name in blobs)
        )

    def _pieces(self, number: int, rows: int) -> Generator[Arrays, None, None]:
        """Yield the rows of a row group, some at a time, from the file as it was when it was opened.

        Raises:
            DatasetDamaged: The row group cannot be read.
            DatasetError: A row cannot be used, or the file was written meanwhile.
        """
        try:
            yield from self._batches(number, rows)
        except DatasetDamaged:
            self.files.check(self._groups[number].head)  # a file that was written meanwhile does not count as damaged
            raise

    def _batches(self, number: int, rows: int) -> Generator[Arrays, None, None]:
        group, pyarrow = self._groups[number], arrow.load_pyarrow()
        description = f"{self.files.full_name(group.head.name)}, row group {group.number}"
        metadata, done = self._metadata(group.head), 0
        chunks = self._chunks(metadata.row_group(group.number))
        ranges = [(begin := _begin(chunk), begin + chunk.total_compressed_size) for chunk in chunks]
        with arrow_errors(description):
            source, check = self.files.source(group.head, [(int(begin), int(end)) for begin, end in ranges])
            opened = pyarrow.parquet.ParquetFile(
                source,
                metadata=metadata,
                buffer_size=max(BUFFER_BYTES // len(chunks), 2**16),
                pre_buffer=False,
                page_checksum_verification=True,
            )
        with opened:
            batches = opened.iter_batches(rows, row_groups=[group.number], columns=self._leaves)
            while True:
                with arrow_errors(description):
                    batch = next(batches, None)
                if batch is None:
                    break
                begin = done
                done += len(batch)
                if done <= group.rows:
                    yield {
                        field.name: field.read(batch, partial(self._where, number, begin=begin))
                        for field in self._fields
                    }
        check()
        if done != group.rows:
            raise DatasetDamaged(f"{description} has {done:,} rows, not the {group.rows:,} of its footer", hint=COPY)

    def _checked_pieces(self, number: int) -> Iterator[Arrays]:
        """Yield the rows in pieces of some megabytes, after checking that types and shapes match the first rows."""
        unit = self.manifest.files[number]
        row, at_once = 0, max(PIECE_BYTES // max(unit.nbytes // unit.samples, 1), 1)
        for piece in self._pieces(number, at_once):
            for name, array in piece.items():
                column = self._stored[name]
                if array.dtype.name != column.dtype or (not column.ragged and array.shape[1:] != column.shape):
                    raise DatasetError(
                        f"{self._where(number, row)}: {name} is {array.dtype.name} of shape {array.shape[1:]}, "
                        f"but {column.dtype} of shape {column.shape} in the first rows",
                        hint="give all rows one type and shape beforehand",
                    )
            row += len(next(iter(piece.values())))
            yield piece

    def _read(self, number: int) -> Arrays:
        """Read a row group into memory."""
        rows, done = self._groups[number].rows, 0
        columns: Arrays = {
            name: np.empty((rows, *column.shape), column.dtype)
            for name, column in self._stored.items()
            if not column.ragged
        }
        parts: dict[str, list[Ragged]] = {name: [] for name, column in self._stored.items() if column.ragged}
        for piece in self._checked_pieces(number):
            for name, array in piece.items():
                if isinstance(array, Ragged):
                    parts[name].append(array)
                else:
                    columns[name][done : done + len(array)] = array
            done += len(next(iter(piece.values())))
        for name, pieces in parts.items():
            values = np.concatenate([piece.values for piece in pieces])
            starts = np.cumsum([0, *(len(piece.values) for piece in pieces[:-1])])
            ends = np.concatenate([piece.ends + start for piece, start in zip(pieces, starts, strict=True)])
            columns[name] = Ragged(values, ends, LONGEST)
        return {name: columns[name] for name in self._stored}

    def load(self, number: int) -> Arrays:
        """Read a row group into memory. Data from a store is kept in the cache if there is room."""
        if self.files.store is None:
            return self._read(number)
        read = list[Arrays]()

        def fetch(path: Path) -> None:
            read.append(self._read(number))
            self._write(read, path, number)

        for _ in range(2):
            path = self._cached(number, fetch, protected=self._all)
            if read:
                return read[0]
            if path is None:
                break
            with contextlib.suppress(_Torn):
                return self._verified(np.fromfile(path, np.uint8), number)
            self._cache.drop(self.manifest.files[number].sha256)
        return self._read(number)

    def mapped(self, number: int, room: int | None = None) -> Arrays:
        """Map a row group from the cache. Without room in the cache, read it into memory."""
        unit = self.manifest.files[number]
        for _ in range(2):
            path = self._cached(number, lambda path: self._write(self._checked_pieces(number), path, number))
            if path is None:
                break
            try:
                content = np.memmap(path, np.uint8, "r")
                if number in self._whole:
                    return arrays_of(content[:-DIGEST_BYTES], unit, self._stored, self._unit_name(number))
                arrays = self._verified(content, number)
            except _Torn:  # the cached file is damaged, so fetch it again
                self._cache.drop(unit.sha256)
                continue
            self._whole.add(number)
            return arrays
        if room is not None and unit.nbytes > room:
            raise ConfigError(
                f"{self._unit_name(number)} has {size(unit.nbytes)}. The cache of this machine ({self._cache.folder}) has no room for it, "
                f"and half of data_memory has {size(max(room, 0))} left",
                hint="increase data_memory or the cache (DDLF_CACHE_SIZE), use a smaller window (shuffle='window:1'), "
                "or write the files with smaller row groups (row_group_size of pyarrow.parquet.write_table)",
            )
        return self._read(number)

    def head(self, count: int) -> Arrays:
        """Return the first samples, at most ``count``, as training data."""
        return self.training_rows(0, self._first, np.arange(min(count, SOME, self._groups[0].rows)))

    def interrupt(self) -> None:
        """End a thread's wait for the store: the thread gets an error. Later requests work again."""
        self.files.interrupt()

    def newer(self, version: int) -> None:
        """Return None, because there is only one version."""

    def _unit_name(self, number: int) -> str:
        group = self._groups[number]
        return f"row group {group.number} of {self.files.full_name(group.head.name)}"

    # -- the cache ----------------------------------------------------------------------------------------------------

    def _cached(self, number: int, fetch: Callable[[Path], None], protected: Collection[str] = ()) -> Path | None:
        """Return the path of a row group's copy in this machine's cache; None if the cache has no room. ``Cache.path``
        describes the arguments.
        """
        unit, store = self.manifest.files[number], self.files.store
        ends = store.ending() if store is not None else lambda: False
        return self._cache.path(unit.sha256, unit.nbytes, fetch, protected=protected, ends=ends, exact=False)

    def _write(self, pieces: Iterable[Arrays], path: Path, number: int) -> None:
        """Write a row group as a safetensors file, followed by a hash."""
        rows = self._groups[number].rows
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, column in self._stored.items():
            key = name + ENDS if column.ragged else name
            shapes[key] = ("int64", (rows,)) if column.ragged else (column.dtype, (rows, *column.shape))
        offset, entries = 0, dict[str, Any]()
        offsets: dict[str, int] = {}
        for key, (dtype, shape) in shapes.items():
            nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            entries[key] = {"dtype": _code(dtype), "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
            offsets[key], offset = offset, offset + nbytes
        blobs = [name for name, column in self._stored.items() if column.ragged]
        room = len(json.dumps(entries)) + 200 * len(blobs) + sum(map(len, blobs)) + 64
        begin, done = 8 + room, 0
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(path, "w+b"))
            blob_files: dict[str, IO[bytes]] = {
                name: stack.enter_context(tempfile.TemporaryFile(dir=path.parent)) for name in blobs
            }
            for piece in pieces:
                count = len(next(iter(piece.values())))
                for name, array in piece.items():
                    key, values = name, array
                    if isinstance(array, Ragged):
                        key = name + ENDS
                        values = array.ends + blob_files[name].tell() // array.dtype.itemsize
                        blob_files[name].write(np.ascontiguousarray(array.values).data)
                    file.seek(begin + offsets[key] + done * (values.nbytes // max(count, 1)))
                    file.write(np.ascontiguousarray(values).data)
                done += count
            file.seek(begin + offset)
            for name in blobs:
                column, nbytes = self._stored[name], blob_files[name].tell()
                blob_files[name].seek(0)
                shutil.copyfileobj(blob_files[name], file, 2**20)
                length = nbytes // np.dtype(column.dtype).itemsize
                entries[name] = {
                    "dtype": _code(column.dtype),
                    "shape": [length],
                    "data_offsets": [offset, offset + nbytes],
                }
                offset += nbytes
            file.seek(0)
            file.write(room.to_bytes(8, "little") + json.dumps(entries).encode().ljust(room))
            file.seek(0)
            file.write(hashlib.file_digest(file, "sha256").digest())

    def _verified(self, content: Bytes, number: int) -> Arrays:
        """Return the arrays of a row group's copy in the cache, after checking its hash.

        Raises:
            _Torn: The file is damaged.
        """
        data, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:].tobytes()
        if hashlib.sha256(data.data).digest() != digest:
            raise _Torn
        return arrays_of(data, self.manifest.files[number], self._stored, self._unit_name(number))

    # -- samples ------------------------------------------------------------------------------------------------------

    def training_rows(self, number: int, arrays: Arrays, rows: Any) -> Arrays:
        """Return some rows of a row group as training data. Images are decoded on all cores."""
        images = [field for field in self._fields if field.kind == "image"]
        if not images:
            return super().training_rows(number, arrays, rows)
        names = {field.name for field in images}
        stacked: Arrays = {name: array[rows] for name, array in arrays.items() if name not in names}
        for field in images:
            column = self.columns[field.name]
            pixels = np.empty((len(rows), *column.shape), column.dtype)
            decoded = on_all_cores(
                lambda row, field=field: self._pixels(field, arrays, number, row),  # type: ignore[misc]
                rows.tolist(),
            )
            for position, image in enumerate(decoded):
                if (image.dtype.name, image.shape) != (column.dtype, column.shape):
                    raise DatasetError(
                        f"{self._where(number, int(rows[position]))}: an image is {image.dtype.name} of shape {image.shape}, "
                        f"but {column.dtype} of shape {column.shape} in the first row",
                        hint="give all images one size with image_size=(64, 64), and one mode beforehand",
                    )
                pixels[position] = image
            stacked[field.name] = pixels
        return {name: stacked[name] for name in arrays}

    def _pixels(self, field: Field, arrays: Arrays, number: int, row: int) -> Array:
        where = f"{self._where(number, row)}, column {field.sources[0]!r}"
        return self._decoder.pixels(io.BytesIO(arrays[field.name][row].tobytes()), where)

    def _undecoded(self, number: int, arrays: Arrays) -> str:
        """Return the error of ``decode`` or of the image decoder for a sample; empty if they succeed for all
        samples."""
        if self._decode is None and not any(field.kind == "image" for field in self._fields):
            return ""
        return self._untaken(number, arrays)


def _lines(location: str | Path | Sequence[str]) -> Iterator[str]:
    """Yield lines about Parquet files for people: columns, files, row groups, and whether the row groups are suitable.

    Args:
        location: The argument of ``RowGroups``.

    Raises:
        DatasetError: The files cannot be read.
    """
    files = ParquetFiles(location)
    heads = files.heads()
    schema = heads[0][1].schema.to_arrow_schema()
    groups = [metadata.row_group(number) for _, metadata in heads for number in range(metadata.num_row_groups)]
    yield f"place     {files}"
    for name, kind in zip(schema.names, schema.types, strict=True):
        notes = {"other": ", not read without decode=", "text": ", a label with classes=", "image": ", an image"}
        yield f"column    {name}: {kind}{notes.get(kind_of(kind), '')}"
    yield f"samples   {sum(group.num_rows for group in groups):,}"
    yield f"files     {len(heads):,}, {size(sum(head.nbytes for head, _ in heads))}"
    if not any(group.num_rows for group in groups):
        yield "suited    no: there are no rows to train on"
    else:
        rows, nbytes = [[getattr(group, name) for group in groups] for name in ("num_rows", "total_byte_size")]
        yield (
            f"groups    {len(groups):,} row groups of {min(rows):,} to {max(rows):,} rows, "
            f"{size(min(nbytes))} to {size(max(nbytes))} unpacked"
        )
        yield f"suited    {_suited(len(groups), max(nbytes))}"


def _suited(groups: int, largest: int) -> str:
    """Return a text that says whether row groups have a suitable size, with advice if not."""
    way = "with row_group_size of pyarrow.parquet.write_table"
    if groups < FEWEST_GROUPS:
        return f"hardly: each slot needs a row group, and mixing needs several; write smaller ones {way}"
    if largest > LARGE_BYTES:
        return f"yes, but slowly: a window of 8 takes {size(8 * largest)} of the cache on the disk; write smaller ones {way}"
    if largest < SMALL_BYTES:
        return f"yes, but slowly: each is a request to a store; write larger ones {way}"
    return f"yes: a window of 8 is in memory from data_memory={size(16 * largest)} on, else in the cache on the disk"


class _Torn(Exception):
    """Raised if the copy of a row group in the cache is damaged."""


def _chosen_columns(
    arguments: Mapping[str, Columns | None], names_there: Sequence[str], where: str
) -> dict[str, tuple[str, ...]]:
    """Return the columns of the data set, such as ``x``, each with the names of the Parquet columns that form it.

    If none are given, they are the columns with the names ``x``, ``y`` and ``w``.

    Raises:
        DatasetError: There is no input.
        AppError: A value is not a name of a column.
    """
    columns: dict[str, tuple[str, ...]] = {}
    for letter, argument in arguments.items():
        if argument is None:
            continue
        named = (
            {f"{letter}[{key!r}]": names for key, names in argument.items()}
            if isinstance(argument, Mapping)
            else {letter: argument}
        )
        for name, names in named.items():
            several = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Sequence) else ()
            if not several or not all(isinstance(column, str) for column in several):
                raise AppError(
                    f"{letter}={argument!r} names no columns", hint=f"write {letter}='name', or a list of names"
                )
            columns[name] = several
    if not columns:
        columns = {
            name: (name,) for name in names_there if name in ("x", "y", "w") or name.startswith(("x[", "y[", "w["))
        }
    if not any(name[0] == "x" for name in columns):
        raise DatasetError(
            f"no column of {where} is chosen as the input", hint=f"write x=...: it has {', '.join(names_there)}"
        )
    return columns


def _class_names(schema: Any, fields: Sequence[Field]) -> tuple[str, ...]:
    """Return the names of classes that Hugging Face's ``datasets`` stores for the label column; else empty."""
    label = next((field.sources[0] for field in fields if field.name == "y" and field.kind == "number"), None)
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        names = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]["names"]
        if all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()


def _begin(chunk: Any) -> int:
    """Return the position in the file where a column of a row group begins."""
    first = chunk.data_page_offset
    return int(min(first, chunk.dictionary_page_offset or first))


def _code(dtype: str) -> str:
    kind = np.dtype(dtype)
    return "BOOL" if kind.kind == "b" else f"{kind.kind.upper()}{8 * kind.itemsize}"
