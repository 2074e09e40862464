"""Run the short form of the export trial: a small model, in the formats whose packages are installed."""

import pytest

from ddlf.extras.export.formats import FORMATS
from ddlf.extras.export.verify import TOLERANCE
from tests.trials import export


@pytest.mark.slow
def test_model_of_two_inputs_is_within_tolerance_in_installed_formats():
    formats = [name for name in ("saved_model", "stablehlo") if not FORMATS[name].lacks("jax")]
    short = ["--models", "two", "--backends", "jax", "--batches", "1,7"]
    rows = export.main([*short, "--formats", ",".join(formats)])
    ran = {(row.label, row.by.partition(" ")[0]) for row in rows if row.difference is not None}
    assert ran >= {("saved_model", "TensorFlow"), ("stablehlo", "JAX")}
    assert max(row.difference for row in rows if row.difference is not None) < TOLERANCE
    assert {row.refused for row in rows} == {None}


def test_a_table_has_a_row_for_each_model_and_notes_for_refusals():
    from ddlf.extras.export.steps import Refused
    from ddlf.extras.export.verify import Row

    refused = Refused("OpenVINO", "it has no rule for TensorListReserve")
    rows = [
        Row("keras", "TensorFlow 2"),
        Row("onnx", "onnxruntime 1", 2e-7),
        Row("openvino", "OpenVINO 1", refused=refused),
    ]
    lines = export.table({("lstm", "tensorflow"): rows}).splitlines()
    assert lines[0] == "| model | onnx, onnxruntime 1, from TensorFlow | openvino, OpenVINO 1, from TensorFlow |"
    assert lines[2:] == ["| lstm | 2e-07 | (1) |", "", f"(1) {refused}"]
