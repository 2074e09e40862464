"""The link between the master and one worker: its two connections, from dialling to the reason of their end. Runs on
the master.

*Control* leads to the daemon, which always answers. *Data* leads to the executor, which runs the methods. When data
ends, control reports the reason. When control ends or falls silent, both end.

While user code blocks the event loop, ``Pulse`` sends the heartbeats, so that the master keeps its lease.
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
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from ddlf.cluster.launch.launcher import Cause, Incarnation, Launcher, Left
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
    VersionError,
    WorkerLost,
)
from ddlf.events import (
    CardRead,
    Event,
    ExecutorEnded,
    Stream,
    WorkerConnected,
    WorkerDisconnected,
    WorkerLogged,
    WorkerNotReached,
    WorkerWrote,
)
from ddlf.rpc.code import CodeSender, load_result
from ddlf.rpc.connection import Channel, Connection, Deadline, title_of
from ddlf.rpc.dial import dial
from ddlf.rpc.handshake import Role
from ddlf.rpc.heartbeats import ControlChannel, Liveness, Timing, end_when_silent
from ddlf.rpc.messages import CONTROL_LIMITS, Frame, Kind, Limits, Request, loads, refuse_loading
from ddlf.rpc.tls import Security
from ddlf.worker.events import (
    KINDS,
    CardsRead,
    DaemonEvent,
    ExecutorExited,
    LeaseLost,
    Leaving,
    Logged,
    StoppedBy,
    Wanted,
    Wrote,
)
from ddlf.worker.status import ExecutorInfo, WorkerStatus


class Identity:
    """The proof of identity that one master shows to one worker.

    Args:
        guest: Use the worker without a lease.
        takeover: Take the lease from another master that has it.

    Attributes:
        epoch: Epoch of the lease; 0 without a lease.
    """

    def __init__(self, *, guest: bool, takeover: bool) -> None:
        self.guest = guest
        self.takeover = takeover
        self.renew()

    def renew(self) -> None:
        """Reset the identity to that of a new master, without a lease."""
        self.master_id = secrets.token_bytes(16)
        self.epoch = 0

    def claim_request(self, first_id: int, timing: Timing) -> Request:
        """Return the request to the daemon that claims the worker's lease for this master.

        ``first_id`` says which requests belong to this master. When the master disappears, for whatever reason, the
        daemon ends the calls of these requests.
        """
        claim = Request("claim", first_id)
        if not self.guest:
            claim.kwargs = dict(
                session=self.master_id,
                epoch=self.epoch,
                # Only once: a master that was replaced does not take the lease back.
                takeover=self.takeover and self.epoch == 0,
                who=master_name(),
                job=program_name(),
                heartbeat_s=timing.heartbeat_s,
                dead_after_s=timing.dead_after_s,
            )
        return claim

    @property
    def key(self) -> dict[str, Any]:
        """Return the keyword arguments that prove the lease to an executor."""
        return {"guest": True} if self.guest else {"lease": self.master_id + self.epoch.to_bytes(8, "little")}


def master_name() -> str:
    """Return the name of this process for people on other machines: user, machine and process id."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the container has no name for its user
        user = str(os.getuid())
    return f"{user}@{platform.node()} pid {os.getpid()}"


def program_name() -> str:
    """Return the name of the app's file or of the script, from the command line."""
    words = [word for word in sys.argv[:3] if word.endswith(".py")] or sys.argv[:1]
    return Path(words[-1]).name[:60] if words else ""


class DataChannel(Channel):
    """The data connection to an executor, which runs user code and may crash.

    Attributes:
        pid: Process id of the executor, once it has answered.
        crash_before: The last known crash at the time when the master connected to the executor.
    """

    pid: int | None = None
    crash_before: ExecutorCrashed | None = None

    def is_explained_by(self, crash: ExecutorCrashed | None) -> bool:
        """Return whether a crash that the daemon has reported explains the end of this channel, because it is the crash
        of its executor.

        The daemon may report the crash of the previous executor after the master has reached this one.
        """
        if crash is None or crash is self.crash_before:
            return False
        return self.pid is None or crash.pid in (None, self.pid)


log = logging.getLogger(__name__)
T = TypeVar("T")

OFFERS = 3
"""Offered connections of a worker that has joined, tried one after another."""
NEWS_S = 2.0
"""Seconds that the master waits, after a data connection ended, for the daemon's report about the executor."""


