"""What an app's own ``train`` does with the weights that it is given: tried on a few samples, on the adviser's own model. With Keras."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np

from ddlf.data.parts import place_of, samples_of
from ddlf.data.trees import leaves, tree_map

log = logging.getLogger(__name__)
BATCHES = 4
"""Of the samples that it is tried on."""
MOVED = 0.5
"""Share of the way between two sets of weights from which on it is that way which was taken."""


def trained_by_own(app: Any) -> str:
    """What is wrong with an app's own ``train``, as a sentence; empty if nothing is, or it cannot be tried.

    The model is given other weights than ``train`` is: where those show in the update, it did not begin with what it was given. Then the weights
    less the update are to be those that the model has.

    Args:
        app: With data and a model that may be changed.
    """
    if place_of(app, "train") is not None or inspect.iscoroutinefunction(app.train):
        return ""
    model, size = app.model, int(app.batch_size)
    app.indices = np.arange(max(1, min(samples_of(app, "train") // 2, BATCHES * size)))
    start = [np.array(one) for one in model.get_weights()]
    other = [one * 1.5 + 0.5 if one.dtype.kind == "f" else one for one in start]
    try:
        model.set_weights(other)
        given = app.train([one.copy() for one in start], 1, size)
        update = [np.asarray(one) for one in (given[0] if isinstance(given, tuple) else given)]
        after = model.get_weights()
        if [one.shape for one in update] != [one.shape for one in start]:
            return ""
        told = [a - b for a, b in zip(start, update, strict=True)]
        moved = _apart(after, other)  # 0 of who trains without the model
        if 0 < moved < MOVED * _apart(start, other) and moved < _apart(after, start):
            return "train goes on from the weights that the model has, not from those that it is given"
        if _apart(told, other) < MOVED * _apart(start, other) and _apart(told, other) < _apart(told, start):
            return "train goes on from the weights that the model has, not from those that it is given"
        less = _apart(told, after)
        more = _apart([a + b for a, b in zip(start, update, strict=True)], after)
        if more < 1e-3 * less:
            return "the update of train is weights after minus weights before: subtracted, as it is, it leads away from what was learnt"
        if _reads_others(app, start, size):
            return "train learns from samples that are not those of self.indices: each slot trains on them, and they count several times"
    except Exception as error:  # what it needs of a worker is not here
        log.info("the app's own train was not tried: %s", error)
    finally:
        model.set_weights(start)
    return ""


def _reads_others(app: Any, start: list[Any], size: int) -> bool:
    """Whether samples show in an update that are not of ``app.indices``: they are made NaN, behind as many that are."""
    mine = len(app.indices)
    if not all(array.dtype.kind == "f" for _, array in leaves(app.x_train)):
        return False
    whole = app.x_train, getattr(app, "y_train", None)

    def spoiled(array: Any) -> Any:
        some = array[: 2 * mine].copy()
        some[mine:] = np.nan
        return some

    try:
        app.x_train = tree_map(spoiled, whole[0])
        app.y_train = None if whole[1] is None else tree_map(lambda array: array[: 2 * mine], whole[1])
        given = app.train([one.copy() for one in start], 1, size)
    finally:
        app.x_train, app.y_train = whole
    update = [np.asarray(one) for one in (given[0] if isinstance(given, tuple) else given)]
    return any(one.dtype.kind == "f" and not np.isfinite(one).all() for one in update)


def _apart(one: Any, other: Any) -> float:
    """Length of the difference of two sets of weights."""
    return float(np.sqrt(sum(((a.astype(np.float64) - b) ** 2).sum() for a, b in zip(one, other, strict=True))))
