"""Trains the adviser's own copy of the model for some steps, and returns observations.

Runs on the master, with Keras. The app's model does not change.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import re
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.data.app_data import data_set_of, samples_of
from ddlf.data.trees import leaves, tree_map, tuples
from ddlf.events import Advised
from ddlf.extras.advice.arrays import sample_numbers
from ddlf.extras.advice.collect import sources_of
from ddlf.extras.advice.facts import DROPOUT, AppFacts
from ddlf.extras.advice.network import graph_of, has_own_train_step, layers_of
from ddlf.extras.advice.rules.run import not_finite
from ddlf.training.context import App
from ddlf.training.slot.build import first_rows
from ddlf.training.slot.feed import keras_type
from ddlf.training.slot.gradients import Gradients
from ddlf.training.slot.optimizers import read_optimizer, write_optimizer, write_rates

log = logging.getLogger(__name__)
ROWS = 128
"""Number of samples of the examined batch."""
TIMED = 6
"""Number of timed steps, if there are enough samples."""
MIXED = 2e-5
"""Minimum relative change of a layer's outputs that rounding cannot explain."""
BY_HEART = 16
"""Number of samples to memorize."""
LADDER = ((0.001, 60), (0.01, 100), (0.1, 100))
"""Learning rates of Adam for memorizing a batch, with the number of steps of each."""
LEARNT_SHARE = 0.7
"""The model has begun to learn when the loss is below this share of the first loss."""
OWN_STEPS = 3
MOST_SAID = 300
OF_GRAPHS = ("Graph execution error", "Detected at node", "File ", "<stack traces", "[[")
"""Beginnings of message lines that only locate an error in a graph."""
NO_SLOPE = "No gradients provided for any variable"
"""Keras's message for a loss without a gradient."""
SECONDS = 15.0
"""Maximum seconds of the steps; beyond it, there is no result."""
UNLINKED = 1e-5
"""Maximum relative change of a loss that rounding can explain."""
RANDOM = DROPOUT | {"GaussianNoise"}
log = logging.getLogger(__name__)
OWN_BATCHES = 4
"""Number of batches for the trial of the user's ``train``."""
MOVED = 0.5
"""If an update covers more than this share of the distance to other weights, training started from these other
weights."""
log = logging.getLogger(__name__)
REPEAT_STEPS, REPEAT_SECONDS = 300, 10.0
"""Maximum number of steps and seconds to repeat."""


def observe_batch(app: App, facts: AppFacts) -> dict[str, Any]:
    """Train a copy of the model on a batch, and return the observations by name, such as the first loss. A trial that
    fails adds no observation.

    Args:
        app: An app with data, and a model that may change.
        facts: The facts of the app.
    """
    model, rows = app.model, rows_of(app)
    if rows is None:
        return {}
    observations: dict[str, Any] = {}
    start = model.get_weights()
    for observe in (_observe_outputs, activations, gradients, memorize_batch, find_unmoved_weights, exchange_labels):
        try:
            model.set_weights(start)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a rule reports weights without a gradient
                observations |= observe(model, rows, facts)
        except Exception as error:  # a failed trial of the user's own layers does not count as a finding
            log.info("%s was not checked: %s", observe.__name__, error)
            if NO_SLOPE in str(error):
                observations["slopes"] = False
            elif "fails" not in observations and (error_text := first_error(model, rows)):
                observations["fails"] = error_text
    return observations


def seconds_of_a_step(app: App, batch_size: int) -> float | None:
    """Return the seconds of a compiled training step on this machine; None if the step fails.

    Args:
        app: An app with data, and a model that may change.
        batch_size: The number of samples in a step.
    """
    rows = rows_of(app, TIMED * batch_size)
    if rows is None:
        return None
    x, y, weight = (*rows, None, None)[:3]
    try:
        for _ in range(2):  # the first round compiles the step
            begin = time.perf_counter()
            app.model.fit(x, y, batch_size, sample_weight=weight, verbose=0)
    except Exception as error:  # a failed trial is not a finding
        log.info("no step was timed: %s", error)
        return None
    count = len(next(array for _, array in leaves(x)))
    return (time.perf_counter() - begin) / math.ceil(count / batch_size)


def rows_of(app: App, limit: int = ROWS) -> tuple[Any, ...] | None:
    """Return samples from the whole range of the training data as the arguments of Keras's ``fit``; None for data in
    files.
    """
    if data_set_of(app, "train") is not None:
        return None
    data = first_rows(app, "train")
    count = len(next(array for _, array in leaves(data)))
    numbers = sample_numbers(count, limit)
    return tuple(_rows_of_part(part, numbers) for part in data)


