"""Which worker carries which slot: the decisions of a training master, without network, clock or event loop.

``apply`` takes what happened, ``plan`` says what to do now; time is an argument. So every order of joins, losses and answers can be tested.

The rules:
    - A worker carries one slot at a time; a slot that is wanted goes to the worker that carried it last if that is free, else to any free one.
    - Where workers have parts of the data on disks of their own, it goes to a free one that has most of what it reads; of several such slots as many
      as can be. A worker is never idle for that.
    - A slot whose worker is lost is wanted again. One that took three executors with it, and came no further meanwhile, is given up.
    - When no slot waits and a worker is free, a slot that takes three times the median of this round is given to it too; the first answer counts,
      the other copy is stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

STRAGGLER_FACTOR = 3.0
STRAGGLER_LEAST_S = 5.0
"""A slot is no straggler before: a worker that is new compiles its first step in such a time."""
MAX_CRASHES = 3


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker can carry slots."""

    worker: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A slot is to be carried, not by these workers if there is any other one. ``near``: bytes of what it reads that workers have, by number."""

    slot: int
    avoid: frozenset[int] = frozenset()
    near: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker has brought a slot's result."""

    worker: int
    now: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker that was told to stop has stopped."""

    worker: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone; ``crashed`` if its executor ended, which the slot may have caused."""

    worker: int
    crashed: bool = False


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """Durations of before count no more."""


Event = Ready | Wanted | Finished | Ended | Lost | RoundBegan


