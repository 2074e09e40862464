"""The two connections to one worker, from dialling to the reason of their end. Runs on the master.

*Control* leads to the daemon, which always answers. *Data* leads to the executor, which runs the methods. When data
ends, control reports the reason. When control ends or falls silent, both end.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import secrets
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ddlf.cluster.channels import DataChannel
from ddlf.cluster.claim import Claim, master_name
from ddlf.cluster.news import News
from ddlf.cluster.pulse import Pulse
from ddlf.cluster.sources import Sources
from ddlf.cluster.standing import EVENTS, Standing, of_start
from ddlf.errors import (
    ConnectError,
    DDLFError,
    LeaseError,
    ProtocolError,
    RequestFailed,
    RequestTimeout,
    VersionError,
)
from ddlf.events import Event
from ddlf.rpc.channel import Channel, said
from ddlf.rpc.code import load_result
from ddlf.rpc.connection import Connection
from ddlf.rpc.deadline import Deadline
from ddlf.rpc.dial import dial
from ddlf.rpc.frame import CONTROL_LIMITS, Frame, Limits
from ddlf.rpc.handshake import Role
from ddlf.rpc.heartbeats import ControlChannel
from ddlf.rpc.liveness import Liveness, Timing
from ddlf.rpc.messages import Request
from ddlf.rpc.silence import end_when_silent
from ddlf.rpc.tls import Security
from ddlf.rpc.values import loads, refuse_loading

CONNECT_TIMEOUT_S = 10.0
BUSY_RETRY_S = 0.1

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Link:
    """The connections of one master to one worker.

    Args:
        session: Settings that an executor receives with each session: id, N, threads, share, pickle_results. The next
            ``connect`` sends them again if they have changed.
        claim: The master's claim to the worker.
        others: The arguments of ``ProxyWorker``.

    Attributes:
        standing: Whether the link is open, and if not, why.
        control: The connection to the daemon; None without one.
        data: The connection to the executor; None without one.
        facts: Facts that the executor has reported about itself.
        news: Emits events about the worker.
    """

    host: str
    port: int
    token: bytes
    session: dict[str, Any]
    max_message_bytes: int
    security: Security
    timing: Timing
    claim: Claim
    called: str
    how_ended: Callable[[], Awaitable[int | None]]
    revive: Callable[[], Awaitable[tuple[str, int]]] | None
    replay: Callable[[int], list[Request]]
    emit: Callable[[Event], None]

    def __post_init__(self) -> None:
        self.standing = Standing(self.how_ended)
        self.control: ControlChannel | None = None
        self.data: DataChannel | None = None
        self.facts: dict[str, Any] = {}
        self._first_id = 1
        self._ids = itertools.count(1)
        self.liveness: Liveness | None = None  # kept after its connection has ended
        self._connecting = asyncio.Lock()
        self._opening: asyncio.Task[DataChannel] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._bytes_before = (0, 0)
        self._told: dict[str, Any] = {}  # the session settings that the executor has received
        self._replayed_to = ""  # the executor that has received the requests of ``replay``
        self._sources = Sources()
        self.news = News(self.emit, self.session, self.called)
        self._given_up: DDLFError | None = None  # the reason why the master has ended the connections

    @property
    def name(self) -> str:
        """The worker's name in error messages."""
        return f"worker {self.session['id']} ({self.label})"

    @property
    def label(self) -> str:
        """The worker's name in cluster.yaml, else its address."""
        return self.called or f"{self.host}:{self.port}"

    @property
    def nickname(self) -> str:
        """The worker's name in cluster.yaml, else ``"worker 2"``."""
        return self.news.name

    @property
    def silent_s(self) -> float | None:
        """Seconds since the worker's last sign of life; None before the first connection."""
        return None if self.liveness is None else self.liveness.silent_s(asyncio.get_running_loop().time())

    @property
    def bytes_carried(self) -> tuple[int, int]:
        """Bytes sent and received on all data connections so far."""
        sent, received = self._bytes_before
        stream = self.data and self.data.stream
        return (sent + stream.bytes_sent, received + stream.bytes_received) if stream else (sent, received)

    # -- control ----------------------------------------------------------------------------------------------------

    async def connect(self, timeout_s: float) -> None:
        """Open the connections that are not open."""
        async with self._connecting:
            await self._open_control(timeout_s)
            await self._open_data(timeout_s)

    async def connect_control(self, timeout_s: float) -> None:
        """Open control if it is not open."""
        if self.control is None:
            async with self._connecting:
                await self._open_control(timeout_s)

    async def _open_control(self, timeout_s: float) -> None:
        if self.control is not None:
            return
        self.standing.reopen()
        if self.revive is not None:
            self.host, self.port = await self.revive()
        sock, hello = await self._dial(Role.CONTROL, timeout_s)
        end_when_silent(sock, self.timing.dead_after_s)
        # Use new request numbers each time, because the daemon may still be ending requests with the old ones.
        self._first_id = secrets.randbits(48) + 1
        self._ids = itertools.count(self._first_id)
        theirs = Limits(max_body_bytes=hello.max_message_bytes)
        control = ControlChannel(
            self, partial(Connection, sock, limits=CONTROL_LIMITS, peer_limits=theirs), self._ids, self.timing
        )
        try:
            await self._claim_worker(control, timeout_s)
            self.standing.check_not_closed(self.name)  # the caller may have closed it meanwhile
        except BaseException:
            control.stream.close()
            raise
        self.standing.open()
        self._given_up = None
        if control.stream.closed:
            self.standing.lose()
            return
        self.control, self.liveness = control, control.liveness
        pulse = None if self.claim.guest else Pulse(self._dial_for_pulse, self.claim.master_id, self.timing.heartbeat_s)
        control.begin_heartbeats(pulse, partial(self.drop, abort=True))

    async def _claim_worker(self, control: ControlChannel, timeout_s: float) -> None:
        try:
            granted = await control.call(self.claim.request(self._first_id, self.timing), Deadline(timeout_s))
            self.claim.epoch = granted["epoch"]
        except LeaseError as error:
            if f"leased by {master_name()} " in error.message:
                error.hint = "this process has it already: close its other cluster, or name the worker once"
            raise

    async def ask(self, command: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Send a request to the daemon and return its answer."""
        return await self._open_to_ask().call(Request(command, *args, **kwargs), Deadline(timeout_s))

    def _open_to_ask(self) -> ControlChannel:
        if self.control is not None:
            return self.control
        raise self.standing.refusal(self.name)

    async def _dial(self, role: Role, timeout_s: float) -> Any:
        try:
            return await dial(
                self.host,
                self.port,
                role,
                self.token,
                max_message_bytes=self.max_message_bytes,
                timeout_s=timeout_s,
                security=self.security,
            )
        except DDLFError as error:
            error.worker = error.worker or f"worker {self.session['id']}"
            raise

    async def _dial_for_pulse(self) -> Any:
        sock, _ = await self._dial(Role.CONTROL, self.timing.dead_after_s)
        return sock

    # -- data -------------------------------------------------------------------------------------------------------

    async def reach(self, request: Request, deadline: Deadline) -> DataChannel:
        """Return the data connection, and open it again if necessary.

        All waiting requests share one attempt, which continues when one of them gives up.
        """
        if self.data is not None:
            return self.data
        self._open_to_ask()
        if self._opening is None or self._opening.done():
            self._opening = self.spawn(self.open_data())
            # Retrieve the exception, because possibly no request waits any more.
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        opening = self._opening
        await asyncio.wait([opening], timeout=deadline.left_s())
        if not opening.done():
            text = f"{said(request)!r} could not be sent within {deadline.timeout_s:g} s"
            raise RequestTimeout(text, worker=self.name, may_have_run=False)
        if opening.cancelled():
            raise self.standing.closed_here(self.name, may_have_run=False)
        if error := opening.exception():
            error = copy.copy(error)  # each request gets a copy, because its handler may change it
            if isinstance(error, RequestFailed):
                error.may_have_run = False
            raise error
        return opening.result()

    async def open_data(self) -> DataChannel:
        """Open the data connection if it is not open, and send the executor the present session settings."""
        async with self._connecting:
            return await self._open_data(CONNECT_TIMEOUT_S)

    async def _open_data(self, timeout_s: float) -> DataChannel:
        if self.data is not None:
            if self._told != self.session:  # the number of workers has changed, for example
                await self._begin_session(self.data, timeout_s)
            return self.data
        self._open_to_ask()
        crash_before = self.standing.crash
        sock, hello = await self._dial_executor(timeout_s)
        from ddlf.rpc.buffers import POOL  # imports NumPy, which would delay a cluster's first steps

        limits, theirs = Limits(max_body_bytes=self.max_message_bytes), Limits(max_body_bytes=hello.max_message_bytes)
        self.data = data = DataChannel(
            self,
            partial(Connection, sock, limits=limits, peer_limits=theirs, allocate=POOL.take),
            self._ids,
            load_result if self.session["pickle_results"] else refuse_loading,
        )
        data.crash_before = crash_before
        try:
            await self._begin_session(data, timeout_s)
            if self.facts["executor"] != self._replayed_to:
                self._check_python()
                for request in self.replay(self.session["id"]):
                    await data.call(request)
                self._replayed_to = self.facts["executor"]
        except BaseException:
            data.stream.close()  # otherwise the next request would use an executor with an incomplete session
            raise
        self.news.connected(f"{self.host}:{self.port}", self.facts)
        return data

    def _check_python(self) -> None:
        mine = f"{sys.version_info.major}.{sys.version_info.minor}"
        if self.facts["python"].rsplit(".", 1)[0] != mine:
            self.close()
            raise VersionError(
                f"runs Python {self.facts['python']}, the master {sys.version.split()[0]}",
                worker=self.name,
                hint=f"code can only be sent between equal minor versions: install {mine} there",
            )

    async def _begin_session(self, data: DataChannel, timeout_s: float) -> None:
        told = dict(self.session)
        # A guest does not answer questions about modules.
        session = Request("connect", **self.claim.key, **told, modules=not self.claim.guest)
        try:
            self.facts = await data.call(session, Deadline(timeout_s))
        except LeaseError:
            # A restarted daemon knows no leases. If so, this request fails with that reason.
            if not self.claim.guest:
                await self.ask("ping", timeout_s=timeout_s)
            raise
        data.pid = self.facts["pid"]
        self._told = told

    async def _dial_executor(self, timeout_s: float) -> Any:
        deadline = Deadline(timeout_s)
        while True:
            crash_before = self.standing.crash
            try:
                return await self._dial(Role.DATA, timeout_s)
            except ConnectError:
                status = await self.ask("status", timeout_s=timeout_s)
                if status["executor"] == "failed":
                    raise of_start(status["last_exit"], self.name) from None
                busy, is_over = status["busy"], deadline.left_s() == 0
                if busy and not self.claim.guest and not is_over:
                    # An earlier master's call is still running. The daemon ends it some seconds after that master was lost.
                    await asyncio.sleep(BUSY_RETRY_S)
                    continue
                if busy:
                    raise ConnectError(
                        f"{self.name} is busy with {busy['method']!r} since {busy['seconds']:.0f} s",
                        hint="wait, or end it with: ddlf stop --restart",
                    ) from None
                if is_over or (status["executor"] == "ready" and self.standing.crash is crash_before):
                    raise
                # The executor ended during the dial, or the next one takes long to start.

    async def replace_executor(self, modules: list[str]) -> None:
        """Replace an executor that holds nothing by one that has imported the modules, unless a request is pending."""
        async with self._connecting:
            if self.data is not None:
                if self.data.pending:
                    return
                self.data.stream.close()
            await self.ask("preload", modules, replace=True)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End both connections for good. The next ``connect`` is that of a new master."""
        self.standing.close()
        for task in list(self._background):
            task.cancel()
        self.drop(self.standing.closed_here(self.name))
        self.claim.renew()

    def drop(self, reason: DDLFError, *, abort: bool = False) -> None:
        """End both connections, and all open requests with the same reason."""
        self._given_up = reason
        for channel in (self.data, self.control):
            if channel is not None:
                channel.fail(reason)
                (channel.stream.abort if abort else channel.stream.close)()

    # The methods that channels call, as their ``Owner``.

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in a task that ends with the link."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def on_end(self, channel: Channel) -> None:
        """Note the end of a channel. Data ends with control, because without control the master has no lease."""
        if channel is self.data:
            self._bytes_before, self.data = self.bytes_carried, None
        elif channel is self.control:
            self.control = None
            self.standing.lose()
            lost = self._given_up or self.standing.lost(channel.reason, self.name, self.silent_s)
            self.news.disconnected("" if self.standing.is_closed else lost.message)
            if self.data is not None:
                self.data.stream.close()

    async def why(self, channel: Channel, reason: BaseException | None) -> DDLFError:
        crash = await self.standing.of_executor(channel, reason) if isinstance(channel, DataChannel) else None
        return crash or await self.standing.of_worker(reason, self.name, self.silent_s)

    def on_cancel(self, channel: Channel, id: int) -> None:
        """Interrupt a request that was cancelled.

        A method that awaits is already cancelled; the daemon interrupts a method that blocks.
        """
        if channel is self.data and self.control is not None:
            self.spawn(self._interrupt(id))

    async def _interrupt(self, id: int) -> None:
        with contextlib.suppress(DDLFError, OSError):
            await self.ask("cancel", id)

    def on_event(self, frame: Frame) -> None:
        if frame.name not in EVENTS:
            return  # an event of a newer worker
        facts = loads(frame.buffers)
        try:
            if frame.name == "wanted":
                question = (str(facts[key]) for key in ("what", "name", "file"))
                self.spawn(self._sources.give(self.ask, self.name, int(facts["id"]), *question))
                return
            if frame.name == "wrote":
                self.news.wrote(facts)
                return
            self.standing.heard(frame.name, facts, self.name, epoch=self.claim.epoch, first_id=self._first_id)
            if frame.name == "executor_exited" and self.standing.crash is not None:
                self.news.executor_ended(self.standing.crash.message)
            if frame.name == "lease_lost" and self.standing.lease is not None:
                self.drop(self.standing.lease)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ProtocolError(f"event {frame.name[:40]!r} cannot be read ({type(error).__name__}: {error})") from None
