from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from ddlf.algorithms.push_rules import Cadence
from ddlf.training.strategies.downpour.client import LARGE, FetchedRange, ModelReplica, Owners

LONG = 1e9
"""Seconds, longer than any wait of a test."""


class Shard:
    """A stand-in for a shard. It records each call, and answers fetches while ``open`` is set."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.verbs: list[str] = []
        self.news = asyncio.Event()
        self.open = asyncio.Event()

    async def ask(self, worker: int, role: str, verb: str, *arguments: Any) -> Any:
        self.verbs.append(verb)
        self.news.set()
        if verb == "push":
            return 0, 0
        await self.open.wait()
        weights, rest = np.zeros(self.size, np.float32), np.zeros(0, np.float32)
        counters = {"version": 0, "received": 0, "round": 0, "number": -1, "epoch": 1, "safe": 0}
        return list(FetchedRange(weights, rest, **counters))

    async def hears(self, count: int) -> list[str]:
        while len(self.verbs) < count:
            self.news.clear()
            await self.news.wait()
        return self.verbs


def replica_of(shard: Shard) -> ModelReplica:
    owners = Owners(shard.ask, 1, [2], [1], [((0, shard.size), (0, 0))])
    return ModelReplica(id=0, life=1, round=0, steps=9, owners=owners, cadence=Cadence(), numbers=[0], epochs=[1])


async def stepped(shard: Shard, waited_s: float) -> ModelReplica:
    """Return a replica that has pushed after a step whose fetch took ``waited_s``. Its next fetch has no answer yet."""
    replica = replica_of(shard)
    shard.open.set()
    taking = asyncio.ensure_future(replica.take(None, 0.0))
    await shard.hears(1)
    await taking
    shard.open.clear()  # the fetch that has begun is asked after this line
    await shard.hears(2)
    replica.done, replica._waited_s = 1, waited_s
    await replica.push(np.zeros(shard.size, np.float32), np.zeros(0, np.float32))
    return replica


async def test_large_push_waits_for_the_fetch_of_the_next_step() -> None:
    shard = Shard(LARGE + 1)
    replica = await stepped(shard, 0.0)
    for _ in range(20):  # by then, all work is done that does not wait for an answer
        await asyncio.sleep(0)
    assert shard.verbs == ["fetch", "fetch"]
    shard.open.set()
    assert await shard.hears(3) == ["fetch", "fetch", "push"]
    replica.end()


@pytest.mark.parametrize(
    ("size", "waited_s"),
    [(LARGE, 0.0), (LARGE + 1, LONG)],
    ids=["small", "of a replica that waits longer than it computes"],
)
async def test_other_pushes_wait_for_no_fetch(size: int, waited_s: float) -> None:
    shard = Shard(size)
    replica = await stepped(shard, waited_s)
    assert await shard.hears(3) == ["fetch", "fetch", "push"]
    replica.end()
