"""The master's proxy for one worker: sends its calls, and retries idempotent ones. Runs on the master."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from html import escape
from typing import Any

from ddlf.cluster.launch.launcher import Incarnation, Launcher, Left
from ddlf.cluster.link import CONNECT_TIMEOUT_S, Identity, Link, Notice, SessionSettings, master_name, unknown_end
from ddlf.errors import (
    ClusterTooSmall,
    ConnectError,
    DDLFError,
    ExecutorCrashed,
    LeaseError,
    ProtocolError,
    RequestFailed,
    RequestTimeout,
    WorkerLost,
)
from ddlf.events import Event
from ddlf.events.record import size
from ddlf.rpc.connection import NEVER, Deadline
from ddlf.rpc.heartbeats import State, Timing
from ddlf.rpc.iworker import IWorker, checked_function, method_name
from ddlf.rpc.messages import MAX_BODY_BYTES, Request
from ddlf.rpc.tls import TOKEN_ONLY, Security
from ddlf.worker.introduction import Endpoint
from ddlf.worker.status import ExecutorInfo, Preloaded, WorkerStatus

COLUMNS = ("worker", "name", "state", "machine", "cores", "threads", "Python", "sent", "received")


def workers_table(workers: Iterable[ProxyWorker]) -> str:
    """Return a table in HTML with one row for each worker."""
    return table(COLUMNS, map(_cells, workers))


def _cells(worker: ProxyWorker) -> list[object]:
    executor, state = worker.executor, worker.state if worker.connected else "not connected"
    details: list[object] = [""] * 6
    if executor.host:
        carried = size(worker.bytes_sent), size(worker.bytes_received)
        details = [executor.host, executor.cores, executor.threads, executor.python, *carried]
    return [worker.id, worker.label, state, *details]


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in HTML. All text is escaped, because names come from users and from other machines.

    Args:
        columns: The headings of the columns.
        rows: The rows, each with one value for each column.
    """
    head = _row("th", columns)
    return f"<table><thead>{head}</thead><tbody>{''.join(_row('td', row) for row in rows)}</tbody></table>"


def _row(tag: str, values: Sequence[Any]) -> str:
    cells = (f'<{tag} style="text-align: left">{escape(str(value))}</{tag}>' for value in values)
    return f"<tr>{''.join(cells)}</tr>"


