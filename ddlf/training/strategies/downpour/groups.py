"""Downpour whose replicas are groups of workers, each with a part of the model. Runs on the master.

A slot is a group. Its parts train a round together, as ``ddlf.training.exchanges.split`` does, and each part fetches
and pushes the weights of its layers. No server has layers of two parts. If a worker is lost, its group begins again
behind the last push that all servers have, so each push counts once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddlf.algorithms.flat_weights import Rows
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import ConfigError
from ddlf.training.context import App
from ddlf.training.crew.recovery import end_all
from ddlf.training.evaluation.master import to_its_end
from ddlf.training.evaluation.model import EVALUATION_BATCH
from ddlf.training.exchanges.members import Link, Members
from ddlf.training.exchanges.split.master import Attempt, Done, Group
from ddlf.training.exchanges.split.orders import TrainedPart
from ddlf.training.exchanges.split.plan import Part, Plan
from ddlf.training.run import Run
from ddlf.training.slot.pushes import RoundPushes
from ddlf.training.slot.task import Reply, Task
from ddlf.training.strategies.arrivals import arrivals
from ddlf.training.strategies.downpour.client import PartEntry
from ddlf.training.strategies.downpour.master import Serving
from ddlf.training.strategies.downpour.state import Ranges

if TYPE_CHECKING:
    from ddlf.algorithms.codec import Outward
    from ddlf.training.strategies.downpour.settings import DownpourSettings


@dataclass(frozen=True, slots=True)
class GroupedReplicas:
    """The master's training loop of Downpour, whose replicas are groups of workers.

    Args:
        settings: The settings of Downpour.
        weights_codec: Codec of weights from servers to replicas.
        plan: How the model is cut.
    """

    settings: DownpourSettings
    weights_codec: Outward
    plan: Plan

    def begin(self, run: Run) -> None:
        """Do nothing before training: the servers have the state of the push rule."""

    async def train(self, run: Run) -> None:
        """Train until all groups have done their rounds or the run ends. Then fetch the final weights to the master."""
        members = run.exchange.weights_out
        assert isinstance(members, Members)
        serving = PartServing(run, members, self.settings, self.weights_codec, self.plan)
        groups = serving.groups = [ReplicaGroup(run, self.plan, serving, slot) for slot in range(run.slots)]

        async def carry(slot: int, number: int, part: Any, make: Callable[[], Task]) -> Reply:
            (reply,), _ = await groups[slot].carry([make()])
            return reply

        watching = asyncio.ensure_future(serving.watch())
        try:
            async for reply in arrivals(run, bound=self.settings.max_staleness, gate=serving.may_begin, carry=carry):
                await serving.committed(reply)
        finally:
            await end_all([watching])
            await members.close()
            await to_its_end(serving.fetch_final())


class PartServing(Serving):
    """The master's side of the servers, which have the layers of one part each.

    Args:
        run, members, settings, codec: Arguments of ``Serving``.
        plan: How the model is cut.

    Raises:
        ConfigError: Parts share weights, or there are fewer servers than parts.
    """

    def __init__(self, run: Run, members: Members, settings: DownpourSettings, codec: Outward, plan: Plan) -> None:
        check_plan(plan)
        self._plan = plan
        self.groups: Sequence[ReplicaGroup] = ()
        super().__init__(run, members, settings, codec)

    def cut(self, shards: int) -> list[Ranges]:
        """Divide the weights of each part among its servers."""
        self._shards_of = shards_of(self._rows, self._plan, shards, self._layers)
        return [ranges for part in self._shards_of for ranges in part]

    def shards(self, part: int) -> list[int]:
        """Return the numbers of the servers that have the weights of a part."""
        begin = sum(map(len, self._shards_of[:part]))
        return list(range(begin, begin + len(self._shards_of[part])))

    async def round_of(self, slot: int, number: int) -> PartEntry:
        """Begin a round of a slot's replica, or begin it again. Return the entry of its parts' orders, without shards."""
        entry = self.task_entry(slot, number)
        (id,) = entry.replicas
        epochs = list(self._placement.epochs)
        calls = (self._placement.call(shard, "begin", [id], entry.life, number) for shard in range(len(epochs)))
        numbers = [int(begun[0]) for begun in await asyncio.gather(*calls)]
        return PartEntry(id=id, life=entry.life, all=entry.all, numbers=numbers, epochs=epochs)

    def links(self) -> set[Link]:
        """Return the pairs of workers that call each other now.

        They are the pairs of a group, parts and the servers of their layers, and servers and their copies.
        """
        owners, pairs = self._placement.owners, set[Link]()
        for shard, (owner, _) in enumerate(owners):
            pairs.update(frozenset((owner, holder)) for holder, _ in self._placement.holders[shard])
        for group in self.groups:
            pairs |= group.links()
            for part, worker in group.workers().items() if owners else ():
                pairs.update(frozenset((worker, owners[shard][0])) for shard in self.shards(part))
        return pairs

    async def introduce(self, worker: ProxyWorker | None = None) -> None:
        """Introduce workers to each other that call each other now, after the servers have their places."""
        await self._members.reach(worker, self.links())
        await self._members.reach(worker, self.links())  # the first one may have given the servers their places

    async def looked(self) -> None:
        """Introduce the workers that have received servers or copies."""
        await self.introduce()

    async def _evaluated(
        self, worker: int, app: App, part: str, batch_size: int = EVALUATION_BATCH
    ) -> dict[str, float] | None:
        """Return None: no worker has the whole model, so the master evaluates."""
        return None


class ReplicaGroup(Group):
    """The workers that together carry one replica, each a part of it.

    Args:
        run: The run.
        plan: How the model is cut.
        serving: The master's side of the servers.
        slot: Number of the slot, from 0.
    """

    def __init__(self, run: Run, plan: Plan, serving: PartServing, slot: int) -> None:
        super().__init__(run, plan, slot, groups=run.slots)
        self._serving, self._slot = serving, slot
        self._begun: tuple[int, asyncio.Future[PartEntry]] | None = None

    def workers(self) -> dict[int, int]:
        """Return the number of the worker of each part in the current attempt."""
        return {part: worker.id for part, worker in self._attempt.workers.items()}

    def links(self) -> set[Link]:
        """Return the pairs of workers that exchange arrays in the current attempt."""
        return self._links_of(self._attempt)

    async def _prepare_worker(
        self, attempt: Attempt, part: int, worker: ProxyWorker, number: int
    ) -> tuple[None, dict[str, Any]]:
        """Introduce the group, and return the entry of a part's order about its weights, which are on servers."""
        async with self._reached:
            await self._serving.introduce(worker)
        if self._begun is None or self._begun[0] != attempt.number:
            self._begun = attempt.number, asyncio.ensure_future(self._serving.round_of(self._slot, number))
        entry = await asyncio.shield(self._begun[1])
        entry = replace(entry, shards=self._serving.shards(part))
        return None, entry.to_message()

    def _copy_of(self, attempt: Attempt, part: int) -> None:
        """Return None: the servers have the state."""

    async def _hand_back(self, number: int) -> None:
        """Do nothing if a worker leaves: the servers have the state."""

    def _make_reply(self, task: Task, parts: Sequence[Done[TrainedPart]], begin: float) -> Reply:
        pushed = [done.result.pushed or RoundPushes() for done in parts]
        return replace(
            super()._make_reply(task, parts, begin),
            pushed=RoundPushes(
                pushes=[joined(rows, 2) for rows in zip(*(of_part.pushes for of_part in pushed), strict=True)],
                fetches=[joined(rows, 1) for rows in zip(*(of_part.fetches for of_part in pushed), strict=True)],
                lost=[
                    (self._serving.shards(part)[shard], count)
                    for part, of_part in enumerate(pushed)
                    for shard, count in of_part.lost
                ],
            ),
        )


