"""Tests of rounds with secure aggregation: the ledger, the messages that the server forwards, and real peers."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from ddlf.errors import BadUpdate, ConfigError, ProtocolError
from ddlf.peers import frames, secure_rounds
from ddlf.peers.entries import Arrived, Began, Ended, Invited, Joined, Left, Posted, Summed
from ddlf.peers.frames import Attempt, Masked, Members, Signatures, Survivors
from ddlf.peers.journal import history
from ddlf.peers.ledger import Reply, Unfit
from ddlf.peers.peer import Peer
from ddlf.peers.plan import Plan
from ddlf.peers.secure_ledger import SecureLedger
from ddlf.peers.secure_peer import SecurePeer
from ddlf.peers.secure_rounds import AddUp, Say, SecureRounds, Tell
from ddlf.peers.secure_updates import base_of, check_layout, numbers_of, terms_of
from ddlf.peers.sets import layout_of
from ddlf.privacy.secure_sum import LEVELS, MOST, unmasked
from tests.patience import PATIENCE_S
from tests.peers.test_server import LAYOUT, Running, a_set

PLAN = Plan(way="rounds", merge="mean", quorum=3, secure_aggregation=True, validate_s=0.0)
BASE = [np.zeros((3, 2), np.float32), np.zeros(2, np.float32)]
VALUES = 8


class Table:
    """A ledger, the server's side of the sums, and peers, without sockets. The clock does not advance by itself."""

    def __init__(self, count, plan=PLAN):
        self.plan, self.now = plan, 100.0
        self.ledger = SecureLedger(plan)
        self.ledger.apply(Began(at=1.0, set=1, run="run"))
        self.rounds = SecureRounds(self.ledger, VALUES, lambda base, most: terms_of(plan, most, "text", b"set"))
        self.peers, self.lines, self.replies, self.work, self.codes = {}, [], [], [], []
        self.silent = set()  # peers that receive and send no message
        self.mute = {}  # for each peer the kinds of messages that it does not answer
        for _ in range(count):
            self.join()

    def join(self, samples=None):
        number = len(self.ledger.members) + 1
        self.ledger.apply(Invited(at=self.now, code=f"{number}", until=1e9))
        self.ledger.apply(Joined(at=self.now, peer=number, code=f"{number}", key="key"))
        samples = 10 * number if samples is None else samples
        self.ledger.apply(Arrived(at=self.now, peer=number, name="", samples=samples, keeps=False))
        peer = SecurePeer(self.plan, "run", number, samples, self.codes.append, "text")
        peer.begin(self.ledger.base, BASE, b"set")
        self.peers[number] = peer
        return number

    def leave(self, number):
        self.ledger.apply(Left(at=self.now, peer=number, why="gone"))
        self.silent.add(number)

    def step(self):
        self.follow(self.rounds.step(self.now))

    def send(self, number, message):
        self.follow(self.rounds.received(number, message, self.now))

    def follow(self, instructions):
        for instruction in instructions:
            match instruction:
                case Tell() if instruction.peer not in self.silent:
                    answer = self.peers[instruction.peer].received(instruction.message)
                    if answer is not None and not isinstance(instruction.message, self.mute.get(instruction.peer, ())):
                        self.send(instruction.peer, answer)
                case Reply():
                    self.replies.append(instruction)
                    if instruction.set:
                        self.peers[instruction.peer].begin(instruction.set, BASE, b"set")
                case AddUp():
                    self.work.append(instruction)
                case Say():
                    self.lines.append(instruction.text)

    def update(self, number):
        return [np.full_like(array, number / 64) for array in BASE]

    def post(self, *numbers, number=1):
        for peer in numbers:
            live = [old - new for old, new in zip(BASE, self.update(peer), strict=True)]
            self.send(peer, self.peers[peer].masked(live, number, 20))

    def mean(self, work):
        total = unmasked({peer: post.set for peer, post in work.posts.items()}, work.answers)
        weights, _ = base_of(self.plan, BASE, total, list(work.shares.values()), [], [True, True])
        return weights

    def expected(self, *members):
        """Return the FedAvg of the members' updates."""
        samples = sum(10 * member for member in members)
        return -sum(10 * member * member / 64 for member in members) / samples

    def commit(self, work, number=2):
        numbers = tuple(post.number for post in work.posts.values())
        entry = Summed(at=self.now, set=number, peers=tuple(work.posts), numbers=numbers, updates=(20,) * len(numbers))
        self.follow(self.ledger.apply(entry))
        self.follow(self.rounds.added(self.now))


