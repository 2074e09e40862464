"""Tests of comparing outputs: the differences equal the results of NumPy, and each outcome gives a row."""

import math
from pathlib import Path

import numpy as np
import pytest

from ddlf.extras.export.export import Exported, ExportTarget
from ddlf.extras.export.formats import FORMATS
from ddlf.extras.export.steps import Refused
from ddlf.extras.export.verify import BackendComparison, Row, all_agree, compare, difference

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("expected", "result", "far"),
    [
        ([0.25, 1.0], [0.25, 0.75], 0.25),
        ([100.0, 1.0], [100.0, 2.0], 0.01),
        ([-200.0], [-100.0], 0.5),
        ([1.0, NAN, INF], [1.0, NAN, INF], 0.0),
        ([1.0, NAN], [1.0, 1.0], INF),
        ([1.0], [NAN], INF),
        ([INF], [-INF], INF),
        ([INF, 1.0], [INF, 1.5], 0.5),
        ([], [], 0.0),
        ([1, 2], [1, 4], 1.0),
    ],
)
def test_difference_is_absolute_below_one_and_relative_above(expected, result, far):
    assert difference(np.array(expected), np.array(result)) == far


class Played:
    """A ``StepRunner`` with known results."""

    def __init__(self, outputs, refused=()):
        self.results, self.refused, self.done = outputs, dict(refused), []

    def do(self, name, backend, **job):
        self.done.append((name, backend, job["do"]))
        facts = {
            "inputs": [],
            "outputs": 0,
            "layout": 0,
            "parameters": 3,
            "layers": list(self.results.get(f"{name}.layers", {})),
        }
        return self.refused.get(name, facts | {"seconds": [0.1, 0.2]})

    def outputs(self, name, batch):
        if batch == "layers":
            return [np.array(array) for array in self.results[f"{name}.layers"].values()]
        return [np.array(array) for array in self.results[name]]


def rows(steps, written=(), backends=("tensorflow", "jax")):
    comparison = BackendComparison(Path("model.keras"), steps, backends[0], batches=(1, 7))
    return compare(comparison, backends, written, lambda row: None)


@pytest.fixture
def onnx(monkeypatch):
    monkeypatch.setattr("ddlf.extras.export.formats.has_module", lambda name: name != "openvino")
    return Exported(ExportTarget(FORMATS["onnx"], "tensorflow", (Path("model.onnx"),)), 1000)


def test_comparison_runs_the_reference_first(onnx):
    steps = Played({"keras-tensorflow": [[1.0]], "keras-jax": [[1.0]], "run-onnx-onnx": [[0.75]]})
    first, second, third = rows(steps, [onnx])
    assert (first.difference, second.difference, third.difference) == (None, 0.0, 0.25)
    assert [row.agrees(0.2) for row in (first, second, third)] == [True, True, False]
    assert (third.bytes, third.seconds, third.label) == (1000, (0.1, 0.2), "onnx")
    assert [backend for _, backend, _ in steps.done[:2]] == ["tensorflow", "jax"]


def test_refused_run_has_a_row_and_disagrees(onnx):
    refused = Refused("tf2onnx", "there is no operator for it")
    written = Exported(onnx.target, refused=refused)
    steps = Played({"keras-tensorflow": [[1.0]]}, {"keras-jax": refused})
    _, jax, row = rows(steps, [written])
    assert jax.refused is row.refused is refused
    assert not row.agrees(1.0)


def test_outputs_of_another_shape_are_refused(onnx):
    steps = Played({"keras-tensorflow": [[1.0, 2.0]], "run-onnx-onnx": [[1.0]]})
    assert rows(steps, [onnx], ["tensorflow"])[1].refused.reason == "at batch 1 it gives [1], and Keras [2]"


def test_missing_runtime_is_reported_without_a_result(onnx):
    target = ExportTarget(FORMATS["openvino"], "tensorflow", (Path("model.xml"), Path("model.bin")))
    _, row = rows(Played({"keras-tensorflow": [[1.0]]}), [Exported(target, 10)], ["tensorflow"])
    assert row.lacking == "python -m pip install 'ddlf[export]'"
    assert not row.agrees(1.0)


def test_comparison_stops_without_a_reference(onnx):
    steps = Played({}, {"keras-tensorflow": Refused("Keras", "no")})
    assert [row.label for row in rows(steps, [onnx])] == ["keras"]
    assert not Row("keras", "", refused=Refused("Keras", "no")).agrees(1.0)


@pytest.mark.parametrize(
    ("jax_layers", "first", "far", "before"),
    [
        ({"a": [1.0], "b": [2.0], "c": [3.0]}, "", 0.0, 0.0),
        ({"a": [1.0], "b": [1.5], "c": [9.0]}, "b", 0.25, 0.0),
        ({"a": [0.999], "c": [3.0], "d": [1.0]}, "", 0.0, 0.001),
        ({"a": [1.0], "b": [2.0, 2.0]}, "b", math.inf, 0.0),
    ],
    ids=["equal", "differs", "lacks", "shape"],
)
def test_comparison_names_the_first_different_layer(jax_layers, first, far, before):
    tensorflow_layers = {"a": [1.0], "b": [2.0], "c": [3.0]}
    results = {
        "keras-tensorflow.layers": tensorflow_layers,
        "keras-jax.layers": jax_layers,
        "keras-tensorflow": [[1.0]],
        "keras-jax": [[1.0]],
    }
    comparison = BackendComparison(Path("model.keras"), Played(results), "tensorflow", batches=(1,), layers=True)
    compare(comparison, ("tensorflow", "jax"), (), lambda row: None)
    (layer,) = comparison.compare_layers(0.01)
    assert (layer.first, layer.difference) == (first, far)
    assert layer.before == pytest.approx(before)


def test_comparison_names_a_layer_despite_other_output_shapes():
    results = {"keras-tensorflow.layers": {"a": [1.0], "b": [2.0]}, "keras-jax.layers": {"a": [1.0], "b": [2.0, 3.0]}}
    results |= {"keras-tensorflow": [[2.0]], "keras-jax": [[2.0, 3.0]]}
    steps = Played(results, {"keras-torch": Refused("torch", "no")})
    comparison = BackendComparison(Path("model.keras"), steps, "tensorflow", batches=(1,), layers=True)
    _, jax, torch = compare(comparison, ("tensorflow", "jax", "torch"), (), lambda row: None)
    assert (jax.refused.reason, torch.refused.reason) == ("at batch 1 it gives [2], and Keras [1]", "no")
    assert [(layer.backend, layer.first) for layer in comparison.compare_layers(0.01)] == [("jax", "b")]


def test_all_agree_needs_a_run_of_each_format():
    fine, far = Row("onnx", "onnxruntime", 1e-7), Row("onnx", "onnxruntime", 1e-3)
    lacking, by_another = Row("stablehlo", "IREE", lacking="pip"), Row("stablehlo", "JAX", 0.0)
    assert all_agree([fine, lacking, by_another], 1e-5)
    assert not all_agree([fine, lacking], 1e-5)
    assert not all_agree([far, by_another], 1e-5)
    assert not all_agree([by_another, Row("stablehlo", "IREE", refused=Refused("IREE", "no"))], 1e-5)


def test_names_in_the_json_stay_the_same():
    data = Row("onnx", "onnxruntime", refused=Refused("tf2onnx", "no")).to_data()
    assert list(data) == ["what", "by", "difference", "batch", "seconds", "bytes", "refused", "lacking"]
    assert data["refused"] == {"who": "tf2onnx", "why": "no"}