def joined(rows: Sequence[Sequence[int]], head: int) -> list[int]:
    """Return the facts of all servers about a push, or about a fetch, from the facts of each part's servers.

    Args:
        rows: For each part, ``head`` numbers that are the same for all; then for each server one number, once for
            fetches, twice for pushes.
        head: How many numbers are the same.
    """
    facts = [list(map(int, row[head:])) for row in rows]
    kinds = 2 if head == 2 else 1
    counts = [len(part_facts) // kinds for part_facts in facts]
    more = [
        part_facts[kind * n : (kind + 1) * n]
        for kind in range(kinds)
        for part_facts, n in zip(facts, counts, strict=True)
    ]
    return [*map(int, rows[0][:head]), *(value for part_facts in more for value in part_facts)]


def shards_of(rows: Rows, plan: Plan, shards: int, layers: Sequence[str] | None) -> list[list[Ranges]]:
    """Return for each part the ranges of its servers.

    Args:
        rows: Layout of the model's weights as rows.
        plan: How the model is cut.
        shards: Number of servers. Parts with more weights have more of them.
        layers: Layer name of each weight, if servers have whole layers; None otherwise.

    Raises:
        ConfigError: There are fewer servers than parts, or more than layers.
    """
    parts = [_rows_of(rows, part) for part in plan.parts]
    if shards < len(parts):
        raise ConfigError(
            f"shards={shards} are fewer than the {len(parts)} parts of the model, and each server has layers of one part",
            hint=f"set shards={len(parts)} or more, or leave it out",
        )
    sizes = [part.sizes[0] for part in parts]
    most = [
        size if layers is None else len({layers[i] for i in part.trained})
        for part, size in zip(parts, sizes, strict=True)
    ]
    counts = [1] * len(parts)
    for _ in range(shards - len(parts)):
        free = [part for part in range(len(parts)) if counts[part] < most[part]]
        counts[max(free or range(len(parts)), key=lambda part: sizes[part] / counts[part])] += 1
    ranges, begin, low = [], 0, 0
    for part, count in zip(parts, counts, strict=True):
        cut = part.cut(count, layers)
        ranges.append([((a + begin, b + begin), (c + low, d + low)) for (a, b), (c, d) in cut])
        begin, low = begin + part.sizes[0], low + part.sizes[1]
    return ranges


def _rows_of(rows: Rows, part: Part) -> Rows:
    own_weights = {*part.weights}
    return Rows(rows.like, [i for i in rows.trained if i in own_weights], [i for i in rows.rest if i in own_weights])


def check_plan(plan: Plan) -> None:
    """Raise an error for a cut whose parts do not have their own weights each.

    Raises:
        ConfigError: Names the problem.
    """
    if shared := sorted({index for part in plan.parts for index, _ in part.borrows}):
        raise ConfigError(
            f"the weight {plan.graph.model.weights[shared[0]].path!r} is used in two parts, and mode='downpour' pushes each weight once",
            hint="choose a cut that has all calls of its layer in one part, with split='layers:NAME,...'",
        )
    order = [index for part in plan.parts for index in part.weights]
    if order != sorted(order):
        raise ConfigError(
            "mode='downpour' needs parts whose weights follow each other in model.weights",
            hint="choose another cut with split='layers:NAME,...', or train in mode 'sync'",
        )
    trained = {id(weight) for weight in plan.graph.model.trainable_variables}
    weights = plan.graph.model.weights
    if empty := [part for part in plan.parts if not any(id(weights[index]) in trained for index in part.weights)]:
        raise ConfigError(
            f"part {empty[0].number + 1} of the model has no trained weights, and mode='downpour' needs some in each part",
            hint="choose another cut with split='layers:NAME,...', or train in mode 'sync'",
        )
