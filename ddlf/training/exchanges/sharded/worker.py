"""A worker's role in the sharded exchange: it stores and computes weights, with other workers. Runs in the executor.

The master's plan names the worker of each slot's update, and the owner of each range. The workers exchange ranges
directly::

    for each piece of my range: fetch it from all slots' updates, in slot order; merge and step it; offer it to others
    for each piece of the others' ranges: fetch it as soon as it is stepped

A *generation* identifies weights: the master gives a number to the result of each plan. So ranges from two attempts at
one round never mix. A worker keeps the base of a generation until a slot begins its round with the new one, because
another plan follows a failed one.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.codec import Payload
from ddlf.algorithms.encoding import EncodedUpdate, decode_update
from ddlf.algorithms.flat_weights import Slice, cut
from ddlf.algorithms.outer import with_values_at
from ddlf.algorithms.pairwise import Vector, norm
from ddlf.algorithms.update_check import scaled
from ddlf.algorithms.weights import Fault, Weights, fault
from ddlf.errors import AppMissing, DDLFError
from ddlf.training.checkpoints.slice_reader import Restored
from ddlf.training.checkpoints.slices import Destination, Written, write_if_seen
from ddlf.training.exchanges.sharded.copies import Shapes, SlotCopies
from ddlf.training.exchanges.sharded.means import Mean, averaging, begins_with, bring, mean_in, shapes
from ddlf.training.exchanges.sharded.merging import Merging, fetch, update_of
from ddlf.training.exchanges.sharded.pairs import Pairs, all_of, limited, sums
from ddlf.training.exchanges.sharded.plan import (
    COPIES,
    EXCHANGE,
    Generation,
    HeldWeights,
    MergeFailure,
    Plan,
    State,
    failure_of,
    left_parts,
    slice_arrays,
    write,
)
from ddlf.training.exchanges.sharded.ranges import PIECE, cut_range, pieces, size_of, take_encoded, within
from ddlf.training.slot.parts import as_sent
from ddlf.training.slot.task import KeptStates, SlotState, Task
from ddlf.worker.calls import concurrent, offered
from ddlf.worker.peers import Ask, Unreached

WAIT_S = 60.0
"""How long to wait for another worker that has not received the plan yet."""


class Store:
    """The generations (numbered versions of the weights) and the slots' updates on this worker.

    Attributes:
        generations: Generations by number.
        updates: Updates by generation and slot.
    """

    def __init__(self) -> None:
        self.generations: dict[int, Generation] = {}
        self.updates: dict[tuple[int, int], EncodedUpdate] = {}
        self._news = asyncio.Condition()

    def sent(self, generation: int, slot: int) -> EncodedUpdate:
        """Return the update of a slot that this worker has trained.

        Raises:
            AppMissing: This worker does not have it.
        """
        update = self.updates.get((generation, slot))
        if update is None:
            raise AppMissing(f"there is no update of slot {slot + 1} here")
        return update

    def generation(self, number: int) -> Generation:
        """Return the generation (version of the weights) with this number.

        Raises:
            AppMissing: This worker does not have it.
        """
        try:
            return self.generations[number]
        except KeyError:
            raise AppMissing("the weights of this round are not here") from None

    async def expected(self, number: int) -> Generation:
        """Return a version of the weights. Wait for it if this worker has not received its plan yet.

        A worker without any generation has just joined and is in no plan, so it fails at once.

        Raises:
            AppMissing: This worker will not receive the generation.
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
        """Add versions of the weights (generations) to the ones on this worker."""
        await self.only({**self.generations, **more})

    async def only_since(self, oldest: int) -> None:
        """Drop versions of the weights (generations), and updates, that are older than a given one."""
        await self.only({n: generation for n, generation in self.generations.items() if n >= oldest})
        self.updates = {key: update for key, update in self.updates.items() if key[0] >= oldest}

    async def only(self, generations: dict[int, Generation]) -> None:
        """Drop all other versions of the weights (generations), and wake the calls that wait for one."""
        async with self._news:
            self.generations = generations
            self._news.notify_all()


