"""Frames, values, requests, responses and errors: everything that travels on a connection, and its bytes.

Pure; runs on both sides. A message is a frame of a header and raw buffers:

    u32  header length       little-endian, like everything on the wire
    u32  flags               0; unknown bits are refused
    u64  body length
    ...  header              msgpack array [kind, id, name, sizes, extra]
    ...  body                the buffers one after another, their sizes given in the header

The decoder does no I/O. ``wants`` returns the memory for the next bytes, and ``received`` takes the number of bytes
written to it. Small frames are cut out of one scratch buffer. A large buffer is received into its own final memory, so
the bytes of an array are copied only by the kernel. Every length is checked against ``Limits`` before any memory is
allocated.

The first buffer is a value, as msgpack with the extension types of ``Tag``. These values keep their type: None, bool,
int of any size, float, complex, str, bytes, list, tuple, dict, set, NumPy scalars and arrays, dates and times, Decimal,
Path, UUID and range. Other kinds of memory (bytearray, memoryview) arrive as bytes. Arrays travel next to the value as
raw memory, so they are not copied here. Every other value is *an object*, and ``dump_object`` decides how to encode it.
``code`` pickles it. A worker sends it as data if the master can know its class, such as an Enum, a dataclass or a named
tuple, and refuses it otherwise. Decoding imports nothing and runs no code of the other side.

NumPy is imported with the first array, because a daemon's connections carry no arrays.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from uuid import UUID

import msgpack

import ddlf.errors
from ddlf.errors import DDLFError, FrameTooLarge, NotPicklable, ProtocolError, RemoteError, RequestFailed, ResultNotData
from ddlf.errors.tracebacks import OS_ERROR, is_machinery

if TYPE_CHECKING:
    import numpy as np

PREFIX = struct.Struct("<IIQ")  # header length, flags, body length
Buffer = bytes | bytearray | memoryview

MAX_HEADER_BYTES = 64 * 1024
"""Enough for the sizes of ``MAX_BUFFERS`` buffers, with space to spare."""
MAX_BUFFERS = 4096
MAX_BODY_BYTES = 4 * 1024**3
"""Default limit of a message body. The system provides memory only as bytes arrive, so a false length costs address
space only.
"""
SCRATCH_BYTES = 32 * 1024
JOIN_BELOW_BYTES = 16 * 1024
"""Buffers up to this size are joined with the header into one piece. One copy is cheaper than one more piece for the
kernel.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest sizes of a message that one side of a connection accepts.

    Args:
        max_header_bytes: Maximum bytes of one frame's header.
        max_body_bytes: Maximum bytes of all buffers of one frame.
        max_buffers: Maximum number of buffers in one frame.
    """

    max_header_bytes: int = MAX_HEADER_BYTES
    max_body_bytes: int = MAX_BODY_BYTES
    max_buffers: int = MAX_BUFFERS


CONTROL_LIMITS = Limits(max_header_bytes=4096, max_body_bytes=1024**2, max_buffers=1)
"""The limits of the control connection, which carries no arrays."""


class Frame(NamedTuple):
    """One received message.

    Args:
        kind: Number of the message kind, from ``Kind``.
        id: The request that it belongs to; 0 if none.
        name: Command or event name; empty if none.
        extra: A number in the header of some kinds, or None.
        buffers: The body. The first buffer is the encoded value, the others are the memory of its arrays.
    """

    kind: int
    id: int
    name: str
    extra: float | None
    buffers: list[Any]


def encode_frame(
    kind: int, id: int, name: str, buffers: list[Buffer], extra: float | None = None, *, limits: Limits
) -> list[Buffer]:
    """Return a frame as pieces to send one after another. No piece is empty. Large buffers are not copied.

    Args:
        kind: Number of the message kind. ``id``, ``name`` and ``extra`` are also fields of ``Frame``.
        buffers: Contiguous, one-dimensional memory of bytes.
        limits: The sizes that the receiver accepts.

    Raises:
        FrameTooLarge: The frame exceeds a limit of the receiver.
    """
    sizes = [len(buffer) for buffer in buffers]
    body = sum(sizes)
    if body > limits.max_body_bytes:
        raise FrameTooLarge(
            f"a message of {body:,} bytes is over the receiver's limit of {limits.max_body_bytes:,}",
            hint="send it in parts, or raise max_message_bytes on both sides",
        )
    if len(sizes) > limits.max_buffers:
        raise FrameTooLarge(
            f"a message of {len(sizes):,} arrays is over the receiver's limit of {limits.max_buffers:,}",
            hint="stack small arrays into one",
        )
    header = msgpack.packb([kind, id, name, sizes, extra])
    if len(header) > limits.max_header_bytes:
        raise FrameTooLarge(f"a header of {len(header):,} bytes is over the limit of {limits.max_header_bytes:,}")
    if body <= JOIN_BELOW_BYTES:
        return [
            b"".join((PREFIX.pack(len(header), 0, body), header, *buffers))
        ]  # a shortcut for most messages; the loop gives the same result
    pieces: list[Buffer] = []
    small: list[Buffer] = [PREFIX.pack(len(header), 0, body), header]
    for size, buffer in zip(sizes, buffers, strict=True):
        if size <= JOIN_BELOW_BYTES:
            small.append(buffer)
        else:
            if joined := b"".join(small):
                pieces.append(joined)
            small = []
            pieces.append(buffer)
    if joined := b"".join(small):
        pieces.append(joined)
    return pieces


class FrameDecoder:
    """Splits a stream of bytes into frames.

    Args:
        limits: What to accept.
        allocate: Makes writable memory for a large buffer. ``bytearray`` needs no import; ``numpy.empty`` avoids
            zeroing.
    """

    def __init__(self, limits: Limits, allocate: Callable[[int], Any] = bytearray) -> None:
        self.limits = limits
        self._allocate = allocate
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = self._end = 0
        # Set only while a frame is longer than its part in the scratch buffer:
        self._header: list[Any] | None = None
        self._buffers: list[Any] = []
        self._target: memoryview | None = None
        self._filled = 0

    @property
    def mid_frame(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._header is not None or self._end > self._start

    @property
    def direct(self) -> bool:
        """Whether the next bytes go directly into a large buffer's own memory."""
        return self._target is not None

    def wants(self) -> memoryview:
        """Return the memory to write the next received bytes to. It is never empty."""
        if self._target is not None:
            return self._target[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._scratch):
            self._make_room()
        return self._view[self._end :]

    def received(self, count: int) -> Iterator[Frame]:
        """Accept ``count`` bytes that were written to the memory from ``wants``.

        Yields:
            The complete frames, one by one. Frames before a wrong one are always yielded, however the stream was split.

        Raises:
            ProtocolError: The bytes are not a frame, or a frame exceeds the limits. The stream cannot be used
                afterwards.
        """
        if self._target is not None:
            self._filled += count
            if self._filled < len(self._target):
                return
            self._target = None
        else:
            self._end += count
        while (frame := self._next_frame()) is not None:
            yield frame

    def release(self) -> None:
        """Release all memory and the allocator. The stream has ended, and receives no more bytes."""
        self._scratch = bytearray()
        self._view = memoryview(self._scratch)
        self._target, self._buffers, self._allocate = None, [], bytearray

    def _next_frame(self) -> Frame | None:
        """Return the next complete frame in the received bytes; None if its end has not arrived."""
        if self._header is None:
            have = self._end - self._start
            if have < PREFIX.size:
                return None
            header_length, flags, body_length = PREFIX.unpack_from(self._scratch, self._start)
            self._check_prefix(header_length, flags, body_length)
            if have < PREFIX.size + header_length:
                self._need(PREFIX.size + header_length)
                return None
            begin = self._start + PREFIX.size
            self._header = self._read_header(self._view[begin : begin + header_length], body_length)
            self._start = begin + header_length
            self._buffers = []
        return self._fill()

    def _fill(self) -> Frame | None:
        assert self._header is not None
        kind, id, name, sizes, extra = self._header
        while len(self._buffers) < len(sizes):
            size = sizes[len(self._buffers)]
            have = self._end - self._start
            if have >= size:
                self._buffers.append(self._scratch[self._start : self._start + size])
                self._start += size
                continue
            if size <= JOIN_BELOW_BYTES:
                self._need(size)
                return None
            memory = self._allocate(size)
            target = memoryview(memory).cast("B")
            target[:have] = self._view[self._start : self._end]
            self._start = self._end = 0
            self._buffers.append(memory)
            self._target, self._filled = target, have
            return None
        frame = Frame(kind, id, name, extra, self._buffers)
        self._header, self._buffers = None, []  # from now on the decoder does not keep the arrays alive
        return frame

    def _check_prefix(self, header_length: int, flags: int, body_length: int) -> None:
        if header_length == 0:
            raise ProtocolError("empty header")
        if header_length > self.limits.max_header_bytes:
            raise ProtocolError(f"header {header_length} > {self.limits.max_header_bytes} bytes")
        if flags:
            raise ProtocolError(f"unknown flags {flags:#x}")
        if body_length > self.limits.max_body_bytes:
            raise ProtocolError(f"message {body_length} > {self.limits.max_body_bytes} bytes")

    def _read_header(self, data: memoryview, body_length: int) -> list[Any]:
        try:
            header = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_no_extensions)
        except ProtocolError:
            raise
        except Exception as error:  # msgpack's errors share no base class
            raise ProtocolError(f"header cannot be read: {type(error).__name__}: {error}") from None
        if type(header) is not list or len(header) != 5:
            raise ProtocolError("header is not an array of 5 fields")
        kind, id, name, sizes, extra = header
        if not (type(kind) is int and type(id) is int and type(name) is str and type(sizes) is list):
            expected = (("kind", int), ("id", int), ("name", str), ("sizes", list))
            for (field, kind_of), value in zip(expected, header, strict=False):
                if type(value) is not kind_of:
                    raise ProtocolError(f"header field {field!r} is a {type(value).__name__}")
        if extra is not None and type(extra) not in (int, float):
            raise ProtocolError(f"header field 'extra' is a {type(extra).__name__}")
        if len(sizes) > self.limits.max_buffers:
            raise ProtocolError(f"{len(sizes)} buffers > {self.limits.max_buffers}")
        total = 0
        for size in sizes:
            if type(size) is not int or size < 0:
                raise ProtocolError(f"bad buffer size {size!r}")
            total += size
        if total != body_length:
            raise ProtocolError(f"buffers of {total} bytes in a body of {body_length}")
        return header

    def _need(self, count: int) -> None:
        """Make the scratch buffer large enough for ``count`` bytes from ``_start``."""
        if self._start + count > len(self._scratch):
            self._make_room(count)

    def _make_room(self, count: int = 0) -> None:
        have = self._end - self._start
        if self._start and count <= len(self._scratch):
            self._view[:have] = bytes(self._view[self._start : self._end])
        else:
            grown = bytearray(max(count, 2 * len(self._scratch)))
            grown[:have] = self._view[self._start : self._end]
            self._scratch, self._view = grown, memoryview(grown)
        self._start, self._end = 0, have


