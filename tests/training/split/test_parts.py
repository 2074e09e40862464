"""Tests that the parts of a model take the steps of one process that adds up the same micro-batches."""

import numpy as np
import pytest

from tests.training.models import blobs, distance
from tests.training.split.together import Parts, build_model, trained_plain

pytestmark = pytest.mark.slow

CHANCE = np.random.default_rng(5)
IMAGES = CHANCE.normal(size=(44, 8, 8, 1)).astype("f4")
DIGITS = np.eye(4, dtype="f4")[CHANCE.integers(0, 4, 44)]


def layered():
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="tanh", kernel_regularizer="l2"),
            layers.Dropout(0.4),
            layers.Dense(12, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(4, activation="softmax", bias_regularizer="l1"),
        ]
    )
    return compiled(model, keras.optimizers.SGD(0.1, momentum=0.9))


def convolutions():
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(10, activation="relu"),
            layers.Dense(4, activation="softmax"),
        ]
    )
    return compiled(model, keras.optimizers.Nadam(0.01))


def skips():
    """Return a model in which a skip crosses two cuts, and several parts use the same layer."""
    import keras

    layers = keras.layers
    x = keras.Input((8,))
    shared = layers.Dense(8, activation="tanh", kernel_regularizer="l2")
    first = shared(x)
    second = layers.Dense(8, activation="relu")(first)
    third = layers.Dropout(0.3)(shared(second))
    added = layers.Add()([third, first])
    model = keras.Model(x, layers.Dense(4, activation="softmax")(shared(added)))
    return compiled(model, keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=0.2))


def attention(dropout=0.0):
    """Return a model with an embedding and a transformer block that is used twice."""
    import keras

    layers = keras.layers
    x = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(11, 8)(x)
    attend, norm, dense = layers.MultiHeadAttention(2, 4, dropout=dropout), layers.LayerNormalization(), layers.Dense(8)
    for _ in range(2):
        hidden = norm(layers.Add()([hidden, dense(attend(hidden, hidden))]))
    pooled = layers.GlobalAveragePooling1D()(hidden)
    return compiled(keras.Model(x, layers.Dense(4, activation="softmax")(pooled)), keras.optimizers.Adam(0.01))


def several():
    """Return a model with two inputs and two outputs. An early part computes one output."""
    import keras

    layers = keras.layers
    first, second = keras.Input((8,), name="one"), keras.Input((3,), name="two")
    hidden = layers.Dense(8, activation="relu")(first)
    early = layers.Dense(1, name="early")(hidden)
    joined = layers.Concatenate()([layers.Dense(6, activation="tanh")(hidden), second])
    late = layers.Dense(4, activation="softmax", name="late")(layers.Dense(8, activation="relu")(joined))
    model = keras.Model({"one": first, "two": second}, {"early": early, "late": late})
    model.compile(
        keras.optimizers.AdamW(0.01, weight_decay=0.01, clipnorm=0.5),
        loss={"early": "mse", "late": "categorical_crossentropy"},
        loss_weights={"early": 0.5, "late": 1.0},
        metrics={"late": ["accuracy"], "early": ["mae"]},
    )
    return model


def compiled(model, optimizer):
    model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"])
    return model


def batches_of(x, y, size, *more):
    return [tuple(a[begin : begin + size] for a in (x, y, *more)) for begin in range(0, len(x), size)]


def trees_of(size):
    x, y = blobs(44)
    two, early = CHANCE.normal(size=(44, 3)).astype("f4"), CHANCE.normal(size=(44, 1)).astype("f4")
    rows = [slice(begin, begin + size) for begin in range(0, 44, size)]
    return [({"one": x[batch], "two": two[batch]}, {"early": early[batch], "late": y[batch]}) for batch in rows]


WORDS = CHANCE.integers(0, 11, (44, 6)).astype("i4")

CASES = {
    "dense, weighted": (layered, batches_of(*blobs(44), 16, CHANCE.uniform(0, 2, 44).astype("f4")), 1e-6),
    "skips": (skips, batches_of(*blobs(44), 16), 1e-6),
    "attention": (attention, batches_of(WORDS, DIGITS, 16), 1e-4),
    "several": (several, trees_of(16), 1e-4),
    "convolutions": (convolutions, batches_of(IMAGES, DIGITS, 16), 1e-4),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_take_the_steps_of_one_process_that_adds_up_the_same_micro_batches(name):
    build, batches, tolerance = CASES[name]
    parts = Parts(build, "stages:3", 16, 5)
    parts.begin_epoch()
    for number, batch in enumerate(batches):
        parts.train(batch, (0, number))
    weights, metrics = trained_plain(build, batches, 5)
    assert distance(parts.weights(), weights) < tolerance
    assert parts.metrics(44) == pytest.approx(metrics, rel=1e-6)
    for model, me in zip(parts.models, parts.plan.parts, strict=True):
        assert {index for index, weight in enumerate(model.weights) if weight._value is not None} == set(me.all_weights)


def test_parts_with_skips_evaluate_as_keras_does():
    build, batches, _ = CASES["skips"]
    parts = Parts(build, "stages:3", 16, 5)
    model, five = build_model(build), [*batches, *batches[:2]]
    x, y = (np.concatenate([batch[column] for batch in five]) for column in (0, 1))
    of_keras = {"loss": 0.0} | model.evaluate(x[:44], y[:44], batch_size=16, verbose=0, return_dict=True)
    assert parts.evaluate(five[:3]) == pytest.approx(of_keras, rel=1e-6)


def test_the_cut_does_not_change_the_dropout_of_a_layer_that_is_used_twice():
    results = []
    for split in ("stages:1", "stages:2"):
        parts = Parts(lambda: attention(dropout=0.3), split, 16, 4)
        for number, batch in enumerate(batches_of(WORDS, DIGITS, 16)):
            parts.train(batch, (0, number))
        results.append(parts.weights())
    assert any(len(part.borrowed) for part in parts.parts)
    assert distance(*results) < 1e-4
