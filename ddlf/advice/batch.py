"""What one batch and some steps on a copy of the model show. Runs on the master, with Keras; the app's own model is not touched."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddlf.advice.arrays import chosen
from ddlf.advice.facts import Facts
from ddlf.advice.network import graph_of
from ddlf.algorithms.weights import Weights
from ddlf.data.parts import place_of
from ddlf.data.trees import leaves, tree_map, tuples
from ddlf.roles.build import first_rows
from ddlf.roles.feed import keras_type
from ddlf.roles.gradient import Gradients
from ddlf.roles.optimizer_state import read_optimizer, write_optimizer, write_rates

log = logging.getLogger(__name__)
ROWS, BY_HEART = 128, 16
"""Samples of the batch that is looked at, and of the one that is learnt by heart."""
LADDER = ((0.001, 60), (0.01, 100), (0.1, 100))
"""Learning rates of Adam with which a batch is tried to be learnt, and steps of each."""
ENOUGH = 0.7
"""Share of the first loss below which learning has begun."""
TIMED = 6
"""Steps that are timed, if there are samples for as many."""
OWN_STEPS = 3
MOST_SAID = 300
OF_GRAPHS = ("Graph execution error", "Detected at node", "File ", "<stack traces", "[[")
"""How lines begin that say where in a graph something failed."""
NO_SLOPE = "No gradients provided for any variable"
"""What Keras says of a loss without a gradient."""
SECONDS = 15.0
"""After which steps are given up, and nothing is said of them."""
RANDOM = (
    "Dropout",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
    "GaussianDropout",
    "AlphaDropout",
    "GaussianNoise",
)


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
    for look in (_outputs, _activations, _gradients, _learnt, _stepped):
        try:
            model.set_weights(start)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a weight has no gradient is said by a rule
                seen |= look(model, rows, facts)
        except Exception as error:  # what the user's own layers do not like says nothing of them
            log.info("%s was not looked at: %s", look.__name__, error)
            if NO_SLOPE in str(error):
                seen["slopes"] = False
            elif "fails" not in seen and (why := _first_error(model, rows)):
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


def _first(data: Any, count: int) -> Any:
    return tree_map(lambda array: array[:count], data)


def _predicted(model: Any, x: Any) -> list[Any]:
    import keras

    found = model(tree_map(keras.ops.convert_to_tensor, x), training=False)
    return [keras.ops.convert_to_numpy(one).astype(np.float64) for one in keras.tree.flatten(found)]


def _outputs(model: Any, rows: tuple[Any, ...], facts: Facts) -> dict[str, Any]:
    """The first loss, and whether outputs depend on what they must not."""
    x, count = rows[0], len(next(array for _, array in leaves(rows[0])))
    whole = _predicted(model, x)
    seen: dict[str, Any] = {
        "random": any(
            not np.array_equal(a, b, equal_nan=True) for a, b in zip(whole, _predicted(model, x), strict=True)
        )
    }
    if any(not np.isfinite(one).all() for one in whole):
        return seen | {"nan": first_not_finite(model, x) or "the output"}
    if count >= 4 and not seen["random"]:
        # The first half alone, and before another second half.
        other = tree_map(lambda array: np.concatenate([array[: count // 2], array[: count - count // 2][::-1]]), x)
        changed = _predicted(model, other)
        seen["mixed"] = max(_apart(a[: count // 2], b[: count // 2]) for a, b in zip(whole, changed, strict=True))
    if len(rows) > 1:
        seen |= _losses(model, rows)
        if _is_shifted(rows):
            seen["future"] = _future(model, x, whole)
    return seen


def _apart(a: Any, b: Any) -> float:
    """By how much outputs differ, as a share of what they differ among samples."""
    return float(np.abs(a - b).max() / (np.abs(a).max() + 1e-12)) if a.size else 0.0


def _losses(model: Any, rows: tuple[Any, ...]) -> dict[str, Any]:
    if type(model).train_step is not _plain_step():
        return {}
    told = model.evaluate(*rows[:2], batch_size=ROWS, verbose=0, return_dict=True)
    apart = {name.removesuffix("_loss"): float(value) for name, value in told.items() if name.endswith("_loss")}
    weights = _loss_weights(model)
    return {
        "loss": float(told["loss"]),
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
        _apart(a[:, :middle], b[:, :middle]) for a, b in zip(whole, _predicted(model, other), strict=True) if a.ndim > 2
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
    if type(model).train_step is not _plain_step():
        return {}
    update, _ = Gradients(model).of(rows, model.get_weights())
    norms = {
        weight.path: float(np.sqrt((gradient.astype(np.float64) ** 2).sum()))
        for weight, gradient in zip(model.weights, update, strict=True)
        if weight.trainable and len(weight.shape) > 1
    }
    return {"gradients": norms}


def _plain_step() -> Any:
    import keras

    return keras.Model.train_step


@contextlib.contextmanager
def _without_chance(model: Any) -> Iterator[None]:
    """Without dropout, noise and augmentation."""
    changed: list[tuple[Any, str, Any]] = []
    for layer in model._flatten_layers():
        kind = type(layer).__name__
        for name in ("rate", "stddev", "dropout", "recurrent_dropout"):
            if (
                (kind in RANDOM or name in ("dropout", "recurrent_dropout"))
                and isinstance(value := getattr(layer, name, None), float)
                and value
            ):
                changed.append((layer, name, value))
                setattr(layer, name, 0.0)
        if kind.startswith("Random") or kind in ("MixUp", "CutMix", "RandAugment", "AugMix"):
            changed.append((layer, "call", None))
            object.__setattr__(layer, "call", lambda inputs, *args, **kwargs: inputs)
    try:
        yield
    finally:
        for layer, name, value in changed:
            if name == "call":
                object.__delattr__(layer, "call")
            else:
                setattr(layer, name, value)


def _learnt(model: Any, rows: tuple[Any, ...], facts: Facts) -> dict[str, Any]:
    """How far the loss of a small batch comes down, and which weights have no gradient after some steps, and which inputs change nothing."""
    import keras

    if type(model).train_step is not _plain_step():
        return {}
    some = tuple(_first(part, BY_HEART) for part in rows)
    start: Weights = model.get_weights()
    compiled = {"loss": model.loss, "loss_weights": getattr(model._compile_loss, "_user_loss_weights", None)}
    began, seen = time.monotonic(), dict[str, Any]()
    with _without_chance(model):
        first, least = math.nan, math.inf
        model.compile(keras.optimizers.Adam(), **compiled)  # once: a step takes longer to trace than all others to make
        model.optimizer.build(model.trainable_variables)
        fresh = read_optimizer(model)
        for rate, steps in LADDER:
            model.set_weights(start)
            write_optimizer(model, fresh)
            write_rates(model, [rate])
            for step in range(steps):
                loss = float(model.train_on_batch(*some, return_dict=True)["loss"])
                first = loss if math.isnan(first) else first
                least = min(least, loss) if math.isfinite(loss) else least
                if step == 2 and "still" not in seen:
                    after = model.get_weights()
                    seen["still"] = None
                if time.monotonic() - began > SECONDS:
                    return {name: value for name, value in seen.items() if value is not None}
                if not math.isfinite(loss) or (first > 0 and least < 0.3 * first):
                    break
            if first > 0 and least < ENOUGH * first:
                break
        seen |= {"first": first, "least": least, "ignored": _ignored(model, rows[0])}
        seen["agrees"] = _agreement(model, some, facts)
        update, _ = Gradients(model).of(some, after)
    seen["still"] = [
        weight.path
        for weight, gradient in zip(model.weights, update, strict=True)
        if weight.trainable and not np.any(gradient)
    ]
    return seen


def _agreement(model: Any, some: tuple[Any, ...], facts: Facts) -> float | None:
    """The correlation of what outputs say of classes, or of yes and no, with labels; None where that is not known."""
    head = facts.heads[0] if len(facts.heads) == 1 else None
    if head is None or len(some) < 2 or head.activation not in ("softmax", "sigmoid", "linear"):
        return None
    (output,), y = _predicted(model, some[0]), some[1]
    array = facts.array(head.target)
    kind = array.labels.kind if array is not None and array.labels is not None else ""
    if head.activation != "sigmoid" and head.units > 1 and kind == "numbers" and y.size == len(output):
        y = np.eye(head.units)[np.clip(y.reshape(-1).astype(np.int64), 0, head.units - 1)]
    elif kind not in ("one_hot", "many_hot") and (head.activation != "sigmoid" or kind != "numbers"):
        return None
    a, b = (each.reshape(-1).astype(np.float64) for each in (output, y))
    return float(np.corrcoef(a, b)[0, 1]) if a.size == b.size and a.std() and b.std() else None


def _first_error(model: Any, rows: tuple[Any, ...]) -> str:
    """What a first step raises, or a test, in a line; empty if they go well."""
    some = tuple(_first(part, BY_HEART) for part in rows)
    model.train_function = model.test_function = None  # those that were made are of other arguments
    try:
        _fitted(model, some)
        model.evaluate(*some[:2], batch_size=BY_HEART, verbose=0)
    except Exception as error:
        return "" if NO_SLOPE in str(error) else _plain(error)
    return ""


def _fitted(model: Any, some: tuple[Any, ...], steps: int = 1) -> None:
    """Steps on one batch, which a step of the user's own gets as in a run: ``train_on_batch`` would add a None to it."""
    x, y, w = (*some, None, None)[:3]
    model.fit(x, y, sample_weight=w, batch_size=BY_HEART, epochs=steps, shuffle=False, verbose=0)


