"""Trains each slot in its own loop, and yields the replies one by one. Runs on the master; use ``arrivals``.

Each slot has its own asyncio task. The task sends a round to a worker, hands over the reply, and continues after the
strategy has handled it. So the strategy handles one reply at a time while all other slots train.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from ddlf.algorithms.partition import steps_by_speed
from ddlf.algorithms.reading_order import SlotSamples
from ddlf.algorithms.weights import Weights
from ddlf.events import PartsChanged
from ddlf.training.crew.crew import SlotLeftOut
from ddlf.training.run import Run, all_workers_away
from ddlf.training.slot.task import Reply, Task

Begin = Callable[[dict[str, Weights], Weights, int], Weights]
"""Returns a slot's initial weights for a round; arguments: the loop's state, the global weights and the slot."""


Carry = Callable[[int, int, Any, Callable[[], Task]], Coroutine[Any, Any, Reply]]
"""Has workers train a round of a slot; arguments: the slot, its round, its samples, and a function that makes the
task."""

Gate = Callable[[int, int], bool]
"""Returns whether a slot may begin a round; both arguments count from 0."""


def always(slot: int, number: int) -> bool:
    """Return True. As the default ``gate``, it lets every slot begin its next round."""
    return True


def global_weights(state: dict[str, Weights], weights: Weights, slot: int) -> Weights:
    """Return the global weights. As the default ``begin``, it lets every slot begin with them."""
    return weights


def arrivals(
    run: Run,
    begin: Begin = global_weights,
    bound: int | None = None,
    *,
    paced: bool = False,
    gate: Gate = always,
    carry: Carry | None = None,
) -> AsyncIterator[Reply]:
    """Yield the replies of all slots with accepted updates, in the order of arrival.

    Every slot begins its next round as soon as the loop has handled its reply.

    Args:
        run: The run.
        begin: Computes a slot's initial weights for a round from the loop's state, the global weights and the slot.
        bound: Rounds that a slot may be ahead of the slowest one; None for no limit.
        paced: Whether faster slots get more steps in a round.
        gate: Whether a slot may begin a round, both numbered from 0. It is called again after each reply and after
            ``turn``.
        carry: Has workers carry a slot's round; None for one worker.
    """
    run.progress.begin_async()
    run.loops = loops = Arrivals(run, begin, bound, paced, gate, carry)
    return loops.replies()


MEASURED = 2
"""Number of rounds of every slot before measured speeds are used: the first round is slow, because the worker compiles
the model."""


class Arrivals:
    """Trains the slots (shares of the training) of one run, each in its own rounds.

    Args:
        run: The run; its progress has the completed rounds of each slot.
        begin: Returns the initial weights of a slot's round.
        bound: Rounds that a slot may be ahead of the slowest one; None for no limit.
        paced: Whether faster slots get more steps in a round.
        gate: Returns whether a slot may begin a round.
        carry: Has workers carry a slot's round; None for one worker.
    """

    def __init__(
        self,
        run: Run,
        begin: Begin,
        bound: int | None,
        paced: bool,
        gate: Gate = always,
        carry: Carry | None = None,
    ) -> None:
        self._run = run
        self._carry = carry or run.carry
        self._gate = gate
        self._begin = begin
        self._bound = bound
        self.paced = paced
        self._epochs = run.progress.epochs_done
        self._arrived = run.progress.version + len(run.progress.dropped)
        # With a bound of 0, all slots use the weights and the loop's state of the first task of a round.
        self._in_step: tuple[Task, dict[str, Weights]] | None = None
        self._turned = asyncio.Event()  # set when the loop has handled a reply, or the run is ending
        self._begun = list(run.progress.slot_rounds)
        self._latest: dict[int, Reply] = {}  # slot -> its last accepted update, for comparisons
        self._reporting: dict[int, asyncio.Task[None]] = {}  # slot -> the hooks of its last commit
        self._keeping: dict[int, asyncio.Future[None]] = {}  # slot -> the turn of its checkpoint
        self._tested: dict[int, asyncio.Future[None]] = {}  # slot -> the hooks, if a worker evaluates for them
        self._absent: set[int] = set()  # slots whose own worker is away
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: asyncio.Queue[asyncio.Task[None] | tuple[Reply, asyncio.Future[None]]] = asyncio.Queue()

    async def replies(self) -> AsyncIterator[Reply]:
        """Yield the accepted replies of all slots in the order of their arrival.

        Ends when all slots have done their rounds, or the run is ending, and all hooks have returned.
        """
        run = self._run
        for slot in range(run.slots):
            self._spawn(self._loop(slot))
        while self._tasks or not self._news.empty():
            news = await self._news.get()
            if isinstance(news, asyncio.Task):
                news.result()  # raises the task's error, if it failed
                continue
            reply, handled = news
            run.arrived = time.perf_counter()
            if not run.stopping:
                accepted = run.judge.judge_arrival(reply, self._latest, singly=run.exchange.weights_out.stays)
                self._end_absent(reply)
                if accepted is not None:
                    self._latest[reply.slot] = reply
                    yield accepted
                else:
                    self._drop(reply.slot, reply.task.round, reply.worker)
            handled.set_result(None)
            self.turn()

    def ends_epoch(self, number: int) -> bool:
        """Return whether the merge of a slot's round completes one more epoch over all samples by all slots."""
        progress = self._run.progress
        if not self.paced:  # rejected updates count here, too
            of_epoch = progress.updates_of_epoch(number)
            arrived, self._arrived = self._arrived, progress.version + len(progress.dropped)
            return self._arrived // of_epoch > arrived // of_epoch
        before, self._epochs = self._epochs, progress.epochs_done
        return self._epochs > before

    def will_end_epoch(self, number: int) -> bool:
        """Return what ``ends_epoch`` will return when a slot's next round is committed.

        Not for slots with different numbers of steps.
        """
        progress = self._run.progress
        of_epoch, arrived = progress.updates_of_epoch(number), progress.version + 1 + len(progress.dropped)
        return arrived // of_epoch > self._arrived // of_epoch

    def committed(
        self,
        replies: Sequence[Reply],
        reporting: asyncio.Task[bool],
        keeping: asyncio.Future[None] | None,
        *,
        remote: bool = False,
    ) -> None:
        """Make some slots wait for the checkpoint and the user's hooks, after their updates were merged.

        They wait for the turn of the checkpoint before their next round, and for the hooks after it.

        Args:
            replies: The replies of these slots.
            reporting: Ends when the hooks have been called.
            keeping: Ends when the checkpoint has its turn; None without a checkpoint.
            remote: Whether one of their workers must evaluate first, which it cannot do while it trains.
        """
        reported = self._spawn(self._tell(reporting))
        for reply in replies:
            self._reporting[reply.slot] = reported
            if keeping is not None:
                self._keeping[reply.slot] = keeping
            if remote:
                self._tested[reply.slot] = reported

    async def close(self) -> None:
        """Cancel the training of all slots, and wait until it has ended."""
        tasks = [*self._tasks, *self._keeping.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _loop(self, slot: int) -> None:
        run, progress = self._run, self._run.progress
        number = progress.following(slot, progress.slot_rounds[slot])
        while number < len(progress.epochs):
            while not run.stopping and not self._may_begin(slot, number):
                await self._turned.wait()
            if run.stopping:
                return
            await self._round_begins(slot, number)
            partition = await run.partition(slot, number)
            run.tries[slot] = 0
            try:
                reply = await self._carry(slot, number, partition, partial(self._task, slot, number, partition))
            except SlotLeftOut as left:
                await self._wait_for_worker(number, left)
                if progress.slot_rounds[slot] > number:
                    return  # the other slots have ended meanwhile
                continue
            if slot in self._reporting:
                await self._reporting.pop(slot)  # at most K records, with their weights, may wait for an evaluation
            if run.stopping or reply.stopped:
                return
            handled = asyncio.get_running_loop().create_future()
            self._news.put_nowait((reply, handled))
            await handled
            for waits in (self._keeping, self._tested):
                if slot in waits:
                    await waits.pop(slot)
            number = progress.following(slot, number + 1)

    async def _wait_for_worker(self, number: int, absence: SlotLeftOut) -> None:
        """Let the other slots continue without a slot whose own worker is away, until it is back or they have ended.

        Args:
            number: The slot's round, from 0.
            absence: The slot and the reason.

        Raises:
            ClusterTooSmall: The workers of all slots that have rounds left are away.
        """
        run, slot, ends = self._run, absence.slot, len(self._run.progress.epochs)
        self._absent.add(slot)
        run.report_missed(absence, number)
        unfinished = {other for other, done in enumerate(run.progress.slot_rounds) if done < ends}
        if unfinished <= self._absent:
            raise all_workers_away(run)
        self.turn()  # the others need not wait for this slot
        returning = asyncio.ensure_future(run.crew.returned(slot))
        try:
            while not returning.done() and run.progress.slot_rounds[slot] == number and not run.stopping:
                turned = asyncio.ensure_future(self._turned.wait())
                await asyncio.wait([returning, turned], return_when=asyncio.FIRST_COMPLETED)
                turned.cancel()
        finally:
            returning.cancel()
        self._absent.discard(slot)

    def _end_absent(self, reply: Reply) -> None:
        """End the slots whose workers are away, if this reply is the last one of all other slots."""
        progress = self._run.progress
        ends, absent = len(progress.epochs), self._absent - {reply.slot}
        present = [slot for slot in range(self._run.slots) if slot not in absent and slot != reply.slot]
        others_end = all(progress.slot_rounds[slot] >= ends for slot in present)
        if others_end and progress.following(reply.slot, reply.task.round + 1) >= ends:
            for slot in absent:
                self._run.end_slot_early(slot, range(progress.slot_rounds[slot], ends))

    async def _round_begins(self, slot: int, number: int) -> None:
        """Let new workers join, and use new partition files, when the first slot begins a round."""
        self._run.began[slot] = time.perf_counter()
        self._run.crew.meet_new_workers()
        self._grow()
        if number >= max(self._begun):
            await self._run.use_newest_files(self._first)
        self._pace(number)
        self._begun[slot] = number + 1

    def _may_begin(self, slot: int, number: int) -> bool:
        """Return whether a slot may begin a round now.

        The gate must allow it, rounds by speed need measured speeds, and the slot must not be too far ahead of others.
        """
        if not self._gate(slot, number):
            return False
        if self.paced and number >= MEASURED and min(self._run.progress.slot_rounds) < MEASURED:
            return False
        present = [done for other, done in enumerate(self._run.progress.slot_rounds) if other not in self._absent]
        return self._bound is None or number <= min(present) + self._bound

    def _task(self, slot: int, number: int, partition: SlotSamples) -> Task:
        run = self._run
        run.tries[slot] += 1
        task, state = run.task(slot, number, partition), dict(run.state)
        if self._bound == 0:
            if self._in_step is None or self._in_step[0].round < number:
                self._in_step = task, state
            first, state = self._in_step
            task = dataclasses.replace(task, weights=first.weights, version=first.version)
        run.read[slot] = state
        return dataclasses.replace(task, weights=self._begin(state, task.weights, slot))

    def _drop(self, slot: int, number: int, worker: int) -> None:
        """Note that the update of a slot's round was rejected."""
        self._run.progress.slot_rounds[slot] = self._run.progress.following(slot, number + 1)
        self._run.progress.dropped[slot, number] = worker

    def turn(self) -> None:
        """Wake all waiting slots, so that they check again whether they may begin their next round."""
        self._turned.set()
        self._turned = asyncio.Event()

    def _grow(self) -> None:
        """Add slots for workers that have joined the run.

        They begin with the first round, or epoch, that no slot has begun. It and later rounds get more parts.
        """
        progress, first = self._run.progress, self._first()
        for slot in self._run.grow(first) if first < len(progress.epochs) else ():
            progress.slot_rounds.append(first)
            self._begun.append(first)
            self._spawn(self._loop(slot))

    def _first(self) -> int:
        """Return the first round that no slot has begun, among the rounds that begin an epoch."""
        first = max(self._begun)
        while not self._run.progress.begins_epoch(first):
            first += 1
        return first

    def _pace(self, number: int) -> None:
        """Divide the samples of rounds that no slot has begun in proportion to the slots' speeds."""
        run, progress = self._run, self._run.progress
        if not self.paced or number < max(self._begun):
            return
        batch = run.facts.batch_size
        parts = tuple(batch * steps for steps in steps_by_speed(progress.portion // batch, progress.speeds))
        if parts != (progress.parts_in(number) or (progress.portion,) * run.slots):
            progress.cut(number, parts)
            run.crew.emit(PartsChanged(round=number + 1, samples=parts))

    async def _tell(self, reporting: asyncio.Task[bool]) -> None:
        run = self._run
        if await reporting and not run.stopping:
            run.stopping = True
            self.turn()
            await run.stop_workers()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: only the first error is raised
        self._news.put_nowait(task)
