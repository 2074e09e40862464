"""Workers without processes, for fast tests of methods and apps. Runs on the master's event loop.

Daemon, handshake, protocol, loopback sockets and ``Worker`` are real. Only the executor is an object on the same event
loop instead of a process. So a test starts in milliseconds, a debugger reaches the workers, and Keras is imported once.
This has consequences:

- While a method computes, everything waits: other workers, the master, heartbeats. Keras works for one worker after
  another, always in the same order.
- A method that blocks cannot be interrupted by a cancellation, by its timeout, or by the end of its master.
- A crash of native code, ``os._exit`` or a lack of memory ends the test. ``kill`` simulates a crash: connections end,
  the worker's state is lost, and waiting methods are cancelled (a real kill would not run their ``finally``). A
  computing thread continues without effect.
- All workers and the test share modules, environment variables and the current folder. Functions, classes, apps and
  data are sent as usual, so each worker has its own, with copies of the variables that they use. The test's own objects
  do not change.
- Downpour is refused, because its shards must answer while replicas compute. Use ``local_cluster``.
- Workers cannot be paused or slowed. Use ``local_cluster``.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from ddlf.cluster.launch.launcher import Address
from ddlf.cluster.launch.local import Local
from ddlf.errors import ConfigError
from ddlf.rpc.code import unpickle
from ddlf.rpc.handshake import Role, read_preamble
from ddlf.rpc.listen import answer, close_if_cancelled
from ddlf.rpc.messages import Limits
from ddlf.rpc.tls import TOKEN_ONLY, worker_tls
from ddlf.testing.cluster import FaultyCluster, Machine, Part
from ddlf.testing.network import FaultProxy
from ddlf.worker.activity import Activity
from ddlf.worker.daemon import Daemon
from ddlf.worker.executor import Executor
from ddlf.worker.executor_process import ExecutorProcess
from ddlf.worker.options import Options
from ddlf.worker.peers import Dialling
from ddlf.worker.status import Preloaded
from ddlf.worker.worker import Worker


def in_process_cluster(n: int = 2, *, proxied: bool = False, dead_after_s: float | None = None) -> FaultyCluster:
    """Return a cluster of ``n`` workers inside this process. ``connect`` starts and ``close`` ends them.

    Args:
        n: Number of workers, 1 to 1,024.
        proxied: Whether to put a ``FaultProxy`` in front of each worker.
        dead_after_s: The argument of ``Cluster``.

    Example::

        async with in_process_cluster(3) as cluster:
            assert await cluster.run_method(calculate, a=10, b=8, c=2) == [16, 16, 16]
    """
    cluster = FaultyCluster(InProcessWorkers(n, proxied=proxied), dead_after_s=dead_after_s)
    cluster.one_thing_at_a_time = True
    return cluster


class OwnClasses:
    """Unpickles objects for one of several workers in the master's process. Each worker gets its own copies of classes,
    as it would in a separate process.

    Otherwise cloudpickle would recognise classes that it has pickled, and set arriving methods on the sender's class.
    """

    _lock = threading.RLock()

    def __init__(self) -> None:
        self._classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()

    def __call__(self, data: bytes) -> Any:
        """Unpickle an object for this receiver, like ``unpickle``."""
        tracker: Any = cloudpickle.cloudpickle
        with self._lock:
            before = tracker._DYNAMIC_CLASS_TRACKER_BY_ID
            tracker._DYNAMIC_CLASS_TRACKER_BY_ID = self._classes
            try:
                return unpickle(data)
            finally:
                tracker._DYNAMIC_CLASS_TRACKER_BY_ID = before


class InProcessWorker(Worker):
    """A ``Worker`` that shares its process with others."""

    def _set_threads(self, threads: int | None, share: int) -> int:
        """Return the wanted number without applying it, because all workers share this process's threads."""
        return threads or 1

    async def compute(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run a function on the worker's thread while everything else waits, because all share Keras's global state."""
        if self._compute is None:
            self._compute = ThreadPoolExecutor(1, "compute")
        return self._compute.submit(function, *args).result()

    def end(self) -> None:
        """Release the thread that computes for this worker."""
        if self._compute is not None:
            self._compute.shutdown(wait=False)


class InProcessExecutor(ExecutorProcess):
    """The executor of a worker as an object in this process, instead of a separate process."""

    _executor: Executor | None = None
    _serving: set[asyncio.Task[None]] = set()  # noqa: RUF012 - of one that has not started

    async def _start(self) -> None:
        self.restarts += 1
        self._has_served = False
        self._killed = asyncio.Event()
        self._sockets: list[socket.socket] = []
        self._serving = set()
        # The executor gets its own view of the page, as a separate process would.
        self._executor = Executor(
            self._session_dir,
            self._persist_dir,
            Activity(self._activity_fd),
            load=OwnClasses(),
            kind=InProcessWorker,
            free=lambda: None,  # the garbage collection of the shared process is sufficient
        )
        self._executor.peers.dialling = Dialling(
            self._options.tokens, self._options.max_message_bytes, self._options.security or TOKEN_ONLY
        )
        self.state = "ready"
        self.settled.set()

    async def _wait(self) -> int:
        await self._killed.wait()
        await asyncio.gather(*self._serving, return_exceptions=True)
        return -signal.SIGKILL

    async def preload(self, modules: tuple[str, ...], *, replace: bool) -> Preloaded:
        """Do nothing, because the process imports modules once for all workers anyway."""
        return Preloaded(reason="the executor is not a process", replaceable=False)

    async def hand_over(self, sock: socket.socket, preamble: bytes, deadline: float) -> None:
        """Serve a data connection, or keep one that another worker offers, on a copy of its socket. The daemon closes
        its own socket afterwards.
        """
        await self.settled.wait()
        connection = sock.dup()
        connection.setblocking(False)
        if read_preamble(preamble) is Role.JOIN:
            if self._executor is None:
                connection.close()
            else:
                await self._executor.peers.receive(connection, preamble)
            return
        limits = Limits(max_body_bytes=self._options.max_message_bytes)
        certificate, security = self._certificate, self._options.security
        encryption = worker_tls(certificate, security) if certificate and security else None
        connection, hello = await answer(connection, preamble, self._options.tokens, limits.max_body_bytes, encryption)
        if self._executor is None:
            connection.close()
            return
        self._has_served = True
        self._sockets.append(connection)
        peer_limits = Limits(max_body_bytes=hello.max_message_bytes)
        task = asyncio.get_running_loop().create_task(self._executor.serve(connection, limits, peer_limits))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        task.add_done_callback(partial(close_if_cancelled, connection))

    def grant(self, lease: bytes) -> None:
        super().grant(lease)
        if self._executor is not None:
            self._executor.end_sessions_without_lease()

    def kill(self) -> bool:
        """Simulate ``kill -9``, and return whether the executor was running."""
        executor, self._executor = self._executor, None
        if executor is None:
            return False
        self.state = "starting"
        self.settled.clear()
        for sock in self._sockets:
            if sock.fileno() >= 0:
                with contextlib.suppress(OSError):  # the other side has already closed the connection
                    sock.shutdown(socket.SHUT_RDWR)
        executor.peers.close()
        assert isinstance(executor.worker, InProcessWorker)
        executor.worker.end()
        self._killed.set()
        return True

    def _kill_group(self, *, also_ended: bool = False) -> None:
        self.kill()

    async def end(self) -> None:
        self.kill()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await super().end()


class InProcessDaemon(Daemon):
    """A worker's daemon whose executor is an object in this process."""

    process: InProcessExecutor

    def _make_process(self, state_dir: Path) -> ExecutorProcess:
        return InProcessExecutor(
            self._options, self._folder.path, state_dir, self._announce, self.log, self._certificate
        )


class InProcessMachine(Machine):
    """One worker in this process, with the methods to cause faults in it."""

    def __init__(self, number: int, daemon: InProcessDaemon) -> None:
        super().__init__(number)
        self._daemon = daemon

    def kill(self, part: Part = "executor") -> bool:
        """Kill the executor. Other parts cannot be killed."""
        if part != "executor":
            self._refuse("killed together with its daemon")
        return self._daemon.process.kill()

    async def restart(self) -> None:
        self._refuse("restarted")

    def freeze(self, part: Part = "both") -> None:
        self._refuse("frozen")

    def thaw(self) -> None:
        """Do nothing, because workers in this process cannot be paused."""

    async def slow(self, factor: float, seconds: float | None = None) -> None:
        self._refuse("slowed")

    def _refuse(self, action: str) -> NoReturn:
        raise ConfigError(f"worker {self.number} is in this process and cannot be {action}", hint="use local_cluster")


class InProcessWorkers(Local):
    """Starts and ends the workers in this process, and their proxies.

    Attributes:
        machines: One machine for each worker, in order; empty before ``start``.
    """

    def __init__(self, n: int, *, proxied: bool) -> None:
        super().__init__(n)
        self._proxied = proxied
        self._daemons: list[InProcessDaemon] = []
        self._running: list[asyncio.Task[None]] = []
        self.machines: list[InProcessMachine] = []

    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        """Start the workers, and return their addresses, or the addresses of their proxies."""
        async with self._start_lock:
            if not self.machines:
                try:
                    await self._unless_stopped(self._start_in_process())
                except BaseException:
                    await self._end_all()
                    raise
            return self.addresses

    async def _start_in_process(self) -> None:
        for index in range(len(self.addresses)):
            daemon = InProcessDaemon(Options(host="127.0.0.1", port=0, tokens=self.tokens.all, state_dir=None))
            self._daemons.append(daemon)
            self.machines.append(machine := InProcessMachine(index + 1, daemon))
            ready = asyncio.Event()
            self._running.append(asyncio.get_running_loop().create_task(daemon.run(ready.set)))
            await ready.wait()
            if self._proxied:
                machine.proxy = FaultProxy("127.0.0.1", daemon.port, seed=machine.number)
                await machine.proxy.start()
            self.addresses[index] = "127.0.0.1", machine.proxy.port if machine.proxy else daemon.port

    async def revive(self, index: int) -> Address:
        """Return the worker's address without restarting it: a killed worker stays dead until the test restarts it."""
        if not self.machines:
            return await super().revive(index)
        return (await self.start())[index]

    async def _end_all(self) -> None:
        machines, daemons, running = self.machines, self._daemons, self._running
        self.machines, self._daemons, self._running = [], [], []
        for machine in machines:
            if machine.proxy is not None:
                await machine.proxy.close()
        for daemon in daemons:
            daemon.stop()
        await asyncio.gather(*running)
