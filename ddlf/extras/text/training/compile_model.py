"""Compiles a Keras model with the losses and training keys of its model text. Runs where models are made."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from ddlf.errors import NotationError
from ddlf.extras import provided
from ddlf.extras.text.conversion.objects import valued
from ddlf.extras.text.language.blocks import plain
from ddlf.extras.text.language.graph import ModelOutput
from ddlf.extras.text.language.values import Call, Items, Number, Value, Word
from ddlf.extras.text.training.block import UNCERTAINTY, ignored_of

BY_LOSS = ("accuracy", "acc", "crossentropy", "ce")
"""Names of metrics. Keras chooses the variant of each that fits the loss."""
LOSSES: dict[str, Callable[[dict[str, float], str], Any]] = {
    "MSE": lambda factors, last: keras.losses.MeanSquaredError(),
    "MAE": lambda factors, last: keras.losses.MeanAbsoluteError(),
    "HUL": lambda factors, last: keras.losses.Huber(delta=factors.get("delta", 1.0)),
    "BCE": lambda factors, last: keras.losses.BinaryCrossentropy(from_logits=last == "linear"),
    "CCE": lambda factors, last: keras.losses.CategoricalCrossentropy(from_logits=last == "linear"),
    "CCEL": lambda factors, last: keras.losses.CategoricalCrossentropy(from_logits=True),
    "SCE": lambda factors, last: keras.losses.SparseCategoricalCrossentropy(from_logits=last == "linear"),
    "HIL": lambda factors, last: keras.losses.Hinge(),
    "KLD": lambda factors, last: keras.losses.KLDivergence(),
    "FOL": lambda factors, last: _focal(factors.get("gamma", 2.0), factors.get("alpha", 0.25), last),
}
"""Functions that create each loss from its factors and the output's last activation."""


def _focal(gamma: float, alpha: float, last: str) -> Any:
    if last == "softmax":
        return keras.losses.CategoricalFocalCrossentropy(alpha=alpha, gamma=gamma)
    return keras.losses.BinaryFocalCrossentropy(
        apply_class_balancing=True, alpha=alpha, gamma=gamma, from_logits=last == "linear"
    )


def compile(
    model: Any,
    heads: Sequence[tuple[ModelOutput, str, dict[str, float], str]],
    key_values: Mapping[str, Value],
    position_of: Callable[[str], str],
) -> Any:
    """Compile a model with the losses of its outputs and the training keys of its text.

    Args:
        model: The Keras model, built.
        heads: Each output with its loss, the loss's factors, and the last activation.
        key_values: The values of the block ``train``.
        position_of: Returns file, line and column of a key, for errors.

    Returns:
        The model, or a wrapper around it that learns how its losses count.

    Raises:
        NotationError: Keras refuses a value.
    """
    with _errors_at(position_of, "optimizer"):
        optimizer = _optimizer(key_values, position_of)
    if (penalty := key_values.get("penalty")) is not None and isinstance(penalty, Call):
        with _errors_at(position_of, "penalty"):
            punish(model, valued(penalty))
    losses = {head.name: LOSSES[loss](factors, last) for head, loss, factors, last in heads}
    ignored = ignored_of(key_values)
    if ignored is not None:
        Masked = provided("Masked", position_of("ignore"))
        losses = {name: Masked(loss, ignored) for name, loss in losses.items()}
    with _errors_at(position_of, "metrics"):
        metrics = {
            head.name: _metrics(key_values.get("metrics"), "" if ignored is not None else loss)
            for head, loss, *_ in heads
        }
    weights_value = key_values.get("loss_weights")
    weights = plain(weights_value) if isinstance(weights_value, Items) else None
    if isinstance(weights_value, Word | Call) and weights_value.name == UNCERTAINTY:
        if len(heads) == 1:
            raise NotationError(
                f"{position_of('loss_weights')}: {UNCERTAINTY} weighs several losses, and there is one output"
            )
        Uncertain = provided("Uncertain", position_of("loss_weights"))
        first = (
            {arg.key: float(plain(arg.value)) for arg in weights_value.args}
            if isinstance(weights_value, Call)
            else None
        )
        with _errors_at(position_of, "loss_weights"):
            model = Uncertain(model, first=first)
    with _errors_at(position_of, "loss_weights"):
        if weights is not None and len(weights) != len(heads):
            raise ValueError(f"{len(weights)} numbers for {len(heads)} outputs")
        if len(heads) == 1:
            name = heads[0][0].name
            model.compile(optimizer, losses[name], metrics=metrics[name], loss_weights=weights)
        else:
            weight_of_output = None if weights is None else dict(zip(losses, weights, strict=True))
            model.compile(optimizer, losses, metrics=metrics, loss_weights=weight_of_output)
    return model


def punish(model: Any, penalty: Any) -> None:
    """Add a penalty (regularizer) to each weight tensor that has none, except biases and the scales of normalizations."""
    for weight in model.trainable_weights:
        if len(weight.shape) > 1 and weight.regularizer is None:
            weight.regularizer = penalty


def _optimizer(key_values: Mapping[str, Value], position_of: Callable[[str], str]) -> Any:
    value, rate, clipping = key_values["optimizer"], key_values.get("learning_rate"), key_values.get("clipping")
    assert isinstance(value, Word | Call)
    options = {arg.key: valued(arg.value) for arg in value.args} if isinstance(value, Call) else {}
    if isinstance(rate, Number):
        options["learning_rate"] = rate.value
    if isinstance(clipping, Number):
        options["global_clipnorm"] = float(clipping.value)
    if value.name.casefold() == "rlion":
        return provided("Rlion", position_of("optimizer"))(**options)
    kinds = {name.casefold(): kind for name, kind in vars(keras.optimizers).items() if isinstance(kind, type)}
    if value.name.casefold() not in kinds:
        raise ValueError(f"keras.optimizers has no {value.name}")
    return kinds[value.name.casefold()](**options)


def _metrics(value: Value | None, loss: str) -> list[Any]:
    if value is None:
        return usual_metrics(loss)
    metrics = value.values if isinstance(value, Items) else (value,)
    return [
        valued(metric) if isinstance(metric, Call) else _checked_metric(plain(metric))
        for metric in metrics
        if plain(metric) is not None
    ]


def _checked_metric(metric: Any) -> Any:
    """Return a metric's name after checking it. Keras would check it only in the first training step."""
    if metric not in BY_LOSS:
        try:
            keras.metrics.get(metric)
        except ValueError:
            names = [name for name in dir(keras.metrics) if not name.startswith("_")]
            matches = difflib.get_close_matches(str(metric), [*BY_LOSS, *names], 1)
            suggestion = f", did you mean {matches[0]!r}?" if matches else ""
            raise ValueError(f"there is no metric {metric!r}{suggestion}") from None
    return metric


def usual_metrics(loss: str) -> list[Any]:
    """Return the metrics to measure with a loss if the model text names none."""
    if loss in ("SCE", "CCE", "CCEL", "BCE", "FOL"):
        return ["accuracy"]
    return ["mae"] if loss in ("MSE", "HUL") else []


@contextmanager
def _errors_at(position_of: Callable[[str], str], key: str) -> Iterator[None]:
    """Convert an error of Keras within this context to a ``NotationError`` at the position of the key."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, NotationError):
            raise
        first = " ".join(str(error).split()).partition(" Received")[0][:300]
        raise NotationError(f"{position_of(key)}: Keras says: {first}") from error
