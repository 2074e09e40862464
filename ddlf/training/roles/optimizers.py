"""Access to Keras optimizers that wrap other optimizers. Importing this module does not import Keras."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
