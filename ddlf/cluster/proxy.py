"""The master's object for one worker: the calls that it takes, and which of them are tried again. Runs on the master."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ddlf.cluster.claim import Claim, master_name
from ddlf.cluster.link import CONNECT_TIMEOUT_S, Link
from ddlf.cluster.shown import workers_table
from ddlf.cluster.standing import unknown
from ddlf.errors import (
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
from ddlf.rpc.deadline import NEVER, Deadline
from ddlf.rpc.frame import MAX_BODY_BYTES
from ddlf.rpc.iworker import IWorker, checked_function, method_name
from ddlf.rpc.liveness import State, Timing
from ddlf.rpc.messages import Request
from ddlf.rpc.tls import TOKEN_ONLY, Security

RECONNECT_S = 30.0
"""How long an idempotent request waits for a worker that was lost."""
MAX_ATTEMPTS = 3
"""How often an idempotent request is tried: what ended three executors will end the fourth."""
FLUSH_S = 1.0
"""How long a worker may take to say what user code wrote last."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class ProxyWorker(IWorker):
    """One worker, from the master's side. Its methods are those of ``Worker``, awaited across the network.

    Args:
        host: Name or address of the worker's machine.
        port: Port that its daemon listens on.
        token: The shared secret.
        id: Number of the worker in its cluster, from 1; ``renumber`` changes it.
        N: Number of workers in the cluster, likewise.
        threads: For computation on the worker; None takes its share of the machine's cores.
        share: How many workers share that machine.
        pickle_results: Whether to unpickle results that are not plain data. The worker could then run code on the master.
        max_message_bytes: The largest answer accepted.
        security: Certificates, and whether to encrypt beyond this machine.
        timing: When the worker is suspected and when it is given up.
        takeover: Take the worker from another master that has it.
        guest: Ask without having the worker: status and measurements, also while another master has it.
        called: Name in cluster.yaml; empty when it has none.
        advertise: Where other workers reach it, as ``HOST`` or ``HOST:PORT``, or that for each by its number; empty: as it says itself.
        how_ended: Returns the exit code of the worker's process, negative for a signal; None while it runs, or where nobody here started it.
        revive: Starts the worker's process again if it has ended, and returns its address; None where nobody here can.
        replay: Returns the requests that a new executor of the worker with a number gets before any other.
        emit: Takes the events of the worker.
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
        called: str = "",
        advertise: str | dict[int, str] = "",
        how_ended: Callable[[], Awaitable[int | None]] = unknown,
        revive: Callable[[], Awaitable[tuple[str, int]]] | None = None,
        replay: Callable[[int], list[Request]] = lambda number: [],
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.id, self.N = id, N
        self.timing = timing or Timing()
        self.advertise = advertise
        self.claim = Claim(guest=guest, takeover=takeover)
        self._link = Link(
            host=host,
            port=port,
            token=token,
            session=dict(id=id, N=N, threads=threads, share=share, pickle_results=pickle_results),
            claim=self.claim,
            max_message_bytes=max_message_bytes,
            security=security,
            timing=self.timing,
            called=called,
            how_ended=how_ended,
            revive=revive,
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
        """Its daemon listens on."""
        return self._link.port

    @property
    def name(self) -> str:
        """As errors show it."""
        return self._link.name

    @property
    def label(self) -> str:
        """Its name in cluster.yaml, else its address."""
        return self._link.label

    @property
    def nickname(self) -> str:
        """Its name in cluster.yaml, else ``"worker 2"``, as events have it."""
        return self._link.nickname

    @property
    def connected(self) -> bool:
        """Whether the daemon is reachable as far as this side knows."""
        return self._link.control is not None

    @property
    def in_use(self) -> bool:
        """Whether this side has connected to it and not left it since, whatever has become of the connection."""
        return self._link.standing.in_use

    @property
    def is_open(self) -> bool:
        """Whether its executor is, too."""
        return self._link.data is not None

    @property
    def state(self) -> State:
        """``"alive"``, ``"suspect"`` (silent for ``suspect_after_s``), or ``"dead"`` (there is no connection)."""
        return "dead" if self._link.control is None else self._link.control.liveness.state

    @property
    def silent_s(self) -> float | None:
        """Seconds since the worker's last sign of life, without those in which this side did not look; None before the first connection."""
        return self._link.silent_s

    @property
    def epoch(self) -> int:
        """Of the lease; 0 without one."""
        return self.claim.epoch

    @property
    def facts(self) -> dict[str, Any]:
        """What the executor said of itself."""
        return self._link.facts

    @property
    def bytes_sent(self) -> int:
        """On all data connections to this worker so far."""
        return self._link.bytes_carried[0]

    @property
    def bytes_received(self) -> int:
        """On all data connections from this worker so far."""
        return self._link.bytes_carried[1]

    def renumber(self, id: int, N: int) -> None:
        """Give it a number, and say how many workers there are; the executor hears it with the next ``connect``."""
        self.id, self.N = id, N
        self._link.session.update(id=id, N=N)

    # -- connections ------------------------------------------------------------------------------------------------

    async def connect(self, *, timeout_s: float = CONNECT_TIMEOUT_S, **session: Any) -> None:
        """Open both connections. Safe to call again.

        Args:
            timeout_s: For the TCP connection.

        Raises:
            ConnectError: Nobody answers there, or the executor does not.
            AuthError: The worker holds another token.
            VersionError: The worker runs another protocol or another minor version of Python.
            LeaseError: Another master has the worker; the text says who.
        """
        await self._link.connect(timeout_s)

    async def connect_control(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Open only the connection to the daemon: enough for ``ping``, ``status``, ``restart`` and ``shutdown``, also while the executor is busy."""
        await self._link.connect_control(timeout_s)

    async def close(self) -> None:
        """Leave the worker; it goes on. Safe to call again.

        On failure:
            Requests that are still open end with ``WorkerLost``; the daemon ends what runs of them.
        """
        try:
            await self.flush()
        finally:
            self._link.close()

    async def flush(self) -> None:
        """Have all that user code wrote so far told as events, unless the worker does not answer at once."""
        if self.state == "alive" and self.is_open:
            with contextlib.suppress(DDLFError):  # a worker of an earlier release; or it is gone
                await self.ask("flush", timeout_s=FLUSH_S)

    async def reconnect(self, timeout_s: float | None = None) -> None:
        """Connect again, as often as it takes, in pauses that grow from 0.1 to 5 s. Safe to call while connected.

        Args:
            timeout_s: To give up after; None tries for ever.

        Raises:
            ConnectError: It was not reached in that time; other errors are those of ``connect``.
            ExecutorCrashed: It cannot start its executor.
            WorkerLost: ``close`` was called meanwhile.
        """
        from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

        last = None
        try:
            async with asyncio.timeout(timeout_s), self._reconnecting:
                self._link.standing.reopen()
                async for attempt in AsyncRetrying(
                    # Of all masters of a worker that comes back not all at once.
                    wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
                    retry=retry_if_exception_type((ConnectError, WorkerLost, RequestTimeout)),
                    reraise=True,
                ):
                    self._link.standing.check_not_closed(self.name)  # meanwhile
                    with attempt:
                        await self.connect()
                    failed = attempt.retry_state.outcome and attempt.retry_state.outcome.exception()
                    if isinstance(failed, Exception):  # not one that was cut off by the end of the time
                        self._link.news.not_reached(attempt.retry_state.attempt_number, last := failed)
        except TimeoutError:
            raise ConnectError(
                f"{self.name} was not reached again within {timeout_s:g} s"
                + (f", the last try: {last}" if last else ""),
                hint="look at the worker's terminal",
            ) from last

    # -- requests ---------------------------------------------------------------------------------------------------

    async def rpc(self, request: Request, timeout_s: float | None = None, *, idempotent: bool = False) -> Any:
        """Send a request to the executor and wait for its result.

        Args:
            request: The command and its arguments.
            timeout_s: None waits for ever.
            idempotent: Whether it may run more than once: when its executor or its worker is lost it is tried again, up to 3 times in all.
                Any other request starts at most once.

        Raises:
            RemoteError: The method raised.
            ExecutorCrashed: The process that ran it ended.
            WorkerLost: The connection ended first; ``may_have_run`` says whether the method can have started.
            RequestTimeout: It did not end in time; the worker was told to end it.
            LeaseError: Another master took the worker over.

        On failure:
            The worker stays usable. A caller that is cancelled gets its ``CancelledError`` at once; the method is ended behind it.
            A worker that was lost is usable again after ``reconnect``.
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
        # Another request, which had been cancelled, had to be ended together with the executor; this one waited behind it.
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
                if attempt == MAX_ATTEMPTS or self._link.standing.is_closed:
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

    async def call(self, role: Sequence[str], verb: str, *args: Any, timeout_s: float | None = None, **how: Any) -> Any:
        """Have a role of the worker do something; see ``rpc``.

        Args:
            role: Name of the run, and of the role in it.
            verb: Name of one of the role's methods, which gets ``args``.
            timeout_s: Seconds to wait; None waits for ever.
            how: Attributes of the request, as ``hear``.
        """
        request = Request("call", *role, verb, *args)
        for name, value in how.items():
            setattr(request, name, value)
        return await self.rpc(request, timeout_s)

    async def ask(self, command: str, *args: Any, timeout_s: float | None = CONNECT_TIMEOUT_S, **kwargs: Any) -> Any:
        """Send a request to the daemon: ping, status, cancel, restart, shutdown."""
        return await self._link.ask(command, *args, timeout_s=timeout_s, **kwargs)

    # -- what a worker does -----------------------------------------------------------------------------------------

    async def ping(self, timeout_s: float = CONNECT_TIMEOUT_S) -> float:
        """Seconds of a round trip to the daemon, which answers whatever the executor does."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        await self.ask("ping", timeout_s=timeout_s)
        return loop.time() - begin

    async def status(self, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, Any]:
        """What the worker is and does: state, busy with what since when, restarts, process ids."""
        return dict(await self.ask("status", timeout_s=timeout_s))

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
        """Start the executor anew. Variables and data are lost, hosted methods stay."""
        await self.ask("restart", who=master_name())
        if self._link.data is not None:
            self._link.data.stream.close()  # its other end is gone, which this side may not have read yet

    async def preload(self, *modules: str) -> None:
        """Let executors of this worker come with modules imported, the present one too if it holds nothing yet; wait until they do.

        They are forks of a process that imports once for all of them. Where that is not possible, for whatever reason, nothing
        happens: executors import for themselves what they need, to the same results.
        """
        with contextlib.suppress(ProtocolError):  # a worker of an earlier release
            facts = await self.ask("preload", list(modules), timeout_s=None)
            if facts["replaceable"]:
                await self._link.replace_executor(list(modules))

    async def use_threads(self, threads: int) -> None:
        """Have the executor compute with a number of threads.

        A process cannot change the number: an executor that has another one is started anew, and what it held is lost.
        """
        self._link.session["threads"] = threads
        await self._link.open_data()
        if self.facts["threads"] != threads:
            await self.restart()
            await self._link.open_data()

    async def shutdown(self) -> None:
        """End the worker's processes, and this side's connections."""
        with contextlib.suppress(WorkerLost):
            await self.ask("shutdown")
        await self.close()
