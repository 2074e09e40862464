"""Tests of checking an exported model without Keras: each unsupported part has its own error message."""

import json
import zipfile
from pathlib import Path

import pytest

from ddlf.errors import ConfigError, NotationError
from ddlf.extras.export.source import find
from tests.extras.text.language.texts import DIGITS


def layer(kind, module="keras.layers", registered=None, **config):
    config = {"name": kind.lower()} | config
    return {"module": module, "class_name": kind, "config": config, "registered_name": registered}


@pytest.fixture
def saved(tmp_path):
    """Return a function that writes a file in the format of Keras, with some layers."""

    def write(*layers, name="model.keras", **more):
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            file.writestr("config.json", json.dumps(layer("Sequential", "keras", layers=list(layers)) | more))
        return tmp_path / name

    return write


def refusal_of(path, code=None):
    with pytest.raises(ConfigError) as error:
        find(path, code)
    return str(error.value).replace(f"{path.parent}/", "")


def test_find_accepts_a_model_a_text_and_a_run(saved, tmp_path):
    assert find(saved(layer("Dense")), None).stem == "model"
    run = tmp_path / "20261122-101500-app"
    run.mkdir()
    saved(layer("Dense")).rename(run / "model.keras")
    assert (find(run, None).path, find(run, None).stem) == (run / "model.keras", "20261122-101500-app")
    (tmp_path / "digits.nnm").write_text(DIGITS)
    assert find(tmp_path / "digits.nnm", None).is_text


def test_find_accepts_the_name_of_a_run(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDLF_RUN_DIR", raising=False)
    run = Path("runs/20261122-101500-base")
    run.mkdir(parents=True)
    saved(layer("Dense")).rename(run / "model.keras")
    for name in ("base", "last", run.name):
        assert find(Path(name), None).path == run / "model.keras"
    with pytest.raises(ConfigError, match="there is no file 'bsae', and no run in 'runs' begins with 'bsae'; list the"):
        find(Path("bsae"), None)


def test_find_refuses_other_paths_with_a_sentence(saved, tmp_path):
    saved()
    assert refusal_of(tmp_path / "modle.keras").startswith("there is no file")
    assert refusal_of(tmp_path / "modle.keras").endswith("did you mean 'model.keras'?")
    (tmp_path / "folder").mkdir()
    assert refusal_of(tmp_path / "folder").endswith(
        "is a folder without model.keras; name a .keras file, a .nnm text or the folder of a run"
    )
    (tmp_path / "empty.keras").touch()
    assert refusal_of(tmp_path / "empty.keras") == "empty.keras is empty"
    (tmp_path / "text.keras").write_text("text")
    assert (
        refusal_of(tmp_path / "text.keras")
        == "text.keras is not a .keras file: File is not a zip file; save the model again"
    )
    (tmp_path / "old.h5").write_text("text")
    assert refusal_of(tmp_path / "old.h5") == (
        "old.h5 is neither a .keras file nor a .nnm text; load it in Keras, and save it as old.keras"
    )
    (tmp_path / "app.py").write_text("text")
    assert refusal_of(tmp_path / "app.py").endswith("train the app with: ddlf run app.py --save model.keras")


def test_find_refuses_a_wrong_text(tmp_path):
    (tmp_path / "a.nnm").write_text("a:input shape=[1]; a:layers rellu();")
    with pytest.raises(NotationError, match="did you mean 'relu'"):
        find(tmp_path / "a.nnm", None)


def test_find_names_custom_layers_without_their_file(saved, tmp_path):
    path = saved(layer("Dense"), layer("Mine", "mine", "own>Mine"), layer("Other", "mine", "Other"))
    assert refusal_of(path) == (
        "model.keras has custom layers: own>Mine, Other; name the Python file that has them: --layers FILE.py"
    )
    (tmp_path / "mine.py").touch()
    assert find(path, tmp_path / "mine.py").custom_layers == ("own>Mine", "Other")
    assert refusal_of(path, tmp_path / "no.py").endswith("no.py: there is no such Python file")


def test_find_knows_layers_of_keras_and_ddlf(saved):
    path = saved(
        layer("Operator", "ddlf.extras.text.conversion.operator", "ddlf>Operator"),
        layer(
            "Dense",
            kernel_initializer=layer("GlorotUniform", "keras.initializers"),
            activation=layer("relu", "builtins"),
        ),
        compile_config={"loss": layer("mine", "mine", "own>mine")},
    )
    assert find(path, None).custom_layers == ()


def test_find_refuses_a_lambda_by_name(saved):
    assert refusal_of(saved(layer("Lambda", name="twice"))) == (
        "model.keras has a Lambda, the layer 'twice': loading it would run code from the file; "
        "write it as your own layer, registered with keras.saving.register_keras_serializable"
    )


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
def test_find_names_the_first_16_bit_layer(saved, policy):
    written = {"module": "keras", "class_name": "DTypePolicy", "config": {"name": policy}, "registered_name": None}
    path = saved(layer("Dense", dtype="float32"), layer("Dense", name="second", dtype=written))
    assert find(path, None).half_precision == ("second", policy)
    assert find(saved(layer("Dense", dtype="float32")), None).half_precision is None


def text_of(layers, tmp_path):
    (tmp_path / "a.nnm").write_text(f"a:input shape=[3]; a:output shape=[3]; a:layers {layers};")
    return tmp_path / "a.nnm"


@pytest.mark.parametrize(
    ("layers", "half"),
    [
        ("relu(), Dense(units=3, name=d, dtype=mixed_bfloat16)", ("d", "mixed_bfloat16")),
        ("cast(float16), relu()", ("cast", "float16")),
        ("Dense(units=3, dtype=float32)", None),
    ],
)
def test_find_names_the_first_16_bit_layer_of_a_text(tmp_path, layers, half):
    assert find(text_of(layers, tmp_path), None).half_precision == half


def test_find_names_custom_layers_of_a_text(tmp_path):
    path = text_of("numpy>Add(call=with(it, 1)), own>Mine(), own>Mine()", tmp_path)
    assert refusal_of(path).startswith("a.nnm has custom layers: own>Mine; name the Python file")
    (tmp_path / "mine.py").touch()
    assert find(path, tmp_path / "mine.py").custom_layers == ("own>Mine",)
