"""The exchange ``sharded``: its settings, and the code that it uses on the master and on workers.

Runs everywhere; imports no heavy modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ddlf.training.spec import Refusal, RunSpec
from ddlf.training.strategy import Exchange, Loop, WeightContext

if TYPE_CHECKING:
    from ddlf.algorithms.merge import Rule
    from ddlf.algorithms.outer import OuterOptimizer
    from ddlf.training.exchanges.carrier import WeightSource
    from ddlf.training.exchanges.states import SlotStates
    from ddlf.training.slot.parts import Kept
    from ddlf.training.slot.task import SlotState


@dataclass(frozen=True)
class Sharded(Exchange):
    """Each worker merges a slice of all updates and gives it to the others.

    The result has the same bits as with ``star``, but no data of the size of the model passes through the master in a
    round. The master receives the model for checkpoints and after the last round.
    """

    name: ClassVar[str] = "sharded"
    strategies: ClassVar[tuple[str, ...]] = ("sync",)
    about: ClassVar[str] = "updates merged in slices on the workers"
    same_bits_as: ClassVar[str] = "star"
    role: ClassVar[str] = "ddlf.training.exchanges.sharded.replica:ShardedReplica"

    def loop(self, merge: Rule, outer: OuterOptimizer, balance: str) -> Loop:
        """Return the master's training loop for synchronous rounds whose updates stay on the workers."""
        from ddlf.training.exchanges.sharded.master import ShardedRounds

        return ShardedRounds(merge=merge, outer=outer, balance=balance, codec=str(self.weights_codec))

    def weights(self, weight_context: WeightContext) -> WeightSource:
        """Return the object that gives the master the weights, whose slices are on the workers."""
        from ddlf.training.exchanges.members import Members
        from ddlf.training.exchanges.sharded.plan import EXCHANGE

        members = Members(
            weight_context.run, weight_context.crew, weight_context.cluster, weight_context.lossless, EXCHANGE
        )
        local = weight_context.spec.local
        if local.optimizer_state == "averaged" or local.rule.steers or weight_context.fragments:
            # Slots begin with means, or with their own weights: the master reads and sends them.
            members.restoring = None
        return members

    def states(
        self, weight_context: WeightContext, source: WeightSource, states: list[SlotState], parts: Mapping[str, Kept]
    ) -> SlotStates:
        """Return the object that manages the states of the slots, which stay on the workers."""
        from ddlf.training.exchanges.sharded.states import ShardedStates

        return ShardedStates(
            weight_context.run,
            weight_context.crew,
            states,
            parts,
            weight_context.spec.exchange.codec.name,
            source.restoring,
        )

    def refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield an error for each rule that needs whole updates or weights in one place."""
        from ddlf.algorithms.outer import OUTER
        from ddlf.training.exchanges.sharded.ranges import fits

        outer, weights = spec.outer, spec.exchange.weights_codec
        is_builtin = type(outer) in {type(OUTER.read(name)) for name in OUTER.names}
        needs_whole = "needs whole updates or tensors, but with exchange='sharded' each worker has only slices"
        is_foreign = "is not a rule of DDLF, and workers find the rule by its name"
        yield Refusal(
            not (is_builtin and fits(outer)),
            f"outer={str(outer)!r} {needs_whole if is_builtin else is_foreign}",
            "use a rule that steps each value by itself, such as 'nesterov' or 'fedadam', or exchange='star'",
        )
        yield Refusal(
            weights.delta,
            f"weights_codec={str(weights)!r} encodes the difference to the weights of each slot, "
            "but with exchange='sharded' slots hold nothing: all begin with the same weights",
            "use 'bfloat16', 'float16' or 'float32', or exchange='star'",
        )
