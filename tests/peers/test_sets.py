"""Tests of the layout of sets: other programs can read the files, and other bytes are refused."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ddlf.errors import ConfigError
from ddlf.peers.sets import layout_of
from ddlf.training.checkpoints.tensors import read

WEIGHTS = {
    "conv/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "norm/count": np.array(7, np.int8),
    "dense/kernel": np.ones((2, 3), np.float64),
    "dense/bias": np.full(5, 0.5, np.float16),
    "half/kernel": np.arange(3).astype(ml_dtypes.bfloat16),
}
LAYOUT = layout_of(WEIGHTS)


def test_a_set_is_a_safetensors_file_with_aligned_tensors():
    data = LAYOUT.encode(list(WEIGHTS.values()))
    arrays = read(data, Path("a set"))
    assert arrays.keys() == WEIGHTS.keys()
    for name, array in WEIGHTS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)
    table = json.loads(LAYOUT.header[8:])
    for name, entry in table.items():
        assert (len(LAYOUT.header) + entry["data_offsets"][0]) % WEIGHTS[name].dtype.itemsize == 0


def test_a_decoded_set_has_the_bits_of_the_original():
    data = LAYOUT.encode(list(WEIGHTS.values()))
    assert len(data) == LAYOUT.bytes
    assert not LAYOUT.fault(data)
    for decoded, expected in zip(LAYOUT.decode(data), WEIGHTS.values(), strict=True):
        assert decoded.dtype == expected.dtype
        assert decoded.tobytes() == expected.tobytes()


def test_a_value_that_is_not_finite_is_named():
    broken = [array.copy() for array in WEIGHTS.values()]
    broken[0][1, 1] = np.nan
    assert LAYOUT.not_finite(broken) == "1 of 12 values of 'conv/kernel' are NaN or infinite"
    assert not LAYOUT.not_finite(list(WEIGHTS.values()))


def spelled(change):
    table = json.loads(LAYOUT.header[8:])
    text = change(table)
    text = text if isinstance(text, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + bytes(LAYOUT.bytes)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda table: table.pop("dense/bias") and None, "no 'dense/bias'"),
        (lambda table: table.update({"more": table["dense/bias"]}), "'more', which the model does not have"),
        (lambda table: table["dense/bias"].update(shape=[6]), r"'dense/bias' has the shape \[6\]"),
        (lambda table: table["dense/bias"].update(dtype="F32"), "'dense/bias' has the dtype F32"),
        (lambda table: json.dumps(table).encode()[:-1] + b', "dense/bias": {}}', "'dense/bias' twice"),
        (lambda table: table.update({"dense/bias": 3}), "says nothing about 'dense/bias'"),
        (lambda table: b"[]", "not a table"),
        (lambda table: b"{", "not JSON"),
        (lambda table: b"[" * 100_000, "not JSON"),
        (lambda table: b" " + json.dumps(table).encode(), "spelled in another way"),
    ],
)
def test_another_header_is_refused_with_its_first_difference(change, sentence):
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(LAYOUT.fault(spelled(change)))


def test_another_length_is_refused():
    data = LAYOUT.encode(list(WEIGHTS.values()))
    assert "a set of this model has" in LAYOUT.fault(data + b"\0")
    assert "a set of this model has" in LAYOUT.fault(data[:-1])
    assert "cut off" in LAYOUT.fault(data[:20])
    assert "cut off" in LAYOUT.fault(b"")


def test_a_weight_of_another_shape_is_not_encoded():
    with pytest.raises(ConfigError, match="'conv/kernel' is float32"):
        LAYOUT.encode([np.zeros((4, 3), np.float32), *list(WEIGHTS.values())[1:]])


def test_a_model_without_weights_is_refused():
    with pytest.raises(ConfigError, match="no weights to train"):
        layout_of({"count": np.array(1)})
