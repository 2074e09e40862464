"""A Keras optimizer may contain another one. Runs where a model is. Importing this module does not import Keras."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

HELD_PATH = "ddlf_held"
"""In the paths of the optimizer's variables that each round sets again: they are not part of its state."""


def chain(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those inside it, the outermost first: Keras's ``LossScaleOptimizer``, or one of ``ddlf.extras``."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that steps the weights; None for None."""
    return [None, *chain(optimizer)][-1]


def unwrapped(model: Any) -> Any:
    """Return the user's model where another model wraps it to weigh its losses. Such a wrapper has it in ``wrapped_model``."""
    return getattr(model, "wrapped_model", model)


def restarts(optimizer: Any) -> bool:
    """Return whether the learning rate is a Keras schedule that restarts together with its optimizer."""
    rate = getattr(innermost(optimizer), "_learning_rate", None)
    if not callable(rate):  # a number or a variable; runs without Keras must not import it here
        return False
    import keras

    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return is_schedule and not getattr(rate, "follows_the_run", False)
