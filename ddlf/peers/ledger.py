"""The weight ledger: who takes part, and what became of each set. Pure: entries go in, instructions come out.

``apply`` takes an entry that is in the journal, and returns what the server must do. The ledger has no clock, no file
and no arrays. It knows sets by their numbers. So the same entries always give the same ledger, and a server that reads
its journal again knows what the earlier one knew.

Each acknowledged set is in exactly one state:

| state | meaning |
|---|---|
| waiting | the server has it, and the next post of another peer gets it |
| outstanding | one peer was given it, and has not yet posted a set that contains it |
| merging | the server computes a mean with it |
| base | all peers begin, or begin again, with it |
| contained | its peer, or the peer that was given it, has posted a later set |
| merged | it is part of a mean that the server has computed |
| rejected | it could not be used; the entry has the reason |

The ledger forgets a set that has reached one of the last three states. ``Fate`` reports it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ddlf.errors import DDLFError
from ddlf.events.facts import from_data, to_data
from ddlf.peers.entries import (
    NO_SET,
    NO_SHARD,
    Arrived,
    Began,
    Closed,
    Ended,
    Entry,
    Invited,
    Joined,
    Left,
    Lost,
    MergeAsked,
    Merged,
    Posted,
    Rejected,
    Strike,
    Summed,
    Validated,
)
from ddlf.peers.plan import LAST, MOST_SAMPLES, Plan, Validation, decayed, end_reason

LEASE_S = 10.0
"""Least seconds without a sign of life until a peer counts as gone."""
STRIKES = 3
"""A peer with so many strikes is out for a while."""
GOOD_POSTS = 10
"""A strike is forgotten after so many accepted posts."""
OUT_S, LONGEST_OUT_S = 60.0, 3600.0
"""Seconds that a peer is out for the first time, and at most. Each time is twice as long as the one before."""
LEASE_INTERVALS = 3.0
"""A lease is at least this number of the peer's mean time between posts."""

State = Literal["waiting", "outstanding", "merging", "base"]
Answer = Literal["continue", "merge", "replace", "validate", "rejected"]


class Unfit(DDLFError, ValueError):
    """A peer's request does not fit its state in the ledger, such as a post with another number of samples.

    What to do:
        Join again with a new link. If it happens again, install the same version of DDLF as the server.
    """


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Answer a post.

    Args:
        peer: The peer.
        number: Its post.
        answer: ``"continue"``; ``"merge"`` this set into the live weights; ``"replace"`` the live weights by this set,
            but keep the training since the post; ``"validate"`` this set, which the peer has posted; or
            ``"rejected"``: the post does not count, and the peer begins again with this set.
        set: The set, or ``NO_SET``.
        reason: Why the post is rejected; else empty.
    """

    peer: int
    number: int
    answer: Answer
    set: int = NO_SET
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Compute a mean of sets, and write an entry ``Merged``.

    Args:
        of: The sets.
        base: In rounds, the base that they began with; else ``NO_SET``.
    """

    of: tuple[int, ...]
    base: int = NO_SET


@dataclass(frozen=True, kw_only=True)
class Fate:
    """A set has reached its last state, so that its bytes may be deleted.

    Args:
        set: The set.
        state: ``"contained"``, ``"merged"`` or ``"rejected"``.
        into: The set that now stands for it, or ``NO_SET``.
    """

    set: int
    state: Literal["contained", "merged", "rejected"]
    into: int = NO_SET


@dataclass(frozen=True, kw_only=True)
class EndForAll:
    """The training is over, and all sets are merged: send the base to all peers."""

    reason: str


Instruction = Reply | Mean | Fate | EndForAll


@dataclass(kw_only=True)
class LedgerSet:
    """A set in the ledger.

    Attributes:
        state: Its state.
        peer: The peer whose next post contains it, or that has it outstanding; 0 for nobody.
        trainings: Number of local trainings that it went through.
        accuracy: Accuracy of its last training; NaN without one.
        samples: Samples of the peer that trained it.
        base: The newest base that is contained in it; a base contains itself.
        length: Length of its last training; 0 if it is unknown.
        share: Share of this training that counts.
    """

    state: State
    peer: int = 0
    trainings: int = 0
    base: int = NO_SET
    accuracy: float = float("nan")
    samples: int = 0
    length: float = 0.0
    share: float = 1.0


