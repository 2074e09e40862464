"""Optimizers around optimizers, from the outermost to the one that steps. Runs where a model is; imports nothing of Keras."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

HELD_PATH = "ddlf_held"
"""In the paths of variables of an optimizer that a round sets anew: they are no state of it."""


def chain(optimizer: Any) -> Iterator[Any]:
    """An optimizer, and those inside of it: of one that scales the loss, and of ours."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def innermost(optimizer: Any) -> Any:
    """The one that steps; None of None."""
    return [None, *chain(optimizer)][-1]


def bare(model: Any) -> Any:
    """A model without the one around it that weighs its losses."""
    return model.inner if type(model).__name__ == "Uncertain" else model
