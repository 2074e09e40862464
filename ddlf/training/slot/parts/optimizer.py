"""The state of a slot's optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddlf.algorithms.weights import Weights, mean_of
from ddlf.training.registry import strategies
from ddlf.training.slot.part import Kept, Left, SlotPart, SlotPlan, SlotRound
from ddlf.training.slot.task import OPTIMIZER, SlotState, Task


class OptimizerState(SlotPart):
    """Variables of the model's optimizer, in Keras's order: iterations, learning rate, momenta.

    With ``optimizer_state="averaged"``, all slots begin a round with the mean of the states after the last round.
    """

    name = OPTIMIZER

    def is_needed(self, task: Task, state: SlotState) -> bool:
        """Return True: a slot without a state begins with a fresh optimizer."""
        return True

    def begin(self, round: SlotRound, weights: Weights, left: Left | None) -> Weights:
        round.model.begin(round.task, left)
        return weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        return update, round.model.optimizer_state(round.task) if self.name in round.task.keep else None

    @classmethod
    def kept(cls, plan: SlotPlan) -> Kept | None:
        """Return how slots keep the optimizer's state.

        Return None with the gradient exchange, whose optimizer is on the master, and in Downpour, whose replicas have
        another optimizer.
        """
        kind = plan.spec.local.optimizer_state
        if kind == "fresh" or plan.spec.exchange.one_step or not plan.spec.train.keeps_optimizer:
            return None
        averaged = kind == "averaged"
        stays = kind == "stays" or (plan.sharded and (averaged or not keeps_little(plan.optimizer)))
        return Kept(
            back=not stays, copied=kind in ("kept", "averaged"), mean=mean_of if averaged else None, shared=averaged
        )

    @classmethod
    def goes_on(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        return bool(now["optimizer_state"] != "fresh" and strategies()[now["mode"]].keeps_optimizer)


def keeps_little(optimizer: Mapping[str, Any]) -> bool:
    """Return whether the state of an optimizer is a few numbers, rather than as large as the weights.

    Args:
        optimizer: The optimizer of the compiled model, as ``describe_optimizer`` returns it.
    """
    more = ("momentum", "use_ema", "gradient_accumulation_steps")
    return optimizer.get("optimizer") in ("SGD", None, "NoneType") and not any(
        optimizer.get(f"optimizer {name}") not in (None, False, 0, "None") for name in more
    )
