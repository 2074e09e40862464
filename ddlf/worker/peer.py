"""Another worker of the run as this worker calls it: its addresses, the connection, and the check of its identity.

Runs in the executor, on its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

from ddlf.errors import (
    AppMissing,
    AuthError,
    ConnectError,
    DDLFError,
    LeaseError,
    NotPicklable,
    ProtocolError,
    RequestTimeout,
    WorkerLost,
)
from ddlf.rpc.buffers import POOL
from ddlf.rpc.channel import Channel
from ddlf.rpc.connection import Connection
from ddlf.rpc.deadline import Deadline
from ddlf.rpc.dial import dial
from ddlf.rpc.frame import CONTROL_LIMITS, MAX_BODY_BYTES, Frame, Limits
from ddlf.rpc.handshake import Role
from ddlf.rpc.heartbeats import ControlChannel
from ddlf.rpc.liveness import Timing
from ddlf.rpc.messages import Request
from ddlf.rpc.silence import end_when_silent
from ddlf.rpc.tls import TOKEN_ONLY, Security
from ddlf.rpc.values import refuse_loading

ADDRESS_S = 3.0
"""Seconds to wait for one address before trying the next."""
GREET_S = 10.0
"""Seconds to wait for a connected worker to identify itself. Its event loop may be busy."""
SILENT_S = 30.0
"""The kernel ends a connection after this many seconds without any acknowledgement. A busy worker that does not read
also counts as silent, so this is longer than any event loop is blocked. Heartbeats notice a lost link long before.
"""


def refuse_between_workers(value: Any) -> NoReturn:
    """Refuse an object. This is the ``dump_object`` between workers: they exchange only data."""
    raise NotPicklable(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot go from worker to worker, only data can",
        hint="send numbers, text, lists, dicts or arrays",
    )


@dataclass(frozen=True, slots=True)
class Dialling:
    """How this worker connects to other workers.

    Args:
        tokens: The accepted tokens. The first one proves this side's identity. During a replacement of tokens, other
            workers may still have only the second one.
        max_message_bytes: The largest answer accepted.
        security: Certificates, and whether to encrypt connections to other machines.
    """

    tokens: tuple[bytes, ...] = field(repr=False)
    max_message_bytes: int = MAX_BODY_BYTES
    security: Security = TOKEN_ONLY

    async def __call__(self, host: str, port: int, role: Role = Role.DATA) -> Any:
        """Return a socket, and the other side's hello. It raises the errors of ``dial``."""
        for token in self.tokens:
            try:
                return await dial(
                    host,
                    port,
                    role,
                    token,
                    max_message_bytes=self.max_message_bytes,
                    timeout_s=ADDRESS_S,
                    security=self.security,
                )
            except AuthError:
                if token is self.tokens[-1]:
                    raise
        raise AssertionError("a worker has a token")


class Caller(Protocol):
    """The calling worker: how it identifies itself, and how it connects."""

    run: str
    me: int
    executor: str
    numbers: Iterator[int]
    dialling: Dialling
    lost: Callable[[int, str], object]


