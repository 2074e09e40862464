"""The workers of one training run, which may come and go. Runs on the master.

``Schedule`` decides which worker carries which slot. ``Recovery`` brings workers in. The crew sends requests, notices
losses and emits events. Training code only calls ``await crew.carry(slot, ...)`` and gets the result, independent of
the worker.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple, Self
from weakref import WeakSet

from ddlf import events
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import AppMissing, DDLFError, ExecutorCrashed, LeaseError, WorkerLost
from ddlf.training.crew.recovery import LOSS, Recovery, end_all, first_line, no_worker_left, too_small
from ddlf.training.crew.schedule import (
    Ended,
    Finished,
    GiveUp,
    Leaving,
    LeftOut,
    Lost,
    Ready,
    RoundBegan,
    Schedule,
    Start,
    Stop,
    Wanted,
)

WAIT_FOR_WORKERS_S = 60.0
MAX_REJECTED = 3

_training: WeakSet[ProxyWorker] = WeakSet()
"""Workers in a crew of this process. A worker holds the app of one run only."""

Work = Callable[[ProxyWorker, bool], Awaitable[Any]]
"""Carries a slot on a worker. The flag says whether the worker still holds the state of the slot's last round."""


class SlotLeftOut(Exception):
    """Error: the worker that a slot belongs to is away, so the round continues without the slot.

    Args:
        slot: The slot, from 0.
        worker: Number of its worker; 0 if it has not come yet.
        reason: The reason, as a sentence.
    """

    def __init__(self, slot: int, worker: int, reason: str) -> None:
        super().__init__(reason)
        self.slot, self.worker, self.reason = slot, worker, reason


class SlotRequest(NamedTuple):
    """A call of ``Crew.carry``.

    Attributes:
        work, is_round: The arguments of these names.
        future: Receives the result of the work.
        round: Number of the slot's round, from 0.
    """

    work: Work
    future: asyncio.Future[Any]
    round: int
    is_round: bool