def assert_mean(table, work, members):
    assert tuple(work.posts) == members
    step = PLAN.update_limit / LEVELS
    for array in table.mean(work):
        np.testing.assert_allclose(array, table.expected(*members), atol=len(members) * step, rtol=0)


def test_round_of_eight_peers_gives_fedavg_and_the_next_one_has_new_keys():
    table = Table(8)
    table.step()
    assert table.rounds.phase == "posts"
    assert len(set(table.codes)) == 1
    first = table.rounds.attempt
    table.post(*range(1, 9))
    [work] = table.work
    assert_mean(table, work, tuple(range(1, 9)))
    table.commit(work)
    assert (table.ledger.base, table.ledger.counts["posts"], table.ledger.sets.keys()) == (2, 8, {2})
    assert [(reply.answer, reply.set, reply.number) for reply in table.replies] == [("replace", 2, 1)] * 8
    assert table.rounds.attempt != first


def test_two_peers_lost_before_their_keys_are_not_members():
    table = Table(8)
    table.leave(2)
    table.leave(7)
    table.step()
    table.post(1, 3, 4, 5, 6, 8)
    assert_mean(table, table.work[0], (1, 3, 4, 5, 6, 8))


def test_two_peers_lost_before_their_posts_are_left_out():
    table = Table(8)
    table.step()
    table.post(1, 3, 4, 5, 6)
    table.leave(2)
    table.leave(7)
    table.post(8)
    assert_mean(table, table.work[0], (1, 3, 4, 5, 6, 8))


def test_two_peers_lost_after_their_posts_and_before_the_list_are_left_out():
    table = Table(8)
    table.step()
    table.post(1, 2, 3, 4, 5, 6, 7)
    table.leave(2)
    table.leave(7)
    table.post(8)
    assert_mean(table, table.work[0], (1, 3, 4, 5, 6, 8))


@pytest.mark.parametrize("kind", [Survivors, Signatures])
def test_survivors_lost_before_their_signature_or_their_answer_make_the_round_void(kind):
    table = Table(8)
    table.mute = {2: kind, 7: kind}
    table.step()
    first = table.rounds.attempt
    table.post(*range(1, 9))
    assert not table.work
    table.leave(2)
    table.leave(7)
    table.step()
    assert table.lines == [
        "void      the round begins again with new keys: peer 2 has left between its post and the sum"
    ]
    assert sorted(reply.peer for reply in table.replies if reply.answer == "continue") == list(range(1, 9))
    assert table.rounds.attempt != first
    table.mute = {}
    table.post(1, 3, 4, 5, 6, 8, number=2)
    assert_mean(table, table.work[0], (1, 3, 4, 5, 6, 8))


def test_round_is_void_if_a_survivor_does_not_answer_in_time():
    table = Table(3)
    table.mute = {2: Signatures}
    table.step()
    table.post(1, 2, 3)
    table.now += PLAN.deadline_s - 0.1
    table.step()
    assert not table.lines
    table.now += 0.2
    table.step()
    assert "peer 2 has not answered in time" in table.lines[0]


