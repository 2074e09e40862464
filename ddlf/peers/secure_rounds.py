"""The secure sums of rounds, as the server sees them: it passes messages on until it can unmask a sum. Pure.

One attempt after another, each with fresh keys:

| phase | ends when |
|---|---|
| idle | as many peers are here as a round needs |
| offers | all present peers have offered keys, or at the deadline if enough have |
| posts | the masked posts of all members that are still here have come, or at the deadline if enough have |
| signing | all survivors have signed the list of survivors |
| unmasking | all survivors have answered |
| adding | the server has written the next base |

If a survivor is lost in between, or too few members are left, the attempt is void. Peers that have posted train on, and post
again in the next attempt. So no training is lost, and no update is masked a second time.

The journal has no word of an attempt. A server that was killed begins another one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ddlf.errors import ProtocolError
from ddlf.peers.frames import Attempt, Masked, Members, Message, Offered, Signatures, Signed, Survivors, Unmask
from ddlf.peers.ledger import Reply, Unfit
from ddlf.peers.merging import most_samples
from ddlf.peers.secure_ledger import SecureLedger
from ddlf.privacy import secure_sum
from ddlf.privacy.secure_sum import SECRET_BYTES, SIGNATURE_BYTES, Offer
from ddlf.privacy.weighted_sum import share_of

LATE = "its round is over"
ANSWER_S = 10.0
"""Least seconds that a survivor has to sign and to answer, however short the deadline for posts is."""


@dataclass(frozen=True, kw_only=True)
class Tell:
    """Send a message to a peer."""

    peer: int
    message: Message


@dataclass(frozen=True, kw_only=True)
class Say:
    """Print a line."""

    text: str


@dataclass(frozen=True, kw_only=True)
class AddUp:
    """Unmask a sum, and make the next base of it.

    Args:
        base: The base of the round.
        posts: The masked post of each survivor.
        answers: The answer of each survivor.
        shares: The share of each survivor (``share_of``).
    """

    base: int
    posts: dict[int, Masked]
    answers: dict[int, secure_sum.Answer]
    shares: dict[int, float]


Do = Tell | Reply | Say | AddUp


class SecureRounds:
    """Gathers keys, masked posts, signatures and answers.

    Args:
        ledger: The ledger, which says who is present. It is only read.
        values: Values of an update.
        terms: Returns what the numbers of a sum mean, from the number of the base and the number of samples of a whole share.

    Attributes:
        attempt: Random name of the attempt.
        phase: See the table above.
    """

    def __init__(self, ledger: SecureLedger, values: int, terms: Callable[[int, int], str]) -> None:
        self.attempt = ""
        self.phase: Literal["idle", "offers", "posts", "signing", "unmasking", "adding"] = "idle"
        self._ledger, self._values, self._terms_of = ledger, values, terms
        self._least = max(ledger.plan.quorum, secure_sum.LEAST)
        self._has_said_waiting = False
        self._clear()

    def _clear(self) -> None:
        self.phase = "idle"
        self._since = 0.0
        self._most = 0
        self._terms = ""
        self._offers: dict[int, Offer] = {}
        self._lost: set[int] = set()
        self._posts: dict[int, Masked] = {}
        self._late_posts: dict[int, int] = {}
        self._survivors: list[int] = []
        self._signatures: dict[int, bytes] = {}
        self._answers: dict[int, secure_sum.Answer] = {}

    # -- what happens -----------------------------------------------------------------------------------------------------

    def arrived(self, peer: int, *, keeps: bool) -> list[Do]:
        """Take a peer that has connected, and return the messages that it has missed.

        Args:
            peer: The peer.
            keeps: Whether it still has its keys.
        """
        if not keeps and peer in self._offers:
            if self.phase == "offers":
                del self._offers[peer]
            else:
                self._lost.add(peer)
        instructions: list[Do] = []
        if self.phase == "offers" and peer not in self._offers:
            instructions.append(self._attempt_for(peer))
        if self.phase not in ("idle", "offers") and peer in self._offers.keys() - self._lost:
            instructions.append(Tell(peer=peer, message=self._members()))
            if peer in self._survivors:
                instructions.append(Tell(peer=peer, message=self._survivors_message()))
                if self.phase != "signing":
                    instructions.append(Tell(peer=peer, message=self._all_signed()))
        return instructions

    def received(self, peer: int, message: Message, now: float) -> list[Do]:
        """Take a message of a peer.

        Raises:
            ProtocolError: The message cannot be used, and the peer must go.
            Unfit: The peer cannot take part.
        """
        instructions: list[Do] = []
        match message:
            case Offered():
                instructions = self._on_offered(peer, message, now)
            case Masked():
                instructions = self._on_masked(peer, message, now)
            case Signed() if message.attempt == self.attempt and self.phase == "signing" and peer in self._survivors:
                signature = _bytes(message.signature, SIGNATURE_BYTES, "signature")
                if not secure_sum.has_signed(self._roster, self.attempt, self._terms, peer, self._survivors, signature):
                    raise ProtocolError("the signature under the list of survivors is invalid")
                self._signatures[peer] = signature
            case Unmask() if message.attempt == self.attempt and self.phase == "unmasking" and peer in self._survivors:
                self._answers[peer] = self._answer(message)
            case _:
                pass  # a message of an attempt that is void
        return instructions + self.step(now)

    def step(self, now: float) -> list[Do]:
        """Return the next instructions."""
        ledger = self._ledger
        if self.phase == "adding":
            return []
        if ledger.ended:
            return self.ended()
        instructions: list[Do] = []
        present = set(ledger.present)
        if self.phase == "offers":
            for peer in self._offers.keys() - present:
                del self._offers[peer]
        else:
            self._lost |= self._offers.keys() - present
        is_late = self._since > 0 and now - self._since >= ledger.plan.deadline_s
        if self.phase == "idle":
            instructions += self._begin()
        if self.phase == "offers":
            has_enough = len(self._offers) >= self._least
            if has_enough and (is_late or self._offers.keys() >= present):
                self._close_offers()
                instructions += [Tell(peer=peer, message=self._members()) for peer in self._offers]
        if self.phase == "posts":
            able = self._offers.keys() - self._lost
            posted = able & self._posts.keys()
            if len(able) < self._least:
                return instructions + self._void(f"{len(able)} of {len(self._offers)} members are left", now)
            if posted == able or (is_late and len(posted) >= self._least):
                self._survivors, self.phase, self._since = sorted(posted), "signing", now
                instructions += [Tell(peer=peer, message=self._survivors_message()) for peer in self._survivors]
        if self.phase in ("signing", "unmasking"):
            unanswered = [member for member in self._survivors if member not in self._finished_survivors]
            if absent := [member for member in unanswered if member in self._lost]:
                return instructions + self._void(f"peer {absent[0]} has left between its post and the sum", now)
            if unanswered and now - self._since >= max(ledger.plan.deadline_s, ANSWER_S):
                return instructions + self._void(f"peer {unanswered[0]} has not answered in time", now)
        if self.phase == "signing" and self._signatures.keys() >= set(self._survivors):
            self.phase, self._since = "unmasking", now
            instructions += [Tell(peer=peer, message=self._all_signed()) for peer in self._survivors]
        if self.phase == "unmasking" and self._answers.keys() >= set(self._survivors):
            self.phase = "adding"
            instructions.append(
                AddUp(
                    base=ledger.base,
                    posts={peer: self._posts[peer] for peer in self._survivors},
                    answers=dict(self._answers),
                    shares={peer: share_of(ledger.members[peer].samples, self._most) for peer in self._survivors},
                )
            )
        return instructions

    def added(self, now: float) -> list[Do]:
        """Begin the next round, after the ledger has taken the sum. Peers that are not in the sum begin again."""
        instructions: list[Do] = []
        for peer in self._ledger.present:
            if peer not in self._survivors:
                post = self._posts.get(peer)
                number = self._late_posts.get(peer, post.number if post else self._ledger.members[peer].number)
                instructions.append(self._rejection(peer, number))
        self._clear()
        return instructions + self.step(now)

    def ended(self) -> list[Do]:
        """Give up the open round, because the training has ended."""
        posts = len(self._posts)
        self._clear()
        reason = "the training has ended in an open round"
        subject = "1 masked post is" if posts == 1 else f"{posts} masked posts are"
        return [Say(text=f"void      {reason}, so {subject} in no sum")] if posts else []

    def wrong(self, reason: str, now: float) -> list[Do]:
        """Give up a sum that was unmasked and cannot be right."""
        return self._void(reason, now)

    # -- parts ------------------------------------------------------------------------------------------------------------

    @property
    def _finished_survivors(self) -> set[int]:
        """The survivors that have done their part of this phase."""
        return set(self._signatures if self.phase == "signing" else self._answers)

    @property
    def _roster(self) -> list[Offer]:
        return [self._offers[peer] for peer in sorted(self._offers)]

    def _begin(self) -> list[Do]:
        present = self._ledger.present
        missing = self._least - len(present)
        if missing > 0:
            if self._has_said_waiting or not present:
                return []
            self._has_said_waiting = True
            return [Say(text=f"waits     a secure sum needs {self._least} peers; here: {len(present)}")]
        self._has_said_waiting = False
        self.attempt, self.phase = secrets.token_hex(8), "offers"
        return [self._attempt_for(peer) for peer in present]

    def _attempt_for(self, peer: int) -> Tell:
        return Tell(peer=peer, message=Attempt(attempt=self.attempt, base=self._ledger.base))

    def _on_offered(self, peer: int, message: Offered, now: float) -> list[Do]:
        if message.attempt != self.attempt or self.phase != "offers":
            return []
        if message.base != self._ledger.base:  # it was away when the base came
            return [self._rejection(peer, self._ledger.members[peer].number), self._attempt_for(peer)]
        offer = Offer(
            member=peer,
            identity=_bytes(message.identity, SECRET_BYTES, "identity"),
            key=_bytes(message.key, SECRET_BYTES, "key"),
            signature=_bytes(message.signature, SIGNATURE_BYTES, "signature"),
        )
        offer.check(self._ledger.run, self.attempt)
        for other in self._offers.values():
            if other.member != peer and (other.key == offer.key or other.identity == offer.identity):
                raise ProtocolError(f"peer {other.member} has offered the same key")
        if peer not in self._offers and len(self._offers) >= secure_sum.MOST:
            raise Unfit(
                f"a secure sum has {secure_sum.MOST} members at most, and {secure_sum.MOST} peers are here",
                hint="join when another peer has left",
            )
        self._since = self._since or now
        self._offers[peer] = offer
        return []

    def _close_offers(self) -> None:
        self.phase, self._since = "posts", 0.0
        samples = [self._ledger.members[peer].samples for peer in self._offers]
        self._most = min(max(samples), most_samples(samples))
        self._terms = self._terms_of(self._ledger.base, self._most)

    def _on_masked(self, peer: int, message: Masked, now: float) -> list[Do]:
        ledger = self._ledger
        if ledger.is_repeated(peer, message.number):
            reply = ledger.repeat(peer)
            return [] if reply is None else [reply]
        if message.number <= ledger.members[peer].number:
            raise ProtocolError(f"post {message.number} comes after post {ledger.members[peer].number}")
        if len(message.set) != 4 * self._values:
            length = f"{len(message.set):,} bytes"
            raise ProtocolError(f"the masked numbers of this model have {4 * self._values:,} bytes, got {length}")
        if message.base != ledger.base:
            return [self._rejection(peer, message.number)]
        if message.attempt != self.attempt or peer not in self._offers or self.phase in ("idle", "offers"):
            return [Reply(peer=peer, number=message.number, answer="continue")]
        if peer in self._posts:
            return []  # it was sent again after its connection was lost
        if self.phase != "posts":
            self._late_posts[peer] = message.number
            return []
        self._since = self._since or now
        self._posts[peer] = message
        return []

    def _rejection(self, peer: int, number: int) -> Reply:
        return Reply(peer=peer, number=number, answer="rejected", set=self._ledger.base, reason=LATE)

    def _answer(self, message: Unmask) -> secure_sum.Answer:
        lost = sorted(self._offers.keys() - set(self._survivors))
        data = _bytes(message.secrets, SECRET_BYTES * len(lost), "list of secrets")
        pair_secrets = {
            peer: data[SECRET_BYTES * index : SECRET_BYTES * (index + 1)] for index, peer in enumerate(lost)
        }
        return secure_sum.Answer(seed=_bytes(message.seed, SECRET_BYTES, "seed"), secrets=pair_secrets)

    def _void(self, reason: str, now: float) -> list[Do]:
        numbers = self._late_posts | {peer: post.number for peer, post in self._posts.items()}
        instructions: list[Do] = [Say(text=f"void      the round begins again with new keys: {reason}")]
        instructions += [Reply(peer=peer, number=number, answer="continue") for peer, number in numbers.items()]
        self._clear()
        return instructions + self.step(now)

    def _members(self) -> Members:
        offers = {str(offer.member): (offer.identity + offer.key + offer.signature).hex() for offer in self._roster}
        return Members(attempt=self.attempt, samples=self._most, offers=offers)

    def _survivors_message(self) -> Survivors:
        return Survivors(attempt=self.attempt, members=",".join(map(str, self._survivors)))

    def _all_signed(self) -> Signatures:
        signatures = {str(peer): signature.hex() for peer, signature in sorted(self._signatures.items())}
        return Signatures(attempt=self.attempt, signatures=signatures)


def _bytes(text: str, length: int, label: str) -> bytes:
    """Return the bytes of a hexadecimal text.

    Raises:
        ProtocolError: It is another text, or has another length.
    """
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != length:
        raise ProtocolError(f"a {label} has {2 * length} hexadecimal digits, got {text[:20]!r} of {len(text)}")
    return data