async def unknown_end() -> None:
    """Return None, because this process did not start the worker's process."""


class LinkStatus(Enum):
    """Whether a link is open, and if not, why: each has the message and the hint for a call that cannot be sent.

    NEW or LOST becomes OPEN when the daemon has accepted the master. OPEN becomes LOST when control ends. ``close``
    turns any state into CLOSED. The next ``connect`` turns CLOSED into NEW, and is the connect of a new master.
    """

    NEW = ("not connected yet", "connect first: await cluster.connect(), or async with cluster")
    OPEN = ("", "")
    LOST = ("the connection was lost", "connect again")
    CLOSED = ("the connection was closed on this side", "connect again")


@dataclass(slots=True)
class SessionSettings:
    """Settings that an executor receives at the beginning of each session with a master.

    Args:
        id: Number of the worker in its cluster, from 1.
        N: Number of workers in the cluster.
        threads: Threads for computation; None takes the worker's share of its machine's cores.
        share: Number of workers on that machine.
        pickle_results: Whether the executor may send results that are not plain data.
        deterministic: Whether equal runs must give equal bits; None leaves it as it is, for workers of earlier
            releases.
    """

    id: int
    N: int
    threads: int | None
    share: int
    pickle_results: bool
    deterministic: bool | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the settings as keyword arguments of the request ``connect``."""
        arguments = asdict(self)
        if self.deterministic is None:
            del arguments["deterministic"]
        return arguments


@dataclass(frozen=True, slots=True)
class Notice:
    """The notice of a worker that it will end soon.

    Args:
        reason: The reason, such as a signal.
        until: The time when it ends, by the event loop's clock.
    """

    reason: str
    until: float


class LinkState:
    """The state of the link to one worker, and the known reasons why it is not open.

    Args:
        find_end: Returns how the worker's process ended, as its launcher knows it. None means that it runs, or that the
            launcher does not know.
        last_lines: The last lines that the worker has written.
        when_lost: What to do about a lost worker.

    Attributes:
        status: Whether the link is new, open, lost or closed.
        crash: How the last crashed executor ended.
        changed: Set when a new fact about the link is known.
        lease: The error for a worker that another master has taken over; None otherwise.
        notice: The worker's notice that it will end soon; None without one.
        loss: How the connection was lost, with the reason of the launcher; None if it is open, or without a reason.
    """

    def __init__(
        self,
        find_end: Callable[[], Awaitable[Left | None]],
        last_lines: Iterable[str] = (),
        when_lost: str = Launcher.when_lost,
    ) -> None:
        self.status = LinkStatus.NEW
        self.crash: ExecutorCrashed | None = None
        self.lease: LeaseError | None = None
        self.notice: Notice | None = None
        self.loss: WorkerLost | None = None
        self._stopped: StoppedBy | None = None
        self._find_end = find_end
        self._last_lines = last_lines
        self._when_lost = when_lost
        self.changed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether the master has closed the link and not reopened it."""
        return self.status is LinkStatus.CLOSED

    @property
    def in_use(self) -> bool:
        """Whether the master has connected and not closed since, even if the connection was lost."""
        return self.status in (LinkStatus.OPEN, LinkStatus.LOST)

    def open(self) -> None:
        """Record that the daemon has accepted the master, which makes earlier reports irrelevant."""
        self.status, self.lease, self.notice, self.loss = LinkStatus.OPEN, None, None, None
        self._stopped = None

    def note_end(self) -> None:
        """Record that the connection to the daemon has ended."""
        self.status = LinkStatus.CLOSED if self.is_closed else LinkStatus.LOST
        self.changed.set()

    def close(self) -> None:
        """Record that the master ends the link."""
        self.status, self.lease = LinkStatus.CLOSED, None

    def reopen(self) -> None:
        """Set a closed link back to the state before its first connection."""
        self.status = LinkStatus.NEW if self.is_closed else self.status

    def check_not_closed(self, worker: str) -> None:
        """Raise ``WorkerLost`` if the master has closed the link."""
        if self.is_closed:
            raise self.closed_here(worker, may_have_run=False)

    def closed_here(self, worker: str, **facts: Any) -> WorkerLost:
        """Return the error for requests that the master itself has ended."""
        return WorkerLost(LinkStatus.CLOSED.value[0], worker=worker, **facts)

    def refusal(self, worker: str) -> RequestFailed:
        """Return the error for a request while there is no connection."""
        if self.lease is not None:
            return LeaseError(self.lease.message, hint=self.lease.hint, worker=worker)
        if self.status is LinkStatus.LOST and self.loss is not None:
            loss = copy.copy(self.loss)
            loss.may_have_run = False
            return loss
        text, hint = self.status.value
        if self.status is LinkStatus.LOST:
            hint = f"{hint}; {self._when_lost}"
        return WorkerLost(text, worker=worker, hint=hint, may_have_run=False)

    def on_executor_exited(self, end: ExecutorExited, worker: str, first_id: int) -> None:
        """Record how an executor ended, because it may be the reason why requests fail.

        Args:
            end: The event of the daemon.
            worker: The worker's name in error messages.
            first_id: The lowest number of this master's requests.
        """
        method = f" while it ran {end.method!r}" if end.method and not end.gave_up else ""
        self.crash = ExecutorCrashed(
            f"the executor {end.text}{method}",
            worker=worker,
            hint=end.hint,
            exit_code_of_process=end.exit_code,
            signal=end.signal,
            stderr_tail=end.stderr_tail,
            pid=end.pid,
            gave_up=end.gave_up,
            # If it ran another master's request, or none, the crash says nothing about this master's requests.
            begun=max(end.begun, end.beside) if end.begun >= first_id else 2**64,
        )
        self.changed.set()
        if end.gave_up:
            log.warning("%s; the state that methods kept in it is lost", self.crash)

    def on_stopped(self, event: StoppedBy) -> None:
        """Record that the worker ends, which may be the reason why requests fail."""
        self._stopped = event

    def on_lease_lost(self, event: LeaseLost, worker: str, epoch: int) -> LeaseError:
        """Record that another master has the worker. Return the error for this master's requests.

        Args:
            event: The event of the daemon.
            worker: The worker's name in error messages.
            epoch: Epoch of this master's lease.
        """
        self.lease = LeaseError(
            f"was taken over by {event.by} at {event.since}, epoch {event.epoch} > {epoch}",
            hint="end this run, or close the cluster and connect again",
            worker=worker,
            may_have_run=True,
        )
        return self.lease

    async def executor_crash(self, data: DataChannel, reason: BaseException | None) -> ExecutorCrashed | None:
        """Wait until the daemon reports how the executor of a data connection ended, and return this error.

        The result is None if the daemon does not report it in time, or if the master itself ended the connection.
        """
        if not isinstance(reason, ProtocolError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEWS_S):
                    while self.status is LinkStatus.OPEN and not data.is_explained_by(self.crash):
                        self.changed.clear()
                        await self.changed.wait()
        return self.crash if data.is_explained_by(self.crash) else None

    async def reason_of_loss(self, reason: object, worker: str, silent_s: float | None) -> DDLFError:
        """Return the reason why there is no connection to the daemon.

        Args:
            reason: The reason that the master has seen.
            worker: The worker's name in error messages.
            silent_s: Seconds since the worker's last sign of life.
        """
        lost = self.loss_as_seen(reason, worker, silent_s)
        if isinstance(lost, WorkerLost) and not self.is_closed:
            await self._add_end_of_process(lost)
        return lost

    async def _add_end_of_process(self, lost: WorkerLost) -> None:
        """Add how the worker's process has ended to an error, if its launcher knows it."""
        end = await self._find_end()
        if end is not None:
            code = end.exit_code
            lost.signal = signal.Signals(-code).name if code is not None and code < 0 else None
            lost.cause = end.cause
            if (
                self._stopped is not None and self._stopped.lost_card
            ):  # the worker has said more than its exit code does
                lost.cause = Cause.CARD
                return
            if end.words or code is not None:
                lost.message = end.words or (
                    f"its process was ended by {lost.signal}"
                    if lost.signal
                    else f"its process ended with exit code {code}"
                )
            lost.hint = "connect again: that starts a new one"
            if end.cause in (Cause.CRASH, Cause.MEMORY):
                lost.output_tail = "\n".join(self._last_lines)

    def loss_as_seen(self, reason: object, worker: str, silent_s: float | None) -> LeaseError | WorkerLost:
        """Return the reason why there is no connection to the daemon, like ``reason_of_loss``, but without the exit code
        of the worker's process.
        """
        if self.lease is not None:
            return self.lease
        lost = WorkerLost(
            f"the connection was lost ({reason or 'the other side closed it'})",
            worker=worker,
            hint=self._when_lost,
            last_seen_s=silent_s,
        )
        if self.notice is not None:
            lost.message, lost.hint = f"was stopped by {self.notice.reason}", "start it there again"
            lost.cause = Cause.NOTICE
        if self._stopped is not None:
            lost.message, lost.hint = f"was stopped by {self._stopped.by}", self._stopped.hint
            if self._stopped.lost_card:
                lost.message, lost.cause = f"has ended, because {self._stopped.lost_card}", Cause.CARD
        return lost