def test_peers_have_time_to_answer_despite_a_short_deadline_for_posts():
    table = Table(3, replace(PLAN, deadline_s=0.0))
    table.mute = {2: Survivors}
    table.step()
    table.post(1, 2, 3)
    table.step()
    assert (table.rounds.phase, table.lines) == ("signing", [])
    table.mute = {}
    table.follow(table.rounds.arrived(2, keeps=True))
    assert_mean(table, table.work[0], (1, 2, 3))


def test_round_closes_at_its_deadline_without_a_slow_peer_which_begins_again():
    table = Table(4)
    table.step()
    table.post(1, 2, 4)
    assert not table.work
    table.now += PLAN.deadline_s
    table.step()
    [work] = table.work
    assert_mean(table, work, (1, 2, 4))
    table.post(3)  # while the server computes the sum
    table.commit(work)
    late = [reply for reply in table.replies if reply.peer == 3]
    assert [(reply.number, reply.answer, reply.set, reply.reason) for reply in late] == [
        (1, "rejected", 2, secure_rounds.LATE)
    ]


def test_round_below_the_least_number_of_survivors_is_void():
    table = Table(4)
    table.step()
    table.post(1, 2)
    table.leave(3)
    table.leave(4)
    table.step()
    assert table.lines == [
        "void      the round begins again with new keys: 2 of 4 members are left",
        "waits     a secure sum needs 3 peers; here: 2",
    ]
    assert not table.work
    table.join()
    table.step()
    assert table.rounds.phase == "posts"


def test_two_peers_never_begin():
    table = Table(2)
    table.step()
    table.step()
    assert (table.rounds.phase, len(table.lines)) == ("idle", 1)


def test_peer_receives_missed_messages_after_a_lost_connection():
    table = Table(3)
    table.step()
    table.silent = {2}
    table.post(1, 3)
    message = table.peers[2].masked([array - 0.5 for array in BASE], 1, 20)
    table.send(2, message)
    table.send(2, message)  # its new connection sends the message again
    assert table.rounds.phase == "signing"
    table.silent = set()
    table.follow(table.rounds.arrived(2, keeps=True))
    assert [work.base for work in table.work] == [1]


def test_peer_that_lost_its_keys_is_left_out():
    table = Table(4)
    table.step()
    table.post(1, 2, 3)
    table.peers[2] = SecurePeer(table.plan, "run", 2, 20, table.codes.append, "text")
    table.peers[2].begin(1, BASE, b"set")
    table.follow(table.rounds.arrived(2, keeps=False))
    table.post(4)
    assert_mean(table, table.work[0], (1, 3, 4))


def test_peer_with_an_older_base_restarts_before_it_offers_a_key():
    table = Table(3)
    table.peers[2].begin(0, BASE)
    table.mute = {2: Attempt}
    table.step()
    [offered] = [table.peers[2].received(Attempt(attempt=table.rounds.attempt, base=1))]
    table.send(2, offered)
    assert [(reply.peer, reply.answer, reply.set) for reply in table.replies] == [(2, "rejected", 1)]
    assert table.rounds.phase == "offers"


def test_impossible_sum_is_refused():
    table = Table(3)
    table.step()
    table.post(1, 2)
    attempt = table.rounds.attempt
    wrong = np.random.default_rng(0).bytes(4 * VALUES)
    table.peers[3].masked(BASE, 1, 20)
    table.send(3, Masked(number=1, attempt=attempt, base=1, updates=20, set=wrong))
    with pytest.raises(ProtocolError, match="wrong mask"):
        table.mean(table.work[0])
    table.follow(table.rounds.wrong("a wrong mask", table.now))
    assert (table.rounds.phase, len(table.replies)) == ("posts", 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": "00" * 32}, "not signed"),
        ({"key": "00" * 31}, "a key has 64 hexadecimal digits"),
        ({"key": "zz" * 32}, "a key has 64 hexadecimal digits"),
        ({"signature": ""}, "a signature has 128"),
        ({"identity": "ab" * 32}, "not signed"),
    ],
)
def test_server_refuses_an_offer(change, reason):
    table = Table(3)
    table.mute = {2: Attempt}
    table.step()
    offered = table.peers[2].received(Attempt(attempt=table.rounds.attempt, base=1))
    with pytest.raises(ProtocolError, match=reason):
        table.send(2, type(offered)(**(vars(offered) | change)))
    table.send(2, offered)
    assert table.rounds.phase == "posts"


