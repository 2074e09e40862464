"""One connection after its handshake, its open requests, and their deadlines. Runs on both sides.

``Connection`` sends and receives frames. ``Channel`` is the caller's side: on the master, and on a worker that calls
another worker. Every request ends exactly once: with a result, with the error of its method, with a ``RequestFailed``,
or because its caller was cancelled.

A connection drives a non-blocking socket with ``loop.add_reader`` and ``add_writer`` instead of an asyncio transport.
``benchmarks/rpc.py`` measures the three reasons. Arrays are received into their own memory. Arrays are sent from their
own memory, while asyncio's transports copy everything that the kernel does not accept at once. A small message costs
one callback and no task.

A callback receives each frame on arrival. Sending makes backpressure explicit: ``send`` queues a frame and tries to
send it at once, ``drain`` waits until the kernel has accepted all queued bytes.

An encrypted socket differs in three ways:

- It sends one piece at a time. After a wait it must be offered the same bytes again.
- It reads one record (16 KiB) at a time, and may keep decrypted bytes that the kernel does not know of (``pending``).
- It has its own errors for "would block".

It closes without TLS's closing message. Frames have lengths, so an end inside a frame is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ddlf.errors import (
    DDLFError,
    ExecutorCrashed,
    FrameTooLarge,
    ProtocolError,
    RequestFailed,
    RequestTimeout,
    ResultNotData,
    WorkerLost,
)
from ddlf.rpc.admission import RECEIVING
from ddlf.rpc.messages import (
    DOING,
    Buffer,
    DumpObject,
    Frame,
    FrameDecoder,
    Kind,
    Limits,
    Request,
    dumps,
    encode_frame,
    loads,
    rebuild,
    refuse_loading,
    refuse_objects,
)
from ddlf.rpc.stream import WOULD_BLOCK

if TYPE_CHECKING:  # imports cloudpickle, which a daemon does not need
    from ddlf.rpc.code import CodeSender


class Deadline:
    """The point in time when a call has to end. The caller that sets the limit creates it once and passes it to every
    step of the call.

    Args:
        timeout_s: The total time for the call; None means no limit.
    """

    __slots__ = ("_at", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Return the remaining seconds, at least 0; None if there is no limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def allows(self, longest_s: float) -> float:
        """Return the remaining seconds, but at most ``longest_s``."""
        left_s = self.left_s()
        return longest_s if left_s is None else min(longest_s, left_s)


NEVER = Deadline(None)
"""The deadline of a call without a limit."""


MAX_PIECES = 512
"""Maximum number of pieces for the kernel in one call. Linux accepts 1,024."""
READS_PER_EVENT = 16
"""Reads of large buffers before the event loop does other work. One read gets at most about 1 MB (seen with strace)."""
RECORDS_PER_EVENT = 128
"""The same limit for an encrypted connection, which reads records of 16 KiB: 2 MiB in all, or about 5 ms."""
ENCRYPT_BYTES = 256 * 1024
"""Bytes to encrypt in one call. OpenSSL reports progress only after the whole piece, so ``bytes_sent`` grows in these
steps.
"""

_RESET = struct.pack("ii", 1, 0)
"""The value of SO_LINGER that resets a connection on close: on, with a time of zero."""


class Connection:
    """A stream of frames in both directions.

    Args:
        sock: A connected, authenticated, non-blocking socket. The connection owns it.
        on_frame: Called with each frame. An exception from it ends the connection.
        on_close: Called once after the last frame, with the reason or None.
        limits: The sizes that this side accepts.
        peer_limits: The sizes that the other side accepts.
        allocate: Makes memory for large buffers.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[Frame], None],
        on_close: Callable[[BaseException | None], None],
        *,
        limits: Limits,
        peer_limits: Limits | None = None,
        allocate: Callable[[int], Any] = bytearray,
    ) -> None:
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._reads_per_event = RECORDS_PER_EVENT if self._tls else READS_PER_EVENT
        self._on_frame = on_frame
        self._on_close = on_close
        self._peer_limits = peer_limits or limits
        self._allocate = allocate
        self._decoder = FrameDecoder(limits, self._allocate_counted)
        self._receiving_bytes = 0  # bytes of the current incoming frame that went directly into their final memory
        self._loop = asyncio.get_running_loop()
        self._queue: deque[memoryview] = deque()
        self._bytes_queued = 0  # since the connection began, including the bytes already sent
        self._drained: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._reading = False
        self.closed = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.resume_reading()

    def resume_reading(self) -> None:
        """Read from the socket again after ``pause_reading``."""
        if not self._reading and not self.closed:
            self._reading = True
            self._loop.add_reader(self._sock.fileno(), self._readable)
            if self._tls is not None and self._tls.pending():
                self._loop.call_soon(self._read_rest)

    def pause_reading(self) -> None:
        """Stop reading: incoming bytes stay in the kernel, so that the other side has to wait."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())

    @property
    def queued_bytes(self) -> int:
        """The number of queued bytes that the kernel has not accepted yet."""
        return self._bytes_queued - self.bytes_sent

    @property
    def mid_frame(self) -> bool:
        """Whether a part of a frame has arrived, and the rest has not."""
        return self._decoder.mid_frame

    def send(self, kind: int, id: int, name: str, buffers: list[Buffer], extra: float | None = None) -> None:
        """Queue a frame, and give the kernel as much as it accepts now.

        The buffers must not change until ``drain`` returns or ``detach`` was called.

        Raises:
            FrameTooLarge: The other side does not accept the frame. The frame was not queued.
            ConnectionError: The connection is closed.
        """
        if self.closed:
            raise ConnectionResetError("the connection is closed")
        pieces = encode_frame(kind, id, name, buffers, extra, limits=self._peer_limits)
        if not self._queue and len(pieces) == 1:
            # The usual small message needs one system call and no bookkeeping.
            piece = pieces[0]
            try:
                sent = self._sock.send(piece if self._tls is None else memoryview(piece)[:ENCRYPT_BYTES])
            except WOULD_BLOCK:
                sent = 0
            except OSError as error:
                self._close(error)
                raise ConnectionResetError(str(error)) from error
            self.bytes_sent += sent
            self._bytes_queued += len(piece)
            if sent == len(piece):
                return
            self._queue.append(memoryview(piece)[sent:])
            self._loop.add_writer(self._sock.fileno(), self._writable)
            return
        was_empty = not self._queue
        for piece in pieces:
            self._queue.append(memoryview(piece))
            self._bytes_queued += len(piece)
        if was_empty:
            self._loop.add_writer(self._sock.fileno(), self._writable)
            self._writable()
            if self.closed:
                raise ConnectionResetError("the connection closed while the message was sent")

    async def drain(self, leave: int = 0) -> None:
        """Wait until the kernel has accepted all queued bytes except the last ``leave``.

        Raises:
            ConnectionError: The connection closed first.
        """
        if self._bytes_queued - leave > self.bytes_sent:
            if self.closed:
                raise ConnectionResetError("the connection is closed")
            waiter = self._loop.create_future()
            self._drained.append((self._bytes_queued - leave, waiter))
            await waiter

    def detach(self) -> None:
        """Copy the queued bytes, so that the caller may change the buffers before ``drain`` returns."""
        if self._queue:
            # Pieces of type bytes cannot change. They include the copies of an earlier call.
            self._queue = deque(
                piece if isinstance(piece.obj, bytes) else memoryview(bytes(piece)) for piece in self._queue
            )

    def close(self) -> None:
        """Close at once and drop all queued bytes. Safe to call again."""
        self._close(None)

    def abort(self) -> None:
        """Close with a reset, so that the kernel keeps no bytes for a lost peer. Safe to call again."""
        if not self.closed:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._close(None)

    def _readable(self) -> None:
        decoder = self._decoder
        try:
            for _ in range(self._reads_per_event):
                memory = decoder.wants()
                count = self._sock.recv_into(memory)
                if count == 0:
                    reason = "in the middle of a message" if decoder.mid_frame else None
                    self._close(
                        ConnectionResetError(f"the other side closed the connection {reason}") if reason else None
                    )
                    return
                self.bytes_received += count
                for frame in decoder.received(count):
                    if self._receiving_bytes:
                        self._stop_counting()
                    self._on_frame(frame)
                    if self.closed:
                        return
                if not self._reading:
                    return
                if not decoder.direct and (self._tls is None or not self._tls.pending()):
                    return
            if self._tls is not None and self._tls.pending():
                self._loop.call_soon(self._read_rest)
        except WOULD_BLOCK:
            return
        except (OSError, ProtocolError, FrameTooLarge) as error:
            self._close(error)
        except Exception as error:
            self._close(error)
            raise

    def _allocate_counted(self, size: int) -> Any:
        RECEIVING.take(size)
        self._receiving_bytes += size
        return self._allocate(size)

    def _stop_counting(self) -> None:
        RECEIVING.give_back(self._receiving_bytes)
        self._receiving_bytes = 0

    def _read_rest(self) -> None:
        """Read bytes that TLS has already decrypted. The event loop reports no event for these bytes."""
        if self._reading:
            self._readable()

    def _writable(self) -> None:
        queue = self._queue
        try:
            while queue:
                if self._tls is None:
                    pieces = [queue[index] for index in range(min(len(queue), MAX_PIECES))]
                    sent = self._sock.sendmsg(pieces)
                else:
                    sent = self._tls.send(queue[0][:ENCRYPT_BYTES])
                self.bytes_sent += sent
                while sent:
                    if sent >= len(queue[0]):
                        sent -= len(queue.popleft())
                    else:
                        queue[0] = queue[0][sent:]
                        sent = 0
                self._release_drained()
                if self._tls is not None and queue:
                    return  # a fast reader would keep this loop busy for the whole message; the next event continues
        except WOULD_BLOCK:
            return
        except OSError as error:
            self._close(error)
            return
        self._loop.remove_writer(self._sock.fileno())

    def _release_drained(self) -> None:
        while self._drained and self._drained[0][0] <= self.bytes_sent:
            _, waiter = self._drained.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _close(self, reason: BaseException | None) -> None:
        if self.closed:
            return
        self.closed, self._reading = True, False
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._stop_counting()
        self._queue.clear()
        waiters, self._drained = self._drained, deque()
        for _, waiter in waiters:
            if not waiter.done():
                waiter.set_exception(ConnectionResetError(str(reason or "the connection was closed")))
        # The owner, the decoder and this connection refer to each other. Without this cut their memory would wait for a
        # garbage collection.
        on_close, self._on_close, self._on_frame = self._on_close, _ignore, _ignore
        self._decoder.release()
        on_close(reason)


def _ignore(_: object) -> None:
    """Do nothing. This function replaces the callbacks of a connection that has ended."""


CODE_MISSING = "ddlf.rpc.code.CodeMissing"
ANSWERS = frozenset({Kind.RESULT, Kind.ERROR})
TAKE_TURNS = frozenset({"run", "run_method", "run_code", "call"})
"""A worker runs these commands one after another, in the order in which they were sent."""


Opener = Callable[[Callable[[Frame], None], Callable[[BaseException | None], None]], Connection]
"""Makes a connection from two callbacks. The first receives each frame, the second receives the reason for the end."""


class Owner(Protocol):
    """The object that owns a channel: it names the other side in errors and handles messages that answer no request.

    ``name`` appears in errors. ``spawn`` runs a coroutine in its own task. ``on_event`` receives events. ``on_end``
    reports the end of the channel; after it the owner must not refer to the channel. ``on_cancel`` reports a request
    whose caller no longer waits. ``error_of`` returns the error for requests that are open at the end.
    """

    @property
    def name(self) -> str: ...
    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> object: ...
    def on_event(self, frame: Frame) -> None: ...
    def on_end(self, channel: Channel) -> None: ...
    def on_cancel(self, channel: Channel, id: int) -> None: ...
    async def error_of(self, channel: Channel, reason: BaseException | None) -> DDLFError: ...


class Channel:
    """One connection and its open requests.

    Args:
        owner: The object that this channel belongs to.
        open: Makes the stream.
        ids: Numbers for requests, in increasing order.
        load_object: Loads results that are not plain data.
        dump_object: Writes arguments that are not plain data, for a channel without ``code``.
        code: Sends functions and objects as code; None if this side sends only data.

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
        dump_object: DumpObject = refuse_objects,
        code: CodeSender | None = None,
    ) -> None:
        self.pending: dict[int, asyncio.Future[Any]] = {}
        self.reason: BaseException | None = None
        self._hearing: dict[int, Callable[[dict[str, Any]], None]] = {}
        self._owner = owner
        self._ids = ids
        self._load_object = load_object
        self._code = code
        self._dump_object = code.dump if code is not None else dump_object
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self.stream = open(self._on_frame, self._on_close)

    async def call(self, request: Request, deadline: Deadline = NEVER) -> Any:
        """Send a request and return its result. If the worker has dropped code that was sent by name, send the request
        again in full.

        Raises:
            DDLFError: The request failed, or its method raised an error.
        """
        kind, value = await self._exchange(request, deadline)
        if kind == Kind.ERROR and self._code is not None and _code_is_missing(value):
            self._code.forget()
            kind, value = await self._exchange(request, deadline)
        if kind == Kind.ERROR:
            raise rebuild(value, worker=self._owner.name)
        return value

    async def _exchange(self, request: Request, deadline: Deadline) -> Any:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise self._other_loop_error()
        id = next(self._ids)
        dump = self._dump_object
        if request.pickle is not None and self._code is not None:
            dump = partial(self._code.dump, pickle=request.pickle)
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
                error.message += f", before {title_of(request)!r} had begun"
            raise
        except ConnectionResetError as error:  # the request could not be sent
            future.cancel()  # the end of the connection may also set an error on this future, which nobody would read
            loss = copy.copy(await self._owner.error_of(self, error))
            if isinstance(loss, RequestFailed):
                loss.may_have_run = False
            raise loss from None
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
            text = f"{title_of(request)!r} did not end within {deadline.timeout_s:g} s"
            future.set_exception(RequestTimeout(text, worker=self._owner.name))

    def _other_loop_error(self) -> WorkerLost:
        """Return the error for a call that was made on another event loop than the one of this connection."""
        owner, hint = (
            ("another process", "create a separate Cluster in each process")
            if os.getpid() != self._pid
            else ("another event loop", "connect and call inside one asyncio.run, or use ddlf.run")
        )
        return WorkerLost(f"its connection belongs to {owner}", hint=hint, worker=self._owner.name, may_have_run=False)

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
            return  # the caller of this request was cancelled or timed out
        try:
            value = loads(frame.buffers, self._load_object)
        except DDLFError as error:
            future.set_exception(error)
            if isinstance(error, ProtocolError):
                raise  # a worker that breaks the protocol once is not read again
            return
        future.set_result((frame.kind, value))

    def _hear(self, frame: Frame) -> None:
        """Pass a message of the worker about an open request, such as progress, to the caller of this request."""
        try:
            self._hearing[frame.id](loads(frame.buffers))
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ProtocolError(f"event {DOING!r} cannot be read ({type(error).__name__}: {error})") from None

    def _on_close(self, reason: BaseException | None) -> None:
        self.reason = reason
        self._owner.on_end(self)
        if self.pending:
            self._owner.spawn(self._fail_with_reason(reason))

    async def _fail_with_reason(self, reason: BaseException | None) -> None:
        self.fail(await self._owner.error_of(self, reason))

    def fail(self, error: DDLFError) -> None:
        """End every open request with a copy of ``error``. Copies are needed because a handler may add to its error."""
        pending, self.pending = self.pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(copy.copy(error))


def title_of(request: Request) -> str:
    """Return the name of a request in errors: the name of its method, if it has one, else its command."""
    if request.command == "call":
        return ".".join(map(str, request.args[1:3]))[:60]
    title = getattr(request.args[0], "__name__", request.args[0]) if request.args else request.command
    return str(title)[:60]


def _code_is_missing(facts: Any) -> bool:
    """Return whether a worker refused a request because it lacks code that was sent by name. ``facts`` may be any
    value.
    """
    try:
        return facts["chain"][0][0] == CODE_MISSING and facts["may_have_run"] is False
    except (LookupError, TypeError):
        return False
