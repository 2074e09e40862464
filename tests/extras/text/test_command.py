"""Tests of ``ddlf model``: conversions in all directions with the same bits, differences, pictures, and errors."""

import numpy as np
import pytest

from ddlf.cli import main
from tests.extras.text.language.texts import DIGITS
from tests.later import Later

keras = Later("keras")


def ddlf(capsys, *arguments):
    """Run a command, and return its output and exit code."""
    with pytest.raises(SystemExit) as ended:
        main.main(["model", *map(str, arguments)])
    out, err = capsys.readouterr()
    return out + err, int(ended.value.code or 0)


@pytest.fixture
def digits(tmp_path):
    (tmp_path / "digits.nnm").write_text(DIGITS)
    return tmp_path / "digits.nnm"


def test_convert_keeps_bits_between_all_file_types(digits, tmp_path, capsys):
    files = [
        tmp_path / name
        for name in ("a.safetensors", "b.keras", "c.nnm", "d.safetensors", "e.nnm", "f.keras", "g.keras")
    ]
    ways = [(digits, 0), (files[0], 1), (files[1], 2), (files[1], 3), (files[3], 4), (files[3], 5)]
    for source, target in ways:
        assert ddlf(capsys, "convert", source, files[target])[1] == 0
    assert ddlf(capsys, "convert", files[4], files[6], "--weights", files[3])[1] == 0
    weights = [keras.saving.load_model(files[at]).get_weights() for at in (1, 5, 6)]
    for other in weights[1:]:
        assert all(np.array_equal(original, converted) for original, converted in zip(weights[0], other, strict=True))
    assert files[2].read_text() == files[4].read_text()
    assert ddlf(capsys, "diff", files[0], digits) == ("", 0)


def test_convert_refuses_weights_of_a_changed_text(digits, tmp_path, capsys):
    saved = tmp_path / "a.safetensors"
    ddlf(capsys, "convert", digits, saved)
    digits.write_text(DIGITS.replace("48", "47"))
    output, code = ddlf(capsys, "convert", digits, tmp_path / "b.keras", "--weights", saved)
    assert code == 2
    assert "was changed since its weights were saved" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "digits.nnm"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{}", "b.nnm"], "are both a text"),
        (["{}", "none/b.keras"], "there is no folder"),
        (["none.keras", "b.nnm"], "there is no such file"),
        (["none.safetensors", "b.nnm"], "cannot be read"),
        (["{}", "{}.keras", "--layers", "none.py"], "--layers names a Python file"),
        (["none.keras", "b.nnm", "--weights", "c.safetensors"], "leave --weights out"),
        (["none.keras", "b.h5"], "b.h5 is an older format of Keras"),
        (["none.keras", "b.onnx"], "b.onnx is a file of another program: `ddlf export`"),
        (["a.npz", "b.keras"], "a.npz is no"),
    ],
)
def test_convert_refuses_wrong_files_with_a_sentence(arguments, sentence, digits, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output, code = ddlf(capsys, "convert", *(argument.format(digits) for argument in arguments))
    assert code == 2
    assert sentence in output


def test_show_and_diff_refuse_missing_layers_and_other_files(digits, capsys):
    for arguments, sentence in (
        (("show", digits, "--layers", "none.py"), "--layers names"),
        (("diff", digits, "a.npz"), "no model"),
    ):
        output, code = ddlf(capsys, *arguments)
        assert (code, sentence in output) == (2, True), output


def test_convert_refuses_a_broken_keras_file(tmp_path, capsys):
    (tmp_path / "a.keras").write_bytes(b"no zip file")
    output, code = ddlf(capsys, "convert", tmp_path / "a.keras", tmp_path / "b.nnm")
    assert code == 2
    assert "cannot be loaded by Keras" in output


def test_convert_takes_custom_layers_from_a_file(tmp_path, capsys):
    source = (
        "import keras\n\n@keras.saving.register_keras_serializable('mine')\nclass Twice(keras.layers.Layer):\n"
        "    def call(self, x):\n        return 2 * x\n"
    )
    (tmp_path / "mine.py").write_text(source)
    (tmp_path / "a.nnm").write_text("a:input shape=[3]; a:output shape=[3]; a:layers mine>Twice();")
    for source_name, target_name in (("a.nnm", "a.keras"), ("a.keras", "b.nnm")):
        output, code = ddlf(
            capsys, "convert", tmp_path / source_name, tmp_path / target_name, "--layers", tmp_path / "mine.py"
        )
        assert code == 0, output
    assert "mine>Twice()" in (tmp_path / "b.nnm").read_text()


def test_diff_prints_a_line_for_each_difference(digits, tmp_path, capsys):
    (tmp_path / "other.nnm").write_text(DIGITS.replace("[24]", "[20]").replace("relu)", "tanh)").replace("SCE", "CCE"))
    output, code = ddlf(capsys, "diff", digits, tmp_path / "other.nnm")
    assert code == 1
    assert output.splitlines() == [
        "~ model: parameters 4,546 -> 4,310",
        "- 4 relu() [48]",
        "+ 4 tanh() [48]",
        "~ 5 matmul: shape [24] -> [20], parameters [48, 24] -> [48, 20]",
        "~ 6 add: shape [24] -> [20], parameters [24] -> [20]",
        "- 7 relu() [24]",
        "+ 7 tanh() [20]",
        "~ 8 matmul: parameters [24, 10] -> [20, 10]",
        "~ output digits: loss SCE -> CCE",
    ]


def test_diff_compares_layers_of_keras_files(tmp_path, capsys):
    for name, more in (("a", []), ("b", [keras.layers.Dropout(0.5, name="drop")])):
        layers = [
            keras.Input((4,)),
            keras.layers.Dense(8 + len(more), name="d"),
            *more,
            keras.layers.Dense(2, name="e"),
        ]
        keras.Sequential(layers, name="m").save(tmp_path / f"{name}.keras")
    output, code = ddlf(capsys, "diff", tmp_path / "a.keras", tmp_path / "b.keras")
    assert code == 1
    assert "~ 2 Dense d: units 8 -> 9, shape [8] -> [9], parameters [4, 8] [8] -> [4, 9] [9]" in output
    assert "+ 3 Dropout(rate=0.5) drop [9]" in output
    assert "~ 3 Dense e: parameters [8, 2] [2] -> [9, 2] [2]" in output
    assert "reads" not in output


def test_diff_ignores_automatic_names(tmp_path, capsys):
    def saved(name, units=8, last=None):
        x = keras.Input((4,))
        hidden = keras.layers.Dense(units, "relu")(x)
        heads = [keras.layers.Dense(1)(hidden), keras.layers.Dense(2, name=last)(hidden)]
        keras.Model(x, heads).save(tmp_path / name)
        return tmp_path / name

    first, same = saved("a.keras"), saved("b.keras")
    assert ddlf(capsys, "diff", first, same) == ("", 0)
    output, code = ddlf(capsys, "diff", first, saved("c.keras", units=9))
    assert (code, "units 8 -> 9" in output, "output" in output, "name" in output) == (1, True, False, False)
    output, code = ddlf(capsys, "diff", first, saved("d.keras", last="mine"))
    assert (code, "+ output mine" in output) == (1, True)


def test_show_reads_a_keras_file(tmp_path, capsys):
    keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, name="d")], name="m").save(tmp_path / "a.keras")
    assert "650 parameters" in ddlf(capsys, "show", tmp_path / "a.keras")[0]
