"""A worker's end of Downpour: the shards that it owns, where all are, and the replicas of a slot as its round begins. Runs in the executor."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.flat_weights import Rows
from ddlf.algorithms.push_rules import Cadence
from ddlf.algorithms.ranges import Slice
from ddlf.algorithms.replica_turns import turns
from ddlf.algorithms.weights import Weights
from ddlf.errors import DDLFError, ProtocolError
from ddlf.training.checkpoints.slices import PUSHED, WEIGHTS, part_name, write_if_seen
from ddlf.training.downpour.client import ModelReplica
from ddlf.training.downpour.copying import Copies, keep_copied
from ddlf.training.downpour.owners import Ask, Owners, shard_of
from ddlf.training.downpour.server import Shard
from ddlf.training.exchanges.peers import Unreached
from ddlf.training.roles.restored import Restored, shard_of_parts
from ddlf.training.slot.task import Task

OF_SHARDS = ("begin", "resume", "fetch", "push", "safe", "values")
"""What a shard is asked for by other workers."""


class End(Restored):
    """A worker's end of Downpour: the shards that it owns, and where all of them are.

    Args:
        me: Number of this worker.
        ask: Asks others.
        rows: Gives the rows of the model, when it is to be written into a checkpoint.
    """

    def __init__(self, me: int, ask: Ask, rows: Callable[[], Rows] | None = None) -> None:
        super().__init__()
        self.rows = rows
        self.shards: dict[int, Shard] = {}
        self.copies = Copies()
        self.owners = Owners(me, self.shards, ask)
        self._ask = ask
        self._copying: dict[int, asyncio.Task[None]] = {}

    async def own(self, epoch: int, shard: int, facts: dict[str, Any], falls: Sequence[Sequence[int]] = ()) -> None:
        """Own a shard from now on; see ``Shard.made``. With ``restored`` its values are in a slice of a checkpoint that has come here before."""
        if "restored" in facts:
            assert self.rows is not None
            how = facts["part"], facts["names"], self.restored.pop(shard), facts["restored"]
            facts = {**facts, **await asyncio.to_thread(shard_of_parts, self.rows(), *how)}
            facts["part"] = facts["part"][0]
        await self._let_go(shard)
        one = self.shards[shard] = Shard.made(facts, epoch, falls)
        self._copying[shard] = asyncio.ensure_future(keep_copied(one, shard, self._ask))

    async def arrange(
        self, number: int, owners: list[int], parts: list[Any], epochs: list[int], copies: list[list[Any]]
    ) -> None:
        """Hear where the shards are and who is to have copies; see ``Owners``.

        Args:
            number: How often the master has said so; what comes late is nothing.
            owners, parts, epochs: As attributes of ``Owners``.
            copies: Of each shard as ``Shard.holders``.
        """
        mine = self.owners
        if number < mine.arranged:
            return
        mine.arranged, mine.parts = number, [((a, b), (c, d)) for (a, b), (c, d) in parts]
        holders = [tuple((worker, opened) for worker, opened in one) for one in copies]
        mine.arrange(owners, epochs)
        here = {shard for shard, one in enumerate(holders) if mine.me in dict(one)}
        self.copies.only(here, epochs)
        for shard, one in list(self.shards.items()):
            if epochs[shard] > one.epoch or (epochs[shard] == one.epoch and owners[shard] != mine.me):
                await self._let_go(shard)
            else:
                await one.copy_to(holders[shard])

    async def snapshot(self, epoch: int, shard: int) -> dict[str, Any]:
        """All that a shard is; see ``Shard``."""
        return await shard_of(self.shards, epoch, shard).snapshot()

    async def mark(self, epoch: int, shard: int, moment: int) -> None:
        """Keep the values of now; see ``Shard``."""
        await shard_of(self.shards, epoch, shard).mark(moment)

    async def marked(self, moment: int, others: Sequence[Any]) -> Weights | None:
        """The weights that all shards have marked.

        Args:
            moment: What the master calls it.
            others: What is on no shard, by its place; None for what is.

        Returns:
            None if not all of them can be had.
        """
        assert self.rows is not None
        try:
            found = await self.owners.each(lambda shard: self.owners.of(shard, "values", moment))
        except (DDLFError, Unreached):
            return None
        if not all(found):
            return None
        trained, rest = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return self.rows().weights(trained, rest, others)

    async def write(self, epoch: int, shard: int, part: Any, names: Sequence[str], place: dict[str, Any]) -> Any:
        """Write all that a shard is into a checkpoint.

        Args:
            epoch: Of the shard.
            shard: Which, from 0.
            part: Its slices of both rows.
            names: Paths of the weights.
            place: Where.

        Returns:
            What ``write_if_seen`` does; ``by``; and the numbers of ``shard_parts``.
        """
        facts = await shard_of(self.shards, epoch, shard).snapshot()
        assert self.rows is not None
        parts, numbers = shard_parts(self.rows(), part, names, facts)
        return {**await asyncio.to_thread(write_if_seen, place, parts), "by": self.owners.me, **numbers}

    async def versions(self) -> list[Any]:
        """Numbers of the shards that are here, the steps of each, and of each replica its round and number of the last push there."""
        return [
            [number, shard.version, [[replica, last.round, last.number] for replica, last in shard.last.items()]]
            for number, shard in self.shards.items()
        ]

    async def take_over(self, epoch: int, shard: int, falls: list[list[int]], whole: bool) -> list[list[int]]:
        """Own a shard from now on of which there is a copy here; or again one that nobody else has got.

        Args:
            epoch: From now on.
            shard: Which, from 0.
            falls: Those of before; see ``Shard``.
            whole: Whether its last owner has handed over all that it had.

        Returns:
            All falls.

        Raises:
            AppMissing: There is no copy.
        """
        if shard in self.shards:
            await self.shards[shard].open(epoch)
            return falls
        facts = self.copies.take(epoch, shard)
        falls = falls if whole else [*falls, [epoch, facts["received"]]]
        await self.own(epoch, shard, facts, falls)
        return falls

    async def release(self, epoch: int, shard: int, following: int, to: list[int]) -> str:
        """Hand all that a shard is to another worker, which takes it over then, and to those that have copies.

        Args:
            epoch: Until now.
            shard: Which, from 0.
            following: Epoch from then on.
            to: The other worker, and behind it those.

        Returns:
            Why that one did not get it, in which case it stays; empty if it did.
        """
        one = shard_of(self.shards, epoch, shard)
        facts, is_over = await one.close(), False
        sending = [asyncio.ensure_future(self._ask(worker, "copy", following, shard, facts)) for worker in to]
        try:
            await asyncio.wait(sending)
            error = sending[0].exception()
            is_over = error is None
            return "" if error is None else str(error).partition("\n")[0]
        finally:
            if not is_over:
                await one.open(epoch)
            for sent in sending:
                sent.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    async def shard(self, epoch: int, shard: int, verb: str, *arguments: Any) -> Any:
        """What another worker asks of a shard.

        Raises:
            ProtocolError: A shard is not asked for that.
        """
        if verb not in OF_SHARDS:
            raise ProtocolError(f"a shard is asked for {', '.join(OF_SHARDS)}, and not for {str(verb)[:40]!r}")
        return await getattr(shard_of(self.shards, epoch, shard), verb)(*arguments)

    async def copy(self, epoch: int, shard: int, facts: dict[str, Any]) -> None:
        """Keep a copy of another worker's shard; see ``Copies``."""
        self.copies.keep(epoch, shard, facts)

    async def close(self) -> None:
        """Own nothing any more."""
        for shard in list(self.shards):
            await self._let_go(shard)

    async def _let_go(self, shard: int) -> None:
        one, copying = self.shards.pop(shard, None), self._copying.pop(shard, None)
        if one is not None:
            await one.close()
        if copying is not None:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)

    async def replicas(self, task: Task, steps: list[int], cadence: Cadence) -> list[ModelReplica]:
        """The replicas of a slot, as its round begins.

        Args:
            task: The round; its weights say who the replicas are.
            steps: Of each.
            cadence: When each fetches and pushes.
        """
        told = task.weights
        ids, life = told["replicas"], told["life"]
        epochs = list(self.owners.epochs)
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
                epochs=list(epochs),
            )
            for place, (id, count) in enumerate(zip(ids, steps, strict=True))
        ]


