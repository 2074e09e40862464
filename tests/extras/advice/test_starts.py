"""Tests of the checks of first weights."""

from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.extras.advice import starts
from tests.training.models import blobs, with_model


def of_relu(app):
    import keras

    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu", name="units"), keras.layers.Dense(4, "softmax")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy")
    return model


@pytest.fixture
async def an_app():
    app = with_model(of_relu)()
    await app.create_model()
    app.x_train, app.y_train = blobs(64)
    return app


async def test_one_compiled_step_checks_several_starts(an_app, monkeypatch):
    compiled = []
    real = starts.Gradients
    monkeypatch.setattr(starts, "Gradients", lambda model: compiled.append(model) or real(model))
    alive = an_app.model.get_weights()
    dead = [alive[0], np.full_like(alive[1], -1000.0), *alive[2:]]
    check = starts.StartCheck(an_app)
    problems = [check(weights) for weights in (alive, dead, alive)]
    assert problems == ["", "100% of 'units' is 0 for all samples of a batch", ""]
    assert len(compiled) == 1


async def test_a_model_that_cannot_be_called_is_not_broken(an_app):
    why_broken = starts.StartCheck(an_app)
    assert why_broken([np.zeros(3)]) == ""


def test_samples_in_files_are_not_checked(monkeypatch):
    monkeypatch.setattr(starts, "rows_of", lambda app: None)
    assert starts.StartCheck(SimpleNamespace(model=None))([]) == ""