def start_failure(end: ExecutorExited, worker: str) -> ExecutorCrashed:
    """Return the error for a worker that has given up starting its executor, from the end of the last one."""
    return ExecutorCrashed(
        f"it cannot start its executor, the last one {end.text}",
        worker=worker,
        hint="remove the cause, then run: ddlf stop --restart",
        exit_code_of_process=end.exit_code,
        signal=end.signal,
        stderr_tail=end.stderr_tail,
    )


STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}
"""Streams by their file descriptor, which names them on the wire."""
LAST_LINES = 20
"""Number of a worker's last lines in the error about its end."""


class WorkerEvents:
    """Emits events about one worker, while it is connected.

    Args:
        emit: Receives the events.
        session: Has the worker's number, which may change.
        configured_name: Name in cluster.yaml; empty without one.
        incarnation: Returns the worker's present incarnation, as its launcher knows it.

    Attributes:
        last_lines: The last lines that the present incarnation has written.
    """

    def __init__(
        self,
        emit: Callable[[Event], None],
        session: SessionSettings,
        configured_name: str,
        incarnation: Callable[[], Incarnation] = Incarnation,
    ) -> None:
        self._emit = emit
        self._session = session
        self._configured_name = configured_name
        self._incarnation = incarnation
        self._present = Incarnation()
        self._count = 0  # of incarnations
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._is_connected = False
        self._was_connected = False

    @property
    def name(self) -> str:
        """The worker's name for people."""
        return self._configured_name or f"worker {self._session.id}"

    def _worker_facts(self) -> dict[str, Any]:
        return {"worker": self._session.id, "name": self.name}

    def connected(self, address: str, executor: ExecutorInfo) -> None:
        """Emit the event that the worker is connected, with its executor. Only the first of several calls counts."""
        if self._is_connected:
            return
        former, self._present = self._present, self._incarnation()
        if self._present.number != former.number:
            self._count += 1
            self.last_lines.clear()
        self._emit(
            WorkerConnected(
                **self._worker_facts(),
                address=address,
                host=executor.host,
                python=executor.python,
                cores=executor.cores,
                threads=executor.threads,
                again=self._was_connected,
                engine=self._present.engine,
                incarnation=self._count,
                gpus=tuple(executor.gpus),
            )
        )
        self._is_connected = self._was_connected = True

    def disconnected(self, reason: str, cause: str = "") -> None:
        """Emit the event that the connection to the worker's daemon has ended."""
        if self._is_connected:
            self._is_connected = False
            self._emit(WorkerDisconnected(**self._worker_facts(), why=reason, cause=cause))

    def connect_failed(self, tries: int, error: BaseException | None) -> None:
        """Emit the event that an attempt to reconnect to the worker has failed."""
        self._emit(WorkerNotReached(**self._worker_facts(), tries=tries, why=getattr(error, "message", str(error))))

    def executor_ended(self, reason: str) -> None:
        """Emit the event that the worker's executor has ended, with the daemon's reason."""
        if self._is_connected:
            self._emit(ExecutorEnded(**self._worker_facts(), why=reason))

    def wrote(self, event: Wrote) -> None:
        """Emit events with the lines that user code on the worker wrote to both streams, in their order, as the daemon
        sent them.
        """
        dropped = event.dropped
        self.last_lines.extend(event.texts[-LAST_LINES:])
        for stream, lines in groupby(zip(event.streams, event.texts, strict=True), itemgetter(0)):
            texts = tuple(text for _, text in lines)
            self._emit(WorkerWrote(**self._worker_facts(), stream=STREAMS[stream], lines=texts, dropped=dropped))
            dropped = 0
        if dropped:
            self._emit(WorkerWrote(**self._worker_facts(), stream="stdout", lines=(), dropped=dropped))

    def read_cards(self, event: CardsRead) -> None:
        """Emit an event for each card of the worker, with what the daemon has read."""
        for reading in event.cards:
            self._emit(
                CardRead(
                    **self._worker_facts(),
                    card=f"{reading.number} ({reading.name})",
                    memory=reading.memory,
                    total=reading.total,
                    utilisation=reading.utilisation,
                    watts=reading.watts,
                    celsius=reading.celsius,
                )
            )

    def logged(self, event: Logged) -> None:
        """Emit the event with the lines that native code and the daemon of the worker wrote."""
        self.last_lines.extend(event.lines)
        self._emit(WorkerLogged(**self._worker_facts(), lines=tuple(event.lines), left_out=event.left_out))


