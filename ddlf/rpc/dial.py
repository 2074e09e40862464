"""Connects to a worker: TCP, then the handshake. Runs on the master, and on a worker that calls another worker."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from ddlf.errors import AuthError, ConnectError, ProtocolError, VersionError
from ddlf.rpc import tls
from ddlf.rpc.handshake import (
    HANDSHAKE_TIMEOUT_S,
    HELLO,
    NO_CERTIFICATE,
    PREAMBLE,
    PROOF_BYTES,
    ClientHandshake,
    Hello,
    Role,
    read_preamble,
    tls_follows,
)
from ddlf.rpc.stream import receive_exactly, send_all
from ddlf.rpc.tls import TOKEN_ONLY, Security
from ddlf.rpc.tokens import is_automatic


class EncryptionWanted(Exception):
    """The worker does not accept plaintext from this side's address, although this side connected to its own machine.

    This happens with a forwarded port.
    """


async def open_socket(host: str, port: int) -> socket.socket:
    """Open a TCP connection to the first address of ``host`` that answers, and return the socket.

    Raises:
        OSError: No address answered. The error is the last reason.
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
            # A request must leave at once. Nagle's algorithm would hold it back until the previous one is acknowledged.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    raise failure


async def shake_hands(
    sock: socket.socket,
    role: Role,
    token: bytes,
    max_message_bytes: int,
    context: ssl.SSLContext | None = None,
    host: str = "",
) -> tuple[socket.socket, Hello]:
    """Perform the client's side of the handshake on a connected socket. The returned socket replaces it. On failure it
    is closed.

    Args:
        sock: A connected, non-blocking socket.
        role: The purpose of the connection.
        token: The shared secret.
        max_message_bytes: The largest message body that this side accepts.
        context: The context for TLS; None for plaintext.
        host: The host that the certificate must name, if ``context`` checks names.

    Returns:
        The socket, and the worker's hello.

    Raises:
        EncryptionWanted: The worker does not accept plaintext from this address.
    """
    handshake = ClientHandshake(role, token, max_message_bytes, tls=context is not None)
    certificate = NO_CERTIFICATE
    unsent = handshake.hello
    try:
        if context is not None:
            await send_all(sock, unsent[: PREAMBLE.size])
            unsent = unsent[PREAMBLE.size :]
            # First read the worker's answer. A worker without encryption, or another program, answers in plaintext.
            preamble = await receive_exactly(sock, PREAMBLE.size)
            read_preamble(preamble)
            if not tls_follows(preamble):
                raise ConnectError(
                    "the worker does not encrypt connections from this address, but this side requires encryption",
                    hint="start it with a token and without --insecure-plaintext and --host 127.0.0.1; "
                    "on a private link, set insecure_plaintext on this side too",
                )
            sock = encrypted = tls.begin_client(sock, context, host)
            await tls.finish(encrypted)
            certificate = tls.certificate_seen(encrypted)
        await send_all(sock, unsent)
        # Another program, or a worker of another version, may send less than a hello and wait. Its first bytes identify
        # it.
        preamble = await receive_exactly(sock, PREAMBLE.size)
        read_preamble(preamble)
        if context is None and tls_follows(preamble):
            raise EncryptionWanted
        remainder = await receive_exactly(sock, HELLO.size - PREAMBLE.size + PROOF_BYTES)
        hello, proof = handshake.read_hello(preamble + remainder, certificate)
        await send_all(sock, proof)
        handshake.read_verdict(await receive_exactly(sock, 1))
    except BaseException as error:
        sock.close()
        if isinstance(error, ssl.SSLError):
            raise tls.explained(error) from None
        raise
    return sock, hello