def _no_extensions(code: int, data: bytes) -> Any:
    raise ProtocolError(f"extension type {code} not allowed in a header")


def _zone(zone: tzinfo | None) -> list[Any] | None:
    if zone is None:
        return None
    if type(zone) is not timezone:
        raise _NotStandard  # The value's time zone comes from a database, and the other side may have another version of it.
    offset = zone.utcoffset(None)
    name = zone.tzname(None)
    return [_seconds(offset), None if timezone(offset).tzname(None) == name else name]


def _seconds(span: timedelta) -> list[int]:
    return [span.days, span.seconds, span.microseconds]


def _read_zone(fields: Any) -> timezone | None:
    if fields is None:
        return None
    offset, name = fields
    return timezone(timedelta(*offset)) if name is None else timezone(timedelta(*offset), name)


class _NotStandard(Exception):
    """Raised for a value that this module cannot encode, so that it is passed to ``dump_object``."""


_DUMP: dict[type, tuple[str, Callable[[Any], list[Any]]]] = {
    datetime: (
        "datetime",
        lambda d: [d.year, d.month, d.day, d.hour, d.minute, d.second, d.microsecond, d.fold, _zone(d.tzinfo)],
    ),
    date: ("date", lambda d: [d.year, d.month, d.day]),
    time: ("time", lambda t: [t.hour, t.minute, t.second, t.microsecond, t.fold, _zone(t.tzinfo)]),
    timedelta: ("timedelta", _seconds),
    timezone: ("timezone", lambda zone: _zone(zone) or []),
    Decimal: ("decimal", lambda number: [str(number)]),
    UUID: ("uuid", lambda name: [name.bytes]),
    range: ("range", lambda r: [r.start, r.stop, r.step]),
    type(Path()): ("path", lambda path: [str(path)]),
    PurePosixPath: ("posixpath", lambda path: [str(path)]),
    PureWindowsPath: ("windowspath", lambda path: [str(path)]),
}
_LOAD: dict[str, Callable[..., Any]] = {
    "datetime": lambda y, mo, d, h, m, s, us, fold, zone: datetime(y, mo, d, h, m, s, us, _read_zone(zone), fold=fold),
    "date": date,
    "time": lambda h, m, s, us, fold, zone: time(h, m, s, us, _read_zone(zone), fold=fold),
    "timedelta": timedelta,
    "timezone": lambda *f: _read_zone(f),
    "decimal": lambda text: Decimal(_checked(str, text)),
    "uuid": lambda data: UUID(bytes=_checked(bytes, data)),
    "range": range,
    "path": lambda text: Path(_checked(str, text)),
    "posixpath": lambda text: PurePosixPath(_checked(str, text)),
    "windowspath": lambda text: PureWindowsPath(_checked(str, text)),
}


