"""Reads and writes an exact number of bytes during a handshake, on a plain or an encrypted socket. Runs on both sides.

asyncio's ``sock_recv`` and ``sock_sendall`` refuse encrypted sockets. A transport would read too many bytes, and the
bytes after the handshake belong to the frame decoder.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""The exceptions of a non-blocking socket that has to wait. The last two are subclasses of OSError, so catch these
first.
"""


async def ready(sock: socket.socket, *, to_send: bool) -> None:
    """Wait until the socket has space to send or, with ``to_send=False``, bytes to read."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    watch, unwatch = (loop.add_writer, loop.remove_writer) if to_send else (loop.add_reader, loop.remove_reader)
    descriptor = sock.fileno()
    watch(descriptor, lambda: None if future.done() else future.set_result(None))
    try:
        await future
    finally:
        unwatch(descriptor)


async def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes. Later bytes stay for the frame decoder.

    Raises:
        ConnectionResetError: The other side closed first.
    """
    data = bytearray()
    while len(data) < count:
        try:
            chunk = sock.recv(count - len(data))
        except WOULD_BLOCK as error:
            await ready(sock, to_send=isinstance(error, ssl.SSLWantWriteError))
            continue
        if not chunk:
            raise ConnectionResetError(f"closed after {len(data)} of {count} bytes")
        data += chunk
    return bytes(data)


async def send_all(sock: socket.socket, data: bytes) -> None:
    """Send all bytes. A handshake has few bytes, so this rarely waits.

    Raises:
        OSError: The connection ended.
    """
    while data:
        try:
            # After a wait, send the same bytes again. OpenSSL requires it.
            data = data[sock.send(data) :]
        except WOULD_BLOCK as error:
            await ready(sock, to_send=not isinstance(error, ssl.SSLWantReadError))
