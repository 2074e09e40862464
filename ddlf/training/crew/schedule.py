"""Decides which worker carries which slot, without network, clock or event loop. Runs on the master.

``apply`` receives what happened, and ``plan`` returns what to do now. Time is an argument, so a test can check every
order of joins, losses and answers.

The rules:
    - A worker carries one slot at a time. A slot goes to the worker that carried it last, if that is free, otherwise
      to any free one.
    - If workers have parts of the data on their own disks, a slot goes to a free worker that has most of its data. The
      schedule does this for as many slots as possible, but never leaves a worker idle for it.
    - A slot whose worker is lost waits again. The run gives up a slot after three executors crashed with it without
      any progress in between.
    - A worker that is leaving gets no new slot. It finishes its slot if the last time that this slot took, or else the
      median of this round, fits into the time that it has. Without both it tries. Otherwise another worker begins the
      slot again at once, if there is one.
    - If slots belong to workers, only its own worker carries a slot, which waits for it.
    - When no slot waits and a worker is free, that worker also gets a slot that takes three times the median of this
      round. The first answer counts, and the other worker is stopped. But a worker that has not finished any slot yet may
      be compiling its first step, which can take minutes. If it was stopped, it would have to compile the step again in each
      round. So it may end its slot, within ``FIRST_SLOT_S``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

STRAGGLER_FACTOR = 3.0
STRAGGLER_LEAST_S = 5.0
"""A slot is a straggler after this time at the earliest: a new worker may need it to compile its first step."""
FIRST_SLOT_S = 120.0
"""A worker may work for so long on its first slot, although its result is no longer needed."""
MAX_CRASHES = 3


@dataclass(frozen=True, slots=True)
class Ready:
    """Event: a worker can now work on slots."""

    worker: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Event: a slot needs a worker.

    Args:
        slot: Number of the slot, from 0.
        avoid: Workers that may train it only if there are no others.
        local_bytes: Bytes of its data that workers have, by worker number.
    """

    slot: int
    avoid: frozenset[int] = frozenset()
    local_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: a worker has returned a slot's result."""

    worker: int
    now: float


@dataclass(frozen=True, slots=True)
class Ended:
    """Event: a worker has stopped its work after the action ``Stop``."""

    worker: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Event: a worker is lost. ``crashed`` means that its executor process ended, which the slot may have caused."""

    worker: int
    crashed: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """Event: a worker will end soon.

    Args:
        worker: Number of the worker.
        now: Time of the event, in seconds.
        within_s: Seconds that it has.
        finishes: Whether the worker's slot can end before the worker does. False moves the slot at once.
    """

    worker: int
    now: float
    within_s: float
    finishes: bool = True


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Event: the run no longer waits for the worker that a slot belongs to."""

    slot: int


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """Event: a round began, so the durations of the last round are no longer used."""


Event = Ready | Wanted | Finished | Ended | Lost | Leaving | LeftOut | RoundBegan


@dataclass(frozen=True, slots=True)
class Start:
    """Action: send a slot to a worker. ``backup`` says that another worker already works on it."""

    slot: int
    worker: int
    backup: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Action: stop a worker whose result is no longer needed."""

    worker: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Action: give up a slot whose work has crashed too many executor processes."""

    slot: int


Action = Start | Stop | GiveUp


@dataclass(slots=True)
class _Running:
    """The work of a worker on a slot.

    Args:
        slot: Number of the slot.
        since: When it began.
        obsolete: Whether its result does not count any more.
        is_stopped: Whether the action ``Stop`` has been returned.
    """

    slot: int
    since: float
    obsolete: bool = False
    is_stopped: bool = False