RECONNECT_S = 30.0
"""Seconds that an idempotent request waits for a lost worker."""
MAX_ATTEMPTS = 3
"""Maximum number of tries of an idempotent request. A request that ended three executors would also end the fourth."""
FLUSH_S = 1.0
"""Seconds to wait for the last lines of user code."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class NoWorkerComes(DDLFError, ConnectionError):
    """The launcher of a worker starts no worker at its place any more."""

    exit_code = ClusterTooSmall.exit_code


class ProxyWorker(IWorker):
    """One worker, seen from the master. Its methods are the methods of ``Worker``, awaited across the network.

    Args:
        host: Name or address of the worker's machine.
        port: Port that its daemon listens on.
        token: The shared secret.
        id: Number of the worker in its cluster, from 1; ``renumber`` changes it.
        N: Number of workers in the cluster; ``renumber`` changes it.
        threads: Threads for computation on the worker; None takes its share of the machine's cores.
        share: Number of workers on that machine.
        pickle_results: Whether to unpickle results that are not plain data. The worker could then run code on the
            master.
        max_message_bytes: Largest accepted answer.
        security: Certificates, and whether to encrypt connections to other machines.
        timing: Times of heartbeats, suspicion and loss.
        takeover: Take the worker from another master that has its lease.
        guest: Connect without a lease, for status and measurements. This works while another master has the worker.
        configured_name: Name in cluster.yaml; empty without one.
        advertise: Address of this worker for other workers, as ``HOST`` or ``HOST:PORT``, or a dict with such a text
            for each caller's number. With an empty text, other workers use the addresses that the worker reports.
        incarnation: Returns the worker's present incarnation, as its launcher knows it.
        never: Returns why its launcher starts no worker here any more; empty if one may come.
        when_lost: What to do if the worker is lost, for messages.
        options: Options of ``ddlf-worker`` that its start needs, for messages.
        find_end: Returns how the worker's process ended, as its launcher knows it. None means that it runs, or that the
            launcher does not know.
        revive: Restarts the worker's process if it has ended, and returns its address. None if this process cannot.
        take_offer: Returns a connection that the worker has opened; None to dial ``host``.
        replay: Returns the requests that a new executor of the worker with a number gets first.
        emit: Receives the events of the worker.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        *,
        id: int = 1,
        N: int = 1,
        threads: int | None = None,
        share: int = 1,
        pickle_results: bool = False,
        max_message_bytes: int = MAX_BODY_BYTES,
        security: Security = TOKEN_ONLY,
        timing: Timing | None = None,
        takeover: bool = False,
        guest: bool = False,
        configured_name: str = "",
        advertise: str | dict[int, str] = "",
        incarnation: Callable[[], Incarnation] = Incarnation,
        never: Callable[[], str] = str,
        when_lost: str = Launcher.when_lost,
        options: Sequence[str] = (),
        find_end: Callable[[], Awaitable[Left | None]] = unknown_end,
        revive: Callable[[], Awaitable[tuple[str, int]]] | None = None,
        take_offer: Callable[[float], Awaitable[socket.socket]] | None = None,
        replay: Callable[[int], list[Request]] = lambda number: [],
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.id, self.N = id, N
        self.timing = timing or Timing()
        self.advertise = advertise
        self._never = never
        self._when_lost = when_lost
        self.identity = Identity(guest=guest, takeover=takeover)
        self._link = Link(
            host=host,
            port=port,
            token=token,
            session=SessionSettings(id=id, N=N, threads=threads, share=share, pickle_results=pickle_results),
            identity=self.identity,
            max_message_bytes=max_message_bytes,
            security=security,
            timing=self.timing,
            configured_name=configured_name,
            incarnation=incarnation,
            when_lost=when_lost,
            options=options,
            find_end=find_end,
            revive=revive,
            take_offer=take_offer,
            replay=replay,
            emit=emit,
        )
        self._reconnecting = asyncio.Lock()

    def __repr__(self) -> str:
        return f"ProxyWorker({self.name})"

    def _repr_html_(self) -> str:
        return workers_table([self])

    @property
    def host(self) -> str:
        """Name or address of the worker's machine."""
        return self._link.host

    @property
    def port(self) -> int:
        """Port of the worker's daemon."""
        return self._link.port

    @property
    def address(self) -> str:
        """Where the worker is: host and port, or its place if it joins by itself."""
        return self._link.address

    @property
    def joins(self) -> bool:
        """Whether the worker dials this master."""
        return self._link.take_offer is not None

    @property
    def name(self) -> str:
        """The worker's name in error messages."""
        return self._link.name

    @property
    def label(self) -> str:
        """The worker's name in cluster.yaml, else its address."""
        return self._link.label

    @property
    def nickname(self) -> str:
        """The worker's name in cluster.yaml, else ``"worker 2"``. Events use it."""
        return self._link.nickname

    @property
    def connected(self) -> bool:
        """Whether the connection to the daemon is open."""
        return self._link.control is not None

    @property
    def in_use(self) -> bool:
        """Whether the master has connected and not closed since, even if the connection was lost."""
        return self._link.link_state.in_use

    @property
    def is_open(self) -> bool:
        """Whether the connection to the executor is open."""
        return self._link.data is not None

    @property
    def state(self) -> State:
        """``"alive"``, ``"suspect"`` (silent for ``suspect_after_s``), or ``"dead"`` (no connection)."""
        return "dead" if self._link.control is None else self._link.control.liveness.state

    @property
    def silent_s(self) -> float | None:
        """Seconds since the worker's last sign of life; None before the first connection.

        Seconds in which the master did not look are not counted.
        """
        return self._link.silent_s

    @property
    def crash(self) -> ExecutorCrashed | None:
        """How the last executor of the worker that ended by itself has ended; None if none has."""
        return self._link.link_state.crash

    @property
    def notice(self) -> Notice | None:
        """The worker's notice that it will end soon; None without one."""
        return self._link.link_state.notice

    @property
    def on_leaving(self) -> Callable[[], None] | None:
        """Function to call when the worker announces its end. With None, it is released when it has no requests."""
        return self._link.on_leaving

    @on_leaving.setter
    def on_leaving(self, call: Callable[[], None] | None) -> None:
        self._link.on_leaving = call

    @property
    def epoch(self) -> int:
        """The number of the master's lease of this worker, which rises with each grant; 0 without a lease."""
        return self.identity.epoch

    @property
    def executor(self) -> ExecutorInfo:
        """The executor, as it has described itself; an unknown one before the first connection."""
        return self._link.executor

    @property
    def bytes_sent(self) -> int:
        """Bytes sent on all data connections to this worker so far."""
        return self._link.bytes_carried[0]

    @property
    def bytes_received(self) -> int:
        """Bytes received on all data connections from this worker so far."""
        return self._link.bytes_carried[1]

    def renumber(self, id: int, N: int) -> None:
        """Set the worker's number and the number of workers. The executor receives them with the next ``connect``."""
        self.id, self.N = id, N
        self._link.session.id, self._link.session.N = id, N

    def share(self, workers: int) -> None:
        """Set the number of workers that share the cores of this worker's machine. The executor receives the number
        with ``connect``.
        """
        self._link.session.share = workers

    # -- connections ------------------------------------------------------------------------------------------------

    async def connect(self, *, timeout_s: float = CONNECT_TIMEOUT_S, **session: Any) -> None:
        """Connect to the daemon and to the executor of the worker. Safe to call again.

        Args:
            timeout_s: Seconds for the TCP connection.

        Raises:
            ConnectError: No daemon answers at the address, or the executor does not answer.
            AuthError: The worker has another token.
            VersionError: The worker has another protocol version or another minor version of Python.
            LeaseError: Another master has the worker; the text names that master.
        """
        await self._link.connect(timeout_s)

    async def connect_control(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Open only the connection to the daemon.

        It is enough for ``ping``, ``status``, ``restart`` and ``shutdown``, also while the executor is busy.
        """
        await self._link.connect_control(timeout_s)

    async def close(self) -> None:
        """Disconnect from the worker, which keeps running. Safe to call again.

        On failure:
            Open requests end with ``WorkerLost``, and the daemon ends their calls.
        """
        try:
            await self.flush()
        finally:
            self._link.close()

    async def flush(self) -> None:
        """Wait for the events of all lines that user code has written, unless the worker does not answer in time."""
        if self.state == "alive" and self.is_open:
            with contextlib.suppress(DDLFError):  # the worker has an earlier release of DDLF, or is lost
                await self.ask("flush", timeout_s=FLUSH_S)

    async def reconnect(self, timeout_s: float | None = None) -> None:
        """Connect again, with pauses between the attempts that grow from 0.1 to 5 s. Safe to call while connected.

        Args:
            timeout_s: Seconds until it gives up; None tries indefinitely.

        Raises:
            ConnectError: The worker was not reached in time. ``connect`` describes the other errors.
            NoWorkerComes: The launcher starts no worker here any more.
            ExecutorCrashed: The worker cannot start its executor.
            WorkerLost: ``close`` was called meanwhile.
        """
        from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

        last = None
        try:
            async with asyncio.timeout(timeout_s), self._reconnecting:
                self._link.link_state.reopen()
                async for attempt in AsyncRetrying(
                    # Random pauses, so that not all masters dial a returning worker at once.
                    wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
                    retry=retry_if_exception_type((ConnectError, WorkerLost, RequestTimeout)),
                    reraise=True,
                ):
                    self._link.link_state.check_not_closed(self.name)  # the caller may have closed it meanwhile
                    with attempt:
                        await self.connect()
                    failed = attempt.retry_state.outcome and attempt.retry_state.outcome.exception()
                    if isinstance(failed, Exception) and (reason := self._never()):
                        raise NoWorkerComes(reason, worker=self.name) from None
                    if isinstance(failed, Exception):  # not the cancellation at the end of timeout_s
                        self._link.worker_events.connect_failed(attempt.retry_state.attempt_number, last := failed)
        except TimeoutError:
            raise ConnectError(
                f"{self.name} was not reached again within {timeout_s:g} s"
                + (f", the last try: {last}" if last else ""),
                hint=self._when_lost,
            ) from last

    # -- requests ---------------------------------------------------------------------------------------------------

    async def rpc(self, request: Request, timeout_s: float | None = None, *, idempotent: bool = False) -> Any:
        """Send a request to the executor and wait for its result.

        Args:
            request: The command and its arguments.
            timeout_s: Seconds to wait; None waits indefinitely.
            idempotent: Whether the request may run more than once. It is then tried again when its executor or its
                worker is lost, up to 3 times in all. Any other request starts at most once.

        Raises:
            RemoteError: The method raised an exception.
            ExecutorCrashed: The executor ended while it ran the request.
            WorkerLost: The connection ended first; ``may_have_run`` says whether the method may have started.
            RequestTimeout: The request did not end in time; the worker was asked to end it.
            LeaseError: Another master has taken over the worker.

        On failure:
            The worker stays usable. A cancelled caller gets its ``CancelledError`` at once, and the method is ended
            later. A lost worker is usable again after ``reconnect``.
        """
        deadline = NEVER if timeout_s is None else Deadline(timeout_s)
        if idempotent:
            return await self._rpc_until_it_ends(request, deadline)
        try:
            data = self._link.data or await self._link.reach(request, deadline)
            return await data.call(request, deadline)
        except ExecutorCrashed as error:
            if error.may_have_run or not error.gave_up:
                raise
        # The executor ended because of an earlier, cancelled request. The present request only waited for its turn.
        data = await self._link.reach(request, deadline)
        return await data.call(request, deadline)

    async def _rpc_until_it_ends(self, request: Request, deadline: Deadline) -> Any:
        attempt, may_have_run = 1, False
        while True:
            try:
                data = await self._link.reach(request, deadline)
                return await data.call(request, deadline)
            except RequestFailed as error:
                may_have_run = error.may_have_run = may_have_run or error.may_have_run
                if not isinstance(error, ExecutorCrashed | WorkerLost):
                    raise
                error.attempts = attempt
                if attempt == MAX_ATTEMPTS or self._link.link_state.is_closed:
                    error.message += f" (tried {attempt} times)" if attempt > 1 else ""
                    raise
                if not self.connected:
                    try:
                        await self.reconnect(deadline.allows(RECONNECT_S))
                    except ConnectError as problem:
                        raise error from problem
                    except LeaseError as problem:
                        problem.may_have_run = may_have_run
                        raise
            attempt += 1

    async def call(
        self, role: Sequence[str], verb: str, *args: Any, timeout_s: float | None = None, **attributes: Any
    ) -> Any:
        """Call a verb of a role that the worker hosts; ``rpc`` describes the errors.

        Args:
            role: Name of the run, and of the role in it.
            verb: Name of one of the role's methods, which gets ``args``.
            timeout_s: Seconds to wait; None waits indefinitely.
            attributes: Attributes of the request, such as ``hear``.
        """
        request = Request("call", *role, verb, *args)
        for name, value in attributes.items():
            setattr(request, name, value)
        return await self.rpc(request, timeout_s)

    async def ask(self, command: str, *args: Any, timeout_s: float | None = CONNECT_TIMEOUT_S, **kwargs: Any) -> Any:
        """Send a request to the daemon, such as ping, status, cancel, restart or shutdown."""
        return await self._link.ask(command, *args, timeout_s=timeout_s, **kwargs)

    # -- what a worker does -----------------------------------------------------------------------------------------

    async def ping(self, timeout_s: float = CONNECT_TIMEOUT_S) -> float:
        """Return the seconds of a round trip to the daemon, which answers even while the executor is busy."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        await self.ask("ping", timeout_s=timeout_s)
        return loop.time() - begin

    async def endpoint(self) -> Endpoint:
        """Return where other workers can call this worker."""
        return self._link.answered(Endpoint, await self.ask("addresses"))

    async def status(self, timeout_s: float = CONNECT_TIMEOUT_S) -> WorkerStatus:
        """Return the worker's state: what it is busy with and since when, its restarts, and its process ids."""
        return await self._link.status(timeout_s)

    async def load_mnist(self) -> Any:
        return await self.rpc(Request("load_mnist"))

    async def load_cifar10(self) -> Any:
        return await self.rpc(Request("load_cifar10"))

    async def add_method(
        self, method: Callable[..., Any], *, name: str | None = None, persist: bool = False, concurrent: bool = False
    ) -> Any:
        checked_function(method, "add_method")
        return await self.rpc(Request("add_method", method, name=name, persist=persist, concurrent=concurrent))

    async def remove_method(self, method: str | Callable[..., Any]) -> Any:
        return await self.rpc(Request("remove_method", method_name(method)))

    async def run(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return await self.rpc(Request("run", method_name(method), *args, **kwargs))

    async def run_method(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return await self.rpc(Request("run_method", checked_function(method), *args, **kwargs))

    async def run_code(self, code: str) -> Any:
        return await self.rpc(Request("run_code", code))

    async def restart(self) -> None:
        """Restart the executor. Variables and data are lost; hosted methods stay."""
        await self.ask("restart", who=master_name())
        if self._link.data is not None:
            self._link.data.stream.close()  # the executor has closed its end, which the master may not have noticed yet

    async def preload(self, *modules: str) -> None:
        """Have the worker import modules before it forks new executors, and wait until these imports are complete.

        If the present executor has no data yet, the worker replaces it. Executors are forks of a template, which
        imports once for all of them. Where forking is impossible, nothing happens: each executor imports its modules
        itself, with the same results.
        """
        with contextlib.suppress(ProtocolError):  # the worker has an earlier release of DDLF
            preloaded = self._link.answered(Preloaded, await self.ask("preload", list(modules), timeout_s=None))
            if preloaded.replaceable:
                await self._link.replace_executor(list(modules))

    async def use_threads(self, threads: int) -> None:
        """Have the executor compute with a number of threads.

        A process cannot change this number, so an executor with another number is restarted and loses its state.
        """
        self._link.session.threads = threads
        await self._link.open_data()
        if self.executor.threads != threads:
            await self.restart()
            await self._link.open_data()

    async def use_determinism(self, on: bool) -> bool:
        """Have the executor compute equal bits in each run, or not.

        A process cannot change this, so an executor that does otherwise is restarted and loses its state.

        Returns:
            Whether the executor does so.
        """
        await self._link.open_data()
        if self.executor.deterministic != on:
            self._link.session.deterministic = on
            await self._link.open_data()
        if self.executor.deterministic != on:
            await self.restart()
            await self._link.open_data()
        return self.executor.deterministic == on

    async def release(self) -> None:
        """Let a worker that has announced its end go, because this master needs nothing from it any more."""
        with contextlib.suppress(DDLFError):
            await self.ask("release")

    async def shutdown(self) -> None:
        """End the worker's processes, and close the master's connections."""
        with contextlib.suppress(WorkerLost):
            await self.ask("shutdown")
        await self.close()
