"""Tests of DP-SGD: sums of clipped gradients against a formula in NumPy, the noise, and refused models."""

import numpy as np
import pytest

from ddlf.errors import ConfigError
from ddlf.training.slot import sample_noise
from ddlf.training.slot.sample_noise import CHUNK, NoisedSteps
from tests.later import Later

keras = Later("keras")
CLIP, RATE, EXPECTED = 1.5, 0.5, 30.0


def model_of(*layers, loss="sparse_categorical_crossentropy"):
    model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3, activation="softmax")])
    model.compile(keras.optimizers.SGD(RATE), loss)
    return model


def samples_of(count):
    generator = np.random.default_rng(1)
    return generator.normal(size=(count, 5)).astype(np.float32), np.arange(count) % 3


def sums_by_hand(kernel, bias, x, y):
    """Gradients of softmax regression, clipped sample by sample: (p - onehot) x^T and p - onehot."""
    scores = x.astype(float) @ kernel + bias
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    wrong = p - np.eye(3)[y]
    of_kernel, of_bias = x[:, :, None] * wrong[:, None, :], wrong
    norm = np.sqrt(np.square(of_kernel).sum((1, 2)) + np.square(of_bias).sum(1))
    factor = np.minimum(1, CLIP / norm)
    assert 0 < np.sum(factor < 1) < len(x)
    return np.einsum("i,ijk", factor, of_kernel), factor @ of_bias


def test_step_equals_the_formula_in_numpy(monkeypatch):
    monkeypatch.setattr(sample_noise, "gaussian_like", lambda like, std: np.zeros(like.shape))
    model, (x, y) = model_of(), samples_of(CHUNK + 8)  # the second chunk is padded
    before = [np.array(weight, float) for weight in model.trainable_variables]
    NoisedSteps(model, CLIP, 1.0).step(x, y, EXPECTED)
    for variable, old, total in zip(model.trainable_variables, before, sums_by_hand(*before, x, y), strict=True):
        np.testing.assert_allclose(np.array(variable), old - RATE * total / EXPECTED, atol=1e-6)


@pytest.mark.slow
def test_recurrent_layers_without_dropout_equal_steps_of_single_samples(monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr(sample_noise, "gaussian_like", lambda like, std: np.zeros(like.shape))
    recurrent = [keras.layers.Reshape((5, 1)), keras.layers.SimpleRNN(4)]  # its loop compiles fastest
    model, (x, y), clip = model_of(*recurrent), samples_of(6), 0.2
    before, total = model.get_weights(), 0.0
    for row, label in zip(x[:, None], y[:, None], strict=True):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=row, y=label, y_pred=model(row, training=True))
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        flat = np.concatenate([gradient.numpy().ravel() for gradient in gradients])
        total = total + flat * min(1.0, clip / np.linalg.norm(flat))
    NoisedSteps(model, clip, 1.0).step(x, y, EXPECTED)
    moved = [old - new for old, new in zip(before, model.get_weights(), strict=True)]
    np.testing.assert_allclose(np.concatenate([array.ravel() for array in moved]), RATE * total / EXPECTED, atol=1e-6)


def test_empty_batch_makes_a_step_of_noise_alone():
    model, (x, y) = model_of(), samples_of(4)
    before = np.concatenate([np.array(variable).ravel() for variable in model.trainable_variables])
    noisy, steps = NoisedSteps(model, CLIP, 2.0), []
    for _ in range(60):
        noisy.step(x[:0], y[:0], EXPECTED)
        after = np.concatenate([np.array(variable).ravel() for variable in model.trainable_variables])
        steps.append((after - before) * EXPECTED / RATE)
        before = after
    assert np.std(steps) == pytest.approx(2.0 * CLIP, rel=0.1)  # 5 standard errors of 1,080 values


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ("BatchNormalization", "it keeps statistics over a batch, which get no noise"),
        ("Dropout", "its random numbers cannot be drawn sample by sample"),
        ("LSTMCell", "its random numbers cannot be drawn sample by sample"),
    ],
)
def test_layers_that_contradict_are_refused_by_name(layer, reason):
    layers = {
        "BatchNormalization": lambda: [keras.layers.BatchNormalization()],
        "Dropout": lambda: [keras.layers.Dropout(0.5)],
        "LSTMCell": lambda: [keras.layers.Reshape((5, 1)), keras.layers.LSTM(2, dropout=0.5)],
    }
    with pytest.raises(ConfigError, match=rf"\({layer}\): {reason}"):
        NoisedSteps(model_of(*layers[layer]()), CLIP, 1.0)


def test_weights_of_another_type_and_frozen_models_are_refused():
    model = model_of(keras.layers.Dense(3, dtype="float64", name="wide"))
    with pytest.raises(ConfigError, match=r"gradients of float32 weights, and '.*wide/kernel' is float64"):
        NoisedSteps(model, CLIP, 1.0)
    model = model_of()
    model.trainable = False
    with pytest.raises(ConfigError, match="needs a model with trainable weights"):
        NoisedSteps(model, CLIP, 1.0)


def test_other_backends_are_refused(monkeypatch):
    monkeypatch.setattr(sample_noise, "backend", lambda: "torch")
    with pytest.raises(ConfigError, match="does not work with Keras on torch"):
        NoisedSteps(model_of(), CLIP, 1.0)
