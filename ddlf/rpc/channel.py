"""The caller's side of a connection: its open requests and how each of them ends.

Runs on the master, and on a worker that calls another worker.

Every request ends exactly once: with a result, with the error of its method, with a ``RequestFailed``, or because its
caller was cancelled.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from ddlf.errors import (
    DDLFError,
    ExecutorCrashed,
    ProtocolError,
    RequestFailed,
    RequestTimeout,
    ResultNotData,
    WorkerLost,
)
from ddlf.rpc.code import CodeSender
from ddlf.rpc.deadline import NEVER, Deadline
from ddlf.rpc.frame import Buffer, Frame
from ddlf.rpc.messages import DOING, Kind, Request, rebuild
from ddlf.rpc.values import DumpObject, dumps, loads, refuse_loading

CODE_MISSING = "ddlf.rpc.code.CodeMissing"
ANSWERS = frozenset({Kind.RESULT, Kind.ERROR})
TAKE_TURNS = frozenset({"run", "run_method", "run_code", "call"})
"""A worker runs these commands one after another, in the order in which they were sent."""


class Stream(Protocol):
    """Carries frames. The members mean the same as in ``Connection``."""

    closed: bool
    bytes_sent: int
    bytes_received: int

    def send(self, kind: int, id: int, name: str, buffers: list[Buffer], extra: float | None = None) -> None: ...
    def detach(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


Opener = Callable[[Callable[[Frame], None], Callable[[BaseException | None], None]], Stream]
"""Makes a stream from two callbacks. The first receives each frame, the second receives the reason for the end."""


class Owner(Protocol):
    """The object that has a channel: it names the other side in errors and handles whatever no request waits for.

    ``name`` appears in errors. ``spawn`` runs a coroutine in its own task. ``on_event`` receives events. ``on_end``
    reports the end of the channel; after it the owner must not refer to the channel. ``on_cancel`` reports a request
    whose caller no longer waits. ``why`` returns the error for the open requests.
    """

    @property
    def name(self) -> str: ...
    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> object: ...
    def on_event(self, frame: Frame) -> None: ...
    def on_end(self, channel: Channel) -> None: ...
    def on_cancel(self, channel: Channel, id: int) -> None: ...
    async def why(self, channel: Channel, reason: BaseException | None) -> DDLFError: ...


class Channel:
    """One connection and its open requests.

    Args:
        owner: The object that has the channel.
        open: Makes the stream.
        ids: Numbers for requests, in increasing order.
        load_object: Loads results that are not plain data.
        dump_object: Writes arguments that are not plain data. With None they are sent as code.

    Attributes:
        pending: The futures of the open requests.
        reason: The reason for the end, as far as the stream knows it.
    """

    def __init__(
        self,
        owner: Owner,
        open: Opener,
        ids: Iterator[int],
        load_object: Callable[..., Any] = refuse_loading,
        dump_object: DumpObject | None = None,
    ) -> None:
        self.pending: dict[int, asyncio.Future[Any]] = {}
        self.reason: BaseException | None = None
        self._hearing: dict[int, Callable[[dict[str, Any]], None]] = {}
        self._owner = owner
        self._ids = ids
        self._load_object = load_object
        self._code = CodeSender()
        self._dump_object = dump_object or self._code.dump
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self.stream = open(self._on_frame, self._ended)

    async def call(self, request: Request, deadline: Deadline = NEVER) -> Any:
        """Send a request and return its result. If the worker has dropped code that was sent by name, send the request
        again in full.

        Raises:
            DDLFError: The request failed, or its method raised an error.
        """
        kind, value = await self._exchange(request, deadline)
        if kind == Kind.ERROR and _code_is_missing(value):
            self._code.forget()
            kind, value = await self._exchange(request, deadline)
        if kind == Kind.ERROR:
            raise rebuild(value, worker=self._owner.name)
        return value

    async def _exchange(self, request: Request, deadline: Deadline) -> Any:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise self._elsewhere()
        id = next(self._ids)
        dump = self._dump_object if request.pickle is None else partial(self._code.dump, pickle=request.pickle)
        buffers = dumps([list(request.args), request.kwargs], dump)
        future: asyncio.Future[Any] = loop.create_future()
        self.pending[id] = future
        if request.hear is not None:
            self._hearing[id] = request.hear
        left_s = deadline.left_s()
        timer = None if left_s is None else loop.call_later(left_s, self._time_out, future, request, deadline)
        try:
            self.stream.send(Kind.REQUEST, id, request.command, buffers, left_s)
            return await future
        except ResultNotData as error:  # the result has a class that this side lacks
            error.worker = self._owner.name
            raise
        except ExecutorCrashed as error:
            # Requests run in the order in which they were sent, and an earlier one was still running.
            if request.command in TAKE_TURNS and error.begun < id:
                error.may_have_run = False
                error.message += f", before {said(request)!r} had begun"
            raise
        except ConnectionResetError as error:  # the request could not be sent
            future.cancel()  # the end of the connection may also set an error on it, which nobody would read
            why = copy.copy(await self._owner.why(self, error))
            if isinstance(why, RequestFailed):
                why.may_have_run = False
            raise why from None
        except (asyncio.CancelledError, RequestTimeout):
            if not self.stream.closed:
                self.stream.detach()  # the caller continues, and may change the arrays that it passed
                with suppress(OSError):
                    self.stream.send(Kind.CANCEL, id, "", [])
                    self._owner.on_cancel(self, id)
            raise
        finally:
            self.pending.pop(id, None)
            self._hearing.pop(id, None)
            if timer is not None:
                timer.cancel()

    def _time_out(self, future: asyncio.Future[Any], request: Request, deadline: Deadline) -> None:
        if not future.done():
            text = f"{said(request)!r} did not end within {deadline.timeout_s:g} s"
            future.set_exception(RequestTimeout(text, worker=self._owner.name))

    def _elsewhere(self) -> WorkerLost:
        """Return the error for a call from an event loop that does not have the connection."""
        where, hint = (
            ("in another process", "make a Cluster of its own in each")
            if os.getpid() != self._pid
            else ("on another event loop", "connect and call inside one asyncio.run, or use ddlf.run")
        )
        return WorkerLost(f"connected {where}", hint=hint, worker=self._owner.name, may_have_run=False)

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == Kind.EVENT:
            if frame.name != DOING:
                self._owner.on_event(frame)
            elif frame.id in self._hearing:
                self._hear(frame)
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
                raise  # a worker that breaks the protocol once is not read again
            return
        future.set_result((frame.kind, value))

    def _hear(self, frame: Frame) -> None:
        """Pass on the worker's message about an open request."""
        try:
            self._hearing[frame.id](loads(frame.buffers))
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ProtocolError(f"event {DOING!r} cannot be read ({type(error).__name__}: {error})") from None

    def _ended(self, reason: BaseException | None) -> None:
        self.reason = reason
        self._owner.on_end(self)
        if self.pending:
            self._owner.spawn(self._explain(reason))

    async def _explain(self, reason: BaseException | None) -> None:
        self.fail(await self._owner.why(self, reason))

    def fail(self, error: DDLFError) -> None:
        """End every open request with a copy of ``error``. Copies are needed because a handler may add to its error."""
        pending, self.pending = self.pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(copy.copy(error))


def said(request: Request) -> str:
    """Return the name of a request in errors: the name of its method, if it has one, else its command."""
    if request.command == "call":
        return ".".join(map(str, request.args[1:3]))[:60]
    named = getattr(request.args[0], "__name__", request.args[0]) if request.args else request.command
    return str(named)[:60]


def _code_is_missing(facts: Any) -> bool:
    """Return whether a worker refused a request because it lacks code that was sent by name. ``facts`` may be any
    value.
    """
    try:
        return facts["chain"][0][0] == CODE_MISSING and facts["may_have_run"] is False
    except (LookupError, TypeError):
        return False
