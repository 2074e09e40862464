"""Tests of planning and writing an export: the plan is checked before writing, and each format is written whole or not."""

import pytest

from ddlf.errors import ConfigError
from ddlf.extras.export.export import ExportTarget, plan, size_of, write
from ddlf.extras.export.formats import FORMATS
from ddlf.extras.export.source import ExportSource
from ddlf.extras.export.steps import Refused


@pytest.fixture(autouse=True)
def all_installed(monkeypatch):
    monkeypatch.setattr("ddlf.extras.export.formats.has_module", lambda name: True)


@pytest.fixture
def source(tmp_path):
    return ExportSource(tmp_path / "a.keras", "a")


def refused(*arguments, **options):
    with pytest.raises(ConfigError) as error:
        plan(*arguments, **options)
    return str(error.value)


def test_plan_refuses_existing_files_without_overwrite(source, tmp_path):
    formats = [FORMATS["onnx"], FORMATS["openvino"]]
    assert [target.paths[-1].name for target in plan(source, formats, tmp_path)] == ["a.onnx", "a.bin"]
    (tmp_path / "a.bin").touch()
    assert refused(source, formats, tmp_path) == (
        f"{tmp_path}/a.bin exists; write over it with --overwrite, or name another folder with --out"
    )
    assert len(plan(source, formats, tmp_path, overwrite=True)) == 2


def test_plan_refuses_a_missing_folder(source, tmp_path):
    assert refused(source, [FORMATS["onnx"]], tmp_path / "no" / "no").startswith(
        f"there is no folder {tmp_path}/no; make it"
    )
    assert plan(source, [FORMATS["onnx"]], tmp_path / "new")  # the folder is created at the first write


def test_plan_refuses_16_bits_only_for_onnx(source, tmp_path):
    mixed = ExportSource(source.path, "a", half_precision=("dense", "mixed_float16"))
    assert refused(mixed, [FORMATS["litert"], FORMATS["onnx"]], tmp_path).startswith(
        f"ONNX files need models in float32, but the layer 'dense' of {tmp_path}/a.keras computes in mixed_float16; "
    )
    assert plan(mixed, [FORMATS["litert"]], tmp_path)


class Writing:
    """A ``StepRunner`` that writes some files, or refuses."""

    def __init__(self, *names, outcome=None):
        self.names, self.outcome = names, outcome or {}

    def do(self, name, backend, *, folder, **job):
        from pathlib import Path

        for file in self.names:
            (Path(folder) / file).write_text("new")
        return self.outcome


def written(steps, tmp_path, format="openvino"):
    paths = tuple(tmp_path / name for name in FORMATS[format].files("a"))
    return write(tmp_path / "a.keras", [ExportTarget(FORMATS[format], "tensorflow", paths)], "a", steps)[0]


def test_write_replaces_all_files_of_a_format_or_none(tmp_path):
    (tmp_path / "a.bin").write_text("old")
    export = written(Writing("a.xml"), tmp_path)
    assert str(export.refused) == "Keras refuses: it wrote no a.bin"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.bin": "old"}
    assert written(Writing("a.xml", "a.bin"), tmp_path).bytes == 6
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.bin": "new", "a.xml": "new"}


def test_refused_write_leaves_no_files(tmp_path):
    refusal = Refused("OpenVINO", "no")
    assert written(Writing("a.xml", outcome=refusal), tmp_path).refused is refusal
    assert list(tmp_path.iterdir()) == []


def test_write_replaces_a_folder_by_a_file(tmp_path):
    (tmp_path / "a.onnx").mkdir()
    (tmp_path / "a.onnx" / "old").touch()
    assert written(Writing("a.onnx"), tmp_path, "onnx").refused is None
    assert (tmp_path / "a.onnx").read_text() == "new"


def test_folder_size_counts_all_files(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(bytes(3))
    (tmp_path / "b").write_bytes(bytes(4))
    assert size_of(tmp_path) == 7
