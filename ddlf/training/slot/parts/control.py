"""The control variate of a slot, for local rules that have one (SCAFFOLD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.local_rules import mean_control
from ddlf.algorithms.weights import Weights
from ddlf.errors import ProtocolError
from ddlf.training.context import App
from ddlf.training.slot.model import TrainableModel
from ddlf.training.slot.part import Kept, Left, SlotPart, SlotPlan, SlotRound
from ddlf.training.slot.task import CONTROL, SlotState, Task


class Controls(SlotPart):
    """The slot's control variate: an estimate of its gradients, which corrects its steps. None for untrained weights.

    ``ddlf.algorithms.local_rules`` has the formulas. A task has the mean of all slots' control variates
    (``Task.control``).
    """

    name = CONTROL
    finite = True
    kept_with = "local_rule", "scaffold"

    def __init__(self, app: App, model: TrainableModel) -> None:
        self._rule = model.rule
        self._control: Left | None = None

    def is_needed(self, task: Task, state: SlotState) -> bool:
        """Return whether the run has a local rule: rules without control variates are applied here, too."""
        return task.local != "plain" or super().is_needed(task, state)

    def begin(self, round: SlotRound, weights: Weights, left: Left | None) -> Weights:
        self._control = left
        if round.trains:
            self._rule.begin(round.task.local, weights, left, round.task.control)
        return weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        """Compute the new control variate. A round that was ended early keeps the old one, since it may have no step."""
        if round.trains and not round.stopped:
            self._control = self._rule.left(update)
        return update, self._control or [None] * len(update)

    def epoch_begins(self) -> None:
        self._rule.note()

    @classmethod
    def kept(cls, plan: SlotPlan) -> Kept | None:
        """Return how slots keep it. In the sharded exchange it stays on the workers, which compute the mean."""
        if not plan.spec.local.rule.steers:
            return None
        return Kept(back=not plan.sharded, copied=True, mean=_mean)

    @classmethod
    def goes_on(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        return bool(before.get("local_rule") == now["local_rule"])

    @classmethod
    def begins_with(cls, mean: Left, slots: int, like: Weights) -> dict[str, Any]:
        of_slots = zip(mean, like, strict=True)
        return {
            "control": [np.asarray(one / slots, w.dtype) if slots and one is not None else one for one, w in of_slots]
        }

    @classmethod
    def check(cls, left: Left, like: Weights, worker: str) -> None:
        known = [(array, weight) for array, weight in zip(left, like, strict=False) if array is not None]
        fits = (
            isinstance(array, np.ndarray) and (array.shape, array.dtype) == (weight.shape, weight.dtype)
            for array, weight in known
        )
        if len(left) != len(like) or not all(fits) or not all(np.isfinite(array).all() for array, _ in known):
            raise ProtocolError("left a control that does not fit the model, or is not finite", worker=worker)


def _mean(controls: Sequence[Left | None], samples: Sequence[int]) -> Left:
    return mean_control(controls) or []
