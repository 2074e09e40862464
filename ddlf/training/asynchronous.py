"""Asynchronous training. Runs on the master.

Each of the K slots loops on its own (Phan and Do 2023, Algorithm 3)::

    read the current weights w and their version; send them with the slot's partition of this round
    on arrival of its update g:  w <- outer(w, g / K),  version <- version + 1

By default ``outer`` subtracts. One with momentum has one velocity for all slots, which each update moves by its share of a round::

    v <- m v + g / K,  w <- w - rate (g / K + m v)

An update that is rejected is dropped: it is told by an event, its samples are not in the ledger, and its slot goes on with its next round.

A slot whose worker is lost begins its round again on another one, with the weights of then; what was lost was never applied.

The staleness of an update is the number of merges applied between reading the weights and applying it. All of this runs on one event loop, so
a merge needs no lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ddlf.algorithms.outer import OuterOptimizer, Subtract
from ddlf.algorithms.weights import divided
from ddlf.training.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous:
    """Each update counts when it comes, by its share of a round.

    Args:
        outer: How a share changes the weights.
    """

    outer: OuterOptimizer = field(default_factory=Subtract)

    backups: ClassVar[bool] = False
    """Nobody waits for a slot that takes long."""

    async def train(self, run: Run) -> None:
        """Train until every slot has done its rounds or the run is to end."""
        run.state.setdefault("outer", self.outer.init(run.weights))
        async for reply in run.arrivals():
            # The current weights, not those that it started from: others may have been merged meanwhile.
            run.state["outer"], weights = self.outer.update(
                run.state["outer"], run.weights, divided(reply.update, reply.task.slots), run.facts.trainable
            )
            await run.commit(weights, [reply])
