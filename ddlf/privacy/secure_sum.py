"""Secure aggregation: a server learns the sum of whole numbers of many members, and the numbers of none. Pure.

Members send messages to each other through the server. One sum:

| step | message |
|---|---|
| 1 | each member makes a fresh X25519 key, signs it with its identity (Ed25519), and offers it to the others |
| 2 | each member ``i`` derives a secret ``s_ij`` with each other member ``j``, draws a seed ``b_i``, and sends ``y_i`` |
| 3 | the server names the survivors: members whose ``y_i`` has come. Each of them signs this list once |
| 4 | a survivor that has the signatures of all survivors under its list sends ``b_i``, and ``s_ij`` of each lost ``j`` |
| 5 | the server adds up ``y_i`` of the survivors, and subtracts the masks |

With numbers ``q_i``, and streams ``P`` of AES-256 in counter mode, all mod 2^32::

    y_i = q_i + P(b_i) + sum over j > i of P(s_ij) - sum over j < i of P(s_ij)

The server never gets both the seed and all pair secrets of one member. No member keeps shares of another one's secrets. So a
sum without the answer of one survivor is void, and another one begins with fresh keys.

A server that names one list to some members and another list to others could unmask somebody: it gets seeds for one list and
pair secrets for the other. So a member signs one list only, and answers only when all survivors have signed the same list.
A server that replaces keys of members by its own is noticed by ``code_of``, which people compare.

The browser's ``secure_sum.js`` makes the same bytes.

Source:
    Bonawitz et al. 2017, ePrint 2017/281, without secret shares. X25519: RFC 7748. HKDF: RFC 5869. Ed25519: RFC 8032. Counter
    mode: NIST SP 800-38A.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ddlf.errors import BadUpdate, ProtocolError

Numbers = np.ndarray[Any, np.dtype[np.uint32]]
LEAST = 3
"""Fewest members of a sum. With two, each could subtract its own numbers from the sum."""
MOST = 50
"""Most members of a sum: each member computes a stream for each other one, and the sum must not wrap around."""
LEVELS = 2**25
"""Largest magnitude of a member's number. ``MOST`` of them fit into 32 bits with a sign."""
SECRET_BYTES, SIGNATURE_BYTES = 32, 64
BLOCK = 1 << 18
"""Numbers of a mask that are made at once."""
ZEROS = bytes(4 * BLOCK)


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Real values as whole numbers.

    A value ``x`` becomes ``x * LEVELS / limit``, rounded to nearest, ties to even. So a sum of ``n`` values differs from the
    exact one by ``n * limit / LEVELS / 2`` at most.

    Args:
        limit: Largest magnitude of a value. A larger one is refused, since it would be wrong in the sum.
    """

    limit: float

    def numbers(self, values: np.ndarray[Any, Any], factor: float = 1.0) -> Numbers:
        """Return values times a factor as whole numbers mod 2^32.

        Raises:
            BadUpdate: A value is not finite, or above the limit.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.asarray(values, np.float64) * (factor * LEVELS / self.limit)
            fits = np.abs(scaled) <= LEVELS
        if not fits.all():
            count = scaled.size - int(np.count_nonzero(fits))
            raise BadUpdate(
                f"{count:,} of {scaled.size:,} values of the update are beyond the limit of {self.limit:g}, or not finite",
                hint="raise --update-limit of ddlf peers serve, or update_limit of the app, or lower the learning rate",
            )
        return np.rint(scaled).astype(np.int32).view(np.uint32)

    def values(self, total: Numbers, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return a sum of numbers as real values.

        Args:
            total: The sum, mod 2^32.
            count: Number of its members.

        Raises:
            ProtocolError: No such members have this sum: one of them has sent a wrong mask.
        """
        signed = total.view(np.int32).astype(np.float64)
        if signed.size and np.abs(signed).max() > count * LEVELS:
            raise ProtocolError(
                f"the sum is larger than {count} members can make it: one of them has sent a wrong mask"
            )
        return signed * (self.limit / LEVELS)


# -- keys and masks -----------------------------------------------------------------------------------------------------


def pair_secret(own_key: X25519PrivateKey, peer_key: bytes, context: str) -> bytes:
    """Return the secret of two members: HKDF of their X25519 secret.

    Args:
        own_key: The fresh key of one member.
        peer_key: The public key of the other one.
        context: Names the sum and the two members, the same for both.

    Raises:
        ProtocolError: The other key is on no curve, or gives everybody the same secret.
    """
    try:
        shared = own_key.exchange(X25519PublicKey.from_public_bytes(peer_key))
    except ValueError:
        raise ProtocolError("the key of a member is on no curve, or has a known secret") from None
    return HKDF(algorithm=SHA256(), length=SECRET_BYTES, salt=None, info=context.encode()).derive(shared)


def add_mask(total: Numbers, secret: bytes, sign: int) -> None:
    """Add the stream of a secret to numbers, or subtract it, in place.

    The stream is AES-256 in counter mode from 0, read as little-endian 32-bit numbers.
    """
    stream = Cipher(algorithms.AES(secret), modes.CTR(bytes(16))).encryptor()
    apply = np.add if sign > 0 else np.subtract
    for begin in range(0, total.size, BLOCK):
        part = total[begin : begin + BLOCK]
        apply(part, np.frombuffer(stream.update(ZEROS[: 4 * part.size]), "<u4"), out=part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A member's fresh key for one sum.

    Args:
        member: Number of the member.
        identity: Its Ed25519 key, the same in all sums.
        key: Its X25519 key, for this sum only.
        signature: Its signature under the key.
    """

    member: int
    identity: bytes
    key: bytes
    signature: bytes

    def check(self, run: str, attempt: str) -> None:
        """Refuse an offer without the signature of its identity, or with a key that gives everybody the same secret.

        Raises:
            ProtocolError: The offer is invalid.
        """
        if not _is_signed(self.identity, self.signature, key_text(run, attempt, self.member, self.key)):
            raise ProtocolError(f"the key of peer {self.member} is not signed by its identity")
        pair_secret(X25519PrivateKey.generate(), self.key, "")


def key_text(run: str, attempt: str, member: int, key: bytes) -> str:
    """Return the text that a member signs for its fresh key."""
    return f"ddlf secure sum key\n{run}\n{attempt}\n{member}\n{key.hex()}\n"


def list_text(attempt: str, offers: Sequence[Offer], terms: str, survivors: Sequence[int]) -> str:
    """Return the text that a member signs for a list of survivors. It covers all keys and the terms of the sum."""
    keys = "".join(f"{offer.member} {offer.identity.hex()} {offer.key.hex()}\n" for offer in offers)
    named = ",".join(map(str, survivors))
    return f"ddlf secure sum survivors\n{attempt}\n{hashlib.sha256(keys.encode()).hexdigest()}\n{terms}\n{named}\n"


def pair_text(attempt: str, member: int, other_member: int) -> str:
    """Return the context of the secret of two members."""
    return f"ddlf secure sum pair\n{attempt}\n{min(member, other_member)}\n{max(member, other_member)}\n"


def code_of(identities: Sequence[bytes]) -> str:
    """Return a code of all identities: eight groups of five digits, of 132 bits together.

    Members see the same code, unless the server has replaced identities by its own. It would have to find two
    sets of identities with one code, which takes 2^66 hashes.
    """
    text = "ddlf secure sum code\n" + "".join(f"{identity.hex()}\n" for identity in sorted(identities))
    digest = hashlib.sha256(text.encode()).digest()
    return " ".join(f"{int.from_bytes(digest[begin : begin + 4], 'big') % 100_000:05d}" for begin in range(0, 32, 4))


def _is_signed(identity: bytes, signature: bytes, text: str) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, text.encode())
    except (InvalidSignature, ValueError):
        return False
    return True


