"""Tests of the checks of a peer before it uses its link: unsuitable data or models leave the link unused."""

import asyncio
import json

import numpy as np
import pytest

import ddlf
from ddlf.errors import AppError, AuthError, CheckpointError, ConfigError, ConnectError, DatasetError, ProtocolError
from ddlf.events import PeersTold
from ddlf.monitor.dashboard.server import Dashboard
from ddlf.peers import front, link, peer
from ddlf.peers.entries import Posted
from ddlf.peers.joining import peer_of_app, peer_of_data, peer_of_shard
from ddlf.peers.keys import forget
from ddlf.peers.peer import Peer, check_link
from ddlf.peers.serving import _no_workers
from ddlf.peers.sets import layout_of
from tests.peers.light import get
from tests.peers.test_server import LAYOUT, Added, Running, a_set


@pytest.fixture
async def running(tmp_path, monkeypatch):
    monkeypatch.setattr(front, "WRONG_CODE_S", 0.0)
    async with Running(tmp_path) as running:
        yield running


async def link_of(running):
    [code] = await running.server.invite()
    return code, f"http://127.0.0.1:{running.port}/#{code}"


class Other(Added):
    layout = layout_of({"dense/kernel": np.zeros((4, 2), np.float32)})
    trainable = (True,)


def _has_no_labels(offer):
    assert (offer.model, offer.plan.merge) == ("a model", "average")
    raise DatasetError("mine.npz has no y")


@pytest.mark.parametrize(
    ("make", "error"), [(_has_no_labels, DatasetError), (lambda offer: Other(), ConfigError)], ids=["data", "model"]
)
async def test_unsuitable_data_or_model_leaves_the_link_unused(running, make, error):
    code, link = await link_of(running)
    with pytest.raises(error):
        await asyncio.to_thread(Peer(link, make, say=[].append).run)
    assert not running.server.ledger.members
    await asyncio.to_thread(Peer(link, lambda offer: Added(), say=[].append).run, most_updates=1)
    assert running.server.ledger.members[1].number == 1
    assert (await get(running.port, "/join", {"X-DDLF-Code": code}))[0] == 403


async def test_a_peer_without_data_leaves_a_link_without_shards_unused(running):
    _, link = await link_of(running)
    with pytest.raises(ConfigError, match="no data for peers; name yours with --data"):
        await asyncio.to_thread(peer_of_shard(link, say=[].append).run)
    assert not running.server.ledger.members


@pytest.mark.parametrize("path", ["/model", "/graph"])
async def test_the_model_is_described_to_sessions_and_to_unused_codes_only(running, path):
    code, _ = await link_of(running)
    described = 200 if path == "/model" else 409  # this model is for Python only
    assert (await get(running.port, path))[0] == 401
    assert (await get(running.port, path, {"X-DDLF-Code": "x" * 43}))[0] == 403
    for _ in range(2):
        assert (await get(running.port, path, {"X-DDLF-Code": code}))[0] == described
    _, _, body = await get(running.port, "/join", {"X-DDLF-Code": code})
    assert (await get(running.port, path, {"X-DDLF-Code": code}))[0] == 403
    session = {"Authorization": f"Bearer {json.loads(body)['key']}"}
    assert (await get(running.port, path, session))[0] == described


async def test_a_used_link_is_refused_before_the_model_is_made(running):
    _, link = await link_of(running)
    await asyncio.to_thread(Peer(link, lambda offer: Added(), say=[].append).run, most_updates=1)
    forget(check_link(link))  # like on another machine
    offers = []
    with pytest.raises(AuthError, match="the code of the link is unknown or was used already; ask for a new link"):
        await asyncio.to_thread(Peer(link, offers.append).run)
    assert not offers


async def test_another_peer_can_use_the_key_of_a_peer_that_cannot_begin(running):
    _, link = await link_of(running)
    await asyncio.to_thread(Peer(link, lambda offer: Added(), say=str).run, most_updates=1)
    failed = Peer(link, lambda offer: Other(), say=str)
    with pytest.raises(ConfigError):
        await asyncio.to_thread(failed.join)
    await asyncio.to_thread(Peer(link, lambda offer: Added(), say=str).run, most_updates=1)
    assert running.server.ledger.members.keys() == {1}


@pytest.mark.parametrize("data", [{"x": np.float32(3), "y": 1}, {"x": None}, {"x": {"a": np.ones(3)}}, {}])
def test_data_without_rows_is_refused(data):
    with pytest.raises(DatasetError, match="the data has no samples"):
        peer_of_data("http://127.0.0.1:1/#code", data)


class Empty(ddlf.IApp):
    async def load_dataset(self):
        pass

    async def create_model(self):
        pass


async def test_an_app_is_loaded_also_in_a_notebook_whose_event_loop_runs():
    with pytest.raises(AppError, match=r"Empty\.load_dataset sets no x_train and y_train"):
        peer_of_app("http://127.0.0.1:1/#code", Empty)


def test_lists_are_accepted_as_data():
    peer_of_data("http://127.0.0.1:1/#code", {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]})
    with pytest.raises(DatasetError, match="the data has x, which is not an array; give all samples one shape"):
        peer_of_data("http://127.0.0.1:1/#code", {"x": [[1.0, 2.0], [3.0]], "y": [0, 1]})