def _plain(error: Exception) -> str:
    """The first words of what Keras or TensorFlow says, without colours and where in a graph it was."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if len(line) > 1 and not line.startswith(OF_GRAPHS)]
    return " ".join(said)[:MOST_SAID] or type(error).__name__


def _stepped(model: Any, rows: tuple[Any, ...], facts: Facts) -> dict[str, Any]:
    """Weights that stay the same in some steps of the user's own, while others move."""
    if type(model).train_step is _plain_step():
        return {}
    before = {one.path: np.array(one.value) for one in model.trainable_variables}
    _fitted(model, tuple(_first(part, BY_HEART) for part in rows), OWN_STEPS)
    still = [one.path for one in model.trainable_variables if np.array_equal(before[one.path], np.array(one.value))]
    return {"unmoved": still} if 0 < len(still) < len(before) else {}


def _ignored(model: Any, x: Any) -> list[str]:
    """Inputs, of several, that change nothing in any output."""
    named = list(leaves(x, "x_train"))
    if len(named) < 2:
        return []
    whole, found = _predicted(model, x), []
    for name, _ in named:
        order = iter(named)

        def turned(array: Any, wanted: str = name, order: Any = order) -> Any:
            return np.roll(array, 1, axis=0) if next(order)[0] == wanted else array

        other = _predicted(model, tree_map(turned, x))
        if all(np.array_equal(a, b) for a, b in zip(whole, other, strict=True)):
            found.append(name)
    return found
