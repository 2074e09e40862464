"""Reach a worker: TCP, then the handshake. Runs on the master, and on a worker that calls another one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

from ddlf.errors import AuthError, ConnectError, ProtocolError, VersionError
from ddlf.wire.handshake import (
    HANDSHAKE_TIMEOUT_S,
    HELLO,
    PREAMBLE,
    PROOF_BYTES,
    ClientHandshake,
    Hello,
    Role,
    read_preamble,
)


async def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Read ``count`` bytes and not one more, so that what follows stays in the kernel for the frame decoder.

    Raises:
        ConnectionResetError: The other side closed first.
    """
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < count:
        chunk = await loop.sock_recv(sock, count - len(data))
        if not chunk:
            raise ConnectionResetError(f"closed after {len(data)} of {count} bytes")
        data += chunk
    return bytes(data)


async def open_socket(host: str, port: int) -> socket.socket:
    """Connect to the first address of ``host`` that answers.

    Raises:
        OSError: None did; the last reason.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            # A request must leave at once: Nagle's algorithm would hold it for the last one's acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    raise failure


async def shake_hands(sock: socket.socket, role: Role, token: bytes, max_message_bytes: int) -> Hello:
    """The client's side of the handshake on a connected socket.

    Returns:
        The worker's hello.
    """
    loop = asyncio.get_running_loop()
    handshake = ClientHandshake(role, token, max_message_bytes)
    await loop.sock_sendall(sock, handshake.hello)
    # Another program, or a worker of another version, may send less than a hello and wait: its first bytes tell.
    preamble = await receive_exactly(sock, PREAMBLE.size)
    read_preamble(preamble)
    rest = await receive_exactly(sock, HELLO.size - PREAMBLE.size + PROOF_BYTES)
    hello, proof = handshake.read_hello(preamble + rest)
    await loop.sock_sendall(sock, proof)
    handshake.read_verdict(await receive_exactly(sock, 1))
    return hello


async def dial(
    host: str, port: int, role: Role, token: bytes, *, max_message_bytes: int, timeout_s: float = 10.0
) -> tuple[socket.socket, Hello]:
    """Connect to a worker and prove to each other that both hold the token.

    Args:
        host: Name or address.
        port: Of the worker's daemon.
        role: What the connection is for.
        token: The shared secret.
        max_message_bytes: The largest message body this side accepts.
        timeout_s: For the TCP connection; the handshake has its own limit of 5 s.

    Returns:
        The socket, ready for frames, and the worker's hello.

    Raises:
        ConnectError: Nobody answers there, or it is no DDLF worker.
        AuthError: The worker holds another token.
        VersionError: It speaks another version of the protocol.
    """
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            sock = await open_socket(host, port)
    except TimeoutError:
        raise ConnectError(
            f"{where} does not answer within {timeout_s:g} s",
            hint="check the address, that the machine is on, and that a firewall lets the port through",
        ) from None
    except (socket.gaierror, UnicodeError) as error:  # a label that no name can have is a UnicodeError
        reason = error.strerror if isinstance(error, OSError) else "not a valid name"
        raise ConnectError(f"the name {host!r} cannot be resolved ({reason})", hint="check its spelling") from None
    except OSError as error:
        raise ConnectError(f"{where}: {_reason(error)}", hint=_advice(error, port)) from None
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            return sock, await shake_hands(sock, role, token, max_message_bytes)
    except BaseException as error:
        with contextlib.suppress(OSError):
            sock.close()
        if isinstance(error, AuthError | VersionError | ConnectError):
            error.message = f"{where}: {error.message}"
            error.hint = (
                error.hint or "copy the same token file to both machines (ddlf token show), or restart the worker"
            )
            raise
        if isinstance(error, ProtocolError):
            raise ConnectError(
                f"{where}: another program listens there, not a DDLF worker", hint="check the port"
            ) from None
        if isinstance(error, TimeoutError):
            raise ConnectError(
                f"{where}: connected, but no DDLF handshake within {HANDSHAKE_TIMEOUT_S:g} s",
                hint="another program listens there, or the worker is stopped or busy",
            ) from None
        if isinstance(error, OSError):
            raise ConnectError(
                f"{where}: connected, but the other side closed the connection during the handshake",
                hint="it is no DDLF worker, or one that runs another version",
            ) from None
        raise


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, nothing listens there"
    return (error.strerror or str(error)).lower()


def _advice(error: OSError, port: int) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"start the worker there with: ddlf-worker --port {port}"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "check the address and the network"
    return "check the address"
