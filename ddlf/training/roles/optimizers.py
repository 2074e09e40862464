"""A Keras optimizer may contain another one. Runs where a model is; imports nothing of Keras."""

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
