"""Where a NaN begins: the steps after which a run had to end are made again here, until a loss is not finite. Runs on the master, with Keras."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import numpy as np

from ddlf.data.parts import place_of
from ddlf.data.trees import leaves, tree_map, tuples
from ddlf.events import Advised
from ddlf.extras.advice.batch import first_not_finite
from ddlf.extras.advice.collect import sources_of
from ddlf.extras.advice.facts import Facts
from ddlf.extras.advice.network import layers_of
from ddlf.extras.advice.of_runs import RUNS
from ddlf.training.exchanges.gradient.step import Gradients
from ddlf.training.roles.build import first_rows
from ddlf.training.slot.feed import keras_type

log = logging.getLogger(__name__)
STEPS, SECONDS = 300, 10.0
"""After which it is given up."""


def told(app: Any) -> Advised | None:
    """What is to be said of a run that ended with NaN; None if that cannot be found here.

    Args:
        app: With its data, and the last weights that were finite in its model; both stay.
    """
    if place_of(app, "train") is not None or not hasattr(app, "x_train"):
        return None
    try:
        found = _begun(app)
    except Exception as error:  # what the user's own layers do not like says nothing of them
        log.info("where NaN begins was not found: %s", error)
        return None
    if found is None:
        return None
    what, at = found
    place = sources_of(app).place(at, Facts(layers=layers_of(app.model)))
    rule = next(rule for rule in RUNS if rule.id == "R01")
    where = "" if place is None else f"{place.path}:{place.line}"
    return Advised(rule=rule.id, severity=rule.severity, what=what, fix=rule.fix, place=where)


def _begun(app: Any) -> tuple[str, tuple[str, str]] | None:
    """What is not finite first, and what that is about."""
    import keras

    model, optimizer = app.model, app.model.optimizer
    if type(model).train_step is not keras.Model.train_step:
        return None
    start, kept = model.get_weights(), [np.array(one) for one in optimizer.variables]
    try:
        return _repeated(app, model)
    finally:
        model.set_weights(start)
        for variable, value in zip(optimizer.variables, kept, strict=False):
            variable.assign(value)


def _repeated(app: Any, model: Any) -> tuple[str, tuple[str, str]] | None:
    data = first_rows(app, "train")
    count = len(next(array for _, array in leaves(data)))
    order, end = np.random.default_rng(app.seed), time.monotonic() + SECONDS
    before: list[tuple[Any, Any]] = []  # weights and batch of the last two steps
    numbers = np.arange(0)
    for step in range(1, STEPS + 1):
        if len(numbers) < min(app.batch_size, count):
            numbers = order.permutation(count)
        chosen, numbers = np.sort(numbers[: app.batch_size]), numbers[app.batch_size :]
        rows = tuple(_chosen(part, chosen) for part in data)
        before = [*before[-1:], (model.get_weights(), rows)]
        loss = float(model.train_on_batch(*rows, return_dict=True)["loss"])
        if not math.isfinite(loss):
            return _first(model, before, step)
        if time.monotonic() > end:
            return None
    return None


def _chosen(part: Any, numbers: Any) -> Any:
    return tree_map(lambda array: array[numbers].astype(keras_type(array)), tuples(part))


def _first(model: Any, before: list[tuple[Any, Any]], step: int) -> tuple[str, tuple[str, str]] | None:
    """What is not finite in the step whose loss is not, or in the gradients of the one before it."""
    weights, rows = before[-1]
    after = f"in step {step} of the same once more"
    if all(np.isfinite(one).all() for one in weights):
        model.set_weights(weights)
        if name := first_not_finite(model, rows[0]):
            return f"the first output that is not finite is that of {name!r}, {after}", ("layer", name)
        return f"all outputs are finite, and the loss of them is not, {after}", ("loss", "")
    if len(before) < 2:
        return None
    weights, rows = before[0]
    model.set_weights(weights)
    update, _ = Gradients(model).of(rows, weights)
    bad = [one for one, each in zip(model.weights, update, strict=True) if not np.isfinite(each).all()]
    if not bad:
        return None
    layer, weight = bad[-1].path.split("/")[-2:]  # gradients come from the output: what is behind it had none
    return f"outputs and loss are finite, and the gradient of '{layer}/{weight}' is not, {after}", ("layer", layer)
