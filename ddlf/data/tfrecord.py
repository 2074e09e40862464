"""A source of samples from TFRecord files. It reads checksums and ``tf.train.Example`` without TensorFlow. Needs
google-crc32c
and protobuf."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data.images import Decoder, is_image
from ddlf.data.records import Record, Records
from ddlf.errors import DatasetError

MAX_RECORD_BYTES = 2**30
MASK = 0xA282EAD8
"""TensorFlow rotates a CRC-32C by 15 bits and adds this number (``tensorflow/core/lib/hash/crc32c.h``)."""


def open_tfrecord(
    path: Path, files: Sequence[Path], *, columns: str = "", image_size: str = "", ragged: str = ""
) -> Records:
    """Return a source of samples from TFRecord files. Its columns are the features of ``tf.train.Example``: numbers,
    vectors, or encoded images.

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
                features = dict(_features(data))
            except ValueError as error:
                raise DatasetError(
                    f"{where} is not a tf.train.Example ({error})", hint="write it as a tf.train.Example"
                ) from None
            yield where, {name: partial(_array, value, f"{where}: {name}", decoder) for name, value in features.items()}


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
    """Return the function that computes the checksums (masked CRC-32C) of lengths and records in TFRecord files.

    Raises:
        DatasetError: google-crc32c is missing.
    """
    try:
        import google_crc32c
    except ImportError:
        raise _missing("google-crc32c") from None

    def masked(data: bytes) -> int:
        crc: int = google_crc32c.value(data)
        return (((crc >> 15) | (crc << 17)) + MASK) & 0xFFFFFFFF

    return masked


def _array(value: Any, where: str, decoder: Decoder, *, encoded: bool = False) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value[0] if value.shape == (1,) and not encoded else value
    if is_image(value):
        return (decoder.checked if encoded else decoder.pixels)(io.BytesIO(value), where)
    return np.frombuffer(value, np.uint8)


EXAMPLE = """
name: "ddlf/example.proto" package: "ddlf" syntax: "proto3"
message_type { name: "Bytes" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "Floats" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Integers" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature"
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".ddlf.Bytes" }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".ddlf.Floats" }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".ddlf.Integers" } }
message_type { name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".ddlf.Feature" } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".ddlf.Entry" } }
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".ddlf.Features" } }
"""
"""``tensorflow/core/example/example.proto``, whose map of features is encoded as repeated entries."""


@cache
def example_class() -> Any:
    """Return the message class ``tf.train.Example``, without TensorFlow.

    Raises:
        DatasetError: protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
    except ImportError:
        raise _missing("protobuf") from None
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("ddlf.Example"))


def _features(data: bytes) -> Iterator[tuple[str, Any]]:
    from google.protobuf.message import DecodeError

    try:
        example = example_class().FromString(data)
    except DecodeError as error:
        raise ValueError(error) from None
    for entry in example.features.feature:
        yield entry.key, _feature(entry.value)


def _feature(feature: Any) -> Any:
    if feature.HasField("bytes_list"):
        values = feature.bytes_list.value
        if len(values) != 1:
            raise ValueError(f"{len(values)} texts in one feature")
        return values[0]
    if feature.HasField("int64_list"):
        return np.array(feature.int64_list.value, np.int64)
    return np.array(feature.float_list.value, np.float32)


def _missing(package: str) -> DatasetError:
    return DatasetError(
        f"TFRecord files need {package}, which is not installed", hint="install it: pip install 'ddlf[tfrecord]'"
    )
