"""Tests of a data set at a place: its use by an app, and its errors."""

import json

import numpy as np
import pytest

import ddlf.data
from ddlf.algorithms.reading_order import SHUFFLE
from ddlf.cli.main import main
from ddlf.data.app_data import check_data
from ddlf.data.data_set import DataSet, Description
from ddlf.data.generators import Generated
from ddlf.data.location import Folder
from ddlf.data.remote_folder import open_location
from ddlf.data.sources import open_source
from ddlf.data.split import split
from ddlf.errors import ConfigError, DatasetError

X, Y = np.arange(60, dtype=np.float32).reshape(20, 3), np.arange(20)


@pytest.fixture(params=[[20], [7, 7, 6]], ids=["one file", "three files"])
def location(request, tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    split(open_source(tmp_path / "a.npz"), Folder(tmp_path / "place"), request.param, shuffle=False)
    return tmp_path / "place"


def test_columns_are_usable_as_training_arrays(location):
    class App:
        x_train, y_train = ddlf.data.open(location)["x"], ddlf.data.open(location)["y"]

    check_data(App())
    assert np.array_equal(App.x_train, X)
    assert np.array_equal(App.y_train, Y)
    assert list(ddlf.data.open(location)) == ["x", "y"]
    with pytest.raises(ValueError, match="read-only"):
        App.x_train[0] = 1


def test_damaged_file_and_missing_column_are_named(location):
    with pytest.raises(DatasetError, match="has no column 'z'; it has x, y"):
        ddlf.data.open(location)["z"]
    path = location / "v0001" / "00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"00000\.safetensors is damaged"):
        ddlf.data.open(location)["x"]


@pytest.mark.parametrize("way", ["load", "mapped"])
def test_file_is_checked_before_its_samples_are_used(location, way):
    reading = open_location(location)
    manifest = reading.manifest()
    read = getattr(reading, way)
    parts = [read(file, manifest.columns) for file in manifest.files]
    assert np.array_equal(np.concatenate([part["x"] for part in parts]), X)
    assert np.array_equal(np.concatenate([part["y"] for part in parts]), Y)
    with pytest.raises(ValueError, match="read-only"):
        parts[0]["x"][0] = 1
    path = location / manifest.files[-1].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)  # the file is damaged in the middle of a run
    with pytest.raises(DatasetError, match=r"\.safetensors is damaged"):
        read(manifest.files[-1], manifest.columns)


def test_failing_decode_names_sample_and_file(location, caplog):
    def decode(sample):
        if sample["y"] in (0, 9):
            raise ValueError("torn")
        return {"x": sample["x"][:2], "y": sample["y"]}

    data = ddlf.data.open(location, decode=decode)
    assert data.columns["x"].shape == (2,)  # the shape of the first usable sample
    problems = [data.damaged(number) for number in range(len(data.manifest.files)) for _ in range(2)][::2]
    assert ["decode cannot use sample 0 (row 0 of" in problems[0], "ValueError: torn" in problems[0]] == [True, True]
    assert [problem.partition(" (")[0] for problem in problems[1:]] == ["decode cannot use sample 9", ""][
        : len(problems) - 1
    ]
    assert [record.message for record in caplog.records] == [
        f"{problem}: its file is left out" for problem in problems if problem
    ]

    def none(sample):
        raise ValueError("torn")

    with pytest.raises(DatasetError, match="decode cannot use sample 0 "):
        list(ddlf.data.open(location, decode=none))


def test_option_that_the_class_of_a_data_set_does_not_take_is_refused(location, monkeypatch):
    class Plain(DataSet):
        def __init__(self, location, decode=None, classes=()):
            super().__init__(location, decode)

    monkeypatch.setattr(ddlf.data, "kind_at", lambda location: Plain)
    assert type(ddlf.data.open(location, classes=["a"])) is Plain
    with pytest.raises(ConfigError, match=f"x= has no effect with {location}"):
        ddlf.data.open(location, x="a")


def test_data_info_asks_the_class_of_the_data_set(location, monkeypatch, capsys):
    class Plain(DataSet):
        @classmethod
        def described(cls, location, shuffle, workers):
            return Description([f"plain {location}", f"{shuffle}, {workers}"])

    def info(*words):
        with pytest.raises(SystemExit) as ended:
            main(["data", "info", str(location), *words])
        return ended.value.code, *capsys.readouterr()

    code, lines, _ = info("--workers", "4")
    assert code == 0
    assert "column    x: float32, 3\ncolumn    y: int64, a number\nsamples   20," in lines
    assert "\na worker  of 4, window:files=8: " in lines
    facts = json.loads(info("--json")[1])
    assert (facts["samples"], facts["columns"]["x"]["shape"], facts["worker"]["disk"]) == (20, [3], 0)
    monkeypatch.setattr("ddlf.cli.data.kind_at", lambda location: Plain)
    assert info() == (0, f"plain {location}\nwindow:files=8, 2\n", "")
    code, _, error = info("--json")
    assert code == 2
    assert error.startswith(f"error  there is no JSON about {location}, only text")


class Ten(Generated):
    """A class of data set at a place, with samples of a function."""

    def __init__(self, location, decode=None):
        first = {"x": X, "y": Y}
        super().__init__(
            str(location), "part", first, [20], lambda number: first, in_order=False, inexact="", decode=decode
        )


def test_data_of_a_function_is_decoded(tmp_path):
    data = Ten(tmp_path, lambda sample: {"x": sample["x"][:2]})
    assert np.array_equal(data["x"], X[:, :2])


def test_data_of_a_function_is_described_by_its_manifest(tmp_path):
    lines, _ = Ten.described(tmp_path, SHUFFLE.read("window:8"), 2)
    assert [line for line in lines if line.startswith(("column", "samples"))] == [
        "column    x: float32, 3",
        "column    y: int64, a number",
        "samples   20, 400 B",
    ]
