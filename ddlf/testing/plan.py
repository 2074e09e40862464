"""Faults at given points of a training run, as a value: ``FaultPlan().kill(worker=2, at_round=3)``.

Runs on the master; wrong updates and full memory run on workers. A plan can be printed and replayed, because its text is the Python
code that makes it. It follows the run's events, not a clock: a fault of a worker in a round begins when that worker
gets its slot of the round, or later with ``after``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self

import numpy as np

from ddlf.data.trees import leaves
from ddlf.errors import ConfigError, DDLFError
from ddlf.events import Event, SlotFinished, SlotStarted
from ddlf.testing.cluster import FaultyCluster, Machine, Part
from ddlf.testing.network import Direction, Fault, FaultProxy
from ddlf.testing.store import KINDS, check_shares
from ddlf.worker.frameworks import framework

if TYPE_CHECKING:
    from ddlf.app import IApp

P = ParamSpec("P")
WrongKind = Literal["nan", "zeros", "scale", "flip"]
WRONG: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "nan": lambda array: np.full_like(array, np.nan),
    "zeros": np.zeros_like,
    "scale": lambda array: array * 1000,
    "flip": np.negative,
}
"""The function for each kind of wrong update. It changes one array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault that a ``FaultPlan`` causes at a point of a training run.

    Args:
        worker: Number of the affected worker, from 1. Leave it out to name a slot instead.
        at_round: Round of the fault, from 1.
        after: Delay from the beginning of the worker's slot, as a fraction of the duration of its last slot. Before the
            first one, the duration counts as 0.1 s.
        slot: Number of a slot, from 1: the fault affects the worker that gets it. With ``split``, a slot is a part.
    """

    worker: int | None = None
    at_round: int
    after: float = 0.0
    slot: int | None = None

    def __post_init__(self) -> None:
        for name in ("worker", "slot", "at_round", "other", "shard"):
            value = getattr(self, name, None)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} counts from 1, got {value!r}")
        usual = next(field.default for field in fields(self) if field.name == "worker")
        if usual is None and (self.worker is None) == (self.slot is None):
            raise ConfigError(f"{NAMES[type(self)]} needs either a worker or a slot")
        for name in ("seconds", "back_after_s", "after", "delay_s"):
            value = getattr(self, name, None)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {value!r}")
        self.check()

    def check(self) -> None:
        """Refuse impossible arguments with a ConfigError."""

    def begun(self, event: SlotStarted, workers: Mapping[int, int]) -> Self | None:
        """Return the fault with the number of its worker, if it begins with an event; else None.

        Args:
            event: A worker gets a slot.
            workers: The worker of each slot that has begun in this round, by the number of the slot.
        """
        if self.at_round != event.round:
            return None
        if self.slot is None:
            return self if self.worker == event.worker else None
        return replace(self, worker=event.worker, slot=None) if self.slot == event.slot else None

    def machine(self, cluster: FaultyCluster) -> Machine:
        """Return the machine of the affected worker."""
        assert self.worker is not None  # ``begun`` has found it
        return cluster.machine(self.worker)

    async def act(self, cluster: FaultyCluster) -> None:
        """Cause the fault, and return when it is over."""

    def __str__(self) -> str:
        arguments = ", ".join(
            f"{f.name}={value!r}" for f in fields(self) if (value := getattr(self, f.name)) != f.default
        )
        return f"{NAMES[type(self)]}({arguments})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(PlannedFault):
    """Kill a worker's process like ``kill -9``.

    Args:
        worker: Number of the worker, from 1. Leave it out to name a slot instead.
        at_round: Number of the round, from 1.
        after: Delay, as a fraction of the duration of the worker's last slot.
        slot: Number of the slot, from 1, whose worker is killed. With ``split``, a slot is a part.
        part: ``"executor"`` (its daemon starts another one) or ``"daemon"`` (the whole worker ends).
        back_after_s: Seconds until a worker with a killed daemon is started again, on the same port; None for never.
    """

    part: Part = "executor"
    back_after_s: float | None = None

    async def act(self, cluster: FaultyCluster) -> None:
        machine = self.machine(cluster)
        machine.kill(self.part)
        if self.back_after_s is not None:
            await asyncio.sleep(self.back_after_s)
            await machine.restart()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang(PlannedFault):
    """Pause a worker (SIGSTOP) for ``seconds``. Its connections stay open meanwhile."""

    seconds: float
    part: Part = "both"

    async def act(self, cluster: FaultyCluster) -> None:
        await self.machine(cluster).hang(self.seconds, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(PlannedFault):
    """Make a worker compute ``factor`` times more slowly, for ``seconds`` or until the end of the run."""

    at_round: int = 1
    factor: float
    seconds: float | None = None

    async def act(self, cluster: FaultyCluster) -> None:
        await self.machine(cluster).slow(self.factor, self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(PlannedFault):
    """Silently separate a worker from the master, in one direction or (None) both. Needs ``proxied=True``."""

    seconds: float
    direction: Direction | None = None

    async def act(self, cluster: FaultyCluster) -> None:
        await self.machine(cluster).partition(self.seconds, self.direction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset(PlannedFault):
    """End all connections to a worker with RST. Needs a cluster with ``proxied=True``."""

    async def act(self, cluster: FaultyCluster) -> None:
        proxy = self.machine(cluster).proxy
        assert proxy is not None
        proxy.reset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong(PlannedFault):
    """Make a worker send a wrong update: all NaN, all zeros, 1000 times as large, or with the opposite sign."""

    kind: WrongKind

    def check(self) -> None:
        if self.slot is not None:
            raise ConfigError("wrong_update needs a worker, because workers change their own updates")
        if self.kind not in WRONG:
            raise ConfigError(f"kind must be one of {', '.join(WRONG)}, got {self.kind!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FillMemory(PlannedFault):
    """Make a worker's framework report that its card has no memory for batches of more than ``fits`` samples."""

    fits: int

    def check(self) -> None:
        if self.slot is not None:
            raise ConfigError("fill_memory needs a worker, because the fault runs on the worker")
        if isinstance(self.fits, bool) or not isinstance(self.fits, int) or self.fits < 0:
            raise ConfigError(f"fits must be a number of samples, 0 or more, got {self.fits!r}")


