"""Batch normalization weights that each slot keeps to itself (``batchnorm="local"``). The global model has their mean.

A slot begins its round with its own values from its last round. Its update is the global values minus its own values
after the round. So the mean of the updates makes the global values the mean of the slots' values. The global values are
evaluated and saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.training.slot.part import Kept, Left, SlotPart, SlotPlan, SlotRound
from ddlf.training.slot.task import APART

SMALL_BATCH = 16
"""Statistics of fewer samples are so noisy that a model with batch normalization learns worse.

Source: Wu and He 2018, arXiv:1803.08494, figure 1.
"""


class LocalBatchNorm(SlotPart):
    """The slot's own values of the batch normalization weights; None for each other weight."""

    name = APART
    kept_with = "batchnorm", "local"

    def begin(self, round: SlotRound, weights: Weights, left: Left | None) -> Weights:
        return [w if own is None else own for w, own in zip(weights, left or [None] * len(weights), strict=True)]

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        left = [
            np.asarray(b - u, b.dtype) if i in round.task.apart else None
            for i, (b, u) in enumerate(zip(round.begun, update, strict=True))
        ]
        sent = [
            u if own is None else np.asarray(w - own, w.dtype)
            for w, u, own in zip(round.weights, update, left, strict=True)
        ]
        return sent, left

    @classmethod
    def kept(cls, plan: SlotPlan) -> Kept | None:
        return Kept(back=True) if plan.spec.batchnorm == "local" else None

    @classmethod
    def goes_on(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        return bool(now["batchnorm"] == "local")


def norm_layers(model: Any) -> list[Any]:
    """Return the batch normalization layers: Keras's ``BatchNormalization`` and its subclasses."""
    return [
        one
        for one in model._flatten_layers()
        if any(kind.__name__ == "BatchNormalization" for kind in type(one).__mro__)
    ]


def batch_norms(model: Any) -> tuple[int, ...]:
    """Return the places of batch normalization weights in ``model.weights``: moving statistics, scale and offset."""
    theirs = {id(weight) for layer in norm_layers(model) for weight in layer.weights}
    return tuple(place for place, weight in enumerate(model.weights) if id(weight) in theirs)


def warning(rows: int, labels_differ: bool, setting: str) -> str:
    """Return a warning about a model with batch normalization; "" if there is none.

    Args:
        rows: Samples in a batch of the slot with the smallest batches.
        labels_differ: Whether slots have samples of different labels.
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
