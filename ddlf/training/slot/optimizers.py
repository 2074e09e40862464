"""Reads and sets the state of a model's optimizer, and tells its schedule the position of a slot in the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.errors import AppError
from ddlf.training.slot.distribution import scope_of
from ddlf.training.slot.transfer import transfer


def build_optimizer(model: Any) -> None:
    """Create the variables of a model's optimizer, if it has one without variables."""
    if model.optimizer is not None and not model.optimizer.built:
        with scope_of(model):
            model.optimizer.build(model.trainable_variables)


def state_of(model: Any) -> list[Any]:
    """Return the variables of a model's optimizer, such as momenta, in Keras's order."""
    return [] if model.optimizer is None else [v for v in model.optimizer.variables if HELD_PATH not in v.path]


def read_optimizer(model: Any) -> Weights:
    """Return the optimizer's state in Keras's order: iterations, learning rate, and its arrays for each weight."""
    return transfer().read(state_of(model))


def write_optimizer(model: Any, state: Weights) -> None:
    """Set the optimizer's state to the one that ``read_optimizer`` returned for an equal model.

    Raises:
        AppError: The optimizer differs.
    """
    variables = state_of(model)
    if [tuple(v.shape) for v in variables] != [array.shape for array in state]:
        raise AppError(
            f"the optimizer's state has {len(state)} arrays, here it has {len(variables)} of other shapes",
            hint="create the same model on the master and on every worker",
        )
    transfer().write(variables, state)


def other_optimizers(model: Any) -> list[str]:
    """Return the attributes of a model and its layers that contain optimizers besides the compiled one."""
    compiled = list(chain(model.optimizer))
    attributes = []
    for layer in (model, *model._flatten_layers()):
        for name, value in vars(layer).items():
            several = value if isinstance(value, list | tuple) else [value]
            attributes += [
                name
                for candidate in several
                if hasattr(candidate, "apply_gradients") and all(candidate is not optimizer for optimizer in compiled)
            ]
    return list(dict.fromkeys(attributes))


def rate_variables(model: Any) -> list[Any]:
    """Return the Keras variables of the learning rates, one for each optimizer of the model.

    An optimizer with a schedule has no such variable.
    """
    return _rates_of(model.optimizer)


def _rates_of(optimizer: Any) -> list[Any]:
    optimizer = innermost(optimizer)
    if several := getattr(optimizer, "optimizers", ()):
        return [rate for part in several for rate in _rates_of(part)]
    rate = getattr(optimizer, "_learning_rate", None)
    return [rate] if hasattr(rate, "assign") else []


def read_rates(model: Any) -> list[float]:
    """Return the current learning rates of a model's optimizers."""
    import keras

    return [float(keras.ops.convert_to_numpy(rate)) for rate in rate_variables(model)]


def write_rates(model: Any, rates: Sequence[float]) -> None:
    """Set the learning rates to the ones that ``read_rates`` returned for an equal model."""
    for variable, rate in zip(rate_variables(model), rates, strict=True):
        variable.assign(rate)


def keeps_averages(model: Any) -> bool:
    """Return whether the optimizer keeps averages that replace the weights when training ends (``use_ema``)."""
    return bool(getattr(innermost(model.optimizer), "use_ema", False))


@contextlib.contextmanager
def no_final_averages(model: Any) -> Iterator[None]:
    """Keep ``fit`` from replacing the weights by their averages at its end.

    A round is not the end of training.
    """
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
    """Return a run's final weights.

    With ``use_ema`` they are the mean of the slots' averages. Otherwise the weights stay unchanged.

    Args:
        model: The master's model. Its weights and its optimizer are changed.
        weights: Weights after the last round.
        optimizers: State of each slot's optimizer after the last round.
    """
    states = [state for state in optimizers if state]
    if not keeps_averages(model) or not states:
        return weights
    build_optimizer(model)
    sums = [np.zeros(array.shape, np.float64) for array in weights]
    for state in states:
        model.set_weights(weights)
        write_optimizer(model, state)
        model.optimizer.finalize_variable_values(model.trainable_weights)
        for total, array in zip(sums, model.get_weights(), strict=True):
            total += array
    return [(total / len(states)).astype(array.dtype) for total, array in zip(sums, weights, strict=True)]


HELD_PATH = "ddlf_held"
"""Part of the paths of some optimizer variables. Each round sets these variables again, so they do not belong to the
state."""


