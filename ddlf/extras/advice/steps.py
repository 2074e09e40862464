"""What some steps on a copy of the model show. Runs on the master, with Keras; the app's own model is not touched."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.data.trees import leaves, tree_map
from ddlf.extras.advice.facts import Facts
from ddlf.training.exchanges.gradient.step import Gradients
from ddlf.training.roles.optimizer_state import read_optimizer, write_optimizer, write_rates

BY_HEART = 16
"""Samples of the batch that is learnt by heart."""
LADDER = ((0.001, 60), (0.01, 100), (0.1, 100))
"""Learning rates of Adam with which a batch is tried to be learnt, and steps of each."""
ENOUGH = 0.7
"""Share of the first loss below which learning has begun."""
OWN_STEPS = 3
MOST_SAID = 300
OF_GRAPHS = ("Graph execution error", "Detected at node", "File ", "<stack traces", "[[")
"""How lines begin that say where in a graph something failed."""
NO_SLOPE = "No gradients provided for any variable"
"""What Keras says of a loss without a gradient."""
SECONDS = 15.0
"""After which steps are given up, and nothing is said of them."""
UNLINKED = 1e-5
"""Share by which a loss may change by rounding alone."""
RANDOM = (
    "Dropout",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
    "GaussianDropout",
    "AlphaDropout",
    "GaussianNoise",
)


def first_of(data: Any, count: int) -> Any:
    """The first samples of a tree of arrays."""
    return tree_map(lambda array: array[:count], data)


def predicted(model: Any, x: Any) -> list[Any]:
    """What the model says of samples, in float64, one array for each output."""
    import keras

    found = model(tree_map(keras.ops.convert_to_tensor, x), training=False)
    return [keras.ops.convert_to_numpy(one).astype(np.float64) for one in keras.tree.flatten(found)]


def plain_step() -> Any:
    """Keras's own ``train_step``."""
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


def learnt(model: Any, rows: tuple[Any, ...], facts: Facts) -> dict[str, Any]:
    """How far the loss of a small batch comes down, and which weights have no gradient after some steps, and which inputs change nothing."""
    import keras

    if type(model).train_step is not plain_step():
        return {}
    some = tuple(first_of(part, BY_HEART) for part in rows)
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
    labels = [array for _, array in leaves(some[1])] if len(some) > 1 else []
    if (
        head is None
        or head.loss != "own"
        or len(labels) != 1
        or head.activation not in ("softmax", "sigmoid", "linear")
    ):
        return None
    (output,), (y,) = predicted(model, some[0]), labels
    array = facts.array(head.target)
    kind = array.labels.kind if array is not None and array.labels is not None else ""
    if head.activation != "sigmoid" and head.units > 1 and kind == "numbers" and y.size == len(output):
        y = np.eye(head.units)[np.clip(y.reshape(-1).astype(np.int64), 0, head.units - 1)]
    elif kind not in ("one_hot", "many_hot") and (head.activation != "sigmoid" or not _is_yes_or_no(array)):
        return None
    a, b = (each.reshape(-1).astype(np.float64) for each in (output, y))
    return float(np.corrcoef(a, b)[0, 1]) if a.size == b.size and a.std() and b.std() else None


def _is_yes_or_no(array: Any) -> bool:
    return array is not None and array.whole and (array.low, array.high) == (0, 1)


def first_error(model: Any, rows: tuple[Any, ...]) -> str:
    """What a first step raises, or a test, in a line; empty if they go well."""
    some = tuple(first_of(part, BY_HEART) for part in rows)
    model.train_function = model.test_function = None  # those that were made are of other arguments
    try:
        _fitted(model, some)
        model.evaluate(*some[:2], batch_size=BY_HEART, verbose=0)
    except Exception as error:
        return "" if NO_SLOPE in str(error) else plain(error)
    return ""


def _fitted(model: Any, some: tuple[Any, ...], steps: int = 1) -> None:
    """Steps on one batch, which a step of the user's own gets as in a run: ``train_on_batch`` would add a None to it."""
    x, y, w = (*some, None, None)[:3]
    model.fit(x, y, sample_weight=w, batch_size=BY_HEART, epochs=steps, shuffle=False, verbose=0)


def plain(error: Exception) -> str:
    """The first words of what Keras or TensorFlow says, without colours and where in a graph it was."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if len(line) > 1 and not line.startswith(OF_GRAPHS)]
    return " ".join(said)[:MOST_SAID] or type(error).__name__


def stepped(model: Any, rows: tuple[Any, ...], facts: Facts) -> dict[str, Any]:
    """Weights that stay the same in some steps of the user's own, while others move."""
    if type(model).train_step is plain_step():
        return {}
    before = {one.path: np.array(one.value) for one in model.trainable_variables}
    _fitted(model, tuple(first_of(part, BY_HEART) for part in rows), OWN_STEPS)
    still = [one.path for one in model.trainable_variables if np.array_equal(before[one.path], np.array(one.value))]
    return {"unmoved": still} if 0 < len(still) < len(before) else {}


def _ignored(model: Any, x: Any) -> list[str]:
    """Inputs, of several, that change nothing in any output."""
    named = list(leaves(x, "x_train"))
    if len(named) < 2:
        return []
    whole, found = predicted(model, x), []
    for name, _ in named:
        order = iter(named)

        def turned(array: Any, wanted: str = name, order: Any = order) -> Any:
            return np.roll(array, 1, axis=0) if next(order)[0] == wanted else array

        other = predicted(model, tree_map(turned, x))
        if all(np.array_equal(a, b) for a, b in zip(whole, other, strict=True)):
            found.append(name)
    return found


def unlinked(model: Any, rows: tuple[Any, ...], facts: Facts) -> dict[str, Any]:
    """Whether the loss of the user's own is the same when labels are exchanged among samples, and another one when they are changed."""
    y = rows[1] if len(rows) > 1 else None
    if not facts.own & {"loss", "step"} or not isinstance(y, np.ndarray) or not (y != y[0]).any():
        return {}
    outputs = predicted(model, rows[0])
    if not all(np.ptp(one, axis=0).max() > UNLINKED * np.abs(one).max() for one in outputs if len(one) == len(y)):
        return {}
    if np.abs(y).max() > 1 or (y != np.rint(y)).any():
        # Around outputs: where all labels are on one side of them a distance is a sum, in which the order is nothing.
        middle = np.mean([one.mean() for one in outputs]) - y.mean()
        y = (y + (np.rint(middle) if (y == np.rint(y)).all() else middle)).astype(y.dtype)
    other = y[
        np.random.default_rng(0).permutation(len(y))
    ]  # not moved along: labels may come in turns, as those of pairs
    if np.array_equal(other, y):
        return {}
    start, losses = model.get_weights(), []
    with _without_chance(model):
        for labels in (y, other, np.repeat(y[:1], len(y), axis=0)):
            model.set_weights(start)
            given = model.fit(rows[0], labels, batch_size=len(y), epochs=1, shuffle=False, verbose=0)
            losses.append(float(given.history["loss"][0]))
    given_so, exchanged, changed = losses
    near = UNLINKED * abs(given_so)
    return {"unlinked": bool(abs(exchanged - given_so) <= near < abs(changed - given_so))}
