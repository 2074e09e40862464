"""What the data says of a loss before training: parameters of Huber and focal loss, weights of classes. Runs wherever data is."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddlf.errors import ConfigError

EFFICIENT = 1.345
"""delta over the spread of errors without outliers: with it 95 % as good as squares where there are none (Huber 1964)."""
NORMAL = 1.4826
"""Spread of normal numbers over the median of their distances from the median."""
GAMMA = 2.0
"""Of the focal loss, as its authors use it (arXiv:1708.02002)."""


def spread(errors: Any) -> float:
    """The spread of some errors, of which a few may be outliers: ``1.4826 median |e - median e|``.

    Raises:
        ConfigError: There are none, or none is finite.
    """
    found = np.asarray(errors, np.float64).reshape(-1)
    found = found[np.isfinite(found)]
    if not found.size:
        raise ConfigError("there are no finite errors to take the spread of")
    return float(NORMAL * np.median(np.abs(found - np.median(found))))


def huber_delta(model: Any, x: Any, y: Any, batch_size: int = 256) -> float:
    """delta of the Huber loss: 1.345 times the spread of the errors of a model that was trained for a moment, over some samples.

    Args:
        model: A model of Keras; or None, for the errors of the constant that fits best, the median.
        x: Some samples; not looked at without a model.
        y: Their numbers, shape (n, ...).
        batch_size: Samples that are predicted together.

    Raises:
        ConfigError: All errors are equal: then squares do.
    """
    y = np.asarray(y, np.float64)
    found = np.median(y, axis=0) if model is None else model.predict(x, batch_size=batch_size, verbose=0)
    delta = EFFICIENT * spread(y - np.reshape(found, (-1, *y.shape[1:])))
    if not delta > 0:
        raise ConfigError("more than half of the errors are equal, so none is an outlier", hint="use the loss 'mse'")
    return delta


def has_outliers(errors: Any, far: float = 4.0, share: float = 0.001) -> bool:
    """Whether more errors are ``far`` spreads from their median than ``share`` of them; of normal ones 0.006 % are farther than 4."""
    found = np.asarray(errors, np.float64).reshape(-1)
    away = np.abs(found - np.median(found))
    return bool(np.mean(away > far * spread(found)) > share)


def counts(labels: Any) -> np.ndarray[Any, Any]:
    """How many samples each class has, from 0: of numbers of classes, shape (n,) or (n, 1), or rows with a 1, shape (n, classes).

    Raises:
        ConfigError: They are neither.
    """
    found = np.asarray(labels)
    if found.ndim == 2 and found.shape[1] > 1:
        return np.asarray(found.sum(axis=0))
    found = found.reshape(-1)
    if not found.size or (found != found.astype(np.int64)).any() or found.min() < 0:
        raise ConfigError("labels must be numbers of classes from 0, or rows with a 1", hint="use numbers as 0, 1, 2")
    return np.bincount(found.astype(np.int64))


def class_weights(labels: Any) -> dict[int, float]:
    """Weights with which every class counts as much as every other: ``n / (classes * n_c)``, for the setting ``class_weight`` or ``fit``."""
    found = counts(labels)
    present = int((found > 0).sum())
    return {number: float(found.sum() / (present * n)) for number, n in enumerate(found) if n}


def focal_alpha(labels: Any) -> list[float]:
    """alpha of the focal loss for each class: its share of the others, ``(1 - n_c / n) / (classes - 1)``, so that all of them add up to 1.

    Raises:
        ConfigError: There is one class only.
    """
    found = counts(labels)
    if (found > 0).sum() < 2:
        raise ConfigError("there is one class only, so there is nothing to weigh", hint="look at the labels")
    return [float(one) for one in (1 - found / found.sum()) / (len(found) - 1)]


def focal(labels: Any, gamma: float = GAMMA) -> Any:
    """The focal loss of Keras for these labels: of rows with a 1, or of two classes as one number.

    Raises:
        ConfigError: They are numbers of more than two classes, which Keras's loss does not take.
    """
    import keras

    alpha, found = focal_alpha(labels), np.asarray(labels)
    if found.ndim == 2 and found.shape[1] > 1:
        return keras.losses.CategoricalFocalCrossentropy(alpha=alpha, gamma=gamma)
    if len(alpha) > 2:
        raise ConfigError(
            "Keras's focal loss takes rows with a 1, and these are numbers of classes",
            hint="y_train = keras.utils.to_categorical(y_train)",
        )
    return keras.losses.BinaryFocalCrossentropy(apply_class_balancing=True, alpha=alpha[1], gamma=gamma)


def huber(model: Any, x: Any, y: Any) -> Any:
    """The Huber loss of Keras with the delta of ``huber_delta``."""
    import keras

    return keras.losses.Huber(delta=huber_delta(model, x, y))
