"""The sharded exchange: its refusals and its halves. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ddlf.training.spec import Refusal, RunSpec
from ddlf.training.strategy import Exchange, Loop, Place

if TYPE_CHECKING:
    from ddlf.algorithms.merge import Rule
    from ddlf.algorithms.outer import OuterOptimizer
    from ddlf.training.exchanges.carrier import WeightSource


@dataclass(frozen=True)
class Sharded(Exchange):
    """Each worker merges a slice of all updates and gives it to the others."""

    name: ClassVar[str] = "sharded"
    strategies: ClassVar[tuple[str, ...]] = ("sync",)
    about: ClassVar[str] = "updates merged in slices on the workers"
    on_workers: ClassVar[bool] = True
    same_bits_as: ClassVar[str] = "star"
    role: ClassVar[str] = "ddlf.training.exchanges.sharded.replica:ShardedReplica"

    def loop(self, merge: Rule, outer: OuterOptimizer, balance: str) -> Loop:
        """Return the loop of synchronous training whose updates stay on the workers."""
        from ddlf.training.exchanges.sharded.master import ShardedRounds

        return ShardedRounds(merge=merge, outer=outer, balance=balance)

    def weights(self, place: Place) -> WeightSource:
        """Return the source of the weights: the workers, each with a slice."""
        from ddlf.training.exchanges.members import Members

        return Members(place.run, place.crew, place.cluster, place.lossless, codec=str(self.weights_codec))

    def refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield refusals of rules that need whole updates or weights in one place."""
        from ddlf.algorithms.outer import OUTER
        from ddlf.algorithms.ranges import fits

        outer, weights = spec.outer, spec.exchange.weights_codec
        known = type(outer) in {type(OUTER.read(name)) for name in OUTER.names}
        whole = "needs whole updates or tensors, but with exchange='sharded' each worker has only slices"
        own = "is not a rule of DDLF, and workers find the rule by its name"
        yield Refusal(
            not (known and fits(outer)),
            f"outer={str(outer)!r} {whole if known else own}",
            "use a rule that steps each value by itself, such as 'nesterov' or 'fedadam', or exchange='star'",
        )
        yield Refusal(
            weights.delta,
            f"weights_codec={str(weights)!r} encodes the difference to the weights of each slot, "
            "but with exchange='sharded' slots hold nothing: all begin with the same weights",
            "use 'bfloat16', 'float16' or 'float32', or exchange='star'",
        )
