"""The faults of a plan, as values that cause them. They run on the master; wrong updates run on workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ddlf.errors import ConfigError, DDLFError
from ddlf.testing.cluster import FaultyCluster, Part
from ddlf.testing.network import Direction, Fault, FaultProxy
from ddlf.testing.store import KINDS

if TYPE_CHECKING:
    from ddlf.app import IApp

WrongKind = Literal["nan", "zeros", "scale", "flip"]
WRONG: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "nan": lambda array: np.full_like(array, np.nan),
    "zeros": np.zeros_like,
    "scale": lambda array: array * 1000,
    "flip": np.negative,
}
"""How each kind changes the arrays of an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One planned fault.

    Args:
        worker: Number of the affected worker, from 1.
        at_round: Round of the fault, from 1.
        after: Delay from the beginning of the worker's slot, as a fraction of the duration of its last slot. Before the
            first one, the duration counts as 0.1 s.
    """

    worker: int
    at_round: int
    after: float = 0.0

    async def act(self, cluster: FaultyCluster) -> None:
        """Cause the fault, and return when it is over."""

    def __str__(self) -> str:
        given = ", ".join(f"{f.name}={value!r}" for f in fields(self) if (value := getattr(self, f.name)) != f.default)
        return f"{NAMES[type(self)]}({given})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(PlannedFault):
    part: Part = "executor"
    back_after_s: float | None = None

    async def act(self, cluster: FaultyCluster) -> None:
        machine = cluster.machine(self.worker)
        machine.kill(self.part)
        if self.back_after_s is not None:
            await asyncio.sleep(self.back_after_s)
            await machine.restart()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang(PlannedFault):
    seconds: float
    part: Part = "both"

    async def act(self, cluster: FaultyCluster) -> None:
        await cluster.machine(self.worker).hang(self.seconds, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(PlannedFault):
    factor: float
    seconds: float | None = None

    async def act(self, cluster: FaultyCluster) -> None:
        await cluster.machine(self.worker).slow(self.factor, self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(PlannedFault):
    seconds: float
    direction: Direction | None = None

    async def act(self, cluster: FaultyCluster) -> None:
        await cluster.machine(self.worker).partition(self.seconds, self.direction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset(PlannedFault):
    async def act(self, cluster: FaultyCluster) -> None:
        proxy = cluster.machine(self.worker).proxy
        assert proxy is not None
        proxy.reset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong(PlannedFault):
    kind: WrongKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFault(PlannedFault):
    """One fault of the link between two workers, in both directions.

    Args:
        other: Number of the other worker, from 1.
    """

    other: int

    async def ways(self, cluster: FaultyCluster) -> list[FaultProxy]:
        """Return the proxies for both directions of dialling."""
        return [await cluster.between(*two) for two in ((self.worker, self.other), (self.other, self.worker))]

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
    seconds: float | None = None

    async def act(self, cluster: FaultyCluster) -> None:
        await self.during(cluster, Fault(stopped=True), self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink(LinkFault):
    bytes_per_s: float = math.inf
    delay_s: float = 0.0
    seconds: float | None = None

    async def act(self, cluster: FaultyCluster) -> None:
        await self.during(cluster, Fault(bytes_per_s=self.bytes_per_s, delay_s=self.delay_s), self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetLink(LinkFault):
    async def act(self, cluster: FaultyCluster) -> None:
        for way in await self.ways(cluster):
            way.reset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage(PlannedFault):
    seconds: float | None = None
    error: float = 0.0
    throttle: float = 0.0
    stall: float = 0.0
    cut: float = 0.0
    damage: float = 0.0

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
    """Kills the present owner of a shard.

    Args:
        shard: Number of the shard, from 1. Owners are sorted by the position of their first shard, and only that one
            counts.
    """

    shard: int
    part: Part = "executor"
    back_after_s: float | None = None

    async def act(self, cluster: FaultyCluster) -> None:
        owners = {}
        for worker in cluster.workers:
            with contextlib.suppress(DDLFError):  # a lost worker owns no shard
                shard = (await worker.ask("status"))["shard"]
                if shard is not None and shard.get("shards", 1):
                    owners[shard["begin"]] = worker.id
        if self.shard > len(owners):
            raise ConfigError(
                f"there is no shard {self.shard}: {len(owners)} worker{'s have' if len(owners) != 1 else ' has'} shards",
                hint="workers have shards with exchange='sharded', after its first round, and in mode 'downpour'",
            )
        machine = cluster.machine(owners[sorted(owners)[self.shard - 1]])
        machine.kill(self.part)
        if self.back_after_s is not None:
            await asyncio.sleep(self.back_after_s)
            await machine.restart()


NAMES: dict[type, str] = {
    Kill: "kill",
    KillShard: "kill_shard",
    Hang: "hang",
    Slow: "slow",
    Partition: "partition",
    Reset: "reset",
    Wrong: "wrong_update",
    CutLink: "cut_link",
    SlowLink: "slow_link",
    ResetLink: "reset_link",
    Storage: "storage",
}


class WrongUpdates:
    """Replaces ``app.train`` on the workers.

    Args:
        app: The app.
        original: The replaced attribute of the app object; None if only the class has ``train``.
        faults: The faults of all workers.
    """

    def __init__(self, app: IApp, original: Callable[..., Any] | None, faults: tuple[Wrong, ...]) -> None:
        self._app = app
        self._original = original
        self._faults = faults

    def __call__(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        train = self._original or functools.partial(type(self._app).train, self._app)
        outcome = train(weights, worker_epochs, batch_size)
        here = self._app.worker.id, self._app.replica.round
        kinds = [fault.kind for fault in self._faults if (fault.worker, fault.at_round) == here]
        return _harm_later(outcome, kinds) if inspect.iscoroutine(outcome) else _harm(outcome, kinds)


def _harm(outcome: Any, kinds: Sequence[str]) -> Any:
    """Return the result of ``IApp.train`` with a wrong update."""
    update, *metrics = outcome if isinstance(outcome, tuple) else (outcome,)
    for kind in kinds:
        update = [WRONG[kind](np.asarray(array)) for array in update]
    return (update, *metrics) if metrics else update


async def _harm_later(outcome: Any, kinds: Sequence[str]) -> Any:
    return _harm(await outcome, kinds)
