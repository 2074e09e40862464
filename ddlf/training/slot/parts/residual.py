"""The residual of a slot's codec."""

from __future__ import annotations

from ddlf.algorithms.weights import Weights
from ddlf.training.context import App
from ddlf.training.slot.model import TrainableModel
from ddlf.training.slot.part import Kept, Left, SlotPart, SlotPlan, SlotRound
from ddlf.training.slot.task import RESIDUAL
from ddlf.training.slot.transfer import send_update


class Residual(SlotPart):
    """The residual: the sum of the codec's errors in the slot's updates so far, for each tensor.

    It is added to the next update (error feedback).
    """

    name = RESIDUAL

    def __init__(self, app: App, model: TrainableModel) -> None:
        self._residual: Left | None = None

    def begin(self, round: SlotRound, weights: Weights, left: Left | None) -> Weights:
        self._residual = left
        return weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        """Encode the update for the network. After a change to an exact codec, the old residual is sent in full."""
        round.encoded, residual, round.codec_error = send_update(
            round.task.codec, update, round.exact, self._residual, round.tensors
        )
        return update, residual

    @classmethod
    def kept(cls, plan: SlotPlan) -> Kept | None:
        return Kept() if plan.spec.exchange.codec.biased else None
