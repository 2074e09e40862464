"""The master's object for one worker. Runs on the master.

It holds two connections to the worker's one port: *control* to the daemon, which always answers, and *data* to the executor, which runs the methods.
Every request ends exactly once: with a result, a ``RemoteError``, ``ExecutorCrashed``, ``WorkerLost``, ``RequestTimeout``, or because its caller
was cancelled. When the data connection ends, the control connection says why; when the control connection ends or falls silent, both do.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import getpass
import itertools
import logging
import os
import platform
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ddlf.cluster.pulse import Pulse
from ddlf.cluster.sources import Sources
from ddlf.errors import (
    ConnectError,
    DDLFError,
    ExecutorCrashed,
    LeaseError,
    ProtocolError,
    RequestFailed,
    RequestTimeout,
    ResultNotData,
    VersionError,
    WorkerLost,
)
from ddlf.iworker import IWorker, checked_function, method_name
from ddlf.liveness import Liveness, State, Timing
from ddlf.net.connection import Connection
from ddlf.net.dial import dial
from ddlf.net.silence import end_when_silent
from ddlf.net.tls import TOKEN_ONLY, Security
from ddlf.wire.code import CodeSender, load_result
from ddlf.wire.frame import CONTROL_LIMITS, MAX_BODY_BYTES, Frame, Limits
from ddlf.wire.handshake import Role
from ddlf.wire.messages import Kind, Request, rebuild
from ddlf.wire.values import dumps, loads, refuse_loading

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
BUSY_RETRY_S = 0.1
EXIT_NEWS_S = 2.0
"""How long after the end of a data connection its daemon may take to say how the executor ended."""
RECONNECT_S = 30.0
"""How long an idempotent request waits for a worker that was lost."""
MAX_ATTEMPTS = 3
"""How often an idempotent request is tried: what ended three executors will end the fourth."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
PIECE_BYTES = 256 * 1024
"""Of an answer on the control connection, on which heartbeats must not wait."""
HEARTBEAT_ID = 0
"""The id of every heartbeat, which nobody waits for."""
NO_ARGUMENTS = dumps([[], {}])
CODE_MISSING = "ddlf.wire.code.CodeMissing"

TAKE_TURNS = frozenset({"run", "run_method", "run_code"})
"""Commands that wait until the one before has ended."""

T = TypeVar("T")
ANSWERS = frozenset({Kind.RESULT, Kind.ERROR})


@dataclass(frozen=True, slots=True)
class Exit:
    """How an executor ended, as its daemon told it.

    Args:
        pid: Its process id; None of a worker that does not say so.
        error: For the requests that were open.
        ran: The request that it ran; 0 for none.
        beside: The highest concurrent request that had begun.
        gave_up: Whether its daemon ended it.
    """

    pid: int | None
    error: ExecutorCrashed
    ran: int
    beside: int
    gave_up: bool


