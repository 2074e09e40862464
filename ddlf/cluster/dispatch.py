"""Gives each call of ``map`` and ``submit`` to a free worker. If that worker is lost, another one gets the call. Runs
on the master.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import Any, Literal

from ddlf.cluster.lanes import Habit, Lane
from ddlf.cluster.members import Members
from ddlf.cluster.proxy import MAX_ATTEMPTS, RECONNECT_S, ProxyWorker
from ddlf.errors import (
    AuthError,
    ConfigError,
    ConnectError,
    DDLFError,
    ExecutorCrashed,
    LeaseError,
    RequestFailed,
    VersionError,
    WorkerLost,
)
from ddlf.rpc.messages import Request

OnError = Literal["raise", "return"]
MAX_PER_WORKER = 1000
"""Largest number of concurrent calls on one worker. Each call may need a thread there."""


@dataclass(frozen=True)
class Behaviour:
    """The options that ``Group.options`` can change, except the choice of workers.

    Args:
        on_error: Whether a failed call raises its error, or returns it instead of a result.
        timeout_s: Seconds for each request; None waits indefinitely.
        idempotent: Whether requests may run more than once.
        per_worker: How many calls of ``map``, ``starmap`` and ``submit`` may run on one worker at the same time.
    """

    on_error: OnError = "raise"
    timeout_s: float | None = None
    idempotent: bool = False
    per_worker: int = 1

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "return"):
            raise ConfigError(f"on_error must be 'raise' or 'return', got {self.on_error!r}")
        timeout_s, per_worker = self.timeout_s, self.per_worker
        if timeout_s is not None and (not is_number(timeout_s) or not 0 <= timeout_s < math.inf):
            raise ConfigError(f"timeout_s must be a number of seconds of 0 or more, got {timeout_s!r}")
        if type(per_worker) is not int or not 1 <= per_worker <= MAX_PER_WORKER:
            raise ConfigError(f"per_worker must be 1-{MAX_PER_WORKER}, got {per_worker!r}")

    def changed_by(self, **changes: Any) -> Behaviour:
        """Return a copy of these options with the given values. None keeps a value."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float. A bool is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


LOSS = (WorkerLost, ExecutorCrashed, LeaseError, ConnectError, AuthError, VersionError)
"""Errors that concern the worker, not the call."""
GIVE_UP_S = 0.1
"""Seconds after the end of the wait for a lost worker until its calls are checked."""
MAX_HABITS = 1000
"""Number of functions whose duration is remembered."""

WorkerLane = Lane[ProxyWorker]


class Job:
    """Several calls of one function, such as the items of a map, with the same options and workers.

    Args:
        habit: Measurements of earlier calls of the same function.
        behaviour: Options of each call.
        workers: The workers that may do the calls; None allows all, also workers that join later.

    Attributes:
        waiting: Number of calls that wait for a worker.
        compute_s: Total seconds that workers have spent on the calls.
        on_sent: Called after each call that has been sent to a worker.
    """

    def __init__(self, habit: Habit, behaviour: Behaviour, workers: list[ProxyWorker] | None = None) -> None:
        self.habit = habit
        self.workers = workers
        self.timeout_s = behaviour.timeout_s
        self.idempotent = behaviour.idempotent
        self.per_worker = behaviour.per_worker
        self.waiting = 0
        self.compute_s = 0.0
        self.on_sent: Callable[[], None] = lambda: None

    def allows(self, lane: WorkerLane) -> bool:
        """Return whether the worker of a lane, the queue of one worker, may run the calls of this job."""
        return self.workers is None or lane.worker in self.workers

    def fits(self, lane: WorkerLane) -> bool:
        """Return whether a lane has room for another call of this job."""
        if self.per_worker > 1:
            return len(lane.beside) < self.per_worker
        return lane.has_turn(alone=self.timeout_s is not None)


class QueuedCall:
    """One waiting or running call: first in a queue, then on a lane.

    Args:
        job: The job that the call belongs to.
    """

    __slots__ = ("begin", "job", "lane", "lonely", "put")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.lane: WorkerLane | None = None
        self.lonely = False  # whether the lane was empty before
        self.begin = 0.0
        self.put: asyncio.Future[None] | None = None