ON_WORKERS = (Wrong, FillMemory)
"""The faults that run on workers. All others act on their processes and connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFault(PlannedFault):
    """One fault of the link between two workers, in both directions.

    Args:
        other: Number of the other worker, from 1; of the other slot if ``slot`` is given.
    """

    other: int

    def check(self) -> None:
        if self.other in (self.worker, self.slot):
            raise ConfigError(f"{'worker' if self.slot is None else 'slot'} {self.other} has no link to itself")

    def begun(self, event: SlotStarted, workers: Mapping[int, int]) -> Self | None:
        if self.slot is None:
            return PlannedFault.begun(self, event, workers)
        slots = self.slot, self.other
        if self.at_round != event.round or event.slot not in slots or not workers.keys() >= {*slots}:
            return None
        if workers[self.slot] == workers[self.other]:  # after a loss, one worker can have both slots
            return None
        return replace(self, worker=workers[self.slot], other=workers[self.other], slot=None)

    async def ways(self, cluster: FaultyCluster) -> list[FaultProxy]:
        """Return the proxies for both directions of dialling; for slots, between all workers."""
        if self.worker is None:
            return [await cluster.between(*ends) for ends in permutations(range(1, cluster.N + 1), 2)]
        pair = self.worker, self.other
        return [await cluster.between(*ends) for ends in (pair, pair[::-1])]

    async def during(self, cluster: FaultyCluster, fault: Fault, seconds: float | None) -> None:
        """Apply a fault to all bytes of the link, for some seconds or until it is healed."""
        ways = await self.ways(cluster)
        for way in ways:
            way.set(fault)
        if seconds is not None:
            await asyncio.sleep(seconds)
            for way in ways:
                way.heal()


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLink(LinkFault):
    """Silently separate two workers, for ``seconds`` or until the end of the run. The master still reaches both."""

    seconds: float | None = None

    async def act(self, cluster: FaultyCluster) -> None:
        await self.during(cluster, Fault(stopped=True), self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink(LinkFault):
    """Limit the bandwidth of the link between two workers, and delay its bytes, in both directions."""

    at_round: int = 1
    bytes_per_s: float = math.inf
    delay_s: float = 0.0
    seconds: float | None = None

    def check(self) -> None:
        LinkFault.check(self)
        if not self.bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s must be more than 0, got {self.bytes_per_s!r}")

    async def act(self, cluster: FaultyCluster) -> None:
        await self.during(cluster, Fault(bytes_per_s=self.bytes_per_s, delay_s=self.delay_s), self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetLink(LinkFault):
    """End all connections between two workers with RST."""

    async def act(self, cluster: FaultyCluster) -> None:
        for way in await self.ways(cluster):
            way.reset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage(PlannedFault):
    """Make a fraction of the requests to the cluster's stores (``cluster.serve``) fail.

    Args:
        at_round: Number of the round, from 1.
        worker: The fault begins when this worker gets its slot of the round.
        seconds: Duration of the fault; None until the end of the run.
        after: Delay, as a fraction of the duration of that worker's last slot.
        error: Fraction of answers with status 500.
        throttle: Fraction of answers with status 503.
        stall: Fraction of answers that stop in the middle, with an open connection.
        cut: Fraction of answers that end in the middle, with a closed connection.
        damage: Fraction of answers with a flipped bit.
    """

    worker: int = 1
    seconds: float | None = None
    error: float = 0.0
    throttle: float = 0.0
    stall: float = 0.0
    cut: float = 0.0
    damage: float = 0.0

    def check(self) -> None:
        check_shares(self.shares())

    def shares(self) -> dict[str, float]:
        """Return the fraction of failing requests, by kind of failure."""
        return {kind: share for kind in KINDS if (share := getattr(self, kind))}

    async def act(self, cluster: FaultyCluster) -> None:
        for store in cluster.stores:
            store.fail(**self.shares())
        if self.seconds is not None:
            await asyncio.sleep(self.seconds)
            for store in cluster.stores:
                store.fail()


@dataclass(frozen=True, slots=True, kw_only=True)
class KillShard(PlannedFault):
    """Kill the present owner of a shard of the weights, like ``kill -9``.

    Args:
        shard: Number of the shard, from 1. Owners are sorted by the position of their first shard, and only the first
            shard of each owner counts.
        at_round: Number of the round, from 1.
        worker: The fault happens when this worker gets its slot of the round.
        after: Delay, as a fraction of the duration of that worker's last slot.
        part: The argument of ``kill``.
        back_after_s: The argument of ``kill``.
    """

    worker: int = 1
    shard: int
    part: Part = "executor"
    back_after_s: float | None = None

    async def act(self, cluster: FaultyCluster) -> None:
        owners = {}
        for worker in cluster.workers:
            with contextlib.suppress(DDLFError):  # a lost worker owns no shard
                shard = (await worker.status()).shard
                if shard is not None and shard.shards:
                    owners[shard.begin] = worker.id
        if self.shard > len(owners):
            raise ConfigError(
                f"there is no shard {self.shard}: {len(owners)} worker{'s have' if len(owners) != 1 else ' has'} shards",
                hint="workers have shards with exchange='sharded', after its first round, and in the modes 'downpour' and 'lbfgs'",
            )
        machine = cluster.machine(owners[sorted(owners)[self.shard - 1]])
        machine.kill(self.part)
        if self.back_after_s is not None:
            await asyncio.sleep(self.back_after_s)
            await machine.restart()


NAMES: dict[object, str] = {
    Kill: "kill",
    KillShard: "kill_shard",
    Hang: "hang",
    Slow: "slow",
    Partition: "partition",
    Reset: "reset",
    Wrong: "wrong_update",
    FillMemory: "fill_memory",
    CutLink: "cut_link",
    SlowLink: "slow_link",
    ResetLink: "reset_link",
    Storage: "storage",
}


class FaultyTraining:
    """Replaces the method ``train`` of an app on the workers, to send wrong updates or to run out of memory in some rounds.

    Args:
        app: The app.
        original: The replaced attribute of the app object; None if only the class has ``train``.
        faults: The faults of all workers.
    """

    def __init__(self, app: IApp, original: Callable[..., Any] | None, faults: tuple[Wrong | FillMemory, ...]) -> None:
        self._app = app
        self._original = original
        self._faults = faults

    def __call__(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        train = self._original or functools.partial(type(self._app).train, self._app)
        position = self._app.worker.id, self._app.replica.round
        faults = [fault for fault in self._faults if (fault.worker, fault.at_round) == position]
        for fault in faults:
            if isinstance(fault, FillMemory):
                _fill_memory(self._app.model, fault.fits)
                _check_memory(batch_size, fault.fits)
        outcome = train(weights, worker_epochs, batch_size)
        kinds = [fault.kind for fault in faults if isinstance(fault, Wrong)]
        return _harm_later(outcome, kinds) if inspect.iscoroutine(outcome) else _harm(outcome, kinds)


def _check_memory(samples: int, fits: int) -> None:
    if samples > fits:
        raise framework().full_error()


def _fill_memory(model: Any, fits: int) -> None:
    """Make single steps of a model run out of memory, too."""
    step = model.train_on_batch

    def train_on_batch(x: Any, *args: Any, **options: Any) -> Any:
        _check_memory(len(next(leaves(x))[1]), fits)
        return step(x, *args, **options)

    model.train_on_batch = train_on_batch


def _harm(outcome: Any, kinds: Sequence[str]) -> Any:
    """Replace the update in the result of ``IApp.train`` by a wrong one."""
    update, *metrics = outcome if isinstance(outcome, tuple) else (outcome,)
    for kind in kinds:
        update = [WRONG[kind](np.asarray(array)) for array in update]
    return (update, *metrics) if metrics else update


async def _harm_later(outcome: Any, kinds: Sequence[str]) -> Any:
    return _harm(await outcome, kinds)


FIRST_SLOT_S = 0.1
NEEDS_PROXY = (Partition, Reset)


def _method(kind: Callable[P, PlannedFault]) -> Callable[Concatenate[FaultPlan, P], FaultPlan]:
    """Make a method of ``FaultPlan`` that adds a fault of one kind to a plan. It has the arguments and the docstring of
    the fault's class.
    """

    def add(self: FaultPlan, /, *arguments: P.args, **named: P.kwargs) -> FaultPlan:
        return replace(self, faults=(*self.faults, kind(*arguments, **named)))

    self_parameter, *_ = inspect.signature(add).parameters.values()
    vars(add)["__signature__"] = inspect.Signature([self_parameter, *inspect.signature(kind).parameters.values()])
    add.__name__, add.__doc__ = NAMES[kind], kind.__doc__
    return add


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """A plan of faults that happen during a training run, such as killed workers.

    Each method returns a new plan with one more fault. ``print(plan)`` shows the Python code that makes it.

    Args:
        faults: The faults so far.

    Example::

        plan = FaultPlan().kill(worker=2, at_round=3).hang(worker=1, at_round=4, seconds=6)
        async with local_cluster(3) as cluster:
            app = App(cluster)
            async with plan.on(app):
                await app.train_sync(master_epochs=6)
    """

    faults: tuple[PlannedFault, ...] = ()

    def __str__(self) -> str:
        return "".join(["FaultPlan()", *(f".{fault}" for fault in self.faults)])

    def __repr__(self) -> str:
        return str(self)

    kill = _method(Kill)
    kill_shard = _method(KillShard)
    hang = _method(Hang)
    slow = _method(Slow)
    partition = _method(Partition)
    reset = _method(Reset)
    storage = _method(Storage)
    wrong_update = _method(Wrong)
    fill_memory = _method(FillMemory)
    cut_link = _method(CutLink)
    slow_link = _method(SlowLink)
    reset_link = _method(ResetLink)

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        workers: int,
        rounds: int,
        faults: int = 5,
        kinds: Sequence[str] = ("kill", "hang", "slow", "partition", "reset"),
    ) -> FaultPlan:
        """Return a random plan. The same arguments give the same plan.

        Args:
            seed: Seed of the random choice.
            workers: Number of workers in the cluster.
            rounds: Number of rounds of the run. No two faults have the same round and worker.
            faults: Number of faults.
            kinds: Names of this class's methods to choose from. Faults of links and shards only have an effect if
                workers call each other.
        """
        unknown = set(kinds) - set(NAMES.values())
        if unknown:
            raise ConfigError(f"unknown kind: {', '.join(sorted(unknown))}; the kinds are {', '.join(NAMES.values())}")
        if workers < 2 and any(kind.endswith("_link") for kind in kinds):
            raise ConfigError("one worker has no link to another")
        if not 0 <= faults <= workers * rounds:
            raise ConfigError(f"{faults} faults do not fit into {rounds} rounds of {workers} workers")
        chance = random.Random(seed)
        candidates = [(number, worker) for number in range(1, rounds + 1) for worker in range(1, workers + 1)]
        plan = cls()
        for number, worker in sorted(chance.sample(candidates, faults)):
            kind = chance.choice(list(kinds))
            where: dict[str, Any] = {"worker": worker, "at_round": number}
            if kind not in ("wrong_update", "fill_memory"):
                where["after"] = round(chance.random(), 2)
            seconds = round(chance.uniform(0.2, 3.0), 1)
            more: dict[str, dict[str, Any]] = {
                "hang": {"seconds": seconds},
                "slow": {"seconds": seconds, "factor": chance.randint(2, 8)},
                "partition": {"seconds": seconds, "direction": chance.choice(["to_worker", "to_master", None])},
                "storage": {"seconds": seconds, chance.choice(KINDS): 0.5} if kind == "storage" else {},
                "wrong_update": {"kind": chance.choice(list(WRONG))},
                "fill_memory": {"fits": chance.randint(0, 64)} if kind == "fill_memory" else {},
                "kill_shard": {"shard": chance.randint(1, workers)} if kind == "kill_shard" else {},
            }
            if kind.endswith("_link"):
                where["other"] = chance.choice([other for other in range(1, workers + 1) if other != worker])
                more = {"cut_link": {"seconds": seconds}, "slow_link": {"seconds": seconds, "delay_s": seconds / 10}}
            plan = getattr(plan, kind)(**where, **more.get(kind, {}))
        return plan

    @contextlib.asynccontextmanager
    async def on(self, app: IApp) -> AsyncIterator[Injection]:
        """Cause the faults of this plan in the app's run within the ``with`` block.

        Args:
            app: An app whose cluster comes from ``local_cluster`` or ``in_process_cluster``.

        Yields:
            The injection, which lists the faults so far.

        Raises:
            ConfigError: A fault names a missing worker, or needs a feature that the cluster lacks. It is also raised at
                the end if a fault did not happen, because the run had no such round. Otherwise a test could pass
                without any fault.
        """
        cluster = app.cluster
        if not isinstance(cluster, FaultyCluster):
            raise ConfigError(
                "faults need a cluster for tests",
                hint="make the cluster with local_cluster or in_process_cluster",
            )
        await cluster.connect()
        for fault in self.faults:
            machine = cluster.machine(fault.worker or 1)
            if isinstance(fault, NEEDS_PROXY) and machine.proxy is None:
                raise ConfigError(f"{fault} needs a proxy", hint="make the cluster with proxied=True")
            if isinstance(fault, Storage) and not cluster.stores:
                raise ConfigError(f"{fault} needs a store", hint="serve the data set with cluster.serve(folder)")
            if isinstance(fault, LinkFault):
                cluster.machine(fault.other if fault.slot is None else 1)
                await fault.ways(cluster)  # make the proxies before the run introduces the workers to each other
        injection = Injection(self, cluster)
        worker_faults = [fault for fault in self.faults if isinstance(fault, ON_WORKERS)]
        before = {name: vars(app)[name] for name in ("train",) if name in vars(app)}
        take_off = app.subscribe(injection.observe)
        if worker_faults:
            vars(app)["train"] = FaultyTraining(app, before.get("train"), tuple(worker_faults))
        try:
            yield injection
        finally:
            take_off()
            if worker_faults:
                del vars(app)["train"]
            vars(app).update(before)
            await injection.end()
        if injection.pending:
            raise ConfigError(
                f"did not happen: {', '.join(map(str, injection.pending))}",
                hint="the run has no such round, or that worker got no slot in it",
            )
        for _, fault in injection.done:
            if isinstance(fault, LinkFault) and not any(way.connections for way in await fault.ways(cluster)):
                raise ConfigError(
                    f"{fault} changed nothing: workers {fault.worker} and {fault.other} sent nothing to each other",
                    hint="workers talk to each other with exchange='sharded', with split, and in the modes 'downpour' and 'lbfgs'; "
                    "otherwise all messages go through the master",
                )


class Injection:
    """A plan that is applied to a run.

    Attributes:
        done: The faults that have begun, with their workers, each with its seconds since the plan was applied.
        pending: The faults that have not begun.
    """

    def __init__(self, plan: FaultPlan, cluster: FaultyCluster) -> None:
        self.done: list[tuple[float, PlannedFault]] = []
        self.pending = list(plan.faults)
        self._cluster = cluster
        self._began = time.monotonic()
        self._workers: dict[int, dict[int, int]] = {}  # round -> slot -> the worker that has begun it last
        self._slot_began: dict[int, float] = {}
        self._slot_took: dict[int, float] = {}
        self._acting: dict[asyncio.Task[None], PlannedFault] = {}

    def observe(self, event: Event) -> None:
        """Begin the planned faults whose time has come with this event."""
        if isinstance(event, SlotStarted):
            self._slot_began[event.worker] = time.monotonic()
            workers = self._workers.setdefault(event.round, {})
            workers[event.slot] = event.worker
            for planned in list(self.pending):
                fault = planned.begun(event, workers)
                if fault is None:
                    continue
                self.pending.remove(planned)
                delay = fault.after * self._slot_took.get(event.worker, FIRST_SLOT_S)
                self._acting[asyncio.get_running_loop().create_task(self._act(fault, delay))] = fault
        elif isinstance(event, SlotFinished) and event.worker in self._slot_began:
            self._slot_took[event.worker] = time.monotonic() - self._slot_began[event.worker]

    async def _act(self, fault: PlannedFault, delay: float) -> None:
        await asyncio.sleep(delay)
        self.done.append((time.monotonic() - self._began, fault))
        await fault.act(self._cluster)

    async def end(self) -> None:
        """Undo all present faults: continue, heal and speed up workers, and restart workers with a planned restart.

        Raises:
            Exception: A fault could not be caused, and raised this error.
        """
        began = {id(fault) for _, fault in self.done}
        for task in self._acting:
            task.cancel()
        outcomes = await asyncio.gather(*self._acting, return_exceptions=True)
        self._cluster.recover()
        for fault, outcome in zip(self._acting.values(), outcomes, strict=True):
            late = isinstance(outcome, asyncio.CancelledError) and id(fault) in began
            if late and isinstance(fault, Kill) and fault.back_after_s is not None:
                await fault.machine(self._cluster).restart()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
