"""One connection after its handshake: it sends and receives frames. Runs on both sides.

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
"""Most pieces to give to the kernel in one call. Linux accepts 1,024."""
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
        self._receiving_bytes = 0  # bytes of the arriving frame that have their own memory
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
        """Read again after ``pause_reading``."""
        if not self._reading and not self.closed:
            self._reading = True
            self._loop.add_reader(self._sock.fileno(), self._readable)
            if self._tls is not None and self._tls.pending():
                self._loop.call_soon(self._read_rest)

    def pause_reading(self) -> None:
        """Leave incoming bytes to the kernel, so that the other side has to wait."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())

    @property
    def queued_bytes(self) -> int:
        """The number of queued bytes that the kernel has not accepted yet."""
        return self._bytes_queued - self.bytes_sent

    @property
    def mid_frame(self) -> bool:
        """Whether a frame has arrived only in part."""
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
        """Read bytes that TLS has already decrypted. The socket has no event for them."""
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
        on_close, self._on_close, self._on_frame = self._on_close, _ended, _ended
        self._decoder.release()
        on_close(reason)


def _ended(_: object) -> None:
    """Replace the callbacks of a connection that has ended."""
