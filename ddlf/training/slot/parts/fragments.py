"""Weights that are exchanged one fragment per round (streaming): the weights of each slot, and the tensors that travel.

``ddlf.algorithms.streaming`` is the rule. A task says in which round each fragment was merged last, and which fragments
come back from this one. Master and workers compute from that which tensors travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.streaming import Streaming, tensors_of
from ddlf.algorithms.weights import Weights, is_float
from ddlf.training.slot.part import Kept, Left, SlotPart, SlotPlan, SlotRound
from ddlf.training.slot.task import OWN, Task


def changed(task: Task, since: int, like: Weights, lossless: Sequence[bool]) -> list[int]:
    """Return the numbers of the tensors whose global values have changed since a round.

    Args:
        task: A task that exchanges fragments.
        since: Number of the round, from 0.
        like: Arrays with the shapes of the model's weights.
        lossless: Whether each tensor is not trained: those travel with every fragment.
    """
    parts = [part for part, number in enumerate(task.merged) if number >= since]
    return tensors_of(parts, like, [not exact for exact in lossless], len(task.merged))


def exchanged(task: Task, like: Weights, lossless: Sequence[bool]) -> list[int] | None:
    """Return the numbers of the tensors whose updates come back; None for all."""
    if not task.merged:
        return None
    return tensors_of(task.wanted, like, [not exact for exact in lossless], len(task.merged))


class OwnFragments(SlotPart):
    """The slot's own weights, and behind them the number of the round that left them."""

    name = OWN
    kept_with = "outer", "streaming"

    def begin(self, round: SlotRound, weights: Weights, left: Left | None) -> Weights:
        """Continue from the slot's own weights, with the fragments that were merged since mixed in.

        Weights that are not trained are the global ones.
        """
        task, exact = round.task, round.exact
        if not task.merged or not left:
            return weights
        *values, number = left
        fresh, begun = set(changed(task, int(number), weights, exact)), []
        for i, (value, w) in enumerate(zip(values, weights, strict=True)):
            if i in fresh and task.alpha and not exact[i]:
                value = np.asarray(task.alpha * value + (1 - task.alpha) * w, w.dtype)
            begun.append(w if i in fresh and (not task.alpha or exact[i]) else value)
        return begun

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        """Return the update of the global weights: these minus the slot's own."""
        task, weights, begun = round.task, round.weights, round.begun
        if not task.merged:
            return update, []
        round.tensors = exchanged(task, weights, round.exact)
        floats = [is_float(w) for w in weights]
        # The difference is exactly zero where the slot began with the global values: then this is the update as it is.
        behind = [
            np.asarray(u + (w - b), w.dtype) if f else u
            for w, b, u, f in zip(weights, begun, update, floats, strict=True)
        ]
        own = [np.asarray(b - u, b.dtype) if f else b for b, u, f in zip(begun, update, floats, strict=True)]
        return behind, [*own, np.asarray(task.round)]

    @classmethod
    def kept(cls, plan: SlotPlan) -> Kept | None:
        return Kept() if isinstance(plan.spec.outer, Streaming) else None

    @classmethod
    def goes_on(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        return same
