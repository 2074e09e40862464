"""A cluster with methods that cause faults in single workers. Runs on the master. ``local`` and ``in_process`` start
the workers."""

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
"""A part of a worker: the executor, which runs user code; the daemon, which always answers; or both."""


class Machine(ABC):
    """One worker of a cluster for tests, with methods that cause faults in it.

    Args:
        number: Number of the worker, from 1.

    Attributes:
        proxy: The proxy between the master and this worker; None without one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.proxy: FaultProxy | None = None

    @abstractmethod
    def kill(self, part: Part = "executor") -> bool:
        """Kill a part of the worker (daemon or executor) like ``kill -9``, and return whether it was running. The
        executor ends with its daemon.
        """

    @abstractmethod
    async def restart(self) -> None:
        """Start the worker again on the same port, after its daemon was killed."""

    @abstractmethod
    def freeze(self, part: Part = "both") -> None:
        """Pause a part of the worker (daemon, executor or both) by SIGSTOP. Its connections stay open, but it does not
        answer.
        """

    @abstractmethod
    def thaw(self) -> None:
        """Let the paused processes of this worker continue. Safe to call if none is paused."""

    @abstractmethod
    async def slow(self, factor: float, seconds: float | None = None) -> None:
        """Make the executor compute ``factor`` times more slowly, for some seconds or until cancelled."""

    async def hang(self, seconds: float, part: Part = "both") -> None:
        """Pause a part of the worker (daemon, executor or both) for some seconds, then let it continue."""
        self.freeze(part)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.thaw()

    def cut_off(self, direction: Direction | None = None, *, kind: Kind | None = None) -> None:
        """Silently separate the worker from the master, until ``proxy.heal``.

        Raises:
            ConfigError: The cluster was made without proxies.
        """
        if self.proxy is None:
            raise ConfigError(
                f"worker {self.number} is reached without a proxy", hint="make the cluster with proxied=True"
            )
        self.proxy.partition(direction, kind=kind)

    async def partition(self, seconds: float, direction: Direction | None = None) -> None:
        """Separate the worker from the master for some seconds."""
        self.cut_off(direction)
        try:
            await asyncio.sleep(seconds)
        finally:
            assert self.proxy is not None
            self.proxy.heal()

    def recover(self) -> None:
        """Undo the faults that can be undone: continue paused parts, and heal the proxy."""
        self.thaw()
        if self.proxy is not None:
            self.proxy.heal()


class Harmable(Protocol):
    """The interface of a launcher that has a ``Machine`` for each worker, so that tests can cause faults in it."""

    machines: Sequence[Machine]


class FaultyCluster(Cluster):
    """A ``Cluster`` of workers on this machine, with methods that cause faults in single workers.

    Make it with ``local_cluster`` or ``in_process_cluster``.

    Args:
        launcher: Starts and ends the workers. Its ``machines`` cause faults.
        options: Arguments of ``Cluster``.

    Attributes:
        one_thing_at_a_time: Whether no other worker can answer while one computes, because all workers share a thread.
    """

    one_thing_at_a_time = False

    def __init__(self, launcher: Any, **options: Any) -> None:
        super().__init__(launcher, **options)
        self._ways: dict[tuple[int, int], FaultProxy] = {}
        self.stores: list[FaultyStore] = []

    def serve(self, folder: str | Path, *, seed: int = 0) -> FaultyStore:
        """Serve a folder to the workers until ``close``. A plan can make some answers fail.

        Args:
            folder: A data set, or a folder with data sets.
            seed: Seed for the choice of failing requests.
        """
        self.stores.append(FaultyStore(folder, seed=seed))
        return self.stores[-1]

    async def between(self, caller: int, called: int) -> FaultProxy:
        """Return a proxy between two workers. They use it from their next introduction until ``close``.

        Args:
            caller: Number of the worker that dials. Calls in the opposite direction use another proxy.
            called: Number of the dialled worker.
        """
        if (caller, called) not in self._ways:
            worker = self._find(called)
            endpoint = await worker.endpoint()
            proxy = self._ways[caller, called] = FaultProxy("127.0.0.1", endpoint.port, seed=caller)
            advertised = worker.advertise if isinstance(worker.advertise, dict) else {}
            worker.advertise = {**advertised, caller: f"127.0.0.1:{await proxy.start()}"}
        return self._ways[caller, called]

    def recover(self) -> None:
        """Undo the faults of all machines, the links between them, and stores, as far as they can be undone."""
        for machine in self.machines:
            machine.recover()
        for proxy in self._ways.values():
            proxy.heal()
        for store in self.stores:
            store.fail()

    async def close(self) -> None:
        """Disconnect from the workers, and close all proxies and stores."""
        await super().close()
        for proxy in self._ways.values():
            await proxy.close()
        while self.stores:
            self.stores.pop().close()

    @property
    def machines(self) -> list[Machine]:
        """The machines, in the order of the workers; empty before ``connect``."""
        return list(cast(Harmable, self._launcher).machines)

    def machine(self, number: int) -> Machine:
        """Return the machine of a worker, by its number from 1."""
        for machine in self.machines:
            if machine.number == number:
                return machine
        raise ConfigError(f"there is no worker {number!r}; the cluster has workers 1 to {len(self.machines)}")
