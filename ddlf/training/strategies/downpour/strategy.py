"""The strategy Downpour SGD. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddlf.training.spec import RunSpec
from ddlf.training.strategies.downpour.settings import DownpourSettings
from ddlf.training.strategy import CommonStep, Loop, WeightContext

if TYPE_CHECKING:
    from ddlf.training.context import App
    from ddlf.training.exchanges.carrier import WeightSource


@dataclass(frozen=True)
class Downpour(DownpourSettings):
    """Downpour SGD: replicas push gradients to servers on the workers, which keep the weights."""

    def loop(self, spec: RunSpec, step: CommonStep | None) -> Loop:
        """Return the master's training loop, in which replicas push to servers."""
        from ddlf.training.strategies.downpour.groups import GroupedReplicas
        from ddlf.training.strategies.downpour.master import Replicas

        if (plan := getattr(spec.exchange, "plan", None)) is not None:
            return GroupedReplicas(self, spec.exchange.weights_codec, plan)
        return Replicas(self, spec.exchange.weights_codec)

    def weights(self, weight_context: WeightContext) -> WeightSource:
        """Return the object through which the master gets the weights: the servers on the workers."""
        from ddlf.training.exchanges.members import Members
        from ddlf.training.roles import SERVERS

        return Members(
            weight_context.run, weight_context.crew, weight_context.cluster, weight_context.lossless, SERVERS
        )

    def check_model(self, app: App) -> None:
        """Raise an error if the model's optimizer has features that Downpour's replicas cannot use."""
        from ddlf.training.strategies.downpour.replica import check_optimizer

        check_optimizer(app.model.optimizer)