@dataclass(frozen=True, slots=True)
class Start:
    """Send a slot to a worker; ``backup`` if another one has it already."""

    slot: int
    worker: int
    backup: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """End a worker's copy of a slot that is not needed any more."""

    worker: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A slot has ended too many executors."""

    slot: int


Action = Start | Stop | GiveUp


@dataclass(slots=True)
class _Running:
    slot: int
    since: float
    stopping: bool = False


@dataclass(slots=True, kw_only=True)
class Schedule:
    """The state of the decisions.

    Args:
        backups: Whether stragglers are given to a second worker.
    """

    backups: bool = True
    _free: dict[int, None] = field(default_factory=dict)  # a set in the order of coming
    _running: dict[int, _Running] = field(default_factory=dict)
    _waiting: list[int] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)
    _avoid: dict[int, frozenset[int]] = field(default_factory=dict)
    _near: dict[int, Mapping[int, int]] = field(default_factory=dict)
    _home: dict[int, int] = field(default_factory=dict)
    _crashes: dict[int, int] = field(default_factory=dict)
    _durations: list[float] = field(default_factory=list)

    @property
    def open(self) -> frozenset[int]:
        """Slots that are wanted and have no result yet."""
        return frozenset(self._open)

    @property
    def free(self) -> frozenset[int]:
        """Workers that carry no slot."""
        return frozenset(self._free)

    @property
    def workers(self) -> frozenset[int]:
        """Workers that carry a slot or could."""
        return frozenset(self._free) | frozenset(self._running)

    def apply(self, event: Event) -> bool:
        """Take what happened. An event that does not fit (a loss reported twice) changes nothing.

        Returns:
            Of ``Finished``, whether its result counts: the first one of a slot that is still wanted.
        """
        match event:
            case Ready(worker):
                if worker not in self._running:
                    self._free[worker] = None
            case Wanted(slot, avoid, near):
                self._near[slot] = near
                self._open.add(slot)
                self._avoid[slot] = avoid
                self._waiting.append(slot)
                self._crashes[slot] = 0
            case Finished(worker, now):
                running = self._running.pop(worker, None)
                if running is None:
                    return False
                self._free[worker] = None
                if running.slot in self._open and not running.stopping:
                    self._open.discard(running.slot)
                    self._home[running.slot] = worker
                    self._durations.append(now - running.since)
                    return True
            case Ended(worker):
                if self._running.pop(worker, None) is not None:
                    self._free[worker] = None
            case Lost(worker, crashed):
                self._free.pop(worker, None)
                running = self._running.pop(worker, None)
                if running is not None and running.slot in self._open and not running.stopping:
                    self._crashes[running.slot] += crashed
                    if not self._carried(running.slot):
                        self._waiting.insert(0, running.slot)
            case RoundBegan():
                self._durations.clear()
        return False

    def progressed(self, slot: int) -> None:
        """A slot has come further in its round than it ever was: crashes of before count no more."""
        self._crashes[slot] = 0

    def order(self, workers: Sequence[int]) -> None:
        """Give slots to free workers in this order, as long as it is all the same."""
        self._free = dict.fromkeys(sorted(self._free, key=workers.index))

    def plan(self, now: float) -> list[Action]:
        """What to do now; each action is given once."""
        actions: list[Action] = []
        for slot in [slot for slot in self._waiting if self._crashes[slot] >= MAX_CRASHES]:
            self._waiting.remove(slot)
            self._open.discard(slot)
            actions.append(GiveUp(slot))
        actions += [self._start(slot, nearest, now) for slot, nearest in self._nearest().items()]
        # Then homes: what a slot left on its worker need not be sent again.
        for slot in list(self._waiting):
            home = self._home.get(slot)
            if home in self._free and home not in self._avoid[slot] and not self._near[slot]:
                actions.append(self._start(slot, home, now))
        for slot in list(self._waiting):
            worker = self._any_for(slot)
            if worker is not None:
                actions.append(self._start(slot, worker, now))
        for worker, running in self._running.items():
            if running.slot not in self._open and not running.stopping:
                running.stopping = True
                actions.append(Stop(worker))
        for slot in self._stragglers(now):
            worker = self._backup_for(slot)
            if worker is not None:
                del self._free[worker]
                self._running[worker] = _Running(slot, now)
                actions.append(Start(slot, worker, backup=True))
        return actions

    def wake_at(self) -> float | None:
        """When ``plan`` may have something new to say although nothing happened."""
        limit = self._late_after() if self._free and not self._waiting else None
        if limit is None:
            return None
        alone = self._alone().items()
        return min((since + limit for slot, since in alone if self._backup_for(slot) is not None), default=None)

    def _any_for(self, slot: int) -> int | None:
        avoid = self._avoid[slot] if self.workers - self._avoid[slot] else frozenset[int]()
        near, free = self._near[slot], (worker for worker in self._free if worker not in avoid)
        return max(free, key=lambda worker: near.get(worker, 0), default=None)

    def _nearest(self) -> dict[int, int]:
        """Waiting slots with free workers that have most of what they read, as many as there can be (Kuhn 1955)."""
        wanted: dict[int, list[int]] = {}
        for slot in self._waiting:
            near = {worker: self._near[slot].get(worker, 0) for worker in self.workers - self._avoid[slot]}
            if most := max(near.values(), default=0):
                home = self._home.get(slot)
                free = [worker for worker in self._free if near.get(worker) == most]
                wanted[slot] = sorted(free, key=lambda worker: worker != home)
        carried: dict[int, int] = {}

        def give(slot: int, asked: set[int]) -> bool:
            for worker in wanted[slot]:
                if worker not in asked:
                    asked.add(worker)
                    if worker not in carried or give(carried[worker], asked):
                        carried[worker] = slot
                        return True
            return False

        for slot in wanted:
            give(slot, set())
        return {slot: worker for worker, slot in carried.items()}

    def _backup_for(self, slot: int) -> int | None:
        return next((worker for worker in self._free if worker not in self._avoid[slot]), None)

    def _start(self, slot: int, worker: int, now: float) -> Start:
        self._waiting.remove(slot)
        del self._free[worker]
        self._running[worker] = _Running(slot, now)
        return Start(slot, worker)

    def _carried(self, slot: int) -> bool:
        return any(running.slot == slot and not running.stopping for running in self._running.values())

    def _alone(self) -> dict[int, float]:
        """Open slots that exactly one worker carries, and since when."""
        carried: dict[int, list[float]] = {}
        for running in self._running.values():
            if not running.stopping and running.slot in self._open:
                carried.setdefault(running.slot, []).append(running.since)
        return {slot: since[0] for slot, since in carried.items() if len(since) == 1}

    def _late_after(self) -> float | None:
        if not self.backups or not self._durations:
            return None
        return max(STRAGGLER_FACTOR * median(self._durations), STRAGGLER_LEAST_S)

    def _stragglers(self, now: float) -> list[int]:
        """Those that are late, the latest first."""
        limit = self._late_after() if self._free and not self._waiting else None
        if limit is None:
            return []
        late = [(since, slot) for slot, since in self._alone().items() if now - since >= limit]
        return [slot for _, slot in sorted(late)]
