"""Authenticates both sides in the first 201 bytes of a connection, before any parser runs. No I/O; used on both sides.

It uses fixed-size structs and one HMAC in each direction, and never sends the token. It imports neither msgpack nor
pickle, so a peer cannot reach them before it has proven that it has the token.

    client -> worker   64 bytes   hello: preamble (8), largest message accepted (8), key id (16), nonce (32)
    worker -> client   96 bytes   hello of the same form, then the worker's proof (32)
    client -> worker   32 bytes   the client's proof
    worker -> client    1 byte    verdict

A proof is ``HMAC-SHA256(key, label + client's hello + worker's hello + certificate hash)``. The label names the side,
so a proof cannot be reflected. Both nonces are fresh, so it cannot be replayed. It covers both hellos, so none of their
fields can be altered. The worker proves first: a client never shows anything made with its token to a peer without the
token.

The preamble is the first 8 bytes. A daemon reads only the preamble to route the socket. The preamble precedes TLS, and
its flag announces TLS. The proofs cover the preamble, so the flag cannot be removed on the way. Before TLS begins, the
worker sends its own preamble, which is not protected.
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
VERSION = (1, 1)
"""Major and minor version of the protocol. Both sides need the same major version. A higher minor version only adds
features.
"""

PREAMBLE = struct.Struct("<4sBBBB")  # magic, major, minor, role, flags
HELLO = struct.Struct("<8sQ16s32s")  # preamble, largest message accepted in bytes, key id, nonce
PROOF_BYTES = 32
HANDSHAKE_TIMEOUT_S = 5.0
"""Limit for the whole handshake, not for each read. A peer that sends its bytes very slowly is also cut off."""

NO_CERTIFICATE = bytes(32)
FLAG_TLS = 0x01


class Role(IntEnum):
    """The purpose of a connection: ``CONTROL`` to the daemon, ``DATA`` to the executor, or ``JOIN`` to a master's gate."""

    CONTROL = 1  # to the daemon: ping, status, interrupt, shut down
    DATA = 2  # to the executor: everything that runs user code or moves arrays
    JOIN = 3  # to a master's gate: a worker offers a connection, see ``ddlf.rpc.join``


class Verdict(IntEnum):
    """The byte that ends a handshake. Every failed authentication gives the same byte."""

    ACCEPTED = 1
    REFUSED = 2
    BUSY = 3


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of one side.

    Args:
        role: The purpose of the connection.
        nonce: 32 fresh random bytes.
        max_message_bytes: The largest message body that this side accepts.
        key_id: Identifies the token without revealing it. A worker with two tokens, during a replacement, uses the
            right one for its proof.
        flags: Bits of the preamble. ``FLAG_TLS`` announces TLS.
        version: Major and minor version of the protocol.
    """

    role: Role
    nonce: bytes
    max_message_bytes: int
    key_id: bytes = bytes(16)
    flags: int = 0
    version: tuple[int, int] = VERSION

    def preamble(self) -> bytes:
        """Return the first 8 bytes of this hello, which say protocol version, role and flags."""
        return PREAMBLE.pack(MAGIC, *self.version, self.role, self.flags)

    def encode(self) -> bytes:
        """Return this hello as the 64 bytes to send."""
        return HELLO.pack(self.preamble(), self.max_message_bytes, self.key_id, self.nonce)


def new_hello(role: Role, max_message_bytes: int, key: bytes, flags: int = 0) -> Hello:
    """Return a new hello, the first message of one side, with a fresh random nonce."""
    return Hello(role, os.urandom(32), max_message_bytes, key_id(key), flags)


def short_answer(*, tls: bool = False) -> bytes:
    """Return the worker's own preamble. The worker sends it before TLS, and as the only answer to a client with an
    unsuitable preamble.

    It is not protected, and no decision that weakens security depends on it.
    """
    return PREAMBLE.pack(MAGIC, *VERSION, Role.CONTROL, FLAG_TLS if tls else 0)


def tls_follows(preamble: bytes) -> bool:
    """Return whether the TLS flag is set in a preamble that ``read_preamble`` has checked."""
    return bool(preamble[-1] & FLAG_TLS)


def read_preamble(data: bytes) -> Role:
    """Check the other side's first 8 bytes and return the purpose of the connection.

    Raises:
        ProtocolError: The bytes are not a preamble. The text names a protocol that they resemble.
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
    """Return whether a client's first bytes are the start of an HTTP request."""
    return data.startswith((b"GET ", b"POST ", b"PUT ", b"HEAD ", b"OPTIONS", b"DELETE ", b"PATCH ", b"CONNECT"))


def decode_hello(data: bytes) -> Hello:
    """Decode a hello of 64 bytes.

    Raises:
        ProtocolError: Wrong magic, role or flags.
        VersionError: Another major version.
    """
    preamble, max_message_bytes, key_name, nonce = HELLO.unpack(data)
    role = read_preamble(preamble)
    _, major, minor, _, flags = PREAMBLE.unpack(preamble)
    return Hello(role, nonce, max_message_bytes, key_name, flags, (major, minor))


