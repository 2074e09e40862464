"""The star exchange of a run with ``secure_aggregation``. Runs everywhere; ``Star.for_data`` imports it if it is needed.

``Star.for_data`` replaces the star exchange by it. So no other code on the master asks whether updates have masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from ddlf.privacy.secure_sum import LEAST, MOST
from ddlf.privacy.weighted_sum import check_update_limit
from ddlf.training.exchanges.masked.rule import BySamples, Rule, rule_of
from ddlf.training.spec import Data, Refusal
from ddlf.training.strategy import Exchange, Loop, WeightContext

if TYPE_CHECKING:
    from ddlf.algorithms.merge import Rule as MergeRule
    from ddlf.algorithms.outer import OuterOptimizer
    from ddlf.training.exchanges.carrier import WeightSource


@dataclass(frozen=True)
class Masked(Exchange):
    """Updates go to the master under masks, which cancel each other in the sum. Weights come from the master.

    Args:
        rule: How updates are added up.
    """

    name: ClassVar[str] = "star"
    role: ClassVar[str] = "ddlf.training.exchanges.masked.replica:MaskedReplica"

    rule: Rule = field(default_factory=BySamples)

    @classmethod
    def of(cls, exchange: Exchange, data: Data) -> Self:
        """Return it with the settings of another exchange, and the rule that the settings of the data choose."""
        values = {setting.field: getattr(exchange, setting.field) for setting in exchange.settings()}
        if data.update_limit is not None:
            check_update_limit(data.update_limit)
        rule = rule_of(limit=data.update_limit, clip=data.update_clip, noise=data.noise_multiplier)
        return cls(**values, rule=rule)

    def loop(self, merge: MergeRule, outer: OuterOptimizer, balance: str) -> Loop:
        """Return the master's training loop, whose rounds end with a secure sum."""
        from ddlf.training.exchanges.masked.master import MaskedRounds

        return MaskedRounds(outer=outer, rule=self.rule)

    def weights(self, weight_context: WeightContext) -> WeightSource:
        """Return the object that supplies the weights for tasks, whose replies have no update."""
        from ddlf.training.exchanges.carrier import StarWeights

        source = StarWeights(str(self.weights_codec), weight_context.lossless)
        source.stays = True
        return source

    def worker_refusals(self, workers: int, one_at_a_time: bool, slots: int) -> Iterator[Refusal]:
        """Yield an error for too few or too many workers: each of them is a member of each sum."""
        yield Refusal(
            workers < LEAST,
            f"secure_aggregation=True needs {LEAST} workers, and there {'is' if workers == 1 else 'are'} {workers}: "
            "with two, each could subtract its own update from the sum",
            "start more workers, or leave out secure_aggregation",
        )
        yield Refusal(
            workers > MOST,
            f"secure_aggregation=True adds up the updates of {MOST} workers at most, and there are {workers}",
            "use fewer workers, or leave out secure_aggregation",
        )
