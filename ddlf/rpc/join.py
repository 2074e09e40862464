"""A worker offers a connection to a master's gate. Only the direction of TCP changes. Runs on both sides.

A worker behind NAT, a firewall or a scheduler cannot be dialled, so it dials the master. Both sides prove that they
have the token, before the gate keeps the connection:

    worker -> gate   40 bytes: preamble (8) with role JOIN, nonce (32).
    gate -> worker   40 bytes: preamble (8) with role JOIN, nonce (32).
    worker -> gate   60 bytes: place (4), incarnation (8), key id (16), proof (32).
    gate -> worker   33 bytes: verdict (1), proof (32).
    worker -> gate   1 byte: the worker keeps this connection.

The last byte is for workers that dial several addresses at once: they keep one connection and close all others.

Then the worker waits. When the master needs a connection, it sends its hello on one that waits. From there on, both
sides act as if the master had dialled: handshake, TLS, frames. So the worker proves its identity first, and again.
Instead of a hello the gate may send a preamble of role JOIN: the run is over, and the worker ends.

A proof is ``HMAC-SHA256(key, label + all bytes before)``. It covers place, incarnation and both nonces, so it can be
neither altered nor replayed. The handshake uses other labels, so it accepts no proof of a greeting.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from ddlf.errors import AuthError, ConnectError, LeaseError, ProtocolError
from ddlf.rpc.handshake import (
    MAGIC,
    PREAMBLE,
    PROOF_BYTES,
    VERSION,
    Role,
    auth_key,
    key_id,
    read_preamble,
)
from ddlf.rpc.listen import REFUSAL_DELAY_S
from ddlf.rpc.stream import receive_exactly, send_all

OPENING = struct.Struct("<8s32s")  # preamble, nonce
OFFER = struct.Struct("<IQ16s")  # place, incarnation, key id
ANSWER = struct.Struct(f"<B{PROOF_BYTES}s")  # verdict, proof

ANY_PLACE = 2**32 - 1
"""The place of a worker that takes any free one."""
NO_PROOF = bytes(PROOF_BYTES)


class GateVerdict(IntEnum):
    """The gate's answer to an offer. Every failed authentication gives the same byte."""

    WELCOME = 1
    REFUSED = 2
    NO_SUCH_PLACE = 3
    REPLACED = 4
    FULL = 5
    OVER = 6


class RunOver(ConnectError):
    """The gate has told the worker to end, because the run is over."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The facts that a worker sends to the gate, the port where a master accepts workers, when it offers a connection.

    Args:
        place: Number of its place from 0, or ``ANY_PLACE``.
        incarnation: Rises with each start of a worker at the same place. If two workers have one place, the gate
            takes the later one.
    """

    place: int
    incarnation: int


def join_preamble() -> bytes:
    """Return the first 8 bytes of both sides. If the gate sends them to a worker that waits, the run is over."""
    return PREAMBLE.pack(MAGIC, *VERSION, Role.JOIN, 0)


def is_over(preamble: bytes) -> bool:
    """Return whether the first bytes on a waiting connection say that the run is over."""
    return len(preamble) == PREAMBLE.size and preamble[:4] == MAGIC and preamble[6] == Role.JOIN


def _proof(key: bytes, side: str, *transcript: bytes) -> bytes:
    return hmac.digest(key, f"ddlf/1 join {side}".encode() + b"".join(transcript), hashlib.sha256)


class Offering:
    """The worker's side of the greeting at a gate. Send ``opening``, then the result of ``answer`` for the gate's 40
    bytes. Then pass the gate's last 33 bytes to ``check``.

    Args:
        token: The shared secret.
        own_offer: This worker's facts.
    """

    def __init__(self, token: bytes, own_offer: Offer) -> None:
        self._key = auth_key(token)
        self._own_offer = own_offer
        self.opening = OPENING.pack(join_preamble(), os.urandom(32))
        self._transcript = b""

    def answer(self, reply: bytes) -> bytes:
        """Return the 60 bytes that answer the gate's reply.

        Raises:
            ProtocolError: Another program listens there, or a worker.
            VersionError: The master speaks another major version.
        """
        if read_preamble(reply[: PREAMBLE.size]) is not Role.JOIN:
            raise ProtocolError("a DDLF worker listens there, not the gate of a master")
        facts = OFFER.pack(self._own_offer.place, self._own_offer.incarnation, key_id(self._key))
        self._transcript = self.opening + reply + facts
        return facts + _proof(self._key, "W", self._transcript)

    def check(self, answer: bytes) -> None:
        """Check the gate's last 33 bytes, its verdict and proof.

        Raises:
            AuthError: The gate has another token, or refused this side's.
            ConnectError: The gate has no such place, or all the workers that it takes.
            LeaseError: A later worker has this place.
            RunOver: The run is over.
        ProtocolError: The verdict is unknown.
        """
        verdict, proof = ANSWER.unpack(answer)
        if verdict == GateVerdict.REFUSED:
            raise AuthError("the gate has another token than this worker")
        if not hmac.compare_digest(proof, _proof(self._key, "M", self._transcript, bytes([verdict]))):
            raise AuthError("it has not proven that it has the token")
        if verdict == GateVerdict.NO_SUCH_PLACE:
            raise ConnectError(
                f"the master has no place {self._own_offer.place}", hint="check --place and the number of workers"
            )
        if verdict == GateVerdict.REPLACED:
            raise LeaseError(f"a later worker has place {self._own_offer.place}")
        if verdict == GateVerdict.FULL:
            raise ConnectError("the master has all its workers", hint="give it more with --workers")
        if verdict == GateVerdict.OVER:
            raise RunOver("the run is over")
        if verdict != GateVerdict.WELCOME:
            raise ProtocolError(f"unknown verdict {verdict}")