def _observe_outputs(model: Any, rows: tuple[Any, ...], facts: AppFacts) -> dict[str, Any]:
    """Return the first loss, and whether outputs depend on other samples of the batch or on later positions (the
    future).
    """
    x, count = rows[0], len(next(array for _, array in leaves(rows[0])))
    outputs = predicted(model, x)
    observations: dict[str, Any] = {
        "random": any(
            not np.array_equal(a, b, equal_nan=True) for a, b in zip(outputs, predicted(model, x), strict=True)
        )
    }
    if any(not np.isfinite(output).all() for output in outputs):
        return observations | {"nan": first_not_finite(model, x) or "the output"}
    if count >= 4 and not observations["random"]:
        # Predict the first half alone, and with another second half.
        other = tree_map(lambda array: np.concatenate([array[: count // 2], array[: count - count // 2][::-1]]), x)
        changed = predicted(model, other)
        observations["mixed"] = max(
            _relative_difference(a[: count // 2], b[: count // 2]) for a, b in zip(outputs, changed, strict=True)
        )
        observations["mixing"] = _first_mixing(model, x, other)
    if len(rows) > 1:
        observations |= _losses(model, rows)
        if _is_shifted(rows):
            observations["future"] = _future(model, x, outputs)
    return observations


def _first_mixing(model: Any, x: Any, other: Any) -> str:
    """Return the first layer whose outputs for half of a batch depend on the other half.

    A small change may grow in training.
    """
    count = len(next(array for _, array in leaves(x)))
    for (name, a), (_, b) in zip(_values(model, x), _values(model, other), strict=True):
        if a.shape == b.shape and len(a) == count and _relative_difference(a[: count // 2], b[: count // 2]) > MIXED:
            return name
    return ""


def _relative_difference(a: Any, b: Any) -> float:
    """Return the largest difference between outputs, relative to the largest output."""
    return float(np.abs(a - b).max() / (np.abs(a).max() + 1e-12)) if a.size else 0.0


def _losses(model: Any, rows: tuple[Any, ...]) -> dict[str, Any]:
    if has_own_train_step(model):
        return {}
    evaluated = model.evaluate(*rows[:2], batch_size=ROWS, verbose=0, return_dict=True)
    output_losses = {
        name.removesuffix("_loss"): float(value) for name, value in evaluated.items() if name.endswith("_loss")
    }
    weights = _loss_weights(model)
    return {
        "loss": float(evaluated["loss"]),
        "penalties": float(sum(float(penalty) for penalty in model.losses)),
        "losses": {name: weights.get(name, 1.0) * value for name, value in output_losses.items()},
    }


def _loss_weights(model: Any) -> dict[str, float]:
    """Return the weight that each output's loss has in the sum of all losses, by the output's name."""
    loss_weights = getattr(model._compile_loss, "_user_loss_weights", None)
    if isinstance(loss_weights, list | tuple):
        loss_weights = dict(zip(getattr(model, "output_names", ()), loss_weights, strict=False))
    return {name: float(weight) for name, weight in loss_weights.items()} if isinstance(loss_weights, dict) else {}


def _is_shifted(rows: tuple[Any, ...]) -> bool:
    """Return whether the labels are the inputs shifted by one position, like for a language model."""
    x, y = rows[0], rows[1]
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray) or x.ndim != 2 or x.dtype.kind not in "iu":
        return False
    y = y[..., 0] if y.ndim == 3 and y.shape[-1] == 1 else y
    return bool(y.shape == x.shape and x.shape[1] > 2 and (y[:, :-1] == x[:, 1:]).mean() > 0.95)


def _future(model: Any, x: Any, outputs: list[Any]) -> float:
    """Change the inputs at late positions, and return the relative change of the outputs at early positions. A change
    above 0 shows that the model sees the future."""
    middle = x.shape[1] // 2
    other = np.concatenate([x[:, :middle], np.roll(x[:, middle:], 1, axis=0)], axis=1)
    return max(
        _relative_difference(a[:, :middle], b[:, :middle])
        for a, b in zip(outputs, predicted(model, other), strict=True)
        if a.ndim > 2
    )


def first_not_finite(model: Any, x: Any) -> str:
    """Return the first layer with a non-finite output; empty if all outputs are finite, or the model has no graph."""
    return next((name for name, output in _values(model, x) if not np.isfinite(output).all()), "")


def _values(model: Any, x: Any) -> Iterator[tuple[str, Any]]:
    """Yield the output of each layer of a functional model, in the order of computation."""
    import keras

    graph = graph_of(model)
    if graph is None:
        return
    layers = [
        layer
        for layer in graph.layers
        if len(getattr(layer, "_inbound_nodes", ())) and not isinstance(layer, keras.layers.InputLayer)
    ]
    single = [layer for layer in layers if isinstance(layer.output, keras.KerasTensor)]
    inner = keras.Model(graph.inputs, [layer.output for layer in single])
    tensors = (
        graph._standardize_inputs(tree_map(keras.ops.convert_to_tensor, x))
        if hasattr(graph, "_standardize_inputs")
        else x
    )
    for layer, output in zip(single, keras.tree.flatten(inner(tensors, training=False)), strict=True):
        yield layer.name, keras.ops.convert_to_numpy(output)


def activations(model: Any, rows: tuple[Any, ...], facts: AppFacts) -> dict[str, Any]:
    """Return for each layer the share of dead units (0 for all samples) and of saturated units."""
    dead, saturated = {}, {}
    for name, output in _values(model, rows[0]):
        layer = facts.layer(name)
        if layer is None or output.ndim < 2 or name in {head.layer for head in facts.heads}:
            continue
        units = output.reshape(-1, output.shape[-1])
        if layer.activation in ("relu", "relu6"):
            dead[name] = float((units <= 0).all(axis=0).mean())
        elif layer.activation in ("sigmoid", "tanh"):
            distances = (
                np.minimum(np.abs(units), np.abs(1 - units)) if layer.activation == "sigmoid" else 1 - np.abs(units)
            )
            saturated[name] = float((distances < 0.02).mean())
    return {"dead": dead, "saturated": saturated}


def gradients(model: Any, rows: tuple[Any, ...], facts: AppFacts) -> dict[str, Any]:
    """Return the norms of the kernels' gradients for some samples."""
    if has_own_train_step(model):
        return {}
    return gradient_norms(model, Gradients(model).compute(rows, model.get_weights())[0])


def gradient_norms(model: Any, update: Weights) -> dict[str, Any]:
    """Return the norms of the kernels' gradients, from the first to the last layer.

    Args:
        model: The model.
        update: The gradients, one array for each of ``model.weights``.
    """
    norms = {
        weight.path: float(np.sqrt((gradient.astype(np.float64) ** 2).sum()))
        for weight, gradient in zip(model.weights, update, strict=True)
        if weight.trainable and len(weight.shape) > 1
    }
    return {"gradients": norms}


def first_of(data: Any, count: int) -> Any:
    """Return the first ``count`` samples of a tree of arrays, such as a dict of arrays."""
    return tree_map(lambda array: array[:count], data)


def predicted(model: Any, x: Any) -> list[Any]:
    """Return the predictions for samples in float64, one array for each output."""
    import keras

    outputs = model(tree_map(keras.ops.convert_to_tensor, x), training=False)
    return [keras.ops.convert_to_numpy(output).astype(np.float64) for output in keras.tree.flatten(outputs)]


@contextlib.contextmanager
def _without_chance(model: Any) -> Iterator[None]:
    """Switch off the random layers of a model (dropout, noise and augmentation) within the context."""
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


def memorize_batch(model: Any, rows: tuple[Any, ...], facts: AppFacts) -> dict[str, Any]:
    """Train the model until it memorizes a small batch, as a test whether it can learn at all.

    Return the smallest loss, the weights without a gradient, and the inputs without an effect.
    """
    import keras

    if has_own_train_step(model):
        return {}
    batch = tuple(first_of(part, BY_HEART) for part in rows)
    start: Weights = model.get_weights()
    compiled = {"loss": model.loss, "loss_weights": getattr(model._compile_loss, "_user_loss_weights", None)}
    started, observations = time.monotonic(), dict[str, Any]()
    with _without_chance(model):
        first, least = math.nan, math.inf
        model.compile(keras.optimizers.Adam(), **compiled)  # only once, because tracing a step takes most of the time
        model.optimizer.build(model.trainable_variables)
        fresh = read_optimizer(model)
        for rate, steps in LADDER:
            model.set_weights(start)
            write_optimizer(model, fresh)
            write_rates(model, [rate])
            for step in range(steps):
                loss = float(model.train_on_batch(*batch, return_dict=True)["loss"])
                first = loss if math.isnan(first) else first
                least = min(least, loss) if math.isfinite(loss) else least
                if step == 2 and "still" not in observations:
                    after = model.get_weights()
                    observations["still"] = None
                if time.monotonic() - started > SECONDS:
                    return {name: value for name, value in observations.items() if value is not None}
                if not math.isfinite(loss) or (first > 0 and least < 0.3 * first):
                    break
            if first > 0 and least < LEARNT_SHARE * first:
                break
        observations |= {"first": first, "least": least, "ignored": _ignored(model, rows[0])}
        observations["agrees"] = _agreement(model, batch, facts)
        update, _ = Gradients(model).compute(batch, after)
    observations["still"] = [
        weight.path
        for weight, gradient in zip(model.weights, update, strict=True)
        if weight.trainable and not np.any(gradient)
    ]
    return observations


def _agreement(model: Any, batch: tuple[Any, ...], facts: AppFacts) -> float | None:
    """Return the correlation of the model's outputs with the labels of classes; None if the labels are not classes."""
    head = facts.heads[0] if len(facts.heads) == 1 else None
    labels = [array for _, array in leaves(batch[1])] if len(batch) > 1 else []
    if (
        head is None
        or head.loss != "own"
        or len(labels) != 1
        or head.activation not in ("softmax", "sigmoid", "linear")
    ):
        return None
    (output,), (y,) = predicted(model, batch[0]), labels
    array = facts.array(head.target)
    kind = array.labels.kind if array is not None and array.labels is not None else ""
    if head.activation != "sigmoid" and head.units > 1 and kind == "numbers" and y.size == len(output):
        y = np.eye(head.units)[np.clip(y.reshape(-1).astype(np.int64), 0, head.units - 1)]
    elif kind not in ("one_hot", "many_hot") and (head.activation != "sigmoid" or not _is_yes_or_no(array)):
        return None
    a, b = (values.reshape(-1).astype(np.float64) for values in (output, y))
    return float(np.corrcoef(a, b)[0, 1]) if a.size == b.size and a.std() and b.std() else None


def _is_yes_or_no(array: Any) -> bool:
    return array is not None and array.is_whole and (array.low, array.high) == (0, 1)


def first_error(model: Any, rows: tuple[Any, ...]) -> str:
    """Run a first training step and a test, and return the error message in one line; empty if both succeed."""
    batch = tuple(first_of(part, BY_HEART) for part in rows)
    model.train_function = model.test_function = None  # drop the functions compiled for other arguments
    try:
        _fit_batch(model, batch)
        model.evaluate(*batch[:2], batch_size=BY_HEART, verbose=0)
    except Exception as error:
        return "" if NO_SLOPE in str(error) else plain_message(error)
    return ""


def _fit_batch(model: Any, batch: tuple[Any, ...], steps: int = 1) -> None:
    """Train on one batch with ``fit``, because ``train_on_batch`` would pass an additional None to the user's
    train_step."""
    x, y, w = (*batch, None, None)[:3]
    model.fit(x, y, sample_weight=w, batch_size=BY_HEART, epochs=steps, shuffle=False, verbose=0)


def plain_message(error: Exception) -> str:
    """Return the beginning of an error message of Keras or TensorFlow, without colours and positions in graphs."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines()]
    kept_lines = [line for line in lines if len(line) > 1 and not line.startswith(OF_GRAPHS)]
    return " ".join(kept_lines)[:MOST_SAID] or type(error).__name__


def find_unmoved_weights(model: Any, rows: tuple[Any, ...], facts: AppFacts) -> dict[str, Any]:
    """Return the weights that the user's ``train_step`` leaves unchanged, although it changes other weights."""
    if not has_own_train_step(model):
        return {}
    before = {weight.path: np.array(weight.value) for weight in model.trainable_variables}
    _fit_batch(model, tuple(first_of(part, BY_HEART) for part in rows), OWN_STEPS)
    unmoved = [
        weight.path
        for weight in model.trainable_variables
        if np.array_equal(before[weight.path], np.array(weight.value))
    ]
    return {"unmoved": unmoved} if 0 < len(unmoved) < len(before) else {}


def _ignored(model: Any, x: Any) -> list[str]:
    """Return the inputs that change no output, if there are several inputs."""
    inputs = list(leaves(x, "x_train"))
    if len(inputs) < 2:
        return []
    outputs, ignored = predicted(model, x), []
    for name, _ in inputs:
        order = iter(inputs)

        def rotated(array: Any, rotated_name: str = name, order: Any = order) -> Any:
            return np.roll(array, 1, axis=0) if next(order)[0] == rotated_name else array

        other = predicted(model, tree_map(rotated, x))
        if all(np.array_equal(a, b) for a, b in zip(outputs, other, strict=True)):
            ignored.append(name)
    return ignored


def exchange_labels(model: Any, rows: tuple[Any, ...], facts: AppFacts) -> dict[str, Any]:
    """Return an observation if the user's loss depends on the values of the labels, but stays the same when other
    samples get them.
    """
    y = rows[1] if len(rows) > 1 else None
    if not facts.custom & {"loss", "step"} or not isinstance(y, np.ndarray) or not (y != y[0]).any():
        return {}
    outputs = predicted(model, rows[0])
    if not all(
        np.ptp(output, axis=0).max() > UNLINKED * np.abs(output).max() for output in outputs if len(output) == len(y)
    ):
        return {}
    if np.abs(y).max() > 1 or (y != np.rint(y)).any():
        # Center labels on the outputs. If all labels are on one side, an absolute error is a sum that ignores their
        # order.
        shift = np.mean([output.mean() for output in outputs]) - y.mean()
        y = (y + (np.rint(shift) if (y == np.rint(y)).all() else shift)).astype(y.dtype)
    other = y[np.random.default_rng(0).permutation(len(y))]  # a permutation, not a shift: labels may alternate
    if np.array_equal(other, y):
        return {}
    start, losses = model.get_weights(), []
    with _without_chance(model):
        for labels in (y, other, np.repeat(y[:1], len(y), axis=0)):
            model.set_weights(start)
            history = model.fit(rows[0], labels, batch_size=len(y), epochs=1, shuffle=False, verbose=0)
            losses.append(float(history.history["loss"][0]))
    own_loss, exchanged_loss, constant_loss = losses
    tolerance = UNLINKED * abs(own_loss)
    return {"unlinked": bool(abs(exchanged_loss - own_loss) <= tolerance < abs(constant_loss - own_loss))}


def find_train_mistake(app: App) -> str:
    """Return a sentence about a mistake in the app's own ``train`` method; empty if the trial finds none, or fails.

    The trial gives the model other weights than it gives ``train``. If the update depends on the model's weights,
    ``train`` did not start from the given weights. Otherwise, the given weights minus the update must equal the model's
    weights after training.

    Args:
        app: An app with data, and a model that may change.
    """
    if data_set_of(app, "train") is not None or inspect.iscoroutinefunction(app.train):
        return ""
    model, size = app.model, int(app.batch_size)
    app.indices = np.arange(max(1, min(samples_of(app, "train") // 2, OWN_BATCHES * size)))
    start = [np.array(array) for array in model.get_weights()]
    other = [array * 1.5 + 0.5 if array.dtype.kind == "f" else array for array in start]
    try:
        model.set_weights(other)
        result = app.train([array.copy() for array in start], 1, size)
        update = [np.asarray(array) for array in (result[0] if isinstance(result, tuple) else result)]
        after = model.get_weights()
        if [array.shape for array in update] != [array.shape for array in start]:
            return ""
        implied = [a - b for a, b in zip(start, update, strict=True)]
        moved = _distance(after, other)  # 0 if train does not use the model
        if 0 < moved < MOVED * _distance(start, other) and moved < _distance(after, start):
            return "train continues from the weights of the model instead of the weights that it receives"
        if _distance(implied, other) < MOVED * _distance(start, other) and _distance(implied, other) < _distance(
            implied, start
        ):
            return "train continues from the weights of the model instead of the weights that it receives"
        minus_distance = _distance(implied, after)
        plus_distance = _distance([a + b for a, b in zip(start, update, strict=True)], after)
        if plus_distance < 1e-3 * minus_distance:
            return "the update of train is weights after minus weights before: subtracted, as it is, it undoes the training"
        if _reads_other_samples(app, start, size):
            return "train uses samples that are not in self.indices: every slot trains on these samples, so they count several times"
    except Exception as error:  # train may need a worker
        log.info("the app's own train was not tried: %s", error)
    finally:
        model.set_weights(start)
    return ""


def _reads_other_samples(app: App, start: list[Any], size: int) -> bool:
    """Return whether samples outside ``app.indices`` change the update. The trial sets these samples to NaN."""
    count = len(app.indices)
    if not all(array.dtype.kind == "f" for _, array in leaves(app.x_train)):
        return False
    arrays = app.x_train, getattr(app, "y_train", None)

    def spoiled(array: Any) -> Any:
        spoilt = array[: 2 * count].copy()
        spoilt[count:] = np.nan
        return spoilt

    try:
        app.x_train = tree_map(spoiled, arrays[0])
        app.y_train = None if arrays[1] is None else tree_map(lambda array: array[: 2 * count], arrays[1])
        result = app.train([values.copy() for values in start], 1, size)
    finally:
        app.x_train, app.y_train = arrays
    update = [np.asarray(values) for values in (result[0] if isinstance(result, tuple) else result)]
    return any(values.dtype.kind == "f" and not np.isfinite(values).all() for values in update)


def _distance(weights: Any, other: Any) -> float:
    """Return the Euclidean distance of two sets of weights."""
    return float(np.sqrt(sum(((a.astype(np.float64) - b) ** 2).sum() for a, b in zip(weights, other, strict=True))))


def not_finite_advice(app: App) -> Advised | None:
    """Return a finding for a run that ended with NaN; None if the cause is not found.

    Args:
        app: An app with data. Its model has the last finite weights. Both stay the same.
    """
    if data_set_of(app, "train") is not None or not hasattr(app, "x_train"):
        return None
    try:
        problem = _first_not_finite(app)
    except Exception as error:  # a failed trial of the user's own layers does not count as a finding
        log.info("where NaN begins was not found: %s", error)
        return None
    if problem is None:
        return None
    message, subject = problem
    position = sources_of(app).position(subject, AppFacts(layers=layers_of(app.model)))
    return Advised(
        rule=not_finite.id,
        severity=not_finite.severity,
        what=message,
        fix=not_finite.fix,
        place="" if position is None else str(position),
    )


def _first_not_finite(app: App) -> tuple[str, tuple[str, str]] | None:
    """Return a sentence about the first value of the training that is not finite, and the subject of the finding, such
    as a layer."""
    model, optimizer = app.model, app.model.optimizer
    if has_own_train_step(model):
        return None
    start, optimizer_state = model.get_weights(), [np.array(variable) for variable in optimizer.variables]
    try:
        return _repeated(app, model)
    finally:
        model.set_weights(start)
        for variable, value in zip(optimizer.variables, optimizer_state, strict=False):
            variable.assign(value)


def _repeated(app: App, model: Any) -> tuple[str, tuple[str, str]] | None:
    data = first_rows(app, "train")
    count = len(next(array for _, array in leaves(data)))
    order, end = np.random.default_rng(app.seed), time.monotonic() + REPEAT_SECONDS
    before: list[tuple[Any, Any]] = []  # the weights and batches of the last two steps
    numbers = np.arange(0)
    for step in range(1, REPEAT_STEPS + 1):
        if len(numbers) < min(app.batch_size, count):
            numbers = order.permutation(count)
        batch_numbers, numbers = np.sort(numbers[: app.batch_size]), numbers[app.batch_size :]
        rows = tuple(_rows_of_part(part, batch_numbers) for part in data)
        before = [*before[-1:], (model.get_weights(), rows)]
        loss = float(model.train_on_batch(*rows, return_dict=True)["loss"])
        if not math.isfinite(loss):
            return _culprit(model, before, step)
        if time.monotonic() > end:
            return None
    return None


def _rows_of_part(part: Any, numbers: Any) -> Any:
    return tree_map(lambda array: array[numbers].astype(keras_type(array)), tuples(part))


def _culprit(model: Any, before: list[tuple[Any, Any]], step: int) -> tuple[str, tuple[str, str]] | None:
    """Find the first non-finite value in a step with a non-finite loss, or in the previous step's gradients. Return a
    sentence about it and its subject."""
    weights, rows = before[-1]
    after = f"in step {step} of a repetition of the run"
    if all(np.isfinite(values).all() for values in weights):
        model.set_weights(weights)
        if name := first_not_finite(model, rows[0]):
            return f"the first output that is not finite is that of {name!r}, {after}", ("layer", name)
        return f"all outputs are finite, but their loss is not, {after}", ("loss", "")
    if len(before) < 2:
        return None
    weights, rows = before[0]
    model.set_weights(weights)
    update, _ = Gradients(model).compute(rows, weights)
    non_finite = [
        variable for variable, gradient in zip(model.weights, update, strict=True) if not np.isfinite(gradient).all()
    ]
    if not non_finite:
        return None
    layer, weight = non_finite[-1].path.split("/")[-2:]  # backpropagation reaches the last bad weight first
    return f"outputs and loss are finite, but the gradient of '{layer}/{weight}' is not, {after}", ("layer", layer)
