"""Exact reads and writes during a handshake, on a plain or an encrypted socket. Runs on both sides.

asyncio's ``sock_recv`` and ``sock_sendall`` refuse encrypted sockets, and a transport would read more than was asked for: what follows the
handshake belongs to the frame decoder.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a non-blocking socket raises when it cannot go on now. The last two are kinds of OSError too: catch this first."""


async def ready(sock: socket.socket, *, to_send: bool) -> None:
    """Wait until the socket has room to send, or else bytes to read."""
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
    """Read ``count`` bytes and not one more, so that what follows stays for the frame decoder.

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
    """Send all bytes; a handshake's are few, so they hardly ever wait.

    Raises:
        OSError: The connection ended.
    """
    while data:
        try:
            # Not more than before after a wait: OpenSSL wants the same bytes again.
            data = data[sock.send(data) :]
        except WOULD_BLOCK as error:
            await ready(sock, to_send=not isinstance(error, ssl.SSLWantReadError))
