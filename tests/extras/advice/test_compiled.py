"""Tests that compare the facts about a compiled model with Keras itself."""

from types import SimpleNamespace

import pytest

from ddlf.extras.advice.network import heads_of, layers_of, optimizer_of
from ddlf.training.callbacks.checks import warnings_of_master


def compiled(loss="binary_crossentropy", optimizer="adam", metrics=()):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "sigmoid")])
    model.compile(optimizer, loss, metrics=list(metrics))
    return model


@pytest.mark.parametrize("kind", ["ExponentialDecay", "InverseTimeDecay"])
def test_a_schedule_fades_where_its_rate_in_keras_falls_below_a_hundredth(kind):
    import keras

    schedule = getattr(keras.optimizers.schedules, kind)(0.1, 100, 0.9)
    fades = optimizer_of(compiled(optimizer=keras.optimizers.SGD(schedule))).fades
    assert float(schedule(fades + 1)) < 0.001 < float(schedule(fades - 1))


def test_schedules_that_end_or_grow_do_not_fade():
    import keras

    schedules = keras.optimizers.schedules
    for schedule in (schedules.CosineDecay(0.1, 100), schedules.ExponentialDecay(0.1, 100, 1.1), 0.1):
        assert optimizer_of(compiled(optimizer=keras.optimizers.SGD(schedule))).fades is None


def test_metrics_with_a_threshold_report_it():
    import keras

    of = keras.metrics
    metrics = [
        of.BinaryAccuracy(threshold=0.0),
        of.Precision([0.2, 0.9]),
        of.Recall(),
        of.Precision(top_k=1),
        of.F1Score(),
        of.AUC(),
    ]
    model = compiled(metrics=["accuracy", *metrics, "mae"])
    (head,) = heads_of(model, layers_of(model), None)
    assert head.cuts == (
        ("accuracy", 0.5),
        ("BinaryAccuracy", 0.0),
        ("Precision", 0.2),
        ("Precision", 0.9),
        ("Recall", 0.5),
    )
    (other,) = heads_of(model := compiled("mse", metrics=["accuracy"]), layers_of(model), None)
    assert other.cuts == ()


@pytest.mark.parametrize(
    ("monitor", "mode", "warning"),
    [
        ("val_loss", "max", "EarlyStopping takes a larger val_loss for better (mode='max')"),
        ("val_accuracy", "min", "EarlyStopping takes a smaller val_accuracy for better (mode='min')"),
        ("val_loss", "min", ""),
        ("val_accuracy", "auto", ""),
        ("val_gain", "min", ""),
    ],
)
def test_a_callback_that_prefers_worse_values_is_reported(monitor, mode, warning):
    import keras
    import numpy as np

    app = SimpleNamespace(
        callbacks=[keras.callbacks.EarlyStopping(monitor, mode=mode)],
        x_val=np.zeros((9, 3)),
        checkpoint=None,
        resume=None,
    )
    assert warnings_of_master(app, "sync") == ([warning] if warning else [])
