"""A source of TFRecord files. Reads checksums and ``tf.train.Example`` without TensorFlow. Needs google-crc32c."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ddlf.data.images import Decoder, is_image
from ddlf.data.records import Record, Records
from ddlf.errors import DatasetError

MAX_RECORD_BYTES = 2**30
MASK = 0xA282EAD8
"""TensorFlow rotates a CRC-32C by 15 bits and adds this number (``tensorflow/core/lib/hash/crc32c.h``)."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""


def open_tfrecord(
    path: Path, files: Sequence[Path], *, columns: str = "", image_size: str = "", ragged: str = ""
) -> Records:
    """Return a source whose columns are the features of ``tf.train.Example``: numbers, vectors, or encoded images.

    Args:
        path: The path that the user has named.
        files: The TFRecord files at this path, in order.
        columns: The option of ``open_source``.
        image_size: The option of ``open_source``.
        ragged: The option of ``open_source``.

    Raises:
        DatasetError: A file is damaged or has other contents, or google-crc32c is missing.
        ConfigError: An option cannot be used.
    """
    samples = sum(1 for file in files for _ in _records(file))
    return Records(path, samples, partial(_samples, files, Decoder(image_size)), columns, ragged=ragged)


def _samples(files: Sequence[Path], decoder: Decoder) -> Generator[tuple[str, Record], None, None]:
    for file in files:
        for number, data in enumerate(_records(file)):
            where = f"record {number:,} of {file}"
            try:
                found = dict(_features(data))
            except (ValueError, IndexError, struct.error) as error:
                raise DatasetError(f"{where} is no tf.train.Example ({error})", hint="write it as one") from None
            yield where, {name: partial(_array, value, f"{where}: {name}", decoder) for name, value in found.items()}


def _records(file: Path) -> Iterator[bytes]:
    """Yield the bytes of each record, after checking both of its checksums."""
    checksum = masked_checksum()
    number = 0
    with open(file, "rb") as opened:
        while head := opened.read(12):
            try:
                length, of_length = struct.unpack("<QI", head)
            except struct.error:
                raise _cut(file, number) from None
            if checksum(head[:8]) != of_length:
                hint = "copy it again; if it is compressed, decompress it"
                raise DatasetError(f"record {number:,} of {file} is damaged: the checksum of its length", hint=hint)
            if length > MAX_RECORD_BYTES:
                raise DatasetError(f"record {number:,} of {file} claims {length:,} bytes", hint="leave it out")
            data, of_data = opened.read(length), opened.read(4)
            if len(data) < length or len(of_data) < 4:
                raise _cut(file, number)
            if checksum(data) != int.from_bytes(of_data, "little"):
                raise DatasetError(f"record {number:,} of {file} is damaged: its checksum", hint="copy it again")
            yield data
            number += 1


def _cut(file: Path, number: int) -> DatasetError:
    return DatasetError(f"{file} ends inside of record {number:,}", hint="copy it again")


def masked_checksum() -> Callable[[bytes], int]:
    """Return the function that computes TensorFlow's checksums of lengths and records.

    Raises:
        DatasetError: google-crc32c is missing.
    """
    try:
        import google_crc32c
    except ImportError:
        raise DatasetError(
            "TFRecord files need google-crc32c, which is not installed", hint="install it: pip install 'ddlf[tfrecord]'"
        ) from None

    def masked(data: bytes) -> int:
        found: int = google_crc32c.value(data)
        return (((found >> 15) | (found << 17)) + MASK) & 0xFFFFFFFF

    return masked


def _array(value: Any, where: str, decoder: Decoder, *, encoded: bool = False) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value[0] if value.shape == (1,) and not encoded else value
    if is_image(value):
        return (decoder.checked if encoded else decoder.pixels)(io.BytesIO(value), where)
    return np.frombuffer(value, np.uint8)


# -- protocol buffers: Example {1: Features {1: map of {1: name, 2: Feature {1: bytes | 2: floats | 3: integers}}}} ----


def _features(data: bytes) -> Iterator[tuple[str, Any]]:
    for features in _of(data, 1):
        for entry in _of(features, 1):
            name, feature = _of(entry, 1), _of(entry, 2)
            if len(name) == 1 and len(feature) == 1:
                yield name[0].decode(), _feature(feature[0])


def _feature(data: bytes) -> Any:
    for kind, _, message in _fields(data):
        if kind == 1:
            values = _of(message, 1)
            if len(values) != 1:
                raise ValueError(f"{len(values)} texts in one feature")
            return values[0]
        if kind == 2:
            parts = [value for field, _, value in _fields(message) if field == 1]
            return np.frombuffer(b"".join(parts), "<f4").astype(np.float32)
        if kind == 3:
            numbers: list[int] = []
            for field, wire, value in _fields(message):
                if field == 1 and wire == VARINT:
                    numbers.append(value)
                elif field == 1:
                    packed = io.BytesIO(value)
                    while packed.tell() < len(value):
                        numbers.append(_varint(packed))
            return np.array(numbers, np.uint64).view(np.int64)
    return np.empty(0, np.float32)


def _of(data: bytes, field: int) -> list[bytes]:
    return [value for number, wire, value in _fields(data) if number == field and wire == BYTES]


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yield number, wire type and value of each field of a message."""
    opened = io.BytesIO(data)
    while opened.tell() < len(data):
        key = _varint(opened)
        wire = key & 7
        if wire == VARINT:
            value: Any = _varint(opened)
        elif wire in (FIXED32, FIXED64, BYTES):
            length = {FIXED32: 4, FIXED64: 8}.get(wire) or (_varint(opened) if wire == BYTES else 0)
            value = opened.read(length)
            if len(value) != length:
                raise ValueError("it ends too early")
        else:
            raise ValueError(f"wire type {wire}")
        yield key >> 3, wire, value


def _varint(opened: BinaryIO) -> int:
    result = shift = 0
    while True:
        byte = opened.read(1)[0]
        result |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return result & (2**64 - 1)
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