def _checked(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ProtocolError(f"expected {kind.__name__}, got a {type(value).__name__}")
    return value


def dump_standard(value: Any) -> list[Any] | None:
    """Return ``[name, *fields]`` for a value of the standard library, and None for any other object."""
    dump = _DUMP.get(type(value))
    try:
        return [dump[0], *dump[1](value)] if dump else None
    except _NotStandard:
        return None


def load_standard(fields: list[Any]) -> Any:
    """Return the value that ``dump_standard`` encoded.

    Raises:
        ProtocolError: This kind of value does not exist. Other exceptions mean that the fields are wrong.
    """
    name, *arguments = fields
    load = _LOAD.get(name) if type(name) is str else None
    if load is None:
        raise ProtocolError(f"value of kind {str(name)[:40]!r} not allowed")
    return load(*arguments)


# -- objects of classes that both sides know --------------------------------------------------------------------------


def dump_known(value: Any) -> list[Any] | None:
    """Return ``[kind, module, name, content]`` for a member of an Enum, a dataclass or a named tuple; None for any
    other object.

    Local classes, and classes whose objects need their constructor, are not encoded, because the other side cannot
    restore their objects.
    """
    kind = type(value)
    module, name = kind.__module__, kind.__qualname__
    if "<" in name:
        return None
    if isinstance(value, Enum):
        return ["enum", module, name, value.value if value.name is None or "|" in value.name else value.name]
    if isinstance(value, tuple) and _is_named_tuple(kind):
        return ["namedtuple", module, name, list(value)]
    if _is_dataclass(kind):
        return ["dataclass", module, name, _state(value)]
    return None


def load_known(fields: list[Any]) -> Any:
    """Return the object that ``dump_known`` encoded.

    Raises:
        ResultNotData: This side lacks the class, or its class differs from the other side's.
        ProtocolError: The fields do not describe such an object.
    """
    kind_of_object, module, name, content = fields
    if type(module) is not str or type(name) is not str:
        raise ProtocolError("the name of a class must be text")
    target = imported_object(module, name)
    if kind_of_object == "enum" and isinstance(target, type) and issubclass(target, Enum):
        if type(content) is str and content in target.__members__:
            return target.__members__[content]
        if type(content) is int and issubclass(target, Flag):
            return target(content)
    elif kind_of_object == "namedtuple" and isinstance(target, type) and _is_named_tuple(target):
        if type(content) is list and len(content) == len(target._fields):  # type: ignore[attr-defined]
            return tuple.__new__(target, content)
    elif kind_of_object == "dataclass" and isinstance(target, type) and _is_dataclass(target):
        if type(content) is dict:
            return _instance_of(target, content)
    elif kind_of_object not in ("enum", "namedtuple", "dataclass"):
        raise ProtocolError(f"object of kind {str(kind_of_object)[:40]!r} not allowed")
    problem = "differs from the class on the worker" if target is not None else "is unknown on this side"
    raise ResultNotData(
        f"the result contains a {module}.{name}, which {problem}",
        hint="import its module on this side before the call, or return a dict",
    )


def imported_object(module: str, name: str) -> Any:
    """Find a class or object by its qualified name in a module that is imported already. No code of the module runs;
    return None if it is missing.
    """
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, "__dict__", {}).get(part)  # getattr could run a module's __getattr__
    return value


