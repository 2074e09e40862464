"""Tests of tensor files: arrays are read back bit for bit, and a file in another format is refused with a sentence."""

import contextlib
import json
import struct
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddlf.errors import CheckpointCorrupt, CheckpointError
from ddlf.training.checkpoints import tensors

TYPES = [np.dtype(name) for name in tensors.TYPES.values()]
TYPES += [np.dtype(getattr(ml_dtypes, name)) for name in tensors.ML_TYPES.values()]


@st.composite
def arrays(draw):
    """Draw arrays of any type, shape and bits, also empty, without dimensions, transposed, with gaps, and big-endian."""
    dtype = draw(st.sampled_from(TYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    count = int(np.prod(shape))
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == np.bool_:
        raw = bytes(byte & 1 for byte in raw)
    array = np.frombuffer(raw, dtype).reshape(shape)
    match draw(st.sampled_from(["as it is", "transposed", "with gaps", "backwards", "big-endian"])):
        case "transposed":
            return array.T
        case "with gaps" if shape:
            return np.repeat(array, 2, axis=0)[::2]
        case "backwards" if shape:
            return array[::-1]
        case "big-endian" if dtype.byteorder == "=" and dtype in TYPES[: len(tensors.TYPES)]:
            return array.astype(dtype.newbyteorder(">"))
    return array


def names():
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda name: name != "__metadata__")


def round_trip(arrays_by_name, path):
    tensors.write(tensors.plain(arrays_by_name), path)
    return tensors.read(path.read_bytes(), path)


@settings(max_examples=3 * settings.default.max_examples)
@given(st.dictionaries(names(), arrays(), max_size=5))
def test_any_array_is_read_back_with_the_same_bits_type_and_shape(tmp_path_factory, saved):
    loaded = round_trip(saved, tmp_path_factory.getbasetemp() / "any.safetensors")
    assert loaded.keys() == saved.keys()
    for name, array in saved.items():
        little = array.byteswap().view(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
        assert loaded[name].dtype == little.dtype
        assert loaded[name].shape == array.shape
        assert loaded[name].tobytes() == little.tobytes()
        assert loaded[name].flags.writeable


def test_other_programs_can_read_the_file(tmp_path):
    from safetensors.numpy import load_file

    tensors.write(tensors.plain({"w": np.arange(6.0).reshape(2, 3).T}), tmp_path / "w")
    np.testing.assert_array_equal(load_file(tmp_path / "w")["w"], np.arange(6.0).reshape(2, 3).T)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("w", [1.0], "'w' is a builtins.list, not a NumPy array; use numpy.asarray"),
        ("w", np.float32(1), "is a numpy.float32, not a NumPy array"),
        ("w", np.ma.masked_array([1.0], [True]), "is a numpy.ma.*, not a NumPy array"),
        ("w", np.ones(1, np.complex128), "has the type complex128, which a checkpoint cannot hold"),
        ("w", np.array(["a"]), "has the type <U1"),
        ("w", np.array([None]), "has the type object"),
        ("w", np.ones(1, ml_dtypes.int4), "has the type int4"),
        ("__metadata__", np.ones(1), "cannot have the name '__metadata__'"),
        ("\ud800", np.ones(1), r"cannot have the name '\\ud800'"),
    ],
)
def test_an_array_that_cannot_be_stored_exactly_is_refused_by_name(name, value, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        tensors.plain({name: value})


def test_too_many_names_are_refused_before_anything_is_written():
    with pytest.raises(CheckpointError, match="60,000 arrays are too many for one file"):
        tensors.plain(dict.fromkeys(map(str, range(60_000)), np.ones(1)))


def made_up(header, body=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 64,
        made_up({}, length=2**63),
        made_up(b" " * 1000, length=1001),
        made_up(b"\xff\xff"),
        made_up(b"[" * 10_000),
        made_up([]),
        made_up({"a": entry(), "b": entry()}, b"1234"),
        made_up({"a": entry(offsets=(0, 4)), "b": entry(offsets=(2, 6))}, b"123456"),
        made_up({"a": entry(dtype="X32")}, b"1234"),
        made_up({"a": entry(dtype="F4", shape=(8,))}, b"1234"),
        made_up({"a": entry(shape=(2**64 - 1, 2**64 - 1))}, b"1234"),
        made_up({"a": entry(shape=(2**63, 0), offsets=(0, 0))}),
        made_up({"a": entry(shape=(0,) * 100, offsets=(0, 0))}),
        made_up({"a": entry(shape=(-1,))}, b"1234"),
        made_up({"a": entry(offsets=(4, 0))}, b"1234"),
        made_up({"a": entry()}, b"123"),
        made_up({"a": entry()}, b"12345"),
    ],
)
def test_a_file_in_another_format_is_refused_with_one_kind_of_error(tmp_path, data):
    with pytest.raises(CheckpointCorrupt, match=r"weights.safetensors is damaged"):
        tensors.read(data, tmp_path / "weights.safetensors")


def test_a_header_of_more_than_10_mb_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    import safetensors

    monkeypatch.setattr(safetensors, "deserialize", None)  # calling it would be a TypeError
    with pytest.raises(CheckpointCorrupt, match=r"a header of at most 10,485,760 bytes, found 11,000,000"):
        tensors.read(made_up(b" " * 11_000_000), tmp_path / "w")


@given(st.binary(max_size=200))
def test_an_invented_header_raises_no_other_error(tmp_path_factory, text):
    with contextlib.suppress(CheckpointCorrupt):
        tensors.read(made_up(text, b"12345678"), tmp_path_factory.getbasetemp() / "w")


def test_arrays_without_elements_may_share_their_place(tmp_path):
    loaded = tensors.read(
        made_up({"a": entry(shape=(0,), offsets=(0, 0)), "b": entry(shape=(3, 0), offsets=(0, 0))}), tmp_path
    )
    assert {name: array.shape for name, array in loaded.items()} == {"a": (0,), "b": (3, 0)}


def test_bfloat16_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    tensors.write({"w": np.ones(2, ml_dtypes.bfloat16)}, tmp_path / "w")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(CheckpointError, match="bfloat16 arrays cannot be read here; pip install ml-dtypes"):
        tensors.read((tmp_path / "w").read_bytes(), tmp_path / "w")
