"""Reads and sets the state of a model's optimizer, and applies its averages at the end of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.errors import AppError


def state_of(model: Any) -> list[Any]:
    """Return the variables of a model's optimizer, in Keras's order."""
    return [] if model.optimizer is None else [v for v in model.optimizer.variables if HELD_PATH not in v.path]


def read_optimizer(model: Any) -> Weights:
    """Return the optimizer's state in Keras's order: iterations, learning rate, and its arrays for each weight."""
    import keras

    return [keras.ops.convert_to_numpy(v) for v in state_of(model)]


def write_optimizer(model: Any, state: Weights) -> None:
    """Set state from ``read_optimizer`` of an equal model.

    Raises:
        AppError: The optimizer differs.
    """
    variables = state_of(model)
    if [tuple(v.shape) for v in variables] != [array.shape for array in state]:
        raise AppError(
            f"the optimizer's state has {len(state)} arrays, here it has {len(variables)} of other shapes",
            hint="create the same model on the master and on every worker",
        )
    for variable, array in zip(variables, state, strict=True):
        variable.assign(array)


def other_optimizers(model: Any) -> list[str]:
    """Return the attributes of a model and its layers that hold optimizers other than the compiled one."""
    known = list(chain(model.optimizer))
    found = []
    for layer in (model, *model._flatten_layers()):
        for name, value in vars(layer).items():
            several = value if isinstance(value, list | tuple) else [value]
            found += [
                name for one in several if hasattr(one, "apply_gradients") and all(one is not mine for mine in known)
            ]
    return list(dict.fromkeys(found))


def rate_variables(model: Any) -> list[Any]:
    """Return the variables with learning rates, one for each optimizer of the model. Schedules have none."""
    return _rates_of(model.optimizer)


def _rates_of(optimizer: Any) -> list[Any]:
    optimizer = innermost(optimizer)
    if several := getattr(optimizer, "optimizers", ()):
        return [rate for one in several for rate in _rates_of(one)]
    rate = getattr(optimizer, "_learning_rate", None)
    return [rate] if hasattr(rate, "assign") else []


def read_rates(model: Any) -> list[float]:
    """Return the learning rates of a model's optimizer."""
    import keras

    return [float(keras.ops.convert_to_numpy(rate)) for rate in rate_variables(model)]


def write_rates(model: Any, rates: Sequence[float]) -> None:
    """Set learning rates from ``read_rates`` of an equal model."""
    for variable, rate in zip(rate_variables(model), rates, strict=True):
        variable.assign(rate)


def keeps_averages(model: Any) -> bool:
    """Return whether the optimizer keeps averages that replace the weights when training ends (``use_ema``)."""
    return bool(getattr(innermost(model.optimizer), "use_ema", False))


@contextlib.contextmanager
def no_final_averages(model: Any) -> Iterator[None]:
    """Keep ``fit`` from replacing the weights by their averages, because a round is not the end of training."""
    if not keeps_averages(model):
        yield
        return
    attributes = vars(model.optimizer)
    attributes["finalize_variable_values"] = lambda variables: None
    try:
        yield
    finally:
        del attributes["finalize_variable_values"]


def final_weights(model: Any, weights: Weights, optimizers: Sequence[Weights | None]) -> Weights:
    """Return a run's final weights: with ``use_ema`` the mean of the slots' averages, otherwise unchanged.

    Args:
        model: The master's model. Its weights and its optimizer are changed.
        weights: Weights after the last round.
        optimizers: State of each slot's optimizer after the last round.
    """
    states = [state for state in optimizers if state]
    if not keeps_averages(model) or not states:
        return weights
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    sums = [np.zeros(array.shape, np.float64) for array in weights]
    for state in states:
        model.set_weights(weights)
        write_optimizer(model, state)
        model.optimizer.finalize_variable_values(model.trainable_weights)
        for total, array in zip(sums, model.get_weights(), strict=True):
            total += array
    return [(total / len(states)).astype(array.dtype) for total, array in zip(sums, weights, strict=True)]


HELD_PATH = "ddlf_held"
"""Part of the paths of optimizer variables that each round sets again. They are not part of the state."""


def chain(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and its inner ones, outermost first.

    Keras's ``LossScaleOptimizer`` and the wrappers of ``ddlf.extras`` have an inner optimizer.
    """
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that steps the weights; None for None."""
    return [None, *chain(optimizer)][-1]


def unwrapped(model: Any) -> Any:
    """Return the user's model. A wrapper that weighs its losses has it in ``wrapped_model``."""
    return getattr(model, "wrapped_model", model)


def restarts(optimizer: Any) -> bool:
    """Return whether the learning rate is a Keras schedule that restarts together with its optimizer."""
    rate = getattr(innermost(optimizer), "_learning_rate", None)
    if not callable(rate):  # a number or a variable; runs without Keras must not import it here
        return False
    import keras

    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return is_schedule and not getattr(rate, "follows_the_run", False)
