"""One data connection's requests: bytes become calls, results become bytes. Runs in the executor."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Any

from ddlf.errors import DDLFError, LeaseError, NotPicklable, ProtocolError, RequestCancelled
from ddlf.rpc.buffers import POOL
from ddlf.rpc.code import CodeMissing, dump_result
from ddlf.rpc.connection import Connection
from ddlf.rpc.frame import Frame, Limits
from ddlf.rpc.messages import DOING, Kind, Request, Response, describe, read_arguments
from ddlf.rpc.values import dumps, loads, refuse_objects
from ddlf.worker.activity import Activity
from ddlf.worker.calls import Call, Calls
from ddlf.worker.lease import MASTER_ID_BYTES
from ddlf.worker.peer import refuse_between_workers
from ddlf.worker.peers import Admitted, Peers, refuse_code

MAX_WAITING_REQUESTS = 1024
"""A connection with this many unanswered requests is not read from until half are answered."""
MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""Answers that a master has not taken yet; above it none of its requests is read or started."""
STALLED_AFTER_S = 60.0
"""A master that takes nothing of such answers for so long loses the connection. Not sooner: one that computes in its event loop does not read either,
and its answers wait at no more cost than the bytes above. One that is stopped or gone is noticed by its silence on the control connection."""


class Session:
    """One data connection's requests.

    Args:
        sock: Authenticated.
        limits: What this side accepts.
        peer_limits: What the other side accepts.
        calls: The worker's, which run what is asked.
        load: Makes an object of what came in place of one; see ``loads``.
        begin: Told of a master that has the worker: its id, and whether it answers what ``imports`` asks.
        peers: Knows which other workers may ask, and for what.
        activity: The page that says who has the worker; None without a daemon, when everybody may ask.

    Attributes:
        held_back: Whether its master has too many answers to read.
        is_guest: Whether its master asks without having the worker.
        peer: What lets another worker in, if it is one that asks; None for a master.
        closed: Done when the connection has ended.
    """

    def __init__(
        self,
        sock: socket.socket,
        limits: Limits,
        peer_limits: Limits,
        *,
        calls: Calls,
        load: Callable[..., Any],
        begin: Callable[[bytes, bool], None],
        peers: Peers,
        activity: Activity | None,
    ) -> None:
        self._calls = calls
        self._load = load
        self._begin = begin
        self._peers = peers
        self._activity = activity
        self._loop = asyncio.get_running_loop()
        self._pickle_results = False
        self._begun = activity is None  # without a daemon there are no leases
        self._lease: bytes | None = None  # the key under which it asks; None before ``connect`` and for a guest
        self._reading_again: asyncio.Task[None] | None = None
        self._open: dict[int, Call] = {}
        self.is_guest = activity is None
        self.peer: Admitted | None = None
        self.held_back = False
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._connection = Connection(
            sock, self._on_frame, self._on_close, limits=limits, peer_limits=peer_limits, allocate=POOL.take
        )

    def refusal(self) -> LeaseError | None:
        """Why nothing is to be run for its master; None if that has the worker, or is a guest."""
        if self.peer is not None:
            return self._peers.refusal(self.peer)
        if self.is_guest:
            return None
        if self._lease is None:
            return _no_connect()
        if self._activity is not None and self._activity.holds(self._lease):
            return None
        return LeaseError("this master does not have the worker any more", hint="connect again")

    @property
    def _had_lease(self) -> bool:
        """Whether it was let in by one, of its own or of the master that introduced it."""
        return self._lease is not None or self.peer is not None

    def end_without_lease(self) -> None:
        """End the connection if its master had the worker and does not any more, or has ended what lets another worker in."""
        if self._had_lease and self.refusal() is not None:
            self._connection.close()

    def cancel_all(self) -> None:
        """End what is open: nobody waits for it."""
        for call in list(self._open.values()):
            self._calls.cancel(call)

    def keep_answers(self) -> None:
        if self.peer is None:  # what a verb has returned to a peer does not change
            self._connection.detach()

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == Kind.CANCEL:
            if frame.id in self._open:
                self._calls.cancel(self._open[frame.id])
            return
        if frame.kind != Kind.REQUEST:
            raise ProtocolError(f"a worker expects requests, not messages of kind {frame.kind}")
        if frame.id < 1:
            raise ProtocolError(f"a request has a number from 1, not {frame.id}")
        if frame.id in self._open:
            raise ProtocolError(f"request {frame.id} is open already")
        if self.peer is not None or frame.name == "greet":
            self._on_peer(frame)
            return
        if not self._begun and frame.name != "connect":
            self._answer(frame.id, Response(error=self.refusal() or _no_connect()))
            return
        try:
            args, kwargs = read_arguments(loads(frame.buffers, self._load))
        except (CodeMissing, NotPicklable) as error:
            if isinstance(error, CodeMissing):
                error.may_have_run = False
            self._answer(frame.id, Response(error=error))
            return
        if frame.name == "connect":
            refusal = self._connect(kwargs)
            if refusal is not None:
                self._answer(frame.id, Response(error=refusal))
                return
        self._submit(frame, frame.id, args, kwargs)

    def _submit(self, frame: Frame, shown_as: int, args: list[Any], kwargs: dict[str, Any]) -> None:
        timeout_s = frame.extra
        deadline = self._loop.time() + timeout_s if timeout_s is not None else None
        call = self._open[frame.id] = Call(shown_as, Request(frame.name, *args, **kwargs), self, deadline)
        if len(self._open) >= MAX_WAITING_REQUESTS:
            self._connection.pause_reading()
        self._calls.submit(call)

    def _on_peer(self, frame: Frame) -> None:
        """Take a request of another worker: data alone, and nothing that takes turns with its master's."""
        try:
            args, kwargs = read_arguments(loads(frame.buffers, refuse_code))
        except NotPicklable as error:  # of a type that this machine lacks
            self._answer(frame.id, Response(error=error.with_traceback(None)))
            return
        try:
            if frame.name == "greet" and self.peer is None and self._lease is None:
                facts, self.peer = self._peers.greet(*args)
                self._answer(frame.id, Response(facts))
                return
            self._peers.check(self.peer, frame.name, args)
        except DDLFError as error:
            self._answer(frame.id, Response(error=error.with_traceback(None)))
            return
        self._submit(frame, -frame.id, args, kwargs)  # not a number of the master's, and not for its daemon to see

    def _connect(self, facts: dict[str, Any]) -> LeaseError | None:
        """Take note of who asks; lease and modules are taken out of the facts. Returns why nothing is to be run, or None."""
        # Of this connection alone: another master may have chosen otherwise.
        self._pickle_results = bool(facts.get("pickle_results"))
        self.is_guest = self.is_guest or facts.get("guest") is True
        lease = facts.pop("lease", b"")
        # A free worker's page holds zeros, which are nobody's key.
        self._lease = None if self.is_guest else lease if isinstance(lease, bytes) and any(lease) else b""
        modules = facts.pop("modules", False) is True
        refusal = self.refusal()
        self._begun = refusal is None
        if self._begun and self._lease:
            self._begin(self._lease[:MASTER_ID_BYTES], modules)
        return refusal

    def tell(self, call: Call, facts: dict[str, Any]) -> None:
        """Tell what a call does now; any thread may."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(self._tell, abs(call.id), facts)

    def _tell(self, id: int, facts: dict[str, Any]) -> None:
        if id in self._open and not self._connection.queued_bytes:  # the next time says more
            with contextlib.suppress(ConnectionError):
                self._connection.send(Kind.EVENT, id, DOING, dumps(facts))

    def answer(self, call: Call, response: Response) -> None:
        self._answer(abs(call.id), response)

    def _answer(self, id: int, response: Response) -> None:
        self._open.pop(id, None)
        if len(self._open) == MAX_WAITING_REQUESTS // 2 and not self.held_back:
            self._connection.resume_reading()
        connection, error = self._connection, response.error
        if connection.closed:
            return
        try:
            if error is None:
                connection.send(Kind.RESULT, id, "", dumps(response.result, self._dump))
        except ConnectionError:
            return
        except Exception as problem:  # the result cannot be sent, whatever the reason: every request is answered
            error = problem.with_traceback(None)  # its frames are ours and those of the encoder
        if error is not None:
            if isinstance(error, RequestCancelled) and self._had_lease and self.refusal() is not None:
                connection.close()  # the end of its lease ended it, not its master
                return
            with contextlib.suppress(ConnectionError):
                connection.send(Kind.ERROR, id, "", dumps(describe(error)))
        if connection.queued_bytes > MAX_QUEUED_BYTES and not self.held_back:
            self._hold_back()

    @property
    def _dump(self) -> Callable[[Any], Any]:
        """What becomes of a result's objects."""
        if self.peer is not None:
            return refuse_between_workers
        return dump_result if self._pickle_results else refuse_objects

    def _hold_back(self) -> None:
        self.held_back = True
        self._connection.pause_reading()
        self._reading_again = self._loop.create_task(self._wait_for_reader())

    async def _wait_for_reader(self) -> None:
        """Go on when the master has read half of what waits for it; end the connection when it does not read at all."""
        connection = self._connection
        while connection.queued_bytes > MAX_QUEUED_BYTES // 2:
            sent = connection.bytes_sent
            try:
                async with asyncio.timeout(STALLED_AFTER_S):
                    await connection.drain(leave=MAX_QUEUED_BYTES // 2)
            except TimeoutError:
                if connection.bytes_sent == sent:
                    _log(
                        f"its master has read nothing for {STALLED_AFTER_S:g} s, {connection.queued_bytes:,} bytes wait for it"
                    )
                    connection.abort()
            except ConnectionError:
                break
        self.held_back = False
        if len(self._open) < MAX_WAITING_REQUESTS:
            connection.resume_reading()
        self._calls.go_on()

    def _on_close(self, reason: BaseException | None) -> None:
        if isinstance(reason, ProtocolError):
            _log(str(reason))
        if not self.closed.done():
            self.closed.set_result(None)


def _no_connect() -> LeaseError:
    return LeaseError("a session begins with connect")


def _log(why: str) -> None:
    print(f"ddlf-worker: closed a connection: {why}", file=sys.__stderr__, flush=True)
