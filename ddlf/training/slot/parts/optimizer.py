"""The state of a slot's optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddlf.algorithms.weights import Weights, mean_of
from ddlf.training.slot.part import Kept, Left, SlotPart, SlotPlan, SlotRound
from ddlf.training.slot.task import OPTIMIZER
from ddlf.training.spec import installed


class OptimizerState(SlotPart):
    """Variables of the optimizer that the model is compiled with, in Keras's order: iterations, learning rate, momenta.

    With ``optimizer_state="averaged"`` all slots of a round begin with the mean of the states that the round before
    ended with.
    """

    name = OPTIMIZER

    def begin(self, round: SlotRound, weights: Weights, left: Left | None) -> Weights:
        round.model.begin(round.task, left)
        return weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        return update, round.model.optimizer_state(round.task) if self.name in round.task.keep else None

    @classmethod
    def kept(cls, plan: SlotPlan) -> Kept | None:
        """In gradient exchange the optimizer is on the master, and replicas of Downpour have another one."""
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
        return bool(now["optimizer_state"] != "fresh" and installed()[now["mode"]].keeps_optimizer)


def keeps_little(optimizer: Mapping[str, Any]) -> bool:
    """Return whether an optimizer keeps a few numbers, rather than as many as the weights have.

    Args:
        optimizer: Optimizer of the compiled model, as ``describe_optimizer`` returns it.
    """
    more = ("momentum", "use_ema", "gradient_accumulation_steps")
    return optimizer.get("optimizer") in ("SGD", None, "NoneType") and not any(
        optimizer.get(f"optimizer {name}") not in (None, False, 0, "None") for name in more
    )