def chain(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and the optimizers that it wraps, outermost first.

    Keras's ``LossScaleOptimizer`` and the wrappers of ``ddlf.extras`` have an inner optimizer.
    """
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers, which changes the weights. Return None for None."""
    return [None, *chain(optimizer)][-1]


def unwrapped(model: Any) -> Any:
    """Return the user's model, if this one is a wrapper around it that weighs its losses."""
    return getattr(model, "wrapped_model", model)


def restarts(optimizer: Any) -> bool:
    """Return whether the learning rate follows a schedule of Keras that starts again whenever its optimizer does."""
    rate = getattr(innermost(optimizer), "_learning_rate", None)
    if not callable(rate):  # a number or a variable; runs without Keras must not import Keras here
        return False
    import keras

    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return is_schedule and not getattr(rate, "follows_the_run", False)


class Steps(NamedTuple):
    """How far a slot's optimizer is in the run, in numbers of steps, as the run is planned.

    Args:
        before: Steps before a round.
        after: Steps after it.
        total: S, steps in the whole run.
        epochs: Local epochs in the whole run.
    """

    before: int
    after: int
    total: int
    epochs: int


def followers(optimizer: Any) -> list[Any]:
    """Return the parts of an optimizer that must know how far the run is: its schedule, and optimizers around it.

    Such a part sets ``follows_the_run``. It reads how far the run is from ``position``. ``plan(steps, epochs)`` gives it
    a fixed number of steps instead. A schedule with a warm-up has ``warm(total, epochs)``, which returns the warm-up's
    steps.
    """
    parts = [*chain(optimizer), getattr(innermost(optimizer), "_learning_rate", None)]
    return [part for part in parts if getattr(part, "follows_the_run", False)]


class RunPosition:
    """How far a slot (a share of the training) is in its run.

    Schedules and other parts of an optimizer that follow the run read it.

    It is a variable of the slot's optimizer. A round sets the variable when it begins, so the step is not compiled
    again. JAX passes the variable to the step like all others. The variable is not part of the optimizer's state: the
    plan of the run determines it on every worker.

    Args:
        optimizer: A built optimizer.
        parts: The parts that follow the run, one or more.
    """

    def __init__(self, optimizer: Any, parts: list[Any]) -> None:
        self._optimizer, self._followers = innermost(optimizer), parts
        self._variable = self._optimizer.add_variable((5,), name=f"{HELD_PATH}_place", dtype="float32")
        for part in parts:
            part.position = self._variable

    @classmethod
    def of(cls, optimizer: Any) -> RunPosition | None:
        """Return a position in the run for an optimizer; None if no part of the optimizer depends on it."""
        return cls(optimizer, parts) if optimizer is not None and (parts := followers(optimizer)) else None

    def set(self, steps: Steps, steps_made: int | None = None) -> None:
        """Set how far the slot is in its run, at the beginning of a round.

        Args:
            steps: Steps of the round.
            steps_made: Number of steps that the slot will make, stretched to the planned number; None if it makes the
                planned number.
        """
        planned = steps.after - steps.before
        stretch = planned / steps_made if steps_made else 1.0
        start = int(np.asarray(self._optimizer._iterations))
        warm = next((part.warm(steps.total, steps.epochs) for part in self._followers if hasattr(part, "warm")), 0.0)
        self._variable.assign([start, steps.before, stretch, max(steps.total, 1), warm])


def read_position(position: Any, iterations: Any) -> tuple[Any, Any, Any]:
    """Return how far the run is, for a schedule: the step, from 1, of S steps, S, and the steps of the warm-up.

    It computes these floats from the position's variable and the optimizer's own steps in this round.
    """
    import keras

    start, before, stretch, total, warm = (position[number] for number in range(5))
    step = before + (keras.ops.cast(iterations, "float32") + 1 - start) * stretch
    return step, total, warm


def continue_schedule(optimizer: Any) -> None:
    """Let the optimizer's Keras schedule, if it has one, continue from round to round.

    The optimizer restarts in each round, and so would its schedule.
    """
    if restarts(optimizer):
        inner = innermost(optimizer)
        inner.learning_rate = _continued(inner._learning_rate)


def _continued(schedule: Any) -> Any:
    """Return a schedule that is called with the slot's step in the run.

    The original one would be called with the optimizer's step in the round.
    """
    import keras

    class ContinuedSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
        follows_the_run = True
        position: Any = None  # the position of the slot; see ``RunPosition``

        def __call__(self, step: Any) -> Any:
            if self.position is not None:
                step = keras.ops.cast(keras.ops.round(read_position(self.position, step)[0] - 1), step.dtype)
            return schedule(step)

        def get_config(self) -> dict[str, Any]:
            return {"schedule": schedule}  # Keras requires it; only workers have this schedule, and they save no model

    return ContinuedSchedule()
