"""Tests of export formats: their names, their backends, and errors about missing packages."""

import pytest

from ddlf.errors import ConfigError
from ddlf.extras.export import formats
from ddlf.extras.export.formats import ALL, BACKENDS, DISTRIBUTIONS, FORMATS, read, to_install, writer_of


@pytest.fixture
def installed(monkeypatch):
    """Return a function that chooses the installed modules."""

    def only(*names):
        monkeypatch.setattr(formats, "has_module", lambda name: name in names)

    return only


def test_read_keeps_the_order_of_formats():
    assert [kind.name for kind in read("onnx, saved_model,onnx")] == ["onnx", "saved_model"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("onx", "there is no format 'onx'; did you mean 'onnx'?"),
        ("tflite", "there is no format 'tflite'; did you mean 'litert'?"),
        ("TensorFlow", "there is no format 'TensorFlow'; did you mean 'saved_model'?"),
        ("pytorch", "there is no format 'pytorch'; did you mean 'torch'?"),
        ("zzz", "there is no format 'zzz'; the formats are: saved_model, onnx, litert, openvino, torch, stablehlo"),
        (" , ", "--to names no format; the formats are: saved_model, onnx, litert, openvino, torch, stablehlo"),
    ],
)
def test_read_refuses_an_unknown_format_with_a_suggestion(text, sentence):
    with pytest.raises(ConfigError) as error:
        read(text)
    assert str(error.value) == sentence


def test_formats_have_distinct_files_and_aliases():
    endings = [ending for kind in ALL for ending in kind.endings]
    words = [word for kind in ALL for word in (kind.name, *kind.also)]
    assert len(endings) == len(set(endings))
    assert len(set(words)) >= len(words) - 1  # torch is both a backend and the name of its format


def test_format_files_have_the_name_of_the_model():
    assert FORMATS["saved_model"].files("heads") == ("heads.saved_model",)
    assert FORMATS["stablehlo"].files("heads") == ("heads.mlirbc", "heads.jax")


def test_every_module_has_a_distribution():
    modules = {name for kind in ALL for names in kind.writers.values() for name in names}
    modules |= {name for kind in ALL for runtime in kind.runtimes for name in runtime.modules}
    assert modules | set(BACKENDS) == set(DISTRIBUTIONS)


def test_writer_prefers_the_usual_backend(installed):
    installed("tensorflow", "jax", "tf2onnx", "jax2onnx", "onnx")
    assert writer_of(FORMATS["onnx"], None) == "tensorflow"
    installed("jax", "jax2onnx", "onnx")
    assert writer_of(FORMATS["onnx"], None) == "jax"
    assert writer_of(FORMATS["onnx"], "jax") == "jax"


def test_missing_package_is_one_sentence_with_pip(installed):
    installed("tensorflow", "jax")
    with pytest.raises(ConfigError) as error:
        writer_of(FORMATS["onnx"], None)
    assert str(error.value) == (
        "onnx needs tf2onnx and onnx, which are not installed; python -m pip install 'ddlf[export]'"
    )
    with pytest.raises(ConfigError, match=r"^torch needs torch, which is not installed; python -m pip install 'ddlf\["):
        writer_of(FORMATS["torch"], None)
    installed()
    with pytest.raises(ConfigError, match=r"python -m pip install 'ddlf\[tensorflow,export\]'"):
        writer_of(FORMATS["openvino"], None)


@pytest.mark.parametrize(
    ("name", "backend", "where"),
    [
        ("litert", "jax", "TensorFlow"),
        ("saved_model", "torch", "TensorFlow or JAX"),
        ("torch", "tensorflow", "torch"),
        ("stablehlo", "torch", "JAX"),
    ],
)
def test_writer_refuses_a_backend_without_the_format(name, backend, where):
    with pytest.raises(
        ConfigError, match=rf"^Keras writes {name} for any batch on {where} only, not on {BACKENDS[backend]}; leave"
    ):
        writer_of(FORMATS[name], backend)


def test_pip_extras_exist():
    import tomllib
    from pathlib import Path

    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for distributions in DISTRIBUTIONS.values():
        line = to_install([distributions[0]])
        (extra,) = line.partition("[")[2].partition("]")[0].split(",")
        named = " ".join(extras[extra])
        assert distributions[0] in named, line
