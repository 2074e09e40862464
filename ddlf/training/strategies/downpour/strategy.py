"""The strategy Downpour SGD. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddlf.training.spec import RunSpec
from ddlf.training.strategies.downpour.settings import DownpourSettings
from ddlf.training.strategy import CommonStep, Loop, Place

if TYPE_CHECKING:
    from ddlf.training.exchanges.carrier import WeightSource


@dataclass(frozen=True)
class Downpour(DownpourSettings):
    """Downpour SGD: replicas push gradients to servers on the workers, which keep the weights."""

    def loop(self, spec: RunSpec, step: CommonStep | None) -> Loop:
        """Return the loop with the replicas and the servers of the weights."""
        from ddlf.training.strategies.downpour.master import Replicas

        return Replicas(self, spec.exchange.weights_codec)

    def weights(self, place: Place) -> WeightSource:
        """Return the source of the weights: the servers."""
        from ddlf.training.exchanges.members import Members
        from ddlf.training.roles import SERVERS

        return Members(place.run, place.crew, place.cluster, place.lossless, SERVERS)

    def check_model(self, model: Any) -> None:
        """Refuse an optimizer that a replica cannot step with."""
        from ddlf.training.strategies.downpour.replica import check_optimizer

        check_optimizer(model.optimizer)
