"""The other workers of a run: which of them this worker may call, and which may call it. Runs in the executor, on its
event loop.

The master of a run introduces its workers to each other (``ddlf.cluster.introduce``). Each worker receives the
addresses of the others, the passes to show to them, and the names of its callers. A worker connects to another one by
the same handshake as a master. If it cannot dial the other one, the daemon there dials this worker, and offers it
connections as it would to a master's gate. The first call on a connection is ``greet``, in which both sides check that
they have reached the right worker. From then on it may call the offered verbs of the run's roles, with data only. This right ends with the lease
under which the master gave it, with the run, and when the master introduces its workers again without that worker.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

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
from ddlf.rpc.connection import Channel, Connection, Deadline
from ddlf.rpc.dial import dial
from ddlf.rpc.handshake import Role, short_answer
from ddlf.rpc.heartbeats import ControlChannel, Timing, end_when_silent
from ddlf.rpc.join import GateVerdict, Offer, receive_offer
from ddlf.rpc.messages import CONTROL_LIMITS, MAX_BODY_BYTES, Frame, Limits, Request, Tag, refuse_loading
from ddlf.rpc.offers import Offers
from ddlf.rpc.stream import send_all
from ddlf.rpc.tls import TOKEN_ONLY, Security
from ddlf.worker.introduction import Address, Callee
from ddlf.worker.lease import offer_number, peer_pass

ADDRESS_S = 3.0
"""Seconds to wait for one address, or for an offered connection, before trying the next."""
GREET_S = 10.0
"""Seconds to wait for a connected worker to identify itself. Its event loop may be busy."""
SILENT_S = 30.0
"""The kernel ends a connection after this many seconds without any acknowledgement. A busy worker that does not read
also counts as silent, so this is longer than any event loop is blocked. Heartbeats notice a lost link long before.
"""


def refuse_between_workers(value: Any) -> NoReturn:
    """Refuse to send an object that is not plain data. This is the ``dump_object`` between workers, which exchange only
    data.
    """
    raise NotPicklable(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent between workers, because only data can",
        hint="send numbers, text, lists, dicts or arrays",
    )


@dataclass(frozen=True, slots=True)
class Dialling:
    """Connects this worker to other workers.

    Args:
        tokens: The accepted tokens. The first one proves this side's identity. During a replacement of tokens, other
            workers may still have only the second one.
        max_message_bytes: Maximum size of an answer.
        security: Certificates, and whether to encrypt connections to other machines.
    """

    tokens: tuple[bytes, ...] = field(repr=False)
    max_message_bytes: int = MAX_BODY_BYTES
    security: Security = TOKEN_ONLY

    async def __call__(
        self,
        host: str,
        port: int,
        role: Role = Role.DATA,
        *,
        take_offer: Callable[[float], Awaitable[socket.socket]] | None = None,
    ) -> Any:
        """Return a socket, and the other side's hello. It raises the errors of ``dial``, and has the same ``take_offer``."""
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
                    take_offer=take_offer,
                )
            except AuthError:
                if token is self.tokens[-1]:
                    raise
        raise AssertionError("a worker has a token")