@dataclass(kw_only=True)
class Member:
    """A peer in the ledger.

    Attributes:
        key: SHA-256 of its key.
        name: Name that it gave itself.
        samples: Number of its samples; 0 before it has arrived.
        present: Whether it takes part now.
        removed: Whether it was removed for good.
        number: Number of its last answered post.
        trainings: Trainings that its live weights went through, as far as the server has seen.
        base: The newest base that is contained in its live weights.
        handed: The set of the last answer, until a post says that it is contained; else ``NO_SET``.
        how: What to do with this set.
        updates: Batches that it has trained, by its own account.
        posted_at: Time of its last post; 0 before.
        interval_s: Mean time between its posts; 0 before the second one.
        shard: The shard that it has while it is present; afterwards the one that it had last.
        length: Length of its last accepted training; 0 if it is unknown.
        longest: Length of its longest accepted training.
        moved: The same as ``length``, for weights that are not trained.
        trained: Updates of its last accepted post.
        strikes: Number of its strikes.
        failed: Whether its last post was rejected.
        good: Posts that were accepted since its last strike.
        out_until: Its posts do not count before this time.
        outs: How many times it was out; 0 again when its strikes are forgotten.
    """

    key: str
    name: str = ""
    samples: int = 0
    present: bool = False
    removed: bool = False
    number: int = 0
    trainings: int = 0
    base: int = NO_SET
    handed: int = NO_SET
    how: str = ""
    updates: int = 0
    posted_at: float = 0.0
    interval_s: float = 0.0
    shard: int = NO_SHARD
    length: float = 0.0
    longest: float = 0.0
    moved: float = 0.0
    trained: int = 0
    strikes: int = 0
    failed: bool = False
    good: int = 0
    out_until: float = 0.0
    outs: int = 0

    @property
    def lease_s(self) -> float:
        """The peer counts as gone after this number of seconds without a sign of life."""
        return max(LEASE_S, LEASE_INTERVALS * self.interval_s)

    def count_post(self, number: int, updates: int, at: float) -> None:
        """Count an accepted post."""
        self.number = number
        self.updates += updates
        if self.posted_at:
            interval_s = at - self.posted_at
            self.interval_s = 0.8 * self.interval_s + 0.2 * interval_s if self.interval_s else interval_s
        self.posted_at = at

    def was_good(self) -> None:
        """Count an accepted post. After some of them, a strike is forgotten."""
        self.failed, self.good = False, self.good + 1
        if self.strikes and self.good >= GOOD_POSTS:
            self.strikes, self.good = self.strikes - 1, 0
            self.outs = self.outs if self.strikes else 0

    def was_rejected(self, strike: Strike, at: float) -> None:
        """Count a rejected post. The last strike puts the peer out; when it is back, the next one does so again."""
        if at < self.out_until:
            return
        if strike == "yes" or (strike == "again" and self.failed):
            self.strikes, self.good = self.strikes + 1, 0
        self.failed = True
        if self.strikes >= STRIKES:
            self.out_until = at + min(OUT_S * 2**self.outs, LONGEST_OUT_S)
            self.strikes, self.outs, self.failed = STRIKES - 1, self.outs + 1, False


