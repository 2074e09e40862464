"""The other workers of a run: whom this one may call, and who may call it. Runs in the executor, on its event loop.

The master of a run introduces its workers to each other (``ddlf.cluster.introduce``): each is told where the others are, what to show to them, and
who will come. A worker dials another one as a master does, by the same handshake, and begins with ``greet``, in which both find out whether they have
reached whom they meant. From then on it may call what the roles of that run offer, with data alone. All of it ends with the lease under which the
master said so, with the run, and when the master introduces its workers again without that one.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping
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
from ddlf.net.buffers import POOL
from ddlf.net.channel import Channel
from ddlf.net.connection import Connection
from ddlf.net.deadline import Deadline
from ddlf.net.dial import dial
from ddlf.net.silence import end_when_silent
from ddlf.net.tls import TOKEN_ONLY, Security
from ddlf.wire.frame import MAX_BODY_BYTES, Frame, Limits
from ddlf.wire.handshake import Role
from ddlf.wire.messages import Request
from ddlf.wire.values import Tag, refuse_loading
from ddlf.worker.lease import peer_pass

ADDRESS_S = 3.0
"""How long one address may take to answer, before the next one is tried."""
GREET_S = 10.0
"""How long a worker that was reached may take to say who it is: its event loop may be at work."""
DIALS_AT_ONCE = 4
"""Of one worker that meets all others: of many workers that do so at the same time, none is dialled by more than its admission lets in."""


def refuse_between_workers(value: Any) -> NoReturn:
    """The ``dump_object`` of what workers send each other."""
    raise NotPicklable(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot go from worker to worker, only data can",
        hint="send numbers, text, lists, dicts or arrays",
    )


def refuse_code(tag: Tag, data: bytes) -> NoReturn:
    """The ``load_object`` of what workers send each other."""
    raise ProtocolError("another worker sent a pickled object, where only data is allowed")


@dataclass(frozen=True, slots=True)
class Dialling:
    """How this worker reaches others.

    Args:
        tokens: The accepted ones, the one to prove with first. While tokens are replaced, others may hold only the second one yet.
        max_message_bytes: The largest answer accepted.
        security: Certificates, and whether to encrypt beyond this machine.
    """

    tokens: tuple[bytes, ...] = field(repr=False)
    max_message_bytes: int = MAX_BODY_BYTES
    security: Security = TOKEN_ONLY

    async def __call__(self, host: str, port: int) -> Any:
        """A socket, and the other side's hello; errors are those of ``dial``."""
        for left, token in enumerate(reversed(self.tokens)):
            try:
                return await dial(
                    host,
                    port,
                    Role.DATA,
                    token,
                    max_message_bytes=self.max_message_bytes,
                    timeout_s=ADDRESS_S,
                    security=self.security,
                )
            except AuthError:
                if not left:
                    raise
        raise AssertionError("a worker has a token")


@dataclass(frozen=True, slots=True)
class Admitted:
    """Another worker that may call this one.

    Args:
        executor: The caller's, as it names itself.
        run: Name of the run.
        lease: The key under which it was let in.
    """

    executor: str
    run: str
    lease: bytes


