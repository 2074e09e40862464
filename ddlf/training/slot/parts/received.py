"""The weights that a slot's worker received in the last round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddlf.algorithms.codec import Outward
from ddlf.algorithms.weights import Weights
from ddlf.training.slot.part import Kept, Left, SlotPart, SlotPlan, SlotRound
from ddlf.training.slot.task import HELD
from ddlf.training.slot.transfer import read_weights


class ReceivedWeights(SlotPart):
    """The global weights of the round.

    The next weights may come as a difference to them. The master knows them, so they never travel.
    """

    name = HELD
    travels = False

    def begin(self, round: SlotRound, weights: Weights, left: Left | None) -> Weights:
        round.weights = read_weights(round.task.weights, left, round.model.like)
        return round.weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        return update, round.weights

    @classmethod
    def kept(cls, plan: SlotPlan) -> Kept | None:
        return Kept() if plan.differences else None

    @classmethod
    def goes_on(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        return Outward.read(now["weights_codec"]).delta or str(now["outer"]).startswith("streaming")