class Peer:
    """The connection through which this worker calls another worker of the run. The first call connects, and so does
    the first call after a lost connection.

    Args:
        caller: This worker.
        callee: The other worker.
        dead_after_s: Seconds of silence before the link counts as lost.

    Attributes:
        id: Number of the other worker in the cluster.
        name: Its name in errors.
        shows: The pass that this worker shows to be admitted.
        offers: Connections that the other worker has opened, because this one cannot dial it.
    """

    def __init__(self, caller: Peers, callee: Callee, dead_after_s: float) -> None:
        self.id = callee.id
        self.name = callee.name
        self.shows = callee.shows
        self.offers = Offers()
        self._caller = caller
        self.set_addresses(callee.addresses)
        self._timing = Timing.of(dead_after_s=dead_after_s)
        self._control: ControlChannel | None = None
        self._listening: asyncio.Task[Any] | None = None
        self._silence: WorkerLost | None = None
        self._channel: Channel | None = None
        self._reaching = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._bytes_before = (0, 0)
        self._is_over = False

    def set_addresses(self, addresses: list[Address]) -> None:
        """Set the addresses of the other worker for later connections."""
        self._addresses = list(addresses)

    async def call(self, role: tuple[str, str], verb: str, /, *args: Any, **data: Any) -> Any:
        """Call a verb of a role on that worker and return its result.

        Args:
            role: Name of the run, and of the role in it.
            verb: Name of one of the role's methods that it offers.
            args: Data for the verb, like ``data``. Arrays are sent from their own memory, so they must not change
                before this returns.

        Raises:
            RemoteError: The verb raised an error.
            AppMissing: That worker does not host the role, or this worker is no longer in the run.
            ConnectError: That worker cannot be reached.
            LeaseError: This worker may no longer call it.
            WorkerLost: The connection ended first; ``may_have_run`` says whether the verb can have begun.
            NotPicklable: An argument is not data.
        """
        channel = self._channel or await self.reach()
        return await channel.call(Request("call", *role, verb, *args, **data))

    def refuse_silent(self) -> None:
        """Raise an error if the link has fallen silent and has not connected again since.

        Raises:
            WorkerLost: The link has fallen silent.
        """
        if self._silence is not None:
            raise self._lost(self._silence.message)

    @property
    def connected(self) -> bool:
        """Whether this side has a connection to the other worker now."""
        return self._channel is not None

    @property
    def bytes_sent(self) -> int:
        """Bytes sent on all connections that this side has opened to the other worker."""
        return self._bytes_before[0] + (self._channel.stream.bytes_sent if self._channel else 0)

    @property
    def bytes_received(self) -> int:
        """Bytes received on all connections that this side has opened to the other worker."""
        return self._bytes_before[1] + (self._channel.stream.bytes_received if self._channel else 0)

    async def reach(self) -> Channel:
        """Connect unless already connected. Use a connection that the other worker offers, or the first address where
        this worker itself answers.

        Raises:
            ConnectError: The other worker answers at no address, or an address that the user set for it leads to
                another worker. The text has each address with the reason.
            LeaseError: The other worker does not admit this one.
            AppMissing: This worker is no longer in the run.
        """
        async with self._reaching:
            if self._channel is not None:
                return self._channel
            problems: list[str] = []
            offered = [(self.name, 0, False)] if self.offers.incarnation else []
            for address in offered + self._addresses:
                if self._is_over:
                    raise AppMissing(f"this worker is not in a run with {self.name} any more")
                host, port, is_advertised = address
                try:
                    outcome = await self._greet(host, port)
                except LeaseError:
                    raise
                except DDLFError as error:
                    problems.append(error.message)
                    continue
                if isinstance(outcome, Channel):
                    self._channel, self._silence = outcome, None
                    self._listening = self.spawn(self._listen(host, port))
                    self._addresses.sort(key=lambda candidate: candidate != address)  # next time try this address first
                    return outcome
                problems.append(f"{host}:{port} {outcome}" if port else f"a connection that it offered {outcome}")
                if is_advertised:
                    break
            raise ConnectError(
                "; ".join(problems) or "it has no known address; if it joins its master, start it with --port, too",
                worker=self.name,
            )

    async def _take_offered(self, timeout_s: float) -> socket.socket:
        """Return a connection that the other worker has offered.

        Raises:
            ConnectError: It offered none in time.
        """
        try:
            return await self.offers.take(timeout_s)
        except TimeoutError:
            raise ConnectError(f"it has offered no connection within {timeout_s:g} s") from None

    async def _greet(self, host: str, port: int) -> Channel | str:
        """Connect to an address, or by an offered connection if the port is 0. Return the connection if the wanted
        worker answers; otherwise return a text that says which process answers there.
        """
        caller = self._caller
        sock, hello = await caller.dialling(host, port, take_offer=None if port else self._take_offered)
        end_when_silent(sock, SILENT_S)
        limits, peer_limits = (Limits(max_body_bytes=side.max_message_bytes) for side in (caller.dialling, hello))
        open = partial(Connection, sock, limits=limits, peer_limits=peer_limits, allocate=POOL.take)
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
        """Watch the link with heartbeats. The other daemon always answers, even if its executor is busy, so its silence
        shows that the link is lost.
        """
        try:
            sock, hello = await self._caller.dialling(
                host, port, Role.CONTROL, take_offer=None if port else self._take_offered
            )
        except DDLFError:
            return  # without heartbeats the kernel reports a lost link, but later
        if self._control is not None:  # the next call after a lost connection opens this connection again
            sock.close()
            return
        peer_limits = Limits(max_body_bytes=hello.max_message_bytes)
        open = partial(Connection, sock, limits=CONTROL_LIMITS, peer_limits=peer_limits)
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

    def _judge(self, identity: Any) -> str:
        """Check the answer of the process at an address. Return the reason why it is not the wanted worker; empty if it
        is.

        Raises:
            LeaseError: It is the right worker, and does not admit this worker.
        """
        try:
            executor, run, id, refusal = identity["executor"], identity["run"], identity["id"], identity["refusal"]
        except (LookupError, TypeError):
            raise ProtocolError("the process that answered did not identify itself") from None
        if executor == self._caller.executor:
            return "leads back to this worker itself"
        if run != self._caller.run:
            return "leads to a worker outside this run"
        if id != self.id:
            return f"leads to worker {id}"
        if refusal:
            raise LeaseError(str(refusal), worker=self.name)
        return ""

    def close(self) -> None:
        """End the connection to the other worker. No call follows."""
        self._is_over = True
        self.offers.tell_over()
        self.offers.close()
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

    async def error_of(self, channel: Channel, reason: BaseException | None) -> DDLFError:
        """Return the error for the requests that were open when the channel ended."""
        if self._is_over:
            return AppMissing(f"this worker is not in a run with {self.name} any more")
        return self._lost(self._silence.message if self._silence is not None else reason or "the other side closed it")

    def _lost(self, reason: object) -> WorkerLost:
        message = f"the link from worker {self._caller.me} to it was lost ({reason})"
        return WorkerLost(message, worker=self.name, hint="check the network between the two workers")


