"""Tests of ``ddlf export`` and ``ddlf model compare``: early refusals, output, and the export of a small model."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from ddlf.cli import main
from ddlf.errors import ConfigError
from ddlf.extras.export import command as export
from ddlf.extras.export.export import Exported, ExportTarget
from ddlf.extras.export.formats import FORMATS
from ddlf.extras.export.steps import Refused
from ddlf.extras.export.verify import LayerComparison, Row
from tests.extras.text.language.texts import DIGITS, HEADS
from tests.patience import PATIENCE_S

MINE = """import keras
class Mine(keras.layers.Layer):
    def call(self, x):
        return x + (keras.backend.backend() == "jax")
"""


@pytest.fixture
def run_command(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command in a folder with texts, and returns output, errors and exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.nnm").write_text(DIGITS)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main.main(list(arguments))
        return *capsys.readouterr(), ended.value.code

    return run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("export digits.nnm --to onx", "there is no format 'onx'; did you mean 'onnx'?"),
        ("export no.nnm --to onnx", "there is no file 'no.nnm'"),
        (
            "export digits.nnm --to litert --json",
            "--json has no effect without --verify; add --verify, or leave it out",
        ),
        ("export digits.nnm --to litert --inputs a.npz", "--inputs has no effect without --verify"),
        (
            "export digits.nnm --to litert --backend jax",
            "Keras writes litert for any batch on TensorFlow only, not on JAX",
        ),
        ("export digits.nnm --to litert --out no/no", "/no; make it first"),
        ("export digits.nnm --to litert --verify --inputs no.npz", "--inputs no.npz: there is no such file"),
        ("export digits.nnm --to litert --tolerance 0", "must be a number above 0, got '0'"),
        (
            "export digits.nnm --to onnx,stablehlo --batch 4",
            "--batch fixes the batch of stablehlo, and has no effect on onnx",
        ),
        ("export digits.nnm", "the following arguments are required: --to"),
        ("export digits.nnm --to litert --backend jaxx", "did you mean 'jax'?"),
        (
            "model compare digits.nnm --backends jax,flax",
            "there is no backend 'flax'; the backends are: tensorflow, jax, torch",
        ),
        (
            "model compare digits.nnm --backends jax",
            "there is one backend of Keras, JAX, and nothing to compare it with",
        ),
    ],
)
def test_export_refuses_impossible_options_first(run_command, monkeypatch, arguments, sentence):
    monkeypatch.setattr(subprocess, "run", None)
    _, err, code = run_command(*arguments.split())
    assert code == 2
    assert sentence in err


def test_export_checks_inputs_before_it_writes(run_command, tmp_path, monkeypatch):
    def wrong(self, backend):
        raise ConfigError("a.npz has no array 'digits'")

    (tmp_path / "a.npz").write_bytes(b"")
    monkeypatch.setattr(export, "loadable", lambda source, *of: contextlib.nullcontext(source.path))
    monkeypatch.setattr(export.BackendComparison, "keras", wrong)
    monkeypatch.setattr(export, "write", None)
    _, err, code = run_command("export", "digits.nnm", "--to", "litert", "--verify", "--inputs", "a.npz")
    assert code == 2
    assert "a.npz has no array 'digits'" in err


def test_export_keeps_existing_files(run_command, tmp_path):
    (tmp_path / "digits.tflite").write_text("mine")
    _, err, code = run_command("export", "digits.nnm", "--to", "litert")
    assert code == 2
    assert "digits.tflite exists; write over it with --overwrite" in err
    assert (tmp_path / "digits.tflite").read_text() == "mine"


def test_row_names_the_runtime_or_the_refusing_package():
    rows = [
        Row("keras", "TensorFlow 2.21.0", seconds=(0.001, 0.01, 0.1)),
        Row("onnx", "onnxruntime 1.31.0", 3e-7, 7, (0.0001, 0.001, 0.01), 21_000),
        Row("torch", "torch 2.13.0", 0.5, 64, (0.0001, 0.001, 0.01), 21_000),
        Row("litert", "LiteRT 2.1", refused=Refused("LiteRT", "it has no FlexTensorListReserve")),
        Row("stablehlo", "IREE", bytes=9000, lacking="python -m pip install 'ddlf[export]'"),
    ]
    lines = [export._row_line(row, 1e-5).split(maxsplit=3) for row in rows]
    assert lines[0][3].split() == ["reference", "1", "ms", "10", "ms", "100", "ms"]
    assert lines[1][3].split() == ["3.0e-07", "0.1", "ms", "1", "ms", "10", "ms", "21.0", "kB"]
    assert lines[2][3].endswith("differs by more than 1e-05, at batch 64")
    assert lines[3] == ["litert", "LiteRT", "2.1", "LiteRT refuses: it has no FlexTensorListReserve"]
    assert lines[4][2:] == ["not", "run: this program is not installed; python -m pip install 'ddlf[export]'"]


def test_compare_prints_the_first_different_layer():
    same, other = LayerComparison("jax", 12, before=2e-7), LayerComparison("jax", 12, "lstm", 0.003, 2e-7)
    assert (
        export._first_difference(same, "tensorflow", 1e-5)
        == "layers    TensorFlow and JAX agree in all 12 common layers, within 2.0e-07"
    )
    assert export._first_difference(other, "tensorflow", 1e-5) == (
        "layers    TensorFlow and JAX first differ in 'lstm', by 3.0e-03 (more than 1e-05); earlier layers agree within 2.0e-07"
    )


def test_export_prints_written_and_refused_formats(tmp_path):
    target = ExportTarget(FORMATS["openvino"], "tensorflow", (tmp_path / "a.xml", tmp_path / "a.bin"))
    assert export._wrote(Exported(target, 12_345)) == f"wrote     {tmp_path}/a.xml and {tmp_path}/a.bin: 12.3 kB"
    assert export._wrote(Exported(target, refused=Refused("Keras", "no"))) == "refused   openvino: Keras refuses: no"


@pytest.mark.slow
def test_small_model_exports_and_agrees_with_keras(run_command, tmp_path):
    """Export two named outputs with the installed packages. ``tests/trials/test_export.py`` runs the exports of JAX."""
    (tmp_path / "heads.nnm").write_text(HEADS)
    out, _, code = run_command("export", "heads.nnm", "--to", "saved_model", "--verify", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert {(row["what"], row["by"].split()[0]) for row in rows} >= {
        ("keras", "TensorFlow"),
        ("keras", "JAX"),
        ("saved_model", "TensorFlow"),
    }
    assert max(row["difference"] or 0 for row in rows) < 1e-5
    assert {path.name for path in tmp_path.iterdir()} == {"digits.nnm", "heads.nnm", "heads.saved_model"}


@pytest.mark.slow
def test_compare_finds_the_first_different_layer_of_backends(run_command, tmp_path):
    """The model has a custom layer with another result on JAX."""
    (tmp_path / "mine.py").write_text(MINE)
    layers = "[keras.Input((3,)), keras.layers.Dense(4), mine.Mine(name='odd'), keras.layers.Dense(2)]"
    program = f"import mine, keras; keras.Sequential({layers}).save('m.keras')"
    on_jax = {**os.environ, "KERAS_BACKEND": "jax"}  # JAX is imported faster
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=on_jax, check=True, timeout=PATIENCE_S)
    _, err, code = run_command("model", "compare", "m.keras")
    assert (code, "has custom layers: Mine; name" in err) == (2, True)
    out, _, code = run_command("model", "compare", "m.keras", "--layers", "mine.py", "--backends", "tensorflow,jax")
    assert code == 1
    assert "TensorFlow and JAX first differ in 'odd', by " in out
