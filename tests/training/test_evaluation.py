"""Tests of the test data that the master accepts for its own model."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.errors import AppError
from ddlf.training.evaluation.master import check_test_data, evaluated
from ddlf.training.evaluation.metrics import scalars
from ddlf.training.samples.policy import CommonData


def with_data(shape=(8,), **data):
    """Return an app with one input of this shape and this data. It records its events."""
    data = {"x_train": np.zeros((30, 8)), "y_train": np.zeros(30), **data}
    received = []
    model = SimpleNamespace(inputs=[SimpleNamespace(shape=(None, *shape))])
    context = SimpleNamespace(emit=received.append, data=CommonData())
    return SimpleNamespace(evaluate_every=0, run_context=context, events=received, model=model, **data)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (dict(x_test=np.zeros((9, 8))), "there is no y_test"),
        (dict(x_test=np.zeros((9, 8)), y_test=np.zeros(8)), "x_test has 9 rows and y_test has 8 rows"),
        (dict(x_test=np.zeros((0, 8)), y_test=np.zeros(0)), "x_test has no rows"),
        (dict(x_test=np.zeros((9, 7)), y_test=np.zeros(9)), r"samples of x_test are of shape \(7,\), .* is of \(8,\)"),
        (dict(x_test=[np.zeros((9, 8))] * 2, y_test=np.zeros(9)), "x_test is of 2 arrays, x_train of 1"),
        (dict(x_test={"a": np.zeros((9, 8)), "b": np.zeros((8, 8))}, y_test=np.zeros(9)), "x_test has 8 or 9 rows"),
    ],
)
def test_unusable_test_data_is_warned_of_or_refused(data, sentence):
    app = with_data(**data)
    check_test_data(app)
    assert len(app.events) == 1
    assert app.events[0].why.endswith("it cannot be evaluated")
    app.evaluate_every = 2
    with pytest.raises(AppError, match=f"evaluate_every=2, but {sentence}"):
        check_test_data(app)


@pytest.mark.parametrize(
    "data",
    [
        dict(x_test=np.zeros((9, 8)), y_test=np.zeros(9)),
        dict(x_test=np.zeros((9, 64, 3)), y_test=np.zeros(9), shape=(None, 3)),  # images of any size
        dict(x_test=np.zeros((9, 8, 1)), y_test=np.zeros((9, 1))),  # Keras accepts one dimension more or less
        dict(x_test=np.zeros((9, 8)), y_train=None),  # a model without labels
    ],
)
def test_usable_test_data_causes_no_warning(data):
    app = with_data(**data)
    app.evaluate_every = 1
    check_test_data(app)
    assert not app.events


def test_missing_test_data_is_refused_only_for_an_evaluation():
    app = with_data()
    check_test_data(app)
    assert not app.events
    app.evaluate_every = 1
    with pytest.raises(AppError, match="there is no x_test"):
        check_test_data(app)


async def test_test_data_the_model_refuses_is_named_after_training(monkeypatch):
    async def refused(*args):
        raise ValueError("expected axis -1 of input shape to have value 8")

    monkeypatch.setattr("ddlf.training.evaluation.master.measured", refused)
    with pytest.raises(AppError, match=r"samples of x_test are of shape \(7,\), .*: it cannot be evaluated"):
        await evaluated(with_data(x_test=np.zeros((9, 7)), y_test=np.zeros(9)))
    with pytest.raises(ValueError, match="expected axis"):  # another error is raised unchanged
        await evaluated(with_data(x_test=np.zeros((9, 8)), y_test=np.zeros(9)))


def test_metrics_on_a_card_are_read_by_keras(monkeypatch):
    class OnCard:
        def __array__(self, *arguments, **more):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    ops = SimpleNamespace(is_tensor=lambda value: isinstance(value, OnCard), convert_to_numpy=lambda tensor: 0.5)
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(ops=ops))
    assert scalars({"loss": OnCard(), "accuracy": 1}) == {"loss": 0.5, "accuracy": 1.0}
