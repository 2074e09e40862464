"""Tests of files with weights and a text: they restore the same bits, and each error of a file is one sentence."""

import numpy as np
import pytest

from ddlf.errors import ConfigError
from ddlf.extras.text.conversion import weights
from ddlf.extras.text.language.model import read
from tests.extras.text.language.texts import DIGITS, text_of
from tests.later import Later

keras, build = Later("keras"), Later("ddlf.extras.text.conversion.build", "build")

BATCH = text_of("Dense(units=8), BatchNormalization(), Dense(units=8, dtype=bfloat16)", more="")


def saved(text, path):
    model = build(read(text))
    model.set_weights([np.random.default_rng(0).normal(size=array.shape) for array in model.get_weights()])
    weights.save(model, text, path)
    return model


@pytest.mark.parametrize("text", [DIGITS, BATCH])
def test_weights_load_bit_for_bit_with_their_text(text, tmp_path):
    model = saved(text, tmp_path / "m.safetensors")
    loaded_text, tensors = weights.load(tmp_path / "m.safetensors")
    again = build(read(loaded_text))
    weights.fill(again, tensors, tmp_path)
    assert loaded_text == text
    assert all(
        np.asarray(saved_weight).tobytes() == np.asarray(loaded_weight).tobytes()
        for saved_weight, loaded_weight in zip(model.weights, again.weights, strict=True)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_loaded_normalization_uses_its_statistics(tmp_path):
    text = text_of("Normalization()", more="")
    model = build(read(text))
    model.layers[-1].adapt(np.random.default_rng(0).normal(3, 2, (64, 8)))
    weights.save(model, text, tmp_path / "m.safetensors")
    again = build(read(text))
    weights.fill(again, weights.load(tmp_path / "m.safetensors")[1], tmp_path)
    x = np.ones((2, 8), "float32")
    np.testing.assert_array_equal(again(x), model(x))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors | {"more": np.zeros(3)}, "a tensor too many: the model has no 'more'"),
        (lambda tensors: {name: tensors[name] for name in tensors if name != "matmul/w1"}, "another model: 'matmul/w1' is not among them"),
        (lambda tensors: tensors | {"add/b1": np.zeros(3, "float32")}, r"another model: 'add/b1' has \[3\] there and \[48\]"),
        (lambda tensors: tensors | {"add/b1": np.zeros(48)}, "'add/b1' is float64 there and float32 here"),
    ],
    ids=["more", "less", "shape", "type"],
)  # fmt: skip
def test_fill_refuses_weights_of_another_model(change, sentence, tmp_path):
    model = saved(DIGITS, tmp_path / "m.safetensors")
    before = model.get_weights()
    with pytest.raises(ConfigError, match=sentence):
        weights.fill(model, change(weights.load(tmp_path / "m.safetensors")[1]), tmp_path)
    assert all(np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True))


def test_load_refuses_a_truncated_file_or_missing_text(tmp_path):
    path = tmp_path / "m.safetensors"
    saved(DIGITS, path)
    content = path.read_bytes()
    for size in (0, 5, 100, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ConfigError, match="is truncated, or is not a safetensors file"):
            weights.load(path)
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(3)}, path)
    with pytest.raises(ConfigError, match="no text of a model"):
        weights.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        weights.load(tmp_path / "none.safetensors")


def test_check_text_refuses_a_changed_text_but_not_another_form(tmp_path):
    weights.check_text(read(DIGITS), "# the same\n" + DIGITS, tmp_path)
    with pytest.raises(ConfigError, match="was changed since its weights were saved"):
        weights.check_text(read(DIGITS), DIGITS.replace("48", "47"), tmp_path)


def test_weight_names_contain_the_path():
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="d")], name="inner")
    a, b = keras.Input((4,)), keras.Input((4,))
    attend = keras.layers.MultiHeadAttention(1, 2, name="mha")
    joined = keras.layers.Add()([inner(a), inner(b)])
    output = attend(keras.layers.Reshape((1, 3))(joined), keras.layers.Reshape((1, 3))(joined))
    names = list(weights.variables(keras.Model([a, b], output)))
    assert names[:2] == ["inner/d/kernel", "inner/d/bias"]
    assert "mha/query/kernel" in names
    assert len(names) == 10
