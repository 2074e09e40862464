"""Certificates for tests, and connections that use TLS although both ends are on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import socket
import ssl
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ddlf.rpc import tls
from ddlf.rpc.dial import open_socket
from ddlf.rpc.listen import listening_socket
from ddlf.rpc.stream import WOULD_BLOCK, ready, receive_exactly, send_all
from ddlf.rpc.tls import TOKEN_ONLY, WorkerTLS, client_context, make_certificate, worker_tls
from tests.sockets import socket_pair

YEAR = datetime.timedelta(days=365)


class Authority:
    """An organisation that signs certificates.

    Args:
        folder: The folder for its files.
        name: The name of the organisation.
        ends_in: The time until its own certificate expires. A negative time makes an expired certificate.
    """

    def __init__(self, folder: Path, name: str = "ca", ends_in: datetime.timedelta = YEAR) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        certificate = self._signed(self._name, self._key, ends_in, x509.BasicConstraints(ca=True, path_length=None))
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, host: str = "127.0.0.1", ends_in: datetime.timedelta = YEAR) -> tuple[Path, Path]:
        """Make a certificate for an address, and its key; return both files."""
        key = ec.generate_private_key(ec.SECP256R1())
        owner = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._signed(
            owner, key, ends_in, x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        )
        files = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files[1].touch(0o600)
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    def _signed(self, owner: x509.Name, key: Any, ends_in: datetime.timedelta, extension: Any) -> x509.Certificate:
        end = datetime.datetime.now(datetime.UTC) + ends_in
        return (
            x509.CertificateBuilder(issuer_name=self._name, subject_name=owner, public_key=key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(end - 2 * YEAR)
            .not_valid_after(end)
            .add_extension(extension, critical=False)
            .sign(self._key, hashes.SHA256())
        )


@cache
def own_certificate() -> WorkerTLS:
    """Return the certificate that a worker makes for itself when it gets none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "certificate.pem"
        make_certificate(path)
        return worker_tls(path, TOKEN_ONLY)


async def encrypted_pair() -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Return two connected sockets, like ``socket_pair``, after the handshake of TLS."""
    left, right = socket_pair()
    client = tls.begin_client(left, client_context(TOKEN_ONLY), "")
    worker = tls.begin_worker(right, own_certificate())
    await asyncio.gather(tls.finish(client), tls.finish(worker))
    return client, worker


@contextlib.contextmanager
def far_apart() -> Iterator[None]:
    """Treat each connection that is made within this context as one to another machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tls, "is_local", lambda sock: False)
        yield


class Relay:
    """A man in the middle: it forwards the bytes of a master and of a worker, and records them in ``heard``.

    Args:
        port: The port of the worker.
        certificate: The relay's own certificate. It ends the master's TLS with it, and opens a second TLS session to the
            worker. With None it forwards the encrypted bytes unchanged.
        alter: A function that changes the bytes for the worker.
    """

    def __init__(self, port: int, certificate: WorkerTLS | None = None, alter: Any = lambda data: data) -> None:
        self._worker_port = port
        self._certificate = certificate
        self._alter = alter
        self.heard = bytearray()
        self._accepted: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._listener = listening_socket("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self._tasks.add(asyncio.create_task(self._accept()))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sock in self._accepted:  # a task that was cancelled before it began has not closed its socket
            sock.close()
        self._listener.close()

    async def _accept(self) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            self._accepted.append(sock)
            self._tasks.add(asyncio.create_task(self._meet(sock)))

    async def _meet(self, client: socket.socket) -> None:
        worker = await open_socket("127.0.0.1", self._worker_port)
        try:
            if self._certificate is not None:
                await send_all(worker, self._alter(await receive_exactly(client, 8)))
                await send_all(client, await receive_exactly(worker, 8))
                client = tls.begin_worker(client, self._certificate)
                worker = tls.begin_client(worker, client_context(TOKEN_ONLY), "")
                await asyncio.gather(tls.finish(client), tls.finish(worker))
            # Both tasks end before the sockets close. Otherwise the loop would watch a descriptor that a new socket may reuse.
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pass_on(client, worker, self._alter))
                ways.create_task(self._pass_on(worker, client, lambda data: data))
        finally:
            client.close()
            worker.close()

    async def _pass_on(self, source: socket.socket, sink: socket.socket, alter: Any) -> None:
        while True:
            try:
                data = source.recv(65536)
            except WOULD_BLOCK:
                await ready(source, to_send=False)
                continue
            if not data:
                raise ConnectionResetError("one side has left")
            self.heard += data
            await send_all(sink, alter(data))