def test_server_refuses_the_same_identity_twice():
    table = Table(3)
    table.peers[2]._identity = table.peers[1]._identity
    with pytest.raises(ProtocolError, match="peer 1 has offered the same key"):
        table.step()


def test_server_refuses_masked_numbers_of_another_length_and_wrong_answers():
    table = Table(3)
    table.mute = {1: (Survivors, Signatures)}
    table.step()
    attempt = table.rounds.attempt
    with pytest.raises(ProtocolError, match=r"have 32 bytes, got 28 bytes"):
        table.send(1, Masked(number=1, attempt=attempt, base=1, updates=1, set=bytes(28)))
    table.post(1, 2, 3)
    with pytest.raises(ProtocolError, match="signature under the list"):
        table.send(1, frames.Signed(attempt=attempt, signature="00" * 64))
    table.send(1, table.peers[1].received(Survivors(attempt=attempt, members="1,2,3")))
    with pytest.raises(ProtocolError, match="list of secrets has 0"):
        table.send(1, frames.Unmask(attempt=attempt, seed="00" * 32, secrets="00" * 32))


def test_server_refuses_the_51st_member():
    table = Table(MOST)
    table.join()
    with pytest.raises(Unfit, match="50 members at most"):
        table.step()


def test_peer_refuses_a_whole_share_without_samples():
    table = Table(3)
    table.mute = dict.fromkeys((1, 2, 3), Members)
    table.step()
    members = table.rounds._members()
    fresh = SecurePeer(PLAN, "run", 1, 1000, table.codes.append)
    fresh.received(Attempt(attempt=members.attempt, base=1))
    with pytest.raises(ProtocolError, match="a whole share has 0 samples"):
        fresh.received(replace(members, samples=0))


def test_peer_that_claims_a_billion_samples_counts_as_ten_usual_ones():
    """Regression test: the shares of the honest peers were rounded to 0."""
    table = Table(3)
    assert table.join(10**9) == 4
    table.step()
    table.post(1, 2, 3, 4)
    [work] = table.work
    assert work.shares == {1: 0.05, 2: 0.1, 3: 0.15, 4: 1.0}
    expected = -(0.05 * 1 + 0.1 * 2 + 0.15 * 3 + 4) / 64 / 1.3
    for array in table.mean(work):
        np.testing.assert_allclose(array, expected, atol=4 * PLAN.update_limit / LEVELS, rtol=0)


@pytest.mark.parametrize(
    ("plan", "samples", "text", "data"),
    [
        (replace(PLAN, update_limit=1000.0), 30, "text", b"set"),
        (PLAN, 10**9, "text", b"set"),
        (PLAN, 30, "another text", b"set"),
        (PLAN, 30, "text", b"another set"),
        (replace(PLAN, updates=1), 30, "text", b"set"),
        (replace(PLAN, batch_size=1), 30, "text", b"set"),
    ],
)
def test_server_that_sends_different_terms_to_some_peers_gets_no_mask(plan, samples, text, data):
    """The server could isolate peer 3 in the sum by sending another scale, model or base to the other peers."""
    peers = {}
    for number in (1, 2, 3):
        peers[number] = SecurePeer(
            plan if number < 3 else PLAN, "run", number, 10, print, text if number < 3 else "text"
        )
        peers[number].begin(1, BASE, data if number < 3 else b"set")
    offered = {number: peer.received(Attempt(attempt="a", base=1)) for number, peer in peers.items()}
    offers = {str(number): offer.identity + offer.key + offer.signature for number, offer in offered.items()}
    signatures = {}
    for number, peer in peers.items():
        peer.received(Members(attempt="a", samples=samples if number < 3 else 30, offers=offers))
        peer.masked(BASE, 1, 20)
        signatures[str(number)] = peer.received(Survivors(attempt="a", members="1,2,3")).signature
    with pytest.raises(ProtocolError, match="has not signed the list"):
        peers[3].received(Signatures(attempt="a", signatures=signatures))


