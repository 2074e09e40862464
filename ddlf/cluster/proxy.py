"""The master's object for one worker. Runs on the master.

It holds two connections to the worker's one port: *control* to the daemon, which always answers, and *data* to the executor, which runs the methods.
Every request ends exactly once: with a result, a ``RemoteError``, ``ExecutorCrashed``, ``WorkerLost``, ``RequestTimeout``, or because its caller
was cancelled. When the data connection ends, the control connection says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import sys
from collections.abc import Callable
from typing import Any

from ddlf.errors import (
    ConnectError,
    DDLFError,
    ExecutorCrashed,
    ProtocolError,
    RequestTimeout,
    VersionError,
    WorkerLost,
)
from ddlf.iworker import IWorker
from ddlf.net.connection import Connection
from ddlf.net.dial import dial
from ddlf.net.tls import TOKEN_ONLY, Security
from ddlf.wire.code import CodeSender, load_result
from ddlf.wire.frame import CONTROL_LIMITS, MAX_BODY_BYTES, Frame, Limits
from ddlf.wire.handshake import Role
from ddlf.wire.messages import Kind, Request, Response, rebuild
from ddlf.wire.values import dumps, loads, refuse_loading

CONNECT_TIMEOUT_S = 10.0
EXIT_NEWS_S = 2.0
"""How long after the end of a data connection its daemon may take to say how the executor ended."""
HEARTBEAT_S = 2.0
"""How often the daemon is asked whether it is there, while requests are open."""
DEAD_AFTER_S = 10.0
"""A daemon that has not answered for so long is gone, or its machine is, or the network to it."""
CODE_MISSING = "ddlf.wire.code.CodeMissing"


class Channel:
    """One connection of a proxy, with the requests that are open on it."""

    def __init__(
        self, load_object: Callable[..., Any], on_event: Callable[[Frame], None], on_end: Callable[..., None]
    ) -> None:
        self.pending: dict[int, asyncio.Future[Any]] = {}
        self.code = CodeSender()
        self.connection: Connection
        self._load_object = load_object
        self._on_event = on_event
        self._on_end = on_end

    def open(self, sock: Any, limits: Limits, peer_limits: Limits, allocate: Callable[[int], Any] = bytearray) -> None:
        """Take an authenticated socket."""
        self.connection = Connection(
            sock,
            self._on_frame,
            lambda reason: self._on_end(self, reason),
            limits=limits,
            peer_limits=peer_limits,
            allocate=allocate,
        )

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return not self.connection.closed

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == Kind.EVENT:
            self._on_event(frame)
            return
        future = self.pending.pop(frame.id, None)
        if future is None or future.done():
            return  # its caller was cancelled or timed out
        if frame.kind not in (Kind.RESULT, Kind.ERROR):
            raise ProtocolError(f"a master expects answers, not messages of kind {frame.kind}")
        try:
            value = loads(frame.buffers, self._load_object)
        except DDLFError as error:
            future.set_exception(error)
            return
        future.set_result((frame.kind, value))

    def fail(self, error: BaseException) -> None:
        """End every open request with the same error."""
        pending, self.pending = self.pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)


class ProxyWorker(IWorker):
    """One worker, from the master's side. Its methods are those of ``Worker``, awaited across the network.

    Args:
        host: Name or address of the worker's machine.
        port: Its daemon listens on.
        token: The shared secret.
        id: Number of the worker in its cluster, from 1.
        N: Number of workers in the cluster.
        threads: For computation on the worker; None takes its share of the machine's cores.
        share: How many workers share that machine.
        pickle_results: Whether to unpickle results that are not plain data. The worker could then run code on the master.
        max_message_bytes: The largest answer accepted.
        security: Certificates, and whether to encrypt beyond this machine.

    Example:
        ``await worker.rpc(Request("run_method", add, a=20, b=60))``
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
    ) -> None:
        self.host = host
        self.port = port
        self.id = id
        self.N = N
        self.threads = threads
        self.share = share
        self.pickle_results = pickle_results
        self.facts: dict[str, Any] = {}
        self._token = token
        self._max_message_bytes = max_message_bytes
        self._security = security
        self._first_id = secrets.randbits(48) + 1
        self._ids = itertools.count(self._first_id)
        self._control: Channel | None = None
        self._data: Channel | None = None
        self._control_lock = asyncio.Lock()
        self._data_lock = asyncio.Lock()
        self._closed = False
        self._exit: dict[str, Any] | None = None
        self._exit_news = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()
        self._bytes_before = (0, 0)

    def __repr__(self) -> str:
        return f"ProxyWorker({self.name})"

    @property
    def name(self) -> str:
        """As errors and tables show it."""
        return f"worker {self.id} ({self.host}:{self.port})"

    @property
    def connected(self) -> bool:
        """Whether the daemon is reachable as far as this side knows."""
        return self._control is not None and self._control.is_open

    @property
    def bytes_sent(self) -> int:
        """On all data connections to this worker so far."""
        return self._bytes_before[0] + (self._data.connection.bytes_sent if self._data else 0)

    @property
    def bytes_received(self) -> int:
        """On all data connections from this worker so far."""
        return self._bytes_before[1] + (self._data.connection.bytes_received if self._data else 0)

    # -- connections ------------------------------------------------------------------------------------------------

    async def connect(self, *, timeout_s: float = CONNECT_TIMEOUT_S, **session: Any) -> None:
        """Open both connections. Safe to call again.

        Args:
            timeout_s: For the TCP connection.

        Raises:
            ConnectError: Nobody answers there, or the executor does not.
            AuthError: The worker holds another token.
            VersionError: The worker runs another protocol or another minor version of Python.
        """
        await self.connect_control(timeout_s=timeout_s)
        await self._open_data(timeout_s)

    async def connect_control(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Open only the connection to the daemon: enough for ``ping``, ``status``, ``restart`` and ``shutdown``, also while the executor is busy."""
        async with self._control_lock:
            self._closed = False
            if self.connected:
                return
            sock, hello = await self._dial(Role.CONTROL, timeout_s)
            control = Channel(refuse_loading, self._on_event, self._on_control_end)
            control.open(sock, CONTROL_LIMITS, Limits(max_body_bytes=hello.max_message_bytes))
            # When this side is gone, however that comes, the daemon ends what runs of its requests.
            (await self._call(control, Request("claim", self._first_id), timeout_s)).unwrap()
            self._control = control
            self._spawn(self._watch(control))

    async def close(self) -> None:
        """Leave the worker; it goes on. Safe to call again.

        On failure:
            Requests that are still open end with ``WorkerLost``; the daemon ends what runs of them.
        """
        self._closed = True
        for task in list(self._background):
            task.cancel()
        self._drop(WorkerLost("the connection was closed on this side", worker=self.name))

    def _drop(self, reason: WorkerLost) -> None:
        """End both connections, and all open requests with the same reason."""
        for channel in (self._data, self._control):
            if channel is not None:
                channel.fail(reason)
                channel.connection.close()

    async def _watch(self, control: Channel) -> None:
        """Find out that a worker is gone when nothing says so: its machine lost power, or the network in between broke."""
        while control.is_open:
            await asyncio.sleep(HEARTBEAT_S)
            if not control.pending and (self._data is None or not self._data.pending):
                continue
            try:
                await self._call(control, Request("ping"), DEAD_AFTER_S)
            except RequestTimeout:
                self._drop(WorkerLost(f"it has not answered for {DEAD_AFTER_S:g} s", worker=self.name))
            except WorkerLost:
                return

    async def _dial(self, role: Role, timeout_s: float) -> Any:
        try:
            return await dial(
                self.host,
                self.port,
                role,
                self._token,
                max_message_bytes=self._max_message_bytes,
                timeout_s=timeout_s,
                security=self._security,
            )
        except DDLFError as error:
            error.worker = error.worker or f"worker {self.id}"
            raise

    async def _open_data(self, timeout_s: float = CONNECT_TIMEOUT_S) -> Channel:
        async with self._data_lock:
            if self._data is not None and self._data.is_open:
                return self._data
            self._check_connected()
            self._exit = None
            self._exit_news.clear()
            sock, hello = await self._dial_executor(timeout_s)
            from ddlf.net.buffers import POOL  # imports NumPy, which a cluster's first steps need not wait for

            data = Channel(load_result if self.pickle_results else refuse_loading, self._on_event, self._on_data_end)
            data.open(
                sock,
                Limits(max_body_bytes=self._max_message_bytes),
                Limits(max_body_bytes=hello.max_message_bytes),
                POOL.take,
            )
            if self._data is not None:
                self._bytes_before = (self.bytes_sent, self.bytes_received)
            self._data = data
            session = Request(
                "connect",
                id=self.id,
                N=self.N,
                threads=self.threads,
                share=self.share,
                pickle_results=self.pickle_results,
            )
            try:
                self.facts = (await self._call(data, session, timeout_s)).unwrap()
            except BaseException:
                data.connection.close()  # or the next request would use a connection without a session
                raise
            mine = f"{sys.version_info.major}.{sys.version_info.minor}"
            if self.facts["python"].rsplit(".", 1)[0] != mine:
                await self.close()
                raise VersionError(
                    f"runs Python {self.facts['python']}, the master {sys.version.split()[0]}",
                    worker=self.name,
                    hint=f"code can only be sent between equal minor versions: install {mine} there",
                )
            return data

    async def _dial_executor(self, timeout_s: float) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                return await self._dial(Role.DATA, timeout_s)
            except ConnectError:
                status = await self.status()
                if status["executor"] == "failed":
                    last = status["last_exit"]
                    raise ExecutorCrashed(
                        f"it cannot start its executor, the last one {last['text']}",
                        worker=self.name,
                        hint="repair the cause, then: ddlf stop --restart",
                        exit_code=last["exit_code"],
                        signal=last["signal"],
                        stderr_tail=last["stderr_tail"],
                    ) from None
                busy = status["busy"]
                if busy:
                    raise ConnectError(
                        f"{self.name} is busy with {busy['method']!r} since {busy['seconds']:.0f} s",
                        hint="wait, or end it with: ddlf stop --restart",
                    ) from None
                if loop.time() > deadline or (status["executor"] == "ready" and not self._exit_news.is_set()):
                    raise
                self._exit_news.clear()  # it ended while it was dialled, or the next one takes long to start

    def _check_connected(self) -> None:
        if self.connected:
            return
        what = (
            ("not connected yet", "connect first")
            if self._control is None
            else ("the connection was closed on this side", "connect again")
            if self._closed
            else ("the connection was lost", "connect again, or look at the worker's terminal")
        )
        raise WorkerLost(what[0], worker=self.name, hint=what[1], may_have_run=False)

    def _on_event(self, frame: Frame) -> None:
        if frame.name == "executor_exited":
            self._exit = loads(frame.buffers)
            self._exit_news.set()

    def _on_control_end(self, channel: Channel, reason: BaseException | None) -> None:
        channel.fail(WorkerLost(f"the connection was lost ({reason or 'closed'})", worker=self.name))
        self._exit_news.set()

    def _on_data_end(self, channel: Channel, reason: BaseException | None) -> None:
        if channel.pending:
            self._spawn(self._explain(channel, reason))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _explain(self, channel: Channel, reason: BaseException | None) -> None:
        """End the requests of a data connection that ended."""
        channel.fail(await self._why(reason))

    async def _why(self, reason: BaseException | None) -> DDLFError:
        """Find out why the data connection ended: its daemon says so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_NEWS_S):
                await self._exit_news.wait()
        facts = self._exit
        if facts is None:
            return WorkerLost(
                f"the connection was lost ({reason or 'the other side closed it'})",
                worker=self.name,
                hint="look at the worker's terminal, or ask with: ddlf status",
            )
        method = f" while it ran {facts['method']!r}" if facts["method"] else ""
        return ExecutorCrashed(
            f"the executor {facts['text']}{method}",
            worker=self.name,
            hint=facts["hint"],
            exit_code=facts["exit_code"],
            signal=facts["signal"],
            stderr_tail=facts["stderr_tail"],
        )

    # -- requests ---------------------------------------------------------------------------------------------------

    async def rpc(self, request: Request, timeout_s: float | None = None) -> Any:
        """Send a request to the executor and wait for its result.

        Args:
            request: The command and its arguments.
            timeout_s: None waits for ever.

        Raises:
            RemoteError: The method raised.
            ExecutorCrashed: The process that ran it ended.
            WorkerLost: The connection ended first; ``may_have_run`` says whether the method can have started.
            RequestTimeout: It did not end in time; the worker was told to end it.

        On failure:
            The worker stays usable. A caller that is cancelled gets its ``CancelledError`` at once; the method is ended behind it.
        """
        data = self._data
        if data is None or not data.is_open:
            data = await self._open_data()
        return (await self._call(data, request, timeout_s)).unwrap()

    async def ask(self, command: str, *args: Any, timeout_s: float | None = CONNECT_TIMEOUT_S, **kwargs: Any) -> Any:
        """Send a request to the daemon: ping, status, cancel, restart, shutdown."""
        self._check_connected()
        assert self._control is not None
        return (await self._call(self._control, Request(command, *args, **kwargs), timeout_s)).unwrap()

    async def _call(self, channel: Channel, request: Request, timeout_s: float | None) -> Response:
        kind, value = await self._exchange(channel, request, timeout_s)
        if kind == Kind.RESULT:
            return Response(value)
        if value["chain"][0][0] == CODE_MISSING:
            channel.code.forget()
            kind, value = await self._exchange(channel, request, timeout_s)
            if kind == Kind.RESULT:
                return Response(value)
        return Response(error=rebuild(value, worker=self.name))

    async def _exchange(self, channel: Channel, request: Request, timeout_s: float | None) -> Any:
        loop = asyncio.get_running_loop()
        id = next(self._ids)
        buffers = dumps([list(request.args), request.kwargs], channel.code.dump)
        future: asyncio.Future[Any] = loop.create_future()
        channel.pending[id] = future
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._time_out, future, request, timeout_s)
        try:
            channel.connection.send(Kind.REQUEST, id, request.command, buffers, timeout_s)
            return await future
        except ConnectionResetError as error:  # it could not be sent
            why = await self._why(error) if channel is self._data else WorkerLost(str(error), worker=self.name)
            if isinstance(why, WorkerLost):
                why.may_have_run = False
            raise why from None
        except (asyncio.CancelledError, RequestTimeout):
            if channel.is_open:
                channel.connection.detach()  # the caller goes on, and may change the arrays it gave
                self._spawn(self._end_remote(channel, id))
            raise
        finally:
            channel.pending.pop(id, None)
            if timer is not None:
                timer.cancel()

    def _time_out(self, future: asyncio.Future[Any], request: Request, timeout_s: float) -> None:
        if not future.done():
            what = getattr(request.args[0], "__name__", request.args[0]) if request.args else request.command
            future.set_exception(
                RequestTimeout(f"{str(what)[:60]!r} did not end within {timeout_s:g} s", worker=self.name)
            )

    async def _end_remote(self, channel: Channel, id: int) -> None:
        """Cancel a request on the worker: its task if it awaits, by a signal if it blocks."""
        with contextlib.suppress(DDLFError, OSError):
            channel.connection.send(Kind.CANCEL, id, "", [])
            if self._control is not None and channel is not self._control:
                await self.ask("cancel", id, timeout_s=None)

    # -- what a worker does -----------------------------------------------------------------------------------------

    async def ping(self, timeout_s: float = CONNECT_TIMEOUT_S) -> float:
        """Seconds of a round trip to the daemon, which answers whatever the executor does."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        await self.ask("ping", timeout_s=timeout_s)
        return loop.time() - begin

    async def status(self, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, Any]:
        """What the worker is and does: state, busy with what since when, restarts, process ids."""
        status: dict[str, Any] = await self.ask("status", timeout_s=timeout_s)
        return status

    async def load_mnist(self) -> Any:
        """See ``IWorker``."""
        return await self.rpc(Request("load_mnist"))

    async def load_cifar10(self) -> Any:
        """See ``IWorker``."""
        return await self.rpc(Request("load_cifar10"))

    async def add_method(
        self, method: Callable[..., Any], *, name: str | None = None, persist: bool = False, concurrent: bool = False
    ) -> Any:
        """See ``IWorker``."""
        return await self.rpc(Request("add_method", method, name=name, persist=persist, concurrent=concurrent))

    async def remove_method(self, method: str | Callable[..., Any]) -> Any:
        """See ``IWorker``."""
        return await self.rpc(Request("remove_method", method_name(method)))

    async def run(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """See ``IWorker``."""
        return await self.rpc(Request("run", method_name(method), *args, **kwargs))

    async def run_method(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """See ``IWorker``."""
        return await self.rpc(Request("run_method", method, *args, **kwargs))

    async def run_code(self, code: str) -> Any:
        """See ``IWorker``."""
        return await self.rpc(Request("run_code", code))

    async def restart(self) -> None:
        """Start the executor anew. Variables and data are lost, hosted methods stay."""
        await self.ask("restart")
        if self._data is not None:
            self._data.connection.close()  # its other end is gone, which this side may not have read yet

    async def shutdown(self) -> None:
        """End the worker's processes, and this side's connections."""
        with contextlib.suppress(WorkerLost):
            await self.ask("shutdown")
        await self.close()


def method_name(method: str | Callable[..., Any]) -> Any:
    """A hosted method may be named by the function that was added."""
    return method if isinstance(method, str) else getattr(method, "__name__", method)