CONNECT_TIMEOUT_S = 10.0
"""Seconds to open a data connection again for a request."""
BUSY_RETRY_S = 0.1
"""Seconds until the next try, if the executor still runs a call of an earlier master."""
KEEP_OPEN_S = 20.0
"""Seconds between two frames without effect on a data connection. NATs and proxies forget connections that are idle for
a minute or more, and a slot may compute for longer.
"""


async def _keep_open(stream: Connection) -> None:
    while True:
        await asyncio.sleep(KEEP_OPEN_S)
        if stream.closed:
            return
        with contextlib.suppress(ConnectionError):
            stream.send(Kind.CANCEL, 0, "", [])  # no request has this number


@dataclass(eq=False, repr=False)
class Link:
    """The connections of one master to one worker, which it opens, watches and reopens. ``ProxyWorker`` describes the
    arguments that are missing here.

    Args:
        session: Settings that an executor receives. The next ``connect`` sends them again if they have changed.
        identity: How the master identifies itself to the worker.

    Attributes:
        link_state: Whether the link is open, and if not, why.
        control: The connection to the daemon; None without one.
        data: The connection to the executor; None without one.
        executor: The executor, as it has described itself; an unknown one before the first session.
        liveness: When the worker last gave a sign of life, also after the connection has ended; None before the first.
        worker_events: Emits events about the worker.
        on_leaving: Called when the worker announces its end; None releases it when it has no requests.
    """

    host: str
    port: int
    token: bytes
    session: SessionSettings
    max_message_bytes: int
    security: Security
    timing: Timing
    identity: Identity
    configured_name: str
    incarnation: Callable[[], Incarnation]
    when_lost: str
    options: Sequence[str]
    find_end: Callable[[], Awaitable[Left | None]]
    revive: Callable[[], Awaitable[tuple[str, int]]] | None
    take_offer: Callable[[float], Awaitable[socket.socket]] | None
    replay: Callable[[int], list[Request]]
    emit: Callable[[Event], None]

    def __post_init__(self) -> None:
        self.worker_events = WorkerEvents(self.emit, self.session, self.configured_name, self.incarnation)
        self.link_state = LinkState(self.find_end, self.worker_events.last_lines, self.when_lost)
        self.control: ControlChannel | None = None
        self.data: DataChannel | None = None
        self.executor = ExecutorInfo()
        self._first_id = 1
        self._ids = itertools.count(1)
        self.liveness: Liveness | None = None  # kept after its connection has ended
        self._connecting = asyncio.Lock()
        self._opening: asyncio.Task[DataChannel] | None = None
        self._explaining: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._bytes_before = (0, 0)
        self._sent_session: SessionSettings | None = None  # the session settings that the executor has received last
        self._replayed_to = ""  # the executor that has received the requests of ``replay``
        self._sources = Sources()
        self.on_leaving: Callable[[], None] | None = None
        self._given_up: DDLFError | None = None  # the reason why the master has ended the connections

    @property
    def name(self) -> str:
        """The worker's name in error messages."""
        return f"worker {self.session.id} ({self.label})"

    @property
    def label(self) -> str:
        """The worker's name in cluster.yaml, else its address."""
        return self.configured_name or self.address

    @property
    def address(self) -> str:
        """Where the worker is: host and port, or its place if it joins by itself."""
        return f"{self.host}:{self.port}" if self.port else self.host

    @property
    def nickname(self) -> str:
        """The worker's name in cluster.yaml, else ``"worker 2"``."""
        return self.worker_events.name

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
        """Open the connections to the daemon and to the executor, unless they are open."""
        async with self._connecting:
            await self._open_control(timeout_s)
            await self._open_data(timeout_s)

    async def connect_control(self, timeout_s: float) -> None:
        """Open the control connection, which leads to the daemon, unless it is open."""
        if self.control is None:
            async with self._connecting:
                await self._open_control(timeout_s)

    async def _open_control(self, timeout_s: float) -> None:
        if self.control is not None:
            return
        await self._wait_for_explanation(timeout_s)
        self.link_state.reopen()
        if self.revive is not None:
            self.host, self.port = await self.revive()
        sock, hello = await self._dial(Role.CONTROL, timeout_s)
        end_when_silent(sock, self.timing.dead_after_s)
        # Use new request numbers each time, because the daemon may still be ending requests with the old ones.
        self._first_id = secrets.randbits(48) + 1
        self._ids = itertools.count(self._first_id)
        peer_limits = Limits(max_body_bytes=hello.max_message_bytes)
        control = ControlChannel(
            self, partial(Connection, sock, limits=CONTROL_LIMITS, peer_limits=peer_limits), self._ids, self.timing
        )
        try:
            await self._claim_worker(control, timeout_s)
            self.link_state.check_not_closed(self.name)  # the caller may have closed it meanwhile
        except BaseException:
            control.stream.close()
            raise
        self.link_state.open()
        self._given_up = None
        if control.stream.closed:
            self.link_state.note_end()
            return
        self.control, self.liveness = control, control.liveness
        pulse = (
            None
            if self.identity.guest
            else Pulse(self._dial_for_pulse, self.identity.master_id, self.timing.heartbeat_s)
        )
        control.begin_heartbeats(pulse, partial(self.drop, abort=True))

    async def _claim_worker(self, control: ControlChannel, timeout_s: float) -> None:
        try:
            granted = await control.call(self.identity.claim_request(self._first_id, self.timing), Deadline(timeout_s))
            self.identity.epoch = granted["epoch"]
        except LeaseError as error:
            if f"leased by {master_name()} " in error.message:
                error.hint = "this process already has it: close its other cluster, or list the worker only once"
            raise

    async def ask(self, command: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Send a request to the daemon and return its answer."""
        if self.control is None:
            await self._wait_for_explanation(timeout_s)
        return await self._open_to_ask().call(Request(command, *args, **kwargs), Deadline(timeout_s))

    async def status(self, timeout_s: float | None = None) -> WorkerStatus:
        """Return the state of the worker."""
        return self.answered(WorkerStatus, await self.ask("status", timeout_s=timeout_s))

    def answered(self, kind: type[T], answer: object) -> T:
        """Return an answer of the worker, which must be of a kind.

        Raises:
            VersionError: It is of another kind, as that of another release.
        """
        if isinstance(answer, kind):
            return answer
        raise VersionError(
            f"answers with a {type(answer).__name__} in place of a {kind.__name__}",
            worker=self.name,
            hint="install the same version of DDLF on all machines",
        )

    def _open_to_ask(self) -> ControlChannel:
        if self.control is not None:
            return self.control
        raise self.link_state.refusal(self.name)

    async def _dial(self, role: Role, timeout_s: float) -> Any:
        deadline, offers_taken = Deadline(timeout_s), 0

        async def take(timeout_s: float) -> socket.socket:
            nonlocal offers_taken
            assert self.take_offer is not None
            sock = await self.take_offer(timeout_s)
            offers_taken += 1
            return sock

        while True:
            taken_before = offers_taken
            try:
                return await dial(
                    self.host,
                    self.port,
                    role,
                    self.token,
                    max_message_bytes=self.max_message_bytes,
                    timeout_s=deadline.allows(timeout_s),
                    security=self.security,
                    take_offer=None if self.take_offer is None else take,
                    options=self.options,
                )
            except DDLFError as error:
                error.worker = error.worker or f"worker {self.session.id}"
                # A network may have forgotten the connection that a joined worker has offered. It offers another one.
                if not (isinstance(error, ConnectError) and taken_before < offers_taken < OFFERS and deadline.left_s()):
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
        if self.control is None:
            await self._wait_for_explanation(deadline.left_s())
        self._open_to_ask()
        if self._opening is None or self._opening.done():
            self._opening = self.spawn(self.open_data())
            # Retrieve the exception, because possibly no request waits any more.
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        opening = self._opening
        await asyncio.wait([opening], timeout=deadline.left_s())
        if not opening.done():
            text = f"{title_of(request)!r} could not be sent within {deadline.timeout_s:g} s"
            raise RequestTimeout(text, worker=self.name, may_have_run=False)
        if opening.cancelled():
            raise self.link_state.closed_here(self.name, may_have_run=False)
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
            if self._sent_session != self.session:  # the number of workers has changed, for example
                await self._begin_session(self.data, timeout_s)
            return self.data
        self._open_to_ask()
        crash_before = self.link_state.crash
        sock, hello = await self._dial_executor(timeout_s)
        from ddlf.rpc.buffers import POOL  # imports NumPy, which would delay a cluster's first steps

        limits, peer_limits = (
            Limits(max_body_bytes=self.max_message_bytes),
            Limits(max_body_bytes=hello.max_message_bytes),
        )
        self.data = data = DataChannel(
            self,
            partial(Connection, sock, limits=limits, peer_limits=peer_limits, allocate=POOL.take),
            self._ids,
            load_result if self.session.pickle_results else refuse_loading,
            code=CodeSender(),
        )
        data.crash_before = crash_before
        try:
            await self._begin_session(data, timeout_s)
            if self.executor.name != self._replayed_to:
                self._check_python()
                for request in self.replay(self.session.id):
                    await data.call(request)
                self._replayed_to = self.executor.name
        except BaseException:
            data.stream.close()  # Otherwise the next request would use an executor with an incomplete session.
            raise
        self.worker_events.connected(self.address, self.executor)
        self.spawn(_keep_open(data.stream))
        return data

    def _check_python(self) -> None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        if self.executor.python.rsplit(".", 1)[0] != version:
            self.close()
            raise VersionError(
                f"runs Python {self.executor.python}, the master {sys.version.split()[0]}",
                worker=self.name,
                hint=f"code can only be sent between equal minor versions: install {version} on the worker",
            )

    async def _begin_session(self, data: DataChannel, timeout_s: float) -> None:
        session = copy.copy(self.session)
        # A guest does not answer questions about modules.
        request = Request("connect", **self.identity.key, **session.arguments(), modules=not self.identity.guest)
        try:
            self.executor = self.answered(ExecutorInfo, await data.call(request, Deadline(timeout_s)))
        except LeaseError:
            # A restarted daemon knows no leases. If so, this request fails with that reason.
            if not self.identity.guest:
                await self.ask("ping", timeout_s=timeout_s)
            raise
        data.pid = self.executor.pid
        self._sent_session = session

    async def _dial_executor(self, timeout_s: float) -> Any:
        deadline = Deadline(timeout_s)
        while True:
            crash_before = self.link_state.crash
            try:
                return await self._dial(Role.DATA, timeout_s)
            except ConnectError:
                status = await self.status(timeout_s)
                if status.executor == "failed" and status.last_exit is not None:
                    raise start_failure(status.last_exit, self.name) from None
                busy, is_over = status.busy, deadline.left_s() == 0
                if busy and not self.identity.guest and not is_over:
                    # An earlier master's call is still running. The daemon ends it some seconds after that master was
                    # lost.
                    await asyncio.sleep(BUSY_RETRY_S)
                    continue
                if busy:
                    raise ConnectError(
                        f"{self.name} is busy with {busy.method!r} since {busy.seconds:.0f} s",
                        hint="wait, or end it with: ddlf stop --restart",
                    ) from None
                if is_over or (status.executor == "ready" and self.link_state.crash is crash_before):
                    raise
                # The executor ended during the dial, or the next one takes long to start.

    async def replace_executor(self, modules: list[str]) -> None:
        """Replace the executor by one that has imported these modules already, if it has no data to lose and no request
        is pending.
        """
        async with self._connecting:
            if self.data is not None:
                if self.data.pending:
                    return
                self.data.stream.close()
            await self.ask("preload", modules, replace=True)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End both connections. The next ``connect`` begins as a new master."""
        self.link_state.close()
        for task in list(self._background):
            task.cancel()
        self.drop(self.link_state.closed_here(self.name))
        self.worker_events.disconnected("")  # if it was lost a moment ago
        self.identity.renew()

    def drop(self, reason: DDLFError, *, abort: bool = False) -> None:
        """End both connections, and end all open requests with this error."""
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
        """Record the end of one of the two connections. The data connection ends with the control connection, because
        without the latter the master has no lease.
        """
        if channel is self.data:
            self._bytes_before, self.data = self.bytes_carried, None
        elif channel is self.control:
            self.control = None
            self.link_state.note_end()
            if self.link_state.is_closed or self._given_up is not None:
                lost = self._given_up or self.link_state.loss_as_seen(channel.reason, self.name, self.silent_s)
                self.worker_events.disconnected("" if self.link_state.is_closed else lost.message)
            else:
                self._explaining = self.spawn(self._explain_loss(channel.reason))
            if self.data is not None:
                self.data.stream.close()

    async def _wait_for_explanation(self, timeout_s: float | None) -> None:
        """Wait until the reason of a loss is known, so that its event comes before that of the next connection."""
        if self._explaining is not None:
            await asyncio.wait([self._explaining], timeout=timeout_s)

    async def _explain_loss(self, reason: BaseException | None) -> None:
        """Ask the launcher how the worker ended, for the event and for requests that come later."""
        lost = await self.link_state.reason_of_loss(reason, self.name, self.silent_s)
        if self.link_state.status is LinkStatus.LOST and isinstance(lost, WorkerLost) and lost.cause is not None:
            self.link_state.loss = lost
        cause = lost.cause if isinstance(lost, WorkerLost) else None
        if self.link_state.is_closed:
            self.worker_events.disconnected("")
        else:
            self.worker_events.disconnected(lost.message, str(cause or ""))

    async def error_of(self, channel: Channel, reason: BaseException | None) -> DDLFError:
        """Return the error for the requests of a channel that has ended."""
        crash = await self.link_state.executor_crash(channel, reason) if isinstance(channel, DataChannel) else None
        return crash or await self.link_state.reason_of_loss(reason, self.name, self.silent_s)

    def on_cancel(self, channel: Channel, id: int) -> None:
        """Ask the daemon to interrupt a request that its caller has cancelled.

        A method that awaits is already cancelled; the daemon interrupts a method that blocks.
        """
        if channel is self.data and self.control is not None:
            self.spawn(self._interrupt(id))

    async def _release_when_idle(self) -> None:
        """Let a worker that is leaving end as soon as it has no request of this master, or as soon as a run takes over."""
        while self.data is not None and self.data.pending:
            await asyncio.wait(list(self.data.pending.values()), return_when=asyncio.FIRST_COMPLETED)
        if self.on_leaving is None:
            with contextlib.suppress(DDLFError, OSError):
                await self.ask("release")

    async def _interrupt(self, id: int) -> None:
        with contextlib.suppress(DDLFError, OSError):
            await self.ask("cancel", id)

    def on_event(self, frame: Frame) -> None:
        """Handle an event of the daemon. Ignore events of newer daemons.

        Raises:
            ProtocolError: It is not an event of its name.
        """
        kind = KINDS.get(frame.name)
        if kind is None:
            return
        try:
            event = loads(frame.buffers)
            if type(event) is not kind:
                raise TypeError(f"it is a {type(event).__name__}, not a {kind.__name__}")
            self._handle(event)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ProtocolError(f"event {frame.name[:40]!r} cannot be read ({type(error).__name__}: {error})") from None

    def _handle(self, event: DaemonEvent) -> None:
        match event:
            case Wanted():
                self.spawn(self._sources.give(self.ask, self.name, event.id, event.kind, event.name, event.file))
            case Wrote():
                self.worker_events.wrote(event)
            case CardsRead():
                self.worker_events.read_cards(event)
            case Logged():
                self.worker_events.logged(event)
            case Leaving():
                self._on_leaving(event)
            case ExecutorExited():
                self.link_state.on_executor_exited(event, self.name, self._first_id)
                if self.link_state.crash is not None:
                    self.worker_events.executor_ended(self.link_state.crash.message)
            case StoppedBy():
                self.link_state.on_stopped(event)
            case LeaseLost():
                self.drop(self.link_state.on_lease_lost(event, self.name, self.identity.epoch))

    def _on_leaving(self, event: Leaving) -> None:
        """Record that the worker will end soon, and let its work go to other workers."""
        until = asyncio.get_running_loop().time() + event.within_s
        self.link_state.notice = Notice(event.by, until)
        if self.on_leaving is not None:
            self.on_leaving()
        else:
            self.spawn(self._release_when_idle())
