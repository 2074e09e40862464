"""Weights of which a fragment is exchanged at a time: what a slot has of its own, and what travels. On master and workers, which come to the same.

``ddlf.algorithms.streaming`` is the rule. A task says in which round each fragment was merged last, and which of them come back from this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.streaming import tensors_of
from ddlf.algorithms.weights import Weights, is_float
from ddlf.training.slot.task import Task

Own = list[Any]
"""What a slot has of its own: its weights, and the number of the round that left them."""


def changed(task: Task, since: int, like: Weights, lossless: Sequence[bool]) -> list[int]:
    """Tensors whose global values are other ones than those that a round, from 0, began with.

    Args:
        task: One that exchanges fragments.
        since: Number of that round.
        like: Arrays with the shapes of the model's weights.
        lossless: Whether each is not trained: those come with every fragment.
    """
    parts = [part for part, number in enumerate(task.merged) if number >= since]
    return tensors_of(parts, like, [not exact for exact in lossless], len(task.merged))


def exchanged(task: Task, like: Weights, lossless: Sequence[bool]) -> list[int] | None:
    """Tensors whose updates come back; None for all."""
    if not task.merged:
        return None
    return tensors_of(task.wanted, like, [not exact for exact in lossless], len(task.merged))


def begin(task: Task, weights: Weights, own: Own | None, lossless: Sequence[bool]) -> Weights:
    """The weights that a slot goes on with: its own, with what was exchanged since mixed in.

    Args:
        task: The round.
        weights: The global ones.
        own: What its round before has left; None where nothing.
        lossless: Whether each is not trained: of those the global values are taken.
    """
    if not task.merged or not own:
        return weights
    *values, number = own
    fresh, begun = set(changed(task, int(number), weights, lossless)), []
    for i, (value, w) in enumerate(zip(values, weights, strict=True)):
        if i in fresh and task.alpha and not lossless[i]:
            value = np.asarray(task.alpha * value + (1 - task.alpha) * w, w.dtype)
        begun.append(w if i in fresh and (not task.alpha or lossless[i]) else value)
    return begun


def after(begun: Weights, update: Weights) -> Weights:
    """Weights after local training: those that it began with minus its update; what is no float stays."""
    return [np.asarray(b - u, b.dtype) if is_float(b) else b for b, u in zip(begun, update, strict=True)]


def end(task: Task, weights: Weights, begun: Weights, update: Weights) -> tuple[Weights, Own]:
    """What a slot's round has come to.

    Args:
        task: The round.
        weights: The global ones.
        begun: Those that it began with.
        update: Of local training: these minus those after it.

    Returns:
        The update of the global weights, and what the slot has of its own from now on.
    """
    if not task.merged:
        return update, []
    floats = [is_float(w) for w in weights]
    # The difference is exactly zero where the slot began with the global values: then this is the update as it is.
    behind = [
        np.asarray(u + (w - b), w.dtype) if f else u for w, b, u, f in zip(weights, begun, update, floats, strict=True)
    ]
    return behind, [*after(begun, update), np.asarray(task.round)]
