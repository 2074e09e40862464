"""The state of a model's optimizer: read, set, and taken into account at the end of a run. Runs where a model is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.errors import AppError
from ddlf.training.roles.optimizers import HELD_PATH, chain, innermost


def state_of(model: Any) -> list[Any]:
    """The variables of a model's optimizer, in Keras's order."""
    return [] if model.optimizer is None else [v for v in model.optimizer.variables if HELD_PATH not in v.path]


def read_optimizer(model: Any) -> Weights:
    """The state of a model's optimizer: its iterations, learning rate, and for each weight what it keeps, in Keras's order."""
    import keras

    return [keras.ops.convert_to_numpy(v) for v in state_of(model)]


def write_optimizer(model: Any, state: Weights) -> None:
    """Set what ``read_optimizer`` read, of an equal model.

    Raises:
        AppError: The optimizer is another one.
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
    """Names of the attributes, of a model and of its layers, that hold another optimizer than the one it is compiled with."""
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
    """The learning rates that can be set, of the model's optimizer or of each of several; none of one that follows a schedule."""
    return _rates_of(model.optimizer)


def _rates_of(optimizer: Any) -> list[Any]:
    optimizer = innermost(optimizer)
    if several := getattr(optimizer, "optimizers", ()):
        return [rate for one in several for rate in _rates_of(one)]
    rate = getattr(optimizer, "_learning_rate", None)
    return [rate] if hasattr(rate, "assign") else []


def read_rates(model: Any) -> list[float]:
    """The learning rates of a model's optimizer."""
    import keras

    return [float(keras.ops.convert_to_numpy(rate)) for rate in rate_variables(model)]


def write_rates(model: Any, rates: Sequence[float]) -> None:
    """Set what ``read_rates`` read, of an equal model."""
    for variable, rate in zip(rate_variables(model), rates, strict=True):
        variable.assign(rate)


def keeps_averages(model: Any) -> bool:
    """Whether the optimizer keeps averages of the weights, which take their place when training ends (``use_ema``)."""
    return bool(getattr(innermost(model.optimizer), "use_ema", False))


@contextlib.contextmanager
def no_final_averages(model: Any) -> Iterator[None]:
    """Let ``fit`` end without putting averages in the place of the weights: a round is not the end of training."""
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
    """What a run's last weights become: with ``use_ema`` the mean of the slots' averages, else they stay.

    Args:
        model: Model of this side; its weights and its optimizer are changed.
        weights: After the last round.
        optimizers: State of each slot's optimizer after it.
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
