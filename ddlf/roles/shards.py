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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.check import fault, scaled
from ddlf.algorithms.encoding import EncodedUpdate, decode_update
from ddlf.algorithms.merge import MERGE
from ddlf.algorithms.outer import OUTER
from ddlf.algorithms.pairs import norm
from ddlf.algorithms.robust import Weighed
from ddlf.algorithms.shards import (
    PIECE,
    Slice,
    cut,
    overlapped,
    pieces,
    put,
    stepped,
    take,
    take_encoded,
    within,
)
from ddlf.algorithms.weights import Weights
from ddlf.checkpoints.slices import parts_of, write_if_seen
from ddlf.errors import AppMissing, BadUpdate, DDLFError
from ddlf.roles.copies import Copies
from ddlf.roles.generation import Generation, Plan, State, Unfit, Unreached, codec_of, moved, room, size_of, write
from ddlf.roles.held import Held
from ddlf.roles.task import KeptStates, Task
from ddlf.roles.wholes import Pairs, Sent, all_of, decoded, limited, sums

Ask = Callable[..., Awaitable[Any]]
"""Asks another worker's end: its number, a verb, and the verb's own arguments."""


class ShardEnd:
    """What one worker holds.

    Args:
        me: Number of this worker.
        ask: Asks others.
        kept: What the rounds of slots have left here.

    Attributes:
        copies: The same, with what there are copies of.
    """

    def __init__(self, me: int, ask: Ask, kept: KeptStates) -> None:
        self._me = me
        self._ask = ask
        self._held = Held()
        self.shard: tuple[int, int, int, int] | None = (
            None  # the slice stepped last: begin, end, of so many values, generation
        )
        self.copies = Copies(kept, self._asked)

    # -- what the master asks for -------------------------------------------------------------------------------------

    async def hold(
        self, generation: int, weights: Weights, state: Weights, codec: str, trainable: Sequence[bool]
    ) -> None:
        """Hold weights and the outer optimizer's state, whole; others get them from here, as the codec makes them."""
        found = await asyncio.to_thread(Generation.whole, weights, state, codec, trainable)
        await self._held.hold({generation: found})

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
        slices = cut(size_of(base.weights), len(now.owners))
        weights = [np.empty(w.shape, w.dtype) for w in base.weights]
        new = Generation(weights, codec=codec_of(now.codec), trainable=now.trainable)
        new.ready = {piece: asyncio.Event() for part in slices for piece in pieces(part, now.piece)}
        await self._held.only({now.base: base, now.generation: new})
        work: list[Coroutine[Any, Any, None]] = []
        for shard, (part, owner) in enumerate(zip(slices, now.owners, strict=True)):
            mine = owner == self._me
            work.append(
                self._make(now, base, new, part) if mine else self._fetch(owner, now.generation, new, part, now.piece)
            )
            if now.copies and now.owners[(shard + 1) % len(slices)] == self._me != owner:
                work.append(self._copy(owner, now, new, part))
        work += [self.copies.keep(slot, n, worker, now.groups) for slot, n, worker, to in now.left if to == self._me]
        found = await self._told(all_of(work))
        if not found:
            begin, end = slices[now.owners.index(self._me)]
            self.shard = begin, end, slices[-1][1], now.generation
        return found

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

    async def write_left(self, slot: int, number: int, groups: Sequence[str], place: dict[str, Any]) -> Any:
        """Write what a slot has left here into a checkpoint; see ``Copies``."""
        return {**await self.copies.write(slot, number, groups, place), "by": self._me}

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
                now, base.weights, part, lambda sent, part: self._update_of(now.base, sent, part)
            )

        return await self._told(compute()) or found

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

    async def have(self, generation: int, at: Sequence[int], like: Weights) -> None:
        """Have the weights of a generation here, and forget those before it; see ``bring``."""
        await self.bring(generation, at, like)
        await self._held.only_since(generation)

    async def bring(self, generation: int, at: Sequence[int], like: Weights) -> Weights:
        """Have the weights of a generation here, whole.

        Args:
            generation: Which.
            at: Workers that have them.
            like: Arrays with the shapes and types of the model's weights.

        Raises:
            AppMissing: Nobody gives them.
        """
        if generation not in self._held.generations:
            found = Generation([np.empty(w.shape, w.dtype) for w in like])
            found.ready = {piece: asyncio.Event() for piece in pieces((0, size_of(like)), PIECE)}
            why = "nobody has them"
            for worker in sorted(at, key=lambda one: (one - self._me) % (max(at) + 1)):  # not all from the same one
                try:
                    await self._fetch(worker, generation, found, (0, size_of(like)), PIECE)
                    break
                except Unreached as error:
                    why = f"worker {worker}: {error.why}"
            else:
                raise AppMissing(f"the weights of this round cannot be had: {why}")
            await self._held.hold({generation: found})
        return self.weights(generation)

    async def patch(self, generation: int, following: int, places: Sequence[int], arrays: Weights) -> None:
        """Have the weights of a generation with others in some places, which are not trained, as those of another one.

        Raises:
            AppMissing: They are not here.
        """
        found = self._held.generation(generation).patched(places, arrays)
        await self._held.hold({following: found})

    def weights(self, generation: int) -> Weights:
        """The weights of a generation that are here, whole. Nobody may change them.

        Raises:
            AppMissing: They are not.
        """
        return self._held.generation(generation).weights

    def sent(
        self, task: Task, update: EncodedUpdate, names: Sequence[str], *, copy: bool = False
    ) -> dict[str, Any] | None:
        """Keep a slot's update, which nobody may change from then on. Any thread may call this.

        Args:
            task: What it came of.
            update: As its codec made it.
            names: Paths of the weights, for what is said of it.
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
        self._held.updates[generation, task.slot] = update
        found = fault(decode_update(update, like), len(task.indices), like, names)
        return None if found is None else dataclasses.asdict(found)

    # -- what other workers ask for -----------------------------------------------------------------------------------

    async def update(self, generation: int, slot: int, begin: int, end: int) -> dict[str, Any]:
        """A slice of a slot's update, as its codec made it.

        Raises:
            AppMissing: It is not here.
        """
        return dict(
            take_encoded(self._held.sent(generation, slot), self._held.generation(generation).weights, (begin, end))
        )

    async def values(self, generation: int, begin: int, end: int) -> Weights | EncodedUpdate:
        """A slice of weights, when they are there, as they travel.

        Raises:
            AppMissing: They are not to be expected here.
        """
        found = await self._held.expected(generation)
        await found.wait_for((begin, end))
        return found.sent((begin, end))

    async def kept(self, generation: int, begin: int, end: int) -> State:
        """What the outer optimizer keeps of a slice, when it is there.

        Raises:
            AppMissing: It is not to be expected here.
        """
        found = await self._held.expected(generation)
        await found.wait_for((begin, end))
        return found.state_of((begin, end))

    # -- making the next weights ----------------------------------------------------------------------------------------

    async def _make(self, plan: Plan, base: Generation, new: Generation, part: Slice) -> None:
        """Merge and step a slice, piece by piece."""
        outer, state = OUTER.read(plan.outer), room(plan, take(base.weights, part))
        new.state.append((part, state))

        async def one(piece: Slice) -> None:
            updates, old = await asyncio.gather(
                asyncio.gather(*(self._update_of(plan.base, sent, piece) for sent in plan.updates)),
                self._state_before(plan, piece, len(state)),
            )
            await asyncio.to_thread(step, piece, updates, old)
            new.ready[piece].set()

        def step(piece: Slice, updates: Sequence[EncodedUpdate], old: State) -> None:
            weights = take(base.weights, piece) if new.codec is None else old.pop()
            places = [i for i, _, _ in overlapped(base.weights, piece)]
            samples = [samples for _, _, samples, _ in plan.updates]
            merge = Weighed(plan.weighed[:-1], plan.weighed[-1]) if plan.weighed else MERGE.read(plan.merge)
            after, values = stepped(
                merge,
                outer,
                [array for group in old for array in group],
                weights,
                list(zip(decoded(updates, plan.updates, base.weights, piece), samples, strict=True)),
                [plan.trainable[i] for i in places],
                [base.weights[i].size for i in places],
            )
            if (found := fault(values, 1, values, [plan.names[i] for i in places])) is not None:
                raise Unfit(found)
            new.set(piece, values)
            after = after if new.codec is None else [*after, *values]
            for i, group in enumerate(state):
                put(group, moved(piece, part[0]), after[i * len(places) : (i + 1) * len(places)])

        await limited(one, pieces(part, plan.piece))

    async def _fetch(self, owner: int, generation: int, new: Generation, part: Slice, length: int) -> None:
        """Get a slice of weights from the worker that has them, or makes them."""

        async def one(piece: Slice) -> None:
            values = await self._asked(owner, "values", generation, *piece)
            write(owner, new.weights, piece, values)
            new.ready[piece].set()

        await limited(one, pieces(part, length))

    async def _copy(self, owner: int, plan: Plan, new: Generation, part: Slice) -> None:
        """Keep what the outer optimizer keeps of another worker's slice."""
        state = room(plan, take(new.weights, part))

        async def one(piece: Slice) -> None:
            groups = await self._asked(owner, "kept", plan.generation, *piece)
            for group, values in zip(state, groups, strict=True):
                write(owner, group, moved(piece, part[0]), values)

        await limited(one, pieces(part, plan.piece))
        new.state.append((part, state))

    async def _update_of(self, base: int, sent: Sent, piece: Slice) -> EncodedUpdate:
        slot, worker, _, _ = sent
        found: EncodedUpdate = await self._asked(worker, "update", base, slot, *piece)
        return found

    async def _state_before(self, plan: Plan, piece: Slice, groups: int) -> State:
        """The outer optimizer's state of a piece before this round, of those who have parts of it."""
        if not groups:
            return []
        like = take(self._held.generation(plan.base).weights, piece)
        state: State = [[np.empty_like(view) for view in like] for _ in range(groups)]
        for part, worker in within(piece, [((begin, end), worker) for begin, end, worker in plan.state]):
            found = await self._asked(worker, "kept", plan.base, *part)
            for group, values in zip(state, found, strict=True):
                write(worker, group, moved(part, piece[0]), values)
        return state

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

    async def answer(self, verb: str, *arguments: Any) -> Any:
        """What this worker answers to another one."""
        return await getattr(self.copies if verb in ("shapes", "left") else self, verb)(*arguments)

    async def _asked(self, worker: int, verb: str, *arguments: Any) -> Any:
        """What a worker answers; this one, too.

        Raises:
            Unreached: It does not.
        """
        if worker == self._me:
            return await self.answer(verb, *arguments)
        try:
            return await self._ask(worker, verb, *arguments)
        except DDLFError as error:
            raise Unreached(worker, str(error).partition("\n")[0]) from error

    async def _told(self, work: Coroutine[Any, Any, None]) -> dict[str, Any]:
        """Do something together with others, and say what was in the way."""
        try:
            await work
        except Unreached as error:
            me = self._me if error.by is None else error.by
            return {"me": me, "peer": error.worker, "why": error.why, "link": error.link}
        except BadUpdate as error:
            return {"bad": str(error)}
        except Unfit as error:
            return {"weights": dataclasses.asdict(error.fault)}
        return {}
