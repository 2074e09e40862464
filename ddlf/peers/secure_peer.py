"""A peer's part of secure sums: its keys, its masks, and its answers to the server. Pure; runs on the peer."""

from __future__ import annotations

from collections.abc import Callable

from ddlf.algorithms.weights import Weights
from ddlf.errors import ProtocolError
from ddlf.peers.frames import Attempt, Masked, Members, Message, Offered, Signatures, Signed, Survivors, Unmask
from ddlf.peers.plan import Plan
from ddlf.peers.secure_updates import numbers_of, terms_of
from ddlf.privacy.secure_sum import SECRET_BYTES, SIGNATURE_BYTES, Identity, Offer, Share
from ddlf.privacy.weighted_sum import share_of

MESSAGES = (Attempt, Members, Survivors, Signatures)
"""Messages of the server about secure sums."""


class SecurePeer:
    """Takes part in one secure sum after another.

    Args:
        plan: The plan.
        run: Name of the run.
        peer: Number of the peer.
        samples: Its number of samples.
        say: Prints a line.
        model: The model's text.

    Attributes:
        code: The code that people compare; empty before the first sum.
    """

    def __init__(
        self, plan: Plan, run: str, peer: int, samples: int, say: Callable[[str], None], model: str = ""
    ) -> None:
        self.code = ""
        self._plan, self._run, self._peer, self._samples, self._say = plan, run, peer, samples, say
        self._model, self._set = model, b""
        self._identity = Identity()
        self._share: Share | None = None
        self._most = 0
        self._base = self._updates = 0
        self._weights: Weights = []

    @property
    def is_ready(self) -> bool:
        """Whether the keys of all members of a sum are here, to mask an update."""
        return self._share is not None and bool(self._share.offers) and not self._share.is_used

    def begin(self, base: int, weights: Weights, set: bytes = b"") -> None:
        """Begin to train from a base.

        Args:
            base: Its number.
            weights: Its weights. Nobody may change them in place.
            set: Its bytes.
        """
        self._base, self._weights, self._set, self._updates = base, list(weights), set, 0

    def received(self, message: Message) -> Message | None:
        """Take a message of the server, and return the answer; None if there is none.

        Raises:
            ProtocolError: The server asks for something that could unmask a peer, or for nonsense.
        """
        share = self._share
        if isinstance(message, Attempt):
            return self._make_offer(message)
        if share is None or getattr(message, "attempt", "") != share.attempt:
            return None  # the attempt is void
        match message:
            case Members() if not share.offers:
                self._meet(share, message)
            case Survivors():
                survivors = [_number(part) for part in message.members.split(",")]
                return Signed(attempt=share.attempt, signature=share.sign(survivors).hex())
            case Signatures():
                signatures = message.signatures.items()
                answer = share.answer({_number(name): _bytes(text) for name, text in signatures})
                lost = b"".join(secret for _, secret in sorted(answer.secrets.items()))
                return Unmask(attempt=share.attempt, seed=answer.seed.hex(), secrets=lost.hex())
        return None

    def masked(self, live: Weights, number: int, updates: int) -> Masked:
        """Return a post with the masked update.

        Args:
            live: The live weights.
            number: Number of the post.
            updates: Batches since the last post.

        Raises:
            BadUpdate: A value is not finite, or beyond the limit of the plan.
        """
        assert self._share is not None
        numbers = numbers_of(self._plan, self._weights, live, share_of(self._samples, self._most))
        self._updates += updates  # with the batches of void attempts
        vector = self._share.masked(numbers).astype("<u4", copy=False).tobytes()
        return Masked(number=number, attempt=self._share.attempt, base=self._base, updates=self._updates, set=vector)

    def _make_offer(self, message: Attempt) -> Offered:
        if self._share is None or self._share.attempt != message.attempt:
            self._share = Share(self._run, message.attempt, self._peer, self._identity, self._plan.quorum)
        offer = self._share.offer
        return Offered(
            attempt=message.attempt,
            base=self._base,
            identity=offer.identity.hex(),
            key=offer.key.hex(),
            signature=offer.signature.hex(),
        )

    def _meet(self, share: Share, message: Members) -> None:
        if message.samples < 1:
            raise ProtocolError(f"the server says that a whole share has {message.samples:,} samples")
        self._most = message.samples
        terms = terms_of(self._plan, message.samples, self._model, self._set)
        code = share.meet([_offer(name, text) for name, text in message.offers.items()], terms)
        if code != self.code:
            self.code = code
            self._say(
                f"code      {code}; the other {len(share.offers) - 1} peers see the same one, unless the server stands between"
            )


def _offer(name: str, text: object) -> Offer:
    data = _bytes(text)
    if len(data) != 2 * SECRET_BYTES + SIGNATURE_BYTES:
        raise ProtocolError(f"the offer of peer {name:.10} has {len(data)} bytes")
    identity, key, signature = data[:SECRET_BYTES], data[SECRET_BYTES : 2 * SECRET_BYTES], data[2 * SECRET_BYTES :]
    return Offer(member=_number(name), identity=identity, key=key, signature=signature)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ProtocolError(f"the server names {text[:20]!r} as a peer")
    return int(text)


def _bytes(text: object) -> bytes:
    try:
        return bytes.fromhex(str(text))
    except ValueError:
        raise ProtocolError(f"{str(text)[:20]!r} is not hexadecimal") from None