def _is_named_tuple(kind: Any) -> bool:
    fields = getattr(kind, "_fields", None)
    return kind.__bases__ == (tuple,) and isinstance(fields, tuple) and hasattr(kind, "_make") and _is_harmless(kind)


def _is_dataclass(kind: Any) -> bool:
    if "__dataclass_fields__" not in kind.__dict__ or not _is_harmless(kind):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # abstract, or derived from a builtin with its own state
        return False
    return not issubclass(kind, BaseException)


def _is_harmless(kind: Any) -> bool:
    """Return whether deleting an object of this class runs no code."""
    return not hasattr(kind, "__del__")


def _state(value: Any) -> dict[str, Any]:
    """Return all attributes that are set on an object of a dataclass, also attributes in ``__slots__``."""
    slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return slots | getattr(value, "__dict__", {})


def _slots(kind: type) -> list[str]:
    slots = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for declared in slots for name in ((declared,) if isinstance(declared, str) else declared)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _instance_of(kind: type, state: dict[str, Any]) -> Any:
    value: Any = object.__new__(kind)
    slots = _slots(kind)
    for name, item in state.items():
        if type(name) is not str or (name.startswith("__") and name.endswith("__")):
            raise ProtocolError("the names of attributes must be text")
        if name in slots:
            object.__setattr__(value, name, item)
        elif hasattr(value, "__dict__"):
            value.__dict__[name] = item  # directly into the object, because a property could run code
        else:
            raise ProtocolError(f"a {kind.__name__} has no {name[:40]!r}")
    return value


MAX_DEPTH = 100
"""Maximum nesting of tuples, sets and arrays in one value."""
MAX_DIMENSIONS = 32
"""Maximum number of dimensions of an array. Every version of NumPy supports this number."""
INLINE_ARRAY_BYTES = 512
"""Arrays up to this size travel inside the value tree. A separate buffer costs more than the copy."""
MANY_BUFFERS = 2048
"""With this many buffers or more, all arrays that would be joined into one piece anyway travel inside the tree. Their
number therefore has no limit.
"""

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
)
"""The types of array elements, by their number on the wire. ``np.dtype`` never receives text from the other side."""
BIG_ENDIAN = 0x40
"""Added to a type's number if its bytes are big-endian."""


class Tag(IntEnum):
    """The msgpack extension types: the kinds of values in messages that msgpack itself does not have."""

    ARRAY = 1  # [buffer, dtype, order, *shape]
    INLINE_ARRAY = 2  # [bytes, dtype, order, *shape]
    SCALAR = 3  # dtype (1 byte), its bytes
    TUPLE = 4  # array of items
    SET = 5
    FROZENSET = 6
    COMPLEX = 7  # two float64, little-endian
    INTEGER = 8  # two's complement, little-endian, for integers beyond msgpack's 64 bits
    OBJECT = 9  # the bytes that ``code`` makes of it
    CODE = 10  # a function: the bytes that ``code`` makes of it
    STANDARD = 11  # [name, *fields]: a value of the standard library
    KNOWN = 12  # [kind, module, name, content]: an object of a class that the receiver has imported itself
    TEXT_ARRAY = 13  # [buffer or bytes, kind, size, order, *shape]: text or bytes of fixed size
    TEXT_SCALAR = 14  # kind (1 byte), its text: np.str_ and np.bytes_


DumpObject = Callable[[Any], tuple[Tag, bytes]]
LoadObject = Callable[[Tag, bytes], Any]


def refuse_objects(value: Any) -> NoReturn:
    """Refuse to send an object that is not plain data. This is the ``dump_object`` of a worker's results: only data
    leaves a worker.
    """
    label = f"{type(value).__module__}.{type(value).__qualname__}"
    if label == "numpy.ndarray":
        label += f" of {value.dtype} with {value.ndim} dimensions"
    raise ResultNotData(
        f"a {label} is not plain data",
        hint="return numbers, text, dates, lists, dicts, dataclasses or arrays, or allow objects with pickle_results=True (--pickle-results)",
    )


def refuse_loading(tag: Tag, data: bytes) -> NoReturn:
    """Refuse to load an object. This is the ``load_object`` of a master that does not unpickle results."""
    raise ProtocolError("pickled payload not allowed here")


def dumps(value: Any, dump_object: DumpObject = refuse_objects) -> list[Buffer]:
    """Encode a value for a message.

    Args:
        value: Any of the types above. Other objects are passed to ``dump_object``.
        dump_object: Returns the tag and bytes that represent an object, or raises.

    Returns:
        The value tree, then the memory of each large array. Contiguous arrays are not copied.

    Raises:
        NotPicklable: The value contains itself, or is nested too deeply.
        ResultNotData: ``refuse_objects`` refused an object. The text says where in the value it is.
    """
    try:
        return _encode(value, dump_object)
    except DDLFError as error:
        path = _find(value, dump_object)
        if path:
            error.message += f" (at {path} of the value)"
        raise


