"""A data set at a place, as an app uses it."""

import numpy as np
import pytest

import ddlf.data
from ddlf.data.parts import check_data
from ddlf.data.place import Folder
from ddlf.data.remote_folder import open_place
from ddlf.data.sources import open_source
from ddlf.data.split import split
from ddlf.errors import DatasetError

X, Y = np.arange(60, dtype=np.float32).reshape(20, 3), np.arange(20)


@pytest.fixture(params=[[20], [7, 7, 6]], ids=["one file", "three files"])
def place(request, tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    split(open_source(tmp_path / "a.npz"), Folder(tmp_path / "place"), request.param, shuffle=False)
    return tmp_path / "place"


def test_columns_are_usable_as_training_arrays(place):
    class App:
        x_train, y_train = ddlf.data.open(place)["x"], ddlf.data.open(place)["y"]

    check_data(App())
    assert np.array_equal(App.x_train, X)
    assert np.array_equal(App.y_train, Y)
    assert list(ddlf.data.open(place)) == ["x", "y"]
    with pytest.raises(ValueError, match="read-only"):
        App.x_train[0] = 1


def test_damaged_file_and_missing_column_are_named(place):
    with pytest.raises(DatasetError, match="has no column 'z'; it has x, y"):
        ddlf.data.open(place)["z"]
    path = place / "v0001" / "00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"00000\.safetensors is damaged"):
        ddlf.data.open(place)["x"]


@pytest.mark.parametrize("way", ["load", "mapped"])
def test_file_is_checked_before_its_samples_are_used(place, way):
    reading = open_place(place)
    found = reading.manifest()
    read = getattr(reading, way)
    parts = [read(file, found.columns) for file in found.files]
    assert np.array_equal(np.concatenate([part["x"] for part in parts]), X)
    assert np.array_equal(np.concatenate([part["y"] for part in parts]), Y)
    with pytest.raises(ValueError, match="read-only"):
        parts[0]["x"][0] = 1
    path = place / found.files[-1].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)  # in the middle of a run
    with pytest.raises(DatasetError, match=r"\.safetensors is damaged"):
        read(found.files[-1], found.columns)


def test_failing_decode_names_sample_and_file(place, caplog):
    def decode(sample):
        if sample["y"] in (0, 9):
            raise ValueError("torn")
        return {"x": sample["x"][:2], "y": sample["y"]}

    data = ddlf.data.open(place, decode=decode)
    assert data.columns["x"].shape == (2,)  # as the first sample that can be used
    said = [data.damaged(number) for number in range(len(data.manifest.files)) for _ in range(2)][::2]
    assert ["decode cannot use sample 0 (row 0 of" in said[0], "ValueError: torn" in said[0]] == [True, True]
    assert [why.partition(" (")[0] for why in said[1:]] == ["decode cannot use sample 9", ""][: len(said) - 1]
    assert [record.message for record in caplog.records] == [f"{why}: its file is left out" for why in said if why]

    def none(sample):
        raise ValueError("torn")

    with pytest.raises(DatasetError, match="decode cannot use sample 0 "):
        list(ddlf.data.open(place, decode=none))
