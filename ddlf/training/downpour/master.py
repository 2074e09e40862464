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
from dataclasses import dataclass, field
from typing import ClassVar

from ddlf.algorithms.codec import Float32, Outward
from ddlf.algorithms.push_rules import Adagrad, Pushed
from ddlf.algorithms.staleness import Inverse, Staleness
from ddlf.training.downpour.serving import Serving
from ddlf.training.evaluation import to_its_end
from ddlf.training.exchanges.members import ShardsThere
from ddlf.training.rounds import end_all
from ddlf.training.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Downpour:
    """Replicas push gradients to shards of the weights.

    Args:
        push_rule: How a push steps a shard.
        staleness: What is left of the step of a stale one.
        weights_codec: How weights travel to replicas.
        n_fetch: Steps between two fetches.
        n_push: Steps between two pushes.
        replicas: K; None for one in each slot.
        shards: S; None for one on each worker that may have some.
        shard_cut: ``"equal"`` slices of the weights, or where ``"layers"`` end.
        shard_workers: How many workers have the shards, and train no slot; None for those that train.
        copies: Of each shard on other workers; None for one, where there is another worker.
        softsync: With n, ``floor(K / n)`` pushes make one step; None for each by itself.
        warm_start: Steps of the shards before others than the first replica begin; None for some.
        max_staleness: Rounds that a slot may be ahead of the slowest one; None for no limit.
    """

    push_rule: Pushed = field(default_factory=Adagrad)
    staleness: Staleness = field(default_factory=Inverse)
    weights_codec: Outward = field(default_factory=lambda: Outward(Float32()))
    n_fetch: int = 1
    n_push: int = 1
    replicas: int | None = None
    shards: int | None = None
    shard_cut: str = "equal"
    shard_workers: int | None = None
    copies: int | None = None
    softsync: int | None = None
    warm_start: int | None = None
    max_staleness: int | None = None

    backups: ClassVar[bool] = False
    """Nobody waits for a slot that takes long."""

    async def train(self, run: Run) -> None:
        """Train until every slot has done its rounds or the run is to end; the master ends with the weights."""
        there = run.exchange.weights_out
        assert isinstance(there, ShardsThere)
        serving = Serving(run, there, self)
        watching = asyncio.ensure_future(serving.watch())
        try:
            async for reply in run.arrivals(bound=self.max_staleness, gate=serving.may_begin):
                await serving.committed(reply)
        finally:
            await end_all([watching])
            await there.close()
            await to_its_end(serving.settle())