DIALS_AT_ONCE = 4
"""Maximum number of connections that a worker opens at once to the other workers. With this limit, no worker gets more
connections at once than it accepts, even if all workers connect at the same time.
"""


def refuse_code(tag: Tag, data: bytes) -> NoReturn:
    """Refuse to load pickled objects, which could run code. This is the ``load_object`` between workers."""
    raise ProtocolError("another worker sent a pickled object, where only data is allowed")


@dataclass(frozen=True, slots=True)
class Admitted:
    """Another worker that may call this worker.

    Args:
        executor: Name of the caller's executor, as it reports it.
        number: Number of the caller in the run, as the master has said.
        run: Name of the run.
        lease: The key of the lease under which it was admitted.
    """

    executor: str
    number: int
    run: str
    lease: bytes


CALLER: ContextVar[int | None] = ContextVar("CALLER", default=None)
"""What ``caller`` returns."""


def caller() -> int | None:
    """Return the number of the worker whose request the current task runs; None if the master or this worker has begun
    it.
    """
    return CALLER.get()


class Peers(Mapping[int, Peer]):
    """The other workers that this worker may call, by their numbers.

    Args:
        executor: Unique name of this worker's executor.

    Attributes:
        run: Name of their run; empty if there is none.
        me: Number of this worker in it.
        numbers: Numbers for requests to them.
        dialling: How to connect to them.
        lease: Returns the key of this worker's lease.
        changed: Called when the set of workers that may call this worker changes.
        lost: Called with the number of a worker whose link is silent, and the reason.
    """

    def __init__(self, executor: str) -> None:
        self.executor = executor
        self.run = ""
        self.me = 0
        self.numbers: Iterator[int] = itertools.count(1)
        self.dialling = Dialling(())
        self.lease: Callable[[], bytes] = lambda: b""
        self.changed: Callable[[], object] = lambda: None
        self.lost: Callable[[int, str], object] = lambda id, reason: None
        self._peers: dict[int, Peer] = {}
        self._callers: dict[str, int] = {}
        self._lease = b""

    def __getitem__(self, id: int) -> Peer:
        if id not in self._peers:
            raise AppMissing(f"worker {id} may not be called by this worker in this run")
        return self._peers[id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._peers)

    def __len__(self) -> int:
        return len(self._peers)

    # -- commands of the master ---------------------------------------------------------------------------------------

    async def introduce(
        self,
        run: str,
        me: int,
        lease: bytes,
        callers: dict[str, int],
        peers: list[Callee],
        dead_after_s: float,
    ) -> None:
        """Record which workers may call each other. This replaces the previous introduction.

        Args:
            run: Name of the run.
            me: Number of this worker in it.
            lease: The key, which only the master that has the worker knows.
            callers: The executors of the workers that may call this worker, each with the number of its worker.
            peers: The workers that it may call.
            dead_after_s: Seconds of silence before a link counts as lost.

        Raises:
            LeaseError: The caller is not the master that has the worker.
        """
        if not any(lease) or lease != self.lease():
            raise LeaseError("only the master with the lease can introduce workers", hint="connect without guest")
        former = self._peers if (run, me, lease) == (self.run, self.me, self._lease) else {}
        self.run, self.me, self._lease, self._callers = run, me, lease, dict(callers)
        old, self._peers = self._peers, {}
        for callee in sorted(peers, key=lambda callee: callee.id):
            peer = former.get(callee.id)
            # The pass differs for each lease, and therefore after each return of the master.
            if peer is not None and peer.shows == callee.shows:
                peer.set_addresses(callee.addresses)
            else:
                peer = Peer(self, callee, dead_after_s)
            self._peers[callee.id] = peer
        for peer in old.values():
            if self._peers.get(peer.id) is not peer:
                peer.close()
        self.changed()

    async def meet(self) -> list[tuple[int, str]]:
        """Try to connect to each other worker that this worker may call.

        Returns:
            The numbers of the workers that were not reached, with the reasons.
        """
        # Begin with the next worker, so that not all workers connect to the first one at the same time.
        order = sorted(self._peers.values(), key=lambda peer: (peer.id < self.me, peer.id))
        dials = asyncio.Semaphore(DIALS_AT_ONCE)

        async def reach(peer: Peer) -> tuple[int, str] | None:
            async with dials:
                try:
                    await peer.reach()
                except DDLFError as error:
                    return peer.id, error.message
            return None

        return [failure for failure in await asyncio.gather(*map(reach, order)) if failure is not None]

    # -- connections that other workers open --------------------------------------------------------------------------

    async def receive(self, sock: socket.socket, preamble: bytes) -> None:
        """Keep a connection that another worker offers, because this worker cannot dial it. The caller limits the time.
        On failure the socket is closed.

        Args:
            sock: A non-blocking socket.
            preamble: The first 8 bytes, already checked.

        Raises:
            AuthError: The other side does not have this worker's token.
            OSError: The connection ended.
            ProtocolError: This worker calls no others, so the other side probably looks for a master.
        """
        is_kept = False
        try:
            if not self._peers:
                await send_all(sock, short_answer())
                raise ProtocolError("a worker wants to join here, but this is a worker")
            offer = await receive_offer(sock, preamble, self.dialling.tokens, self._judge)
            if offer is not None:
                self._peers[offer.place].offers.keep(sock, offer.incarnation)
                is_kept = True
        finally:
            if not is_kept:
                sock.close()

    def _judge(self, offer: Offer) -> GateVerdict:
        peer = self._peers.get(offer.place)
        if peer is None:  # not called any more: the other worker may have been between two offers when this was decided
            return GateVerdict.OVER
        return GateVerdict.WELCOME if offer.incarnation == offer_number(peer.shows) else GateVerdict.REPLACED

    # -- requests of other workers ------------------------------------------------------------------------------------

    def greet(self, *arguments: Any) -> tuple[dict[str, Any], Admitted | None]:
        """Identify this worker, and check whether another worker may call it.

        Args:
            arguments: Name of the run, number of the wanted worker, the caller's executor, and its pass.

        Returns:
            Facts for the caller, and its admission; None if it is not admitted.

        Raises:
            ProtocolError: The arguments do not have this form.
        """
        if list(map(type, arguments)) != [str, int, str, bytes]:
            raise ProtocolError("greet takes a run, a number, the name of an executor, and a pass")
        run, id, executor, shown_pass = arguments
        lease, refusal = self.lease(), ""
        if run != self.run or lease != self._lease or not run:
            refusal = "the worker is not in this run"
        elif id != self.me:
            refusal = f"this is worker {self.me}"
        elif executor not in self._callers:
            refusal = "its master has not allowed this worker to call it"
        elif not hmac.compare_digest(shown_pass, peer_pass(lease, run, executor)):
            refusal = "its pass does not match the present lease"
        in_run = run == self.run and lease == self._lease
        facts = {"executor": self.executor, "run": run if in_run else "", "id": self.me, "refusal": refusal}
        return facts, None if refusal else Admitted(executor, self._callers[executor], run, lease)

    def refusal(self, admitted: Admitted) -> LeaseError | None:
        """Return the error for another worker that was admitted and may no longer call this worker; None if it may."""
        is_named = self._callers.get(admitted.executor) == admitted.number
        now = admitted.run == self.run and admitted.lease == self.lease() and is_named
        return (
            None
            if now
            else LeaseError(
                "may no longer be called by that worker", hint="its master has introduced the workers again without it"
            )
        )

    def check(self, admitted: Admitted | None, command: str, args: list[Any]) -> None:
        """Refuse a request of another worker that it may not send to this worker.

        Raises:
            LeaseError: The other worker may send no requests.
            ProtocolError: The other worker may not send this request.
        """
        if admitted is None:
            raise LeaseError("a session of a worker begins with greet")
        if refusal := self.refusal(admitted):
            raise refusal
        if command != "call":
            raise ProtocolError(f"a worker may call only verbs that roles offer to others, not {command[:40]!r}")
        if args[:1] != [admitted.run]:
            raise ProtocolError("a worker may call only roles of the run that admitted it")

    # -- the end ------------------------------------------------------------------------------------------------------

    def forget(self, run: str) -> None:
        """Forget the peers of a run that has ended on this worker."""
        if run == self.run:
            self.close()
            self.changed()

    def end_without_lease(self) -> None:
        """End the connections to all other workers if this worker's lease has changed, because the right to use them
        has ended.
        """
        if self.run and self.lease() != self._lease:
            self.close()

    def close(self) -> None:
        """End the connections to all peers, and admit none of them."""
        self.run, self._lease, self._callers = "", b"", {}
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()