def test_a_file_of_data_may_be_a_path(tmp_path):
    np.savez(tmp_path / "empty.npz", x=np.zeros((0, 4)), y=np.zeros(0))
    with pytest.raises(DatasetError, match=r"empty\.npz has no samples"):
        peer_of_data("http://127.0.0.1:1/#code", tmp_path / "empty.npz")


async def test_programs_that_share_a_link_become_its_number_of_peers(running):
    [code] = await running.server.invite(peers=2)
    programs = [Peer(f"http://127.0.0.1:{running.port}/#{code}", lambda o: Added(), say=str) for _ in range(3)]
    for program in programs[:2]:
        await asyncio.to_thread(program.join)
    with pytest.raises(AuthError, match=r"another program of yours here is its peer now.*ask for a new link"):
        await asyncio.to_thread(programs[2].join)
    assert running.server.ledger.present == [1, 2]
    # The server of this event loop has to answer, or each of these waits ten seconds.
    await asyncio.to_thread(programs[1].close)
    await asyncio.to_thread(programs[2].join)  # it continues the peer of the ended program
    assert running.server.ledger.members.keys() == {1, 2}
    for program in programs:
        await asyncio.to_thread(program.close)


async def test_a_link_with_https_for_a_server_without_it_is_explained(running):
    code, link = await link_of(running)
    with pytest.raises(
        ConnectError, match=r"it does not answer to https; copy the whole link, which may begin with http:"
    ):
        await asyncio.to_thread(Peer(link.replace("http", "https"), lambda offer: Added()).run)
    assert (await get(running.port, "/join", {"X-DDLF-Code": code}))[0] == 200


async def test_a_full_disk_takes_no_new_peer_and_leaves_its_link_unused(running, monkeypatch):
    _, link = await link_of(running)

    def full(entries, heads):
        raise CheckpointError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(running.server._journal, "append", full)
        with pytest.raises(ConnectError, match=r"takes no peer now: the server's disk refuses to store anything now"):
            await asyncio.to_thread(Peer(link, lambda offer: Added(), say=[].append).run)
    await asyncio.to_thread(Peer(link, lambda offer: Added(), say=[].append).run, most_updates=1)


async def test_a_peer_says_that_the_disk_of_the_server_is_full(running, monkeypatch):
    _, link = await link_of(running)
    append, lines, refused = running.server._journal.append, [], []

    def full(entries, heads):
        if isinstance(entries[0][0], Posted) and not refused:
            refused.append(entries)
            raise CheckpointError("no space")
        append(entries, heads)

    monkeypatch.setattr(running.server._journal, "append", full)
    program = Peer(link, lambda offer: Added(), say=lines.append)
    await asyncio.to_thread(program.run, most_updates=1)
    [lost] = [line for line in lines if line.startswith("lost")]
    assert "connection to the server: the server's disk refuses to store anything now; training continues" in lost


async def test_a_round_that_waits_for_its_quorum_is_reported_once(tmp_path, monkeypatch):
    monkeypatch.setattr(peer, "ROUND_S", 0.0)
    events, lines = [], []
    async with Running(tmp_path, way="rounds", merge="mean", quorum=2, tell=events.append) as running:
        _, link = await link_of(running)
        program = Peer(link, lambda offer: Added(), say=lines.append)
        training = asyncio.ensure_future(asyncio.to_thread(program.run, most_updates=2 * running.server.plan.updates))
        await running.until(lambda: any(line.startswith("waiting") for line in lines))
        await running.until(lambda: any(line.startswith("quorum") for line in running.lines))
        assert running.server.overview().missing_posts == 1
        other = await running.peer()
        for _ in range(2):
            await other.post(LAYOUT.encode(LAYOUT.decode(other.set)), base=other.set_number or 1)
        await training
    assert next(line for line in lines if line.startswith("waiting")) == (
        "waiting   the round is open: it needs posts of 2 peers"
    )
    reason = "the round needs 1 more post, and all peers that are here have posted or were rejected"
    assert running.lines.count(f"quorum    {reason}") <= 2  # once in each of the two rounds
    assert PeersTold(what="quorum", why=reason) in events


async def test_a_round_that_waits_for_a_rejected_peer_is_reported(tmp_path):
    async with Running(tmp_path, way="rounds", merge="mean", quorum=2) as running:
        honest, liar = await running.peer(), await running.peer()
        await honest.send_post(a_set(1.0), base=1)
        await liar.post(a_set(float("nan")), base=1)
        await running.until(lambda: any(line.startswith("quorum") for line in running.lines))
        assert running.server.overview().missing_posts == 1


async def test_the_link_of_the_dashboard_is_refused_with_the_wanted_one():
    page = Dashboard(_no_workers)
    await page.open()
    try:
        with pytest.raises(ConnectError, match=r"not answer as a server of peers: .*copy the link of the line `link`"):
            await asyncio.to_thread(Peer(page.url, lambda offer: Added()).run)
    finally:
        page.close()


@pytest.mark.parametrize("answer", ['{"model": "text", "layout": ""}', '{"plan": 3, "model": "", "layout": ""}', "[]"])
def test_an_answer_of_another_version_is_one_error_that_says_what_to_do(monkeypatch, answer):
    monkeypatch.setattr(link, "request", lambda *_: (200, answer))
    with pytest.raises(ProtocolError, match=r"to /model cannot be read: .* install the same version of DDLF"):
        Peer("http://127.0.0.1:1/#code", lambda offer: Added()).run()