class Peer:
    """Another worker of the run, as this one calls it. It is dialled when it is first called, and again when the connection was lost.

    Args:
        peers: Peers of this worker.
        id: Its number in the cluster.
        name: As errors show it.
        addresses: Pairs of host and port, and whether its people gave that one for this purpose.
        shows: What lets this side in.
        dead_after_s: Seconds without an acknowledgement after which the connection is lost.
    """

    def __init__(
        self, peers: Peers, id: int, name: str, addresses: list[Any], shows: bytes, dead_after_s: float
    ) -> None:
        self.id = id
        self.name = name
        self.shows = shows
        self._peers = peers
        self._addresses = [(str(host), int(port), bool(given)) for host, port, given in addresses]
        self._dead_after_s = dead_after_s
        self._channel: Channel | None = None
        self._reaching = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._bytes_before = (0, 0)
        self._is_over = False

    async def call(self, role: tuple[str, str], verb: str, /, *args: Any, **data: Any) -> Any:
        """Have a role of that worker do something.

        Args:
            role: Name of the run, and of the role in it.
            verb: Name of one of the role's methods that it offers.
            args: Data for it, as is ``data``; arrays are sent from their own memory, so they must not change before this returns.

        Raises:
            RemoteError: The verb raised.
            AppMissing: That worker does not play the role, or this one is not in the run any more.
            ConnectError: It cannot be reached.
            LeaseError: This worker may not call it any more.
            WorkerLost: The connection ended first; ``may_have_run`` says whether the verb can have begun.
            NotPicklable: An argument is not data.
        """
        channel = self._channel or await self.reach()
        return await channel.call(Request("call", *role, verb, *args, **data))

    @property
    def bytes_sent(self) -> int:
        """On all connections to it that this side has dialled."""
        return self._bytes_before[0] + (self._channel.stream.bytes_sent if self._channel else 0)

    @property
    def bytes_received(self) -> int:
        """Likewise."""
        return self._bytes_before[1] + (self._channel.stream.bytes_received if self._channel else 0)

    async def reach(self) -> Channel:
        """Connect to it, if that is not done, at the first of its addresses where it answers itself.

        Raises:
            ConnectError: It does at none, or an address that was given for it leads to another worker; the text has each, with the reason.
            LeaseError: It does not let this side in.
            AppMissing: This worker is not in the run any more.
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
                    otherwise = await self._greet(host, port)
                except LeaseError:
                    raise
                except DDLFError as error:
                    found.append(error.message)
                    continue
                if self._channel is not None:
                    self._addresses.sort(key=lambda one: one != address)  # there first, the next time
                    return self._channel
                found.append(f"{host}:{port} {otherwise}")
                if given:
                    break
            raise ConnectError("; ".join(found) or "no address of it is known", worker=self.name)

    async def _greet(self, host: str, port: int) -> str:
        """Connect to an address if it leads to this worker; else return who is there instead."""
        peers = self._peers
        sock, hello = await peers.dialling(host, port)
        end_when_silent(sock, self._dead_after_s)
        limits, theirs = (Limits(max_body_bytes=one.max_message_bytes) for one in (peers.dialling, hello))
        open = partial(Connection, sock, limits=limits, peer_limits=theirs, allocate=POOL.take)
        channel = Channel(self, open, peers.numbers, refuse_loading, refuse_between_workers)
        try:
            greeting = Request("greet", peers.run, self.id, peers.executor, self.shows)
            otherwise = self._judge(await channel.call(greeting, Deadline(GREET_S)))
            if not otherwise and not channel.stream.closed and not self._is_over:
                self._channel = channel
            return otherwise or "has closed the connection"
        except RequestTimeout:
            raise ConnectError(f"{host}:{port} did not say within {GREET_S:g} s who it is") from None
        except ProtocolError as error:
            raise ConnectError(f"{host}:{port} cannot be called by workers ({error.message})") from None
        finally:
            if channel is not self._channel:
                channel.stream.close()

    def _judge(self, who: Any) -> str:
        """What is wrong with who answered; empty if it is this worker.

        Raises:
            LeaseError: It is, and does not let this side in.
        """
        try:
            executor, run, id, refusal = who["executor"], who["run"], who["id"], who["refusal"]
        except (LookupError, TypeError):
            raise ProtocolError("who answered did not say who it is") from None
        if executor == self._peers.executor:
            return "leads back to this worker itself"
        if run != self._peers.run:
            return "leads to a worker that is not in this run"
        if id != self.id:
            return f"leads to worker {id}"
        if refusal:
            raise LeaseError(str(refusal), worker=self.name)
        return ""

    def close(self) -> None:
        """End the connection; nothing is called any more."""
        self._is_over = True
        if self._channel is not None:
            self._channel.stream.close()
        for task in list(self._tasks):
            task.cancel()

    # What its channel tells, as its ``Owner``.

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> object:
        """Run something in a task of its own."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def on_event(self, frame: Frame) -> None:
        """See ``Owner``; a worker tells another one nothing but answers."""

    def on_cancel(self, channel: Channel, id: int) -> None:
        """See ``Owner``; a verb that is offered awaits, so it has heard it."""

    def on_end(self, channel: Channel) -> None:
        """See ``Owner``."""
        if channel is self._channel:
            self._bytes_before, self._channel = (self.bytes_sent, self.bytes_received), None

    async def why(self, channel: Channel, reason: BaseException | None) -> DDLFError:
        """See ``Owner``."""
        if self._is_over:
            return AppMissing(f"this worker is not in a run with {self.name} any more")
        return WorkerLost(
            f"the link from worker {self._peers.me} to it was lost ({reason or 'the other side closed it'})",
            worker=self.name,
            hint="look at the network between the two",
        )


