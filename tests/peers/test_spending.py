"""Tests of the privacy budget of peers: a release is counted before it is sent, and none exceeds the budget."""

import json
import time

import numpy as np
import pytest

from ddlf.errors import BudgetSpent, CheckpointMismatch, ConfigError
from ddlf.peers.entries import Ended, Left, Merged
from ddlf.peers.journal import history
from ddlf.peers.plan import Plan
from ddlf.peers.served_model import Model
from ddlf.peers.sets import layout_of
from ddlf.peers.spending import Spending
from ddlf.privacy.accountant import Noise, epsilon
from ddlf.training.checkpoints.releases import RELEASES
from tests.peers.test_server import Running

LAYOUT = layout_of({"w": np.zeros(4, np.float32)})
MODEL = Model(text="a model", layout=LAYOUT, first=LAYOUT.encode([np.zeros(4, np.float32)]), trainable=(True,))
NOISED = {"way": "rounds", "merge": "mean", "clip": 1.0, "noise": 1.0, "quorum": 2}


def after(releases):
    """Return the expected epsilon after a number of releases with z = 1."""
    return pytest.approx(epsilon({Noise(multiplier=1.0): releases}, 1e-5), abs=1e-3)


def a_set(value):
    return LAYOUT.encode([np.full(4, value, np.float32)])


async def a_round(running, *peers):
    base = running.server.ledger.base
    for peer in peers[1:]:
        await peer.send_post(a_set(0.1), base=base)
    await peers[0].post(a_set(0.1), base=base)
    for peer in peers[1:]:
        await peer.answer()


async def test_each_round_is_charged_to_the_peers_with_an_update_in_it(tmp_path):
    async with Running(tmp_path, model=MODEL, **NOISED) as running:
        first, second = await running.peer(), await running.peer()
        await a_round(running, first, second)
        third = await running.peer()
        await a_round(running, first, second, third)
        await running.server.writer.commit(Left(at=time.time(), peer=3, why="gone"))
        await a_round(running, first, second)
        spending = running.server._releases.spending
        assert spending.epsilons() == {1: after(3), 2: after(3), 3: after(1)}
        peers = running.server.overview().peers
    assert [peer.epsilon for peer in peers] == list(spending.epsilons().values())
    lines = (tmp_path / RELEASES).read_text().splitlines()
    assert [json.loads(line[9:])["members"] for line in lines[1:]] == [["1", "2"], ["1", "2", "3"], ["1", "2"]]


async def test_budget_ends_the_training_after_the_last_release_that_fits(tmp_path):
    async with Running(tmp_path, model=MODEL, **NOISED, privacy_budget=7.5) as running:
        peers = [await running.peer(), await running.peer()]
        await a_round(running, *peers)
        await a_round(running, *peers)
        await running.until(lambda: running.server.ledger.over)
        spending = running.server._releases.spending
    assert spending.epsilons() == {1: after(2), 2: after(2)}
    entries = list(history(tmp_path))
    assert sum(isinstance(entry, Merged) for entry in entries) == 2
    [ended] = [entry for entry in entries if isinstance(entry, Ended)]
    assert "above the privacy budget of 7.5" in ended.why


async def test_release_beyond_the_budget_does_not_change_the_base(tmp_path):
    async with Running(tmp_path, model=MODEL, **NOISED, privacy_budget=5.0) as running:
        peers = [await running.peer(), await running.peer()]
        running.server._releases.spending.account.count(running.server._releases.spending._cost(1))
        for peer in peers:
            await peer.send_post(a_set(0.1), base=1)
        await running.until(lambda: running.server.ledger.over)
        base = running.server.sets.exact(running.server.ledger.base)
    assert base == MODEL.first
    assert running.server._releases.spending.account.accountant.releases == 1


async def test_each_post_is_charged_to_its_peer_if_no_party_is_trusted(tmp_path):
    """The server sees each post with a share of the noise: z = 1 / sqrt(2), the epsilon of two releases with z = 1."""
    async with Running(tmp_path, model=MODEL, **NOISED, trust="nobody") as running:
        first, second = await running.peer(), await running.peer()
        await a_round(running, first, second)
        await first.send_post(a_set(0.1), base=running.server.ledger.base)  # this round never closes
        await running.until(lambda: running.server._releases.spending.account.accountant.releases == 3)
        epsilons = running.server._releases.spending.epsilons()
    assert epsilons == {1: after(4), 2: after(2)}


