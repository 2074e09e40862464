"""A worker's end of the sharded exchange: what it holds of the weights, and how the next ones come of all slots' updates. Runs in the executor.

The master says in a plan who has which slot's update and which worker steps which slice; the slices go from worker to worker::

    for each piece of my slice: get it of all slots' updates, in slot order; merge them, step it; others may have it
    for each piece of the others' slices: get it when it is stepped

Weights are named by a *generation*: a number that the master gives to what is to come of one plan, so that slices of two attempts at the same round
are never mixed. What one generation was made of is kept until a slot begins its round with the next one: a plan that failed is followed by another.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.encoding import EncodedUpdate, decode_update
from ddlf.algorithms.pairwise import norm
from ddlf.algorithms.payload import Payload
from ddlf.algorithms.ranges import PIECE, Slice, cut, pieces, take, take_encoded, within
from ddlf.algorithms.streaming import put
from ddlf.algorithms.update_check import fault, scaled
from ddlf.algorithms.weights import Weights
from ddlf.errors import AppMissing, DDLFError
from ddlf.training.checkpoints.slices import parts_of, write_if_seen
from ddlf.training.exchanges.peers import Ask, Unreached
from ddlf.training.exchanges.restored import Restored, generation_of
from ddlf.training.exchanges.sharded.copies import Shapes, SlotCopies, left_parts
from ddlf.training.exchanges.sharded.means import Mean, MeanPlan, averaging, begins_with, bring, mean_in, shapes
from ddlf.training.exchanges.sharded.merging import Merging, fetch, update_of
from ddlf.training.exchanges.sharded.pairs import Pairs, all_of, limited, sums
from ddlf.training.exchanges.sharded.plan import Generation, Plan, State, size_of, told, write
from ddlf.training.roles import COPIES, EXCHANGE
from ddlf.training.slot.task import KeptStates, SlotState, Task
from ddlf.training.slot.transfer import travelling
from ddlf.worker.methods import concurrent, offered

WAIT_S = 60.0
"""How long another worker is waited for that has not heard of a plan yet."""


class Held:
    """Generations and updates that are here.

    Attributes:
        generations: By number.
        updates: By generation and slot.
    """

    def __init__(self) -> None:
        self.generations: dict[int, Generation] = {}
        self.updates: dict[tuple[int, int], EncodedUpdate] = {}
        self._news = asyncio.Condition()

    def sent(self, generation: int, slot: int) -> EncodedUpdate:
        """A slot's update.

        Raises:
            AppMissing: It is not here.
        """
        found = self.updates.get((generation, slot))
        if found is None:
            raise AppMissing(f"there is no update of slot {slot + 1} here")
        return found

    def generation(self, number: int) -> Generation:
        """A generation.

        Raises:
            AppMissing: It is not here.
        """
        try:
            return self.generations[number]
        except KeyError:
            raise AppMissing("the weights of this round are not here") from None

    async def expected(self, number: int) -> Generation:
        """A generation, also one whose plan this worker has not heard of yet; but one that has nothing has come anew, and is in no plan.

        Raises:
            AppMissing: It is not to be expected here.
        """
        if not self.generations:
            raise AppMissing("the weights of this round are not here")
        try:
            async with asyncio.timeout(WAIT_S), self._news:
                await self._news.wait_for(lambda: max(self.generations, default=-1) >= number)
        except TimeoutError:
            raise AppMissing(f"it has not begun with the weights of this round in {WAIT_S:g} s") from None
        return self.generation(number)

    async def hold(self, more: dict[int, Generation]) -> None:
        """Hold these, too."""
        await self.only({**self.generations, **more})

    async def only_since(self, generation: int) -> None:
        """Forget what was before a generation."""
        await self.only({n: one for n, one in self.generations.items() if n >= generation})
        self.updates = {key: update for key, update in self.updates.items() if key[0] >= generation}

    async def only(self, generations: dict[int, Generation]) -> None:
        """Hold these generations, and no others."""
        async with self._news:
            self.generations = generations
            self._news.notify_all()


class ShardedWorker(Restored):
    """One worker's part of the sharded exchange, which is a role of its own.

    Args:
        me: Number of this worker.
        ask: Asks workers.
        kept: What the rounds of slots have left here.
        show: Takes the slice that was stepped here: its begin, its end, the values of all weights, and the generation.

    Attributes:
        copies: The same, with what there are copies of.
    """

    def __init__(
        self,
        me: int,
        ask: Ask,
        kept: KeptStates,
        show: Callable[[tuple[int, int, int, int]], object] = lambda shard: None,
    ) -> None:
        super().__init__()
        self._show = show
        self._me = me
        self._ask = ask
        self._held = Held()
        self.shard: tuple[int, int, int, int] | None = (
            None  # the slice stepped last: begin, end, of so many values, generation
        )
        self.copies = SlotCopies(kept, partial(self._asked, role=COPIES))

    # -- what the master asks for -------------------------------------------------------------------------------------

    @concurrent
    async def hold(
        self,
        generation: int,
        weights: Weights,
        state: Weights,
        codec: str,
        trainable: Sequence[bool],
        means: SlotState | None = None,
    ) -> None:
        """Hold weights, what the outer optimizer keeps, and the means that slots begin with; others get the weights as the codec makes them."""
        found = await asyncio.to_thread(Generation.whole, weights, state, codec, trainable)
        found.means = {name: Mean.whole(group) for name, group in (means or {}).items()}
        await self._held.hold({generation: found})

    @concurrent
    async def hold_restored(self, generation: int, listed: dict[str, Any], codec: str, trainable: list[bool]) -> None:
        """The same of slices of a checkpoint that have come here; see ``generation_of``."""
        found = await asyncio.to_thread(generation_of, self.taken(), listed, codec, trainable)
        await self._held.hold({generation: found})

    @concurrent
    async def left_restored(self, slot: int, number: int, known: SlotState, lengths: dict[str, int], of: int) -> None:
        """Have what a round of a slot has left of a slice of a checkpoint that has come here; see ``Copies``."""
        self.copies.restore(slot, number, known, lengths, self.restored.pop(of))

    @concurrent
    async def merge(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Make the next weights, together with the other owners.

        Args:
            plan: A ``Plan`` as it travels.

        Returns:
            What was in the way: ``me``, ``peer``, ``why`` and whether it is the ``link`` between the two, if that other worker did not give what it
            was asked for; ``bad``, if an update cannot be merged; ``weights``, if what comes of it cannot be used; nothing if the weights are here.
        """
        now = Plan(**plan)
        base = self._held.generation(now.base)
        merging = Merging(self._me, now, base, self._asked)
        work = merging.work()
        for wanted in now.means:
            work += averaging(self._me, now, MeanPlan(**wanted), merging.new, self.copies, self._asked)
        before = {number: one for number, one in self._held.generations.items() if number <= now.base}
        await self._held.only({**before, now.generation: merging.new})
        work += [self.copies.keep(slot, n, worker, now.groups) for slot, n, worker, to in now.left if to == self._me]
        found = await told(self._me, all_of(work))
        if not found:
            begin, end = merging.mine
            self.shard = begin, end, size_of(base.weights), now.generation
            self._show(self.shard)
        return found

    @concurrent
    async def write(self, generation: int, begin: int, end: int, names: Sequence[str], place: dict[str, Any]) -> Any:
        """Write a slice of weights, and of what the outer optimizer keeps of them, into a checkpoint.

        Returns:
            What ``write_if_seen`` does.

        Raises:
            AppMissing: It is not here.
        """
        found = self._held.generation(generation)
        kept = found.state_of((begin, end)) if found.state else []
        values = take(found.weights, (begin, end)) if found.codec is None else kept.pop()
        parts = parts_of(found.weights, (begin, end), names, values, kept)
        return {**await asyncio.to_thread(write_if_seen, place, parts), "by": self._me}

    @concurrent
    async def write_left(self, slot: int, number: int, groups: Sequence[str], place: dict[str, Any]) -> Any:
        """Write what a slot has left here into a checkpoint; see ``Copies``."""
        return {**await self.copies.write(slot, number, groups, place), "by": self._me}

    @concurrent
    async def write_mean(self, generation: int, group: str, place: dict[str, Any]) -> Any:
        """Write a mean of what slots have left into a checkpoint, as what the first slot has left."""
        arrays, more = left_parts(0, {group: mean_in(self._held.generation(generation), group).group()})
        return {**await asyncio.to_thread(write_if_seen, place, arrays), **more, "by": self._me}

    @concurrent
    async def compare(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Compute a part of what updates are to each other.

        Args:
            asked: ``Pairs`` as they travel.

        Returns:
            ``sums``: matrices to be added to those of the other owners. Or what was in the way, as ``merge`` says it.
        """
        now = Pairs(**asked)
        base = self._held.generation(now.base)
        part = cut(size_of(base.weights), len(now.owners))[list(now.owners).index(self._me)]
        found: dict[str, Any] = {}

        async def compute() -> None:
            found["sums"] = await sums(
                now, base.weights, part, lambda sent, part: update_of(self._asked, now.base, sent, part)
            )

        return await told(self._me, compute()) or found

    @concurrent
    async def lengths(self, generation: int, slot: int, groups: Sequence[Sequence[int]], factor: float) -> list[float]:
        """The norm of some groups of tensors of a slot's update that is here, times a factor.

        Raises:
            AppMissing: It is not here.
        """
        encoded, like = self._held.sent(generation, slot), self._held.generation(generation).weights

        def computed() -> list[float]:
            update = scaled(decode_update(encoded, like), factor)
            return [norm([update[i] for i in group]) for group in groups]

        return await asyncio.to_thread(computed)

    # -- what a round needs -------------------------------------------------------------------------------------------

    async def begin(self, task: Task, like: Weights) -> Task:
        """Have here what a slot's round begins with, and nothing of the rounds before.

        Args:
            task: The round, whose weights are those of a generation that others have.
            like: Arrays with the shapes and types of the model's weights.

        Returns:
            The round with what others had for it, but for the weights.

        Raises:
            AppMissing: Nobody gives it.
        """
        await self.have(**task.weights, like=like)
        await self._held.only_since(task.weights["generation"])
        task = await self.copies.have(task)
        means = self.means(task.weights["generation"])
        return dataclasses.replace(task, **begins_with(means, task.weights.get("means", {}), like))

    async def have(self, generation: int, at: Sequence[int], like: Weights, means: Iterable[str] = ()) -> None:
        """Have the weights of a generation here, whole, and means of what slots have left.

        Args:
            generation: Which.
            at: Workers that have them.
            like: Arrays with the shapes and types of the model's weights.
            means: Groups of what slots have left.

        Raises:
            AppMissing: Nobody gives them.
        """
        await self._bring(generation, at, like)
        await bring(self._asked, self._in_turn(at), generation, self._held.generation(generation), means)

    def means(self, generation: int) -> SlotState:
        """The means of a generation that are here.

        Raises:
            AppMissing: It is not.
        """
        return {name: mean.group() for name, mean in self._held.generation(generation).means.items()}

    def _in_turn(self, at: Sequence[int]) -> list[int]:
        """Workers that have something, in another order on each: they are not all to ask the same one."""
        return sorted(at, key=lambda one: (one - self._me) % (max(at) + 1))

    async def _bring(self, generation: int, at: Sequence[int], like: Weights) -> None:
        if generation not in self._held.generations:
            found = Generation([np.empty(w.shape, w.dtype) for w in like])
            found.ready = {piece: asyncio.Event() for piece in pieces((0, size_of(like)), PIECE)}
            why = "nobody has them"
            for worker in self._in_turn(at):
                try:
                    await fetch(self._asked, worker, ("values", generation), found, list(found.ready))
                    break
                except Unreached as error:
                    why = f"worker {worker}: {error.why}"
            else:
                raise AppMissing(f"the weights of this round cannot be had: {why}")
            await self._held.hold({generation: found})

    def weights(self, generation: int) -> Weights:
        """The weights of a generation that are here, whole. Nobody may change them.

        Raises:
            AppMissing: They are not.
        """
        return self._held.generation(generation).weights

    def sent(
        self,
        task: Task,
        update: EncodedUpdate,
        names: Sequence[str],
        tensors: Sequence[int] | None = None,
        *,
        copy: bool = False,
    ) -> dict[str, Any] | None:
        """Keep a slot's update, which nobody may change from then on. Any thread may call this.

        Args:
            task: What it came of.
            update: As its codec made it.
            names: Paths of the weights, for what is said of it.
            tensors: Numbers of those that it is of; None for all. Of the others it is zero.
            copy: Whether somebody may.

        Returns:
            What makes it unusable, as data; None if nothing does.
        """
        generation = task.weights["generation"]
        like = self.weights(generation)
        if copy:
            update = {
                **update,
                "payloads": [{name: np.array(a) for name, a in one.items()} for one in update["payloads"]],
            }
        if tensors is not None:
            nothing: list[Payload] = [{"raw": np.broadcast_to(np.zeros((), w.dtype), w.shape)} for w in like]
            update = {**update, "payloads": put(nothing, tensors, update["payloads"])}
        self._held.updates[generation, task.slot] = update
        found = fault(decode_update(update, like), len(task.indices), like, names)
        return None if found is None else dataclasses.asdict(found)

    def measured(
        self, task: Task, found: Weights, places: Sequence[int], names: Sequence[str]
    ) -> dict[str, Any] | None:
        """Keep by what a slot's moving statistics differ from those in the weights, as its update of these.

        Args:
            task: What they came of.
            found: The statistics.
            places: Their places among the weights.
            names: Paths of the weights.

        Returns:
            What makes them unusable, as data; None if nothing does.
        """
        like = self.weights(task.weights["generation"])
        old = [like[place] for place in places]
        if (wrong := fault(found, 1, old, [names[place] for place in places])) is not None:
            return dataclasses.asdict(wrong)
        payloads: list[Payload] = [{"raw": np.asarray(w - one)} for w, one in zip(old, found, strict=True)]
        return self.sent(task, {"codec": "float32", "payloads": payloads}, names, places)

    # -- what other workers ask for -----------------------------------------------------------------------------------

    @offered
    async def update(self, generation: int, slot: int, begin: int, end: int) -> dict[str, Any]:
        """A slice of a slot's update, as its codec made it; what is zero, as of tensors that are frozen, does not travel.

        Raises:
            AppMissing: It is not here.
        """
        like = self._held.generation(generation).weights
        return dict(travelling(take_encoded(self._held.sent(generation, slot), like, (begin, end))))

    @offered
    async def values(self, generation: int, begin: int, end: int, since: int | None = None) -> Weights | EncodedUpdate:
        """A slice of weights, when they are there, as they travel: without what is as it was in a generation that the other worker has, too.

        Raises:
            AppMissing: They are not to be expected here.
        """
        found = await self._held.expected(generation)
        await found.wait_for((begin, end))
        before = None if since is None else self._held.generations.get(since)
        return found.sent((begin, end), before)

    @offered
    async def mean(self, generation: int, group: str, begin: int, end: int) -> Weights:
        """A slice of a mean of what slots have left, when it is there.

        Raises:
            AppMissing: It is not to be expected here.
        """
        found = mean_in(await self._held.expected(generation), group)
        await found.of.wait_for((begin, end))
        return take(found.of.weights, (begin, end))

    @offered
    async def mean_shapes(self, generation: int, group: str) -> Shapes:
        """Shapes and types of a mean.

        Raises:
            AppMissing: It is not to be expected here.
        """
        return shapes(await self._held.expected(generation), group)

    @offered
    async def peaks(self, generation: int) -> list[float]:
        """Of each tensor the largest magnitude in the slice that is stepped here, when it is; 0 where it has none in it.

        Raises:
            AppMissing: It is not to be expected here.
        """
        found = await self._held.expected(generation)
        await found.stepped.wait()
        return list(found.within)

    @offered
    async def kept(self, generation: int, begin: int, end: int) -> State:
        """What the outer optimizer keeps of a slice, when it is there.

        Raises:
            AppMissing: It is not to be expected here.
        """
        found = await self._held.expected(generation)
        await found.wait_for((begin, end))
        return found.state_of((begin, end))

    # -- parts --------------------------------------------------------------------------------------------------------

    async def exact(self, generation: int, parts: Sequence[Sequence[int]]) -> Weights:
        """The weights of a generation as they are stepped, of those who have parts of them.

        Args:
            generation: Which.
            parts: As ``Plan.state``.

        Raises:
            Unreached: They do not give them.
        """
        weights = [np.empty(w.shape, w.dtype) for w in self.weights(generation)]
        for part, worker in within((0, size_of(weights)), [((begin, end), one) for begin, end, one in parts]):

            async def one(piece: Slice, worker: int = worker) -> None:
                write(worker, weights, piece, (await self._asked(worker, "kept", generation, *piece))[-1])

            await limited(one, pieces(part))
        return weights

    async def _asked(self, worker: int, verb: str, *arguments: Any, role: str = EXCHANGE) -> Any:
        """What a worker answers; this one, too.

        Raises:
            Unreached: Another worker does not answer.
        """
        try:
            return await self._ask(worker, role, verb, *arguments)
        except DDLFError as error:
            if worker == self._me:
                raise
            raise Unreached(worker, str(error).partition("\n")[0]) from error

    async def close(self) -> None:
        """See ``Role``."""