@dataclass(slots=True, kw_only=True)
class Schedule:
    """Decides which worker gets which slot (share of the training), as workers and slots come and go.

    Args:
        backups: Whether a second worker also gets the slot of a straggler.
        homes: The only worker of each slot, by slot, if slots belong to workers; None if any worker can carry any slot.
            It may change.
    """

    backups: bool = True
    homes: Mapping[int, int] | None = None
    _free: dict[int, None] = field(default_factory=dict)  # an ordered set, in the order of arrival
    _running: dict[int, _Running] = field(default_factory=dict)
    _waiting: list[int] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)
    _avoid: dict[int, frozenset[int]] = field(default_factory=dict)
    _local_bytes: dict[int, Mapping[int, int]] = field(default_factory=dict)
    _home: dict[int, int] = field(default_factory=dict)
    _crashes: dict[int, int] = field(default_factory=dict)
    _durations: list[float] = field(default_factory=list)
    _took: dict[int, float] = field(default_factory=dict)  # slot -> seconds of its last round
    _leaving: set[int] = field(default_factory=set)
    _experienced: set[int] = field(default_factory=set)  # workers that have finished a slot since they became ready

    @property
    def open(self) -> frozenset[int]:
        """Slots that wait for a worker or are with one, and have no result yet."""
        return frozenset(self._open)

    @property
    def homeless(self) -> frozenset[int]:
        """Open slots whose own worker does not take part now."""
        homes, workers = self.homes, self.workers
        return frozenset() if homes is None else frozenset(s for s in self._open if homes.get(s) not in workers)

    @property
    def free(self) -> frozenset[int]:
        """Workers without a slot, leaving ones included."""
        return frozenset(self._free) | self.finished_leaving

    @property
    def leaving(self) -> frozenset[int]:
        """Workers that will end soon."""
        return frozenset(self._leaving)

    def slot_of(self, worker: int) -> int | None:
        """Return the slot that a worker works on; None without one."""
        running = self._running.get(worker)
        return None if running is None else running.slot

    @property
    def finished_leaving(self) -> frozenset[int]:
        """Workers that are leaving and have no slot any more."""
        return frozenset(self._leaving - self._running.keys())

    @property
    def workers(self) -> frozenset[int]:
        """Workers that work on a slot or are free to, leaving ones included."""
        return frozenset(self._free) | frozenset(self._running) | frozenset(self._leaving)

    def apply(self, event: Event) -> bool:
        """Take note of an event.

        An event that does not fit the state, such as a second report of a loss, has no effect.

        Returns:
            For ``Finished``, whether its result counts: it is the first one for a slot without a result. For
            ``Leaving``, whether another worker gets its slot at once.
        """
        match event:
            case Ready(worker):
                self._leaving.discard(worker)
                self._experienced.discard(worker)
                if worker not in self._running:
                    self._free[worker] = None
            case Wanted(slot, avoid, local_bytes):
                self._local_bytes[slot] = local_bytes
                self._open.add(slot)
                self._avoid[slot] = avoid
                self._waiting.append(slot)
                self._crashes[slot] = 0
            case Finished(worker, now):
                running = self._running.pop(worker, None)
                if running is None:
                    return False
                self._set_free(worker)
                self._experienced.add(worker)
                if running.slot in self._open and not running.obsolete:
                    self._open.discard(running.slot)
                    for other in self._running.values():
                        other.obsolete = other.obsolete or other.slot == running.slot
                    self._home[running.slot] = worker
                    self._durations.append(now - running.since)
                    self._took[running.slot] = now - running.since
                    return True
            case Ended(worker):
                if self._running.pop(worker, None) is not None:
                    self._set_free(worker)
            case Leaving(worker, now, within_s, finishes):
                return self._leave(worker, now + within_s, finishes)
            case Lost(worker, crashed):
                self._free.pop(worker, None)
                self._leaving.discard(worker)
                running = self._running.pop(worker, None)
                if running is not None and running.slot in self._open and not running.obsolete:
                    self._crashes[running.slot] += crashed
                    if not self._carried(running.slot):
                        self._waiting.insert(0, running.slot)
            case LeftOut(slot):
                self._open.discard(slot)
                self._waiting = [waiting for waiting in self._waiting if waiting != slot]
            case RoundBegan():
                self._durations.clear()
        return False

    def _may_carry(self, slot: int, worker: int) -> bool:
        """Return whether a worker may carry a slot."""
        return self.homes is None or self.homes.get(slot) == worker

    def _set_free(self, worker: int) -> None:
        if worker not in self._leaving:
            self._free[worker] = None

    def _leave(self, worker: int, until: float, finishes: bool) -> bool:
        """Note that a worker leaves. Return whether another worker gets its slot at once."""
        if worker not in self.workers:
            return False
        self._leaving.add(worker)
        self._free.pop(worker, None)
        running = self._running.get(worker)
        if running is None or running.obsolete or running.slot not in self._open:
            return False
        usual = median(self._durations) if self._durations else 0.0
        fits = finishes and running.since + self._took.get(running.slot, usual) <= until
        other_workers = [other for other in self.workers - self._leaving if self._may_carry(running.slot, other)]
        if fits or not other_workers or not self._slots_without_backup().keys() & {running.slot}:
            return False
        running.obsolete = True
        self._waiting.insert(0, running.slot)
        return True

    def progressed(self, slot: int) -> None:
        """Reset the number of crashes of a slot that got further in its round than ever before."""
        self._crashes[slot] = 0

    def order(self, workers: Sequence[int]) -> None:
        """Set the order in which free workers get slots, as far as no other rule decides."""
        self._free = dict.fromkeys(sorted(self._free, key=workers.index))

    def plan(self, now: float) -> list[Action]:
        """Return the actions that the crew must take now. Each action is returned once."""
        actions: list[Action] = []
        for number, running in self._running.items():
            running.obsolete = running.obsolete or running.slot not in self._open
            if running.obsolete and not running.is_stopped and self._stops_at(number, running) <= now:
                running.is_stopped = True
                actions.append(Stop(number))
        for slot in [slot for slot in self._waiting if self._crashes[slot] >= MAX_CRASHES]:
            self._waiting.remove(slot)
            self._open.discard(slot)
            actions.append(GiveUp(slot))
        actions += [self._start(slot, nearest, now) for slot, nearest in self._nearest().items()]
        # Then the last workers, which still hold the slot's state: it need not be sent again.
        for slot in list(self._waiting):
            home = self._home.get(slot)
            if (
                home in self._free
                and self._may_carry(slot, home)
                and home not in self._avoid[slot]
                and not self._local_bytes[slot]
            ):
                actions.append(self._start(slot, home, now))
        for slot in list(self._waiting):
            worker = self._any_for(slot)
            if worker is not None:
                actions.append(self._start(slot, worker, now))
        for slot in self._stragglers(now):
            worker = self._backup_for(slot)
            if worker is not None:
                del self._free[worker]
                self._running[worker] = _Running(slot, now)
                actions.append(Start(slot, worker, backup=True))
        return actions

    def wake_at(self) -> float | None:
        """Return the time when ``plan`` may have a new action without a new event; None if never."""
        times = [
            self._stops_at(worker, running)
            for worker, running in self._running.items()
            if running.obsolete and not running.is_stopped
        ]
        if self._free and not self._waiting and (limit := self._late_after()) is not None:
            alone = self._slots_without_backup().items()
            times += [since + limit for slot, since in alone if self._backup_for(slot) is not None]
        return min(times, default=None)

    def _stops_at(self, worker: int, running: _Running) -> float:
        """Return from when a worker is to be stopped whose result is no longer needed."""
        is_first = worker not in self._experienced and worker not in self._leaving
        return running.since + FIRST_SLOT_S if is_first else running.since

    def _any_for(self, slot: int) -> int | None:
        preferred = self.homes is None and self.workers - self._leaving - self._avoid[slot]
        avoid = self._avoid[slot] if preferred else frozenset[int]()
        local_bytes = self._local_bytes[slot]
        free = (worker for worker in self._free if worker not in avoid and self._may_carry(slot, worker))
        return max(free, key=lambda worker: local_bytes.get(worker, 0), default=None)

    def _nearest(self) -> dict[int, int]:
        """Return pairs of waiting slots and free workers that have most of a slot's data.

        There are as many pairs as possible (Kuhn 1955).
        """
        candidates: dict[int, list[int]] = {}
        for slot in self._waiting:
            local_bytes = {
                worker: self._local_bytes[slot].get(worker, 0)
                for worker in self.workers - self._leaving - self._avoid[slot]
            }
            if most := max(local_bytes.values(), default=0):
                home = self._home.get(slot)
                free = [worker for worker in self._free if local_bytes.get(worker) == most]
                candidates[slot] = sorted(free, key=lambda worker: worker != home)
        carried: dict[int, int] = {}

        def give(slot: int, visited: set[int]) -> bool:
            for worker in candidates[slot]:
                if worker not in visited:
                    visited.add(worker)
                    if worker not in carried or give(carried[worker], visited):
                        carried[worker] = slot
                        return True
            return False

        for slot in candidates:
            give(slot, set())
        return {slot: worker for worker, slot in carried.items()}

    def _backup_for(self, slot: int) -> int | None:
        avoid = self._avoid[slot]
        return next((worker for worker in self._free if worker not in avoid and self._may_carry(slot, worker)), None)

    def _start(self, slot: int, worker: int, now: float) -> Start:
        self._waiting.remove(slot)
        del self._free[worker]
        self._running[worker] = _Running(slot, now)
        return Start(slot, worker)

    def _carried(self, slot: int) -> bool:
        return any(running.slot == slot and not running.obsolete for running in self._running.values())

    def _slots_without_backup(self) -> dict[int, float]:
        """Return the slots without a result that exactly one worker has, with their start times."""
        carried: dict[int, list[float]] = {}
        for running in self._running.values():
            if not running.obsolete and running.slot in self._open:
                carried.setdefault(running.slot, []).append(running.since)
        return {slot: since[0] for slot, since in carried.items() if len(since) == 1}

    def _late_after(self) -> float | None:
        if not self.backups or not self._durations:
            return None
        return max(STRAGGLER_FACTOR * median(self._durations), STRAGGLER_LEAST_S)

    def _stragglers(self, now: float) -> list[int]:
        """Return the slots that take much longer than the others of the round, the latest first."""
        limit = self._late_after() if self._free and not self._waiting else None
        if limit is None:
            return []
        late = [(since, slot) for slot, since in self._slots_without_backup().items() if now - since >= limit]
        return [slot for _, slot in sorted(late)]
