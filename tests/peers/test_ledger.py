"""Tests of the weight ledger: examples, and short random histories. ``tests/trials/weight_ledger.py`` runs long ones."""

import pytest

from ddlf.peers.entries import (
    Arrived,
    Began,
    Closed,
    Ended,
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
from ddlf.peers.ledger import EndForAll, Fate, Mean, Reply, Unfit
from ddlf.peers.plan import Plan
from ddlf.peers.rounds import RoundLedger
from ddlf.peers.swap import SwapLedger
from tests.peers.histories import Histories, RoundHistories

TestSwaps = Histories.TestCase
TestRounds = RoundHistories.TestCase


class Table:
    """A ledger with present peers."""

    def __init__(self, peers, ledger=SwapLedger, **plan):
        plan = {"validate_s": 0.0} | plan
        self.ledger = ledger(Plan(**plan))
        self.now, self.sets, self.numbers = 100.0, 1, {}
        self.ledger.apply(Began(at=0.0, set=1, run="run"))
        for peer in range(1, peers + 1):
            self.ledger.apply(Invited(at=0.0, code=f"c{peer}", until=1e9))
            self.ledger.apply(Joined(at=0.0, peer=peer, code=f"c{peer}", key=f"k{peer}"))
            self.arrive(peer)

    def arrive(self, peer, **how):
        how = {"keeps": False, "samples": 100, "name": ""} | how
        return self.ledger.apply(Arrived(at=self.now, peer=peer, **how))

    def post(self, peer, contains=0, updates=20, **more):
        self.now += 1
        self.sets += 1
        self.numbers[peer] = self.numbers.get(peer, 0) + 1
        entry = Posted(
            at=self.now, peer=peer, number=self.numbers[peer], set=self.sets, contains=contains, updates=updates, **more
        )
        return self.ledger.apply(entry)

    def merged(self, *of):
        self.sets += 1
        return self.ledger.apply(Merged(at=self.now, set=self.sets, of=of))


def answer(peer, number, answer, set=0, reason=""):
    return Reply(peer=peer, number=number, answer=answer, set=set, reason=reason)


def test_a_single_peer_continues_and_its_later_set_contains_the_earlier():
    table = Table(1)
    assert table.post(1) == [answer(1, 1, "continue")]
    assert table.post(1) == [Fate(set=2, state="contained", into=3), answer(1, 2, "continue")]


def test_two_peers_swap_their_sets():
    table = Table(2)
    assert table.post(1) == [answer(1, 1, "continue")]
    assert table.post(2) == [answer(2, 1, "merge", 2)]
    assert table.post(1) == [answer(1, 2, "merge", 3)]
    assert table.ledger.sets[2].state == table.ledger.sets[3].state == "outstanding"
    assert table.post(2, contains=2) == [Fate(set=2, state="contained", into=5), answer(2, 2, "merge", 4)]


def test_a_set_is_sent_again_if_its_answer_was_lost():
    table = Table(2)
    table.post(1)
    assert table.post(2) == [answer(2, 1, "merge", 2)]
    assert table.ledger.is_repeated(2, 1)
    assert table.ledger.repeat(2) == answer(2, 1, "merge", 2)
    assert table.post(2, contains=0) == [Fate(set=3, state="contained", into=4), answer(2, 2, "merge", 2)]


def test_the_server_counts_trainings_and_trusts_no_peer():
    table = Table(2, merge="weighted")
    for _ in range(3):
        table.post(1, updates=10**9)
    table.post(2)
    assert table.ledger.sets[5].trainings == 1
    table.post(2, contains=4)  # max(1, 3) + 1
    assert table.ledger.sets[6].trainings == 4
    table.post(2, contains=0, updates=0)
    assert table.ledger.members[2].trainings == 4


def test_average_leaves_the_trainings_of_the_poster():
    table = Table(2, merge="average")
    for _ in range(3):
        table.post(1)
    table.post(2)
    table.post(2, contains=4)
    assert table.ledger.sets[6].trainings == 2


def test_a_due_validation_keeps_the_posted_set():
    table = Table(2, validate_s=5.0)
    assert table.post(1) == [answer(1, 1, "validate", 2)]
    assert table.post(2) == [answer(2, 1, "merge", 2)]
    table.now += 5
    assert table.post(2, contains=2)[-1] == answer(2, 2, "validate", 4)
    table.now += 5
    assert table.post(2)[-1].answer != "validate"  # the peers take turns


def test_the_outstanding_set_of_a_leaving_peer_returns_to_the_server():
    table = Table(2)
    table.post(1)
    table.post(2)
    instructions = table.ledger.apply(Left(at=table.now, peer=2, why="bye"))
    assert instructions == [Mean(of=(2, 3))]  # the outstanding set of the peer, and its own set
    assert table.merged(2, 3) == [Fate(set=2, state="merged", into=4), Fate(set=3, state="merged", into=4)]
    assert table.ledger.sets[4].state == "waiting"


def test_a_merge_all_gives_all_peers_one_set_and_keeps_their_posts():
    table = Table(2)
    table.post(1)
    table.post(2)
    assert table.ledger.apply(MergeAsked(at=table.now)) == [Mean(of=(2, 3))]
    instructions = table.merged(2, 3)
    assert Fate(set=1, state="contained", into=4) in instructions
    assert table.post(1) == [answer(1, 2, "replace", 4)]
    assert table.post(2, contains=2) == [answer(2, 2, "replace", 4), Mean(of=(5, 6))]
    table.merged(5, 6)
    assert table.post(1, contains=4)[-1] == answer(1, 3, "merge", 7)


def test_posts_continue_while_the_server_computes():
    table = Table(3)
    table.post(1)
    table.ledger.apply(MergeAsked(at=table.now))
    assert table.post(2) == [answer(2, 1, "continue")]
    assert table.post(3) == [answer(3, 1, "merge", 3)]
    table.merged(2)
    assert answer(2, 2, "replace", 5) in table.post(2)


def test_the_newest_set_represents_the_training_during_a_merge():
    table = Table(2)
    table.post(1)
    table.post(2)
    assert table.ledger.start() == 3
    table.ledger.apply(Left(at=table.now, peer=2, why="bye"))  # sets 2 and 3 are being merged, and no set waits
    assert table.ledger.start() == 3  # set 3 is validated and sent to new peers, because the first set is untrained
    table.arrive(2)
    assert table.ledger.members[2].trainings == table.ledger.sets[3].trainings == 1
    table.merged(2, 3)
    assert table.ledger.start() == 4


def test_a_peer_whose_values_are_not_finite_restarts_from_the_last_validated_set():
    table = Table(2)
    table.post(1)
    table.ledger.apply(Validated(at=table.now, set=2, accuracy=0.5, loss=1.0, samples=64, peer=1))
    table.post(2)
    instructions = table.ledger.apply(Lost(at=table.now, peer=2, why="NaN"))
    assert instructions == [answer(2, 1, "replace", 2, "NaN"), Mean(of=(2, 3))]
    instructions = table.ledger.apply(Rejected(at=table.now, peer=1, number=2, contains=0, why="NaN"))
    assert instructions == [answer(1, 2, "rejected", 2, "NaN")]


def test_the_end_merges_all_sets_first():
    table = Table(2)
    table.post(1)
    table.post(2)
    assert table.ledger.apply(Ended(at=table.now, why="enough")) == [Mean(of=(2, 3))]
    assert table.merged(2, 3)[-1] == EndForAll(reason="enough")
    with pytest.raises(Unfit, match="the training is over: enough"):
        table.post(1)


def test_a_training_without_posts_ends_at_once():
    assert Table(1).ledger.apply(Ended(at=1.0, why="enough")) == [EndForAll(reason="enough")]


def test_a_lease_is_longer_for_a_slow_peer():
    table = Table(2)
    for _ in range(3):
        table.now += 20
        table.post(1)
    table.arrive(1, keeps=True)
    departure = table.ledger.due_entries(table.now + 30, {1: table.now, 2: table.now})
    assert [entry.peer for entry in departure] == [2]
    assert not table.ledger.due_entries(table.now + 9, {1: table.now, 2: table.now})


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (Joined(at=1.0, peer=9, code="c1", key="k"), "used already"),
        (Joined(at=1.0, peer=9, code="late", key="k"), "has expired"),
        (Arrived(at=1.0, peer=1, name="", samples=0, keeps=True), "1 to 1,000,000,000 samples, got 0"),
        (Arrived(at=1.0, peer=1, name="", samples=10**12, keeps=True), "1 to 1,000,000,000 samples"),
        (Posted(at=1.0, peer=1, number=2, set=9, contains=0, updates=1), "post 1 must come next, got post 2"),
        (Posted(at=1.0, peer=1, number=1, set=9, contains=0, updates=-1), "-1 updates"),
        (Posted(at=1.0, peer=7, number=1, set=9, contains=0, updates=1), "no peer 7"),
        (Validated(at=1.0, set=1, accuracy=1.5, loss=0.0, samples=1), "from 0 to 1"),
        (Validated(at=1.0, set=1, accuracy=0.5, loss=0.0, samples=0), "1 to 1,000,000,000 samples"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused_and_changes_nothing(entry, sentence):
    table = Table(1)
    table.ledger.apply(Invited(at=0.0, code="late", until=0.5))
    before = table.ledger.state()
    with pytest.raises(Unfit, match=sentence):
        table.ledger.apply(entry)
    assert table.ledger.state() == before


def test_a_removed_peer_cannot_come_back():
    table = Table(1)
    table.ledger.apply(Left(at=1.0, peer=1, why="removed", removed=True))
    with pytest.raises(Unfit, match="was removed"):
        table.arrive(1)
    with pytest.raises(Unfit):
        table.post(1)


def rounds(peers, **plan):
    return Table(peers, RoundLedger, way="rounds", merge="mean", **plan)


def test_a_round_closes_when_all_present_peers_have_posted():
    table = rounds(2)
    assert table.post(1, base=1) == []
    assert table.post(2, base=1) == [Mean(of=(2, 3), base=1)]
    instructions = table.merged(2, 3)
    assert [item for item in instructions if isinstance(item, Reply)] == [
        answer(1, 1, "replace", 4),
        answer(2, 1, "replace", 4),
    ]
    assert table.ledger.round == 2


def test_a_round_never_waits_for_a_peer_that_is_gone():
    table = rounds(2)
    table.post(1, base=1)
    assert table.ledger.apply(Left(at=table.now, peer=2, why="bye")) == [Mean(of=(2,), base=1)]


def test_a_round_closes_at_its_deadline_with_a_quorum():
    table = rounds(3, quorum=2, deadline_s=5.0)
    heard_at = dict.fromkeys((1, 2, 3), 1e9)
    table.post(1, base=1)
    assert table.ledger.due_entries(table.now + 6, heard_at) == []
    table.post(2, base=1)
    [closed] = table.ledger.due_entries(table.now + 6, heard_at)
    assert closed == Closed(at=table.now + 6, base=1)
    assert table.ledger.apply(closed) == [Mean(of=(2, 3), base=1)]


def test_a_latecomer_joins_the_next_round():
    table = rounds(2)
    table.post(1, base=1)
    table.post(2, base=1)
    table.merged(2, 3)
    assert table.post(1, base=1) == [
        Fate(set=5, state="rejected"),
        answer(1, 2, "rejected", 4, "its round is over"),
    ]


def test_a_peer_that_restarts_in_a_round_counts_once():
    table = rounds(2)
    table.post(1, base=1)
    table.arrive(1, keeps=False)
    assert table.post(1, base=1) == [Fate(set=2, state="rejected", into=3)]
    assert table.post(2, base=1) == [Mean(of=(3, 4), base=1)]


def test_a_peer_that_missed_the_base_of_a_merge_all_receives_it_at_its_next_post():
    """Otherwise its set would count as one that contains the base, and the next merge-all would omit the base."""
    table = Table(2)
    table.post(1)
    table.post(2)
    table.ledger.apply(MergeAsked(at=table.now))
    table.merged(2, 3)
    assert table.post(1) == [answer(1, 2, "replace", 4)]
    table.ledger.apply(Left(at=table.now, peer=1, why="no sign of life"))
    table.arrive(1, keeps=True)
    assert table.ledger.repeat(1) == answer(1, 2, "replace", 4)


def test_a_set_without_the_base_never_replaces_it():
    table = Table(1)
    table.post(1)
    table.ledger.apply(MergeAsked(at=table.now))
    table.merged(2)
    assert table.post(1)[0] == answer(1, 2, "replace", 3)
    table.post(1)  # a resumed run did not receive this answer
    assert table.ledger.all_sets()[0] == table.ledger.base