def test_summed_post_counts_once():
    table = Table(3)
    table.step()
    table.post(1, 2, 3)
    table.commit(table.work[0])
    entry = Summed(at=1.0, set=3, peers=(1,), numbers=(1,), updates=(1,))
    with pytest.raises(Unfit, match="post 1 of peer 1"):
        table.ledger.admit(entry)
    again = SecureLedger(PLAN)
    again.restore(table.ledger.state())
    assert again.state() == table.ledger.state()


# -- plan and weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"way": "swap", "merge": "weighted"}, "secure aggregation in swaps cannot work"),
        ({"merge": "median"}, "with the merge median"),
        ({"merge": "trimmed:0.2"}, "with the merge trimmed:0.2"),
        ({"update_policy": "reject"}, "with the update policy reject"),
        ({"update_policy": "clip"}, "with the update policy clip"),
        ({"codec": "bfloat16"}, "with the codec bfloat16"),
        ({"quorum": 2}, "with a quorum below 3 .*subtract its own update"),
        ({"shards": 3}, "with shards"),
        ({"decay": True}, "with decay"),
        ({"clip": 1.0, "noise": 1.0}, "secure aggregation with noise"),
        ({"update_limit": 0.0}, "update_limit must be finite and above 0"),
        ({"update_limit": float("nan")}, "update_limit must be finite and above 0"),
        ({"update_limit": 1e30}, r"update_limit = 1e\+30 would round usual updates to 0; use 1000 or less"),
    ],
)
def test_plan_refuses_settings_that_contradict_secure_aggregation(change, reason):
    settings = {"way": "rounds", "merge": "mean", "quorum": 3, "secure_aggregation": True}
    Plan(**settings)
    with pytest.raises(ConfigError, match=reason):
        Plan(**(settings | change))


def test_model_with_other_weights_than_float32_is_refused():
    check_layout(LAYOUT)
    with pytest.raises(ConfigError, match="'counter' is int64"):
        check_layout(layout_of({"kernel": np.zeros(2, np.float32), "counter": np.zeros((), np.int64)}))


def test_update_beyond_the_limit_is_refused():
    live = [np.full_like(array, 8.5) for array in BASE]
    with pytest.raises(BadUpdate, match="8 of 8 values"):
        numbers_of(PLAN, BASE, live, 1.0)
    numbers_of(PLAN, BASE, live, 0.5)


def test_training_that_ends_in_an_open_round_names_the_posts_without_a_sum():
    table = Table(4)
    table.step()
    table.post(1, 2)
    table.follow(table.ledger.apply(Ended(at=table.now, why="stopped")))
    table.step()
    table.step()
    assert table.lines == ["void      the training has ended in an open round, so 2 masked posts are in no sum"]


# -- real sockets --------------------------------------------------------------------------------------------------------


class Trained:
    """A model without Keras. Each batch subtracts ``step`` from all weights."""

    layout, trainable, model = LAYOUT, (True, True), None

    def __init__(self, samples, step):
        self.samples, self.step = samples, step

    def assign(self, weights):
        self.live = [np.array(array) for array in weights]

    def weights(self):
        return [array.copy() for array in self.live]

    def batch(self, size):
        self.live = [array - np.float32(self.step) for array in self.live]

    def means(self):
        return {"loss": 0.5, "accuracy": 0.5}