class WeightLedger(ABC):
    """Base of the ledgers of swaps and of rounds: members, invitations, validations and the end.

    Args:
        plan: How the peers work together.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.run = ""
        self.next_set = 1
        self.base = NO_SET
        self.replacements: list[int] = []  # sets that were given to replace weights
        self.validated = NO_SET
        self.validated_trainings = 0
        self.validated_base = NO_SET
        self.first_at = 0.0
        self.rate = plan.rate
        self.asked_at = 0.0
        self.asked = 0
        self.ended = ""
        self.over = False
        self.counts: dict[str, int] = {}
        self.releases = 0  # of the account at the last mean
        self.invitations: dict[str, float] = {}
        self.places: dict[str, int] = {}  # peers that may still join, of codes for several
        self.members: dict[int, Member] = {}
        self.sets: dict[int, LedgerSet] = {}
        self.free_shards = list(range(1, plan.shards + 1))  # without a peer, the next one first
        self._states: dict[State, dict[int, None]] = {state: {} for state in get_args(State)}
        self.validations: list[Validation] = []  # the last ones only
        self.validation_count = 0

    # -- what happens -------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> list[Instruction]:
        """Take an entry that is in the journal, and return what to do.

        Raises:
            Unfit: The entry does not fit the ledger. ``admit`` refuses such entries before they are written.
        """
        self.admit(entry)
        instructions: list[Instruction] = []
        match entry:
            case Began():
                self.run = entry.run
                self._take(entry.set, LedgerSet(state="base", base=entry.set))
                self.base = entry.set
                self._validate_as(entry.set)
            case Invited():
                self.invitations[entry.code] = entry.until
                if entry.peers > 1:
                    self.places[entry.code] = entry.peers
            case Joined():
                remaining = self.places.pop(entry.code, 1) - 1
                if remaining:
                    self.places[entry.code] = remaining
                else:
                    del self.invitations[entry.code]
                self.members[entry.peer] = Member(key=entry.key)
            case Arrived():
                instructions = self._on_arrived(entry)
            case Posted():
                member = self.members[entry.peer]
                self._count("posts")
                member.count_post(entry.number, entry.updates, entry.at)
                instructions = self._on_posted(entry, member)
                if entry.set in self.sets:
                    member.length, member.moved, member.trained = entry.length, entry.moved, entry.updates
                    member.longest = max(member.longest, entry.length)
                    member.was_good()
            case Rejected():
                member = self.members[entry.peer]
                self._count("rejected")
                member.number = entry.number
                member.was_rejected(entry.strike, entry.at)
                instructions = self._on_refused(entry.peer)
                instructions += [*self._on_lost(entry.peer), self._begin_again(entry.peer, "rejected", entry.why)]
            case Lost():
                self._count("lost")
                instructions = [*self._on_lost(entry.peer), self._begin_again(entry.peer, "replace", entry.why)]
            case Left():
                member = self.members[entry.peer]
                if member.present and member.shard:
                    self.free_shards.append(member.shard)
                member.present, member.removed = False, entry.removed
                instructions = self._on_left(entry.peer)
            case Validated():
                self._on_validated(entry)
            case Ended():
                self.ended = entry.why
                instructions = self._on_merge_asked()
            case MergeAsked():
                instructions = self._on_merge_asked()
            case Merged():
                self.releases = entry.releases
                instructions = self._on_merged(entry)
            case Closed():
                instructions = self._on_closed(entry)
            case Summed():
                instructions = self._on_summed(entry)
        instructions += self._next_instructions()
        if self.ended and not self.over and self.pending() is None:
            self.over = True
            instructions.append(EndForAll(reason=self.ended))
        return instructions

    def pending(self) -> Mean | None:
        """Return the mean that the server is to compute now; None if there is none."""
        merging = self._numbers_in("merging")
        return Mean(of=tuple(merging), base=self._base_of_mean) if merging else None

    def admit(self, entry: Entry) -> None:
        """Refuse an entry that does not fit, before it is written to the journal.

        Raises:
            Unfit: The text says why.
        """
        if self.ended and not isinstance(entry, Left | Validated | Merged | Ended):
            raise Unfit(f"the training is over: {self.ended}")
        match entry:
            case Joined() if entry.code not in self.invitations:
                raise Unfit("the code of the link is unknown or was used already", hint="ask for a new link")
            case Joined() if self.invitations[entry.code] < entry.at:
                raise Unfit("the code of the link has expired", hint="ask for a new link")
            case Joined() if entry.peer in self.members:
                raise Unfit(f"peer {entry.peer} has joined already")
            case Arrived() | Posted() | Rejected() | Lost() | Left():
                self._admit_member(entry)
            case Summed():
                self._admit_summed(entry)
            case Validated() if not (0 <= entry.accuracy <= 1 or entry.accuracy != entry.accuracy):
                raise Unfit(f"an accuracy must be from 0 to 1, got {entry.accuracy:g}")
            case Validated() if not 0 < entry.samples <= MOST_SAMPLES:
                raise Unfit(f"a validation needs 1 to {MOST_SAMPLES:,} samples, got {entry.samples}")
            case _:
                pass

    def _admit_member(self, entry: Arrived | Posted | Rejected | Lost | Left) -> None:
        member = self.members.get(entry.peer)
        if member is None:
            raise Unfit(f"there is no peer {entry.peer}")
        if member.removed:
            raise Unfit(f"peer {entry.peer} was removed", hint="ask for a new link")
        if isinstance(entry, Arrived):
            if not 0 < entry.samples <= MOST_SAMPLES:
                hint = "the server has no data for peers: name yours with --data"
                if entry.samples > 0:
                    hint = "train on a part of your data"
                raise Unfit(f"a peer needs 1 to {MOST_SAMPLES:,} samples, got {entry.samples:,}", hint=hint)
            has_shard = member.present and entry.shard == member.shard
            if self.plan.shards and not has_shard and entry.shard not in self.free_shards:
                raise Unfit(f"shard {entry.shard} is with another peer", hint="connect again")
            if member.number and not entry.shard and member.samples != entry.samples:
                raise Unfit(
                    f"the number of samples must not change: it was {member.samples:,}, and is {entry.samples:,}",
                    hint="join with a new link to train on other data",
                )
        elif not member.present and not isinstance(entry, Left):
            raise Unfit(f"peer {entry.peer} is not here", hint="connect again")
        if isinstance(entry, (Posted, Rejected)) and entry.number != member.number + 1:
            raise Unfit(f"post {member.number + 1} must come next, got post {entry.number}")
        if isinstance(entry, Posted) and not 0 <= entry.updates <= MOST_SAMPLES:
            raise Unfit(f"a post cannot have {entry.updates} updates")

    def shard_for(self, peer: int, samples: int) -> int:
        """Return the shard that an arriving peer gets; ``NO_SHARD`` in a training without shards.

        A peer that comes back gets its shard again, if nobody has it. Otherwise the shard that waits longest is given out.

        Args:
            peer: The peer.
            samples: Number of samples that it has; 0 if it asks for a shard.

        Raises:
            Unfit: All shards are with other peers, or the peer has own data.
        """
        if not self.plan.shards:
            return NO_SHARD
        if samples:
            raise Unfit(
                "this server gives each peer a part of its data", hint="join without your data: ddlf peers join LINK"
            )
        member = self.members[peer]
        if member.shard and (member.present or member.shard in self.free_shards):
            return member.shard
        if not self.free_shards:
            raise Unfit(
                f"each of the {self.plan.shards:,} shards is with a peer",
                hint="try again with the same link when a peer has left",
            )
        return self.free_shards[0]

    def out_s(self, peer: int, now: float) -> float:
        """Return for how many seconds the posts of a peer do not count yet, because of its strikes; 0 if they count."""
        return max(0.0, self.members[peer].out_until - now)

    def is_repeated(self, peer: int, number: int) -> bool:
        """Return whether the peer has sent this post before. It sends the post again if it missed the answer."""
        return 0 < number == self.members[peer].number

    def repeat(self, peer: int) -> Reply | None:
        """Return the answer to the peer's last post once more; None if there is none yet."""
        member = self.members[peer]
        if member.handed == NO_SET:
            return self._reply(peer, "continue")
        return self._reply(peer, "merge" if member.how == "merge" else "replace", member.handed)

    def due_entries(self, now: float, last_signs: Mapping[int, float]) -> list[Entry]:
        """Return the entries that time alone brings.

        Args:
            now: Time in seconds since 1970.
            last_signs: Time of the last sign of life of each connected peer.
        """
        if self.ended and not self.over:
            return []
        since = now - self.first_at if self.first_at else None
        if not self.ended and (reason := end_reason(self.plan, self.validations, since)):
            return [Ended(at=now, why=reason)]
        return [
            Left(at=now, peer=peer, why=f"no sign of life for {member.lease_s:.0f} s")
            for peer, member in self.members.items()
            if member.present and now - last_signs.get(peer, 0.0) > member.lease_s
        ]

    @property
    def missing_posts(self) -> int:
        """Number of posts that an open round still needs when all present peers have posted, or were rejected; 0 if it needs
        none.
        """
        return 0

    # -- what holds ---------------------------------------------------------------------------------------------------

    @property
    def present(self) -> list[int]:
        """The peers that take part now, in the order of their numbers."""
        return sorted(peer for peer, member in self.members.items() if member.present)

    def label(self, peer: int) -> str:
        """Return a peer as lines of the server call it: with its number, and the name that it gave itself."""
        return f"peer {peer}" + (f" ({name})" if (name := self.members[peer].name) else "")

    @property
    def pinned(self) -> set[int]:
        """The sets whose bytes are needed."""
        handed = {member.handed for member in self.members.values()}
        return {*self.sets, *handed, self.validated} - {NO_SET}

    def needs(self, number: int) -> bool:
        """Return whether the bytes of a set are needed."""
        if number in self.sets or number == self.validated:
            return True
        if number not in self.replacements:  # nobody else can have it, and there may be many members
            return False
        return any(member.handed == number for member in self.members.values())

    def start(self) -> int:
        """Return the set that an arriving peer without weights begins with."""
        return self.base

    def all_sets(self) -> list[int]:
        """Return the sets whose mean stands for the whole training now."""
        return [self.base]

    def state(self) -> dict[str, Any]:
        """Return the whole ledger as JSON data."""
        converted = ("plan", "members", "sets", "validations")
        facts = {
            name: value for name, value in vars(self).items() if name not in converted and not name.startswith("_")
        }
        data: dict[str, Any] = to_data(
            {**facts, "members": self.members, "sets": self.sets, "validations": self.validations}
        )
        return data

    def restore(self, data: dict[str, Any]) -> None:
        """Take over a state that ``state`` has returned."""
        members = {int(peer): from_data(Member, item) for peer, item in data["members"].items()}
        sets = {int(number): from_data(LedgerSet, item) for number, item in data["sets"].items()}
        validations = [from_data(Validation, item) for item in data["validations"]]
        vars(self).update(data | {"members": members, "sets": sets, "validations": validations})
        for number, ledger_set in sets.items():
            self._states[ledger_set.state][number] = None

    # -- parts of swaps and rounds ------------------------------------------------------------------------------------

    @property
    def _base_of_mean(self) -> int:
        """The base that the sets of a mean began with, if the mean depends on it."""
        return NO_SET

    @abstractmethod
    def _on_posted(self, entry: Posted, member: Member) -> list[Instruction]:
        """Take a set, and return the answer."""

    @abstractmethod
    def _on_merged(self, entry: Merged) -> list[Instruction]:
        """Take a mean that the server has computed."""

    @abstractmethod
    def _on_left(self, peer: int) -> list[Instruction]:
        """Take back the sets of a peer that has gone."""

    @abstractmethod
    def _on_lost(self, peer: int) -> list[Instruction]:
        """Take back the sets of a peer that has lost its weights: its next post contains none of them."""

    @abstractmethod
    def _on_merge_asked(self) -> list[Instruction]:
        """Begin to merge all sets."""

    @abstractmethod
    def _next_instructions(self) -> list[Instruction]:
        """Return what else is to do now."""

    def _on_closed(self, entry: Closed) -> list[Instruction]:
        return []

    def _admit_summed(self, entry: Summed) -> None:
        raise Unfit("this training has no secure sums")

    def _on_summed(self, entry: Summed) -> list[Instruction]:
        return []

    def _on_refused(self, peer: int) -> list[Instruction]:
        return []

    # -- common ---------------------------------------------------------------------------------------------------------

    def _on_arrived(self, entry: Arrived) -> list[Instruction]:
        member = self.members[entry.peer]
        if entry.shard in self.free_shards:
            self.free_shards.remove(entry.shard)
        member.name, member.samples, member.present = entry.name, entry.samples, True
        member.shard = entry.shard
        self.first_at = self.first_at or entry.at
        if entry.keeps:
            return []
        instructions = self._on_lost(entry.peer)
        start = self.sets[self.start()]
        member.trainings, member.base = start.trainings, start.base
        return instructions

    def _begin_again(self, peer: int, answer: Answer, reason: str) -> Reply:
        """Replace the weights of a peer by the last validated set."""
        member = self.members[peer]
        self._replace_by(self.validated)
        member.handed, member.how = self.validated, "replace"
        member.trainings, member.base = self.validated_trainings, self.validated_base
        return self._reply(peer, answer, self.validated, reason)

    def _give_base(self, peer: int, answer: Answer, reason: str = "") -> Reply:
        """Let a peer replace its weights by the base."""
        member = self.members[peer]
        self._replace_by(self.base)
        member.handed, member.how, member.base = self.base, "replace", self.base
        member.trainings = self.sets[self.base].trainings
        return self._reply(peer, answer, self.base, reason)

    def _replace_by(self, number: int) -> None:
        """Remember that a set was given to replace weights, and forget the sets that nobody takes in any more."""
        if number not in self.replacements:
            handed = {member.handed for member in self.members.values()}
            self.replacements = [replacement for replacement in self.replacements if replacement in handed] + [number]

    def _validate_as(self, number: int) -> None:
        """Remember a set as the last validated one."""
        ledger_set = self.sets[number]
        self.validated, self.validated_trainings, self.validated_base = number, ledger_set.trainings, ledger_set.base

    def _on_validated(self, entry: Validated) -> None:
        if entry.set in self.sets:
            self._validate_as(entry.set)
        if entry.accuracy == entry.accuracy:
            newest = Validation(accuracy=entry.accuracy, loss=entry.loss, samples=entry.samples)
            self.validations = [*self.validations, newest][-LAST:]
            self.validation_count += 1
            self.rate = decayed(self.plan, self.rate, self.validations, self.validation_count)

    def _asks_for_validation(self, peer: int, at: float) -> bool:
        """Return whether this post is answered by a request to validate. The peers take turns."""
        plan = self.plan
        if plan.validated_by != "peers" or not plan.validate_s or at - self.asked_at < plan.validate_s:
            return False
        if peer == self.asked and len(self.present) > 1:
            return False
        self.asked, self.asked_at = peer, at
        return True

    def _reply(self, peer: int, answer: Answer, set: int = NO_SET, reason: str = "") -> Reply:
        return Reply(peer=peer, number=self.members[peer].number, answer=answer, set=set, reason=reason)

    def _take(self, number: int, ledger_set: LedgerSet) -> None:
        if number < self.next_set:
            raise Unfit(f"set {self.next_set} must come next, got set {number}")
        self.next_set = number + 1
        self.sets[number] = ledger_set
        self._states[ledger_set.state][number] = None

    def _move(self, number: int, state: State, peer: int) -> None:
        """Change the state of a set, and the peer that it belongs to."""
        ledger_set = self.sets[number]
        del self._states[ledger_set.state][number]
        ledger_set.state, ledger_set.peer = state, peer
        self._states[state][number] = None

    def _end_of(self, number: int, state: Literal["contained", "merged", "rejected"], into: int) -> Fate:
        del self._states[self.sets.pop(number).state][number]
        self._count(state)
        return Fate(set=number, state=state, into=into)

    def _ends_of(self, entry: Merged) -> list[Instruction]:
        """End the sets of a mean: merged, or rejected if they do not count in it."""
        return [
            self._end_of(number, "rejected" if number in entry.left_out else "merged", entry.set) for number in entry.of
        ]

    def _numbers_in(self, state: State) -> list[int]:
        """Return the sets in a state, the oldest first. A restored ledger has the same order."""
        return sorted(self._states[state])

    def _count(self, outcome: str) -> None:
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
