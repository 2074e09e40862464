"""Downpour SGD. Runs on the master, which sees no weights unless somebody looks.

K replicas, the slots' or several in each, train at their own pace; the weights are in shards on the workers (Dean et al. 2012, section 4.1)::

    give each shard its slice; let the replicas know where they are
    a slot's round: its replicas fetch from the shards and push to them, n_fetch and n_push steps apart, and train meanwhile
    a reply says which versions its fetches saw, and how stale its pushes were

A slot whose worker is lost is carried again by another one, which begins behind the last push that all shards have: each push counts once. The
weights come to the master at the end, and go into checkpoints from the shards.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddlf.training.downpour.serving import Serving
from ddlf.training.evaluation import to_its_end
from ddlf.training.exchanges.members import ShardsThere
from ddlf.training.rounds import end_all
from ddlf.training.run import Run

if TYPE_CHECKING:
    from ddlf.algorithms.codec import Outward
    from ddlf.training.spec import Downpour


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas push gradients to shards of the weights.

    Args:
        how: The settings of Downpour.
        weights_codec: How weights travel to replicas.
    """

    how: Downpour
    weights_codec: Outward

    def begin(self, run: Run) -> None:
        """Shards have the state of their rule."""

    async def train(self, run: Run) -> None:
        """Train until every slot has done its rounds or the run is to end; the master ends with the weights."""
        there = run.exchange.weights_out
        assert isinstance(there, ShardsThere)
        serving = Serving(run, there, self.how, self.weights_codec)
        watching = asyncio.ensure_future(serving.watch())
        try:
            async for reply in run.arrivals(bound=self.how.max_staleness, gate=serving.may_begin):
                await serving.committed(reply)
        finally:
            await end_all([watching])
            await there.close()
            await to_its_end(serving.settle())
