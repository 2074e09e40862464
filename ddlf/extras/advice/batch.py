"""What one batch shows. Runs on the master, with Keras; the app's own model is not touched."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddlf.data.parts import place_of
from ddlf.data.trees import leaves, tree_map, tuples
from ddlf.extras.advice.arrays import chosen
from ddlf.extras.advice.facts import Facts
from ddlf.extras.advice.network import graph_of
from ddlf.extras.advice.steps import NO_SLOPE, first_error, learnt, plain_step, predicted, stepped, unlinked
from ddlf.training.exchanges.gradient.step import Gradients
from ddlf.training.roles.build import first_rows
from ddlf.training.slot.feed import keras_type

log = logging.getLogger(__name__)
ROWS = 128
"""Samples of the batch that is looked at."""
TIMED = 6
"""Steps that are timed, if there are samples for as many."""
MIXED = 2e-5
"""Share of a layer's outputs by which they change with other samples that is no rounding."""


def seen_in_a_batch(app: Any, facts: Facts) -> dict[str, Any]:
    """What a batch shows, by name: what cannot be tried is left out.

    Args:
        app: With data, and a model that may be changed.
        facts: Of it.
    """
    model, rows = app.model, _rows(app)
    if rows is None:
        return {}
    seen: dict[str, Any] = {}
    start = model.get_weights()
    for look in (_outputs, _activations, _gradients, learnt, stepped, unlinked):
        try:
            model.set_weights(start)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a weight has no gradient is said by a rule
                seen |= look(model, rows, facts)
        except Exception as error:  # what the user's own layers do not like says nothing of them
            log.info("%s was not looked at: %s", look.__name__, error)
            if NO_SLOPE in str(error):
                seen["slopes"] = False
            elif "fails" not in seen and (why := first_error(model, rows)):
                seen["fails"] = why
    return seen


def seconds_of_a_step(app: Any, batch_size: int) -> float | None:
    """What a step takes here, once it is compiled. None where it cannot be tried.

    Args:
        app: With data, and a model that may be changed.
        batch_size: Samples in it.
    """
    rows = _rows(app, TIMED * batch_size)
    if rows is None:
        return None
    x, y, weight = (*rows, None, None)[:3]
    try:
        for _ in range(2):  # the first time it is compiled
            begin = time.perf_counter()
            app.model.fit(x, y, batch_size, sample_weight=weight, verbose=0)
    except Exception as error:  # as above
        log.info("no step was timed: %s", error)
        return None
    count = len(next(array for _, array in leaves(x)))
    return (time.perf_counter() - begin) / math.ceil(count / batch_size)


def _rows(app: Any, most: int = ROWS) -> tuple[Any, ...] | None:
    """Some samples as ``fit`` takes them, from all over the data; None of files."""
    if place_of(app, "train") is not None:
        return None
    data = first_rows(app, "train")
    count = len(next(array for _, array in leaves(data)))
    numbers = chosen(count, most)
    return tuple(tree_map(lambda array: array[numbers].astype(keras_type(array)), tuples(part)) for part in data)