def _encode(value: Any, dump_object: DumpObject) -> list[Buffer]:
    """Encode a value like ``dumps``. Errors do not contain the path within the value."""
    encoder = _Encoder(dump_object)
    try:
        encoder.buffers[0] = encoder.pack(value)
    except DDLFError:
        raise
    except (RecursionError, ValueError) as error:
        if isinstance(error, RecursionError) or "recursion limit" in str(error):  # the error comes from msgpack
            raise NotPicklable("a value contains itself, or nests too deeply", hint="flatten it") from None
        raise NotPicklable(f"a value cannot be sent: {error}") from error
    return encoder.buffers


class _Encoder:
    """The working state while ``dumps`` encodes one value.

    It is a class, because closures that call each other form a reference cycle. A cycle would keep the arrays until a
    later garbage collection.
    """

    __slots__ = ("_depth", "_dump_object", "buffers")

    def __init__(self, dump_object: DumpObject) -> None:
        self.buffers: list[Buffer] = [b""]
        self._dump_object = dump_object
        self._depth = 0

    def pack(self, item: Any) -> bytes:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RecursionError
        data = msgpack.Packer(default=self._extend, strict_types=True, unicode_errors="surrogatepass").pack(item)
        self._depth -= 1
        return data  # type: ignore[no-any-return]

    def _extend(self, item: Any) -> msgpack.ExtType:
        kind = type(item)
        if kind is tuple:
            return msgpack.ExtType(Tag.TUPLE, self.pack(list(item)))
        if kind is set or kind is frozenset:
            return msgpack.ExtType(Tag.SET if kind is set else Tag.FROZENSET, self.pack(list(item)))
        if kind is complex:
            return msgpack.ExtType(Tag.COMPLEX, struct.pack("<dd", item.real, item.imag))
        if kind is int:
            return msgpack.ExtType(Tag.INTEGER, item.to_bytes(item.bit_length() // 8 + 1, "little", signed=True))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if kind is numpy.ndarray or kind is numpy.memmap:
                packed = _dump_array(item, self.buffers, self.pack)
                if packed is not None:
                    return packed
            elif isinstance(item, numpy.generic):
                number = _dtype_number(item.dtype)
                if number is not None:
                    return msgpack.ExtType(Tag.SCALAR, bytes([number]) + item.tobytes())
                if kind is numpy.str_ or kind is numpy.bytes_:
                    plain = str(item) if kind is numpy.str_ else bytes(item)
                    return msgpack.ExtType(Tag.TEXT_SCALAR, self.pack(plain))
        fields = dump_standard(item)
        if fields is not None:
            return msgpack.ExtType(Tag.STANDARD, self.pack(fields))
        if self._dump_object is refuse_objects:
            fields = dump_known(item)
            if fields is not None:
                return msgpack.ExtType(Tag.KNOWN, self.pack(fields))
        tag, data = self._dump_object(item)
        return msgpack.ExtType(tag, data)


def loads(buffers: list[Any], load_object: LoadObject = refuse_loading) -> Any:
    """Decode a value from its tree and the memory of its arrays. The arrays then own this memory.

    Args:
        buffers: The result of ``dumps``, in writable memory.
        load_object: Makes an object from a tag and bytes, or raises.

    Raises:
        ProtocolError: The bytes are not an encoded value.
    """
    try:
        if not buffers:
            raise ProtocolError("message without a value")
        return _Decoder(buffers, load_object).unpack(buffers[0])
    except DDLFError:
        raise
    except Exception as error:  # msgpack's errors share no base class
        raise ProtocolError(f"value cannot be read: {type(error).__name__}: {error}") from None


class _Decoder:
    """The working state while ``loads`` decodes one value. It is a class for the same reason as ``_Encoder``."""

    __slots__ = ("_buffers", "_depth", "_load_object")

    def __init__(self, buffers: list[Any], load_object: LoadObject) -> None:
        self._buffers = buffers
        self._load_object = load_object
        self._depth = 0

    def unpack(self, data: Any) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ProtocolError("value nests too deeply")
        value = msgpack.unpackb(data, strict_map_key=False, ext_hook=self._extend, unicode_errors="surrogatepass")
        self._depth -= 1
        return value

    def _extend(self, code: int, data: bytes) -> Any:
        if code == Tag.TUPLE:
            return tuple(_items(self.unpack(data)))
        if code == Tag.ARRAY:
            index, *description = _items(self.unpack(data))
            if type(index) is not int or not 1 <= index < len(self._buffers):
                raise ProtocolError(f"array refers to buffer {index!r} of {len(self._buffers)}")
            return _load_array(self._buffers[index], description)
        if code == Tag.INLINE_ARRAY:
            memory, *description = _items(self.unpack(data))
            if type(memory) is not bytes:
                raise ProtocolError("array without memory")
            return _load_array(bytearray(memory), description)
        if code == Tag.SCALAR:
            return _load_array(bytearray(data[1:]), [data[0], "C"])[()]
        if code == Tag.SET:
            return set(_items(self.unpack(data)))
        if code == Tag.FROZENSET:
            return frozenset(_items(self.unpack(data)))
        if code == Tag.COMPLEX:
            return complex(*struct.unpack("<dd", data))
        if code == Tag.INTEGER:
            return int.from_bytes(data, "little", signed=True)
        if code == Tag.STANDARD:
            return load_standard(_items(self.unpack(data)))
        if code == Tag.KNOWN:
            return load_known(_items(self.unpack(data)))
        if code == Tag.TEXT_ARRAY:
            memory, *description = _items(self.unpack(data))
            if type(memory) is int:
                if not 1 <= memory < len(self._buffers):
                    raise ProtocolError(f"array refers to buffer {memory!r} of {len(self._buffers)}")
                memory = self._buffers[memory]
            elif type(memory) is not bytes:
                raise ProtocolError("array without memory")
            return _load_text_array(memory, description)
        if code == Tag.TEXT_SCALAR:
            return _text_scalar(self.unpack(data))
        if code in (Tag.OBJECT, Tag.CODE):
            return self._load_object(Tag(code), data)
        raise ProtocolError(f"extension type {code} not allowed")


def _items(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ProtocolError(f"expected items, got a {type(value).__name__}")
    return value


_numbers: dict[np.dtype[Any], int] = {}


def _dtype_number(dtype: np.dtype[Any]) -> int | None:
    """Return the number that stands for an array's element type in messages; None if it has no number."""
    number = _numbers.get(dtype)
    if number is None and dtype.name in DTYPES:
        # Cached, because NumPy computes a type's name again each time. That would be most of the cost of a scalar.
        number = _numbers[dtype] = DTYPES.index(dtype.name) | (BIG_ENDIAN if _is_big_endian(dtype) else 0)
    return number


def _is_big_endian(dtype: np.dtype[Any]) -> bool:
    return dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big")


@cache
def _dtype(number: int) -> np.dtype[Any]:
    """Return the element type of arrays that a number in a message stands for.

    Raises:
        NotPicklable: The type is bfloat16, and this side lacks the package that defines it.
    """
    import numpy as np

    name = DTYPES[number & ~BIG_ENDIAN]
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise NotPicklable("a bfloat16 array cannot be read here", hint="pip install ml-dtypes") from None
        name = ml_dtypes.bfloat16
    dtype = np.dtype(name)
    return dtype.newbyteorder() if bool(number & BIG_ENDIAN) != (sys.byteorder == "big") else dtype


def _dump_array(
    array: np.ndarray[Any, Any], buffers: list[Buffer], pack: Callable[[Any], bytes]
) -> msgpack.ExtType | None:
    import numpy as np

    number = _dtype_number(array.dtype)
    text = array.dtype.kind in "US" and array.dtype.itemsize > 0
    if (number is None and not text) or array.ndim > MAX_DIMENSIONS:
        return None
    if text:
        kind = "u" if array.dtype.kind == "U" and _is_big_endian(array.dtype) else array.dtype.kind
        tag, description = Tag.TEXT_ARRAY, [kind, array.dtype.itemsize // (4 if array.dtype.kind == "U" else 1)]
    else:
        tag, description = Tag.ARRAY, [number]
    order = "C"
    if not array.flags.c_contiguous:
        if array.flags.f_contiguous:
            order = "F"
        else:
            array = np.ascontiguousarray(array)
    if array.nbytes <= (INLINE_ARRAY_BYTES if len(buffers) < MANY_BUFFERS else JOIN_BELOW_BYTES):
        memory = array.tobytes("A")
        inline = Tag.INLINE_ARRAY if tag is Tag.ARRAY else tag
        return msgpack.ExtType(inline, pack([memory, *description, order, *array.shape]))
    flat = array.T if order == "F" else array
    # A bfloat16 array cannot be exported as a buffer, but its bytes can.
    buffers.append(memoryview(np.asarray(flat).reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
    return msgpack.ExtType(tag, pack([len(buffers) - 1, *description, order, *array.shape]))


def _load_array(memory: Any, description: list[Any]) -> np.ndarray[Any, Any]:

    if len(description) < 2:
        raise ProtocolError("array without dtype")
    number, order, *shape = description
    if type(number) is not int or (number & ~BIG_ENDIAN) >= len(DTYPES) or number < 0:
        raise ProtocolError(f"dtype {number!r} not allowed")
    return _shaped_array(memory, DTYPES[number & ~BIG_ENDIAN], _dtype(number), order, shape)


def _load_text_array(memory: Any, description: list[Any]) -> np.ndarray[Any, Any]:
    import numpy as np

    kind, size, order, *shape = description
    if kind not in ("U", "u", "S") or type(size) is not int or not 1 <= size <= 2**24:
        raise ProtocolError(f"text of kind {kind!r} and size {size!r} not allowed")
    dtype = np.dtype(f"{'>' if kind == 'u' else '<'}{kind.upper()}{size}")
    array = _shaped_array(bytearray(memory) if type(memory) is bytes else memory, f"{kind}{size}", dtype, order, shape)
    # NumPy would notice wrong characters only when they are read.
    if kind != "S" and array.size and np.frombuffer(memory, "<u4" if kind == "U" else ">u4").max() > sys.maxunicode:
        raise ProtocolError("a text array without characters")
    return array


def _text_scalar(text: Any) -> Any:
    import numpy as np

    if type(text) is str:
        return np.str_(text)
    if type(text) is bytes:
        return np.bytes_(text)
    raise ProtocolError(f"expected text, got a {type(text).__name__}")


def _shaped_array(memory: Any, name: str, dtype: np.dtype[Any], order: Any, shape: list[Any]) -> np.ndarray[Any, Any]:
    import numpy as np

    expected = dtype.itemsize
    if len(shape) > MAX_DIMENSIONS:
        raise ProtocolError(f"bad shape of {len(shape)} dimensions")
    for size in shape:
        if type(size) is not int or not 0 <= size <= 2**48:
            raise ProtocolError(f"bad shape {shape}")
        expected *= size
    size_given = len(memory)
    if expected != size_given:
        raise ProtocolError(f"array of shape {shape} and type {name} needs {expected} bytes, has {size_given}")
    if order not in ("C", "F"):
        raise ProtocolError(f"bad order {order!r}")
    return np.frombuffer(memory, dtype).reshape(shape, order=order)


def _find(value: Any, dump_object: DumpObject, within: tuple[int, ...] = ()) -> str:
    """Return the path to the first part of ``value`` that cannot be sent, or that is one of its enclosing containers.

    ``within`` has the identities of the containers around it. This runs only after a failure, so it may be slow.
    """
    parts: list[tuple[str, Any]] = []
    if type(value) is dict:
        parts = [(f"[{key!r}]", item) for key, item in value.items()]
    elif type(value) in (list, tuple):
        parts = [(f"[{index}]", item) for index, item in enumerate(value)]
    elif (
        dump_object is refuse_objects
        and isinstance(description := dump_known(value), list)
        and type(description[3]) is dict
    ):
        parts = [(f".{name}", item) for name, item in description[3].items()]
    within = (*within, id(value))
    for suffix, item in parts if len(within) <= 8 else ():
        try:
            _encode(item, dump_object)
        except DDLFError:
            return suffix if id(item) in within else suffix + _find(item, dump_object, within)
    return ""


DOING = "doing"
"""The event of a running request: its present activity and progress."""
MAX_ERROR_TEXT = 64 * 1024
"""Maximum number of characters of an exception's text. The rest is cut off."""
MAX_ATTRIBUTES_BYTES = 64 * 1024
"""Maximum bytes of an exception's arguments and attributes. A larger value is data and does not belong in a message."""
MAX_CHAIN = 20
"""Maximum number of causes and group members that are sent with an exception."""


class Kind(IntEnum):
    """The kind of a message, such as a request or an event; the first field of a frame's header."""

    REQUEST = 1  # name: command, extra: seconds it may take or None, value: [args, kwargs]
    RESULT = 2  # value: the result
    ERROR = 3  # value: what ``describe`` returns
    CANCEL = 4  # no body
    EVENT = 5  # name: what happened, value: its facts


class Request:
    """One call of a worker's command.

    Args:
        command: The name of an ``IWorker`` method, such as ``"run_method"``.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Attributes:
        pickle: Pickles the request's objects once for all workers that receive it. With None each worker's request is
            pickled separately.
        hear: Receives the worker's messages about the request while it runs; None if nobody needs them.

    Example:
        ``await worker.rpc(Request("run_method", add, a=20, b=60))``
    """

    __slots__ = ("args", "command", "hear", "kwargs", "pickle")

    def __init__(self, command: str, /, *args: Any, **kwargs: Any) -> None:
        self.command = command
        self.args = args
        self.kwargs = kwargs
        self.pickle: Callable[[Any], bytes] | None = None
        self.hear: Callable[[dict[str, Any]], None] | None = None

    def __repr__(self) -> str:
        arguments = [repr(value)[:40] for value in self.args] + [f"{k}={repr(v)[:40]}" for k, v in self.kwargs.items()]
        return f"Request({', '.join([repr(self.command), *arguments])})"


class Response:
    """The outcome of a request: a result or an error.

    Args:
        result: The value, if there is no error.
        error: The exception, or None.
    """

    __slots__ = ("error", "result")

    def __init__(self, result: Any = None, error: BaseException | None = None) -> None:
        self.result = result
        self.error = error

    def unwrap(self) -> Any:
        """Return the result of the request, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.result

    def __repr__(self) -> str:
        return f"Response(error={self.error!r})" if self.error is not None else f"Response({repr(self.result)[:60]})"


def read_arguments(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Check that the value in a request has the form of arguments, and return them.

    Returns:
        Positional and keyword arguments.

    Raises:
        ProtocolError: The value does not have this form.
    """
    if type(value) is list and len(value) == 2:
        args, kwargs = value
        if type(args) is list and type(kwargs) is dict and all(type(name) is str for name in kwargs):
            return args, kwargs
    raise ProtocolError("a request's value is [arguments, keyword arguments]")


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception as data: type name, message and frames, with its causes.

    Only data is sent. An exception that cannot be pickled, or whose ``__str__`` raises, therefore arrives like any
    other. DDLF's own frames before the first user frame are left out.
    """
    chain: list[list[Any]] = []
    visited: set[int] = set()
    pending: list[tuple[BaseException, str]] = [(error, "")]
    while pending and len(chain) < MAX_CHAIN:
        current, link = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        frames = [
            [f.filename, f.lineno or 0, f.name, f.line or ""] for f in traceback.extract_tb(current.__traceback__)
        ]
        if not chain:
            first_of_user = next(
                (index for index, frame in enumerate(frames) if not is_machinery(str(frame[0]))), len(frames)
            )
            frames = frames[first_of_user:]
        chain.append([type_name(current), _text(current), frames[-100:], link])
        if current.__cause__ is not None:
            pending.append((current.__cause__, "The above exception was the direct cause of the following exception:"))
        elif current.__context__ is not None and not current.__suppress_context__:
            link = "During handling of the above exception, another exception occurred:"
            pending.append((current.__context__, link))
        if isinstance(current, BaseExceptionGroup):
            pending += [(part, "The above exception is one of the group below:") for part in current.exceptions]
    facts: dict[str, Any] = {"chain": chain, "hint": _hint(error)}
    may_have_run = getattr(error, "may_have_run", None)
    if isinstance(may_have_run, bool):
        facts["may_have_run"] = may_have_run
    if not isinstance(error, DDLFError):
        facts |= _carried_facts(error)
    elif declared := _declared_facts(error):
        facts["declared"] = declared
    return facts


def _declared_facts(error: DDLFError) -> dict[str, Any]:
    """Return the facts of an error that its class declares, as far as they are plain data."""
    names = {
        name for kind in type(error).__mro__ for name in vars(kind).get("__annotations__", ()) if kind is not DDLFError
    }
    return {name: value for name, value in vars(error).items() if name in names and name[0] != "_" and _is_data(value)}


def _hint(error: BaseException) -> str:
    if isinstance(error, DDLFError):
        return error.hint
    if isinstance(error, FileNotFoundError):
        name = error.filename
        if isinstance(name, str) and not os.path.isabs(name):
            with contextlib.suppress(OSError):  # the folder itself is gone
                return f"on the worker, relative paths start at {os.getcwd()}: copy the file there on each machine, or use an absolute path"
        return ""
    missing = isinstance(error, ModuleNotFoundError) and type(error.name) is str and not error.name.startswith("ddlf")
    return where_modules_come_from(str(error.name)) if missing else ""  # type: ignore[attr-defined]


def where_modules_come_from(name: str) -> str:
    """Return advice about a module that a worker cannot import."""
    return f"install {name.partition('.')[0]} on the worker, or keep it below the script's folder, so that it is sent to workers"


def _carried_facts(error: BaseException) -> dict[str, Any]:
    """Return the arguments and attributes of an exception, as far as they are plain data that can be sent."""
    facts: dict[str, Any] = {}
    text = _text(error)  # the other side uses it as the only argument
    if error.args != ((text,) if text else ()) and _is_data(list(error.args)):
        facts["args"] = list(error.args)
    attributes = {name: value for name, value in vars(error).items() if not name.startswith("__") and _is_data(value)}
    if isinstance(error, OSError):
        os_fields = {name: getattr(error, name) for name in OS_ERROR}
        attributes |= {name: value for name, value in os_fields.items() if value is not None and _is_data(value)}
    if attributes and _is_data(attributes):
        facts["attributes"] = attributes
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list) and notes:
        facts["notes"] = [str(note)[:MAX_ERROR_TEXT] for note in notes[:MAX_CHAIN] if isinstance(note, str)]
    return facts


def _no_object(value: Any) -> NoReturn:
    """Refuse every object in an exception's attributes, even one whose class the master may know. The master must be
    able to read the error in any case.
    """
    raise TypeError


def _is_data(value: Any) -> bool:
    try:
        buffers = dumps(value, _no_object)
    except Exception:  # values that cannot be encoded stay on this side
        return False
    return len(buffers) == 1 and len(buffers[0]) <= MAX_ATTRIBUTES_BYTES


def rebuild(facts: dict[str, Any], *, worker: str = "") -> DDLFError:
    """Return the error that the master raises for the result of ``describe`` on a worker.

    DDLF's own errors keep their class. Other errors become a ``RemoteError`` that is also an instance of their class,
    if this side knows it.
    """
    try:
        return _rebuild(facts, worker)
    except (LookupError, TypeError, ValueError, AttributeError) as problem:
        return ProtocolError(f"error data cannot be read ({type(problem).__name__}: {problem})", worker=worker)


def _rebuild(facts: dict[str, Any], worker: str) -> DDLFError:
    chain = facts["chain"]
    name, message, frames, _ = chain[0]
    hint = str(facts.get("hint", ""))
    error_class = (
        getattr(ddlf.errors, name.removeprefix("ddlf.errors."), None) if name.startswith("ddlf.errors.") else None
    )
    if (
        isinstance(error_class, type)
        and issubclass(error_class, DDLFError)
        and not frames
        and error_class is not RemoteError
    ):
        declared = {name: value for name, value in facts.get("declared", {}).items() if hasattr(error_class, name)}
        error = error_class(message, hint=hint, worker=worker, **declared)
        if isinstance(error, RequestFailed):
            error.may_have_run = bool(facts.get("may_have_run", True))
        return error
    # Without lines of the user, the traceback would only repeat the message.
    lines = _format(chain) if any(entry[2] for entry in chain) or len(chain) > 1 else ""
    remote = RemoteError.of(name, message, lines, worker=worker)
    remote.hint = hint
    attributes, args = facts.get("attributes", {}), facts.get("args")
    if not all(type(key) is str for key in attributes):
        raise TypeError("names are text")
    remote.adopt(dict(attributes), tuple(args) if args is not None else (message,) if message else ())
    for note in facts.get("notes", ()):
        remote.add_note(note)
    return remote


def type_name(error: BaseException) -> str:
    """Return the name of an error's class: ``"ValueError"`` for a builtin, ``"module.Name"`` otherwise."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    try:
        # A hint travels separately from the text. A RemoteError keeps the traceback of its worker.
        text = error.message if isinstance(error, DDLFError) and not isinstance(error, RemoteError) else str(error)
    except Exception as broken:
        text = f"<its text is unavailable: {type(broken).__name__}>"
    return text if len(text) <= MAX_ERROR_TEXT else text[:MAX_ERROR_TEXT] + " [cut]"


def _format(chain: list[Any]) -> str:
    """Return the traceback as Python prints it. Source lines come from this side if the worker lacks the file."""
    parts: list[str] = []
    for name, message, frames, link in reversed(chain):
        summary = traceback.StackSummary.from_list(
            [
                traceback.FrameSummary(file, line, function, line=_line(file, text))
                for file, line, function, text in frames
            ]
        )
        lines = ["Traceback on the worker (most recent call last):\n", *summary.format()] if frames else []
        parts.append("".join(lines) + (f"{name}: {message}" if message else name))
        if link:
            parts.append(link)
    return "\n\n".join(parts)


def _line(file: str, text: str) -> str | None:
    """Return the source line of a traceback's frame as the other side has sent it. Return None if it is missing and
    this side can look it up itself, in a notebook's cell or in a file.

    Only regular files are read, because reading a device might never end.
    """
    return None if not text and (file in linecache.cache or os.path.isfile(file)) else text
