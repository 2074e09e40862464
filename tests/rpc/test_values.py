"""Tests of encoding values: data arrives unchanged, and bytes without a valid value are refused with a sentence."""

import dataclasses
import datetime
import math
import struct
import sys
import threading
import typing
from collections import OrderedDict, namedtuple
from decimal import Decimal
from enum import Flag, IntEnum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from zoneinfo import ZoneInfo

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import ddlf.rpc.messages as values_module
from ddlf.errors import NotPicklable, ProtocolError, ResultNotData
from ddlf.rpc.code import CodeCache, CodeSender
from ddlf.rpc.messages import DTYPES, INLINE_ARRAY_BYTES, MAX_DEPTH, Limits, Tag, dumps, encode_frame, loads

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TYPES = [np.dtype(name) if name != "bfloat16" else BFLOAT16 for name in DTYPES]


def travel(value):
    """Encode and decode like a connection, into new memory of the receiver."""
    return loads([bytearray(buffer) for buffer in dumps(value)])


def is_same(a, b) -> bool:
    """Return whether two values and all types inside are equal. ``==`` does not tell 1 from True, and NaN differs from itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        same_layout = a.dtype == b.dtype and a.dtype.isnative == b.dtype.isnative and a.shape == b.shape
        return same_layout and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return is_same(a.real, b.real) and is_same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            is_same(k, m) and is_same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(is_same(x, y) for y in b) for x in a)
    return a == b


integers = st.integers() | st.integers(-(2**70), 2**70) | st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63) - 1])
texts = st.text(st.characters(codec=None)) | st.just("\ud800 a lone surrogate")
scalars = st.builds(lambda dtype, number: dtype.type(number), st.sampled_from(TYPES), st.integers(0, 127))
atoms = st.none() | st.booleans() | integers | st.floats() | st.complex_numbers() | texts | st.binary() | scalars
hashable = atoms | st.tuples(atoms, st.tuples(atoms)) | st.frozensets(atoms, max_size=3)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.sets(hashable, max_size=4)
        | st.frozensets(hashable, max_size=4)
    ),
)


@given(values)
def test_every_value_arrives_unchanged_with_all_its_types(value):
    assert is_same(travel(value), value)


@given(
    npst.arrays(
        st.sampled_from(TYPES[:-1]).flatmap(lambda t: st.sampled_from([t, t.newbyteorder(">"), t.newbyteorder("<")])),
        npst.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=9),
    )
)
def test_every_array_arrives_with_its_bits_shape_type_and_byte_order(array):
    assert is_same(travel(array), array)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("shape", [(), (0,), (3,), (7, 0, 2), (40, 50)])
@pytest.mark.parametrize("dtype", TYPES, ids=DTYPES)
def test_each_element_type_travels_in_both_byte_orders(dtype, shape, order):
    array = np.arange(math.prod(shape)).astype(dtype).reshape(shape).astype(dtype.newbyteorder(order))
    assert is_same(travel(array), array)
    assert is_same(travel([array])[0], array)


@pytest.mark.parametrize("size", [4, 400])
def test_arrays_of_any_layout_arrive_with_the_same_elements(size, tmp_path):
    base = np.arange(size * size, dtype=np.float32).reshape(size, size)
    frozen = base.copy()
    frozen.flags.writeable = False
    mapped = np.memmap(tmp_path / "array", np.float32, "w+", shape=base.shape)
    mapped[:] = base
    for array in (base.T, base[::2, 1:], base[::-1, ::-1], np.broadcast_to(base[0], (3, size)), frozen, mapped):
        arrived = travel(array)
        np.testing.assert_array_equal(arrived, array, strict=True)
        assert type(arrived) is np.ndarray
        assert arrived.flags.writeable


def test_a_fortran_array_stays_a_fortran_array():
    for shape in ((3, 4), (30, 40), (5, 6, 70)):
        arrived = travel(np.asfortranarray(np.arange(math.prod(shape), dtype=np.int32).reshape(shape)))
        assert arrived.flags.f_contiguous
        assert not arrived.flags.c_contiguous
        np.testing.assert_array_equal(arrived, np.arange(math.prod(shape)).reshape(shape))


def test_an_array_is_copied_neither_by_the_sender_nor_by_the_receiver():
    for array in (np.zeros((100, 100)), np.asfortranarray(np.ones((100, 100), ">i4")), np.zeros(999, BFLOAT16)):
        tree, memory = dumps(array)
        assert np.shares_memory(np.frombuffer(memory, np.uint8), array.view(np.uint8) if array.ndim == 1 else array)
        received = np.array(np.frombuffer(memory, np.uint8))
        assert np.shares_memory(loads([tree, received]), received)


def test_small_arrays_travel_inside_the_value_and_larger_ones_beside_it():
    at_limit, above_limit = np.zeros(INLINE_ARRAY_BYTES, np.uint8), np.zeros(INLINE_ARRAY_BYTES + 1, np.uint8)
    assert [len(dumps(array)) for array in (at_limit, above_limit)] == [1, 2]
    assert travel(at_limit).flags.writeable


def test_a_bfloat16_array_is_an_error_with_advice_if_no_package_defines_the_type(monkeypatch):
    sent = dumps(np.zeros(3, BFLOAT16))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setattr(values_module, "_dtype", values_module._dtype.__wrapped__)
    with pytest.raises(NotPicklable, match="a bfloat16 array cannot be read here; pip install ml-dtypes"):
        loads(sent)


def test_array_scalars_keep_their_type():
    for dtype in TYPES:
        scalar = dtype.type(1)
        assert is_same(travel(scalar), scalar)
    assert type(travel(np.float64(0.5))) is np.float64, "this holds for scalars that derive from a Python type, too"


def test_other_kinds_of_memory_arrive_as_bytes():
    assert travel([bytearray(b"ab"), memoryview(b"cd")]) == [b"ab", b"cd"]
    assert all(type(item) is bytes for item in travel([bytearray(b"ab"), memoryview(b"cd")]))


# --- Objects ---------------------------------------------------------------------------------------------------------


class Color(IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


class LooksLikeATuple(tuple):
    _fields = ("a",)


@pytest.mark.parametrize(
    "value",
    [
        *(OrderedDict(a=1), 1 + 0j + np.clongdouble(1), datetime.datetime(2020, 1, 1, tzinfo=ZoneInfo("UTC"))),
        *(np.datetime64("2020-01-01"), np.array(["2020-01-01"], "M8[D]"), np.array([None, 1], object), slice(1, 2)),
        *(np.zeros(2, "i4,f4"), np.ma.masked_array([1, 2], [0, 1]), np.zeros((1,) * 40), LooksLikeATuple([1])),
    ],
    ids=lambda value: type(value).__name__ + str(getattr(value, "dtype", "")),
)
def test_an_object_is_refused_with_its_type_and_place_and_arrives_if_objects_are_allowed(value):
    with pytest.raises(ResultNotData) as caught:
        dumps({"a": [0, (value,)]})
    array = f" of {value.dtype} with {value.ndim} dimensions" if type(value) is np.ndarray else ""
    assert str(caught.value).startswith(
        f"a {type(value).__module__}.{type(value).__qualname__}{array} is not plain data (at ['a'][1][0]"
    )
    assert "pickle_results=True" in str(caught.value)
    arrived = loads(dumps((value, 1), CodeSender().dump), CodeCache().load)[0]
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value)


zones = st.none() | st.builds(
    datetime.timezone,
    st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
    st.text(max_size=5),
)
standard = (
    st.datetimes(timezones=st.just(datetime.UTC) | zones)
    | st.builds(lambda at: at.replace(fold=1), st.datetimes())
    | st.dates()
    | st.times(timezones=zones)
    | st.timedeltas()
    | zones
    | st.decimals()
    | st.uuids()
    | st.builds(range, st.integers(), st.integers(), st.integers(1))
    | st.builds(Path, st.text(max_size=9))
    | st.builds(PurePosixPath, st.text(max_size=9))
    | st.builds(PureWindowsPath, st.text(max_size=9))
)


@given(st.lists(standard, max_size=3) | st.dictionaries(st.dates() | st.uuids(), standard, max_size=2))
def test_values_of_the_standard_library_arrive_unchanged(value):
    for arrived in (travel(value), loads(dumps(value, CodeSender().dump))):
        assert repr(arrived) == repr(value)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "bc", "\U0001f600", ""]),
        np.array([["x" * 99] * 9, ["y"] * 9]),
        np.array([b"a\0b", b""]),
        np.array("one"),
        np.array([], "U7"),
        np.array([["a", "b"], ["c", "d"]])[:, ::-1],
        np.array([["ab"] * 30] * 30).T,
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_texts_arrive_unchanged(array, order):
    array = array.astype(array.dtype.newbyteorder(order), order="K")
    arrived = travel([array])[0]
    np.testing.assert_array_equal(arrived, array, strict=True)
    assert arrived.dtype.isnative == array.dtype.isnative
    assert arrived.flags.writeable


def test_texts_of_numpy_keep_their_type():
    for text in (np.str_("a"), np.bytes_(b"a"), np.str_("\ud800")):
        assert is_same(travel(text), text)


class Mode(Flag):
    READ, WRITE = 1, 2


class Frozen:
    """A namespace for a class that is not at module level; the receiver must look it up by its qualified name."""

    @dataclasses.dataclass(frozen=True)
    class Point:
        x: int
        where: Any = None


@dataclasses.dataclass
class Watched:
    """A data class with code in its constructor and in a property; decoding must run neither."""

    a: int
    constructed: typing.ClassVar[int] = 0

    def __post_init__(self):
        Watched.constructed += 1

    @property
    def later(self):
        raise AssertionError("asked")


@dataclasses.dataclass(slots=True)
class Narrow:
    a: int
    b: Any = None


@dataclasses.dataclass
class Leaves:
    a: int

    def __del__(self):
        pass


@dataclasses.dataclass
class OfADict(dict):
    a: int = 1


def known_objects():
    yield from (Color.RED, Mode.READ, Mode.READ | Mode.WRITE, Mode(0), Pair(1, [2]), Pair(Color.RED, Pair(1, 2)))
    watched = Watched(1)
    watched.more = {"array": 5}
    yield from (Frozen.Point(1, where=(2, Path("/x"))), watched, Narrow(1, Watched(2)))


@pytest.mark.parametrize("value", [*known_objects()], ids=repr)
def test_objects_of_known_classes_arrive_without_running_their_code(value):
    before = Watched.constructed
    arrived = travel({"deep": [(value,)]})["deep"][0][0]
    assert Watched.constructed == before
    assert type(arrived) is type(value)
    assert arrived == value
    assert getattr(arrived, "__dict__", None) == getattr(value, "__dict__", None)
    assert arrived is value or not isinstance(value, Color | Mode), "members are the master's own"


def test_arrays_inside_of_objects_travel_beside_the_value():
    sent = dumps(Frozen.Point(1, np.arange(1000)))
    assert len(sent) == 2
    np.testing.assert_array_equal(loads([bytearray(buffer) for buffer in sent]).where, np.arange(1000))


@pytest.mark.parametrize("value", [Leaves(1), OfADict(), LooksLikeATuple([1])], ids=lambda value: type(value).__name__)
def test_objects_that_need_code_of_their_class_are_not_data(value):
    with pytest.raises(ResultNotData, match="is not plain data"):
        dumps(value)


def test_a_class_of_a_function_is_not_data_and_its_place_in_an_object_is_named():
    @dataclasses.dataclass
    class Local:
        a: int

    with pytest.raises(ResultNotData, match=r"is not plain data \(at \.where\[1\] of the value\)"):
        dumps(Frozen.Point(1, where=[0, Local(1)]))


@pytest.mark.parametrize(
    "fields",
    [
        ["enum", "gone_module", "Color", "RED"],
        ["enum", __name__, "Color", "BLUE"],
        ["enum", __name__, "Pair", "RED"],
        ["enum", __name__, "Color", 1],
        ["namedtuple", __name__, "Pair", [1, 2, 3]],
        ["namedtuple", "builtins", "tuple", [1]],
        ["dataclass", __name__, "Color", {}],
        ["dataclass", __name__, "Leaves", {"a": 1}],
        ["dataclass", __name__, "Threads.x", {}],
        ["dataclass", "this", "Zen", {}],
    ],
    ids=repr,
)
def test_an_object_of_an_unknown_class_is_an_error_of_its_result_only(fields):
    with pytest.raises(
        ResultNotData, match=r"the result contains a .*, which (is unknown|differs).*import its module on this side"
    ):
        loads([tree(fields, Tag.KNOWN)])
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("fields", "tag"),
    [
        (["dataclass", __name__, "Narrow", {"c": 1}], Tag.KNOWN),
        (["dataclass", __name__, "Watched", {"__class__": 1}], Tag.KNOWN),
        (["dataclass", __name__, "Watched", {1: 1}], Tag.KNOWN),
        (["dataclass", 5, "Watched", {}], Tag.KNOWN),
        (["function", __name__, "travel", {}], Tag.KNOWN),
        ([], Tag.KNOWN),
        ({}, Tag.KNOWN),
        (["eval", "1"], Tag.STANDARD),
        ([5], Tag.STANDARD),
        ([], Tag.STANDARD),
        (["date", b"\0\0\0\0\0"], Tag.STANDARD),
        (["date", 1, 13, 1], Tag.STANDARD),
        (["datetime", 1, 1, 1], Tag.STANDARD),
        (["datetime", 1, 1, 1, 0, 0, 0, 0, 2, None], Tag.STANDARD),
        (["time", 0, 0, 0, 0, 0, [[9, 0, 0], None]], Tag.STANDARD),
        (["timedelta", 10**12, 0, 0], Tag.STANDARD),
        (["decimal", "x"], Tag.STANDARD),
        (["decimal", 1.5], Tag.STANDARD),
        (["uuid", b"x"], Tag.STANDARD),
        (["range", 1, 2, 0], Tag.STANDARD),
        (["path", 5], Tag.STANDARD),
        (["timezone", "utc"], Tag.STANDARD),
        ([b"abcd", "U", 1, "A", 1], Tag.TEXT_ARRAY),
        ([b"abcd", "U", 1, "C", 1], Tag.TEXT_ARRAY),
        ([b"\0\0\0\0", "u", 1, "C", 2], Tag.TEXT_ARRAY),
        ([b"", "S", 0, "C", 2], Tag.TEXT_ARRAY),
        ([b"", "V", 1, "C", 0], Tag.TEXT_ARRAY),
        ([b"", "S", 2**40, "C", 0], Tag.TEXT_ARRAY),
        ([1, "S", 1, "C", 0], Tag.TEXT_ARRAY),
        (["a", "S", 1, "C", 1], Tag.TEXT_ARRAY),
        ([b"a"], Tag.TEXT_ARRAY),
        (5, Tag.TEXT_SCALAR),
    ],
    ids=repr,
)
def test_invalid_values_of_extension_tags_are_refused(fields, tag):
    with pytest.raises(ProtocolError):
        loads([tree(fields, tag)])


def test_the_error_says_where_in_the_arguments_the_object_is():
    with pytest.raises(NotPicklable, match=r"lock.*\(at \[0\]\['deep'\]\[2\] of the value\)"):
        dumps([{"deep": [1, 2, threading.Lock()]}], CodeSender().dump)


def test_the_error_says_where_a_value_contains_itself():
    value = [0, 1, 2, {}]
    value[3]["x"] = value
    with pytest.raises(NotPicklable, match=r"a value contains itself.* \(at \[3\]\['x'\] of the value\); flatten it"):
        dumps(value)


def nested(depth, wrap):
    value = 0
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}, lambda v: frozenset([v])])
def test_a_value_that_nests_too_deeply_is_refused_before_it_is_sent(wrap):
    with pytest.raises(NotPicklable, match="nests too deeply"):
        dumps(nested(1500, wrap))


def test_another_reason_is_not_taken_for_a_value_that_contains_itself():
    def refuse(value):
        raise ValueError("the module was not imported correctly")

    with pytest.raises(NotPicklable, match=r"a value cannot be sent: the module was .* \(at \[0\] of the value\)"):
        dumps([object()], refuse)


def test_a_value_that_can_be_encoded_can_be_decoded_at_every_depth():
    for depth, wrap in ((MAX_DEPTH - 1, lambda v: (v,)), (1024, lambda v: [v]), (1024, lambda v: {0: v})):
        arrived = travel(nested(depth, wrap))
        for _ in range(depth):
            arrived = arrived[0]
        assert arrived == 0


# --- Invalid bytes ---------------------------------------------------------------------------------------------------


def tree(value, tag=None):
    data = msgpack.packb(value, use_bin_type=True)
    return data if tag is None else msgpack.packb(msgpack.ExtType(tag, data))


@pytest.mark.parametrize(
    "number",
    [
        15,
        63,
        64 + 15,
        128,
        255,
        2**40,
        -1,
        None,
        True,
        "O",
        "V1000000000",
        "(100000000,)f8",
        "f8; import os",
        "S",
        "<M8[ns]",
        [1],
    ],
    ids=lambda number: f"B84 {number!r}",
)
def test_an_element_type_outside_the_table_is_refused(number):
    with pytest.raises(ProtocolError, match=r"dtype .* not allowed"):
        loads([tree([1, number, "C", 8], Tag.ARRAY), bytearray(8)])


@pytest.mark.parametrize(
    "shape",
    [[-8], [8.0], [True], [2**63], [2**49], [None], ["8"], [1] * 33, [2**40] * 30, [-2, -4], [0, 2**48, 2**48]],
    ids=lambda shape: f"B85 {shape[:3]} of {len(shape)}",
)
def test_a_shape_that_no_array_has_is_refused(shape):
    with pytest.raises(ProtocolError, match=r"bad shape|needs \d+ bytes|cannot be read"):
        loads([tree([1, 5, "C", *shape], Tag.ARRAY), bytearray(8)])


@pytest.mark.parametrize("nbytes", [0, 7, 9, 16], ids=lambda nbytes: f"B87 {nbytes} bytes")
def test_memory_that_does_not_fit_the_shape_is_refused(nbytes):
    with pytest.raises(ProtocolError, match=rf"array of shape \[2\] and type float32 needs 8 bytes, has {nbytes}$"):
        loads([tree([1, 10, "C", 2], Tag.ARRAY), bytearray(nbytes)])
    with pytest.raises(ProtocolError, match="needs 8 bytes"):
        loads([tree([bytes(nbytes), 10, "C", 2], Tag.INLINE_ARRAY)])


@pytest.mark.parametrize("index", [0, 2, -1, None, True, 1.0, 2**63])
def test_an_array_whose_buffer_does_not_exist_is_refused(index):
    with pytest.raises(ProtocolError, match=r"array refers to buffer .* of 2$"):
        loads([tree([index, 5, "C", 8], Tag.ARRAY), bytearray(8)])


def test_a_wrong_shape_is_refused_before_an_array_of_it_is_made(monkeypatch):
    monkeypatch.setattr(np, "frombuffer", lambda *_: pytest.fail("made"))
    with pytest.raises(ProtocolError):
        loads([tree([1, 5, "C", 2**40], Tag.ARRAY), bytearray(8)])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "value cannot be read"),
        (b"\xc1", "value cannot be read: FormatError"),
        (b"\xa2\xff\xfe", "value cannot be read: UnicodeDecodeError"),
        (b"\x91" * 2000 + b"\x00", "value cannot be read: StackError"),
        (b"\xdd\xff\xff\xff\xff", "value cannot be read: ValueError"),
        (b"\xdb\xff\xff\xff\xffabc", "value cannot be read: ValueError"),
        (b"\x92\x01", "value cannot be read: ValueError: Unpack failed: incomplete input"),
        (b"\x01\x02\x03", "value cannot be read: ExtraData"),
        (b"\x81\x91\x01\x02", "value cannot be read: TypeError"),
        (tree(0, 42), "extension type 42 not allowed"),
        (tree(0, 15), "extension type 15 not allowed"),
        (tree(0, Tag.TUPLE), "expected items, got a int"),
        (tree({}, Tag.SET), "expected items, got a dict"),
        (tree([[]], Tag.SET), "value cannot be read: TypeError"),
        (tree([], Tag.ARRAY), "value cannot be read: ValueError"),
        (tree([1], Tag.ARRAY), "array refers to buffer 1 of 1"),
        (tree(["memory", 5, "C"], Tag.INLINE_ARRAY), "array without memory"),
        (tree([b"", 5], Tag.INLINE_ARRAY), "array without dtype"),
        (tree([b"\0", 5, "A"], Tag.INLINE_ARRAY), "bad order 'A'"),
        (b"\xc7\x00\x03", "value cannot be read: IndexError"),
        (b"\xd4\x03\x0a", "needs 4 bytes, has 0"),
        (b"\xd4\x07\x00", "value cannot be read: error: unpack requires a buffer of 16 bytes"),
        (b"\xd4\x09\x80", "pickled payload not allowed here"),
        (b"\xd4\x0a\x80", "pickled payload not allowed here"),
    ],
)
def test_invalid_bytes_are_refused_with_a_sentence(data, sentence):
    with pytest.raises(ProtocolError) as caught:
        loads([data])
    assert sentence in str(caught.value)


def test_extensions_nested_deeper_than_any_value_are_refused():
    data = b"\x00"
    for _ in range(MAX_DEPTH + 1):
        data = msgpack.packb(msgpack.ExtType(Tag.TUPLE, b"\x91" + data))
    with pytest.raises(ProtocolError, match="nests too deeply"):
        loads([data])


def test_a_message_without_a_value_is_refused():
    with pytest.raises(ProtocolError, match="message without a value"):
        loads([])


@given(st.binary(max_size=60), st.integers(0, 12))
def test_any_bytes_give_a_value_or_a_protocol_error(data, tag):
    for attempt in (data, msgpack.packb(msgpack.ExtType(tag, data))):
        try:
            loads([attempt, bytearray(8)])
        except ProtocolError:
            continue


# --- The document ----------------------------------------------------------------------------------------------------


def test_the_bytes_of_each_value_in_the_document_equal_the_encoded_ones(written_values):
    assert len(written_values) >= 20
    for expression, data in written_values.items():
        names = {"np": np, "inf": math.inf, "date": datetime.date, "timedelta": datetime.timedelta, "Decimal": Decimal}
        value = eval(expression, names)
        assert dumps(value)[0] == data, expression
        assert is_same(loads([data]), value), expression


def test_the_array_of_the_document_equals_the_encoded_one(written_bytes):
    array = np.arange(1024, dtype="<f4")
    tree, memory = dumps(array)
    assert tree == written_bytes["large-array"]
    assert bytes(memory) == array.tobytes()
    assert is_same(loads([tree, bytearray(memory)]), array)


def test_one_message_holds_any_number_of_small_arrays():
    arrays = [np.full(200, number, np.float32) for number in range(10_000)]
    buffers = dumps(arrays)
    encode_frame(1, 1, "run", buffers, limits=Limits())
    for array, back in zip(arrays, loads([bytearray(buffer) for buffer in buffers]), strict=True):
        assert np.array_equal(array, back)