class Dispatch:
    """Distributes the calls that any worker may do, of ``map``, ``starmap`` and ``submit``.

    Args:
        members: Members of the cluster.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._lanes: dict[ProxyWorker, WorkerLane] = {}
        self._errors: dict[WorkerLane, DDLFError] = {}
        self._queues: tuple[OrderedDict[QueuedCall, None], ...] = (OrderedDict(), OrderedDict())
        self._coming: dict[WorkerLane, asyncio.Task[None]] = {}
        self._habits: dict[bytes, Habit] = {}
        self._open = 0  # number of calls that have not ended

    def habit(self, address: bytes) -> Habit:
        """Return the measurements of earlier calls of the function with this address, the hash of its pickled bytes."""
        if len(self._habits) > MAX_HABITS:
            self._habits.clear()
        return self._habits.setdefault(address, Habit())

    async def run(self, job: Job, request: Request) -> Any:
        """Run a call of a job on the best free worker, and wait for its result.

        Returns:
            The call's result, without its seconds.

        Raises:
            RequestFailed: The call failed, for the reasons that ``ProxyWorker.rpc`` lists. If a worker is lost, another
                worker gets its call, provided that the call cannot have begun or is idempotent.
        """
        attempts, may_have_run = 0, False
        self._open += 1
        try:
            while True:
                queued = self._ask(job)
                try:
                    lane = queued.lane or await self._on_lane(queued)
                    seconds, value = await lane.worker.rpc(request, job.timeout_s)
                    self._note(queued, lane, seconds)
                    return value
                except LOSS as error:
                    began = queued.lane is not None and getattr(error, "may_have_run", False)
                    may_have_run |= began  # one attempt is enough
                    if isinstance(error, RequestFailed):
                        error.may_have_run = may_have_run
                    if queued.lane is None:  # no worker remains for the call
                        raise
                    self._lost(queued.lane, error)
                    attempts += began or queued.lane.is_first(queued)
                    if attempts == MAX_ATTEMPTS or (may_have_run and not job.idempotent):
                        if isinstance(error, RequestFailed):
                            error.attempts = attempts
                        error.message += f" (tried {attempts} times)" if attempts > 1 else ""
                        raise
                finally:
                    self._leave(queued)
        finally:
            self._open -= 1

    def find_workers(self) -> None:
        """Check whether lost workers have returned, and whether new ones have joined."""
        for lane in self._current_lanes():
            if not lane.open and lane not in self._coming:
                lane.open, lane.hope_until = True, inf  # the next call shows whether the worker has returned
        self._fill()

    def close(self) -> None:
        """End all waiting calls. Running calls end with their connection."""
        for task in self._coming.values():
            task.cancel()
        for lane in self._lanes.values():
            lane.open, lane.hope_until = False, 0.0
            self._errors[lane] = WorkerLost("the cluster was closed", may_have_run=False)
        self._give_up()

    # -- queued calls -----------------------------------------------------------------------------------------------------

    def _current_lanes(self) -> list[WorkerLane]:
        lanes = self._lanes
        return [lanes.get(worker) or lanes.setdefault(worker, Lane(worker)) for worker in self._members.present]

    def _queue(self, job: Job) -> OrderedDict[QueuedCall, None]:
        return self._queues[job.per_worker > 1]

    def _ask(self, job: Job) -> QueuedCall:
        """Put a call on a free lane, or into the queue if no lane is free.

        Raises:
            DDLFError: No worker remains that may do the call. This is the error of the last loss.
        """
        queued = QueuedCall(job)
        job.waiting += 1
        self._queue(job)[queued] = None
        if job.waiting == 1:  # otherwise an earlier call of the job already found no free lane
            self._fill()
        if queued.lane is None and (error := self._hopeless(job)):
            self._leave(queued)
            raise error
        return queued

    async def _on_lane(self, queued: QueuedCall) -> WorkerLane:
        queued.put = asyncio.get_running_loop().create_future()
        await queued.put
        assert queued.lane is not None
        return queued.lane

    def _leave(self, queued: QueuedCall) -> None:
        """Remove a call whose caller no longer waits from its queue or lane."""
        if queued.lane is None:
            if queued in self._queue(queued.job):
                del self._queue(queued.job)[queued]
                queued.job.waiting -= 1
            return
        queued.lane.end(queued)
        self._fill_lane(queued.lane)

    def _fill(self) -> None:
        """Move waiting calls to the lanes (the workers' queues) with the least work."""
        lanes = self._current_lanes()
        while True:
            free = {lane: queued for lane in lanes if (queued := self._next_for(lane))}
            if not free:
                return
            lane = min(free, key=attrgetter("load"))
            self._put(free[lane], lane)

    def _fill_lane(self, lane: WorkerLane) -> None:
        while queued := self._next_for(lane):
            self._put(queued, lane)

    def _next_for(self, lane: WorkerLane) -> QueuedCall | None:
        """Return the waiting call that a lane (the queue of one worker) gets next, or None.

        If the lane may do a call but has no room for it yet, no later call overtakes it.
        """
        for queue in self._queues if lane.open else ():
            for queued in queue:
                if queued.job.allows(lane):
                    if queued.job.fits(lane):
                        return queued
                    break
        return None

    def _put(self, queued: QueuedCall, lane: WorkerLane) -> None:
        job = queued.job
        del self._queue(job)[queued]
        job.waiting -= 1
        queued.lane = lane
        queued.lonely = not lane.turns
        queued.begin = asyncio.get_running_loop().time()
        if job.per_worker > 1:
            lane.beside.add(queued)
        else:
            lane.add_turn(queued, job.habit.seconds)
        if queued.put is not None and not queued.put.done():
            queued.put.set_result(None)
        job.on_sent()

    def _note(self, queued: QueuedCall, lane: WorkerLane, seconds: float) -> None:
        """Record how long a call that has ended took and how many bytes it carried, to plan later calls."""
        habit = queued.job.habit
        habit.took(seconds)
        queued.job.compute_s += seconds
        carried = lane.worker.bytes_sent + lane.worker.bytes_received
        if habit not in lane.habits:  # this call carried the function, so its bytes are not typical
            lane.habits.add(habit)
        else:
            habit.carried(carried - lane.carried)
            if queued.lonely:
                lane.measured_way(asyncio.get_running_loop().time() - queued.begin - seconds)
        lane.carried = carried

    # -- losses -----------------------------------------------------------------------------------------------------

    def _lost(self, lane: WorkerLane, error: DDLFError) -> None:
        """Close the lane of a lost worker until this worker has returned."""
        self._errors[lane] = error
        if not lane.open:
            return
        loop = asyncio.get_running_loop()
        lane.open, lane.hope_until = False, 0.0
        if lane.worker.in_use:
            lane.hope_until = loop.time() + RECONNECT_S
            self._coming[lane] = loop.create_task(self._bring_back(lane))
            loop.call_later(RECONNECT_S + GIVE_UP_S, self._give_up)
        self._give_up()

    async def _bring_back(self, lane: WorkerLane) -> None:
        """Try to reconnect to a lost worker, as long as any call is open."""
        try:
            while True:
                try:
                    await lane.worker.reconnect(RECONNECT_S)
                    lane.open, lane.hope_until = True, inf
                    break
                except ConnectError as error:
                    self._errors[lane] = error
                    if not self._open or not lane.worker.in_use:
                        break
        except DDLFError as error:  # another master has the worker, or its executor cannot start
            self._errors[lane], lane.hope_until = error, 0.0
        finally:
            self._coming.pop(lane, None)
        self._fill_lane(lane)
        self._give_up()

    def _hopeless(self, job: Job) -> DDLFError | None:
        """Return the reason why no worker will do a job's calls; None if some worker may."""
        now = asyncio.get_running_loop().time()
        lanes = [lane for lane in self._current_lanes() if job.allows(lane)]
        if any(lane.open or lane.hope_until > now for lane in lanes):
            return None
        errors = [self._errors[lane] for lane in lanes if lane in self._errors]
        return copy.copy(errors[-1]) if errors else WorkerLost("no worker is left", may_have_run=False)

    def _give_up(self) -> None:
        """End the waiting calls that only lost workers could do, because these workers will not return."""
        for queue in self._queues:
            for queued in list(queue):
                if error := self._hopeless(queued.job):
                    self._leave(queued)
                    if queued.put is not None and not queued.put.done():
                        queued.put.set_exception(error)