def shard_parts(
    rows: Rows, part: tuple[Slice, Slice], names: Sequence[str], facts: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All that a shard is, as it is in a slice of a checkpoint.

    Args:
        rows: Of the model's weights.
        part: Its slices of both rows.
        names: Paths of the weights.
        facts: From ``Shard.snapshot``.

    Returns:
        Arrays by name; and what is no array, with how many rows its rule keeps as ``kept``.
    """
    found = {}
    for one, row, places in zip(part, (facts["weights"], facts["rest"]), (rows.trained, rows.rest), strict=True):
        for i, low, values in rows.slices(one, row, places):
            found[part_name(WEIGHTS, low, f"{i:04d} {names[i]}")] = values
    for number, row in enumerate(facts["state"]):
        found[part_name(PUSHED, part[0][0], f"{number:04d}")] = row
    numbers = {name: facts[name] for name in ("version", "received", "count", "factors", "last")}
    return found, {**numbers, "kept": len(facts["state"])}


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
    """What the master is told of a round's pushes and fetches, and of each shard how many pushes are lost with it."""
    return {
        "pushes": [[one.id, *push] for one in replicas for push in one.pushes],
        "fetches": [[one.id, *fetch] for one in replicas for fetch in one.seen],
        "lost": [list(lost) for one in replicas for lost in one.lost.items()],
    }
