"""Tests of finding the origin of a NaN by repeating the steps: an output, a loss, or a gradient."""

import numpy as np
import pytest

import ddlf


class App(ddlf.IApp):
    """An app with a given model."""

    batch_size = 8

    def load_dataset(self):
        """Load no data."""


def app_with(*between, rate=0.1, loss="mse"):
    import keras

    app = App()
    random = np.random.default_rng(0)
    app.x_train = random.normal(size=(40, 3)).astype("float32")
    app.y_train = app.x_train[:, :1] + 3
    app.model = keras.Sequential([keras.Input((3,)), *between, keras.layers.Dense(1, name="end")])
    app.model.compile(keras.optimizers.SGD(rate), loss)
    return app


def in_an_output():
    from keras import layers, ops

    return app_with(layers.Lambda(ops.log, name="logs"))


def by_large_steps():
    from keras import layers

    return app_with(layers.Dense(8, name="wide"), rate=1e30)


def in_a_loss():
    from keras import ops

    return app_with(loss=lambda y, p: ops.log(-ops.abs(p) - 1))


def in_a_gradient():
    from keras import layers, ops

    flat = layers.Dense(4, kernel_initializer="zeros", name="flat")
    return app_with(flat, layers.Lambda(ops.abs), layers.Lambda(ops.sqrt))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (in_an_output, "the first output that is not finite is that of 'logs', in step 1"),
        (by_large_steps, "the first output that is not finite is that of"),
        (in_a_loss, "all outputs are finite, but their loss is not"),
        (in_a_gradient, "outputs and loss are finite, but the gradient of 'flat/"),
    ],
)
def test_a_nan_is_reported_with_its_origin_and_weights_are_kept(make, sentence):
    from ddlf.extras.advice.batch import not_finite_advice

    app = make()
    before = [array.tobytes() for array in app.model.get_weights()]
    advised = not_finite_advice(app)
    assert (advised.rule, advised.severity) == ("R01", "E")
    assert sentence in advised.what
    assert [array.tobytes() for array in app.model.get_weights()] == before
    assert "test_not_finite.py:" in advised.place


def test_a_nan_that_does_not_reappear_is_not_reported():
    from ddlf.extras.advice.batch import not_finite_advice

    assert not_finite_advice(app_with(rate=0.001)) is None
    assert not_finite_advice(App()) is None