class OnThread:
    """A real peer on a thread."""

    def __init__(self, running, code, samples, step):
        self.lines = []
        link = f"http://127.0.0.1:{running.port}/#{code}"
        self.trained = Trained(samples, step)
        self.peer = Peer(link, lambda welcome: self.trained, say=self.lines.append)
        self.error = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        try:
            self.peer.run()
        except Exception as error:
            self.error = error


@pytest.fixture
def plan():
    return {"way": "rounds", "merge": "mean", "quorum": 3, "secure_aggregation": True, "updates": 4}


async def test_peers_with_sockets_train_one_model_and_the_journal_has_no_post(tmp_path, plan, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()
    async with Running(tmp_path / "run", **plan) as running:
        codes = await running.server.invite(3)
        peers = [
            OnThread(running, code, samples, step)
            for code, samples, step in zip(codes, (10, 20, 30), (1 / 64, 2 / 64, 3 / 64), strict=True)
        ]
        await running.until(lambda: running.server.ledger.round >= 4)
        await running.server._end_training("enough")
        for peer in peers:
            await asyncio.to_thread(peer.thread.join, PATIENCE_S)
    ledger = running.server.ledger
    rounds = ledger.round - 1
    mean = 4 * (10 * 1 + 20 * 2 + 30 * 3) / 60 / 64
    for peer in peers:
        assert peer.error is None
        [code] = [line for line in peer.lines if line.startswith("code")]
        assert code in peers[0].lines
        np.testing.assert_allclose(peer.trained.live[0], -rounds * mean, atol=rounds * 3 * 8 / LEVELS, rtol=0)
    entries = list(history(tmp_path / "run"))
    assert sum(isinstance(entry, Summed) for entry in entries) == rounds
    assert not any(isinstance(entry, Posted) for entry in entries)


async def test_updates_beyond_the_limit_say_what_to_do_and_do_not_flood_the_terminals(tmp_path, plan, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()
    async with Running(tmp_path / "run", **(plan | {"update_limit": 1e-4})) as running:
        peers = [OnThread(running, code, 10, 1 / 64) for code in await running.server.invite(3)]
        await running.until(lambda: running.server.ledger.counts.get("lost", 0) >= 9)
        await running.server._end_training("enough")
        for peer in peers:
            await asyncio.to_thread(peer.thread.join, PATIENCE_S)
    assert len([line for line in running.lines if line.startswith("again")]) <= 3
    for peer in peers:
        [broken] = [line for line in peer.lines if line.startswith(("broken", "rejected"))]
        assert "raise --update-limit of ddlf peers serve" in broken


async def test_server_that_was_killed_in_a_round_restarts_the_round(tmp_path, plan, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()
    async with Running(tmp_path / "run", **plan) as running:
        codes = await running.server.invite(3)
        peers = [OnThread(running, code, 10, 1 / 64) for code in codes]
        await running.until(lambda: running.server.ledger.round >= 2)
        port = running.port
    base = running.server.ledger.base
    async with Running(tmp_path / "run", port=port, **plan) as again:
        assert again.server.ledger.base == base
        await again.until(lambda: again.server.ledger.round >= running.server.ledger.round + 2)
        await again.server._end_training("enough")
        for peer in peers:
            await asyncio.to_thread(peer.thread.join, PATIENCE_S)
    rounds = again.server.ledger.round - 1
    updates = sum(member.updates for member in again.server.ledger.members.values()) / 3
    assert [peer.error for peer in peers] == [None] * 3
    assert rounds >= 3
    np.testing.assert_allclose(peers[0].trained.live[0], -updates / 64, atol=rounds * 3 * 8 / LEVELS, rtol=0)


async def test_server_refuses_merge_commands_and_plain_posts(tmp_path, plan):
    async with Running(tmp_path, **plan) as running:
        light = await running.peer()
        await light.send_post(a_set(1.0))
        end = await light.answer()
        assert "a frame of kind 3 is not expected here" in end["end"]["why"]
        with pytest.raises(Unfit, match="has no sets to merge"):
            await running.server._command("merge", "")
