"""Finds the batch normalization layers of a model, and recalibrates their moving statistics for given weights.

Workers compute the statistics, and the master merges them.

The mean of the statistics of separately trained slots fits no model, because a layer's input depends on the weights
before it. So the merged weights process samples once more. With ``b`` a batch of ``n_b`` samples, and ``mean_b`` and
``var_b`` the statistics that a layer normalizes it by::

    moving_mean = sum(n_b mean_b) / sum(n_b),  moving_variance = sum(n_b var_b) / sum(n_b)

Source:
    SWA, Izmailov et al. 2018, arXiv:1803.05407, section 3.2. The variance is the mean of the batches' variances, like
    in the authors' ``bn_update``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights, is_float_type
from ddlf.errors import AppError

SMALL_BATCH = 16
"""Statistics of fewer samples are so noisy that a model with batch normalization learns worse.

Source: Wu and He 2018, arXiv:1803.08494, figure 1.
"""


def moving(model: Any) -> tuple[int, ...]:
    """Return the indices in ``model.weights`` of batch normalization's moving mean and variance in trainable layers.

    The statistics of other layers never change.
    """
    statistics = {id(weight) for layer in _trained(model) for weight in layer.non_trainable_weights}
    return tuple(
        index
        for index, weight in enumerate(model.weights)
        if id(weight) in statistics and is_float_type(np.dtype(weight.dtype))
    )


def measured(model: Any, weights: Weights, batches: Iterable[tuple[Any, int]]) -> Weights:
    """Return the moving mean and variance that a model's batch normalization gets from some batches.

    Args:
        model: Keras model. The function changes its weights.
        weights: The weights to compute with.
        batches: Inputs of each batch, and their number of samples.

    Returns:
        An array for each place of ``moving``.

    Raises:
        AppError: The model cannot be called.
    """
    import keras

    model.set_weights(weights)
    layers, indices = _trained(model), moving(model)
    momenta = [layer.momentum for layer in layers]
    sums, samples = [np.zeros(weights[index].shape) for index in indices], 0
    try:
        for layer in layers:
            layer.momentum = 0.0  # with this momentum, a layer has the statistics of the last batch only
        for inputs, count in batches:
            model(inputs, training=True)
            samples += count
            for total, index in zip(sums, indices, strict=True):
                total += count * np.asarray(keras.ops.convert_to_numpy(model.weights[index]), np.float64)
    except NotImplementedError:
        raise AppError(
            "batchnorm='recalibrated' calls the model with x_train, but it has no call",
            hint="write call(self, inputs, training=False), or leave batchnorm at 'averaged'",
        ) from None
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    return [
        np.asarray(total / max(samples, 1), weights[index].dtype) for total, index in zip(sums, indices, strict=True)
    ]


def _trained(model: Any) -> list[Any]:
    return [layer for layer in norm_layers(model) if layer.trainable]


def norm_layers(model: Any) -> list[Any]:
    """Return the model's batch normalization layers: Keras's ``BatchNormalization`` and its subclasses."""
    return [
        layer
        for layer in model._flatten_layers()
        if any(kind.__name__ == "BatchNormalization" for kind in type(layer).__mro__)
    ]


def batch_norms(model: Any) -> tuple[int, ...]:
    """Return the indices in ``model.weights`` of all batch normalization weights: statistics, scale and offset."""
    norm_weights = {id(weight) for layer in norm_layers(model) for weight in layer.weights}
    return tuple(index for index, weight in enumerate(model.weights) if id(weight) in norm_weights)


def warning(rows: int, labels_differ: bool, setting: str) -> str:
    """Return a warning about a model with batch normalization; "" if there is none.

    Args:
        rows: Samples in a batch of the slot with the smallest batches.
        labels_differ: Whether slots have samples of different labels.
        setting: Value of ``batchnorm``.
    """
    if rows < SMALL_BATCH:
        return (
            f"it normalizes by batches, and a slot's have {rows} samples: statistics of fewer than {SMALL_BATCH} are noise; use larger batches, "
            "fewer slots, or layers that normalize each sample (GroupNormalization, LayerNormalization)"
        )
    if labels_differ and setting == "averaged":
        return "it normalizes by batches, whose statistics differ between slots of other labels: batchnorm='local' keeps them apart"
    return ""
