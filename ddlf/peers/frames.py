"""The messages between a peer and the server, as bytes. Pure. ``docs/reference/peers_protocol.md`` describes them.

A frame is one binary message of a WebSocket::

    4 bytes  "DDLP"
    u8       version, 1
    u8       kind
    u16      0
    u32      length of the JSON text, a multiple of 8
    u32      0
    ...      JSON text, padded with spaces
    ...      a set, or nothing

So a set begins at a multiple of 8. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, TypeVar, dataclass_transform, get_type_hints

from pydantic_core import from_json, to_json

from ddlf.errors import ProtocolError

MAGIC = b"DDLP"
VERSION = 1
PREFIX = struct.Struct("<4sBBHII")
MOST_TEXT_BYTES = 4096
"""Largest JSON text that a peer may send."""
MOST_WELCOME_BYTES = 2**20
"""Largest JSON text of the server: the welcome contains the text of the model."""
MOST_NAME = 64
PIECE_BYTES = 256 * 2**10
"""A larger set is sent in fragments of this size."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Message:
    """A message. Each subclass is a frozen dataclass; ``set`` has the bytes of its set, if it has one."""

    kind: ClassVar[int]
    has_set: ClassVar[bool | None] = False
    """Whether a set follows; None if it may."""

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True, unsafe_hash=True)(cls)  # mypy sees a frozen one, whose objects take longer to make


class Hello(Message):
    """Peer: I am here.

    Args:
        name: Name for people, up to 64 characters.
        samples: Number of my samples; 0 if I ask for a shard of the server's data.
        layout: SHA-256 of the header of my sets; empty if I do not have the model yet.
        run: The run that I have taken part in; empty for a new peer.
        keeps: Whether I still have the weights that I trained in this run.
        updates: Batches that I have trained in all.
    """

    kind = 1
    name: str
    samples: int
    layout: str = ""
    run: str = ""
    keeps: bool = False
    updates: int = 0


class Welcome(Message):
    """Server: this is the plan, the model, and the set to begin with.

    Args:
        run: Name of the run.
        peer: Number of the peer.
        plan: The plan, as data of ``Plan``.
        model: The model's text.
        layout: SHA-256 of the header of sets.
        number: Number of your last post that I have answered.
        set_number: The set that follows; 0 if you keep your weights.
        trainings: Trainings that it went through.
        rate: Learning rate; 0 if the model's own holds.
        shard: The shard of the server's data that you have, as long as you are here; 0 if you train on your own data.
    """

    kind = 2
    has_set = None
    run: str
    peer: int
    plan: dict[str, Any]
    model: str
    layout: str
    number: int
    set_number: int
    trainings: int
    rate: float
    shard: int = 0
    set: bytes = b""


class Post(Message):
    """Peer: this is my set.

    Args:
        number: One more than that of my last answered post.
        contains: The set that I was given last and have taken in; 0 for none.
        updates: Batches since my last post.
        base: In rounds, the set that my training began with; else 0.
        accuracy: Accuracy of my training; -1 without one.
        loss: Loss of my training; -1 without one.
    """

    kind = 3
    has_set = True
    number: int
    contains: int
    updates: int
    base: int = 0
    accuracy: float = -1.0
    loss: float = -1.0
    set: bytes = b""


class Answer(Message):
    """Server: the answer to your post.

    Args:
        number: The post; 0 if it is not about one.
        answer: ``"continue"``, ``"merge"``, ``"replace"``, ``"validate"`` or ``"rejected"``.
        set_number: The set that follows, or the one to validate; 0 for none.
        trainings: Trainings that this set went through.
        accuracy: Accuracy of its training; -1 without one.
        rate: Learning rate; 0 if the model's own holds.
        why: The reason, if the post is rejected.
        epsilon: Epsilon of your releases so far; -1 without noise.
    """

    kind = 4
    has_set = None
    number: int
    answer: str
    set_number: int = 0
    trainings: int = 0
    accuracy: float = -1.0
    rate: float = 0.0
    why: str = ""
    epsilon: float = -1.0
    set: bytes = b""


