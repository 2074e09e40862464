"""Encodes Python values as bytes, and decodes them exactly. Pure; runs on both sides.

These values keep their type and value: None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, set,
NumPy scalars and arrays, and the values of ``standard``. Other kinds of memory (bytearray, memoryview) arrive as bytes.
The value tree is msgpack with the extension types of ``Tag``. Arrays travel next to it as raw memory, so they are not
copied here. Every other value is *an object*, and ``dump_object`` decides how to encode it. ``code`` pickles it. A
worker sends it as data if the master can know its class, and refuses it otherwise.

NumPy is imported with the first array, because a daemon's connections carry no arrays.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import msgpack

from ddlf.errors import DDLFError, NotPicklable, ProtocolError, ResultNotData
from ddlf.rpc.frame import JOIN_BELOW_BYTES, Buffer
from ddlf.rpc.standard import dump_known, dump_standard, load_known, load_standard

if TYPE_CHECKING:
    import numpy as np

MAX_DEPTH = 100
"""Deepest nesting of tuples, sets and arrays in one value."""
MAX_DIMENSIONS = 32
"""Most dimensions of an array. Every version of NumPy supports this number."""
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
    """The msgpack extension types."""

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
    """Refuse an object. This is the ``dump_object`` of a worker's results: only data leaves a worker."""
    what = f"{type(value).__module__}.{type(value).__qualname__}"
    if what == "numpy.ndarray":
        what += f" of {value.dtype} with {value.ndim} dimensions"
    raise ResultNotData(
        f"a {what} is not plain data",
        hint="return numbers, text, dates, lists, dicts, dataclasses or arrays, or allow objects with pickle_results=True (--pickle-results)",
    )


def refuse_loading(tag: Tag, data: bytes) -> NoReturn:
    """Refuse to load an object. This is the ``load_object`` of a master that does not unpickle results."""
    raise ProtocolError("pickled payload not allowed here")


def dumps(value: Any, dump_object: DumpObject = refuse_objects) -> list[Buffer]:
    """Encode a value.

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
    """The state of one ``dumps``.

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
    """The state of one ``loads``. It is a class for the same reason as ``_Encoder``."""

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
            index, *rest = _items(self.unpack(data))
            if type(index) is not int or not 1 <= index < len(self._buffers):
                raise ProtocolError(f"array refers to buffer {index!r} of {len(self._buffers)}")
            return _load_array(self._buffers[index], rest)
        if code == Tag.INLINE_ARRAY:
            memory, *rest = _items(self.unpack(data))
            if type(memory) is not bytes:
                raise ProtocolError("array without memory")
            return _load_array(bytearray(memory), rest)
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
            memory, *rest = _items(self.unpack(data))
            if type(memory) is int:
                if not 1 <= memory < len(self._buffers):
                    raise ProtocolError(f"array refers to buffer {memory!r} of {len(self._buffers)}")
                memory = self._buffers[memory]
            elif type(memory) is not bytes:
                raise ProtocolError("array without memory")
            return _load_text_array(memory, rest)
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
    """Return the number of an element type on the wire; None if it has no number."""
    number = _numbers.get(dtype)
    if number is None and dtype.name in DTYPES:
        # Cached, because NumPy computes a type's name again each time. That would be most of the cost of a scalar.
        number = _numbers[dtype] = DTYPES.index(dtype.name) | (BIG_ENDIAN if _is_big_endian(dtype) else 0)
    return number


def _is_big_endian(dtype: np.dtype[Any]) -> bool:
    return dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big")


@cache
def _dtype(number: int) -> np.dtype[Any]:
    """Return the element type of a number on the wire.

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
    return _shaped(memory, DTYPES[number & ~BIG_ENDIAN], _dtype(number), order, shape)


def _load_text_array(memory: Any, description: list[Any]) -> np.ndarray[Any, Any]:
    import numpy as np

    kind, size, order, *shape = description
    if kind not in ("U", "u", "S") or type(size) is not int or not 1 <= size <= 2**24:
        raise ProtocolError(f"text of kind {kind!r} and size {size!r} not allowed")
    dtype = np.dtype(f"{'>' if kind == 'u' else '<'}{kind.upper()}{size}")
    array = _shaped(bytearray(memory) if type(memory) is bytes else memory, f"{kind}{size}", dtype, order, shape)
    # NumPy would notice wrong characters only when they are read.
    if kind != "S" and array.size and np.frombuffer(memory, "<u4" if kind == "U" else ">u4").max() > sys.maxunicode:
        raise ProtocolError("text of no characters")
    return array


def _text_scalar(text: Any) -> Any:
    import numpy as np

    if type(text) is str:
        return np.str_(text)
    if type(text) is bytes:
        return np.bytes_(text)
    raise ProtocolError(f"text is no {type(text).__name__}")


def _shaped(memory: Any, name: str, dtype: np.dtype[Any], order: Any, shape: list[Any]) -> np.ndarray[Any, Any]:
    import numpy as np

    expected = dtype.itemsize
    if len(shape) > MAX_DIMENSIONS:
        raise ProtocolError(f"bad shape of {len(shape)} dimensions")
    for size in shape:
        if type(size) is not int or not 0 <= size <= 2**48:
            raise ProtocolError(f"bad shape {shape}")
        expected *= size
    given = len(memory)
    if expected != given:
        raise ProtocolError(f"array of shape {shape} and type {name} needs {expected} bytes, has {given}")
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
    elif dump_object is refuse_objects and isinstance(known := dump_known(value), list) and type(known[3]) is dict:
        parts = [(f".{name}", item) for name, item in known[3].items()]
    within = (*within, id(value))
    for suffix, item in parts if len(within) <= 8 else ():
        try:
            _encode(item, dump_object)
        except DDLFError:
            return suffix if id(item) in within else suffix + _find(item, dump_object, within)
    return ""
