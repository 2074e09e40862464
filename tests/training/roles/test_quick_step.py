"""Tests of the faster training step of one batch: it has the bits of Keras's own step."""

import numpy as np
import pytest

from ddlf.training.slot.feed import make_feed
from ddlf.training.slot.keras_model import SMALL, quick_step

pytestmark = pytest.mark.slow  # each model is compiled twice

X, Y = np.random.default_rng(0).normal(size=(70, 6, 4)).astype("f4"), np.eye(3, dtype="f4")[np.arange(70) % 3]


def model_of(kind, units=5):
    import keras
    from keras import layers

    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    hidden = {
        "dense": [layers.Flatten(), layers.Dense(units, activation="relu"), layers.BatchNormalization()],
        "lstm": [layers.LSTM(units)],
    }[kind]
    model = keras.Sequential([keras.Input((6, 4)), *hidden, layers.Dropout(0.3), layers.Dense(3, activation="softmax")])
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.parametrize("kind", ["dense", "lstm"])
def test_quick_step_has_the_bits_and_metrics_of_keras(kind):
    """The bits of an LSTM's loop depend on threads, so its step uses threads like in Keras."""
    results = []
    for quick in (False, True):
        model, feed = model_of(kind), make_feed((X, Y), 16)
        if quick:
            model.train_function = quick_step(model)
            assert model.train_function is not None
        histories = []
        for order in (np.arange(70), np.arange(70)[::-1], np.arange(20)):  # the last batches are shorter
            feed.set_order(order)
            histories.append(model.fit(feed.dataset, verbose=0, shuffle=False).history)
        results.append(([array.tobytes() for array in model.get_weights()], histories))
    assert results[1] == results[0]


def test_a_large_model_or_one_with_its_own_step_keeps_the_step_of_keras():
    import keras

    class Own(keras.Model):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    inputs = keras.Input((4,))
    custom = Own(inputs, keras.layers.Dense(1)(inputs))
    custom.compile("sgd", "mse")
    eager = model_of("dense")
    eager.run_eagerly = True
    several = model_of("dense")
    several.steps_per_execution = 4
    assert [quick_step(model) for model in (custom, eager, several, model_of("dense", SMALL // 24))] == [None] * 4
