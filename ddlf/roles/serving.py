"""A worker's end of Downpour: the shards that it owns, where all are, and the replicas of a slot as its round begins. Runs in the executor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ddlf.algorithms.pushed import Cadence
from ddlf.algorithms.turns import turns
from ddlf.errors import ProtocolError
from ddlf.roles.pushing import ModelReplica, Owners
from ddlf.roles.shard import Shards
from ddlf.roles.task import Task

OF_SHARDS = ("begin", "fetch", "push")
"""What a shard is asked for by other workers."""


class End:
    """A worker's end of Downpour: the shards that it owns, and where all of them are.

    Args:
        me: Number of this worker.
        ask: Asks others.
    """

    def __init__(self, me: int, ask: Any) -> None:
        self.shards = Shards()
        self.owners = Owners(me, self.shards, ask)

    async def own(self, epoch: int, shard: int, facts: dict[str, Any]) -> None:
        """Own a shard; see ``Shards``."""
        self.shards.own(epoch, shard, facts)

    async def arrange(self, epoch: int, owners: list[int], parts: list[Any]) -> None:
        """Hear where the shards are; see ``Owners``."""
        if epoch >= self.owners.epoch:
            self.owners.epoch, self.owners.owners = epoch, list(owners)
            self.owners.parts = [((a, b), (c, d)) for (a, b), (c, d) in parts]

    async def snapshot(self, epoch: int, shard: int) -> dict[str, Any]:
        """All that a shard is; see ``Shard``."""
        return await self.shards.of(epoch, shard).snapshot()

    async def versions(self) -> list[list[int]]:
        """Numbers of the shards that are here, and the steps of each."""
        return [[shard, version] for shard, version in self.shards.versions().items()]

    async def shard(self, epoch: int, shard: int, verb: str, *arguments: Any) -> Any:
        """What another worker asks of a shard.

        Raises:
            ProtocolError: A shard is not asked for that.
        """
        if verb not in OF_SHARDS:
            raise ProtocolError(f"a shard is asked for {', '.join(OF_SHARDS)}, and not for {str(verb)[:40]!r}")
        return await getattr(self.shards.of(epoch, shard), verb)(*arguments)

    async def replicas(self, task: Task, steps: list[int], cadence: Cadence) -> list[ModelReplica]:
        """The replicas of a slot, as its round begins.

        Args:
            task: The round; its weights say who the replicas are.
            steps: Of each.
            cadence: When each fetches and pushes.
        """
        told = task.weights
        ids, life, scripts = told["replicas"], told["life"], told["scripts"] or [None] * len(told["replicas"])
        numbers = await self.owners.each(lambda shard: self.owners.of(shard, "begin", ids, life, task.round))
        return [
            ModelReplica(
                id=id,
                life=life,
                round=task.round,
                steps=count,
                owners=self.owners,
                cadence=cadence,
                numbers=[int(of_shard[place]) for of_shard in numbers],
                script=script,
            )
            for place, (id, count, script) in enumerate(zip(ids, steps, scripts, strict=True))
        ]


def planned(task: Task, replicas: list[ModelReplica], batches: int) -> tuple[list[int], list[int]]:
    """Which replica makes each step of a slot's round, and with which batch.

    Args:
        task: The round.
        replicas: Of the slot.
        batches: Into which its samples are cut.

    Returns:
        For each step the place of the replica, and the number of the batch. A turn is as many steps as there are between two of which a fetch is
        taken or a push sent.
    """
    chance = np.random.Generator(np.random.PCG64([task.seed, task.round, task.slot, len(replicas)]))
    n_push = replicas[0].cadence.n_push
    length = math.gcd(replicas[0].cadence.n_fetch, n_push)
    order = turns([one.left for one in replicas], length, chance, alone=task.weights["alone"] * n_push)
    ends = np.cumsum([one.steps for one in replicas])
    following = [int(end) - one.left for end, one in zip(ends, replicas, strict=True)]
    chosen = []
    for place in order:
        chosen.append(following[place])
        following[place] += 1
    assert following[-1] == batches
    return order, chosen


def shares(batches: int, replicas: int) -> list[int]:
    """Batches of each replica: as many, or one less."""
    return [len(part) for part in np.array_split(np.arange(batches), replicas)]


def record(replicas: list[ModelReplica]) -> dict[str, Any]:
    """What the master is told of a round's pushes and fetches."""
    return {
        "pushes": [[one.id, *push] for one in replicas for push in one.pushes],
        "fetches": [[one.id, *fetch] for one in replicas for fetch in one.fetches],
    }