class Channel:
    """One connection of a proxy, with the requests that are open on it.

    Attributes:
        executor_pid: Process id of the executor at its other end, once that has answered.
        exit_before: What was known of an executor's end before it was dialled.
    """

    executor_pid: int | None = None
    exit_before: Exit | None = None

    def __init__(
        self, load_object: Callable[..., Any], on_event: Callable[[Frame], None], on_end: Callable[..., None]
    ) -> None:
        self.pending: dict[int, asyncio.Future[Any]] = {}
        self.code = CodeSender()
        self.loop = asyncio.get_running_loop()
        self.pid = os.getpid()
        self.connection: Connection
        self._load_object = load_object
        self._on_event = on_event
        self._on_end = on_end

    def open(self, sock: Any, limits: Limits, peer_limits: Limits, allocate: Callable[[int], Any] = bytearray) -> None:
        """Take an authenticated socket."""
        self.connection = Connection(
            sock,
            self._on_frame,
            self._ended,
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
        if frame.kind not in ANSWERS:
            raise ProtocolError(f"a master expects answers, not messages of kind {frame.kind}")
        future = self.pending.pop(frame.id, None)
        if future is None or future.done():
            return  # its caller was cancelled or timed out
        try:
            value = loads(frame.buffers, self._load_object)
        except DDLFError as error:
            future.set_exception(error)
            if isinstance(error, ProtocolError):
                raise  # a worker that breaks the protocol once is not listened to again
            return
        future.set_result((frame.kind, value))

    def _ended(self, reason: BaseException | None) -> None:
        self._on_end(self, reason)
        self._on_event, self._on_end = _no_more, _no_more  # the proxy and this refer to each other

    def fail(self, error: DDLFError) -> None:
        """End every open request with the same error, each with a copy: who handles one may add to it."""
        pending, self.pending = self.pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(copy.copy(error))


def _no_more(*_: object) -> None:
    """Takes the place of the callbacks of a channel that ended."""


class ControlChannel(Channel):
    """The connection to the daemon, on which every message is a sign of life."""

    liveness: Liveness

    def _on_frame(self, frame: Frame) -> None:
        self.liveness.heard(asyncio.get_running_loop().time())
        super()._on_frame(frame)


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
        timing: When the worker is suspected and when it is given up.
        takeover: Take the worker from another master that has it.
        guest: Ask without having the worker: status and measurements, also while another master has it.

    Attributes:
        called: Its name in cluster.yaml; empty when it has none.
        replay: Returns the requests that a new executor gets before any other.
        how_ended: Returns the exit code of the worker's process, negative for a signal, where this side started it; None while it runs.
        revive: Starts the worker's process again if it has ended, where this side started it; returns its port.
        timing: When the worker is suspected and when it is given up.
        epoch: Of the lease; 0 without one.

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
        timing: Timing | None = None,
        takeover: bool = False,
        guest: bool = False,
    ) -> None:
        self.host = host
        self.port = port
        self.called = ""
        self.id = id
        self.N = N
        self.threads = threads
        self.share = share
        self.pickle_results = pickle_results
        self.timing = timing or Timing()
        self.takeover = takeover
        self.how_ended: Callable[[], Awaitable[int | None]] | None = None
        self.revive: Callable[[], Awaitable[int]] | None = None
        self.guest = guest
        self.epoch = 0
        self.facts: dict[str, Any] = {}
        self._token = token
        self._max_message_bytes = max_message_bytes
        self._security = security
        self._session = secrets.token_bytes(16)
        self._ids = itertools.count(1)
        self._first_id = 1
        self._control: ControlChannel | None = None
        self._data: Channel | None = None
        self._control_lock = asyncio.Lock()
        self._data_lock = asyncio.Lock()
        self._reconnect_lock = asyncio.Lock()
        self._opening: asyncio.Task[Channel] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pulse: Pulse | None = None
        self._lost: LeaseError | None = None
        self._stopped_by = ""  # who ended the worker
        self._closed = False
        self._exit: Exit | None = None
        self._exit_news = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()
        self._bytes_before = (0, 0)
        self.replay: Callable[[ProxyWorker], list[Request]] = lambda worker: []
        self._executor = ""
        self._told = (0, 0)
        self._sources = Sources()

    def __repr__(self) -> str:
        return f"ProxyWorker({self.name})"

    @property
    def name(self) -> str:
        """As errors show it."""
        return f"worker {self.id} ({self.label})"

    @property
    def label(self) -> str:
        """Its name in cluster.yaml, else its address."""
        return self.called or f"{self.host}:{self.port}"

    @property
    def connected(self) -> bool:
        """Whether the daemon is reachable as far as this side knows."""
        return self._control is not None and self._control.is_open

    @property
    def state(self) -> State:
        """``"alive"``, ``"suspect"`` (silent for ``suspect_after_s``), or ``"dead"`` (there is no connection)."""
        return self._control.liveness.state if self._control is not None and self._control.is_open else "dead"

    @property
    def silent_s(self) -> float | None:
        """Seconds since the worker's last sign of life, without those in which this side did not look; None before the first connection."""
        if self._control is None:
            return None
        return self._control.liveness.silent_s(self._control.loop.time())

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
            LeaseError: Another master has the worker; the text says who.
        """
        await self.connect_control(timeout_s=timeout_s)
        await self._open_data(timeout_s)

    async def connect_control(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Open only the connection to the daemon: enough for ``ping``, ``status``, ``restart`` and ``shutdown``, also while the executor is busy."""
        async with self._control_lock:
            self._closed = False
            if self.connected:
                return
            if self.revive is not None:
                self.port = await self.revive()
            sock, hello = await self._dial(Role.CONTROL, timeout_s)
            end_when_silent(sock, self.timing.dead_after_s)
            control = ControlChannel(refuse_loading, self._on_event, self._on_control_end)
            control.liveness = Liveness(self.timing, asyncio.get_running_loop().time())
            control.open(sock, CONTROL_LIMITS, Limits(max_body_bytes=hello.max_message_bytes))
            try:
                await self._claim(control, timeout_s)
                if self._closed:
                    raise WorkerLost("the connection was closed on this side", worker=self.name, may_have_run=False)
            except BaseException:
                control.connection.close()
                raise
            self._control, self._lost, self._stopped_by = control, None, ""
            if not self.guest:
                self._pulse = Pulse(self._dial_for_pulse, self._session, self.timing.heartbeat_s)
            self._look(control)

    async def _dial_for_pulse(self) -> Any:
        sock, _ = await self._dial(Role.CONTROL, self.timing.dead_after_s)
        return sock

    async def _claim(self, control: ControlChannel, timeout_s: float) -> None:
        """Take the worker, and say which requests are this side's: when it is gone, however that comes, the daemon ends what runs of them."""
        # Other ones each time: the daemon may still be ending what it finds of those before.
        first_id = secrets.randbits(48) + 1
        self._ids = itertools.count(first_id)
        self._first_id = first_id
        claim = Request("claim", first_id)
        if not self.guest:
            claim.kwargs = dict(
                session=self._session,
                epoch=self.epoch,
                takeover=self.takeover and self.epoch == 0,  # once: who was replaced does not fight back
                who=master_name(),
                job=job_name(),
                heartbeat_s=self.timing.heartbeat_s,
                dead_after_s=self.timing.dead_after_s,
            )
        try:
            self.epoch = (await self._call(control, claim, timeout_s))["epoch"]
        except LeaseError as error:
            if f"leased by {master_name()} " in error.message:
                error.hint = "this process has it already: close its other cluster, or name the worker once"
            raise

    async def close(self) -> None:
        """Leave the worker; it goes on. Safe to call again.

        On failure:
            Requests that are still open end with ``WorkerLost``; the daemon ends what runs of them.
        """
        self._closed = True
        for task in list(self._background):
            task.cancel()
        self._drop(WorkerLost("the connection was closed on this side", worker=self.name))
        # Whoever connects after this is a new master.
        self._session, self.epoch, self._lost = secrets.token_bytes(16), 0, None

    async def reconnect(self, timeout_s: float | None = None) -> None:
        """Connect again, as often as it takes, in pauses that grow from 0.1 to 5 s. Safe to call while connected.

        Args:
            timeout_s: To give up after; None tries for ever.

        Raises:
            ConnectError: It was not reached in that time.
            AuthError: The worker holds another token.
            VersionError: It runs another protocol or another minor version of Python.
            LeaseError: Another master has it, or had it meanwhile.
            ExecutorCrashed: It cannot start its executor.
            WorkerLost: ``close`` was called meanwhile.
        """
        from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

        last: BaseException | None = None
        try:
            async with asyncio.timeout(timeout_s), self._reconnect_lock:
                self._closed = False
                async for attempt in AsyncRetrying(
                    # Of all masters of a worker that comes back not all at once.
                    wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
                    retry=retry_if_exception_type((ConnectError, WorkerLost, RequestTimeout)),
                    reraise=True,
                ):
                    if self._closed:  # meanwhile
                        raise WorkerLost("the connection was closed on this side", worker=self.name, may_have_run=False)
                    with attempt:
                        await self.connect()
                    outcome = attempt.retry_state.outcome
                    last = outcome.exception() if outcome is not None else None
        except TimeoutError:
            raise ConnectError(
                f"{self.name} was not reached again within {timeout_s:g} s"
                + (f", the last try: {last}" if last else ""),
                hint="look at the worker's terminal",
            ) from last

    def _drop(self, reason: DDLFError, *, abort: bool = False) -> None:
        """End both connections, and all open requests with the same reason."""
        if self._timer is not None:
            self._timer.cancel()
        for channel in (self._data, self._control):
            if channel is not None:
                channel.fail(reason)
                (channel.connection.abort if abort else channel.connection.close)()

    def _look(self, control: ControlChannel) -> None:
        """Send a heartbeat, and find out that a worker is gone when nothing says so: its machine lost power, or the network in between broke."""
        if not control.is_open:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if control.liveness.judge(now) == "dead":
            silent_s = control.liveness.silent_s(now)
            lost = WorkerLost(f"no heartbeat for {silent_s:.1f} s", worker=self.name, last_seen_s=silent_s)
            self._drop(lost, abort=True)
            return
        if self._pulse is not None:
            self._pulse.beaten()
        with contextlib.suppress(ConnectionError):
            control.connection.send(Kind.REQUEST, HEARTBEAT_ID, "ping", NO_ARGUMENTS)
            # At the same moments for all workers: the loop wakes once for all heartbeats, and once or twice for all answers.
            period = self.timing.heartbeat_s
            aligned = period - now % period
            wait = min(control.liveness.next_look_s(now), aligned if aligned > period / 4 else aligned + period)
            self._timer = loop.call_later(wait, self._look, control)

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

    async def _reach_executor(self, request: Request, left_s: float | None, timeout_s: float | None) -> Channel:
        """The data connection, opened again if it is not there: once for all that wait for it, and on when one of them gives up."""
        if self._data is not None and self._data.is_open:
            return self._data
        if self._opening is None or self._opening.done():
            self._opening = self._spawn(self._open_data())
            self._opening.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # it may be that nobody asks
        opening = self._opening
        await asyncio.wait([opening], timeout=left_s)
        if not opening.done():
            raise RequestTimeout(
                f"{_what(request)!r} could not be sent within {timeout_s:g} s", worker=self.name, may_have_run=False
            )
        if opening.cancelled():
            raise WorkerLost("the connection was closed on this side", worker=self.name, may_have_run=False)
        if error := opening.exception():
            error = copy.copy(error)  # each gets its own: who handles one may add to it
            if isinstance(error, RequestFailed):
                error.may_have_run = False
            raise error
        return opening.result()

    async def _open_data(self, timeout_s: float = CONNECT_TIMEOUT_S) -> Channel:
        async with self._data_lock:
            if self._data is not None and self._data.is_open:
                if self._told != (self.id, self.N):  # the cluster has grown
                    await self._begin_session(self._data, timeout_s)
                return self._data
            self._check_connected()
            before = self._exit
            sock, hello = await self._dial_executor(timeout_s)
            from ddlf.net.buffers import POOL  # imports NumPy, which a cluster's first steps need not wait for

            data = Channel(load_result if self.pickle_results else refuse_loading, self._on_event, self._on_data_end)
            data.exit_before = before
            data.open(
                sock,
                Limits(max_body_bytes=self._max_message_bytes),
                Limits(max_body_bytes=hello.max_message_bytes),
                POOL.take,
            )
            if self._data is not None:
                self._bytes_before = (self.bytes_sent, self.bytes_received)
            self._data = data
            try:
                await self._begin_session(data, timeout_s)
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
            if self.facts["executor"] != self._executor:
                await self._replay(data)
            return data

    async def _begin_session(self, data: Channel, timeout_s: float) -> None:
        session = Request(
            "connect",
            **({"guest": True} if self.guest else {"lease": self._session + self.epoch.to_bytes(8, "little")}),
            id=self.id,
            N=self.N,
            threads=self.threads,
            share=self.share,
            pickle_results=self.pickle_results,
            modules=not self.guest,  # this side answers what is asked about them
        )
        told = self.id, self.N
        try:
            self.facts = await self._call(data, session, timeout_s)
        except LeaseError:
            # A daemon that was started anew knows nobody, which this side may not have heard yet from its own connection.
            if not self.guest:
                await self.ask("ping", timeout_s=timeout_s)
            raise
        data.executor_pid = self.facts["pid"]
        self._told = told

    async def _replay(self, data: Channel) -> None:
        """Give a new executor what this master had given to the one before."""
        try:
            for request in self.replay(self):
                await self._call(data, request, None)
        except BaseException:
            data.connection.close()  # or the next request would use an executor that lacks half of it
            raise
        self._executor = self.facts["executor"]

    async def _dial_executor(self, timeout_s: float) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            exit_before = self._exit
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
                        exit_code_of_process=last["exit_code"],
                        signal=last["signal"],
                        stderr_tail=last["stderr_tail"],
                    ) from None
                busy = status["busy"]
                if busy and not self.guest and loop.time() <= deadline:
                    # What a master before this one left running: its daemon ends that, some seconds after it was gone.
                    await asyncio.sleep(BUSY_RETRY_S)
                    continue
                if busy:
                    raise ConnectError(
                        f"{self.name} is busy with {busy['method']!r} since {busy['seconds']:.0f} s",
                        hint="wait, or end it with: ddlf stop --restart",
                    ) from None
                if loop.time() > deadline or (status["executor"] == "ready" and self._exit is exit_before):
                    raise
                # It ended while it was dialled, or the next one takes long to start.

    def _check_connected(self) -> None:
        if self.connected:
            return
        if self._lost is not None:
            raise LeaseError(self._lost.message, hint=self._lost.hint, worker=self.name)
        what = (
            ("not connected yet", "connect first: await cluster.connect(), or async with cluster")
            if self._control is None
            else ("the connection was closed on this side", "connect again")
            if self._closed
            else ("the connection was lost", "connect again, or look at the worker's terminal")
        )
        raise WorkerLost(what[0], worker=self.name, hint=what[1], may_have_run=False)

    def _elsewhere(self, channel: Channel) -> WorkerLost:
        """The error of a caller whose event loop is not the one that a connection belongs to."""
        forked = os.getpid() != channel.pid
        return WorkerLost(
            "connected in another process" if forked else "connected on another event loop",
            hint="make a Cluster of its own in each"
            if forked
            else "connect and call inside one asyncio.run, or use ddlf.run",
            worker=self.name,
            may_have_run=False,
        )

    def _on_event(self, frame: Frame) -> None:
        if frame.name not in ("executor_exited", "lease_lost", "stopped_by", "wanted"):
            return  # of a newer worker
        facts = loads(frame.buffers)
        try:
            if frame.name == "wanted":
                self._spawn(self._give(int(facts["id"]), *(str(facts[key]) for key in ("what", "name", "file"))))
                return
            if frame.name == "executor_exited":
                gave_up = facts.get("gave_up") is True
                method = f" while it ran {facts['method']!r}" if facts["method"] and not gave_up else ""
                crashed = ExecutorCrashed(
                    f"the executor {facts['text']}{method}",
                    worker=self.name,
                    hint=facts["hint"],
                    exit_code_of_process=facts["exit_code"],
                    signal=facts["signal"],
                    stderr_tail=facts["stderr_tail"],
                )
                beside = int(facts.get("beside", 2**64))
                self._exit = Exit(facts.get("pid"), crashed, int(facts["id"]), beside, gave_up)
                self._exit_news.set()
                if gave_up:
                    log.warning("%s; what methods kept in it is gone", crashed)
            elif frame.name == "stopped_by":
                self._stopped_by = str(facts["by"])
            else:
                self._lost = LeaseError(
                    f"was taken over by {facts['by']} at {facts['since']}, epoch {facts['epoch']} > {self.epoch}",
                    hint="end this run, or close the cluster and connect again",
                    worker=self.name,
                    may_have_run=True,
                )
                self._drop(self._lost)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ProtocolError(f"event {frame.name[:40]!r} cannot be read ({type(error).__name__}: {error})") from None

    async def _give(self, id: int, what: str, name: str, file: str) -> None:
        """Answer what an executor asks about the user's own modules."""
        answer: Any = None
        if not self.guest:
            try:
                answer = await asyncio.to_thread(self._sources.answer, what, name, file)
            except (OSError, ValueError) as error:  # a folder that may not be read, a name that is no path
                log.warning("%s asked for %s %s, which cannot be read: %s", self.name, what, name[:80], error)
        data = dumps(answer)[0]
        rest = memoryview(len(data).to_bytes(8, "little") + bytes(data))
        with contextlib.suppress(DDLFError):  # it has gone meanwhile
            while True:
                piece, rest = rest[:PIECE_BYTES], rest[PIECE_BYTES:]
                await self.ask("give", id, bytes(piece), not rest, timeout_s=None)
                if not rest:
                    return

    def _on_control_end(self, channel: Channel, reason: BaseException | None) -> None:
        self._exit_news.set()
        if channel is self._control:
            if self._pulse is not None:
                self._pulse.end()
                self._pulse = None
            if self._data is not None:
                # What ran there ends: without its control connection a master does not have the worker.
                self._data.connection.close()
        if channel.pending:
            self._spawn(self._explain_control(channel, reason))

    async def _explain_control(self, channel: Channel, reason: BaseException | None) -> None:
        channel.fail(self._lost or await self._connection_lost(reason))

    async def _connection_lost(self, reason: object) -> WorkerLost:
        lost = WorkerLost(
            f"the connection was lost ({reason or 'the other side closed it'})",
            worker=self.name,
            hint="look at the worker's terminal, or ask with: ddlf status",
            last_seen_s=self.silent_s,
        )
        if self._stopped_by:
            lost.message, lost.hint = f"was stopped by {self._stopped_by}", "ask them, and start it again"
        code = await self.how_ended() if self.how_ended is not None and not self._closed else None
        if code is not None:
            lost.signal = signal.Signals(-code).name if code < 0 else None
            lost.message = (
                f"its process was ended by {lost.signal}" if code < 0 else f"its process ended with exit code {code}"
            )
            lost.hint = "connect again: that starts a new one"
        return lost

    def _on_data_end(self, channel: Channel, reason: BaseException | None) -> None:
        if channel.pending:
            self._spawn(self._explain(channel, reason))

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _explain(self, channel: Channel, reason: BaseException | None) -> None:
        """End the requests of a data connection that ended."""
        channel.fail(await self._why(channel, reason))

    async def _why(self, channel: Channel, reason: BaseException | None) -> DDLFError:
        """Find out why a data connection ended: its daemon says so, unless it was this side that ended it."""
        if not isinstance(reason, ProtocolError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_NEWS_S):
                    while self.connected and self._exit_of(channel) is None:
                        self._exit_news.clear()
                        await self._exit_news.wait()
        found = self._exit_of(channel)
        if found is None:
            return self._lost or await self._connection_lost(reason)
        return copy.copy(found.error)

    def _exit_of(self, channel: Channel) -> Exit | None:
        """What is known of the end of the executor of a data connection; that of the one before may be told after this one was reached."""
        found = self._exit
        if found is None or found is channel.exit_before:
            return None
        return found if channel.executor_pid is None or found.pid in (None, channel.executor_pid) else None

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
        if idempotent:
            return await self._rpc_until_it_ends(request, timeout_s)
        begin = 0.0 if timeout_s is None else asyncio.get_running_loop().time()
        data = self._data
        try:
            if data is not None and data.is_open:  # as ever: one coroutine less
                return await self._call(data, request, timeout_s)
            return await self._rpc_once(request, timeout_s, timeout_s)
        except ExecutorCrashed as error:
            if error.may_have_run or self._exit is None or not self._exit.gave_up:
                raise
        # Another request, which had been cancelled, had to be ended together with the executor; this one waited behind it.
        left_s = None if timeout_s is None else max(0.0, begin + timeout_s - asyncio.get_running_loop().time())
        return await self._rpc_once(request, left_s, timeout_s)

    async def _rpc_once(self, request: Request, left_s: float | None, timeout_s: float | None) -> Any:
        data = self._data
        if data is None or not data.is_open:
            loop = asyncio.get_running_loop()
            begin = loop.time()
            data = await self._reach_executor(request, left_s, timeout_s)
            left_s = None if left_s is None else max(0.0, left_s - (loop.time() - begin))
        return await self._call(data, request, left_s, timeout_s)

    async def _rpc_until_it_ends(self, request: Request, timeout_s: float | None) -> Any:
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        attempt, may_have_run = 1, False
        while True:
            left = None if deadline is None else max(0.0, deadline - loop.time())
            try:
                return await self._rpc_once(request, left, timeout_s)
            except RequestFailed as error:
                may_have_run = error.may_have_run = may_have_run or error.may_have_run
                if not isinstance(error, ExecutorCrashed | WorkerLost):
                    raise
                error.attempts = attempt
                if attempt == MAX_ATTEMPTS or self._closed:
                    error.message += f" (tried {attempt} times)" if attempt > 1 else ""
                    raise
                if not self.connected:
                    left = RECONNECT_S if deadline is None else min(RECONNECT_S, max(0.0, deadline - loop.time()))
                    try:
                        await self.reconnect(left)
                    except ConnectError as problem:
                        raise error from problem
                    except LeaseError as problem:
                        problem.may_have_run = may_have_run
                        raise
            attempt += 1

    async def ask(self, command: str, *args: Any, timeout_s: float | None = CONNECT_TIMEOUT_S, **kwargs: Any) -> Any:
        """Send a request to the daemon: ping, status, cancel, restart, shutdown."""
        self._check_connected()
        assert self._control is not None
        return await self._call(self._control, Request(command, *args, **kwargs), timeout_s)

    async def _call(
        self, channel: Channel, request: Request, left_s: float | None, timeout_s: float | None = None
    ) -> Any:
        """Exchange a request for its result.

        Args:
            channel: Over which.
            request: What is asked.
            left_s: Of its time.
            timeout_s: All its time, for the error; as ``left_s`` if it is not given.
        """
        timeout_s = left_s if timeout_s is None else timeout_s
        deadline = None if left_s is None else asyncio.get_running_loop().time() + left_s
        kind, value = await self._exchange(channel, request, left_s, timeout_s)
        if kind == Kind.ERROR and _code_is_missing(value):
            channel.code.forget()
            left_s = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
            kind, value = await self._exchange(channel, request, left_s, timeout_s)
        if kind == Kind.ERROR:
            raise rebuild(value, worker=self.name)
        return value

    async def _exchange(self, channel: Channel, request: Request, left_s: float | None, timeout_s: float | None) -> Any:
        loop = asyncio.get_running_loop()
        if loop is not channel.loop:
            raise self._elsewhere(channel)
        id = next(self._ids)
        dump = channel.code.dump if request.pickle is None else partial(channel.code.dump, pickle=request.pickle)
        buffers = dumps([list(request.args), request.kwargs], dump)
        future: asyncio.Future[Any] = loop.create_future()
        channel.pending[id] = future
        timer = None if left_s is None else loop.call_later(left_s, self._time_out, future, request, timeout_s)
        try:
            channel.connection.send(Kind.REQUEST, id, request.command, buffers, left_s)
            return await future
        except ResultNotData as error:  # of a class that is not here
            error.worker = self.name
            raise
        except ExecutorCrashed as error:
            # Requests take turns in the order in which they were sent, and one that had its turn was still running.
            found = self._exit_of(channel)
            if found and request.command in TAKE_TURNS and self._first_id <= found.ran < id and found.beside < id:
                error.may_have_run = False
                error.message += f", before {_what(request)!r} had begun"
            raise
        except ConnectionResetError as error:  # it could not be sent
            future.cancel()  # the end of the connection may be told to it too, where nobody would hear of it
            mine = channel is self._data
            why = await self._why(channel, error) if mine else self._lost or await self._connection_lost(error)
            if isinstance(why, RequestFailed):
                why = copy.copy(why)
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

    def _time_out(self, future: asyncio.Future[Any], request: Request, timeout_s: float | None) -> None:
        if not future.done():
            future.set_exception(
                RequestTimeout(f"{_what(request)!r} did not end within {timeout_s:g} s", worker=self.name)
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
        checked_function(method, "add_method")
        return await self.rpc(Request("add_method", method, name=name, persist=persist, concurrent=concurrent))

    async def remove_method(self, method: str | Callable[..., Any]) -> Any:
        """See ``IWorker``."""
        return await self.rpc(Request("remove_method", method_name(method)))

    async def run(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """See ``IWorker``."""
        return await self.rpc(Request("run", method_name(method), *args, **kwargs))

    async def run_method(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """See ``IWorker``."""
        return await self.rpc(Request("run_method", checked_function(method), *args, **kwargs))

    async def run_code(self, code: str) -> Any:
        """See ``IWorker``."""
        return await self.rpc(Request("run_code", code))

    async def restart(self) -> None:
        """Start the executor anew. Variables and data are lost, hosted methods stay."""
        await self.ask("restart", who=master_name())
        if self._data is not None:
            self._data.connection.close()  # its other end is gone, which this side may not have read yet

    async def preload(self, *modules: str) -> None:
        """Let executors of this worker come with modules imported, the present one too if it holds nothing yet; wait until they do.

        They are forks of a process that imports once for all of them. Where that is not possible, for whatever reason, nothing
        happens: executors import for themselves what they need, to the same results.
        """
        with contextlib.suppress(ProtocolError):  # a worker of an earlier release
            facts = await self.ask("preload", list(modules), timeout_s=None)
            if not facts["replaceable"]:
                return
            async with self._data_lock:
                if self._data is not None:
                    if self._data.pending:
                        return
                    self._data.connection.close()
                await self.ask("preload", list(modules), replace=True, timeout_s=None)

    async def shutdown(self) -> None:
        """End the worker's processes, and this side's connections."""
        with contextlib.suppress(WorkerLost):
            await self.ask("shutdown")
        await self.close()


def master_name() -> str:
    """This process, as people on other machines know it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = str(os.getuid())
    return f"{user}@{platform.node()} pid {os.getpid()}"


def job_name() -> str:
    """What this process runs, as its command line says: the app's file, or the script."""
    words = [word for word in sys.argv[:3] if word.endswith(".py")] or sys.argv[:1]
    return Path(words[-1]).name[:60] if words else ""


def _what(request: Request) -> str:
    """A request's name in errors: that of its method, if it has one."""
    what = getattr(request.args[0], "__name__", request.args[0]) if request.args else request.command
    return str(what)[:60]


def _code_is_missing(facts: Any) -> bool:
    """Whether a worker refused a request since it does not hold code that was sent by name. What came may be anything."""
    try:
        return facts["chain"][0][0] == CODE_MISSING and facts["may_have_run"] is False
    except (LookupError, TypeError):
        return False