class Peer:
    """Another worker of the run, as this worker calls it. The first call connects, and so does the first call after a
    lost connection.

    Args:
        caller: This worker.
        id: Number of the other worker in the cluster.
        name: Its name in errors.
        addresses: Tuples of host, port, and whether the user set that address for this purpose.
        shows: The pass that lets this side in.
        dead_after_s: Seconds of silence before the link counts as lost.
    """

    def __init__(
        self, caller: Caller, id: int, name: str, addresses: list[Any], shows: bytes, dead_after_s: float
    ) -> None:
        self.id = id
        self.name = name
        self.shows = shows
        self._caller = caller
        self.found_at(addresses)
        self._timing = Timing.of(dead_after_s=dead_after_s)
        self._control: ControlChannel | None = None
        self._listening: asyncio.Task[Any] | None = None
        self._silence: WorkerLost | None = None
        self._channel: Channel | None = None
        self._reaching = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._bytes_before = (0, 0)
        self._is_over = False

    def found_at(self, addresses: list[Any]) -> None:
        """Set the addresses of the other worker for later connections, in the constructor's form."""
        self._addresses = [(str(host), int(port), bool(given)) for host, port, given in addresses]

    async def call(self, role: tuple[str, str], verb: str, /, *args: Any, **data: Any) -> Any:
        """Call a verb of a role on that worker and return its result.

        Args:
            role: Name of the run, and of the role in it.
            verb: Name of one of the role's methods that it offers.
            args: Data for the verb, like ``data``. Arrays are sent from their own memory, so they must not change
                before this returns.

        Raises:
            RemoteError: The verb raised.
            AppMissing: That worker does not host the role, or this worker is no longer in the run.
            ConnectError: It cannot be reached.
            LeaseError: This worker may no longer call it.
            WorkerLost: The connection ended first; ``may_have_run`` says whether the verb can have begun.
            NotPicklable: An argument is not data.
        """
        channel = self._channel or await self.reach()
        return await channel.call(Request("call", *role, verb, *args, **data))

    def refuse_silent(self) -> None:
        """Refuse to use a link that has fallen silent and has not connected again since.

        Raises:
            WorkerLost: The link has fallen silent.
        """
        if self._silence is not None:
            raise self._lost(self._silence.message)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent on all connections that this side has opened to the other worker."""
        return self._bytes_before[0] + (self._channel.stream.bytes_sent if self._channel else 0)

    @property
    def bytes_received(self) -> int:
        """Bytes received on all connections that this side has opened to the other worker."""
        return self._bytes_before[1] + (self._channel.stream.bytes_received if self._channel else 0)

    async def reach(self) -> Channel:
        """Connect unless already connected. Use the first address where the other worker itself answers.

        Raises:
            ConnectError: It answers at no address, or an address that the user set for it leads to another worker. The
                text has each address with the reason.
            LeaseError: It does not let this side in.
            AppMissing: This worker is no longer in the run.
        """
        async with self._reaching:
            if self._channel is not None:
                return self._channel
            found: list[str] = []
            for address in list(self._addresses):
                if self._is_over:
                    raise AppMissing(f"this worker is not in a run with {self.name} any more")
                host, port, given = address
                try:
                    there = await self._greet(host, port)
                except LeaseError:
                    raise
                except DDLFError as error:
                    found.append(error.message)
                    continue
                if isinstance(there, Channel):
                    self._channel, self._silence = there, None
                    self._listening = self.spawn(self._listen(host, port))
                    self._addresses.sort(key=lambda one: one != address)  # next time try this address first
                    return there
                found.append(f"{host}:{port} {there}")
                if given:
                    break
            raise ConnectError("; ".join(found) or "no address of it is known", worker=self.name)

    async def _greet(self, host: str, port: int) -> Channel | str:
        """Return a connection to an address, or a text that says which other process answers there."""
        caller = self._caller
        sock, hello = await caller.dialling(host, port)
        end_when_silent(sock, SILENT_S)
        limits, theirs = (Limits(max_body_bytes=one.max_message_bytes) for one in (caller.dialling, hello))
        open = partial(Connection, sock, limits=limits, peer_limits=theirs, allocate=POOL.take)
        channel = Channel(self, open, caller.numbers, refuse_loading, refuse_between_workers)
        is_good = False
        try:
            greeting = Request("greet", caller.run, self.id, caller.executor, self.shows)
            otherwise = self._judge(await channel.call(greeting, Deadline(GREET_S)))
            is_good = not (otherwise or channel.stream.closed or self._is_over)
            return channel if is_good else otherwise or "has closed the connection"
        except RequestTimeout:
            raise ConnectError(f"{host}:{port} did not say within {GREET_S:g} s who it is") from None
        except ProtocolError as error:
            raise ConnectError(f"{host}:{port} cannot be called by workers ({error.message})") from None
        finally:
            if not is_good:
                channel.stream.close()

    async def _listen(self, host: str, port: int) -> None:
        """Watch the link with heartbeats. The other daemon answers whatever its executor does, so its silence shows a
        lost link.
        """
        try:
            sock, hello = await self._caller.dialling(host, port, Role.CONTROL)
        except DDLFError:
            return  # the kernel reports a lost link, only later
        if self._control is not None:  # it belongs to a call after a connection that was lost meanwhile
            sock.close()
            return
        theirs = Limits(max_body_bytes=hello.max_message_bytes)
        open = partial(Connection, sock, limits=CONTROL_LIMITS, peer_limits=theirs)
        self._control = ControlChannel(self, open, self._caller.numbers, self._timing)
        self._control.begin_heartbeats(None, self._lose)
        if self._is_over or self._channel is None:
            self._control.stream.close()

    def _lose(self, silence: WorkerLost) -> None:
        """Record that the link is silent, report it, and end both connections."""
        self._silence = silence
        self._caller.lost(self.id, silence.message)
        for channel in (self._control, self._channel):
            if channel is not None:
                channel.stream.abort()

    def _judge(self, who: Any) -> str:
        """Return why the process that answered is not the right worker; empty if it is.

        Raises:
            LeaseError: It is the right worker, and does not let this side in.
        """
        try:
            executor, run, id, refusal = who["executor"], who["run"], who["id"], who["refusal"]
        except (LookupError, TypeError):
            raise ProtocolError("who answered did not say who it is") from None
        if executor == self._caller.executor:
            return "leads back to this worker itself"
        if run != self._caller.run:
            return "leads to a worker that is not in this run, or not any more"
        if id != self.id:
            return f"leads to worker {id}"
        if refusal:
            raise LeaseError(str(refusal), worker=self.name)
        return ""

    def close(self) -> None:
        """End the connection. No call follows."""
        self._is_over = True
        if self._channel is not None:
            self._channel.stream.close()
        if self._listening is not None:
            self._listening.cancel()

    # The methods of ``Owner``, for its channel.

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in its own task."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def on_event(self, frame: Frame) -> None:
        """Ignore events, because a worker sends only answers to another worker."""

    def on_cancel(self, channel: Channel, id: int) -> None:
        """Do nothing. An offered verb awaits, so the other side has already received the cancellation."""

    def on_end(self, channel: Channel) -> None:
        """End the other connection too. The data and the control connection need each other."""
        if channel is self._channel:
            self._bytes_before, self._channel = (self.bytes_sent, self.bytes_received), None
            if self._control is not None:
                self._control.stream.close()
        elif channel is self._control:
            self._control = None
            if self._channel is not None:
                self._channel.stream.close()

    async def why(self, channel: Channel, reason: BaseException | None) -> DDLFError:
        """Return the error for the requests that were open when the channel ended."""
        if self._is_over:
            return AppMissing(f"this worker is not in a run with {self.name} any more")
        return self._lost(self._silence.message if self._silence is not None else reason or "the other side closed it")

    def _lost(self, why: object) -> WorkerLost:
        lost = f"the link from worker {self._caller.me} to it was lost ({why})"
        return WorkerLost(lost, worker=self.name, hint="look at the network between the two")