Ask = Callable[..., Awaitable[Any]]
"""A function that calls a verb of a role on a worker, possibly on this worker. Its arguments are the worker's number,
the role, the verb, and the verb's arguments. It raises ``Unreached`` if the link fails."""


class Unreached(Exception):
    """Raised if another worker did not answer a call.

    Args:
        worker: Number of the other worker.
        reason: The error, in one line.
        link: Whether the link between the two workers failed.
    """

    def __init__(self, worker: int, reason: str, *, link: bool = False) -> None:
        super().__init__(reason)
        self.worker, self.reason, self.link = worker, reason, link


def calls_of(own_number: int, peers: Peers, call_own: Callable[..., Awaitable[Any]], run: str) -> Ask:
    """Return a function that calls a role's verb on any worker of a run, this one included.

    Args:
        own_number: Number of this worker.
        peers: The other workers.
        call_own: Calls a role of this worker: ``Hosting.call``.
        run: Name of the run.
    """

    async def ask(number: int, role: str, verb: str, *arguments: Any) -> Any:
        if number == own_number:
            return await call_own(run, role, verb, *arguments)
        peer = peers[number]
        try:
            peer.refuse_silent()  # a new connection would take seconds, and the master tries this link again
            try:
                return await peer.call((run, role), verb, *arguments)
            except WorkerLost:  # connect again after a reset; the peer may receive the request twice
                peer.refuse_silent()
                return await peer.call((run, role), verb, *arguments)
        except (WorkerLost, ConnectError) as error:
            raise Unreached(number, error.message.partition("\n")[0], link=True) from error

    return ask