class ShardedWorker(Restored):
    """One worker's part of the sharded exchange. Master and other workers call its methods.

    Args:
        me: Number of this worker.
        ask: Calls workers.
        slot_states: Slot states that rounds on this worker have left.
        show: Receives the range that this worker stepped: begin, end, number of all values, and generation.

    Attributes:
        copies: The slot states on this worker, including its backups.
        shard: The range stepped last, as ``show`` receives it; None before the first one.
    """

    def __init__(
        self,
        me: int,
        ask: Ask,
        slot_states: KeptStates,
        show: Callable[[tuple[int, int, int, int]], object] = lambda shard: None,
    ) -> None:
        super().__init__()
        self._show = show
        self._me = me
        self._ask = ask
        self._store = Store()
        self.shard: tuple[int, int, int, int] | None = (
            None  # begin, end, number of values of the whole model, generation
        )
        self.copies = SlotCopies(slot_states, partial(self._call, role=COPIES))

    # -- verbs for the master -----------------------------------------------------------------------------------------

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
        """Store weights that the master sends, with outer optimizer state and the means that slots begin with.

        Other workers that ask for the weights get them encoded.
        """
        received = await asyncio.to_thread(Generation.from_weights, weights, state, codec, trainable)
        received.means = {name: Mean.from_group(group) for name, group in (means or {}).items()}
        await self._store.hold({generation: received})

    @concurrent
    async def hold_restored(self, generation: int, listed: dict[str, Any], codec: str, trainable: list[bool]) -> None:
        """Store the weights from the checkpoint slices that this worker has received, like ``Generation.restored``."""
        restored = await asyncio.to_thread(Generation.restored, self.take_restored(), listed, codec, trainable)
        await self._store.hold({generation: restored})

    @concurrent
    async def left_restored(
        self, slot: int, number: int, state: SlotState, lengths: dict[str, int], slice_number: int
    ) -> None:
        """Store a slot's state after a round, from a checkpoint slice that this worker has received."""
        self.copies.restore(slot, number, state, lengths, self.restored.pop(slice_number))

    @concurrent
    async def merge(self, message: dict[str, Any]) -> MergeFailure | None:
        """Compute the next weights together with the other owners.

        Args:
            message: The message of a ``Plan``.

        Returns:
            None if this worker has the new weights. Otherwise the failure.
        """
        plan = Plan.from_message(message)
        base = self._store.generation(plan.base)
        merging = Merging(self._me, plan, base, self._call)
        work: list[Coroutine[Any, Any, None]] = []
        for mean_plan in plan.means:  # first, because a state that is lost is an error before any work begins
            work += averaging(self._me, plan, mean_plan, merging.new, self.copies, self._call)
        work += merging.work()
        earlier = {number: old for number, old in self._store.generations.items() if number <= plan.base}
        await self._store.only({**earlier, plan.generation: merging.new})
        work += [self.copies.keep(slot, n, worker, plan.groups) for slot, n, worker, to in plan.left if to == self._me]
        failure = await failure_of(self._me, all_of(work))
        if failure is None:
            begin, end = merging.own_range
            self.shard = begin, end, size_of(base.weights), plan.generation
            self._show(self.shard)
        return failure

    @concurrent
    async def write(
        self, generation: int, begin: int, end: int, names: Sequence[str], destination: Destination
    ) -> Written[None]:
        """Write a range of the weights and the outer optimizer's state for it into a checkpoint.

        Raises:
            AppMissing: This worker does not have the range.
        """
        stored = self._store.generation(generation)
        state = stored.state_of((begin, end)) if stored.state else []
        values = cut_range(stored.weights, (begin, end)) if stored.codec is None else state.pop()
        parts = slice_arrays(stored.weights, (begin, end), names, values, state)
        return await asyncio.to_thread(write_if_seen, destination, parts, self._me), None

    @concurrent
    async def write_left(
        self, slot: int, number: int, groups: Sequence[str], destination: Destination
    ) -> Written[dict[str, int]]:
        """Write a slot's state that is on this worker into a checkpoint, like ``SlotCopies.write``."""
        return await self.copies.write(slot, number, groups, destination, self._me)

    @concurrent
    async def write_mean(self, generation: int, group: str, destination: Destination) -> Written[dict[str, int]]:
        """Write a mean of slot states into a checkpoint, in the format of the first slot's state."""
        arrays, lengths = left_parts(0, {group: mean_in(self._store.generation(generation), group).group()})
        return await asyncio.to_thread(write_if_seen, destination, arrays, self._me), lengths

    @concurrent
    async def compare(self, message: dict[str, Any]) -> list[Vector] | MergeFailure:
        """Compute this worker's part of the distances or cosines between the updates of all slots.

        Args:
            message: The fields of ``Pairs``.

        Returns:
            Matrices to add to the other owners' matrices, or the failure.
        """
        request = Pairs.from_message(message)
        base = self._store.generation(request.base)
        part = cut(size_of(base.weights), len(request.owners))[list(request.owners).index(self._me)]
        matrices: list[Vector] = []

        async def compute() -> None:
            matrices.extend(
                await sums(
                    request, base.weights, part, lambda sent, part: update_of(self._call, request.base, sent, part)
                )
            )

        return await failure_of(self._me, compute()) or matrices

    @concurrent
    async def lengths(self, generation: int, slot: int, groups: Sequence[Sequence[int]], factor: float) -> list[float]:
        """Return the norms of a slot's update on this worker, one for each group of tensors, times a factor.

        Raises:
            AppMissing: This worker does not have the update.
        """
        encoded, like = self._store.sent(generation, slot), self._store.generation(generation).weights

        def computed() -> list[float]:
            update = scaled(decode_update(encoded, like), factor)
            return [norm([update[i] for i in group]) for group in groups]

        return await asyncio.to_thread(computed)

    # -- for a round on this worker -----------------------------------------------------------------------------------

    async def begin(self, task: Task, like: Weights) -> Task:
        """Fetch everything that a slot's round begins with, and drop everything from earlier rounds.

        Args:
            task: The round. Its weights are the message of ``HeldWeights``.
            like: Arrays with the shapes and types of the model's weights.

        Returns:
            The task with the fetched slot state and means, without the weights.

        Raises:
            AppMissing: No worker returns them.
        """
        reference = HeldWeights.from_message(task.weights)
        await self.have(reference, like)
        await self._store.only_since(reference.generation)
        task = await self.copies.have(task, reference.left)
        return dataclasses.replace(task, **begins_with(self.means(reference.generation), reference.means, like))

    async def have(self, reference: HeldWeights, like: Weights) -> None:
        """Fetch a whole version of the weights (a generation), and means of slot states, unless this worker has them.

        Args:
            reference: The weights and the means, with the workers that have them.
            like: Arrays with the shapes and types of the model's weights.

        Raises:
            AppMissing: No worker returns them.
        """
        await self._bring(reference.generation, reference.at, like)
        generation = self._store.generation(reference.generation)
        await bring(self._call, self._in_turn(reference.at), reference.generation, generation, reference.means)

    def means(self, generation: int) -> SlotState:
        """Return the means of slot states that belong to a version of the weights on this worker, by group.

        Raises:
            AppMissing: This worker does not have the generation.
        """
        return {name: mean.group() for name, mean in self._store.generation(generation).means.items()}

    def _in_turn(self, workers: Sequence[int]) -> list[int]:
        """Return workers in an order that differs from caller to caller.

        So the callers do not all ask the same worker first.
        """
        return sorted(workers, key=lambda worker: (worker - self._me) % (max(workers) + 1))

    async def _bring(self, generation: int, holders: Sequence[int], like: Weights) -> None:
        if generation not in self._store.generations:
            fetched = Generation([np.empty(w.shape, w.dtype) for w in like])
            fetched.ready = {piece: asyncio.Event() for piece in pieces((0, size_of(like)), PIECE)}
            reason = "nobody has them"
            for worker in self._in_turn(holders):
                try:
                    await fetch(self._call, worker, ("values", generation), fetched, list(fetched.ready))
                    break
                except Unreached as error:
                    reason = f"worker {worker}: {error.reason}"
            else:
                raise AppMissing(f"the weights of this round are unavailable: {reason}")
            await self._store.hold({generation: fetched})

    def weights(self, generation: int) -> Weights:
        """Return the whole weights of a generation (a version) on this worker. The caller must not change them.

        Raises:
            AppMissing: This worker does not have them.
        """
        return self._store.generation(generation).weights

    def sent(
        self,
        task: Task,
        update: EncodedUpdate,
        names: Sequence[str],
        tensors: Sequence[int] | None = None,
        *,
        copy: bool = False,
    ) -> Fault | None:
        """Keep a slot's update on this worker. The caller must not change it afterwards. Any thread may call this.

        Args:
            task: The task that produced the update.
            update: The encoded update.
            names: Paths of the weights, for reports.
            tensors: Numbers of the update's tensors; None for all. The update of all other tensors is zero.
            copy: Whether to copy the update, because its arrays may change.

        Returns:
            The fault that makes the update unusable; None if it is usable.
        """
        generation = HeldWeights.from_message(task.weights).generation
        like = self.weights(generation)
        if copy:
            update = {
                **update,
                "payloads": [{name: np.array(a) for name, a in payload.items()} for payload in update["payloads"]],
            }
        if tensors is not None:
            nothing: list[Payload] = [{"raw": np.broadcast_to(np.zeros((), w.dtype), w.shape)} for w in like]
            update = {**update, "payloads": with_values_at(nothing, tensors, update["payloads"])}
        self._store.updates[generation, task.slot] = update
        return fault(decode_update(update, like), len(task.indices), like, names)

    def measured(self, task: Task, statistics: Weights, indices: Sequence[int], names: Sequence[str]) -> Fault | None:
        """Keep the difference between a slot's moving statistics and the weights, as the slot's update.

        Args:
            task: The task that produced the statistics.
            statistics: The statistics.
            indices: Their places among the weights.
            names: Paths of the weights.

        Returns:
            The fault that makes the statistics unusable; None if they are usable.
        """
        like = self.weights(HeldWeights.from_message(task.weights).generation)
        old = [like[index] for index in indices]
        if (problem := fault(statistics, 1, old, [names[index] for index in indices])) is not None:
            return problem
        payloads: list[Payload] = [{"raw": np.asarray(w - value)} for w, value in zip(old, statistics, strict=True)]
        return self.sent(task, {"codec": "float32", "payloads": payloads}, names, indices)

    # -- verbs for other workers --------------------------------------------------------------------------------------

    @offered
    async def update(self, generation: int, slot: int, begin: int, end: int) -> dict[str, Any]:
        """Return a range of a slot's encoded update, for the owner of this range.

        Tensors that are all zero, such as frozen ones, are left out.

        Raises:
            AppMissing: This worker does not have the update.
        """
        like = self._store.generation(generation).weights
        return dict(as_sent(take_encoded(self._store.sent(generation, slot), like, (begin, end))))

    @offered
    async def values(self, generation: int, begin: int, end: int, since: int | None = None) -> Weights | EncodedUpdate:
        """Return a range of the weights, encoded, as soon as it is computed.

        Leave out tensors that are the same in generation ``since``, which the caller also has.

        Raises:
            AppMissing: This worker will not have the range.
        """
        stored = await self._store.expected(generation)
        await stored.wait_for((begin, end))
        previous = None if since is None else self._store.generations.get(since)
        return stored.sent((begin, end), previous)

    @offered
    async def mean(self, generation: int, group: str, begin: int, end: int) -> Weights:
        """Return a range of a mean of slot states as soon as it is computed.

        Raises:
            AppMissing: This worker will not have the mean.
        """
        mean = mean_in(await self._store.expected(generation), group)
        await mean.of.wait_for((begin, end))
        return cut_range(mean.of.weights, (begin, end))

    @offered
    async def mean_shapes(self, generation: int, group: str) -> Shapes:
        """Return the shapes and types of a mean of slot states.

        Raises:
            AppMissing: This worker will not have the mean.
        """
        return shapes(await self._store.expected(generation), group)

    @offered
    async def peaks(self, generation: int) -> list[float]:
        """Return the largest magnitude of each tensor in this worker's range, which some codecs need.

        Wait until the range is computed. The result is 0 for tensors outside it.

        Raises:
            AppMissing: This worker will not have the generation.
        """
        stored = await self._store.expected(generation)
        await stored.stepped.wait()
        return list(stored.within)

    @offered
    async def kept(self, generation: int, begin: int, end: int) -> State:
        """Return the outer optimizer's state of a range as soon as it is computed.

        Raises:
            AppMissing: This worker will not have the generation or the state.
        """
        stored = await self._store.expected(generation)
        await stored.wait_for((begin, end))
        return stored.state_of((begin, end))

    # -- parts --------------------------------------------------------------------------------------------------------

    async def exact(self, generation: int, parts: Sequence[Sequence[int]]) -> Weights:
        """Return the exact weights of a generation (a version), as they are before a codec rounds them.

        They come from the workers that have parts of them.

        Args:
            generation: Number of the generation.
            parts: Ranges and their workers, as in ``Plan.state``.

        Raises:
            Unreached: A worker does not return its part.
        """
        weights = [np.empty(w.shape, w.dtype) for w in self.weights(generation)]
        for part, worker in within((0, size_of(weights)), [((begin, end), holder) for begin, end, holder in parts]):

            async def fetch_piece(piece: Slice, worker: int = worker) -> None:
                write(worker, weights, piece, (await self._call(worker, "kept", generation, *piece))[-1])

            await limited(fetch_piece, pieces(part))
        return weights

    async def _call(self, worker: int, verb: str, *arguments: Any, role: str = EXCHANGE) -> Any:
        """Call a method of an object on a worker, which may be this one, and return the answer.

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
        """Do nothing, since the replica frees the arrays.

        Every ``Role`` (an object that workers can call) needs this method.
        """