class Identity:
    """The signing key of a member. Each program that joins makes one, and keeps it in its memory."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, text: str) -> bytes:
        """Return the signature under a text."""
        return self._key.sign(text.encode())


# -- a member ------------------------------------------------------------------------------------------------------------


class Share:
    """A member's part of one sum.

    Args:
        run: Name of the run.
        attempt: Random name of this sum.
        member: Number of the member.
        identity: Its signing key.
        least: Fewest survivors.

    Attributes:
        offer: Its offer.
        offers: The offers of all members; empty before ``meet``.
        is_used: Whether it has masked its numbers.
    """

    def __init__(self, run: str, attempt: str, member: int, identity: Identity, least: int) -> None:
        self.attempt = attempt
        self.offers: list[Offer] = []
        self.is_used = False
        self._run, self._member, self._identity = run, member, identity
        self._least = max(least, LEAST)
        self._key = X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(SECRET_BYTES)
        self._secrets: dict[int, bytes] = {}
        self._survivors: tuple[int, ...] = ()
        self._terms = ""
        key = self._key.public_key().public_bytes_raw()
        signature = identity.sign(key_text(run, attempt, member, key))
        self.offer = Offer(member=member, identity=identity.public, key=key, signature=signature)

    def meet(self, offers: Sequence[Offer], terms: str = "") -> str:
        """Take the offers of all members, and return the code that people compare.

        Args:
            offers: The offers, in the order of the numbers.
            terms: The meaning of the numbers, the same for all survivors. Otherwise a server could make the numbers of all
                members but one tiny, and would see the numbers of this one.

        Raises:
            ProtocolError: Honest members and an honest server do not send such offers.
        """
        members = [offer.member for offer in offers]
        if self.offers:
            raise ProtocolError("the server names the members of a sum twice")
        if not self._least <= len(offers) <= MOST:
            raise ProtocolError(f"a sum has {self._least} to {MOST} members, and the server names {len(offers)}")
        if members != sorted(set(members)):
            raise ProtocolError("the server names a member of a sum twice")
        if self.offer not in offers:
            raise ProtocolError("the server names another key than this peer's own")
        for kind, values in (
            ("key", [offer.key for offer in offers]),
            ("identity", [offer.identity for offer in offers]),
        ):
            if len(set(values)) < len(values):
                raise ProtocolError(f"two members of a sum have the same {kind}")
        for offer in offers:
            if offer.member != self._member:
                offer.check(self._run, self.attempt)
                context = pair_text(self.attempt, self._member, offer.member)
                self._secrets[offer.member] = pair_secret(self._key, offer.key, context)
        self.offers, self._terms = list(offers), terms
        return code_of([offer.identity for offer in offers])

    def masked(self, numbers: Numbers) -> Numbers:
        """Return numbers under all masks. Only once: of two vectors under the same masks, the difference would show.

        Raises:
            ProtocolError: The masks were used, or are not known yet.
        """
        if self.is_used or not self.offers:
            raise ProtocolError("the masks of a sum are used once, and after the keys of all members have come")
        self.is_used = True
        total = numbers.copy()
        add_mask(total, self._seed, 1)
        for member, secret in self._secrets.items():
            add_mask(total, secret, 1 if member > self._member else -1)
        return total

    def sign(self, survivors: Sequence[int]) -> bytes:
        """Return the signature under a list of survivors.

        Raises:
            ProtocolError: It is another list than before, or cannot be one.
        """
        named = tuple(survivors)
        if not self.is_used:
            raise ProtocolError("the server names survivors, and this peer has added nothing to the sum")
        if self._survivors not in ((), named):
            raise ProtocolError("the server names two lists of survivors of one sum, which could unmask a peer")
        if list(named) != sorted(set(named)):
            raise ProtocolError("the server names a survivor of a sum twice")
        if strangers := set(named) - {offer.member for offer in self.offers}:
            raise ProtocolError(f"the server names peer {min(strangers)} as a survivor, and the sum has no such member")
        if self._member not in named:
            raise ProtocolError("the server asks a peer that it counts as lost")
        if len(named) < self._least:
            raise ProtocolError(f"a sum needs {self._least} survivors, and the server names {len(named)}")
        self._survivors = named
        return self._identity.sign(list_text(self.attempt, self.offers, self._terms, named))

    def answer(self, signatures: Mapping[int, bytes]) -> Answer:
        """Return what the server needs to unmask the sum, if all survivors have signed the same list.

        Raises:
            ProtocolError: A signature is missing or invalid.
        """
        if not self._survivors:
            raise ProtocolError("the server has named no survivors")
        text = list_text(self.attempt, self.offers, self._terms, self._survivors)
        for offer in self.offers:
            if offer.member in self._survivors and not _is_signed(
                offer.identity, signatures.get(offer.member, b""), text
            ):
                raise ProtocolError(
                    f"peer {offer.member} has not signed the list of survivors that this peer has signed"
                )
        lost = {member: secret for member, secret in self._secrets.items() if member not in self._survivors}
        return Answer(seed=self._seed, secrets=lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A survivor's part of the masks of the sum.

    Args:
        seed: Its own seed.
        secrets: Its secret with each member that is lost.
    """

    seed: bytes
    secrets: Mapping[int, bytes]


# -- the server ----------------------------------------------------------------------------------------------------------


def has_signed(
    offers: Sequence[Offer], attempt: str, terms: str, member: int, survivors: Sequence[int], signature: bytes
) -> bool:
    """Return whether a member has signed a list of survivors under the same terms."""
    [identity] = [offer.identity for offer in offers if offer.member == member]
    return _is_signed(identity, signature, list_text(attempt, offers, terms, survivors))


def unmasked(vectors: Mapping[int, bytes], answers: Mapping[int, Answer]) -> Numbers:
    """Return the sum of the survivors' numbers.

    Args:
        vectors: The masked numbers of each survivor, as little-endian 32-bit numbers.
        answers: The answer of each survivor.
    """
    total = np.zeros(len(next(iter(vectors.values()))) // 4, np.uint32)
    for vector in vectors.values():
        total += np.frombuffer(vector, "<u4")
    for member, answer in answers.items():
        add_mask(total, answer.seed, -1)
        for lost, secret in answer.secrets.items():
            add_mask(total, secret, -1 if lost > member else 1)
    return total
