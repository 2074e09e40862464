"""The workers of one training run, which may come and go. Runs on the master.

``Schedule`` decides which worker carries which slot; here that is done: requests are sent, losses noticed, lost workers connected again and given
the app and its data anew. Training itself only says ``await crew.carry(slot, work)`` and gets the result, whoever carried it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import (
    AppMissing,
    AuthError,
    ClusterTooSmall,
    ConnectError,
    DDLFError,
    ExecutorCrashed,
    LeaseError,
    RequestTimeout,
    VersionError,
    WorkerLost,
)
from ddlf.training.record import TrainingEvent
from ddlf.training.schedule import Ended, Finished, GiveUp, Lost, Ready, RoundBegan, Schedule, Start, Stop, Wanted

log = logging.getLogger(__name__)

WAIT_FOR_WORKERS_S = 60.0
OPENING_S = 60.0
MAX_REJECTED = 3
RETRY_S = (0.2, 10.0)
"""First and longest pause between two attempts to bring a worker back whose executor keeps ending."""
LOSS = (WorkerLost, ExecutorCrashed, ConnectError, AppMissing)

Work = Callable[[ProxyWorker, bool], Awaitable[Any]]
"""Carries a slot on a worker; the flag says whether that worker still holds what the slot's last round left there."""


class Crew:
    """Use as ``async with``: at the end nothing of it runs any more.

    Attributes:
        losses: How many copies of slots ended with their worker so far.

    Args:
        cluster: Its workers have been opened for this run already.
        open_worker: Gives a worker that is new, or came back, what the run needs. Its errors other than losses put that worker out of this run.
        observe: Takes each event.
        backups: Whether stragglers' slots are given to a second worker.
        wait_s: How long to go on without any worker.
    """

    def __init__(
        self,
        cluster: Cluster,
        open_worker: Callable[[ProxyWorker], Coroutine[Any, Any, Any]],
        observe: Callable[[TrainingEvent], None],
        *,
        backups: bool = True,
        wait_s: float = WAIT_FOR_WORKERS_S,
    ) -> None:
        self._cluster = cluster
        self._open_worker = open_worker
        self._observe = observe
        self._wait_s = wait_s
        self._schedule = Schedule(backups=backups)
        self._workers: dict[int, ProxyWorker] = {}
        self._opened: dict[int, int] = {}  # how often each worker was given the app: what it held before is gone
        self._holds: dict[int, tuple[int, int]] = {}  # slot -> (worker, its number of openings) that carried it last
        self._wanted: dict[int, tuple[Work, asyncio.Future[Any], int]] = {}
        self._distrusted: Counter[int] = Counter()
        self._round = 0
        self.losses = 0
        self._attempts: dict[int, asyncio.Task[None]] = {}
        self._recoveries: dict[int, asyncio.Task[None]] = {}
        self._opening: set[asyncio.Future[Any]] = set()
        self._waking: asyncio.Handle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._last_loss: Exception | None = None

    async def __aenter__(self) -> Self:
        for worker in self._cluster.workers:
            self._workers[worker.id] = worker
            self._opened[worker.id] = 0
            self._schedule.apply(Ready(worker.id))
        self.meet_new_workers()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None and self._opening:
            # Cancelling would cost the worker its executor, which is building the model for this run, and the next run would find none.
            await asyncio.wait(self._opening, timeout=OPENING_S)
        for handle in (self._waking, self._patience):
            if handle is not None:
                handle.cancel()
        tasks = [*self._attempts.values(), *self._recoveries.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin_round(self) -> None:
        """Say that a round begins; workers that came meanwhile take part from here on."""
        self._schedule.apply(RoundBegan())
        self.meet_new_workers()

    async def carry(self, slot: int, number: int, work: Work, *, avoid: frozenset[int] = frozenset()) -> Any:
        """Have a slot carried by some worker, by another one if that is lost.

        Args:
            slot: Which, from 0.
            number: Of its round, from 0.
            work: Carries it on the worker that it is given.
            avoid: Workers that are not to carry it, as long as there is another one.

        Returns:
            What ``work`` returned.

        Raises:
            ClusterTooSmall: No worker was left, and none came back in time.
            ExecutorCrashed: The slot ended three executors.
            LeaseError: Another master took the workers over.
            DDLFError: What ``work`` raised.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._wanted[slot] = work, future, number
        self._round = max(self._round, number)
        self._schedule.apply(Wanted(slot, avoid))
        self._advance_soon()
        return await future

    def others_than(self, workers: frozenset[int]) -> bool:
        """Whether there is any worker but these."""
        return bool(self._schedule.workers - workers)

    def distrust(self, slot: int, worker: int, why: str) -> None:
        """Say that what a worker brought for a slot does not count; the third time in a row it is out of this run, if there is another one.

        Args:
            slot: Which; what the worker holds of it is worth nothing.
            worker: That carried it.
            why: A sentence.
        """
        self._holds.pop(slot, None)
        self._distrusted[worker] += 1
        self._say("rejected", worker, slot, f"worker {worker}, {why}")
        if self._distrusted[worker] == MAX_REJECTED and self.others_than(frozenset({worker})):
            self._schedule.apply(Lost(worker))
            self._say(
                "gone",
                worker,
                None,
                f"worker {worker} takes no part any more: {MAX_REJECTED} of its updates in a row were rejected",
            )

    def trust(self, worker: int) -> None:
        """Say that a worker's update was accepted."""
        self._distrusted[worker] = 0

    # -- doing what the schedule says -------------------------------------------------------------------------------

    def _advance_soon(self, delay_s: float = 0.0) -> None:
        """Ask the schedule after all that happens in this turn of the loop, so that it sees all slots of a round at once."""
        loop = asyncio.get_running_loop()
        if self._waking is not None:
            self._waking.cancel()
        self._waking = loop.call_later(delay_s, self._advance) if delay_s else loop.call_soon(self._advance)

    def _advance(self) -> None:
        loop = asyncio.get_running_loop()
        for action in self._schedule.plan(loop.time()):
            match action:
                case Start(slot, worker, backup):
                    if backup:
                        self._say("backup", worker, slot, f"slot {slot + 1} is late, worker {worker} computes it too")
                    self._attempts[worker] = loop.create_task(self._attempt(slot, worker))
                case Stop(worker):
                    self._attempts[worker].cancel()
                case GiveUp(slot):
                    self._fail(slot, self._last_loss or ExecutorCrashed("a slot ended its executors"))
        self._watch_for_nobody()
        wake_at = self._schedule.wake_at()
        if wake_at is not None:
            self._advance_soon(max(wake_at - loop.time(), 0.001))

    async def _attempt(self, slot: int, number: int) -> None:
        loop = asyncio.get_running_loop()
        worker = self._workers[number]
        work, future, _ = self._wanted[slot]
        holder = number, self._opened[number]
        self._say("start", number, slot)
        try:
            result = await work(worker, self._holds.get(slot) == holder)
        except asyncio.CancelledError:
            self._schedule.apply(Ended(number))
        except LOSS as error:
            self._lose(worker, slot, error)
        except Exception as error:
            if self._schedule.apply(Finished(number, loop.time())) and not future.done():
                future.set_exception(error)
        else:
            if self._schedule.apply(Finished(number, loop.time())) and not future.done():
                self._holds[slot] = holder
                future.set_result(result)
                self._say("finish", number, slot)
        self._advance_soon()

    def _fail(self, slot: int, error: Exception) -> None:
        future = self._wanted[slot][1]
        if not future.done():
            future.set_exception(error)

    # -- losing and finding workers ---------------------------------------------------------------------------------

    def _lose(self, worker: ProxyWorker, slot: int, error: Exception) -> None:
        self._last_loss = error
        self.losses += 1
        self._schedule.apply(Lost(worker.id, crashed=isinstance(error, ExecutorCrashed)))
        first_line = str(error).partition("\n")[0]
        self._say(
            "lost",
            worker.id,
            slot,
            f"{first_line}; slot {slot + 1} goes to another one, or to this one when it is back",
        )
        self._recover(worker, "back")

    def _recover(self, worker: ProxyWorker, kind: str) -> None:
        if worker.id not in self._recoveries:
            task = asyncio.get_running_loop().create_task(self._bring_back(worker, kind))
            self._recoveries[worker.id] = task

    async def _bring_back(self, worker: ProxyWorker, kind: str) -> None:
        pause = RETRY_S[0]
        try:
            while True:
                try:
                    await worker.reconnect()
                    opening = asyncio.ensure_future(self._open_worker(worker))
                    self._opening.add(opening)
                    opening.add_done_callback(self._opening.discard)
                    await opening
                    break
                except LeaseError:
                    raise
                except (*LOSS, RequestTimeout) as error:
                    log.debug("%s is not back yet: %s", worker.name, error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, RETRY_S[1])
        except LeaseError as error:
            for slot in self._schedule.open:  # somebody else leads now: this master must not go on
                self._fail(slot, error)
        except (AuthError, VersionError, DDLFError) as error:
            self._say("gone", worker.id, None, f"{error}; it takes no part in this run any more")
        else:
            self._opened[worker.id] = self._opened.get(worker.id, -1) + 1
            self._workers[worker.id] = worker
            self._cluster.take_in(worker)
            self._schedule.apply(Ready(worker.id))
            self._say(kind, worker.id, None, f"{worker.name} takes part{' again' if kind == 'back' else ''}")
        finally:
            self._recoveries.pop(worker.id, None)
        self._advance_soon()

    def meet_new_workers(self) -> None:
        """Bring in workers that the cluster has since a while."""
        for worker in (*self._cluster.workers, *self._cluster.missing):
            if worker.id not in self._opened:
                self._opened[worker.id] = -1
                self._recover(worker, "joined")

    def _watch_for_nobody(self) -> None:
        """Wait a while when the last worker is gone."""
        if self._schedule.workers or not self._schedule.open:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None
        elif self._patience is None:
            self._say("waiting", None, None, f"no worker is left; waiting {self._wait_s:g} s for one to come back")
            self._patience = asyncio.get_running_loop().call_later(self._wait_s, self._give_up)

    def _give_up(self) -> None:
        error = ClusterTooSmall(
            f"all workers are lost, and none came back within {self._wait_s:g} s",
            hint="look at the workers' terminals; the last loss was: " + str(self._last_loss).partition("\n")[0],
        )
        for slot in self._schedule.open:
            self._fail(slot, error)

    def _say(self, kind: Any, worker: int | None, slot: int | None, text: str = "") -> None:
        number = self._round if slot is None else self._wanted[slot][2]
        shown = None if slot is None else slot + 1
        self._observe(TrainingEvent(kind=kind, round=number + 1, worker=worker, slot=shown, text=text))
