"""Derives loss settings from the data before training: parameters of Huber and focal loss, class weights.

Runs wherever data is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddlf.errors import ConfigError

EFFICIENT = 1.345
"""delta of the Huber loss, divided by the spread. Without outliers, this loss is 95 % as efficient as squared errors
(Huber 1964)."""
NORMAL = 1.4826
"""Standard deviation of normally distributed numbers, divided by their median absolute deviation."""
GAMMA = 2.0
"""gamma of the focal loss, as its authors use it (arXiv:1708.02002)."""


def spread(errors: Any) -> float:
    """Return the spread of errors, measured so that outliers hardly count: ``1.4826 median |e - median e|``.

    Raises:
        ConfigError: There is no finite error.
    """
    values = np.asarray(errors, np.float64).reshape(-1)
    values = values[np.isfinite(values)]
    if not values.size:
        raise ConfigError("there are no finite errors, so they have no spread")
    return float(NORMAL * np.median(np.abs(values - np.median(values))))


def huber_delta(model: Any, x: Any, y: Any, batch_size: int = 256) -> float:
    """Return a good delta for the Huber loss: 1.345 times the spread of a briefly trained model's errors on some
    samples.

    Args:
        model: A Keras model. None takes the errors of a constant prediction, the median.
        x: Some samples; unused without a model.
        y: The targets of these samples, shape (n, ...).
        batch_size: Number of samples in a prediction batch.

    Raises:
        ConfigError: More than half of the errors are equal, so the spread is 0. Use squared errors then.
    """
    y = np.asarray(y, np.float64)
    predictions = np.median(y, axis=0) if model is None else model.predict(x, batch_size=batch_size, verbose=0)
    delta = EFFICIENT * spread(y - np.reshape(predictions, (-1, *y.shape[1:])))
    if not delta > 0:
        raise ConfigError("more than half of the errors are equal, so none is an outlier", hint="use the loss 'mse'")
    return delta


def counts(labels: Any) -> np.ndarray[Any, Any]:
    """Return the number of samples of each class, from class 0.

    Labels are class numbers of shape (n,) or (n, 1), or one-hot rows of shape (n, classes).

    Raises:
        ConfigError: The labels are neither class numbers nor one-hot rows.
    """
    array = np.asarray(labels)
    if array.ndim == 2 and array.shape[1] > 1:
        return np.asarray(array.sum(axis=0))
    array = array.reshape(-1)
    if not array.size or (array != array.astype(np.int64)).any() or array.min() < 0:
        raise ConfigError("labels must be class numbers from 0, or one-hot rows", hint="use numbers such as 0, 1, 2")
    return np.bincount(array.astype(np.int64))


def class_weights(labels: Any) -> dict[int, float]:
    """Return weights that balance the classes, ``n / (classes * n_c)``, for the setting ``class_weight`` or ``fit``."""
    class_counts = counts(labels)
    present = int((class_counts > 0).sum())
    return {number: float(class_counts.sum() / (present * n)) for number, n in enumerate(class_counts) if n}


def focal_alpha(labels: Any) -> list[float]:
    """Return alpha of the focal loss for each class, ``(1 - n_c / n) / (classes - 1)``. The values add up to 1.

    Raises:
        ConfigError: The labels have only one class.
    """
    class_counts = counts(labels)
    if (class_counts > 0).sum() < 2:
        raise ConfigError("the labels have only one class, so there are no classes to weigh", hint="check the labels")
    return [float(alpha) for alpha in (1 - class_counts / class_counts.sum()) / (len(class_counts) - 1)]


def focal(labels: Any, gamma: float = GAMMA) -> Any:
    """Return Keras's focal loss for these labels: one-hot rows, or two classes as the numbers 0 and 1.

    Raises:
        ConfigError: The labels are numbers of more than two classes, which Keras's focal loss does not accept.
    """
    import keras

    alpha, array = focal_alpha(labels), np.asarray(labels)
    if array.ndim == 2 and array.shape[1] > 1:
        return keras.losses.CategoricalFocalCrossentropy(alpha=alpha, gamma=gamma)
    if len(alpha) > 2:
        raise ConfigError(
            "Keras's focal loss takes one-hot rows, but these labels are class numbers",
            hint="y_train = keras.utils.to_categorical(y_train)",
        )
    return keras.losses.BinaryFocalCrossentropy(apply_class_balancing=True, alpha=alpha[1], gamma=gamma)


def huber(model: Any, x: Any, y: Any) -> Any:
    """Return Keras's Huber loss with the delta of ``huber_delta``."""
    import keras

    return keras.losses.Huber(delta=huber_delta(model, x, y))
