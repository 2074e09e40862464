"""Worker processes on this machine that can be killed, paused, slowed and cut off. Runs on the master."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddlf.cluster.launch.launcher import Address
from ddlf.cluster.launch.local import Local
from ddlf.errors import ConfigError, ConnectError
from ddlf.testing.cluster import FaultyCluster, Machine, Part
from ddlf.testing.network import FaultProxy
from ddlf.worker.process import executor_name

if TYPE_CHECKING:
    import psutil

PERIOD_S = 0.05
"""A slowed worker pauses once in this period, in seconds. It is shorter than any timeout, and longer than the system's
time slices."""
PORT_TAKEN_S = (0.2, 0.5, 1.0, 2.0)
"""Pauses before the port of a dead worker is tried again. Another program's outgoing connection may use it briefly."""


def local_cluster(n: int = 2, *, proxied: bool = False, dead_after_s: float | None = None) -> FaultyCluster:
    """Return a cluster of ``n`` new worker processes on this machine. ``connect`` starts and ``close`` ends them.

    Args:
        n: Number of workers, 1 to 1,024.
        proxied: Whether to put a ``FaultProxy`` in front of each worker, to simulate a bad network.
        dead_after_s: The argument of ``Cluster``. A small value makes tests of losses faster.

    Example::

        async with local_cluster(3, proxied=True) as cluster:
            cluster.machine(2).kill()                # kill -9 of the executor
            cluster.machine(3).proxy.partition()     # silence
    """
    return FaultyCluster(ProcessWorkers(n, proxied=proxied), dead_after_s=dead_after_s)


class ProcessMachine(Machine):
    """The two processes of one worker, daemon and executor, with methods to cause faults in them."""

    def __init__(self, number: int, workers: ProcessWorkers) -> None:
        super().__init__(number)
        self._workers = workers
        self._frozen: list[psutil.Process] = []

    @property
    def daemon(self) -> psutil.Process | None:
        """The daemon's process; None if it has ended."""
        return _process(self._workers.process(self.number).pid)

    @property
    def executor(self) -> psutil.Process | None:
        """The executor's process; None if it has ended."""
        import psutil

        name = executor_name(self._workers.port(self.number))
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(*_process_errors()):
                if process.info["name"] == name and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        return None

    def _parts(self, part: Part) -> Iterator[psutil.Process]:
        if part not in ("executor", "daemon", "both"):
            raise ConfigError(f"part must be 'executor', 'daemon' or 'both', got {part!r}")
        for name in ("executor", "daemon"):  # pause the daemon last, because it watches its executor
            process = getattr(self, name) if part in (name, "both") else None
            if process is not None:
                yield process

    def kill(self, part: Part = "executor") -> bool:
        killed = False
        for process in self._parts(part):
            with contextlib.suppress(*_process_errors()):
                process.kill()
                killed = True
        return killed

    async def restart(self) -> None:
        await self._workers.restart(self.number)

    def freeze(self, part: Part = "both") -> None:
        for process in self._parts(part):
            with contextlib.suppress(*_process_errors()):
                process.suspend()
                self._frozen.append(process)

    def thaw(self) -> None:
        frozen, self._frozen = self._frozen, []
        for process in frozen:
            with contextlib.suppress(*_process_errors()):
                process.resume()

    async def slow(self, factor: float, seconds: float | None = None) -> None:
        """Slow the executor down by pausing and continuing it about 20 times per second.

        The executor runs for ``1 / factor`` of the time.
        """
        if not factor > 1:
            raise ConfigError(f"factor must be more than 1, got {factor!r}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                executor = self.executor
                while True:
                    executor = executor if executor is not None and executor.is_running() else self.executor
                    try:
                        if executor is not None:
                            with contextlib.suppress(*_process_errors()):
                                executor.suspend()
                        await asyncio.sleep(PERIOD_S * (1 - 1 / factor))
                    finally:
                        if executor is not None:
                            with contextlib.suppress(*_process_errors()):
                                executor.resume()
                    await asyncio.sleep(PERIOD_S / factor)


class ProcessWorkers(Local):
    """Starts and ends the worker processes, and their proxies.

    Attributes:
        machines: One machine for each worker, in order; empty before ``start``.
    """

    def __init__(self, n: int, *, proxied: bool) -> None:
        super().__init__(n)
        self._proxied = proxied
        self._state: tempfile.TemporaryDirectory[str] | None = None
        self.machines: list[ProcessMachine] = []

    def port(self, number: int) -> int:
        """Return the port of a worker's daemon."""
        return self.addresses[number - 1][1]

    def process(self, number: int) -> asyncio.subprocess.Process:
        """Return the process of a worker's daemon."""
        return self._processes[number - 1]

    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        """Start the workers, and return their addresses, or the addresses of their proxies."""
        _check_psutil()
        addresses = await super().start(modules)
        if not self.machines:
            self._state = tempfile.TemporaryDirectory(prefix="ddlf-state-")
            self.machines = [ProcessMachine(number, self) for number in range(1, len(addresses) + 1)]
            if self._proxied:
                for machine in self.machines:
                    machine.proxy = FaultProxy("127.0.0.1", self.port(machine.number), seed=machine.number)
                    await machine.proxy.start()
        if not self._proxied:
            return addresses
        return [("127.0.0.1", machine.proxy.port) for machine in self.machines if machine.proxy is not None]

    async def restart(self, number: int) -> None:
        """Start a worker again on its port. A running worker is killed first."""
        process = self.process(number)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        assert self._state is not None
        # Without this option, a worker with a fixed port would keep its state in the user's folder.
        for pause_s in (*PORT_TAKEN_S, None):
            try:
                started, _ = await self._start_one(number - 1, self.port(number), "--state-dir", self._state.name)
            except ConnectError:
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
            else:
                self._processes[number - 1] = started
                return

    async def revive(self, index: int) -> Address:
        """Return the worker's address without restarting it: a killed worker stays dead until the test restarts it."""
        if not self.machines:
            return await super().revive(index)
        return (await self.start())[index]

    async def stop(self) -> None:
        machines, self.machines = self.machines, []
        for machine in machines:
            machine.thaw()  # a paused process would not react to the request to end
            if machine.proxy is not None:
                await machine.proxy.close()
        await super().stop()
        if self._state is not None:
            self._state.cleanup()
            self._state = None


def _check_psutil() -> None:
    if importlib.util.find_spec("psutil") is None:
        raise ConfigError("faults of processes need psutil, which is not installed", hint="pip install ddlf[testing]")


def _process(pid: int) -> psutil.Process | None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def _process_errors() -> tuple[type[Exception], ...]:
    import psutil

    return psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError
