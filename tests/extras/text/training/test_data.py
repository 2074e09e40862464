"""Tests of fitting arrays of a file to a text. An error names the array, the line of the text, and the expected form."""

import numpy as np
import pytest

from ddlf.data.datasets import with_classes
from ddlf.errors import ConfigError, DatasetError
from ddlf.extras.text.language.model import read
from ddlf.extras.text.training.data import DataSource, dataset
from tests.extras.text.language.texts import DIGITS, HEADS, LM, text_of

X = np.arange(640, dtype="float32").reshape(10, 64)
Y = np.arange(10)
ODD = np.arange(10) % 5 != 0
TWO = """left:input shape=[3]; left:layers Dense(units=4);
right:input shape=[2]; right:output shape=[1]; right:name sum; right:layers Dense(units=4), residual(to=left), Dense(units=1);
"""
COPY = text_of("dense(shape=[8], activation=relu)")


def fitted(text=DIGITS, held_out=0.0, **arrays):
    return dataset(arrays, "folder/some.npz", read(text), "", held_out)


def test_arrays_without_parts_are_divided():
    arrays, notes = fitted(x=X, y=Y)
    assert {name: array.tolist() for name, array in arrays.items()} == {
        **dict(x_train=X[ODD].tolist(), y_train=Y[ODD].tolist()),
        **dict(x_test=X[~ODD].tolist(), y_test=Y[~ODD].tolist()),
    }
    assert notes == ["every fifth sample is for the test"]


def test_arrays_with_parts_stay_as_they_are():
    arrays, notes = fitted(x_train=X, y_train=Y, w_train=Y / 9, x_val=X[:3], y_val=Y[:3], x_test=X[:2], y_test=Y[:2])
    assert {name: len(array) for name, array in arrays.items()} == {
        **dict(x_train=10, y_train=10, w_train=10, x_val=3, y_val=3, x_test=2, y_test=2)
    }
    assert notes == []


@pytest.mark.parametrize("shape", [(10, 8, 8), (10, 8, 8, 1), (10, 64, 1), (10, 1, 64)])
def test_flat_input_takes_images(shape):
    assert fitted(x_train=X.reshape(shape), y_train=Y)[0]["x_train"].tolist() == X.tolist()


def test_image_input_takes_flat_rows_and_missing_channels():
    text = DIGITS.replace("shape=[64]", "shape=[8, 8, 1]").replace("layers dense(", "layers Flatten(), dense(")
    for shape in ((10, 8, 8), (10, 64)):
        assert fitted(text, x_train=X.reshape(shape), y_train=Y)[0]["x_train"].shape == (10, 8, 8, 1)


def test_labels_get_the_form_of_the_loss():
    rows = np.eye(10, dtype="float32")[Y]
    cce = DIGITS.replace("SCE", "CCE")
    none = DIGITS.replace("digits:loss SCE;", "")
    for text, labels, expected in (
        (DIGITS, rows, Y),
        (DIGITS, Y[:, None], Y),
        (cce, Y, rows),
        (cce, rows, rows),
        (none, Y, Y),
        (none, rows, rows),
    ):
        assert fitted(text, x_train=X, y_train=labels)[0]["y_train"].tolist() == expected.tolist()


def test_text_labels_get_equal_numbers_in_all_parts():
    names = np.array(["dog", "ant", "cat", "dog"])
    arrays, notes = fitted(x_train=X[:4], y_train=names, x_test=X[:1], y_test=np.array(["emu"]))
    assert arrays["y_train"].tolist() == [2, 0, 1, 2]
    assert arrays["y_test"].tolist() == [3]
    assert "0 ant, 1 cat, 2 dog, 3 emu" in notes[0]


def test_several_inputs_and_outputs_match_blocks_by_name():
    left, right, out = np.ones((10, 3)), np.ones((10, 2)), np.ones(10)
    arrays, _ = fitted(
        TWO, left_train=left, right_train=right, sum_train=out, left_test=left, right_test=right, sum_test=out
    )
    assert {name: array.shape for name, array in arrays["x_train"].items()} == {"left": (10, 3), "right": (10, 2)}
    assert arrays["y_train"].shape == (10, 1)
    heads, _ = fitted(HEADS, x=X, digit=Y, parity=Y % 2)
    assert {name: array.shape for name, array in heads["y_train"].items()} == {"digit": (8,), "parity": (8, 1)}


