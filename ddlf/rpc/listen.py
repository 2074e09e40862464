"""The listening socket and the worker's side of the handshake. Runs in the daemon and, for data connections, in the
executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any

from ddlf.errors import AuthError, ConfigError, ConnectError, DDLFError, ListenError, ProtocolError
from ddlf.rpc import tls
from ddlf.rpc.handshake import (
    HELLO,
    NO_CERTIFICATE,
    PREAMBLE,
    PROOF_BYTES,
    Hello,
    Verdict,
    WorkerHandshake,
    auth_key,
    key_id,
    short_answer,
    tls_follows,
)
from ddlf.rpc.stream import WOULD_BLOCK, ready, receive_exactly, send_all
from ddlf.rpc.tls import WorkerTLS

BACKLOG = 128
CLOSED = "closed during the handshake"
REFUSAL_DELAY_S = 0.5
"""Delay before the answer to a wrong proof, so that guessing is slow."""

_HTTP_BODY = (
    b"This is a DDLF worker's RPC port, it does not speak HTTP. Reach it with ddlf.Cluster.\n"
    b"'ddlf dashboard' says where the pages of your runs are.\n"
)
HTTP_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_HTTP_BODY), _HTTP_BODY)
)


def answer_http(sock: socket.socket) -> None:
    """Tell a browser, or another HTTP client, that this port does not speak HTTP."""
    with contextlib.suppress(OSError):
        sock.send(HTTP_ANSWER)
        sock.shutdown(socket.SHUT_WR)


def refusal(error: DDLFError | OSError, timeout_s: float) -> str:
    """Return the reason for the log why a connection was not served.

    Args:
        error: The error of its handshake.
        timeout_s: The limit of the handshake.
    """
    if isinstance(error, ProtocolError | AuthError):
        return error.message
    if isinstance(error, DDLFError):
        return str(error)
    return f"handshake timed out ({timeout_s:g} s)" if isinstance(error, TimeoutError) else CLOSED


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind a socket and listen.

    Args:
        host: An address of this machine, or a name of one.
        port: 1-65535, or 0 for any free port.

    Returns:
        The socket, non-blocking.

    Raises:
        ConfigError: ``host`` cannot be resolved.
        ListenError: The port is in use, or the address is not permitted or does not belong to this machine. The text
            says which.
    """
    host_and_port = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):  # a label that is not valid in a name raises UnicodeError
        raise ConfigError(f"--host {host!r} cannot be resolved", hint="give an address of this machine") from None
    sock = socket.socket(family, kind, protocol)
    try:
        # A restarted worker can bind its port again at once. Two daemons on one port remain impossible.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(
                f"port {port} on {host} is in use", hint="stop the program that uses it, or choose another with --port"
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise ListenError(
                f"{host} is not an address of this machine", hint="choose an address of this machine with --host"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise ListenError(
                f"cannot listen on {host_and_port}: permission denied", hint="ports below 1024 need root, try 9000"
            ) from None
        raise ListenError(f"cannot listen on {host_and_port}: {os.strerror(error.errno or 0)}") from None
    sock.setblocking(False)
    return sock


async def accepted(listener: socket.socket) -> tuple[socket.socket, tuple[Any, ...]]:
    """Return the next connection, non-blocking, and its address.

    If the task is cancelled, a connection that arrives meanwhile stays with the listener, which ends it.
    ``loop.sock_accept`` would leave it open.

    Raises:
        OSError: The connection cannot be accepted, because there are too few descriptors.
    """
    while True:
        try:
            sock, address = listener.accept()
        except WOULD_BLOCK:
            await ready(listener, to_send=False)
            continue
        sock.setblocking(False)
        return sock, address


def close_if_cancelled(sock: socket.socket, task: asyncio.Task[None]) -> None:
    """Close a socket whose task was cancelled before it ran. Called when the task is done, because such a task closes
    nothing itself.
    """
    if task.cancelled():
        sock.close()


async def answer(
    sock: socket.socket,
    preamble: bytes,
    tokens: tuple[bytes, ...],
    max_message_bytes: int,
    encryption: WorkerTLS | None = None,
    *,
    has_place: Callable[[], bool] = lambda: True,
    delay_s: float = REFUSAL_DELAY_S,
) -> tuple[socket.socket, Hello]:
    """Perform the worker's side of the handshake on a socket. The returned socket replaces it. On failure it is closed.

    Args:
        sock: A non-blocking socket. The caller has read the preamble and limits the time.
        preamble: The first 8 bytes, already checked; ``refusal_of_preamble`` returned nothing for them.
        tokens: Accepted tokens. The first one proves this side's identity.
        max_message_bytes: The largest message body that this side accepts.
        encryption: The worker's certificate and key for TLS; None if this worker speaks only plaintext.
        has_place: Returns whether one more connection may stay. Called after the client has proven its identity.
        delay_s: Delay before a refusal.

    Returns:
        The socket, ready for frames, and the client's hello.

    Raises:
        AuthError: The client does not have a token of this worker. The client received this answer.
        ConnectError: The worker accepts no more connections. The client received this answer.
        OSError: The connection ended.
        ProtocolError: The bytes are not a handshake.
    """
    try:
        certificate = NO_CERTIFICATE
        if tls_follows(preamble):
            if encryption is None:
                raise ProtocolError("the client wants TLS, but this port is plaintext")
            await send_all(sock, short_answer(tls=True))
            sock = encrypted = tls.begin_worker(sock, encryption)
            try:
                await tls.finish(encrypted)
            except AuthError:
                await asyncio.sleep(delay_s)  # without the delay the connection would close before the reason arrives
                raise
            certificate = encryption.certificate
        handshake = WorkerHandshake(tokens, max_message_bytes, certificate)
        hello, reply = handshake.answer(preamble + await receive_exactly(sock, HELLO.size - PREAMBLE.size))
        await send_all(sock, reply)
        try:
            proof = await receive_exactly(sock, PROOF_BYTES)
        except ConnectionResetError:
            if any(key_id(auth_key(token)) == hello.key_id for token in tokens):
                raise
            # The client saw from this side's proof that the tokens differ, and left. The log of this worker should say
            # so.
            raise AuthError("token mismatch: the client has another token") from None
        if not handshake.accepts(proof):
            await asyncio.sleep(delay_s)
            await send_all(sock, bytes([Verdict.REFUSED]))
            raise AuthError("token mismatch")
        if not has_place():
            await send_all(sock, bytes([Verdict.BUSY]))
            raise ConnectError("this worker accepts no more connections")
        await send_all(sock, bytes([Verdict.ACCEPTED]))
    except BaseException as error:
        sock.close()
        if isinstance(error, ssl.SSLError):
            raise tls.explained(error) from None
        raise
    return sock, hello


def refusal_of_preamble(sock: socket.socket, preamble: bytes, *, encrypts: bool, insecure_plaintext: bool) -> str:
    """Return why a client with a correct preamble cannot be served; empty when it can.

    Args:
        sock: The client's socket. The client's address decides whether plaintext is allowed.
        preamble: The first 8 bytes.
        encrypts: Whether this worker can speak TLS.
        insecure_plaintext: Whether it may serve other machines without TLS.
    """
    if tls_follows(preamble):
        return "" if encrypts else "the client wants TLS, but this port is plaintext"
    if insecure_plaintext or tls.is_local(sock):
        return ""
    return "the client does not encrypt, which other machines must do"
