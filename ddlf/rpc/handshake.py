"""Who is there: the first 201 bytes of a connection, before any parser. Pure; runs on both sides.

Fixed-size structs and one HMAC each way. The token is never sent. Neither msgpack nor pickle is imported here, so nothing of them can be
reached by a peer that has not proven that it holds the token.

    client -> worker   64 bytes   hello: preamble (8), largest message accepted (8), key id (16), nonce (32)
    worker -> client   96 bytes   hello of the same form, then the worker's proof (32)
    client -> worker   32 bytes   the client's proof
    worker -> client    1 byte    verdict

A proof is ``HMAC-SHA256(key, label + client's hello + worker's hello + certificate hash)`` with the side in the label, so that a proof cannot be
reflected; both nonces are fresh, so that it cannot be replayed; both hellos are covered, so that none of their fields can be altered. The
worker proves first: a client never shows anything made with its token to somebody who does not hold it.

The preamble is the first 8 bytes. A daemon reads only them to route the socket. They precede TLS, when their flag says that it follows; the
proofs cover them, so the flag cannot be taken out on the way.
Before TLS begins the worker says a preamble of its own, which promises nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from enum import IntEnum

from ddlf.errors import AuthError, ConnectError, ProtocolError, VersionError

MAGIC = b"DDLF"
VERSION = (1, 0)
"""Major and minor version of the protocol. The majors must be equal; a higher minor only adds."""

PREAMBLE = struct.Struct("<4sBBBB")  # magic, major, minor, role, flags
HELLO = struct.Struct("<8sQ16s32s")  # preamble, largest message accepted in bytes, key id, nonce
PROOF_BYTES = 32
HANDSHAKE_TIMEOUT_S = 5.0
"""The whole handshake must end within this time, not each of its reads: a peer that drips bytes is cut all the same."""

NO_CERTIFICATE = bytes(32)
FLAG_TLS = 0x01


class Role(IntEnum):
    """What a connection is for."""

    CONTROL = 1  # to the daemon: ping, status, interrupt, shut down
    DATA = 2  # to the executor: everything that runs user code or moves arrays


class Verdict(IntEnum):
    """The byte that ends a handshake. Every failed authentication gives the same one."""

    ACCEPTED = 1
    REFUSED = 2
    BUSY = 3


@dataclass(frozen=True, slots=True)
class Hello:
    """One side's opening.

    Args:
        role: What the connection is for.
        nonce: 32 fresh random bytes.
        max_message_bytes: The largest message body this side accepts.
        key_id: Names the token without giving it away, so that a worker that holds two while one replaces the other
            proves with the right one.
        flags: Bits of the preamble; ``FLAG_TLS`` says that TLS follows it.
        version: Major and minor version of the protocol.
    """

    role: Role
    nonce: bytes
    max_message_bytes: int
    key_id: bytes = bytes(16)
    flags: int = 0
    version: tuple[int, int] = VERSION

    def preamble(self) -> bytes:
        """The first 8 bytes."""
        return PREAMBLE.pack(MAGIC, *self.version, self.role, self.flags)

    def encode(self) -> bytes:
        """All 64 bytes."""
        return HELLO.pack(self.preamble(), self.max_message_bytes, self.key_id, self.nonce)


def new_hello(role: Role, max_message_bytes: int, key: bytes, flags: int = 0) -> Hello:
    """Make a hello with a fresh nonce."""
    return Hello(role, os.urandom(32), max_message_bytes, key_id(key), flags)


def short_answer(*, tls: bool = False) -> bytes:
    """The worker's own preamble: before TLS, and for a client whose preamble does not suit it, as the last it hears.

    It is not protected, so nothing is weakened because of it.
    """
    return PREAMBLE.pack(MAGIC, *VERSION, Role.CONTROL, FLAG_TLS if tls else 0)


def tls_follows(preamble: bytes) -> bool:
    """Whether the flag for TLS is set in a preamble that ``read_preamble`` has checked."""
    return bool(preamble[-1] & FLAG_TLS)


def read_preamble(data: bytes) -> Role:
    """Check the other side's first 8 bytes and return what the connection is for.

    Raises:
        ProtocolError: They are not a preamble; the text says what they look like.
        VersionError: The other side speaks another major version.
    """
    magic, major, minor, role, flags = PREAMBLE.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"not a DDLF client ({_looks_like(data)})")
    if major != VERSION[0]:
        raise VersionError(
            f"the other side speaks protocol {major}.{minor}, this side {VERSION[0]}.{VERSION[1]}",
            hint="install the same version of ddlf on both",
        )
    if flags & ~FLAG_TLS:
        raise ProtocolError(f"unknown flags {flags:#04x} in the preamble")
    try:
        return Role(role)
    except ValueError:
        raise ProtocolError(f"unknown role {role} in the preamble") from None


def _looks_like(data: bytes) -> str:
    if is_http(data) or data.startswith(b"HTTP/"):
        return "looks like HTTP"
    if data.startswith((b"\x16\x03", b"\x15\x03")):
        return "looks like TLS"
    if data.startswith(b"SSH-"):
        return "looks like SSH"
    return f"first bytes {data[:8].hex(' ')}"


def is_http(data: bytes) -> bool:
    """Whether a client's first bytes are the start of an HTTP request."""
    return data.startswith((b"GET ", b"POST ", b"PUT ", b"HEAD ", b"OPTIONS", b"DELETE ", b"PATCH ", b"CONNECT"))


