"""Slots that each loop on their own, and their replies one by one. Runs on the master; ``Run.arrivals`` is the way in.

Each slot has a task of its own, which has its round carried, hands the reply over, and goes on when that was looked at. So an algorithm handles one
reply at a time, while all other slots are carried.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddlf.roles.task import Reply
from ddlf.training.gather import judged_alone

if TYPE_CHECKING:
    from ddlf.training.run import Run


class Arrivals:
    """The slots of one run, each in its own round.

    Args:
        run: The run; its progress says how many rounds each slot has done.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begun = list(run.progress.slot_rounds)
        self._latest: dict[int, Reply] = {}  # of each slot the last update that counted, to compare with
        self._told: dict[int, asyncio.Task[None]] = {}  # of each slot the hooks of its last commit
        self._keeping: dict[int, asyncio.Future[None]] = {}  # and the turn of its checkpoint
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: asyncio.Queue[asyncio.Task[None] | tuple[Reply, asyncio.Future[None]]] = asyncio.Queue()

    async def replies(self) -> AsyncIterator[Reply]:
        """See ``Run.arrivals``. Ends when all slots have done their rounds or the run is to end, and all hooks have."""
        run = self._run
        for slot in range(run.slots):
            self._spawn(self._loop(slot))
        while self._tasks or not self._news.empty():
            news = await self._news.get()
            if isinstance(news, asyncio.Task):
                news.result()  # raises what ended it
                continue
            reply, handled = news
            run.arrived = time.perf_counter()
            if not run.stopping:
                fit = judged_alone(run, reply, self._latest)
                if fit is None:  # it is dropped
                    run.progress.slot_rounds[reply.slot] = reply.task.round + 1
                else:
                    self._latest[reply.slot] = reply
                    yield fit
            handled.set_result(None)

    def committed(
        self, replies: Sequence[Reply], reporting: asyncio.Task[bool], keeping: asyncio.Future[None] | None
    ) -> None:
        """Have the slots of a commit wait for what it brought about: for its checkpoint before, for its hooks after their next round."""
        told = self._spawn(self._tell(reporting))
        for reply in replies:
            self._told[reply.slot] = told
            if keeping is not None:
                self._keeping[reply.slot] = keeping

    async def close(self) -> None:
        """End all slots."""
        tasks = [*self._tasks, *self._keeping.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _loop(self, slot: int) -> None:
        run, progress = self._run, self._run.progress
        for number in range(progress.slot_rounds[slot], len(progress.epochs)):
            if run.stopping:
                return
            run.began[slot] = time.perf_counter()
            run.crew.meet_new_workers()
            self._grow()
            self._begun[slot] = number + 1
            part = await run.part(slot, number)
            reply = await run.carry(slot, number, partial(run.task, slot, number, part))
            if slot in self._told:
                await self._told.pop(slot)  # so at most K records wait for a test, each with its weights
            if run.stopping or reply.stopped:
                return
            handled = asyncio.get_running_loop().create_future()
            self._news.put_nowait((reply, handled))
            await handled
            if slot in self._keeping:
                await self._keeping.pop(slot)

    def _grow(self) -> None:
        """New workers get slots that begin with the first round that nobody has begun: it and those after it are cut into more parts."""
        first = max(self._begun)
        for slot in self._run.grow(first) if first < len(self._run.progress.epochs) else ():
            self._run.progress.slot_rounds.append(first)
            self._begun.append(first)
            self._spawn(self._loop(slot))

    async def _tell(self, reporting: asyncio.Task[bool]) -> None:
        run = self._run
        if await reporting and not run.stopping:
            run.stopping = True
            await run.stop_workers()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever comes second is heard of nowhere
        self._news.put_nowait(task)