class Peers(Mapping[int, Peer]):
    """The other workers that this one may call, by their numbers.

    Args:
        executor: Name of this worker's executor, which no other has.

    Attributes:
        run: Name of the run that they are in; empty when there is none.
        me: Number of this worker in it.
        numbers: For requests to them.
        dialling: How they are reached.
        lease: Returns the key of this worker's lease.
        changed: Called when others may not call this worker any more.
    """

    def __init__(self, executor: str) -> None:
        self.executor = executor
        self.run = ""
        self.me = 0
        self.numbers = itertools.count(1)
        self.dialling = Dialling(())
        self.lease: Callable[[], bytes] = lambda: b""
        self.changed: Callable[[], object] = lambda: None
        self._peers: dict[int, Peer] = {}
        self._callers: frozenset[str] = frozenset()
        self._lease = b""

    def __getitem__(self, id: int) -> Peer:
        if id not in self._peers:
            raise AppMissing(f"worker {id} is none that this one may call in this run")
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
        callers: list[str],
        peers: list[dict[str, Any]],
        dead_after_s: float,
    ) -> None:
        """Take note of who may call whom, instead of what was said before.

        Args:
            run: Name of the run.
            me: Number of this worker in it.
            lease: The key, which only the master that has the worker knows.
            callers: Executors of those who may call this worker.
            peers: Those that it may call: id, name, addresses and shows, as ``Peer`` takes them.
            dead_after_s: As ``Peer`` takes it.

        Raises:
            LeaseError: Who asks does not have the worker.
        """
        if not any(lease) or lease != self.lease():
            raise LeaseError("only the master that has a worker can introduce it to others", hint="not as a guest")
        before = self._peers if (run, me, lease) == (self.run, self.me, self._lease) else {}
        self.run, self.me, self._lease, self._callers = run, me, lease, frozenset(callers)
        old, self._peers = self._peers, {}
        for facts in sorted(peers, key=lambda facts: facts["id"]):
            known = before.get(facts["id"])
            # What lets this side in is another one for another lease, and so for each time that its master came back.
            same = known is not None and known.shows == facts["shows"]
            self._peers[facts["id"]] = known if same else Peer(self, **facts, dead_after_s=dead_after_s)
        for peer in old.values():
            if self._peers.get(peer.id) is not peer:
                peer.close()
        self.changed()

    async def meet(self) -> list[tuple[int, str]]:
        """Try to reach each.

        Returns:
            The numbers of those that were not reached, with why.
        """
        # From the next one on, so that not all workers dial the first one first.
        order = sorted(self._peers.values(), key=lambda peer: (peer.id < self.me, peer.id))
        places = asyncio.Semaphore(DIALS_AT_ONCE)

        async def reach(peer: Peer) -> tuple[int, str] | None:
            async with places:
                try:
                    await peer.reach()
                except DDLFError as error:
                    return peer.id, error.message
            return None

        return [found for found in await asyncio.gather(*map(reach, order)) if found is not None]

    # -- what others ask of this worker -------------------------------------------------------------------------------

    def greet(self, *asked: Any) -> tuple[dict[str, Any], Admitted | None]:
        """Say who this is, and whether another worker may call it.

        Args:
            asked: Name of the run, number of the worker that is looked for, the caller's executor, and what it shows.

        Returns:
            Facts for it, and what lets it in; None if it is not let in.

        Raises:
            ProtocolError: Those are not what was asked.
        """
        if list(map(type, asked)) != [str, int, str, bytes]:
            raise ProtocolError("greet takes a run, a number, the name of an executor, and what it shows")
        run, id, executor, shown = asked
        lease, refusal = self.lease(), ""
        if run != self.run or lease != self._lease or not run:
            refusal = "the worker is not in this run, or not any more"
        elif id != self.me:
            refusal = f"this is worker {self.me}"
        elif executor not in self._callers:
            refusal = "its master has not allowed this worker to call it"
        elif not hmac.compare_digest(shown, peer_pass(lease, run, executor)):
            refusal = "this worker was not let in with the lease that its master has now"
        in_run = run == self.run and lease == self._lease
        facts = {"executor": self.executor, "run": run if in_run else "", "id": self.me, "refusal": refusal}
        return facts, None if refusal else Admitted(executor, run, lease)

    def refusal(self, admitted: Admitted) -> LeaseError | None:
        """Why another worker that was let in may not call this one any more; None if it may."""
        now = admitted.run == self.run and admitted.lease == self.lease() and admitted.executor in self._callers
        return None if now else LeaseError("may not be called by that worker any more", hint="its master has gone on")

    def check(self, admitted: Admitted | None, command: str, args: list[Any]) -> None:
        """Find out whether another worker may ask that.

        Raises:
            LeaseError: It may not ask anything.
            ProtocolError: Not that.
        """
        if admitted is None:
            raise LeaseError("a session of a worker begins with greet")
        if refusal := self.refusal(admitted):
            raise refusal
        if command != "call":
            raise ProtocolError(f"a worker may call what roles offer to others, and not {command[:40]!r}")
        if args[:1] != [admitted.run]:
            raise ProtocolError("a worker may call roles of the run that it was let in for, and no others")

    # -- the end ------------------------------------------------------------------------------------------------------

    def forget(self, run: str) -> None:
        """The run is over here."""
        if run == self.run:
            self._clear()
            self.changed()

    def end_without_lease(self) -> None:
        """Let go of all if the lease is another one by now."""
        if self.run and self.lease() != self._lease:
            self._clear()

    def _clear(self) -> None:
        self.run, self._lease, self._callers = "", b"", frozenset()
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()
