"""Random histories of a weight ledger and its journal, checked against a separate account.

The peers have no weights. The account records the posts in each set. It follows the actions of the peers, not the
ledger, so it can check whether a set really contains the posts that the ledger assumes.
"""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ddlf.peers.entries import (
    NO_SET,
    WITH_SET,
    Arrived,
    Began,
    Closed,
    Invited,
    Joined,
    Left,
    Lost,
    MergeAsked,
    Merged,
    Posted,
    Rejected,
    Validated,
)
from ddlf.peers.journal import history, open_journal
from ddlf.peers.ledger import Fate, Mean, Reply
from ddlf.peers.plan import Plan
from ddlf.peers.rounds import RoundLedger
from ddlf.peers.swap import SwapLedger

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder in memory if possible. A crash is simulated by a shorter file, so the files need no disk."""
PEERS = st.integers(1, 4)
FIRST = 0
"""The content of the first weights. They contain no post, so they have a separate number."""


class APeer:
    """The state of a peer: the posts in its live weights, its last post, and the last set that it has merged."""

    def __init__(self):
        self.live = frozenset({FIRST})
        self.base = NO_SET
        self.number = 0
        self.contains = NO_SET
        self.open = None  # the content of the post that waits for an answer
        self.is_present = False
        self.has_weights = False


class Histories(RuleBasedStateMachine):
    """Random joins, posts, lost answers, expiries, merges, new files, and crashes in the middle of a write."""

    ledger_of = SwapLedger
    plan = Plan(validate_s=7.0, merge="weighted")

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=IN_MEMORY))
        self.now = 1000.0
        self.peers = {}
        self.contents = {}  # for each set its posts
        self.acknowledged = {}  # for each set the peer that posted it
        self.fates = {}
        self.means = []
        self.written = 0
        self.next_set = 1

    def teardown(self):
        self.journal.close()
        shutil.rmtree(self.folder)

    # -- the server -----------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self):
        self.ledger = type(self).ledger_of(self.plan)
        self.journal, _ = open_journal(self.folder)
        self.journal.begin_file(self.ledger.state(), {})
        self.contents[1] = frozenset({FIRST})
        self.commit(Began(at=self.now, set=self.number(), run="run"))
        for peer in range(1, 5):
            self.commit(Invited(at=self.now, code=f"code {peer}", until=self.now + 10))
            self.commit(Joined(at=self.now, peer=peer, code=f"code {peer}", key=f"key {peer}"))
            self.peers[peer] = APeer()
            if peer < 4:
                self.arrive_with(peer, forgets=False)

    def number(self):
        self.next_set += 1
        return self.next_set - 1

    def commit(self, entry):
        self.ledger.admit(entry)
        self.write([entry])
        return self.follow(self.ledger.apply(entry))

    def write(self, entries):
        self.journal.append(
            [(entry, self.data(entry.set) if isinstance(entry, WITH_SET) else b"") for entry in entries]
        )
        self.written += len(entries)

    def data(self, number):
        return f"set {number:06d}".encode()

    def follow(self, instructions):
        """Record fates and means, and return the answers."""
        for item in instructions:
            if isinstance(item, Mean):
                self.means.append(item)
            if isinstance(item, Fate):
                assert item.set not in self.fates, "a set has two fates"
                self.fates[item.set] = item
                if item.state != "rejected" and item.set in self.acknowledged:
                    lacking = self.contents[item.set] - self.contents[item.into]
                    assert not lacking, f"{item} lacks the posts {lacking}"
        return [item for item in instructions if isinstance(item, Reply)]

    def deliver(self, replies, *, lost=()):
        for reply in replies:
            peer = self.peers[reply.peer]
            if not peer.is_present or reply.peer in lost:
                peer.is_present = False
                continue
            is_answer = peer.open is not None and reply.number == peer.number
            if not is_answer and (reply.answer != "replace" or peer.open is not None):
                continue
            peer.open = None
            if reply.answer == "merge":
                peer.live |= self.contents[reply.set]
                peer.contains = reply.set
            elif reply.answer in ("replace", "rejected"):
                peer.live = self.contents[reply.set]
                peer.contains = peer.base = reply.set

    # -- actions of peers -----------------------------------------------------------------------------------------------

    @rule(peer=PEERS, forgets=st.booleans())
    def arrive(self, peer, forgets):
        if not self.peers[peer].is_present:
            self.arrive_with(peer, forgets)

    def arrive_with(self, peer, forgets):
        state = self.peers[peer]
        keeps = state.has_weights and not forgets
        start = self.ledger.start()
        state.is_present = True
        self.deliver(self.commit(Arrived(at=self.now, peer=peer, name="", samples=100 * peer, keeps=keeps)))
        if not keeps:
            state.live, state.base, state.contains = self.contents[start], start, NO_SET
            state.has_weights, state.open = True, None
            state.number = self.ledger.members[peer].number
        elif state.open is not None:
            self.post_again(peer)

    def post_again(self, peer, lost=()):
        state = self.peers[peer]
        if self.ledger.is_repeated(peer, state.number):
            reply = self.ledger.repeat(peer)
            self.deliver([reply] if reply else [], lost=lost)
        else:
            self.deliver(self.commit(self.entry(peer)), lost=lost)

    def entry(self, peer):
        state = self.peers[peer]
        number = self.number()
        self.contents[number] = state.open | {number}
        state.open = self.contents[number]
        state.live |= state.open
        self.acknowledged[number] = peer
        return Posted(
            at=self.now,
            peer=peer,
            number=state.number,
            set=number,
            contains=state.contains,
            updates=1,
            base=state.base,
            accuracy=0.5,
        )

    def may_post(self, peer):
        return self.peers[peer].is_present and self.peers[peer].open is None

    @rule(peers=st.lists(PEERS, min_size=1, max_size=6))
    def post(self, peers):
        for peer in peers:
            self.post_of(peer)

    @rule(peer=PEERS)
    def post_and_miss_the_answer(self, peer):
        self.post_of(peer, lost={peer})

    def post_of(self, peer, lost=()):
        self.now += 0.5
        if self.may_post(peer):
            state = self.peers[peer]
            state.number, state.open = state.number + 1, state.live
            self.deliver(self.commit(self.entry(peer)), lost=lost)

    @rule(peer=PEERS)
    def post_values_that_are_not_finite(self, peer):
        if self.may_post(peer):
            state = self.peers[peer]
            state.number, state.open = state.number + 1, state.live
            entry = Rejected(at=self.now, peer=peer, number=state.number, contains=state.contains, why="NaN")
            self.deliver(self.commit(entry))

    @rule(peer=PEERS)
    def break_by_a_merge(self, peer):
        if self.may_post(peer):
            self.deliver(self.commit(Lost(at=self.now, peer=peer, why="NaN")))

    @rule(peer=PEERS)
    def leave(self, peer):
        if self.ledger.members[peer].present:
            self.peers[peer].is_present = False
            self.deliver(self.commit(Left(at=self.now, peer=peer, why="bye")))

    @rule(peer=PEERS)
    def cut_off(self, peer):
        self.peers[peer].is_present = False

    @rule(passed=st.floats(0, 40))
    def time_passes(self, passed):
        self.now += passed
        heard_at = {number: self.now for number, member in self.peers.items() if member.is_present}
        for entry in self.ledger.due_entries(self.now, heard_at):
            assert isinstance(entry, Left | Closed)
            self.deliver(self.commit(entry))

    @rule()
    def merge_all(self):
        self.deliver(self.commit(MergeAsked(at=self.now)))

    @rule(peer=PEERS)
    def validate(self, peer):
        sets = sorted(self.ledger.sets)
        entry = Validated(at=self.now, set=sets[peer % len(sets)], accuracy=0.5, loss=1.0, samples=64, peer=peer)
        self.commit(entry)

    @precondition(lambda self: self.means)
    @rule()
    def compute_a_mean(self):
        mean = self.means.pop(0)
        number = self.number()
        self.contents[number] = frozenset().union(*(self.contents[part] for part in mean.of))
        if mean.base != NO_SET:
            self.contents[number] |= self.contents[mean.base]
        self.deliver(self.commit(Merged(at=self.now, set=number, of=mean.of)))

    @rule()
    def begin_a_file(self):
        needed = {number: self.data(number) for number in self.ledger.pinned}
        self.journal.begin_file(self.ledger.state(), needed)
        self.journal.archive()

    @rule(posts=st.lists(PEERS, unique=True, max_size=4), share=st.floats(0, 1))
    def crash_while_posts_are_written(self, posts, share):
        """Crash in the middle of writing a batch of posts. No post of the batch has an answer."""
        durable = self.end()
        entries = []
        for peer in posts:
            if self.may_post(peer):
                state = self.peers[peer]
                state.number, state.open = state.number + 1, state.live
                entries.append(self.entry(peer))
        before = self.ledger.state()
        self.write(entries)
        path, size = self.end()
        cut = durable[1] + round(share * (size - durable[1]))
        with open(path, "r+b") as file:
            file.truncate(cut)
        self.journal.close()
        self.restart()
        arrived = [entry for entry in history(self.folder) if isinstance(entry, Posted)]
        survived = {entry.set for entry in arrived}
        for entry in entries:
            if entry.set not in survived:
                del self.acknowledged[entry.set]  # its peer has no answer, so it will send the post again
        if not survived & {entry.set for entry in entries}:
            assert self.ledger.state() == before

    @rule()
    def crash(self):
        before = self.ledger.state()
        self.journal.close()
        self.restart()
        assert self.ledger.state() == before

    def end(self):
        path = max(self.folder.glob("journal-*"))
        return path, path.stat().st_size

    def restart(self):
        for member in self.peers.values():
            member.is_present = False
        self.ledger = type(self).ledger_of(self.plan)
        self.journal, stored = open_journal(self.folder)
        self.ledger.restore(stored.snapshot)
        fates = dict(self.fates)
        for entry in stored.entries:
            for item in self.ledger.apply(entry):
                if isinstance(item, Fate):
                    fates[item.set] = item
        self.fates = fates
        pending = self.ledger.pending()
        self.means = [pending] if pending else []
        for number in self.ledger.pinned:
            assert self.journal.read(number) == self.data(number)

    # -- invariants -------------------------------------------------------------------------------------------------------

    @invariant()
    def each_set_is_in_one_place(self):
        for number in self.acknowledged:
            assert (number in self.ledger.sets) != (number in self.fates), f"set {number} is lost or doubled"

    @invariant()
    def no_post_is_lost(self):
        """The sets of the server contain each post that was not rejected."""
        contained = frozenset().union(*(self.contents[number] for number in self.ledger.sets), {FIRST})
        for number in self.acknowledged:
            if self.fates.get(number) is None or self.fates[number].state != "rejected":
                assert number in contained, f"post {number} is in no set"

    @invariant()
    def an_outstanding_set_has_one_peer(self):
        outstanding = {
            number: weight_set.peer
            for number, weight_set in self.ledger.sets.items()
            if weight_set.state == "outstanding"
        }
        handed = {
            member.handed: peer
            for peer, member in self.ledger.members.items()
            if member.handed and member.how == "merge"
        }
        assert outstanding == handed

    @invariant()
    def the_server_needs_few_sets(self):
        assert len(self.ledger.pinned) <= len(self.peers) + 6

    @invariant()
    def trainings_never_exceed_the_posts(self):
        posts = self.ledger.counts.get("posts", 0)
        assert max(weight_set.trainings for weight_set in self.ledger.sets.values()) <= posts


class RoundHistories(Histories):
    """Random histories of a ledger with rounds."""

    ledger_of = RoundLedger
    plan = Plan(way="rounds", merge="mean", quorum=2, deadline_s=20.0)