def test_output_with_the_name_of_an_input_has_labels_in_y():
    left, right, out = np.ones((10, 3)), np.ones((10, 2)), np.ones((10, 1))
    text = TWO.replace(" right:name sum;", "")
    arrays, _ = fitted(text, left_train=left, right_train=right, y_train=out)
    assert arrays["x_train"]["right"].tolist() == right.tolist()
    assert arrays["y_train"].tolist() == out.tolist()
    with pytest.raises(DatasetError, match="'right' is the name of an input and of an output"):
        fitted(text + "more:from left; more:output shape=[4];", left_train=left, right_train=right, y_train=out)


def test_table_has_labels_in_its_last_column_or_in_target():
    table = np.concatenate([X, Y[:, None]], axis=1)
    arrays, notes = fitted(data=table)
    assert arrays["y_train"].tolist() == Y[ODD].tolist()
    assert arrays["x_test"].tolist() == X[~ODD].tolist()
    assert "the last column of data is the labels" in notes
    beside, _ = fitted(data=X, target=Y)
    assert beside["y_train"].tolist() == Y[ODD].tolist()


def test_autoencoder_uses_inputs_as_labels():
    arrays, notes = fitted(COPY, x=X[:, :8])
    assert arrays["y_train"].tolist() == arrays["x_train"].tolist()
    assert any("inputs are the labels" in note for note in notes)


def test_validation_holds_out_training_samples():
    arrays, notes = fitted(held_out=0.25, x_train=X, y_train=Y)
    assert arrays["y_val"].tolist() == [0, 4, 8]
    assert sorted([*arrays["y_val"], *arrays["y_train"]]) == list(range(10))
    assert notes == ["1 of 4 samples of training is for validation"]


def test_unused_arrays_are_reported():
    assert fitted(x_train=X, y_train=Y, names=Y)[1] == ["nothing reads names of some.npz"]


