"""The sharded synchronous exchange: slots' updates go from worker to worker, each of which merges and steps a slice. Runs on the master.

A round is that of ``ddlf.training.sync``, with the same bits; but updates stay on the workers that made them, and so does what comes of them::

    tell each slot which weights to begin with, by their generation; wait for all replies, which bring no update
    plan: who has which update, and which worker steps which slice; have these workers carry it out, all at the same time
    when a worker is lost meanwhile, have its slots carried again, and plan again

The master gets the weights where somebody looks at them: for a checkpoint, a test, and at the end. Every worker that stepped a slice has all of the
weights, and a copy of another one's part of the outer optimizer's state, so the loss of one loses nothing.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.check import Fault
from ddlf.algorithms.merge import Rule
from ddlf.algorithms.outer import OuterOptimizer
from ddlf.algorithms.shards import PIECE, Slice, cut, pieces, put, within
from ddlf.algorithms.weights import Weights
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import BadUpdate, ClusterTooSmall, ConfigError, ConnectError, DDLFError
from ddlf.events import Warned
from ddlf.roles.generation import Plan
from ddlf.roles.task import Reply, Task
from ddlf.training.evaluation import to_its_end
from ddlf.training.gather import unfit
from ddlf.training.recovery import LOSS, first_line
from ddlf.training.rounds import Elsewhere, Round
from ddlf.training.run import Run, end_all
from ddlf.training.there import Member, WeightsThere

HOLDERS = 2
"""Workers that the master gives the first weights; the others get them from these."""
NOTICED_S = 10.0
"""How long a worker that others do not reach has to be noticed as lost: longer, and it is the link between them."""
TRIES = 6
"""Attempts at one round, each of which met with the loss of another worker, or carries slots again after one."""
Gone = tuple[ProxyWorker, DDLFError | None] | None
"""A worker that was lost meanwhile, and how; or with None one that another one does not reach."""
PIECES = 16
"""Of each slice, if they are not too small: the last one cannot be given to the others before all updates of it have come, so the larger it is, the
longer links idle. ``docs/LAB.md`` has the figures."""
LEAST = 1 << 15
"""Values in a piece: fewer, and what it costs to ask for one is most of it."""
AT_ONCE = 8 * PIECE
"""Values that the master asks for at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where weights are, with the outer optimizer's state that belongs to them.

    Args:
        generation: What the workers call them.
        at: Workers that have all of the weights.
        state: Slices of the state, with the workers that have them, some of them twice.
    """

    generation: int
    at: Sequence[Member] = ()
    state: Sequence[tuple[Slice, Member]] = ()


class Sharded:
    """The exchange of one run.

    Args:
        run: The run.
        there: Where its tasks find their weights.
        merge: The merge rule.
        outer: The outer optimizer.
    """

    def __init__(self, run: Run, there: WeightsThere, merge: Rule, outer: OuterOptimizer) -> None:
        self._run = run
        self._there = there
        self._merge, self._outer = merge, outer
        self._role = there.role
        self._like = [np.broadcast_to(np.zeros((), w.dtype), w.shape) for w in run.weights]
        self._size = sum(w.size for w in run.weights)
        self._kept = len(run.state["outer"]) // max(len(self._like), 1)
        self._generations = itertools.count(1)
        self._now = Place(0)
        self._here: tuple[int, Weights, Weights] = (0, run.weights, run.state["outer"])  # generation, weights, state
        self._home = _snapshot(run.progress)
        there.begin = self._begin

    async def _begin(self) -> None:
        """See that some workers have the weights and the state; if none have, and they are here, give them to some.

        Raises:
            ClusterTooSmall: They were on workers that are lost.
        """
        alive = self._there.members()
        if any(one in alive for one in self._now.at) and self._parts(self._now, alive) is not None:
            return
        generation, weights, state = self._here
        if generation != self._now.generation:
            raise self._gone()
        for member, proxy in list(alive.items())[:HOLDERS]:
            try:
                await proxy.call(self._role, "hold", generation, weights, state)
            except LOSS:
                continue  # the crew will hear of it
            more = [((0, self._size), member)] if self._kept else []
            self._move(Place(generation, [*self._now.at, member], [*self._now.state, *more]))

    async def merged(self, tasks: Sequence[Task], replies: list[Reply]) -> tuple[list[Reply], Place]:
        """Have the workers make the next weights of the updates that these replies are of.

        Args:
            tasks: Those of the round.
            replies: One for each.

        Returns:
            The replies that count: those of slots that had to be carried again are others. And where the weights are.

        Raises:
            BadUpdate: An update cannot be merged.
            ConnectError: A worker does not get from another one what it asks for, though it reaches it.
            ClusterTooSmall: Too many were lost.
        """
        has = {reply.slot: self._member(reply.worker) for reply in replies}
        losses = 0
        while losses < TRIES:
            losses += 1
            alive = self._there.members()
            if lost := [task for task in tasks if has[task.slot] not in alive]:
                again = {reply.slot: reply for reply in await self._run.all(lost)}
                replies = [again.get(reply.slot, reply) for reply in replies]
                has |= {slot: self._member(reply.worker) for slot, reply in again.items()}
                continue
            await self._there.reach()
            if self._there.members().keys() != alive.keys():
                continue  # somebody was lost, or has come, meanwhile
            owners = sorted({member for member in has.values() if member is not None})[: self._size]
            plan = Plan(
                base=self._now.generation,
                generation=next(self._generations),
                updates=[(reply.slot, reply.worker, reply.samples) for reply in replies],
                owners=[number for number, _ in owners],
                state=[(*part, number) for part, (number, _) in self._parts(self._now, alive) or ()],
                copies=len(owners) > 1 and self._kept > 0,
                merge=str(self._merge),
                outer=str(self._outer),
                trainable=self._run.facts.trainable,
                names=self._run.facts.names,
                piece=min(PIECE, max(LEAST, self._size // (len(owners) * PIECES))),
            )
            gone = await self._carried_out(plan, {number: proxy for (number, _), proxy in alive.items()})
            if gone is None:
                slices = cut(self._size, len(owners))
                state = [*zip(slices, owners, strict=True)] if self._kept else []
                state += [*zip(slices, [*owners[1:], owners[0]], strict=True)] if plan.copies else []
                return replies, Place(plan.generation, owners, state)
            worker, error = gone
            if error is None:
                losses -= 1  # there are not so many links
            elif self._member(worker.id) in alive:
                slot = next((reply.slot for reply in replies if reply.worker == worker.id), replies[0].slot)
                self._run.crew.lose(worker, slot, error)
        raise ClusterTooSmall(
            f"workers were lost {TRIES} times while they exchanged one round", hint="look at the workers' terminals"
        )

    async def committed(self, place: Place, replies: list[Reply], *, looks: bool) -> None:
        """Make the weights that are somewhere the global ones.

        Args:
            place: Where they are.
            replies: What they came of.
            looks: Whether they are to be here, too.
        """
        weights: Weights = Elsewhere(
            partial(self._there.evaluated, place.at, place.generation), partial(self._weights_of, place)
        )
        if looks:
            weights, state = await self._brought(place)
            self._here = place.generation, weights, state
            self._run.state["outer"] = state
        before, version = self._now, self._run.version
        self._move(place)
        try:
            await self._run.commit(weights, replies)
        except BadUpdate:
            if self._run.version == version:
                self._move(before)
            raise
        if looks:
            self._home = _snapshot(self._run.progress)

    async def settle(self) -> None:
        """End with weights that are here: those of now, or if these are lost those of the last time, and nothing of the rounds since."""
        run, progress = self._run, self._run.progress
        if self._here[0] == self._now.generation:
            return
        try:
            progress.weights, run.state["outer"] = await self._brought(self._now)
        except DDLFError as error:
            reached = progress.round
            for one in dataclasses.fields(progress):
                setattr(progress, one.name, getattr(self._home, one.name))
            run.exchange.states.set_back(progress.states)
            why = f"the weights after round {reached} cannot be had ({first_line(error)}): what is left is that of round {progress.round}"
            run.crew.emit(Warned(about="model", why=why))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _move(self, place: Place) -> None:
        self._now = place
        self._there.generation, self._there.at = place.generation, place.at

    def _member(self, worker: int) -> Member | None:
        found = self._run.crew.member(worker)
        return None if found is None else (worker, found[1])

    def _parts(self, place: Place, alive: Collection[Member]) -> list[tuple[Slice, Member]] | None:
        """Who of those that are there has which slice of the state; None if a part of it is lost."""
        if not self._kept:
            return []
        try:
            return within((0, self._size), [one for one in place.state if one[1] in alive])
        except ConfigError:
            return None

    def _gone(self) -> ClusterTooSmall:
        return ClusterTooSmall(
            f"the weights after round {self._run.progress.round} were on workers that are lost",
            hint="resume from the last checkpoint; with checkpoint_every=1 no round is lost",
        )

    async def _carried_out(self, plan: Plan, workers: Mapping[int, ProxyWorker]) -> Gone:
        """Have all owners do their part.

        Args:
            plan: How the next weights are made.
            workers: Those that are there, by number.

        Returns:
            A worker that was lost meanwhile, and how, or with None, if only a link to it was; None if all is done.

        Raises:
            BadUpdate: An update cannot be merged, or what comes of them cannot be used.
            ConnectError: A worker does not get from another one what it asks for, though it reaches it.
        """
        message = dataclasses.asdict(plan)
        owners = [workers[owner] for owner in plan.owners]
        calls = {asyncio.ensure_future(one.call(self._role, "merge", message)): one for one in owners}
        waiting = set(calls)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    try:
                        found = call.result()
                    except LOSS as error:
                        return calls[call], error
                    if lost := await self._in_the_way(found, calls[call], workers):
                        return lost
            return None
        finally:
            await end_all(list(calls))

    async def _in_the_way(self, found: dict[str, Any], worker: ProxyWorker, workers: Mapping[int, ProxyWorker]) -> Gone:
        """Raise what a worker says was in the way, or return who was lost, or cannot be reached; None if nothing was."""
        if "bad" in found:
            raise BadUpdate(found["bad"])
        if "weights" in found:
            raise unfit(Fault(**found["weights"]), self._run.progress.round)
        if "peer" not in found:
            return None
        other = workers[found["peer"]]
        if (lost := await self._loss_of(other)) is not None:
            return other, lost
        if found["link"]:
            await self._there.links.cut(found["me"], found["peer"], found["why"])
            return other, None
        raise ConnectError(
            f"{worker.name} does not get its part of the round from {other.name}: {found['why']}",
            hint="look at the network between the two, or use exchange='star'",
        )

    async def _loss_of(self, worker: ProxyWorker) -> DDLFError | None:
        """How a worker was lost that another one does not reach; None if it is there."""
        try:
            async with asyncio.timeout(NOTICED_S):
                await worker.call(self._role, "values", self._now.generation, 0, 0)
        except LOSS as error:
            return error
        except TimeoutError:
            pass
        return None

    async def _weights_of(self, place: Place) -> Weights:
        return (await self._brought(place, state=False))[0]

    async def _brought(self, place: Place, *, state: bool = True) -> tuple[Weights, Weights]:
        """Weights and state, from those who have them."""
        weights = [np.empty(w.shape, w.dtype) for w in self._like]
        groups = [[np.empty(w.shape, w.dtype) for w in self._like] for _ in range(self._kept * state)]
        alive = self._there.members()

        async def get(verb: str, part: Slice, member: Member, into: Callable[[Any], list[tuple[Weights, Any]]]) -> None:
            for piece in pieces(part, AT_ONCE):
                try:
                    found = await alive[member].call(self._role, verb, place.generation, *piece)
                except LOSS:
                    alive.pop(member, None)
                    raise
                for arrays, values in into(found):
                    put(arrays, piece, values)

        while True:
            holders = [one for one in place.at if one in alive][: self._size]
            parts = self._parts(place, alive) if state else []
            if not holders or parts is None:
                raise self._gone()
            work = [
                get("values", part, one, lambda found: [(weights, found)])
                for part, one in zip(cut(self._size, len(holders)), holders, strict=True)
            ]
            work += [get("kept", part, one, lambda found: [*zip(groups, found, strict=True)]) for part, one in parts]
            found = await asyncio.gather(*work, return_exceptions=True)
            errors = [one for one in found if isinstance(one, BaseException)]
            if not errors:
                return weights, [array for group in groups for array in group]
            if others := [one for one in errors if not isinstance(one, LOSS)]:
                raise others[0]


async def train(run: Run, there: WeightsThere, merge: Rule, outer: OuterOptimizer, balance: str) -> None:
    """Train until all rounds are over or the run is to end; the master ends with the weights."""
    run.state.setdefault("outer", outer.init(run.weights))
    shards = Sharded(run, there, merge, outer)
    try:
        async for round in run.rounds(balance):
            replies, place = await shards.merged(round.tasks, await run.all(round.tasks))
            await shards.committed(place, replies, looks=_looks(run, round))
    finally:
        await there.links.close()
        await to_its_end(shards.settle())


def _looks(run: Run, round: Round) -> bool:
    """Whether the weights after a round are to be here: for a checkpoint, or since it is the last one. Tests are done where they are."""
    return round.last or (run.keeper is not None and run.keeper.is_due(run.version + 1))


def _snapshot(progress: Any) -> Any:
    """What a training has come to, as it is now."""
    then = copy.copy(progress)
    for name in (
        "epochs",
        "sizes",
        "starts",
        "offsets",
        "states",
        "speeds",
        "records",
        "slots_from",
        "state",
        "ledger",
    ):
        setattr(then, name, copy.copy(getattr(progress, name)))
    return then
