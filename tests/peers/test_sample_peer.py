"""Tests of Python peers that add noise in each step to hide single samples: epsilon, posts, the budget, and refusals."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

import ddlf
from ddlf.cli.target import find_target
from ddlf.errors import BudgetSpent, CheckpointMismatch, ConfigError
from ddlf.peers.entries import Posted
from ddlf.peers.joining import peer_of_data
from ddlf.peers.journal import history
from ddlf.peers.sample_peer import ME, SampleNoiseSettings
from ddlf.peers.serving import read_model
from ddlf.privacy.accountant import Noise, epsilon
from tests.peers.test_server import Running

TEXT = Path(__file__).parents[2] / "apps/models/private_digits.nnm"
SAMPLES, BATCH = 300, 30
TRAINED = 240
"""The number of training samples: without test data, every fifth sample is held out."""
HOW = {"clip": 1.0, "noise": 1.1}


def after(steps):
    """Return the expected epsilon of a sample after some steps."""
    return pytest.approx(epsilon({Noise(multiplier=1.1, sampled=BATCH / TRAINED): steps}, 1e-5), abs=1e-9)


@pytest.fixture
def running(tmp_path, monkeypatch):
    monkeypatch.setenv("DDLF_STATE_DIR", str(tmp_path / "state"))

    def run(**plan):
        served = read_model(TEXT, None, find_target, 0)
        return Running(tmp_path / "run", model=served.model, batch_size=BATCH, **({"updates": 4} | plan))

    (tmp_path / "run").mkdir()
    return run


async def link_of(running):
    [code] = await running.server.invite()
    return f"http://127.0.0.1:{running.port}/#{code}"


def data():
    (x, y), _ = ddlf.load_digits()
    return {"x": x[:SAMPLES], "y": y[:SAMPLES].argmax(1)}


def plain_peer_of(link):
    return peer_of_data(link, data(), say=lambda line: None)


def peer_of(link, lines=None, **how):
    return peer_of_data(
        link,
        data(),
        say=(lambda line: None) if lines is None else lines.append,
        sample_noise=SampleNoiseSettings(**(HOW | how)),
    )


async def test_steps_of_a_peer_are_counted_before_its_post_which_has_no_metric(running, tmp_path):
    async with running(way="rounds", merge="mean", validate_s=0.01) as server:
        link = await link_of(server)
        lines = []
        peer = peer_of(link, lines)
        await asyncio.to_thread(peer.run, most_updates=10)
        assert peer.account.accountant.epsilon(ME) == after(10)
        assert peer.posts == 3

        again = peer_of(link)  # with the key of the first one
        await asyncio.to_thread(again.run, most_updates=4)
        assert again.account.accountant.epsilon(ME) == after(14)

        with pytest.raises(CheckpointMismatch, match=r"clip = 2.0, and its earlier releases had 1.0"):
            await asyncio.to_thread(peer_of(link, clip=2.0).run, most_updates=4)
    posts = [entry for entry in history(tmp_path / "run") if isinstance(entry, Posted)]
    assert len(posts) == 4
    assert np.isnan([(post.accuracy, post.loss) for post in posts]).all()
    assert f"{peer.account.accountant.epsilon(ME):.4g} at delta 1e-05, of a single sample" in lines[-1]


async def test_a_peer_leaves_before_a_step_would_exceed_its_budget(running):
    budget = epsilon({Noise(multiplier=1.1, sampled=BATCH / TRAINED): 7}, 1e-5) + 1e-6
    async with running() as server:
        link, lines = await link_of(server), []
        peer = peer_of(link, lines, budget=budget)
        await asyncio.to_thread(peer.run)
        assert (peer.updates, peer.account.accountant.epsilon(ME)) == (7, after(7))
        assert any(f"would make epsilon more than {budget:g}; the peer leaves" in line for line in lines)
        with pytest.raises(BudgetSpent):
            await asyncio.to_thread(peer_of(link, budget=budget).run)


async def test_steps_with_noise_work_with_secure_aggregation(running):
    async with running(way="rounds", merge="mean", quorum=3, secure_aggregation=True) as server:
        peers = [peer_of(await link_of(server)) for _ in range(3)]
        await asyncio.gather(*(asyncio.to_thread(peer.run, most_updates=8) for peer in peers))
        assert server.server.ledger.round == 3
    assert [peer.account.accountant.epsilon(ME) for peer in peers] == [after(8)] * 3


async def test_noise_of_a_peer_contradicts_noise_of_the_server(running):
    async with running(way="rounds", merge="mean", clip=1.0, noise=1.0, divisor=1) as server:
        with pytest.raises(ConfigError, match="the server's plan already has noise"):
            await asyncio.to_thread(peer_of(await link_of(server)).run, most_updates=1)


async def test_a_useless_delta_is_refused_before_the_link_is_used(running):
    async with running() as server:
        with pytest.raises(ConfigError, match=r"delta = 0.01 would let a run publish the data of one of 240"):
            await asyncio.to_thread(peer_of(await link_of(server), delta=0.01).run)
        assert not server.server.ledger.members


async def test_two_programs_at_once_do_not_share_an_account(running):
    async with running(way="rounds", merge="mean") as server:
        [code] = await server.server.invite(peers=2)
        link = f"http://127.0.0.1:{server.port}/#{code}"
        first = peer_of(link)
        await asyncio.to_thread(first.join)
        with pytest.raises(ConfigError, match="another program here trains with this link"):
            await asyncio.to_thread(peer_of(link).run, most_updates=4)
        await asyncio.to_thread(first.close)
        await asyncio.to_thread(peer_of(link).run, most_updates=4)


async def test_posts_without_noise_are_refused_after_posts_that_hid_samples(running):
    async with running(way="rounds", merge="mean") as server:
        link = await link_of(server)
        await asyncio.to_thread(peer_of(link).run, most_updates=4)
        with pytest.raises(ConfigError, match="would tell about them; join with --privacy-unit sample, or ask"):
            await asyncio.to_thread(plain_peer_of(link).run, most_updates=4)


async def test_no_epsilon_is_stated_after_posts_without_noise(running):
    async with running(way="rounds", merge="mean") as server:
        link = await link_of(server)
        await asyncio.to_thread(plain_peer_of(link).run, most_updates=4)
        with pytest.raises(ConfigError, match="are not in the account of this machine, so no epsilon holds"):
            await asyncio.to_thread(peer_of(link).run, most_updates=4)
