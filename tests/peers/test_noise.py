"""Tests of rounds of peers with clipping and noise: a server with real sockets, light peers, and Python peers."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from ddlf.errors import ConfigError
from ddlf.peers.entries import Arrived, Began, Ended, Joined, Merged, Posted
from ddlf.peers.journal import history
from ddlf.peers.ledger import EndForAll, Mean
from ddlf.peers.merging import Part, next_base, too_long
from ddlf.peers.peer import Peer
from ddlf.peers.plan import Plan
from ddlf.peers.rounds import RoundLedger
from ddlf.peers.served_model import Model
from ddlf.peers.serving import noise_lines
from ddlf.peers.sets import layout_of
from ddlf.privacy import release
from ddlf.privacy.accountant import Noise, epsilon
from ddlf.privacy.release import gaussian, norm_of
from tests.later import Later
from tests.peers.test_server import Running

stats = Later("scipy.stats")

WIDE = {"w": np.zeros(50_000, np.float32), "norm/mean": np.full(3, 7.0, np.float32)}
LAYOUT = layout_of(WIDE)
MODEL = Model(text="a model", layout=LAYOUT, first=LAYOUT.encode(list(WIDE.values())), trainable=(True, False))
NOISED = {"way": "rounds", "merge": "mean", "clip": 2.0, "noise": 3.0, "quorum": 2}


def a_set(value, mean=0.0):
    return LAYOUT.encode([np.full(50_000, value, np.float32), np.full(3, mean, np.float32)])


def weights(data):
    return LAYOUT.decode(data)


async def test_a_server_that_is_trusted_clips_sums_and_adds_noise(tmp_path):
    async with Running(tmp_path, model=MODEL, **NOISED, divisor=4) as running:
        peers = [await running.peer(samples=samples) for samples in (10, 1000)]
        await peers[0].send_post(a_set(1.0, 9.0), base=1)
        await peers[1].post(a_set(1.0, 9.0), base=1)
        answer = await peers[0].answer()
        assert answer["epsilon"] == pytest.approx(epsilon({Noise(multiplier=3.0): 1}, 1e-5))
        noised, statistic = weights(peers[0].set)
        assert peers[0].set == peers[1].set
    # both updates are clipped to the norm 2, independent of their samples, and the sum is divided by 4
    assert noised.mean() == pytest.approx(2 * 2.0 / np.sqrt(50_000) / 4, abs=6 * 1.5 / np.sqrt(50_000))
    assert noised.std() == pytest.approx(3.0 * 2.0 / 4, rel=0.02)
    np.testing.assert_array_equal(statistic, 7.0)  # it has no noise, so the server keeps it


class Added:
    """A training that adds 1 to each weight in a batch."""

    layout, trainable, samples = LAYOUT, (True, False), 10

    def batch(self, size):
        self.live = [array + 1 for array in self.live]

    def means(self):
        return {"loss": 1.0, "accuracy": 0.5}

    def weights(self):
        return self.live

    def assign(self, weights):
        self.live = weights


@pytest.mark.parametrize(("clip", "noise"), [(2.0, 3.0), (1e6, 6e-6)])
async def test_peers_that_trust_nobody_clip_and_add_noise_before_they_post(tmp_path, clip, noise):
    """The second round contains no part of the first update or of its noise.

    The second clip does not shorten the update, so the test would notice noise of the first round.
    """
    plan = NOISED | {"trust": "nobody", "updates": 1, "clip": clip, "noise": noise}
    async with Running(tmp_path, model=MODEL, **plan) as running:
        codes = await running.server.invite(2)
        links = [f"http://127.0.0.1:{running.port}/#{code}" for code in codes]
        peers = [Peer(link, lambda welcome: Added(), say=lambda line: None) for link in links]
        await asyncio.gather(*(asyncio.to_thread(peer.run, most_updates=2) for peer in peers))
        await running.until(lambda: running.server.ledger.round == 3)
        sets = running.server.sets.travelling
        last = weights(sets[running.server.ledger.base])[0]
    share, mean = noise * clip / np.sqrt(2), max(-1.0, -clip / np.sqrt(50_000))
    for peer in peers:
        step = peer._start[0] - peer._posted[0]  # the update of the second round
        assert step.std() == pytest.approx(share, rel=0.02)
        assert abs(step.mean() - mean) < 6 * share / np.sqrt(50_000)
        np.testing.assert_array_equal(peer._posted[1], 7.0)
    assert abs(np.corrcoef(peers[0]._posted[0] - peers[0]._start[0], peers[0]._start[0])[0, 1]) < 0.03
    assert last.std() == pytest.approx(np.sqrt(2) * 3.0 * 2.0 / 2, rel=0.02)  # two releases, divided by the quorum


async def test_shares_of_eight_peers_give_the_whole_noise_although_two_are_lost(tmp_path, monkeypatch):
    """Peers and server are real. The sum at the server has the noise z C, and a single post has its share."""
    # a test must not depend on chance
    monkeypatch.setattr(release, "gaussian", partial(gaussian, random=random.Random(7).randbytes))
    size = 100_000
    layout = layout_of({"w": np.zeros(size, np.float32)})
    model = Model(text="a model", layout=layout, first=layout.encode([np.zeros(size, np.float32)]), trainable=(True,))
    plan = NOISED | {"trust": "nobody", "quorum": 6, "divisor": 8, "updates": 1, "deadline_s": 0.1}

    class Still(Added):
        trainable = (True,)

        def __init__(self):
            self.layout = layout

        def batch(self, size):
            pass

    async with Running(tmp_path, model=model, **plan) as running:
        lost = [await running.peer(), await running.peer()]
        codes = await running.server.invite(6)
        links = [f"http://127.0.0.1:{running.port}/#{code}" for code in codes]
        peers = [Peer(link, lambda welcome: Still(), say=[].append) for link in links]
        for peer in lost:
            await peer.abort()
        # the server writes on the default threads, so the peers need separate ones
        with ThreadPoolExecutor(6) as threads:
            runs = [threads.submit(peer.run, most_updates=1) for peer in peers]
            await asyncio.gather(*map(asyncio.wrap_future, runs))
        await running.until(lambda: running.server.ledger.round == 2)
        [base] = layout.decode(running.server.sets.travelling[running.server.ledger.base])
        assert sum(member.number for member in running.server.ledger.members.values()) == 6
    total, std = base * 8.0, 3.0 * 2.0
    assert total.std() == pytest.approx(std, rel=0.01)
    assert stats.kstest(total / std, "norm").pvalue > 0.001
    for peer in peers:
        [share] = peer._posted
        assert share.std() == pytest.approx(std / np.sqrt(6), rel=0.01)
    assert np.abs(np.corrcoef([peer._posted[0] for peer in peers]) - np.eye(6)).max() < 0.02


async def test_peers_report_no_metrics_with_noise(tmp_path):
    async with Running(tmp_path, model=MODEL, **(NOISED | {"quorum": 1, "divisor": 1, "updates": 1})) as running:
        [code] = await running.server.invite()
        peer = Peer(f"http://127.0.0.1:{running.port}/#{code}", lambda welcome: Added(), say=lambda line: None)
        await asyncio.to_thread(peer.run, most_updates=1)
    [post] = [entry for entry in history(tmp_path) if isinstance(entry, Posted)]
    assert np.isnan([post.accuracy, post.loss]).all()


async def test_a_post_that_cannot_be_a_clipped_update_with_noise_is_rejected(tmp_path):
    async with Running(tmp_path, model=MODEL, **NOISED, trust="nobody") as running:
        peer = await running.peer()
        answer = await peer.post(a_set(100.0), base=1)
        assert answer["answer"] == "rejected"
        assert "has the norm 2.236e+04, and clip and noise give 993.1 at most" in answer["why"]


def test_a_server_that_clips_accepts_any_length():
    base = weights(MODEL.first)
    for trust, is_refused in (("server", False), ("nobody", True)):
        mechanism = Plan(**NOISED, trust=trust).mechanism
        assert bool(too_long(mechanism, base, weights(a_set(3e38)), MODEL.trainable)) == is_refused


def parts(*values):
    return {
        number: Part(read=lambda value=value: weights(a_set(value)), trainings=1, samples=10)
        for number, value in enumerate(values, 2)
    }


def test_an_unusable_update_is_left_out_and_does_not_affect_another_one():
    base = [np.full_like(array, -3e38) if array.size > 3 else array for array in weights(MODEL.first)]
    plan = Plan(**(NOISED | {"noise": 1e-3}))
    new_base, _, lines = next_base(
        plan, base, base, parts(3e38, -3e38), [], MODEL.trainable
    )  # the first overflows float32
    assert len(lines) == 1
    assert lines[0].startswith("set 2: ")
    assert np.isfinite(new_base[0]).all()


def test_a_round_without_a_usable_update_keeps_the_base():
    base = [np.full_like(array, -3e38) if array.size > 3 else array for array in weights(MODEL.first)]
    for trust in ("server", "nobody"):
        new_base, _, _ = next_base(Plan(**NOISED, trust=trust), base, base, parts(3e38), [], MODEL.trainable)
        assert new_base is base


def test_an_outer_optimizer_is_applied_to_the_release():
    base = weights(MODEL.first)
    plan = Plan(**NOISED, divisor=1, outer="nesterov:learning_rate=0.5,momentum=0")
    new_base, _, _ = next_base(plan, base, base, parts(0.0, 0.0), [], MODEL.trainable)
    assert new_base[0].std() == pytest.approx(0.5 * 3.0 * 2.0, rel=0.02)


@pytest.mark.parametrize(("trust", "merges"), [("server", True), ("nobody", False)])
def test_the_end_of_a_training_releases_no_round_with_too_little_noise(trust, merges):
    ledger = RoundLedger(Plan(**NOISED, trust=trust))
    ledger.invitations["c"] = 1e9
    for entry in (
        Began(at=0, set=1, run="r"),
        Joined(at=0, peer=1, code="c", key="k"),
        Arrived(at=0, peer=1, name="", samples=10, keeps=False),
        Posted(at=1, peer=1, number=1, set=2, contains=0, updates=1, base=1, accuracy=0.5, loss=1.0),
    ):
        instructions = ledger.apply(entry)
    assert instructions == []  # only one of two posts has arrived
    instructions = ledger.apply(Ended(at=2, why="stopped"))
    if merges:
        assert instructions == [Mean(of=(2,), base=1)]
        instructions = ledger.apply(Merged(at=3, set=3, of=(2,)))
    assert instructions[-1] == EndForAll(reason="stopped")
    assert ledger.base == (3 if merges else 1)


def test_the_server_says_who_adds_how_much_noise():
    lines = noise_lines(Plan(**NOISED, trust="nobody"), MODEL)
    assert "each peer clips its update to the norm 2; the sum of a round has noise of 6" in lines[0]
    assert "each peer adds noise of 4.24264" in lines[1]
    assert "norm/mean" in lines[2]
    assert noise_lines(Plan(way="rounds", merge="mean"), MODEL) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"noise": 0.0}, "noise must be a finite number above 0"),
        ({"noise": -1.0}, "noise must be a finite number above 0"),
        ({"noise": float("inf")}, "noise must be a finite number above 0"),
        ({"noise": 1e-80}, "noise must be from 1e-09 to 1e\\+100, got 1e-80"),
        ({"noise": 1e200}, "noise must be from 1e-09 to 1e\\+100, got 1e\\+200"),
        ({"clip": 0.0}, "clip must be a finite number above 0"),
        ({"clip": float("nan")}, "clip must be a finite number above 0"),
        ({"divisor": 0}, "divisor must be"),
        ({"trust": "me"}, "trust must be"),
        ({"noise": None}, "a clip without noise"),
        ({"clip": None}, "noise without a clip"),
        ({"clip": None, "noise": None, "trust": "nobody"}, "trust without noise"),
        ({"clip": None, "noise": None, "divisor": 3}, "a divisor without noise"),
        ({"way": "swap", "merge": "weighted"}, "noise in swaps"),
        ({"quorum": 1}, "noise without a divisor"),
        ({"merge": "median"}, "noise with the merge median"),
        ({"update_policy": "clip"}, "noise with the update policy clip"),
        ({"trust": "nobody", "codec": "float16"}, "with the codec float16"),
        ({"trust": "nobody", "shards": 2}, "with shards"),
    ],
)
def test_a_plan_refuses_noise_that_protects_nothing(changed, words):
    with pytest.raises(ConfigError, match=words):
        Plan(**(NOISED | changed))


def test_the_norm_of_a_post_within_the_limit_is_accepted():
    mechanism = Plan(**NOISED, trust="nobody").mechanism
    base = weights(MODEL.first)
    update = mechanism.protected([array + 1 for array in base], MODEL.trainable)
    posted = [b - u for b, u in zip(base, update, strict=True)]
    assert not too_long(mechanism, base, posted, MODEL.trainable)
    assert norm_of(update) < mechanism.longest(50_000)
