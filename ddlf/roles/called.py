"""The user's methods, called on the thread of Keras, and what ``train`` returns, checked. Runs in the executor."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights, is_float
from ddlf.errors import AppError
from ddlf.iworker import awaited
from ddlf.roles.metrics import scalars


def call(function: Any, *args: Any) -> Any:
    """Call a method of the user's app, plain or async, on this thread."""
    result = function(*args)
    return asyncio.run(awaited(result)) if inspect.isawaitable(result) else result


def run_train(app: Any, weights: Weights, epochs: int, batch_size: int) -> tuple[Weights, dict[str, float]]:
    """Call the app's ``train``, and check what it returns.

    Returns:
        The update, and the metrics.

    Raises:
        AppError: It returned something else.
    """
    outcome = call(app.train, weights, epochs, batch_size)
    with_metrics = isinstance(outcome, tuple) and len(outcome) == 2 and not isinstance(outcome[1], np.ndarray)
    update, metrics = outcome if with_metrics else (outcome, {})
    try:
        if not isinstance(update, list | tuple):
            raise TypeError
        arrays = [np.asarray(array) for array in update]
    except (TypeError, ValueError):
        raise AppError(
            f"train returned a {type(outcome).__name__}" + (f" with a {type(update).__name__} first" * with_metrics),
            hint="return the update, weights before minus weights after, as a list of arrays; or (update, metrics)",
        ) from None
    told = scalars(metrics)
    for place, weight in enumerate(weights if len(arrays) == len(weights) else ()):
        if arrays[place].shape != weight.shape:
            raise AppError(
                f"{type(app).__name__}.train returned an array of shape {arrays[place].shape} for weight {place + 1} of shape {weight.shape}",
                hint="return weights before minus weights after, in the order of model.weights",
            )
    if len(arrays) != len(weights):
        raise AppError(
            f"{type(app).__name__}.train returned {len(arrays)} arrays for {len(weights)} weights",
            hint="return weights before minus weights after, one array for each of model.weights",
        )
    # NumPy makes float64 of much; what the weight cannot hold the update cannot bring.
    pairs = zip(arrays, weights, strict=True)
    return [a.astype(w.dtype) if is_float(a) and is_float(w) else a for a, w in pairs], told