def auth_key(token: bytes) -> bytes:
    """Return the HMAC key derived from a token. It is never the token itself, nor the key of a later protocol."""
    return hmac.digest(token, b"ddlf auth key v1", hashlib.sha256)


def key_id(key: bytes) -> bytes:
    """Return the 16 bytes that identify a key on the wire."""
    return hmac.digest(key, b"ddlf key id", hashlib.sha256)[:16]


def proof(key: bytes, side: str, client: bytes, worker: bytes, certificate: bytes = NO_CERTIFICATE) -> bytes:
    """Return the 32 bytes that prove that one side has the token.

    Args:
        key: ``auth_key`` of the token.
        side: ``"C"`` for the client's proof, ``"S"`` for the worker's.
        client: The client's hello of 64 bytes, as received or sent.
        worker: The worker's hello, as received or sent.
        certificate: SHA-256 of the worker's certificate in DER; zeros without TLS.
    """
    return hmac.digest(key, f"ddlf/1 {side}".encode() + client + worker + certificate, hashlib.sha256)


class ClientHandshake:
    """The connecting side of a handshake. Send ``hello``, then pass the received bytes to ``read_hello`` and
    ``read_verdict``.
    """

    def __init__(self, role: Role, token: bytes, max_message_bytes: int, *, tls: bool = False) -> None:
        self._key = auth_key(token)
        self.hello = new_hello(role, max_message_bytes, self._key, FLAG_TLS if tls else 0).encode()

    def read_hello(self, data: bytes, certificate: bytes = NO_CERTIFICATE) -> tuple[Hello, bytes]:
        """Check the 96 bytes that the worker answers: its hello and its proof that it has the token.

        Args:
            data: The bytes.
            certificate: SHA-256 of the certificate that this side saw.

        Returns:
            The worker's hello, and this side's proof to send.

        Raises:
            AuthError: The worker does not have the same token, or the bytes were altered on the network.
            ProtocolError: The other side is not a DDLF worker.
        """
        worker_hello, worker_proof = data[: HELLO.size], data[HELLO.size :]
        hello = decode_hello(worker_hello)
        if not hmac.compare_digest(worker_proof, proof(self._key, "S", self.hello, worker_hello, certificate)):
            if hello.key_id == key_id(self._key):
                raise AuthError(
                    "the handshake was altered on the network, although both sides use the same token",
                    hint="an attacker may read this connection: check the address, the name service and the network",
                )
            raise AuthError("the worker has another token than this side")
        return hello, proof(self._key, "C", self.hello, worker_hello, certificate)

    @staticmethod
    def read_verdict(data: bytes) -> None:
        """Check the last byte of the handshake, which says whether the worker accepts this side.

        Raises:
            AuthError: The worker refused the proof.
            ConnectError: The worker accepts no more connections.
        """
        if data == bytes([Verdict.ACCEPTED]):
            return
        if data == bytes([Verdict.BUSY]):
            raise ConnectError("the worker accepts no more connections", hint="close other masters")
        raise AuthError("the worker refused this side's token")


class WorkerHandshake:
    """The listening side of a handshake. Pass the client's 64 bytes to ``answer``, send the result, then pass the
    client's 32 bytes to ``accepts``.

    Args:
        tokens: Accepted tokens. The first one is the default for this side's proof.
        max_message_bytes: The largest message body that this side accepts.
        certificate: SHA-256 of this side's certificate; zeros without TLS.
    """

    def __init__(self, tokens: tuple[bytes, ...], max_message_bytes: int, certificate: bytes = NO_CERTIFICATE) -> None:
        self._keys = [auth_key(token) for token in tokens]
        self._certificate = certificate
        self._max_message_bytes = max_message_bytes
        self._client = self._own_hello = b""

    def answer(self, data: bytes) -> tuple[Hello, bytes]:
        """Check the client's hello of 64 bytes, and return the answer to send.

        Returns:
            The client's hello, and the 96 bytes to send.
        """
        client = decode_hello(data)
        # A client without a valid token receives an answer, too. It notices the difference itself, and an attacker
        # learns nothing.
        key = next((key for key in self._keys if key_id(key) == client.key_id), self._keys[0])
        self._client = data
        self._own_hello = new_hello(client.role, self._max_message_bytes, key, client.flags).encode()
        return client, self._own_hello + proof(key, "S", self._client, self._own_hello, self._certificate)

    def accepts(self, client_proof: bytes) -> bool:
        """Return whether the client's proof was made with one of the tokens. Every result takes the same time."""
        proofs = [proof(key, "C", self._client, self._own_hello, self._certificate) for key in self._keys]
        matches = [hmac.compare_digest(client_proof, expected) for expected in proofs]
        return any(matches)