def _outputs(model: Any, rows: tuple[Any, ...], facts: Facts) -> dict[str, Any]:
    """The first loss, and whether outputs depend on what they must not."""
    x, count = rows[0], len(next(array for _, array in leaves(rows[0])))
    whole = predicted(model, x)
    seen: dict[str, Any] = {
        "random": any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(whole, predicted(model, x), strict=True))
    }
    if any(not np.isfinite(one).all() for one in whole):
        return seen | {"nan": first_not_finite(model, x) or "the output"}
    if count >= 4 and not seen["random"]:
        # The first half alone, and before another second half.
        other = tree_map(lambda array: np.concatenate([array[: count // 2], array[: count - count // 2][::-1]]), x)
        changed = predicted(model, other)
        seen["mixed"] = max(_apart(a[: count // 2], b[: count // 2]) for a, b in zip(whole, changed, strict=True))
        seen["mixing"] = _first_mixing(model, x, other)
    if len(rows) > 1:
        seen |= _losses(model, rows)
        if _is_shifted(rows):
            seen["future"] = _future(model, x, whole)
    return seen


def _first_mixing(model: Any, x: Any, other: Any) -> str:
    """The first layer whose outputs of the first half change with the second: what is little of the output may be much once it is trained."""
    count = len(next(array for _, array in leaves(x)))
    for (name, a), (_, b) in zip(_values(model, x), _values(model, other), strict=True):
        if a.shape == b.shape and len(a) == count and _apart(a[: count // 2], b[: count // 2]) > MIXED:
            return name
    return ""


def _apart(a: Any, b: Any) -> float:
    """By how much outputs differ, as a share of what they differ among samples."""
    return float(np.abs(a - b).max() / (np.abs(a).max() + 1e-12)) if a.size else 0.0


def _losses(model: Any, rows: tuple[Any, ...]) -> dict[str, Any]:
    if type(model).train_step is not plain_step():
        return {}
    told = model.evaluate(*rows[:2], batch_size=ROWS, verbose=0, return_dict=True)
    apart = {name.removesuffix("_loss"): float(value) for name, value in told.items() if name.endswith("_loss")}
    weights = _loss_weights(model)
    return {
        "loss": float(told["loss"]),
        "penalties": float(sum(float(one) for one in model.losses)),
        "losses": {name: weights.get(name, 1.0) * value for name, value in apart.items()},
    }


def _loss_weights(model: Any) -> dict[str, float]:
    """By which factor the loss of each output counts."""
    given = getattr(model._compile_loss, "_user_loss_weights", None)
    if isinstance(given, list | tuple):
        given = dict(zip(getattr(model, "output_names", ()), given, strict=False))
    return {name: float(weight) for name, weight in given.items()} if isinstance(given, dict) else {}


def _is_shifted(rows: tuple[Any, ...]) -> bool:
    """Whether labels are the inputs one place on, as for a language model."""
    x, y = rows[0], rows[1]
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray) or x.ndim != 2 or x.dtype.kind not in "iu":
        return False
    y = y[..., 0] if y.ndim == 3 and y.shape[-1] == 1 else y
    return bool(y.shape == x.shape and x.shape[1] > 2 and (y[:, :-1] == x[:, 1:]).mean() > 0.95)


def _future(model: Any, x: Any, whole: list[Any]) -> float:
    """By how much outputs at the first places change with inputs at the last."""
    middle = x.shape[1] // 2
    other = np.concatenate([x[:, :middle], np.roll(x[:, middle:], 1, axis=0)], axis=1)
    return max(
        _apart(a[:, :middle], b[:, :middle]) for a, b in zip(whole, predicted(model, other), strict=True) if a.ndim > 2
    )


def first_not_finite(model: Any, x: Any) -> str:
    """The first layer whose output has a NaN or an infinity; empty if none has, or the model has no graph."""
    return next((name for name, output in _values(model, x) if not np.isfinite(output).all()), "")


def _values(model: Any, x: Any) -> Iterator[tuple[str, Any]]:
    """The output of each layer of a functional model, in the order in which they compute."""
    import keras

    graph = graph_of(model)
    if graph is None:
        return
    layers = [
        one
        for one in graph.layers
        if len(getattr(one, "_inbound_nodes", ())) and not isinstance(one, keras.layers.InputLayer)
    ]
    single = [one for one in layers if isinstance(one.output, keras.KerasTensor)]
    inner = keras.Model(graph.inputs, [one.output for one in single])
    given = (
        graph._standardize_inputs(tree_map(keras.ops.convert_to_tensor, x))
        if hasattr(graph, "_standardize_inputs")
        else x
    )
    for layer, output in zip(single, keras.tree.flatten(inner(given, training=False)), strict=True):
        yield layer.name, keras.ops.convert_to_numpy(output)


def _activations(model: Any, rows: tuple[Any, ...], facts: Facts) -> dict[str, Any]:
    """Share of units that are dead (0 for all samples) or saturated, of each layer with such an activation."""
    dead, saturated = {}, {}
    for name, output in _values(model, rows[0]):
        layer = facts.layer(name)
        if layer is None or output.ndim < 2 or name in {head.layer for head in facts.heads}:
            continue
        units = output.reshape(-1, output.shape[-1])
        if layer.activation in ("relu", "relu6"):
            dead[name] = float((units <= 0).all(axis=0).mean())
        elif layer.activation in ("sigmoid", "tanh"):
            ends = np.minimum(np.abs(units), np.abs(1 - units)) if layer.activation == "sigmoid" else 1 - np.abs(units)
            saturated[name] = float((ends < 0.02).mean())
    return {"dead": dead, "saturated": saturated}


def _gradients(model: Any, rows: tuple[Any, ...], facts: Facts) -> dict[str, Any]:
    """Norms of the gradients of kernels, from the first to the last."""
    if type(model).train_step is not plain_step():
        return {}
    update, _ = Gradients(model).of(rows, model.get_weights())
    norms = {
        weight.path: float(np.sqrt((gradient.astype(np.float64) ** 2).sum()))
        for weight, gradient in zip(model.weights, update, strict=True)
        if weight.trainable and len(weight.shape) > 1
    }
    return {"gradients": norms}
