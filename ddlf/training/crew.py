"""The workers of one training run, which may come and go. Runs on the master.

``Schedule`` decides which worker carries which slot, ``Recovery`` brings workers in; here requests are sent, losses noticed, and all that is told.
Training itself only says ``await crew.carry(slot, work)`` and gets the result, whoever carried it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Self
from weakref import WeakSet

from ddlf import events
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import DDLFError, ExecutorCrashed, LeaseError
from ddlf.training.recovery import LOSS, Recovery, first_line, too_small, why_nobody
from ddlf.training.rounds import end_all
from ddlf.training.schedule import Ended, Finished, GiveUp, Lost, Ready, RoundBegan, Schedule, Start, Stop, Wanted

WAIT_FOR_WORKERS_S = 60.0
MAX_REJECTED = 3

_training: WeakSet[ProxyWorker] = WeakSet()
"""Workers that a crew of this process has: each holds the app of one run."""

Work = Callable[[ProxyWorker, bool], Awaitable[Any]]
"""Carries a slot on a worker; the flag says whether that worker still holds what the slot's last round left there."""


class Crew:
    """Use as ``async with``: at the end nothing of it runs any more.

    Attributes:
        losses: How many copies of slots ended with their worker so far.
        fixed_slots: K, if it stays what it is whoever comes.
        spared: Workers that carry no slot as long as there is another one: they have shards.

    Args:
        cluster: Workers, connected.
        open_worker: Gives a worker that is new, or came back, what the run needs. Its errors other than losses put that worker out of this run.
        emit: Takes each event.
        backups: Whether stragglers' slots are given to a second worker.
        wait_s: How long to go on without any worker.

    Raises:
        LeaseError: Another run of this process has one of the workers.
    """

    def __init__(
        self,
        cluster: Cluster,
        open_worker: Callable[[ProxyWorker], Coroutine[Any, Any, Any]],
        emit: Callable[[events.Event], None],
        *,
        backups: bool = True,
        wait_s: float = WAIT_FOR_WORKERS_S,
    ) -> None:
        self._cluster = cluster
        self._recovery = Recovery(self, open_worker, self._spawn)
        self.emit = emit
        self._wait_s = wait_s
        self._schedule = Schedule(backups=backups)
        self._workers: dict[int, ProxyWorker] = {}
        self._opened: dict[int, int] = {}  # how often each worker was given the app: what it held before is gone
        self._holds: dict[int, tuple[int, int]] = {}  # slot -> (worker, its number of openings) that carried it last
        self._wanted: dict[int, tuple[Work, asyncio.Future[Any], int, bool]] = {}
        self._distrusted: Counter[int] = Counter()
        self._round = 0
        self.losses = 0
        self.fixed_slots: int | None = None
        self.spared: frozenset[int] = frozenset()
        self._attempts: dict[int, asyncio.Task[None]] = {}
        # What each worker is when it comes: "opened" at the beginning, "joined" or "back".
        self._known_as: dict[int, str] = {}
        self._waking: asyncio.Handle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._last_loss: Exception | None = None
        self._begun = False
        self._first: dict[int, bool] = {}  # worker of the beginning -> whether its first opening is over, well or not
        self._held_back: list[events.WorkerGone] = []
        self._gone: list[DDLFError] = []
        self._failure: Exception | None = None
        self._told = False
        self._changed = asyncio.Event()
        self._closed = False

    async def __aenter__(self) -> Self:
        for worker in self._cluster.workers:
            if worker in _training:
                raise LeaseError(
                    f"{worker.name} is in another training run of this program",
                    hint="wait until that has ended, or give each run workers of its own: cluster.options(workers=[1])",
                )
        for worker in self._cluster.workers:
            self._first[worker.id] = False
            self._meet(worker, "opened")
        self.meet_new_workers()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._closed = True
        for handle in (self._waking, self._patience):
            if handle is not None:
                handle.cancel()
        tasks = [*self._attempts.values(), *self._recovery.end(at_once=not issubclass(kind or Exception, Exception))]
        await end_all(tasks)
        _training.difference_update(self._workers.values())
        if kind is None and not self._told:
            self._check()

    async def ready(self) -> None:
        """Wait until training can begin: each worker of the beginning is open, or was lost meanwhile, or cannot be opened; and one is open.

        Those that were lost are opened again behind this, as at any time later.

        Raises:
            DDLFError: No worker can be opened; of the first, with those of the others.
            ClusterTooSmall: All were lost, and none came back in time.
        """
        while not all(self._first.values()) or not self._schedule.workers:
            self._watch_for_nobody()
            self._check()
            self._changed.clear()
            await self._changed.wait()
        self._check()
        # In the order of the cluster, whichever was first: slots go to the same workers in each run.
        self._schedule.order([*self._workers])
        self._begun = True
        held_back, self._held_back = self._held_back, []
        for event in held_back:
            self.emit(event)

    def begin_round(self) -> None:
        """Say that a round begins; workers that came meanwhile take part from here on."""
        self._schedule.apply(RoundBegan())
        self.meet_new_workers()

    async def carry(
        self,
        slot: int,
        number: int,
        work: Work,
        *,
        avoid: frozenset[int] = frozenset(),
        leaves: bool = True,
        near: Mapping[int, int] = {},
    ) -> Any:
        """Have a slot carried by some worker, by another one if that is lost; gives what ``work`` returned.

        Args:
            slot: Which, from 0.
            number: Number of its round, from 0.
            work: Carries it on the worker that it is given.
            avoid: Workers that are not to carry it, as long as there is another one.
            leaves: Whether it is the slot's round, which leaves what the next one begins with.
            near: Bytes of what it reads that workers have on disks of their own, by their numbers.

        Raises:
            ClusterTooSmall: No worker was left, and none came back in time.
            ExecutorCrashed: The slot ended three executors.
            LeaseError: Another master took the workers over.
            DDLFError: What ``work`` raised.
        """
        self._check()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._wanted[slot] = work, future, number, leaves
        self._round = max(self._round, number)
        self._schedule.apply(Wanted(slot, avoid | self.spared, near))
        self._advance_soon()
        return await future

    @property
    def size(self) -> int:
        """Workers that carry a slot or could."""
        return len(self._schedule.workers)

    def others_than(self, workers: frozenset[int]) -> bool:
        """Whether there is any worker but these."""
        return bool(self._schedule.workers - workers)

    def member(self, worker: int) -> tuple[ProxyWorker, int] | None:
        """A worker that takes part, and how often it was given the app: when that has changed, what it held before is gone. None if it is lost."""
        return (self._workers[worker], self._opened[worker]) if worker in self._schedule.workers else None

    def distrust(self, slot: int, worker: int, why: str) -> None:
        """Say that what a worker brought for a slot does not count; the third time in a row it is out of this run, if there is another one.

        Args:
            slot: Which; what the worker holds of it is worth nothing.
            worker: Worker that carried it.
            why: A sentence.
        """
        self._holds.pop(slot, None)
        self._distrusted[worker] += 1
        self.emit(events.UpdateRejected(**self._of(slot), worker=worker, why=why))
        if self._distrusted[worker] == MAX_REJECTED and self.others_than(frozenset({worker})):
            self._schedule.apply(Lost(worker))
            self._tell_gone(events.WorkerGone(round=self._round + 1, worker=worker, rejected=MAX_REJECTED))

    def trust(self, worker: int) -> None:
        """Say that a worker's update was accepted."""
        self._distrusted[worker] = 0

    def served(self, worker: int) -> None:
        """Say that a worker has done its part: that it lost the app before counts no more."""
        self._recovery.served(worker)

    def progressed(self, slot: int) -> None:
        """Say that a slot has come further in its round than it ever was: executors that it ended before count no more."""
        self._schedule.progressed(slot)

    # -- doing what the schedule says -------------------------------------------------------------------------------

    def _advance_soon(self, delay_s: float = 0.0) -> None:
        """Ask the schedule after all that happens in this turn of the loop, so that it sees all slots of a round at once."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        if self._waking is not None:
            self._waking.cancel()
        self._waking = loop.call_later(delay_s, self._advance) if delay_s else loop.call_soon(self._advance)

    def _advance(self) -> None:
        try:
            self._act()
        except Exception as error:
            self.end(error)

    def _act(self) -> None:
        loop = asyncio.get_running_loop()
        for action in self._schedule.plan(loop.time()):
            match action:
                case Start(slot, worker, backup):
                    if backup:
                        self.emit(events.SlotBackedUp(**self._of(slot), worker=worker))
                    self._attempts[worker] = self._spawn(self._attempt(slot, worker))
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
        work, future, _, leaves = self._wanted[slot]
        holder = number, self._opened[number]
        if leaves:
            self.emit(events.SlotStarted(**self._of(slot), worker=number))
        try:
            result = await work(worker, self._holds.get(slot) == holder)
        except asyncio.CancelledError:
            self._schedule.apply(Ended(number))
        except LOSS as error:
            self.lose(worker, slot, error)
        except Exception as error:
            if self._schedule.apply(Finished(number, loop.time())) and not future.done():
                future.set_exception(error)
        else:
            self.served(number)
            if self._schedule.apply(Finished(number, loop.time())) and not future.done():
                if leaves:
                    self._holds[slot] = holder
                    self.emit(events.SlotFinished(**self._of(slot), worker=number))
                if not future.done():
                    future.set_result(result)
        self._advance_soon()

    def _fail(self, slot: int, error: Exception) -> bool:
        if waits := not (future := self._wanted[slot][1]).done():
            future.set_exception(error)
        return waits

    def _check(self) -> None:
        """Raise what has ended the run, if anything has."""
        if self._failure is not None:
            self._told = True
            raise self._failure

    def end(self, error: Exception) -> None:
        """End the run: who waits for anything here gets this error, now or later."""
        if self._failure is None:
            self._failure = error
            told = [self._fail(slot, error) for slot in self._wanted]
            self._told = True in told
        self._changed.set()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(self._look_at)
        return task

    def _look_at(self, task: asyncio.Future[Any]) -> None:
        """End the run with an error that nobody else would hear of."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.end(error)

    # -- losing and finding workers ---------------------------------------------------------------------------------

    def missed(self, worker: ProxyWorker, error: Exception) -> None:
        """Say that a worker does not answer; whoever carries a slot on it hears of that in any case."""
        if worker.id in self._schedule.free:
            self.lose(worker, None, error)

    def lose(self, worker: ProxyWorker, slot: int | None, error: Exception) -> None:
        """Say that a worker was lost with what it has of a slot."""
        self._last_loss = error
        self.losses += 1
        self._schedule.apply(Lost(worker.id, crashed=isinstance(error, ExecutorCrashed)))
        of = {"round": self._round + 1} if slot is None else self._of(slot)
        self.emit(events.WorkerLost(**of, worker=worker.id, why=first_line(error)))
        self._known_as[worker.id] = "back"
        self._recovery.bring_back(worker, error)

    def entered(self, worker: ProxyWorker) -> None:
        """A worker has what the run needs."""
        self._opened[worker.id] += 1
        self._cluster.take_in(worker)
        self._schedule.apply(Ready(worker.id))
        self._settle(worker)
        who: dict[str, Any] = {"round": self._round + 1, "worker": worker.id, "name": worker.name}
        known: Any = {"back": events.WorkerReturned, "opened": events.WorkerReady}.get(self._known_as[worker.id])
        self.emit(known(**who) if known else events.WorkerJoined(**who, workers=self.size, slots=self.fixed_slots))

    def absent(self, worker: ProxyWorker, error: DDLFError) -> None:
        """A worker is not there yet; it is tried again."""
        self._last_loss = error
        if self._known_as[worker.id] == "opened":
            self._known_as[worker.id] = "back"
            self.emit(events.WorkerLost(round=self._round + 1, worker=worker.id, why=first_line(error)))
            self._settle(worker)
        self.changed()

    def put_out(self, worker: ProxyWorker, error: DDLFError) -> None:
        """Go on without a worker. When none is left, its reason is why the run ends."""
        self._settle(worker)
        self._schedule.apply(Lost(worker.id))
        if isinstance(error, LeaseError):
            self.end(error)  # somebody else leads now: this master must not go on
            return
        self._gone.append(error)
        self._tell_gone(events.WorkerGone(round=self._round + 1, worker=worker.id, why=str(error)))

    def changed(self) -> None:
        """Look again at who is there."""
        self._changed.set()
        self._advance_soon()

    def _settle(self, worker: ProxyWorker) -> None:
        """Take note that the first opening of a worker is over, well or not."""
        if worker.id in self._first:
            self._first[worker.id] = True

    def meet_new_workers(self) -> None:
        """Bring in workers that the cluster has since a while."""
        for worker in (*self._cluster.workers, *self._cluster.missing):
            if worker.id not in self._opened and worker not in _training:
                self._meet(worker, "joined")

    def _meet(self, worker: ProxyWorker, kind: str) -> None:
        _training.add(worker)
        self._workers[worker.id] = worker
        self._opened[worker.id] = -1
        self._known_as[worker.id] = kind
        self._recovery.bring(worker)

    def _watch_for_nobody(self) -> None:
        """When the last worker is gone, wait a while for those that may come back; not at all if there is none."""
        wanted = self._schedule.open if self._begun else all(self._first.values())
        somebody = not wanted or self._schedule.workers or self._recovery.openings
        # Before the beginning those who never were there are not waited for: what the others cannot do they cannot either.
        coming = self._recovery.coming.keys() if self._begun else self._recovery.coming.keys() & self._first.keys()
        if somebody or not coming:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None
            if not somebody:
                self.end(why_nobody(self._gone, len(self._opened)))
        elif self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(self._wait_s, self._give_up)
            self.emit(events.WaitingForWorkers(round=self._round + 1, seconds=self._wait_s))

    def _give_up(self) -> None:
        self.end(too_small(self._wait_s, self._last_loss))

    def _of(self, slot: int) -> dict[str, int]:
        """Slot and round as events have them: from 1."""
        return {"slot": slot + 1, "round": self._wanted[slot][2] + 1}

    def _tell_gone(self, event: events.WorkerGone) -> None:
        (self.emit if self._begun else self._held_back.append)(event)  # if all are, that is one error and no event
