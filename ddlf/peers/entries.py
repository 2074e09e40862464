"""Entries of the journal: the facts that determine a weight ledger. Pure.

An entry says what happened and when. The ledger decides what follows, and decides the same when it reads the journal
again. Some entries come with a set, whose bytes follow the entry in the journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, dataclass_transform

from ddlf.events.facts import from_data

NO_SET = 0
"""The number that stands for no set. Sets are numbered from 1."""
Strike = Literal["no", "again", "yes"]
NO_SHARD = 0
"""The number that stands for no shard. Shards are numbered from 1."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Entry:
    """A fact in the journal. Each subclass is a frozen dataclass.

    Attributes:
        at: Time in seconds since 1970.
    """

    at: float

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True, unsafe_hash=True)(cls)  # mypy sees a frozen one, whose objects take longer to make


class Began(Entry):
    """The server has begun, with the first weights.

    Args:
        set: Number of the set, the first base.
        run: Random name of the run. Peers of another run are refused.
    """

    at: float
    set: int
    run: str


class Invited(Entry):
    """The server has made a code that lets peers join.

    Args:
        code: SHA-256 of the code.
        until: Time of its expiry.
        peers: Number of peers that it lets join.
    """

    at: float
    code: str
    until: float
    peers: int = 1


class Joined(Entry):
    """A peer has used a code.

    Args:
        peer: Its number, from 1.
        code: SHA-256 of the code, which is used up after the last of its peers.
        key: SHA-256 of the key that proves later that it is the same peer.
    """

    at: float
    peer: int
    code: str
    key: str


class Arrived(Entry):
    """A peer has connected and can post.

    Args:
        peer: Its number.
        name: Name that it gave itself.
        samples: Number of its samples. It must not change, except with its shard.
        keeps: Whether it still has the weights that it trained, so that its next post contains its earlier ones.
        shard: The shard of the server's data that it has from now on; ``NO_SHARD`` if it has own data.
    """

    at: float
    peer: int
    name: str
    samples: int
    keeps: bool
    shard: int = NO_SHARD


class Posted(Entry):
    """A peer has sent its set, which is valid and finite.

    Args:
        peer: Its number.
        number: Number of the post, from 1, one higher than that of the peer's last accepted post.
        set: Number of the set.
        contains: The set that the peer was given and has merged or loaded; ``NO_SET`` if it has none.
        updates: Batches that the peer has trained since its last post.
        base: The base that the peer's training of this round began with; 0 outside of rounds.
        accuracy: Accuracy of its training; NaN if its model reports none.
        loss: Loss of its training; NaN if it has not trained.
        length: Length of its training: of the difference to the weights that it began with; 0 if it is unknown.
        moved: The same for weights that are not trained.
        share: Share of its training that counts.
    """

    at: float
    peer: int
    number: int
    set: int
    contains: int
    updates: int
    base: int = NO_SET
    accuracy: float = float("nan")
    loss: float = float("nan")
    length: float = 0.0
    moved: float = 0.0
    share: float = 1.0


class Rejected(Entry):
    """A post was refused because its set cannot be used.

    Args:
        peer: Number of the peer.
        number: Number of the post.
        contains: The same field as that of ``Posted``.
        why: The reason.
        strike: Whether it is a strike: never, only if the peer's last post was rejected, too, or always.
    """

    at: float
    peer: int
    number: int
    contains: int
    why: str
    strike: Strike = "no"


class Lost(Entry):
    """A peer's own weights were no longer finite after a merge or a training, so it begins again.

    Args:
        peer: Its number.
        why: The reason.
    """

    at: float
    peer: int
    why: str


class Left(Entry):
    """A peer has gone: it said so, its lease ran out, or it was removed.

    Args:
        peer: Its number.
        why: The reason.
        removed: Whether its key is void, so that it cannot come back.
    """

    at: float
    peer: int
    why: str
    removed: bool = False


class Merged(Entry):
    """The server has computed the mean that the ledger asked for.

    Args:
        set: Number of the new set.
        of: The sets that it was made of.
        releases: Releases with noise that the account of the run had then; 0 without noise.
        left_out: In swaps, the sets that do not count in the mean.
        why: A line for each suspicious set, with the reason.
    """

    at: float
    set: int
    of: tuple[int, ...]
    releases: int = 0
    left_out: tuple[int, ...] = ()
    why: tuple[str, ...] = ()


class Summed(Entry):
    """The masked posts of a round were added up, and the server has made the next base of their sum.

    Args:
        set: Number of the new base.
        peers: The peers in the sum.
        numbers: The number of each one's post.
        updates: Batches that each one has trained since the base of the round.
    """

    at: float
    set: int
    peers: tuple[int, ...]
    numbers: tuple[int, ...]
    updates: tuple[int, ...]


class MergeAsked(Entry):
    """Somebody has asked for a merge of all sets."""

    at: float


class Validated(Entry):
    """A set was tested.

    Args:
        set: Its number.
        accuracy: Share of correct answers; NaN if the model reports none.
        loss: Mean loss.
        samples: Number of samples of the test.
        peer: The peer that tested it on its own data; 0 for the server.
    """

    at: float
    set: int
    accuracy: float
    loss: float
    samples: int
    peer: int = 0


class Closed(Entry):
    """The deadline of a round has passed, and enough peers have posted.

    Args:
        base: The base that the round began with.
    """

    at: float
    base: int


class Ended(Entry):
    """The training is over.

    Args:
        why: The reason.
    """

    at: float
    why: str


KINDS: dict[str, type[Entry]] = {kind.__name__: kind for kind in Entry.__subclasses__()}
"""Every kind of entry by its name in the journal."""
WITH_SET = (Began, Posted, Merged, Summed)
"""Entries that come with the bytes of a set."""


def entry_to_data(entry: Entry) -> dict[str, Any]:
    """Return an entry as data for JSON, whose writer must turn NaN into a text, as ``facts.to_data`` does."""
    return {"kind": type(entry).__name__, **vars(entry)}


def entry_from_data(data: dict[str, Any]) -> Entry:
    """Return the entry in JSON data.

    Raises:
        ValueError: The data are not an entry of this version.
    """
    try:
        return from_data(KINDS[data["kind"]], data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"unknown entry {data!r:.200}") from error