COLOURS = DIGITS.replace("[64]", "[8, 8, 3]").replace("layers dense(", "layers Flatten(), dense(")
BAD = [
    (DIGITS, dict(x_train=X[:, :60], y_train=Y), "x_train with samples of shape [60], and model.nnm:1 wants digits: [64]"),
    (COLOURS, dict(x_train=np.ones((10, 3, 8, 8)), y_train=Y), "moveaxis"),
    (DIGITS, dict(x_train=X, y_train=Y + 1), "labels from 1 to 10 in y_train, and model.nnm:1 has 10 classes for digits: whole numbers from 0 to 9"),
    (DIGITS, dict(x_train=X, y_train=Y + 1), "labels that begin with 1 lack a '- 1'"),
    (DIGITS, dict(x_train=X, y_train=Y + 0.5), "whole numbers from 0 to 9"),
    (DIGITS, dict(x_train=X, y_train=np.ones((10, 7))), "labels of shape [7], and model.nnm:1 wants digits: [10], or class numbers of shape []"),
    (DIGITS, dict(x_train=X, y_train=np.ones((10, 10))), "rows in y_train that are not classes"),
    (DIGITS, dict(x_train=X, y_train=Y[:9]), "another number of samples in each array: x_train 10, y_train 9"),
    (DIGITS, dict(x_train=X), "has no y_train"),
    (DIGITS, dict(y_train=Y, y_test=Y), "has no x or x_train; it has y_test, y_train"),
    (DIGITS, dict(X_train=X, y_train=Y), "has no x or x_train, did you mean x_train by 'X_train'?; it has X_train, y_train"),
    (DIGITS, dict(a=X, b=Y), "has no x or x_train; it has a, b"),
    (DIGITS, dict(x=X, y=Y, x_train=X, y_train=Y), "x and x_train"),
    (DIGITS, dict(x_train=X.astype("complex64"), y_train=Y), "x_train of type complex64"),
    (DIGITS, dict(x_train=np.float32(3), y_train=Y), "x_train as a single number"),
    (DIGITS, dict(x_train=X[:0], y_train=Y[:0]), "no samples in x_train"),
    (DIGITS, dict(data=X[:, :60]), "a table data of 60 columns, and model.nnm:1 wants 64"),
    (TWO, dict(left=np.ones((4, 3)), sum=np.ones(4)), "has no right, beside left"),
    (LM, dict(x=np.ones((4, 96)) / 2, y=np.ones((4, 96))), "values such as 0.5, and model.nnm:1 wants whole numbers (int32)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "arrays", "sentence"), BAD, ids=range(len(BAD)))
def test_unfit_array_is_refused_with_a_sentence(text, arrays, sentence):
    with pytest.raises(DatasetError) as error:
        fitted(text, **arrays)
    assert sentence in str(error.value)
    assert str(error.value).startswith("some.npz ")


def test_validation_is_refused_beside_validation_data():
    with pytest.raises(DatasetError, match="has x_val"):
        fitted(held_out=0.1, x_train=X, y_train=Y, x_val=X, y_val=Y)


# -- sources of data ----------------------------------------------------------------------------------------------------


def test_built_in_data_sets_have_class_numbers():
    (x_train, y_train), (x_test, y_test) = with_classes("iris")
    assert x_train.shape == (120, 4)
    assert np.bincount(y_train).tolist() == [40, 40, 40]
    assert np.bincount(y_test).tolist() == [10, 10, 10]
    assert x_test[0].tolist() == pytest.approx([5.1, 3.5, 1.4, 0.2])
    arrays = DataSource("digits").arrays()
    assert arrays["y_train"].dtype == "int32"
    assert {name: len(array) for name, array in arrays.items()} == {
        **dict(x_train=1437, y_train=1437, x_test=360, y_test=360)
    }


@pytest.mark.slow  # because of the import of scikit-learn
def test_iris_equals_scikit_learn():
    from sklearn.datasets import load_iris

    bunch = load_iris()
    (x_train, y_train), (x_test, y_test) = with_classes("iris")
    test = np.arange(150) % 5 == 0
    np.testing.assert_array_equal(x_train, bunch.data[~test].astype("float32"))
    np.testing.assert_array_equal(x_test, bunch.data[test].astype("float32"))
    assert y_train.tolist() == bunch.target[~test].tolist()
    assert y_test.tolist() == bunch.target[test].tolist()


def test_data_source_carries_the_content_of_a_file(tmp_path):
    np.savez(tmp_path / "some.npz", x=X, y=Y)
    source = DataSource(str(tmp_path / "some.npz"))
    received = DataSource.__new__(DataSource)
    vars(received).update(source.__getstate__())
    (tmp_path / "some.npz").unlink()
    assert received.arrays()["y"].tolist() == Y.tolist()


def test_large_file_must_be_equal_on_each_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("ddlf.extras.text.training.data.MAX_SHIPPED_BYTES", 10)
    np.savez(tmp_path / "some.npz", x=X, y=Y)
    received = DataSource.__new__(DataSource)
    vars(received).update(DataSource(str(tmp_path / "some.npz")).__getstate__())
    assert received.content is None
    assert received.arrays()["y"].tolist() == Y.tolist()
    np.savez(tmp_path / "some.npz", x=X, y=Y + 1)
    with pytest.raises(DatasetError, match="another file here than on the master"):
        received.arrays()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("digit", "did you mean 'digits'?"), ("data/some.npy", "is neither a file nor a data set"), (".", "is a folder"), ("some.csv", "ends in .npz")],
)  # fmt: skip
def test_data_source_refuses_other_names(name, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.csv").write_text("1,2")
    with pytest.raises(ConfigError, match=f"--data {name}") as error:
        DataSource(name)
    assert sentence in str(error.value)


def test_data_source_refuses_broken_files_and_objects(tmp_path):
    (tmp_path / "some.npz").write_bytes(b"x,y\n1,2\n")
    with pytest.raises(DatasetError, match=r"cannot be read \(it is no .npz file, or it is cut off\)"):
        DataSource(str(tmp_path / "some.npz")).arrays()
    np.savez(tmp_path / "some.npz", x=np.array([{}, {}], object))
    with pytest.raises(DatasetError, match="turn objects into"):
        DataSource(str(tmp_path / "some.npz")).arrays()
