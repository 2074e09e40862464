"""Streaming: one fragment of the weights is exchanged per round. This part keeps the weights of each slot.

``ddlf.algorithms.outer`` has the rule. A task has the last round that merged each fragment, and the fragments that
come back from its round. From this, master and workers compute the tensors that travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.outer import Streaming, tensors_of
from ddlf.algorithms.weights import Weights, is_float
from ddlf.training.slot.part import Kept, Left, SlotPart, SlotPlan, SlotRound
from ddlf.training.slot.task import OWN, Task


def changed(task: Task, since: int, like: Weights, lossless: Sequence[bool]) -> list[int]:
    """Return the numbers of the tensors whose global values have changed since a round.

    Args:
        task: A task that exchanges fragments.
        since: Number of the round, from 0.
        like: Arrays with the shapes of the model's weights.
        lossless: For each tensor, whether it is untrained. Untrained tensors travel with every fragment.
    """
    parts = [part for part, number in enumerate(task.merged) if number >= since]
    return tensors_of(parts, like, [not exact for exact in lossless], len(task.merged))


def exchanged(task: Task, like: Weights, lossless: Sequence[bool]) -> list[int] | None:
    """Return the numbers of the tensors whose updates come back; None for all."""
    if not task.merged:
        return None
    return tensors_of(task.wanted, like, [not exact for exact in lossless], len(task.merged))


class OwnFragments(SlotPart):
    """The slot's own weights, followed by the number of the round that left them."""

    name = OWN
    kept_with = "outer", "streaming"

    def begin(self, round: SlotRound, weights: Weights, left: Left | None) -> Weights:
        """Begin with the slot's own weights, mixed with the fragments that were merged since its last round.

        Untrained weights have the global values.
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
        """Return the update of the global weights: the global weights minus the slot's own."""
        task, weights, begun = round.task, round.weights, round.begun
        if not task.merged:
            return update, []
        round.tensors = exchanged(task, weights, round.exact)
        floats = [is_float(w) for w in weights]
        # The difference is exactly zero if the slot began with the global values: then the update is unchanged.
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