DEAD_CONNECTION_S = 30.0
"""Seconds without an acknowledgement; then either side closes a connection that waits. The probes also keep the entry
of a NAT alive.
"""
KEPT = b"\x01"
"""The worker sends this byte to keep a connection that it has offered."""


async def offer(sock: socket.socket, token: bytes, own_offer: Offer) -> None:
    """Offer a connected socket to a gate, the port where a master accepts workers. The caller limits the time, and
    closes the socket after an error. To keep the connection, the caller sends ``KEPT``.

    Raises:
        DDLFError: The errors of ``Offering``.
        OSError: The connection ended.
    """
    offering = Offering(token, own_offer)
    await send_all(sock, offering.opening)
    preamble = await receive_exactly(sock, PREAMBLE.size)
    if read_preamble(preamble) is Role.JOIN:  # a worker's answer is shorter
        preamble += await receive_exactly(sock, OPENING.size - PREAMBLE.size)
    await send_all(sock, offering.answer(preamble))
    offering.check(await receive_exactly(sock, ANSWER.size))


class Greeting:
    """The gate's side of the greeting. Pass the worker's opening to ``reply`` and its offer to ``read``, and send the
    bytes that the methods return.

    Args:
        tokens: Accepted tokens.
    """

    def __init__(self, tokens: tuple[bytes, ...]) -> None:
        self._keys = [auth_key(token) for token in tokens]
        self._transcript = self._key = b""

    def reply(self, opening: bytes) -> bytes:
        """Return the 40 bytes that answer the worker's opening, whose preamble the caller has checked."""
        reply = OPENING.pack(join_preamble(), os.urandom(32))
        self._transcript = opening + reply
        return reply

    def read(self, data: bytes) -> Offer:
        """Check the 60 bytes of the worker's offer and proof, and return the offer.

        Raises:
            AuthError: The worker does not have one of the tokens.
        """
        facts, proof = data[: OFFER.size], data[OFFER.size :]
        place, incarnation, id_of_key = OFFER.unpack(facts)
        self._key = next((key for key in self._keys if key_id(key) == id_of_key), self._keys[0])
        self._transcript += facts
        if not hmac.compare_digest(proof, _proof(self._key, "W", self._transcript)):
            raise AuthError("token mismatch: the worker has another token")
        return Offer(place, incarnation)

    def answer(self, verdict: GateVerdict) -> bytes:
        """Return the 33 bytes that end the greeting. A refusal has no proof."""
        refused = verdict is GateVerdict.REFUSED
        return ANSWER.pack(verdict, NO_PROOF if refused else _proof(self._key, "M", self._transcript, bytes([verdict])))


async def receive_offer(
    sock: socket.socket, preamble: bytes, tokens: tuple[bytes, ...], judge: Callable[[Offer], GateVerdict]
) -> Offer | None:
    """Perform the gate's side of the greeting on a socket. The caller limits the time, and closes the socket.

    Args:
        sock: A connected, non-blocking socket.
        preamble: The first 8 bytes, which the caller has read and checked. Their role is JOIN.
        tokens: Accepted tokens.
        judge: Returns the verdict. It is asked again when the worker keeps the connection, because another worker may
            have taken a free place meanwhile.

    Returns:
        The offer, if the connection is good and waits for its use; None if a verdict has refused it.

    Raises:
        AuthError: The worker does not have one of the tokens.
        OSError: The connection ended.
    """
    greeting = Greeting(tokens)
    opening = preamble + await receive_exactly(sock, OPENING.size - PREAMBLE.size)
    await send_all(sock, greeting.reply(opening))
    try:
        offer = greeting.read(await receive_exactly(sock, OFFER.size + PROOF_BYTES))
    except AuthError:
        await asyncio.sleep(REFUSAL_DELAY_S)
        await send_all(sock, greeting.answer(GateVerdict.REFUSED))
        raise
    verdict = judge(offer)
    await send_all(sock, greeting.answer(verdict))
    if verdict is not GateVerdict.WELCOME:
        return None
    await receive_exactly(sock, len(KEPT))
    verdict = judge(offer)
    if verdict is GateVerdict.OVER:
        await send_all(sock, join_preamble())  # the worker waits already
    return offer if verdict is GateVerdict.WELCOME else None