class Crew:
    """The workers of one run. Use it with ``async with``: when the block ends, all its tasks have ended.

    Args:
        cluster: The connected workers.
        open_worker: Sends the run's app and data to a new or returned worker. An error other than a loss excludes that
            worker from the run.
        emit: Receives each event.
        backups: Whether a second worker also gets the slot of a straggler.
        homes: The only worker of each slot, by slot, if slots belong to workers; None if any worker can carry any slot.
        wait_s: Longest time without any worker, and without the own worker of a slot, in seconds.

    Attributes:
        emit, wait_s: The arguments of these names.
        losses: The number of attempts at a slot that ended because the worker was lost.
        fixed_slots: K, if joining workers do not change it.
        carries: The name for the work of a worker: ``"slot"``, or ``"part"`` if all workers train one slot.
        spared: Workers that have servers; they carry a slot only if there are no others.
        finishes: Whether a worker that leaves finishes its slot first, if the time is enough.
        hand_back: Functions that fetch from a leaving worker what no other worker has. Each gets the worker's number.

    Raises:
        LeaseError: Another run of this process uses one of the workers.
    """

    def __init__(
        self,
        cluster: Cluster,
        open_worker: Callable[[ProxyWorker], Coroutine[Any, Any, Any]],
        emit: Callable[[events.Event], None],
        *,
        backups: bool = True,
        homes: Mapping[int, int] | None = None,
        wait_s: float = WAIT_FOR_WORKERS_S,
    ) -> None:
        self._cluster = cluster
        self._homes = homes
        self._recovery = Recovery(self, open_worker, self._spawn)
        self.emit = emit
        self.wait_s = wait_s
        self._schedule = Schedule(backups=backups, homes=homes)
        self._absent_since: dict[int, float] = {}  # worker that has its own slot -> when it was missed first
        self._returned: dict[int, asyncio.Event] = {}  # slot -> set when its own worker takes part
        self._excluded: dict[int, str] = {}  # worker that has left the run for good -> why
        self._workers: dict[int, ProxyWorker] = {}
        # how often each worker received the app; a worker loses its slot states each time
        self._opened: dict[int, int] = {}
        self._crashes: dict[int, ExecutorCrashed | None] = {}  # the last crash before each worker received the app
        self._holds: dict[int, tuple[int, int]] = {}  # slot -> (worker that carried it last, its number of openings)
        self._requests: dict[int, SlotRequest] = {}  # by slot
        self._distrusted: Counter[int] = Counter()
        self._round = 0
        self.losses = 0
        self.fixed_slots: int | None = None
        self.carries = "slot"
        self.spared: frozenset[int] = frozenset()
        self.finishes = True
        self.hand_back: list[Callable[[int], Awaitable[None]]] = []
        self._in_rounds = False
        self._unsettled: dict[int, int] = {}  # slot -> the worker of its last result, which may not be merged yet
        self._releasing: dict[int, asyncio.Task[None]] = {}
        self._attempts: dict[int, asyncio.Task[None]] = {}
        # How each worker joins: "opened" at the start, "joined" or "back".
        self._known_as: dict[int, str] = {}
        self._waking: asyncio.Handle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._last_loss: Exception | None = None
        self._begun = False
        self._first: dict[int, bool] = {}  # worker at the start -> whether its first opening has succeeded or failed
        self._held_back: list[events.WorkerGone] = []
        self._exclusions: list[DDLFError] = []
        self._failure: Exception | None = None
        self._was_raised = False
        self._changed = asyncio.Event()
        self._closed = False

    async def __aenter__(self) -> Self:
        for worker in self._cluster.workers:
            if worker in _training:
                raise LeaseError(
                    f"{worker.name} is in another training run of this program",
                    hint="wait until that run has ended, or give each run its own workers: cluster.options(workers=[1])",
                )
        for worker in self._cluster.workers:
            self._first[worker.id] = False
            self._bring_in(worker, "opened")
        self.meet_new_workers()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._closed = True
        for handle in (self._waking, self._patience):
            if handle is not None:
                handle.cancel()
        for worker in self._workers.values():
            worker.on_leaving = None
        tasks = [
            *self._attempts.values(),
            *self._releasing.values(),
            *self._recovery.end(at_once=not issubclass(kind or Exception, Exception)),
        ]
        await end_all(tasks)
        _training.difference_update(self._workers.values())
        if kind is None and not self._was_raised:
            self._check()

    async def ready(self) -> None:
        """Wait until training can begin.

        At least one worker must be open (have the app and the data), and the first opening of every worker must have
        ended.

        A first opening ends with an open worker, a loss or an error. ``Recovery`` opens lost workers again later. If slots
        belong to workers, the training waits ``wait_s`` for a lost one: its data has no slot if it misses the beginning.

        Raises:
            DDLFError: No worker can be opened; the first worker's error, joined with the other errors.
            ClusterTooSmall: All workers were lost, and none came back in time.
        """
        while not all(self._first.values()) or not self._schedule.workers:
            self._check_for_workers()
            self._check()
            self._changed.clear()
            await self._changed.wait()
        self._check()
        # Use the order of the cluster, not of arrival: slots go to the same workers in each run.
        self._schedule.order([*self._workers])
        self._begun = True
        held_back, self._held_back = self._held_back, []
        for event in held_back:
            self.emit(event)

    def begin_round(self) -> None:
        """Begin a round. Workers that joined in the meantime get slots from now on."""
        self._schedule.apply(RoundBegan())
        self._in_rounds = True
        self._unsettled.clear()
        self._release_leaving()
        self.meet_new_workers()

    async def carry(
        self,
        slot: int,
        number: int,
        work: Work,
        *,
        avoid: frozenset[int] = frozenset(),
        is_round: bool = True,
        local_bytes: Mapping[int, int] = {},
    ) -> Any:
        """Have a worker do the work of a slot, and return the result of ``work``.

        A slot is a share of the training. If its worker is lost, another one takes over.

        Args:
            slot: Number of the slot, from 0.
            number: Number of the slot's round, from 0.
            work: Function that does the slot's work on a given worker.
            avoid: Workers that may do the work only if there are no others.
            is_round: Whether the work is the slot's round, so that it leaves the slot state on the worker.
            local_bytes: Bytes of the slot's data that workers have on their own disks, by worker number.

        Raises:
            ClusterTooSmall: No worker was left, and none came back in time.
            SlotLeftOut: The slot belongs to a worker that is away.
            ExecutorCrashed: Three executor processes crashed during the slot's work.
            LeaseError: Another master took the workers over.
            DDLFError: ``work`` raised it.
        """
        self._check()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests[slot] = SlotRequest(work, future, number, is_round)
        if not self._in_rounds:
            self._unsettled.pop(slot, None)
        self._round = max(self._round, number)
        self._schedule.apply(Wanted(slot, avoid | self.spared, local_bytes))
        self._advance_soon()
        return await future

    @property
    def size(self) -> int:
        """The number of workers that work on a slot or are free to."""
        return len(self._schedule.workers)

    async def returned(self, slot: int) -> None:
        """Wait until the worker that a slot belongs to takes part in the run."""
        if self._homes is not None and self._homes.get(slot) not in self._schedule.workers:
            await self._returned.setdefault(slot, asyncio.Event()).wait()

    def others_than(self, workers: frozenset[int]) -> bool:
        """Return whether the run has a worker besides these workers that may carry their slots."""
        return self._homes is None and bool(self._schedule.workers - workers)

    def member(self, worker: int) -> tuple[ProxyWorker, int] | None:
        """Return a worker that takes part in the run, and how often it received the app; None if it is lost.

        When that number changes, the worker has lost everything that it held.
        """
        return (self._workers[worker], self._opened[worker]) if worker in self._schedule.workers else None

    def openings(self, worker: int) -> int:
        """Return how often a worker has received the app, as in ``member``."""
        return self._opened[worker]

    def distrust(self, slot: int, worker: int, reason: str) -> None:
        """Reject the result that a worker returned for a slot, because its update is suspicious.

        After three rejections in a row the worker leaves this run, if there is another one.

        Args:
            slot: The slot. Its state on this worker is no longer used.
            worker: The worker that trained it.
            reason: The reason, as a sentence.
        """
        self._holds.pop(slot, None)
        self._distrusted[worker] += 1
        self.emit(events.UpdateRejected(**self._event_facts(slot), worker=worker, why=reason))
        if self._distrusted[worker] == MAX_REJECTED and self._schedule.workers - {worker}:
            self._schedule.apply(Lost(worker))
            self._excluded[worker] = f"{MAX_REJECTED} of its updates in a row were rejected"
            self._report_gone(events.WorkerGone(round=self._round + 1, worker=worker, rejected=MAX_REJECTED))

    def trust(self, worker: int) -> None:
        """Note that a worker's update was accepted, which resets the number of its rejections."""
        self._distrusted[worker] = 0

    def served(self, worker: int) -> None:
        """Note that a worker has finished a task, which resets its number of losses."""
        if worker in self._recovery.tries:
            self._recovery.served(worker)

    def progressed(self, slot: int) -> None:
        """Note that a slot got further in its round than ever before, which resets its number of crashes."""
        self._schedule.progressed(slot)

    # -- carrying out the schedule ----------------------------------------------------------------------------------

    def _advance_soon(self, delay_s: float = 0.0) -> None:
        """Start the next actions of the schedule soon, not at once, so that it knows all slots of a round before."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        if self._waking is not None:
            self._waking.cancel()
        self._waking = loop.call_later(delay_s, self._advance) if delay_s else loop.call_soon(self._advance)

    def _advance(self) -> None:
        try:
            self._carry_out_plan()
        except Exception as error:
            self.end(error)

    def _carry_out_plan(self) -> None:
        loop = asyncio.get_running_loop()
        for action in self._schedule.plan(loop.time()):
            match action:
                case Start(slot, worker, backup):
                    if backup:
                        self.emit(events.SlotBackedUp(**self._event_facts(slot), worker=worker))
                    self._attempts[worker] = self._spawn(self._attempt(slot, worker))
                case Stop(worker):
                    self._attempts[worker].cancel()
                case GiveUp(slot):
                    error = self._last_loss or ExecutorCrashed("a slot ended its executors")
                    self._fail(slot, error if self._homes is None else self._left_out_error(slot, first_line(error)))
        self._release_leaving()
        self._check_for_workers()
        times = [time for time in (self._schedule.wake_at(), self._leave_out(loop.time())) if time is not None]
        if times:
            self._advance_soon(max(min(times) - loop.time(), 0.001))

    def _leave_out(self, now: float) -> float | None:
        """Give up the open slots whose own workers are away for too long.

        Return the time of the next look; None if the run waits for no such worker.
        """
        times = []
        for slot in self._schedule.homeless:
            worker = (self._homes or {}).get(slot, 0)
            until = self._absent_since.setdefault(worker, now) + self.wait_s
            if worker in self._excluded or until <= now:
                self._schedule.apply(LeftOut(slot))
                reason = self._excluded.get(worker) or f"its worker has been away for more than {self.wait_s:g} s"
                self._fail(slot, self._left_out_error(slot, reason))
            else:
                times.append(until)
        return min(times, default=None)

    def _left_out_error(self, slot: int, reason: str) -> SlotLeftOut:
        return SlotLeftOut(slot, (self._homes or {}).get(slot, 0), reason)

    def _note_absence(self, worker: int) -> None:
        """Note since when a worker is away."""
        self._absent_since.setdefault(worker, asyncio.get_running_loop().time())

    async def _attempt(self, slot: int, number: int) -> None:
        loop = asyncio.get_running_loop()
        worker = self._workers[number]
        request = self._requests[slot]
        future = request.future
        holder = number, self._opened[number]
        if request.is_round:
            self.emit(events.SlotStarted(**self._event_facts(slot), worker=number))
        try:
            result = await request.work(worker, self._holds.get(slot) == holder)
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
                if request.is_round:
                    self._holds[slot] = holder
                    self._unsettled[slot] = number
                    self.emit(events.SlotFinished(**self._event_facts(slot), worker=number))
                if not future.done():
                    future.set_result(result)
        self._advance_soon()

    def _fail(self, slot: int, error: Exception) -> bool:
        if waits := not (future := self._requests[slot].future).done():
            future.set_exception(error)
        return waits

    def _check(self) -> None:
        """Raise the error that has ended the run, if there is one."""
        if self._failure is not None:
            self._was_raised = True
            raise self._failure

    def end(self, error: Exception) -> None:
        """End the run with this error: every current and later ``carry`` raises it."""
        if self._failure is None:
            self._failure = error
            raised = [self._fail(slot, error) for slot in self._requests]
            self._was_raised = True in raised
        self._changed.set()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(self._end_on_error)
        return task

    def _end_on_error(self, task: asyncio.Future[Any]) -> None:
        """End the run if a background task fails, since nobody else awaits that task."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.end(error)

    # -- losing and finding workers ---------------------------------------------------------------------------------
    # ``Recovery`` and the links of workers call these methods. Strategies and exchanges call ``lose_if_free`` and ``lose`` when
    # their own requests find a loss.

    def lose_if_free(self, worker: ProxyWorker, error: Exception) -> None:
        """Handle a worker without a slot that does not answer.

        If it has a slot after all, its own call reports the loss.
        """
        if worker.id in self._schedule.free:
            self.lose(worker, None, error)

    def lose(self, worker: ProxyWorker, slot: int | None, error: Exception) -> None:
        """Handle the loss of a worker, and of its work on a slot if it had one."""
        self._last_loss = error
        self._note_absence(worker.id)
        self.losses += slot is not None
        self._schedule.apply(Lost(worker.id, crashed=isinstance(error, ExecutorCrashed)))
        facts = {"round": self._round + 1} if slot is None else self._event_facts(slot)
        reason = first_line(self._crash_behind(worker, error) or error)
        self.emit(events.WorkerLost(**facts, worker=worker.id, why=reason, carries=self.carries))
        self._known_as[worker.id] = "back"
        self._recovery.bring_back(worker, error)

    def _crash_behind(self, worker: ProxyWorker, error: Exception) -> ExecutorCrashed | None:
        """Return how the executor of an idle worker has ended, if this is why its new executor has no app."""
        crash = worker.crash if isinstance(error, AppMissing) else None
        return None if crash is self._crashes.get(worker.id) else crash

    def leaving(self, worker: ProxyWorker) -> None:
        """Handle the notice of a worker that it will end soon."""
        notice = worker.notice
        if notice is None or worker.id not in self._schedule.workers or self.is_leaving(worker.id) or self._closed:
            return
        now = asyncio.get_running_loop().time()
        within_s = max(0.0, notice.until - now)
        carried = self._schedule.slot_of(worker.id)
        slot = carried if self._schedule.apply(Leaving(worker.id, now, within_s, self.finishes)) else None
        facts = {"round": self._round + 1} if slot is None else self._event_facts(slot)
        event = events.WorkerLeaving(
            **facts, worker=worker.id, why=notice.reason, seconds=within_s, carries=self.carries
        )
        self.emit(event)
        self._advance_soon()

    def is_leaving(self, worker: int) -> bool:
        """Return whether a worker has announced its end."""
        return worker in self._schedule.leaving

    def _release_leaving(self) -> None:
        """Release workers that are leaving and have finished their slots.

        The update of a worker may not be merged yet. In rounds it is merged when the next round begins, otherwise when
        its slot begins again. If the workers that leave are the only ones, other slots would wait for them, so others
        must come to their places.
        """
        stalls = self._schedule.open and not self._working() and not self._recovery.openings
        unsettled = set[int]() if stalls else set(self._unsettled.values())
        for number in self._schedule.finished_leaving - self._releasing.keys() - unsettled:
            self._releasing[number] = self._spawn(self._release_worker(self._workers[number]))

    async def _release_worker(self, worker: ProxyWorker) -> None:
        try:
            for take in self.hand_back:
                await take(worker.id)
            if worker.id not in self._schedule.finished_leaving:  # it was lost meanwhile, or has come back
                return
            self._schedule.apply(Lost(worker.id))
            self._note_absence(worker.id)
            self._known_as[worker.id] = "back"
            if worker.notice is not None:
                self._last_loss = WorkerLost(f"{worker.name} has left: {worker.notice.reason}")
            self.emit(events.WorkerLeft(round=self._round + 1, worker=worker.id))
            await worker.release()
        finally:
            self._releasing.pop(worker.id, None)
        self._recovery.bring(worker)
        self._advance_soon()

    def entered(self, worker: ProxyWorker) -> None:
        """Let a worker take part in the run, since it has received everything that the run needs."""
        self._opened[worker.id] += 1
        self._absent_since.pop(worker.id, None)
        self._crashes[worker.id] = worker.crash
        self._cluster.take_in(worker)
        self._schedule.apply(Ready(worker.id))
        for slot in [slot for slot in self._returned if (self._homes or {}).get(slot) == worker.id]:
            self._returned.pop(slot).set()
        self._end_first_opening(worker)
        number, known_as = self._round + 1, self._known_as[worker.id]
        if known_as == "back":
            self.emit(events.WorkerReturned(round=number, worker=worker.id, name=worker.name))
        elif known_as == "opened":
            self.emit(events.WorkerReady(round=number, worker=worker.id, name=worker.name))
        else:
            size, slots = self.size, self.fixed_slots
            self.emit(events.WorkerJoined(round=number, worker=worker.id, name=worker.name, workers=size, slots=slots))
        self.leaving(worker)  # it may have announced its end while it loaded its data

    def not_reached(self, worker: ProxyWorker, error: DDLFError) -> None:
        """Handle a worker that cannot be reached yet. ``Recovery`` tries to reach it again."""
        self._last_loss = error
        self._note_absence(worker.id)
        if self._known_as[worker.id] == "opened":
            self._known_as[worker.id] = "back"
            self.emit(events.WorkerLost(round=self._round + 1, worker=worker.id, why=first_line(error)))
            if self._homes is None:
                self._end_first_opening(worker)
            else:  # a worker with its own data that misses the beginning could not join later
                asyncio.get_running_loop().call_later(self.wait_s, self._begin_without, worker)
        self.changed()

    def _begin_without(self, worker: ProxyWorker) -> None:
        self._end_first_opening(worker)
        self._changed.set()

    def exclude(self, worker: ProxyWorker, error: DDLFError) -> None:
        """Exclude a worker from the run because of an error.

        If no worker is left, this error is the reason why the run ends.
        """
        self._end_first_opening(worker)
        self._schedule.apply(Lost(worker.id))
        if isinstance(error, LeaseError):
            self.end(error)  # another master has the lease now, so this master must stop
            return
        self._exclusions.append(error)
        self._excluded[worker.id] = first_line(error)
        self._report_gone(events.WorkerGone(round=self._round + 1, worker=worker.id, why=str(error)))

    def changed(self) -> None:
        """Check again which workers are available, after a change."""
        self._changed.set()
        self._advance_soon()

    def _end_first_opening(self, worker: ProxyWorker) -> None:
        """Note that the first attempt to send the app to a worker has succeeded or failed."""
        if worker.id in self._first:
            self._first[worker.id] = True

    def meet_new_workers(self) -> None:
        """Prepare workers that have joined the cluster for this run."""
        for worker in (*self._cluster.workers, *self._cluster.missing):
            if worker.id not in self._opened and worker not in _training:
                self._bring_in(worker, "joined")

    def _bring_in(self, worker: ProxyWorker, kind: str) -> None:
        _training.add(worker)
        self._workers[worker.id] = worker
        self._opened[worker.id] = -1
        self._known_as[worker.id] = kind
        worker.on_leaving = partial(self.leaving, worker)
        self._recovery.bring(worker)

    def _working(self) -> frozenset[int]:
        """Return the workers that have a slot or may get one. A worker that leaves gets none."""
        return self._schedule.workers - self._schedule.finished_leaving

    def _check_for_workers(self) -> None:
        """End the run if no worker is left; wait ``wait_s`` first if one may come back."""
        needs_worker = self._schedule.open if self._begun else all(self._first.values())
        # Before training, do not wait for workers that never answered: they would meet the same error as the others.
        coming = self._recovery.coming.keys() if self._begun else self._recovery.coming.keys() & self._first.keys()
        coming = coming | self._releasing.keys()  # a worker that is being released may come back
        if not needs_worker or self._working() or self._recovery.openings:
            self._stop_waiting()
        elif not (coming or self._schedule.finished_leaving):
            self._stop_waiting()
            self.end(no_worker_left(self._exclusions, len(self._opened)))
        elif self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(self.wait_s, self._give_up)
            self.emit(events.WaitingForWorkers(round=self._round + 1, seconds=self.wait_s))

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self.end(too_small(self.wait_s, self._last_loss))

    def _event_facts(self, slot: int) -> dict[str, int]:
        """Return slot and round with the numbers that events show to users, from 1."""
        return {"slot": slot + 1, "round": self._requests[slot].round + 1}

    def _report_gone(self, event: events.WorkerGone) -> None:
        # if all workers fail, one error replaces the events
        (self.emit if self._begun else self._held_back.append)(event)