ONE_POST = NOISED | {"trust": "nobody", "privacy_budget": 7.5}
"""A plan that allows one post of a peer. Two posts would cost as much as four releases with z = 1."""


async def test_round_is_released_if_its_posts_use_up_the_budgets(tmp_path):
    async with Running(tmp_path, model=MODEL, **ONE_POST) as running:
        first, second = await running.peer(), await running.peer()
        await first.send_post(a_set(0.1), base=1)
        await running.until(lambda: running.server.ledger.posts == 1)
        assert not running.server.ledger.ended
        end = await second.post(a_set(0.1), base=1)
        assert end == await first.answer()  # neither peer receives another base
        spent = running.server._releases.spending.epsilons()
    assert spent == {1: after(2), 2: after(2)}
    assert LAYOUT.decode(end["set"])[0] == pytest.approx(0.1)
    assert "above the privacy budget of 7.5" in end["end"]["why"]
    assert "left out" not in "".join(running.lines)


@pytest.mark.parametrize("again", ["its post is rejected", "it begins again", "it begins again after a restart"])
async def test_peer_that_has_spent_its_budget_never_trains_again(tmp_path, again):
    bad = np.nan if again == "its post is rejected" else 0.1
    async with Running(tmp_path, model=MODEL, **ONE_POST) as running:
        peer, _ = await running.peer(), await running.peer()
        await peer.send_post(a_set(bad), base=1)
        if again == "its post is rejected":
            end = await peer.answer()
        else:
            await running.until(lambda: running.server.ledger.posts == 1)
        if again == "it begins again":
            end = await peer.connect()
    if again == "it begins again after a restart":
        async with Running(tmp_path, model=MODEL, **ONE_POST) as running:
            peer.port = running.port
            end = await peer.connect()
            await peer.abort()
    assert "above the privacy budget of 7.5" in end["end"]["why"]
    assert running.server._releases.spending.epsilons() == {1: after(2)}


async def test_resumed_server_continues_the_account(tmp_path):
    async with Running(tmp_path, model=MODEL, **NOISED) as running:
        await a_round(running, await running.peer(), await running.peer())
    async with Running(tmp_path, model=MODEL, **NOISED) as running:
        assert running.server._releases.spending.epsilons() == {1: after(1), 2: after(1)}
    with pytest.raises(CheckpointMismatch, match=r"this run has clip = 2.0"):
        Spending(Plan(**NOISED | {"clip": 2.0}), tmp_path, continues=True)
    (tmp_path / RELEASES).unlink()
    with pytest.raises(CheckpointMismatch, match="is missing"):
        Spending(Plan(**NOISED), tmp_path, continues=True)


@pytest.mark.parametrize("trust", ["server", "nobody"])
async def test_older_copy_of_the_account_is_refused_at_a_resume(trust, tmp_path):
    async with Running(tmp_path, model=MODEL, **NOISED, trust=trust) as running:
        peers = [await running.peer(), await running.peer()]
        await a_round(running, *peers)
        older = (tmp_path / RELEASES).read_bytes()
        await a_round(running, *peers)
    (tmp_path / RELEASES).write_bytes(older)
    counted, left = {"server": (1, 2), "nobody": (2, 4)}[trust]
    with pytest.raises(CheckpointMismatch, match=rf"counts {counted} releases, and at least {left} have left"):
        async with Running(tmp_path, model=MODEL, **NOISED, trust=trust):
            pass


def test_budget_below_one_release_is_refused_at_the_beginning(tmp_path):
    with pytest.raises(BudgetSpent, match=r"epsilon is 0 .*would make it 4.377, above the privacy budget of 4"):
        Spending(Plan(**NOISED, privacy_budget=4.0), tmp_path, continues=False)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"privacy_budget": 0.0}, "privacy_budget must be a finite epsilon above 0"),
        ({"privacy_budget": float("inf")}, "privacy_budget must be a finite epsilon above 0"),
        ({"delta": 0.0}, "delta must be above 0 and below 1"),
        ({"delta": 1.0}, "delta must be above 0 and below 1"),
        ({"delta": 0.5}, "delta = 0.5 would let a run publish the data of one of 2"),
        ({"clip": None, "noise": None, "privacy_budget": 3.0}, "a privacy budget without noise"),
        ({"clip": None, "noise": None, "delta": 1e-6}, "a delta without noise"),
    ],
)
def test_plan_refuses_an_impossible_budget_or_delta(changed, words):
    with pytest.raises(ConfigError, match=words):
        Plan(**(NOISED | changed))
