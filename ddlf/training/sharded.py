"""The sharded synchronous exchange: slots' updates go from worker to worker, each of which merges and steps a slice. Runs on the master.

A round is that of ``ddlf.training.sync``, with the same bits; but updates stay on the workers that made them, and so does what comes of them::

    tell each slot which weights to begin with, by their generation; wait for all replies, which bring no update
    plan: who has which update, and which worker steps which slice; have these workers carry it out, all at the same time
    when a worker is lost meanwhile, have its slots carried again, and plan again

The master gets the weights where somebody looks at them, and at the end; a checkpoint is written by the workers. Every worker that stepped a slice
has all of the weights, and a copy of another one's part of the outer optimizer's state, so the loss of one loses nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.merge import Rule
from ddlf.algorithms.outer import OuterOptimizer
from ddlf.algorithms.robust import WholeRule
from ddlf.algorithms.shards import PIECE, Slice, cut, decode_slice, pieces, put, within
from ddlf.algorithms.weights import Weights
from ddlf.checkpoints.slices import OUTER, WEIGHTS
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import BadUpdate, ClusterTooSmall, ConfigError, DDLFError
from ddlf.events import Warned
from ddlf.roles.generation import Plan
from ddlf.roles.task import Reply
from ddlf.training.evaluation import to_its_end
from ddlf.training.recalibration import statistics
from ddlf.training.recovery import LOSS, first_line
from ddlf.training.rounds import Elsewhere, Round, come_home, nowhere, snapshot
from ddlf.training.run import Run
from ddlf.training.slices import AT_ONCE, OnWorkers, reading, sliced
from ddlf.training.there import Member, WeightsThere
from ddlf.training.together import Gone, Together
from ddlf.training.wholes import verdicts, weighed

HOLDERS = 2
"""Workers that the master gives the first weights; the others get them from these."""
PIECES = 32
"""Of each slice, if they are not too small: the last one cannot be given to the others before all updates of it have come, so the larger it is, the
longer links idle. ``docs/LAB.md`` has the figures."""
LEAST = 1 << 15
"""Values in a piece: fewer, and what it costs to ask for one is most of it."""


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
        self._like = [np.broadcast_to(np.zeros((), w.dtype), w.shape) for w in run.weights]
        self._size = sum(w.size for w in run.weights)
        self._together = Together(run, there, self._like)
        self._kept = len(run.state["outer"]) // max(len(self._like), 1)
        self._coded = (
            there.codec != "float32"
        )  # then the weights are behind the state, and what all have is made of them
        self._kept += self._coded
        self._generations = itertools.count(1)
        self._now = Place(0)
        self._here: tuple[int, Weights, Weights] = (0, run.weights, run.state["outer"])  # generation, weights, state
        self._home = snapshot(run.progress)
        there.begin = self._begin
        there.compares = partial(verdicts, self._together)

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
        weights, state = list(weights), list(state)
        for member, proxy in list(alive.items())[:HOLDERS]:
            try:
                how = self._there.codec, self._run.facts.trainable
                await proxy.call(self._there.role, "hold", generation, weights, state, *how)
            except LOSS:
                continue  # the crew will hear of it
            more = [((0, self._size), member)] if self._kept else []
            self._move(Place(generation, [*self._now.at, member], [*self._now.state, *more]))

    async def merged(self, replies: list[Reply]) -> tuple[list[Reply], Place]:
        """Have the workers make the next weights of the updates that these replies are of.

        Args:
            replies: Those whose updates count.

        Returns:
            The replies that count: those of slots that had to be carried again are others. And where the weights are.

        Raises:
            BadUpdate: An update cannot be merged.
            ConnectError: A worker does not get from another one what it asks for, though it reaches it.
            ClusterTooSmall: Too many were lost.
        """
        weights: list[float] = []
        if isinstance(self._merge, WholeRule):
            replies, weights = await weighed(self._together, replies, self._merge)
        places: list[Place] = []

        async def merge(replies: list[Reply], owners: list[Member], workers: dict[int, ProxyWorker]) -> Gone:
            plan = Plan(
                base=self._now.generation,
                generation=next(self._generations),
                updates=[(reply.slot, reply.worker, reply.samples, reply.factor) for reply in replies],
                owners=[number for number, _ in owners],
                state=self._holding(self._now),
                copies=len(owners) > 1 and self._kept > 0,
                left=self._copied(replies, owners),
                groups=list(self._run.exchange.states.copied),
                merge=str(self._merge),
                weighed=weights,
                outer=str(self._outer),
                codec=self._there.codec,
                trainable=self._run.facts.trainable,
                names=self._run.facts.names,
                piece=min(PIECE, max(LEAST, self._size // (len(owners) * PIECES))),
            )
            _, gone = await self._together.carried_out("merge", dataclasses.asdict(plan), plan.owners, workers)
            if gone is None:
                for slot, number, _, worker in plan.left:
                    self._run.exchange.states.copy(slot, number, worker)
                slices = cut(self._size, len(owners))
                state = [*zip(slices, owners, strict=True)] if self._kept else []
                state += [*zip(slices, [*owners[1:], owners[0]], strict=True)] if plan.copies else []
                places.append(Place(plan.generation, owners, state))
            return gone

        return await self._together.on(replies, merge), places[0]

    async def committed(self, place: Place, replies: list[Reply], *, due: bool, shown: bool) -> None:
        """Make the weights that are somewhere the global ones.

        Args:
            place: Where they are.
            replies: What they came of.
            due: Whether they are to be in a checkpoint.
            shown: Whether they are to be here.
        """
        exact = self._holding(place) if self._coded else ()
        evaluated = partial(self._there.evaluated, place.at, place.generation, exact=exact)
        bring = partial(self._weights_of, place)
        weights: Weights = Elsewhere(evaluated, bring)
        slices = None
        if due and not shown:
            there = OnWorkers(self._there, place.generation, self._like, self._kept, self._coded)
            write = partial(there.write, self._run.facts.names, partial(self._writers, place))
            slices = await sliced(self._run, replies, write)
        looks = due or shown
        if slices is not None:
            weights = Elsewhere(evaluated, bring, reading(slices, WEIGHTS))
            state: Weights = Elsewhere(nowhere, bring, reading(slices, OUTER)) if self._kept > self._coded else []
        elif looks:
            weights, state = await self._brought(place)
        if looks:
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
            changed = self._run.progress.weights
            if changed is not weights:  # by callbacks: the workers get them from here
                self._here = next(self._generations), changed, self._run.state["outer"]
                self._move(Place(self._here[0]))
            self._home = snapshot(self._run.progress)

    async def recalibrated(self, place: Place, replies: list[Reply]) -> Place:
        """Have moving statistics of weights that were merged computed anew; these alone come to the master and go out again.

        Args:
            place: Where the weights are.
            replies: What they came of.

        Returns:
            Where they are with these statistics.
        """
        places, role = self._run.facts.statistics, self._there.role
        old = [np.empty(self._like[one].shape, self._like[one].dtype) for one in places]
        ends = np.cumsum([w.size for w in self._like]).tolist()
        for array, one in zip(old, places, strict=True):
            await self._read(place, (ends[one] - array.size, ends[one]), array)
        weights = {"generation": place.generation, "at": [number for number, _ in place.at]}
        new = await statistics(self._run, weights, old, replies, self._merge)
        following, alive = next(self._generations), self._there.members()
        patch = place.generation, following, list(places), new
        calls = {one: alive[one].call(role, "patch", *patch) for one in place.at if one in alive}
        found = await asyncio.gather(*calls.values(), return_exceptions=True)
        if others := [one for one in found if isinstance(one, BaseException) and not isinstance(one, LOSS)]:
            raise others[0]
        at = [one for one, error in zip(calls, found, strict=True) if error is None]
        return Place(following, at, [(part, one) for part, one in place.state if one in at])

    async def settle(self) -> None:
        """End with weights that are here: those of now, or if these are lost those of the last time, and nothing of the rounds since."""
        run, progress = self._run, self._run.progress
        if self._here[0] == self._now.generation:
            come_home(progress)
            return
        try:
            progress.weights, run.state["outer"] = await self._brought(self._now)
        except DDLFError as error:
            reached = progress.round
            for one in dataclasses.fields(progress):
                setattr(progress, one.name, getattr(self._home, one.name))
            come_home(progress)
            run.exchange.states.set_back(progress.states)
            why = f"the weights after round {reached} cannot be had ({first_line(error)}): what is left is that of round {progress.round}"
            run.crew.emit(Warned(about="model", why=why))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _move(self, place: Place) -> None:
        self._now = place
        self._there.generation, self._there.at = place.generation, place.at

    def _copied(self, replies: list[Reply], owners: list[Member]) -> list[tuple[int, int, int, int]]:
        """Of each slot, its round and its worker the one that is to have a copy of what it has left: the next, if there is one."""
        if not self._run.exchange.states.copied or len(owners) < 2:
            return []
        numbers = [number for number, _ in owners]
        following = dict(zip(numbers, [*numbers[1:], numbers[0]], strict=True))
        return [(one.slot, one.task.round, one.worker, following.get(one.worker, numbers[0])) for one in replies]

    def _holding(self, place: Place) -> list[tuple[int, int, int]]:
        """Who has which slice of the state, as workers are told."""
        return [(*part, number) for part, (number, _) in self._parts(place, self._there.members()) or ()]

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

    def _writers(self, place: Place, alive: Collection[Member]) -> list[tuple[Slice, Member]]:
        """Of those that are there who is to write which slice into a checkpoint.

        Raises:
            ClusterTooSmall: They do not have all of it.
        """
        holders = [one for one in place.at if one in alive][: self._size]
        parts = self._parts(place, alive)
        if not holders or parts is None:
            raise self._gone()
        return parts or list(zip(cut(self._size, len(holders)), holders, strict=True))

    async def _weights_of(self, place: Place) -> Weights:
        return (await self._brought(place, state=False))[0]

    async def _read(self, place: Place, part: Slice, into: np.ndarray[Any, Any]) -> None:
        """Read a tensor that is not trained."""
        there = self._there.members()
        for member in place.at:
            if member in there:
                try:
                    found = await there[member].call(self._there.role, "values", place.generation, *part)
                except LOSS:
                    continue
                values = decode_slice(found, self._like, part) if self._coded else found
                return put([into], (0, into.size), values)
        raise self._gone()

    async def _brought(self, place: Place, *, state: bool = True) -> tuple[Weights, Weights]:
        """Weights and state, from those who have them."""
        weights = [np.empty(w.shape, w.dtype) for w in self._like]
        needed = self._kept if state or self._coded else 0
        groups = [[np.empty(w.shape, w.dtype) for w in self._like] for _ in range(needed)]
        alive = self._there.members()

        async def get(verb: str, part: Slice, member: Member, into: Callable[[Any], list[tuple[Weights, Any]]]) -> None:
            worker = alive[member]
            for piece in pieces(part, AT_ONCE):
                try:
                    found = await worker.call(self._there.role, verb, place.generation, *piece)
                except LOSS:
                    alive.pop(member, None)
                    raise
                for arrays, values in into(found):
                    put(arrays, piece, values)

        while True:
            holders = [one for one in place.at if one in alive][: self._size]
            parts = self._parts(place, alive) if needed else []
            if not holders or parts is None:
                raise self._gone()
            work = (
                []
                if self._coded
                else [
                    get("values", part, one, lambda found: [(weights, found)])
                    for part, one in zip(cut(self._size, len(holders)), holders, strict=True)
                ]
            )
            work += [get("kept", part, one, lambda found: [*zip(groups, found, strict=True)]) for part, one in parts]
            found = await asyncio.gather(*work, return_exceptions=True)
            errors = [one for one in found if isinstance(one, BaseException)]
            if not errors:
                now = groups.pop() if self._coded else weights
                return now, [array for group in groups for array in group]
            if others := [one for one in errors if not isinstance(one, LOSS)]:
                raise others[0]


async def train(run: Run, there: WeightsThere, merge: Rule, outer: OuterOptimizer, balance: str) -> None:
    """Train until all rounds are over or the run is to end; the master ends with the weights."""
    run.state.setdefault("outer", outer.init(run.weights))
    shards = Sharded(run, there, merge, outer)
    try:
        async for round in run.rounds(balance):
            replies, place = await shards.merged(await run.all(round.tasks))
            if run.facts.statistics:
                place = await shards.recalibrated(place, replies)
            await shards.committed(place, replies, due=_is_due(run), shown=_is_shown(run, round))
    finally:
        await there.links.close()
        await to_its_end(shards.settle())


def _is_due(run: Run) -> bool:
    """Whether the next commit comes with a checkpoint."""
    return run.keeper is not None and run.keeper.is_due(run.version + 1)


def _is_shown(run: Run, round: Round) -> bool:
    """Whether the weights after a round are to be here: for callbacks, or since it is the last one. Tests are done where they are."""
    return round.last or (run.reporter.shows and run.progress.ends_epoch(round.number))
