"""Tests of class names: two peers with different halves of the labels give each label the same number."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from ddlf.errors import ConfigError, DatasetError
from ddlf.events.facts import from_data, to_data
from ddlf.peers.classes import classes_of, numbered
from ddlf.peers.plan import LONGEST_CLASS, Plan

MODEL = "a:input shape=[4];\na:output shape=[3];\na:layers Dense(units=3, activation=softmax);\na:loss SCE;\n"


def test_two_peers_number_the_same_label_alike():
    classes = ("bird", "cat", "dog")
    first = numbered({"y": np.array(["cat", "dog", "cat"])}, classes, "a.npz")["y"]
    second = numbered({"y_train": np.array(["bird", "dog"]), "y_test": np.array([["cat"]])}, classes, "b.npz")
    assert first.tolist() == [1, 2, 1]
    assert (second["y_train"].tolist(), second["y_test"].tolist()) == ([0, 2], [[1]])


def test_numeric_labels_are_not_changed():
    arrays = {"x": np.zeros((2, 3)), "y": np.array([1, 0])}
    assert numbered(arrays, (), "a.npz") == arrays
    assert classes_of(arrays) == ()


def test_texts_without_agreed_classes_and_unknown_labels_are_refused_by_name():
    with pytest.raises(DatasetError, match=r"a\.npz has texts as labels in y.*--classes cat,dog"):
        numbered({"y": np.array(["cat"])}, (), "a.npz")
    with pytest.raises(
        DatasetError, match=r"the label 'cta' in y, and this model has no such class.*did you mean 'cat'"
    ):
        numbered({"y": np.array(["cat", "cta"])}, ("cat", "dog"), "a.npz")
    with pytest.raises(DatasetError, match="the classes are cat, dog"):
        numbered({"y": np.array(["zebra"])}, ("cat", "dog"), "a.npz")


@pytest.mark.parametrize(
    ("classes", "reason"),
    [
        (("cat",), "1 class, and"),
        (("cat", "cat"), "two classes have the name 'cat'"),
        (("cat", " "), "name of class 1"),
        (("cat", "d" * (LONGEST_CLASS + 1)), "name of class 1"),
    ],
)
def test_a_plan_refuses_bad_names(classes, reason):
    with pytest.raises(ConfigError, match=reason):
        Plan(classes=classes)


def test_classes_travel_in_the_plan():
    plan = Plan(classes=("cat", "dog"))
    assert from_data(Plan, to_data(plan)) == plan


def test_a_server_takes_classes_from_its_test_data_and_refuses_another_number_of_them(tmp_path):
    importlib.import_module("keras")
    from ddlf.peers.serving import read_model

    text, data = tmp_path / "a.nnm", tmp_path / "test.npz"
    text.write_text(MODEL)
    np.savez(data, x=np.zeros((6, 4), np.float32), y=np.array(["dog", "cat", "bird"] * 2))
    assert read_model(text, str(data), Path, 0).classes == ("bird", "cat", "dog")
    assert read_model(text, None, Path, 0, ("x", "y", "z")).classes == ("x", "y", "z")
    with pytest.raises(ConfigError, match="2 names of classes, and the model has 3 outputs"):
        read_model(text, None, Path, 0, ("x", "y"))
