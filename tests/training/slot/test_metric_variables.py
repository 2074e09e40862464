"""Tests that the variables of losses and metrics exist before the first step, so that TensorFlow compiles the step once."""

from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.training.slot.metric_variables import make_metric_variables

X, Y = np.random.default_rng(0).normal(size=(32, 4)).astype("f4"), np.eye(3, dtype="f4")[np.arange(32) % 3]


def model_of(kind, **compiled):
    import keras
    from keras import layers

    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    softmax = layers.Dense(3, activation="softmax", name="one")
    outputs = {
        "sequential": None,
        "functional": softmax(inputs),
        "two outputs": {"one": softmax(inputs), "other": layers.Dense(1, name="other")(inputs)},
    }[kind]
    model = keras.Sequential([inputs, softmax]) if outputs is None else keras.Model(inputs, outputs)
    model.compile(**{"optimizer": "sgd", "loss": "categorical_crossentropy", "metrics": ["accuracy"]} | compiled)
    return model


@pytest.fixture
def steps(monkeypatch):
    """The counts of steps that TensorFlow has compiled for training and for evaluation."""
    import keras

    counts = {"train_step": 0, "test_step": 0}
    for name in counts:
        step = getattr(keras.Model, name)

        def counted(self, *arguments, name=name, step=step):
            counts[name] += 1
            return step(self, *arguments)

        monkeypatch.setattr(keras.Model, name, counted)
    return counts


TWO = {"loss": {"one": "categorical_crossentropy", "other": "mse"}, "metrics": {"one": ["accuracy"], "other": ["mae"]}}
KINDS = [
    ("sequential", {}, (X, Y)),
    ("functional", {"weighted_metrics": ["auc"]}, (X, Y, np.ones(32, "f4"))),
    ("two outputs", TWO, (X, {"one": Y, "other": Y[:, :1]})),
]


@pytest.mark.parametrize(
    ("kind", "compiled", "data"),
    [pytest.param(*kind, id=kind[0], marks=[pytest.mark.slow] * (kind is not KINDS[0])) for kind in KINDS],
)
def test_first_step_is_compiled_once_and_has_the_same_bits(kind, compiled, data, steps):
    import tensorflow as tf

    results, weights, names = [], [], []
    for early in (False, True):
        model, dataset = model_of(kind, **compiled), tf.data.Dataset.from_tensor_slices(data).batch(16)
        for name in steps:
            steps[name] = 0
        if early:
            make_metric_variables(model, dataset.element_spec)
        results.append([model.fit(dataset, verbose=0, shuffle=False).history, model.evaluate(dataset, verbose=0)])
        weights.append([array.tobytes() for array in model.get_weights()])
        names.append([(metric.name, [variable.path for variable in metric.variables]) for metric in model.metrics])
    assert steps == {"train_step": 1, "test_step": 1}
    assert results[1] == results[0]
    assert weights[1] == weights[0]
    assert names[1] == names[0]


def test_models_with_an_own_step_or_wrong_labels_get_no_early_variables():
    import keras

    class Own(keras.Model):
        def train_step(self, data):
            return {}

    inputs = keras.Input((4,))
    custom = Own(inputs, keras.layers.Dense(3)(inputs))
    custom.compile("sgd", "mse", metrics=["accuracy"])
    make_metric_variables(custom, (X, Y))
    assert not custom._compile_metrics.built
    usual = model_of("sequential")
    make_metric_variables(usual, (X, SimpleNamespace(shape=None, dtype="float32")))
    assert not usual._compile_metrics.built


def test_an_error_of_a_loss_is_raised_by_the_step():
    def loss(y, predicted):
        raise KeyError("mine")

    model = model_of("sequential", loss=loss, metrics=[])
    make_metric_variables(model, (X, Y))
    with pytest.raises(KeyError, match="mine"):
        model.fit(X, Y, verbose=0)
