"""Servers of the peers for ``benchmarks.rpc``. ``python -m benchmarks.echo KIND`` starts one and prints its port."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from typing import Any

LENGTH = struct.Struct("<Q")


def listen() -> socket.socket:
    """Return a listening socket on loopback, and print its port for the parent process."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    return listener


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill ``view`` from a blocking socket."""
    while view:
        count = sock.recv_into(view)
        if count == 0:
            sys.exit(0)
        view = view[count:]


def raw() -> None:
    """Echo messages of a length and as many bytes, on a blocking socket, with one reused buffer: the minimum in Python."""
    sock, _ = listen().accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(LENGTH.size)
    buffer = memoryview(bytearray(1))
    while True:
        receive_into(sock, memoryview(head))
        (length,) = LENGTH.unpack(head)
        if len(buffer) < length:
            buffer = memoryview(bytearray(length))
        receive_into(sock, buffer[:length])
        send(sock, head, buffer[:length])


def send(sock: socket.socket, head: Any, body: Any) -> None:
    """Receive with one system call for a small message, and as few as possible for a large one."""
    if len(body) <= 64 * 1024:
        sock.sendall(b"".join((head, body)))
    else:
        sock.sendall(head)
        sock.sendall(body)


def streams() -> None:
    """Echo the same messages with asyncio's streams, like in the documentation of asyncio."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readexactly(LENGTH.size)
                body = await reader.readexactly(LENGTH.unpack(head)[0])
                writer.write(head + body if len(body) <= 64 * 1024 else head)
                if len(body) > 64 * 1024:
                    writer.write(body)
                await writer.drain()
        except asyncio.IncompleteReadError:
            asyncio.get_running_loop().stop()

    async def run() -> None:
        server = await asyncio.start_server(serve, sock=listen())
        await server.serve_forever()

    try:
        asyncio.run(run())
    except RuntimeError:  # stopped from inside
        sys.exit(0)


def grpc() -> None:
    """Serve a unary method that returns its bytes, without protobuf, which would only add costs."""
    import grpc

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def run() -> None:
        server = grpc.aio.server(options=GRPC_OPTIONS)
        handler = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"echo": handler}),))
        print(server.add_insecure_port("127.0.0.1:0"), flush=True)
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


GRPC_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

if __name__ == "__main__":
    {"raw": raw, "streams": streams, "grpc": grpc}[sys.argv[1]]()
