"""What an app's own ``train`` does with the weights that it is given: tried on a few samples, on the adviser's own model. With Keras."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np

from ddlf.data.parts import place_of, samples_of

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
    app.indices = np.arange(min(samples_of(app, "train"), BATCHES * size))
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
        if _apart(told, other) < MOVED * _apart(start, other) and _apart(told, other) < _apart(told, start):
            return "train goes on from the weights that the model has, not from those that it is given"
        less = _apart(told, after)
        more = _apart([a + b for a, b in zip(start, update, strict=True)], after)
        if more < 1e-3 * less:
            return "the update of train is weights after minus weights before: subtracted, as it is, it leads away from what was learnt"
    except Exception as error:  # what it needs of a worker is not here
        log.info("the app's own train was not tried: %s", error)
    finally:
        model.set_weights(start)
    return ""


def _apart(one: Any, other: Any) -> float:
    """Length of the difference of two sets of weights."""
    return float(np.sqrt(sum(((a.astype(np.float64) - b) ** 2).sum() for a, b in zip(one, other, strict=True))))