class Score(Message):
    """Peer: I have tested a set on my data.

    Args:
        set_number: The set.
        accuracy: Share of correct answers; -1 without one.
        loss: Mean loss.
        samples: Number of samples.
    """

    kind = 5
    set_number: int
    accuracy: float
    loss: float
    samples: int


class Broken(Message):
    """Peer: my own weights are not finite any more; give me others.

    Args:
        why: The reason.
    """

    kind = 6
    why: str


class Bye(Message):
    """Peer: I leave."""

    kind = 7


class End(Message):
    """Server: the training is over, or you cannot take part.

    Args:
        why: The reason.
        hint: What to do.
        over: Whether the training is over for all.
        set_number: The last set; 0 without one.
    """

    kind = 8
    has_set = None
    why: str
    hint: str = ""
    over: bool = True
    set_number: int = 0
    set: bytes = b""


class Attempt(Message):
    """Server: a secure sum begins; make a fresh key for it.

    Args:
        attempt: Random name of the sum.
        base: The set that your training must begin with.
    """

    kind = 16
    attempt: str
    base: int


class Offered(Message):
    """Peer: this is my fresh key for the sum. Keys and signatures are hexadecimal.

    Args:
        attempt: The sum.
        base: The set that my training begins with.
        identity: My Ed25519 key.
        key: My fresh X25519 key.
        signature: My signature under it.
    """

    kind = 17
    attempt: str
    base: int
    identity: str
    key: str
    signature: str


class Members(Message):
    """Server: these peers are the members of the sum.

    Args:
        attempt: The sum.
        samples: The number of samples of a whole share: peers with more have the same weight.
        offers: By the number of the member: identity, key and signature, one after another.
    """

    kind = 18
    attempt: str
    samples: int
    offers: dict[str, Any]


class Masked(Message):
    """Peer: these are the masked numbers of my update, in place of a set.

    Args:
        number: One more than that of my last post.
        attempt: The sum.
        base: The set that my training began with.
        updates: Batches since then.
    """

    kind = 19
    has_set = True
    number: int
    attempt: str
    base: int
    updates: int
    set: bytes = b""


class Survivors(Message):
    """Server: the masked numbers of these members have come; sign this list.

    Args:
        attempt: The sum.
        members: Their numbers in ascending order, with commas.
    """

    kind = 20
    attempt: str
    members: str


class Signed(Message):
    """Peer: I have signed the list of survivors.

    Args:
        attempt: The sum.
        signature: The signature.
    """

    kind = 21
    attempt: str
    signature: str


class Signatures(Message):
    """Server: all survivors have signed the list.

    Args:
        attempt: The sum.
        signatures: By the number of the member.
    """

    kind = 22
    attempt: str
    signatures: dict[str, Any]


class Unmask(Message):
    """Peer: with this you can unmask the sum.

    Args:
        attempt: The sum.
        seed: The seed of my own mask.
        secrets: My secret with each member that is not a survivor, in the order of their numbers, one after another.
    """

    kind = 23
    attempt: str
    seed: str
    secrets: str


KINDS: dict[int, type[Message]] = {kind.kind: kind for kind in Message.__subclasses__()}
FIELDS: dict[type[Message], dict[str, Any]] = {
    kind: {
        name: hint if hint in (str, int, float, bool) else dict
        for name, hint in get_type_hints(kind).items()
        if name not in ("kind", "has_set", "set")
    }
    for kind in KINDS.values()
}
"""The fields in the text of each message, with their types in JSON."""
SECURE_FROM_PEER = (Offered, Masked, Signed, Unmask)
"""Messages of secure aggregation."""
FROM_PEER = (Hello, Post, Score, Broken, Bye, *SECURE_FROM_PEER)
FROM_SERVER = (Welcome, Answer, End, Attempt, Members, Survivors, Signatures)
M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """Return a message as the bytes of a frame."""
    return b"".join((_head(message), getattr(message, "set", b"")))


