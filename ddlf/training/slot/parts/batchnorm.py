"""Weights that each slot keeps apart from the others' for the whole run, while the global model has their mean. On master and workers.

A slot begins its round with the values that its round before has left. Its update is the global values minus its own after it, so that the plain mean
of updates makes the global ones the mean of the slots' own: these are tested and saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.training.slot.task import Task

SMALL_BATCH = 16
"""Statistics of fewer samples are so noisy that a model with batch normalization learns worse (Wu, He 2018, arXiv:1803.08494, figure 1)."""


def begin(weights: Weights, own: Sequence[Any] | None) -> Weights:
    """The weights that a slot begins its round with.

    Args:
        weights: As it would have them else.
        own: Those that its round before has left, None in the place of each that is not kept apart; None before its first round.
    """
    return [w if mine is None else mine for w, mine in zip(weights, own or [None] * len(weights), strict=True)]


def end(task: Task, weights: Weights, begun: Weights, update: Weights) -> tuple[Weights, list[Any]]:
    """What goes to the master, and what the slot keeps.

    Args:
        task: The round.
        weights: The global weights that came with it.
        begun: What the slot began with.
        update: ``begun`` minus the weights after it.
    """
    own = [
        np.asarray(b - u, b.dtype) if i in task.apart else None
        for i, (b, u) in enumerate(zip(begun, update, strict=True))
    ]
    sent = [
        u if mine is None else np.asarray(w - mine, w.dtype) for w, u, mine in zip(weights, update, own, strict=True)
    ]
    return sent, own


def norm_layers(model: Any) -> list[Any]:
    """Layers that normalize by batches: those of Keras, and subclasses."""
    return [
        one
        for one in model._flatten_layers()
        if any(kind.__name__ == "BatchNormalization" for kind in type(one).__mro__)
    ]


def batch_norms(model: Any) -> tuple[int, ...]:
    """Places of the weights of layers that normalize by batches, moving statistics, scale and offset, among ``model.weights``."""
    theirs = {id(weight) for layer in norm_layers(model) for weight in layer.weights}
    return tuple(place for place, weight in enumerate(model.weights) if id(weight) in theirs)


def warning(rows: int, labels_differ: bool, setting: str) -> str:
    """What there is to say of a model with batch normalization; empty for nothing.

    Args:
        rows: Samples in the batches of the slot that has the smallest.
        labels_differ: Whether slots have samples of other labels.
        setting: Value of ``batchnorm``.
    """
    if rows < SMALL_BATCH:
        return (
            f"it normalizes by batches, and a slot's have {rows} samples: statistics of fewer than {SMALL_BATCH} are noise; use larger batches, "
            "fewer slots, or layers that normalize each sample (GroupNormalization, LayerNormalization)"
        )
    if labels_differ and setting == "averaged":
        return "it normalizes by batches, whose statistics differ between slots of other labels: batchnorm='local' keeps them apart"
    return ""
