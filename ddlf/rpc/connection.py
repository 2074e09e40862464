"""One connection after its handshake: frames out, frames in. Runs on both sides.

It drives a non-blocking socket with ``loop.add_reader`` and ``add_writer`` instead of an asyncio transport, for three reasons that
``benchmarks/rpc.py`` measures: arrays are received into their own memory, arrays are sent from their own memory (asyncio's transports copy what the
kernel does not take at once), and a small message costs one callback and no task.

Frames are given to a callback as they come. Sending is explicit about backpressure: ``send`` queues and tries at once, ``drain`` waits until the
kernel has taken all that was queued, ``post`` does both.

An encrypted socket differs in three ways. It sends one piece at a time, of which it may keep the place: after a wait it must be offered the same
bytes again. It reads a record at a time (16 KiB), of which it may hold a rest that the kernel knows nothing of (``pending``). And it may say that it
would block with errors of its own. It closes without TLS's farewell, since frames have lengths: an end inside one is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from ddlf.errors import FrameTooLarge, ProtocolError
from ddlf.rpc.admission import RECEIVING
from ddlf.rpc.frame import Buffer, Frame, FrameDecoder, Limits, encode_frame
from ddlf.rpc.stream import WOULD_BLOCK

MAX_PIECES = 512
"""Pieces given to the kernel in one call; Linux takes 1,024."""
READS_PER_EVENT = 16
"""Large buffers are read this often before other work of the loop gets its turn: 16 reads of some 1 MB at most (seen with strace)."""
RECORDS_PER_EVENT = 128
"""The same for an encrypted connection, whose reads are records of 16 KiB: 2 MiB, some 5 ms."""
ENCRYPT_BYTES = 256 * 1024
"""Encrypted in one call. OpenSSL says how far it came only when all of it is sent, so this is also the grain of ``bytes_sent``."""

_RESET = struct.pack("ii", 1, 0)
"""For SO_LINGER: on, for no time."""


class Connection:
    """A framed, bidirectional stream.

    Args:
        sock: Connected, authenticated, non-blocking. The connection owns it.
        on_frame: Called with each frame. What it raises ends the connection.
        on_close: Called once with None or the reason, after the last frame.
        limits: What this side accepts.
        peer_limits: What the other side accepts.
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
        self._receiving_bytes = 0  # of the frame that comes now, in memory of its own
        self._loop = asyncio.get_running_loop()
        self._queue: deque[memoryview] = deque()
        self._bytes_queued = 0  # since the connection began, with those that were sent
        self._drained: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._reading = False
        self.closed = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.resume_reading()

    def resume_reading(self) -> None:
        """Read again after ``pause_reading``."""
        if not self._reading and not self.closed:
            self._reading = True
            self._loop.add_reader(self._sock.fileno(), self._readable)
            if self._tls is not None and self._tls.pending():
                self._loop.call_soon(self._read_rest)

    def pause_reading(self) -> None:
        """Leave what comes to the kernel, which makes the other side wait."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())

    @property
    def queued_bytes(self) -> int:
        """What the kernel has not taken yet."""
        return self._bytes_queued - self.bytes_sent

    @property
    def mid_frame(self) -> bool:
        """Whether a frame has begun to come and not ended."""
        return self._decoder.mid_frame

    def send(self, kind: int, id: int, name: str, buffers: list[Buffer], extra: float | None = None) -> None:
        """Queue a frame and hand the kernel what it takes now. The buffers must not change until ``drain`` returns
        or ``detach`` was called.

        Raises:
            FrameTooLarge: Nothing was queued.
            ConnectionError: The connection is closed.
        """
        if self.closed:
            raise ConnectionResetError("the connection is closed")
        pieces = encode_frame(kind, id, name, buffers, extra, limits=self._peer_limits)
        if not self._queue and len(pieces) == 1:
            # The common small message: one system call, no bookkeeping.
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
        """Wait until the kernel has taken everything queued so far, or all but the last ``leave`` bytes of it.

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
        """Copy what the kernel has not taken yet, so that the buffers may change before ``drain`` returns."""
        if self._queue:
            # What is bytes cannot change: also what was copied here before.
            self._queue = deque(
                piece if isinstance(piece.obj, bytes) else memoryview(bytes(piece)) for piece in self._queue
            )

    def close(self) -> None:
        """Close at once; what is queued is dropped. Safe to call again."""
        self._close(None)

    def abort(self) -> None:
        """Close with a reset, so that the kernel keeps nothing for a peer that is gone. Safe to call again."""
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
        """Read what TLS has decrypted already: no event of the socket tells of it."""
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
                    return  # a fast reader would keep this loop busy for the whole message; the next event goes on
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
        # Its owner, the decoder and this refer to each other: without a cut the memory would wait for a garbage collection.
        on_close, self._on_close, self._on_frame = self._on_close, _ended, _ended
        self._decoder.release()
        on_close(reason)


def _ended(_: object) -> None:
    """Takes the place of the callbacks of a connection that ended."""