def _head(message: Message) -> bytes:
    """Return everything before the set."""
    data = vars(message).copy()  # faster than a field by its name
    data.pop("set", None)
    text = to_json(data, inf_nan_mode="strings")
    text += b" " * (-len(text) % 8)
    return PREFIX.pack(MAGIC, VERSION, message.kind, 0, len(text), 0) + text


def pieces(message: Message) -> bytes | Iterator[bytes | memoryview]:
    """Return a message as one frame; if its set is large, as fragments of the frame, so that no copy of the set is made.

    A WebSocket sends each fragment when the other side has read the earlier ones.
    """
    data = getattr(message, "set", b"")
    return encode(message) if len(data) < PIECE_BYTES else _fragments(message, memoryview(data))


def _fragments(message: Message, data: memoryview) -> Iterator[bytes | memoryview]:
    yield _head(message)
    for at in range(0, len(data), PIECE_BYTES):
        yield data[at : at + PIECE_BYTES]


def decode(data: bytes, of: tuple[type[Message], ...], set_bytes: int) -> Message:
    """Return the message in a frame.

    Args:
        data: The bytes.
        of: The messages that the other side may send.
        set_bytes: The length of a set; 0 if it is unknown yet.

    Raises:
        ProtocolError: The bytes are not such a message. The text says why.
    """
    if len(data) < PREFIX.size:
        raise ProtocolError(f"a frame has at least {PREFIX.size} bytes, got {len(data)}")
    magic, version, number, zero, length, zero_too = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("a frame begins with DDLP")
    if version != VERSION:
        raise ProtocolError(
            f"the other side speaks version {version} of the peers' protocol, and this one version {VERSION}",
            hint="install the same version of DDLF on both sides, or load the page again",
        )
    kind = KINDS.get(number)
    if kind is None or kind not in of or zero or zero_too:
        raise ProtocolError(f"a frame of kind {number} is not expected here")
    most = MOST_TEXT_BYTES if kind in FROM_PEER else MOST_WELCOME_BYTES
    if length > most or length % 8 or PREFIX.size + length > len(data):
        raise ProtocolError(f"the text of a frame has {length} bytes, which is too long, cut off or unaligned")
    set = bytes(data[PREFIX.size + length :])
    if kind.has_set is False and set:
        raise ProtocolError(f"{kind.__name__} has no set, got {len(set)} bytes")
    if kind.has_set is True and not set:
        raise ProtocolError(f"{kind.__name__} needs a set")
    if set and set_bytes and len(set) != set_bytes:
        raise ProtocolError(f"a set of this model has {set_bytes:,} bytes, got {len(set):,}")
    try:
        content = from_json(data[PREFIX.size : PREFIX.size + length])
    except ValueError as error:
        raise ProtocolError(f"the text of a frame is not JSON: {error}") from None
    return _message_of(kind, content, set)


def _message_of(kind: type[Message], content: Any, set: bytes) -> Message:
    if not isinstance(content, dict):
        raise ProtocolError(f"the text of {kind.__name__} is not a table")
    fields = FIELDS[kind]
    for name, value in content.items():
        expected = fields.get(name)
        if expected is None:
            raise ProtocolError(f"{kind.__name__} has no {name!r:.40}")
        if expected is float and type(value) is int and abs(value) < 2**53:
            content[name] = value = float(value)
        if type(value) is not expected or (expected is float and not isfinite(value)):
            raise ProtocolError(f"{name} of {kind.__name__} is {value!s:.40}")
        if expected is int and not 0 <= value < 2**53:
            raise ProtocolError(f"{name} of {kind.__name__} must be from 0 to 2^53, got {value!s:.40}")
    if kind.has_set is not False:
        content["set"] = set
    try:
        return kind(**content)
    except TypeError:
        raise ProtocolError(f"{kind.__name__} is incomplete") from None
