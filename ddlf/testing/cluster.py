"""A cluster whose workers can be harmed one by one. Runs on the master; ``local`` and ``in_process`` say what the workers are."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from ddlf.cluster.cluster import Cluster
from ddlf.errors import ConfigError
from ddlf.testing.network import Direction, FaultProxy, Kind
from ddlf.testing.store import FaultyStore

Part = Literal["executor", "daemon", "both"]
"""Of a worker: the process that runs user code, the one that always answers, or both."""


class Machine(ABC):
    """One worker as bad luck sees it.

    Args:
        number: Number of the worker, from 1.

    Attributes:
        proxy: The network between the master and this worker, if there is a proxy.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.proxy: FaultProxy | None = None

    @abstractmethod
    def kill(self, part: Part = "executor") -> bool:
        """End it as ``kill -9`` does; returns whether it was there. A daemon takes its executor with it."""

    @abstractmethod
    async def restart(self) -> None:
        """Start the worker again on the same port, after its daemon was killed."""

    @abstractmethod
    def freeze(self, part: Part = "both") -> None:
        """Stop it where it is (SIGSTOP): connections stay open, nothing answers."""

    @abstractmethod
    def thaw(self) -> None:
        """Let it go on. Safe to call when nothing was frozen."""

    @abstractmethod
    async def slow(self, factor: float, seconds: float | None = None) -> None:
        """Let the executor compute ``factor`` times as slowly, for so long or until cancelled."""

    async def hang(self, seconds: float, part: Part = "both") -> None:
        """Freeze it for so long."""
        self.freeze(part)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.thaw()

    def cut_off(self, direction: Direction | None = None, *, kind: Kind | None = None) -> None:
        """Partition it from the master silently, until ``proxy.heal``.

        Raises:
            ConfigError: There is no proxy on the way.
        """
        if self.proxy is None:
            raise ConfigError(
                f"worker {self.number} is reached without a proxy", hint="make the cluster with proxied=True"
            )
        self.proxy.partition(direction, kind=kind)

    async def partition(self, seconds: float, direction: Direction | None = None) -> None:
        """Cut it off for so long."""
        self.cut_off(direction)
        try:
            await asyncio.sleep(seconds)
        finally:
            assert self.proxy is not None
            self.proxy.heal()

    def recover(self) -> None:
        """Take back what can be taken back: thaw it, heal its way."""
        self.thaw()
        if self.proxy is not None:
            self.proxy.heal()


class Harmable(Protocol):
    """What a launcher of workers that can be harmed has besides."""

    machines: Sequence[Machine]


class FaultyCluster(Cluster):
    """A ``Cluster`` of workers on this machine, each of which can be harmed. Make it with ``local_cluster`` or ``in_process_cluster``.

    Args:
        launcher: Starts and ends the workers; its ``machines`` harm them.
        options: As in ``Cluster``.

    Attributes:
        one_thing_at_a_time: Whether workers compute where they answer, so that none answers while another one computes.
    """

    one_thing_at_a_time = False

    def __init__(self, launcher: Any, **options: Any) -> None:
        super().__init__(launcher, **options)
        self._ways: dict[tuple[int, int], FaultProxy] = {}
        self.stores: list[FaultyStore] = []

    def serve(self, folder: str | Path, *, seed: int = 0) -> FaultyStore:
        """Serve a folder to the workers, with answers that go wrong when a plan says so, until ``close``.

        Args:
            folder: A data set, or a folder of some.
            seed: Seed of which requests go wrong.
        """
        self.stores.append(FaultyStore(folder, seed=seed))
        return self.stores[-1]

    async def between(self, caller: int, called: int) -> FaultProxy:
        """The network over which one worker calls another, that they use when they are introduced the next time, and until ``close``.

        Args:
            caller: Number of the worker that dials; what the other one calls has a way of its own.
            called: Number of the one that is dialled.
        """
        if (caller, called) not in self._ways:
            worker = self._find(called)
            place = await worker.ask("addresses")
            proxy = self._ways[caller, called] = FaultProxy("127.0.0.1", place["port"], seed=caller)
            others = worker.advertise if isinstance(worker.advertise, dict) else {}
            worker.advertise = {**others, caller: f"127.0.0.1:{await proxy.start()}"}
        return self._ways[caller, called]

    def recover(self) -> None:
        """Take back what can be taken back, of all machines, the links between them and stores."""
        for machine in self.machines:
            machine.recover()
        for proxy in self._ways.values():
            proxy.heal()
        for store in self.stores:
            store.fail()

    async def close(self) -> None:
        """See ``Cluster``."""
        await super().close()
        for proxy in self._ways.values():
            await proxy.close()
        while self.stores:
            self.stores.pop().close()

    @property
    def machines(self) -> list[Machine]:
        """All of them, in the order of the workers; there are none before ``connect``."""
        return list(cast(Harmable, self._launcher).machines)

    def machine(self, number: int) -> Machine:
        """That of worker ``number``, from 1."""
        for machine in self.machines:
            if machine.number == number:
                return machine
        raise ConfigError(f"there is no worker {number!r}; the cluster has workers 1 to {len(self.machines)}")