def decode_hello(data: bytes) -> Hello:
    """Read 64 bytes.

    Raises:
        ProtocolError: Wrong magic, role or flags.
        VersionError: Another major version.
    """
    preamble, max_message_bytes, key_name, nonce = HELLO.unpack(data)
    role = read_preamble(preamble)
    _, major, minor, _, flags = PREAMBLE.unpack(preamble)
    return Hello(role, nonce, max_message_bytes, key_name, flags, (major, minor))


def auth_key(token: bytes) -> bytes:
    """The HMAC key made from a token: never the token itself, or the key of a later protocol."""
    return hmac.digest(token, b"ddlf auth key v1", hashlib.sha256)


def key_id(key: bytes) -> bytes:
    """The 16 bytes that name a key on the wire."""
    return hmac.digest(key, b"ddlf key id", hashlib.sha256)[:16]


def proof(key: bytes, side: str, client: bytes, worker: bytes, certificate: bytes = NO_CERTIFICATE) -> bytes:
    """The 32 bytes by which one side shows that it holds the token.

    Args:
        key: ``auth_key`` of the token.
        side: ``"C"`` for the client's proof, ``"S"`` for the worker's.
        client: The client's 64 bytes of hello, as they arrived.
        worker: The worker's, as they arrived.
        certificate: SHA-256 of the worker's certificate in DER; zeros without TLS.
    """
    return hmac.digest(key, f"ddlf/1 {side}".encode() + client + worker + certificate, hashlib.sha256)


class ClientHandshake:
    """The dialling side. Send ``hello``, then give what arrives to ``read_hello`` and ``read_verdict``."""

    def __init__(self, role: Role, token: bytes, max_message_bytes: int, *, tls: bool = False) -> None:
        self._key = auth_key(token)
        self._mine = new_hello(role, max_message_bytes, self._key, FLAG_TLS if tls else 0).encode()
        self.hello = self._mine

    def read_hello(self, data: bytes, certificate: bytes = NO_CERTIFICATE) -> tuple[Hello, bytes]:
        """Check the worker's 96 bytes.

        Args:
            data: The bytes.
            certificate: SHA-256 of the certificate that this side saw.

        Returns:
            The worker's hello, and this side's proof to send.

        Raises:
            AuthError: The worker does not hold the same token, or the bytes were altered on the way.
            ProtocolError: It is not a DDLF worker.
        """
        theirs, given = data[: HELLO.size], data[HELLO.size :]
        hello = decode_hello(theirs)
        if not hmac.compare_digest(given, proof(self._key, "S", self._mine, theirs, certificate)):
            if hello.key_id == key_id(self._key):
                raise AuthError(
                    "the handshake was altered on the way, although both sides name the same token",
                    hint="somebody may be in between: check the address, the name service and the network",
                )
            raise AuthError("it holds another token than this side")
        return hello, proof(self._key, "C", self._mine, theirs, certificate)

    @staticmethod
    def read_verdict(data: bytes) -> None:
        """Check the last byte.

        Raises:
            AuthError: The worker refused the proof.
            ConnectError: The worker has no place for another connection.
        """
        if data == bytes([Verdict.ACCEPTED]):
            return
        if data == bytes([Verdict.BUSY]):
            raise ConnectError("the worker has no place for another connection", hint="close other masters")
        raise AuthError("the worker refused this side's token")


class WorkerHandshake:
    """The listening side. Give the client's 64 bytes to ``answer``, send the result, then give 32 bytes to ``accepts``.

    Args:
        tokens: Accepted ones, the one to prove with first.
        max_message_bytes: The largest message body this side accepts.
        certificate: SHA-256 of this side's certificate; zeros without TLS.
    """

    def __init__(self, tokens: tuple[bytes, ...], max_message_bytes: int, certificate: bytes = NO_CERTIFICATE) -> None:
        self._keys = [auth_key(token) for token in tokens]
        self._certificate = certificate
        self._max_message_bytes = max_message_bytes
        self._client = self._mine = b""

    def answer(self, data: bytes) -> tuple[Hello, bytes]:
        """Check the client's 64 bytes.

        Returns:
            The client's hello, and the 96 bytes to send.
        """
        client = decode_hello(data)
        # A client with none of the tokens is answered all the same: it finds out itself, and others learn nothing.
        key = next((key for key in self._keys if key_id(key) == client.key_id), self._keys[0])
        self._client = data
        self._mine = new_hello(client.role, self._max_message_bytes, key, client.flags).encode()
        return client, self._mine + proof(key, "S", self._client, self._mine, self._certificate)

    def accepts(self, given: bytes) -> bool:
        """Whether the client's proof was made with one of the tokens. Takes the same time whatever the answer."""
        wanted = [proof(key, "C", self._client, self._mine, self._certificate) for key in self._keys]
        matches = [hmac.compare_digest(given, one) for one in wanted]
        return any(matches)