async def dial(
    host: str,
    port: int,
    role: Role,
    token: bytes,
    *,
    max_message_bytes: int,
    timeout_s: float = 10.0,
    security: Security = TOKEN_ONLY,
    take_offer: Callable[[float], Awaitable[socket.socket]] | None = None,
    options: Sequence[str] = (),
) -> tuple[socket.socket, Hello]:
    """Connect to a worker. Both sides prove to each other that they have the token.

    A connection to another machine is encrypted and never falls back to plaintext.

    Args:
        host: Name or address.
        port: Port of the worker's daemon.
        role: The purpose of the connection.
        token: The shared secret.
        max_message_bytes: The largest message body that this side accepts.
        timeout_s: Limit for the TCP connection. The handshake has its own limit of 5 s.
        security: Certificates, and whether to encrypt.
        take_offer: Returns a connection that the worker has opened, within some seconds. None connects to ``host``.
        options: More options that the start of this worker needs, for messages.

    Returns:
        The socket, ready for frames, and the worker's hello.

    Raises:
        ConnectError: Nothing answers at this address, or the program there is not a DDLF worker.
        AuthError: The worker has another token, or a certificate that is not accepted.
        VersionError: The worker speaks another version of the protocol.
        ConfigError: A certificate of this side cannot be used.
    """
    reach = take_offer or partial(connect_to, host, port, options=options)
    sock = await reach(timeout_s)
    is_encrypted = not (security.insecure_plaintext or tls.is_local(sock))
    while True:
        address = f"{host}:{port}" if port else host
        try:
            context = tls.client_context(security) if is_encrypted else None
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                certificate_name = (
                    host if take_offer is None else sock.getpeername()[0]
                )  # which a certificate must name
                return await shake_hands(sock, role, token, max_message_bytes, context, certificate_name)
        except EncryptionWanted:
            if security.insecure_plaintext:
                raise ConnectError(
                    f"{address}: the worker demands encryption, which is switched off on this side",
                    hint="leave out insecure_plaintext",
                ) from None
        except BaseException as error:
            sock.close()
            _explain(error, address, token)
            raise
        # A connection may change only from plaintext to encryption, and only if it began on this machine.
        is_encrypted = True
        sock = await reach(timeout_s)


async def connect_to(host: str, port: int, timeout_s: float, options: Sequence[str] = ()) -> socket.socket:
    """Return a socket that is connected to this host and port. The options are those of ``dial``.

    Raises:
        ConnectError: Nothing answers there. The hint is for a master that dials a worker.
    """
    address = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            return await open_socket(host, port)
    except TimeoutError:
        raise ConnectError(
            f"{address} does not answer within {timeout_s:g} s",
            hint="check the address, that the machine is on, and that no firewall blocks the port",
        ) from None
    except (socket.gaierror, UnicodeError) as error:  # a label that is not valid in a name raises UnicodeError
        reason = error.strerror if isinstance(error, OSError) else "not a valid name"
        raise ConnectError(f"the name {host!r} cannot be resolved ({reason})", hint="check its spelling") from None
    except OSError as error:
        raise ConnectError(f"{address}: {_reason(error)}", hint=_advice(error, port, options)) from None


def _explain(error: BaseException, address: str, token: bytes) -> None:
    """Raise an error with advice for a failed handshake. Return if there is no advice to give."""
    if isinstance(error, AuthError) and not error.hint and is_automatic(token):
        error.message = "the worker was started with a token or by another user, but this side has no token"
        error.hint = "use the worker's token: --token-file FILE, or copy it to the place that ddlf token show prints"
    if isinstance(error, AuthError | VersionError | ConnectError):
        error.message = f"{address}: {error.message}"
        error.hint = error.hint or "copy the same token file to both machines (ddlf token show), or restart the worker"
        raise
    if isinstance(error, ProtocolError):
        raise ConnectError(
            f"{address}: another program listens there, not a DDLF worker", hint="check the port"
        ) from None
    if isinstance(error, TimeoutError):
        raise ConnectError(
            f"{address}: connected, but no DDLF handshake within {HANDSHAKE_TIMEOUT_S:g} s",
            hint="another program listens there, or the worker is suspended or busy",
        ) from None
    if isinstance(error, OSError):
        raise ConnectError(
            f"{address}: connected, but the other side closed the connection during the handshake",
            hint="it is not a DDLF worker, or it runs another version",
        ) from None


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, nothing listens there"
    return (error.strerror or str(error)).lower()


def _advice(error: OSError, port: int, options: Sequence[str]) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"start the worker there with: {' '.join(['ddlf-worker', '--port', str(port), *options])}"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "check the address and the network"
    return "check the address"
