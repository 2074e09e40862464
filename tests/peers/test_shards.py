"""Tests of shards of the server's own data: their division, their leases, and peers that train on them."""

import asyncio
import importlib
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.errors import CheckpointMismatch, ConfigError
from ddlf.peers import serving
from ddlf.peers import shards as shards_module
from ddlf.peers.entries import Arrived, Began, Invited, Joined, Left
from ddlf.peers.joining import peer_of_data, peer_of_shard
from ddlf.peers.ledger import Unfit
from ddlf.peers.plan import Plan
from ddlf.peers.rounds import RoundLedger
from ddlf.peers.served_model import Model
from ddlf.peers.shards import Shards
from ddlf.peers.swap import SwapLedger
from tests.patience import PATIENCE_S
from tests.peers.light import get
from tests.peers.test_server import LAYOUT, Running, a_set

DATA = {"x_train": np.arange(20, dtype=np.float32).reshape(10, 2), "y_train": np.arange(10) % 2}
TEXT = """
digits:input shape=[64];
digits:output shape=[10];
digits:layers Dense(units=10, activation=softmax);
digits:loss SCE;
train:optimizer SGD(learning_rate=0.1);
train:metrics accuracy;
"""


def opened(content):
    with np.load(io.BytesIO(content)) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.mark.parametrize("rule", ["equal", "dirichlet:0.5", "classes:1", "power:1"])
def test_each_sample_is_in_exactly_one_shard_with_its_label(rule):
    shards = Shards(DATA, 2, rule, 0)
    parts = [opened(shards.content(number)) for number in (1, 2)]
    rows = np.concatenate([part["x_train"] for part in parts])
    labels = np.concatenate([part["y_train"] for part in parts])
    order = np.argsort(rows[:, 0])
    np.testing.assert_array_equal(rows[order], DATA["x_train"])
    np.testing.assert_array_equal(labels[order], DATA["y_train"])
    assert shards.sizes == tuple(len(part["x_train"]) for part in parts)
    if rule == "classes:1":
        assert all(len(np.unique(part["y_train"])) == 1 for part in parts)


def test_the_digest_differs_for_other_data_and_other_divisions():
    other = DATA | {"x_train": DATA["x_train"] + 1}
    digests = {
        Shards(data, count, "equal", seed).digest
        for data, count, seed in ((DATA, 2, 0), (DATA, 2, 1), (DATA, 3, 0), (other, 2, 0))
    }
    assert len(digests) == 4
    assert Shards(dict(DATA), 2, "equal", 0).digest in digests


def test_more_shards_than_samples_and_several_inputs_are_refused():
    with pytest.raises(ConfigError, match="10"):
        Shards(DATA, 11, "equal", 0)
    with pytest.raises(ConfigError, match="one input and one output"):
        Shards({"x_train": {"a": DATA["x_train"]}, "y_train": DATA["y_train"]}, 2, "equal", 0)


@given(
    st.sampled_from([SwapLedger, RoundLedger]),
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["arrive", "leave", "remove", "restart"])), max_size=40),
)
def test_each_shard_has_at_most_one_peer_and_is_leased_again(kind, acts):
    plan = Plan(shards=3) if kind is SwapLedger else Plan(shards=3, way="rounds", merge="mean")
    ledger = kind(plan)
    ledger.apply(Began(at=0.0, set=1, run="r"))
    for peer in range(1, 6):
        ledger.apply(Invited(at=0.0, code=f"c{peer}", until=9.0))
        ledger.apply(Joined(at=0.0, peer=peer, code=f"c{peer}", key=f"k{peer}"))
    for peer, act in acts:
        member = ledger.members[peer]
        if act == "restart":
            state, ledger = json.loads(json.dumps(ledger.state())), kind(plan)
            ledger.restore(state)
        elif act == "arrive" and not member.removed:
            before, was = [*ledger.free_shards], member.present
            try:
                shard = ledger.shard_for(peer, 0)
            except Unfit:
                assert not before
                assert not was
                continue
            assert shard == member.shard if was or member.shard in before else shard == before[0]
            ledger.apply(Arrived(at=1.0, peer=peer, name="", samples=10 + shard, keeps=False, shard=shard))
        elif act != "arrive" and not member.removed:
            ledger.apply(Left(at=1.0, peer=peer, why="", removed=act == "remove"))
        leased = [member.shard for member in ledger.members.values() if member.present]
        assert sorted([*leased, *ledger.free_shards]) == [1, 2, 3]


def test_a_shard_that_another_peer_has_is_refused():
    ledger = SwapLedger(Plan(shards=2))
    for peer in (1, 2):
        ledger.apply(Invited(at=0.0, code=f"c{peer}", until=9.0))
        ledger.apply(Joined(at=0.0, peer=peer, code=f"c{peer}", key=f"k{peer}"))
    ledger.apply(Began(at=0.0, set=1, run="r"))
    facts = {"at": 1.0, "name": "", "samples": 5, "keeps": False}
    ledger.apply(Arrived(peer=1, shard=1, **facts))
    for shard in (0, 1, 3):
        with pytest.raises(Unfit, match=f"shard {shard} is with another peer"):
            ledger.admit(Arrived(peer=2, shard=shard, **facts))


def lending(folder, count=2, data=DATA):
    shards = Shards(data, count, "equal", 0)
    model = Model(text="m", layout=LAYOUT, first=a_set(0.0), trainable=(True, True), shards=shards)
    return Running(folder, model=model, shards=count)


async def shard_of(running, peer, number, key=None, range_="bytes=0-"):
    headers = {"Authorization": f"Bearer {peer.key if key is None else key}", "Range": range_}
    return await get(running.port, f"/shard/{number}", headers)


async def test_a_server_leases_shards_and_a_later_server_knows_the_leases(tmp_path):
    async with lending(tmp_path) as running:
        first, second = await running.peer(samples=0), await running.peer(samples=0)
        assert [running.server.ledger.members[peer].shard for peer in (1, 2)] == [1, 2]
        assert (await shard_of(running, first, 1, "wrong"))[0] == 401
        assert [(await shard_of(running, first, number))[0] for number in (2, 3, "")] == [409] * 3
        late = await running.peer(samples=0)
        assert "each of the 2 shards is with a peer" in (await late.connect())["end"]["why"]
        await second.socket.send(b"")  # ends the connection, but not the lease
        await second.socket.wait_closed()
        await second.connect()
        assert running.server.ledger.members[2].shard == 2
        await running.server.writer.commit(Left(at=1.0, peer=2, why="its lease"))
        assert (await shard_of(running, second, 2))[0] == 409
        assert (await late.connect())["shard"] == 2
        with_data = await running.peer(samples=5)
        assert "a part of its data" in (await with_data.connect())["end"]["why"]
    async with lending(tmp_path) as again:
        assert {peer: member.shard for peer, member in again.server.ledger.members.items() if member.present} == {
            1: 1,
            3: 2,
        }
        second.port = again.port
        assert "each of the 2" in (await second.connect())["end"]["why"]


async def test_a_peer_gets_its_shard_in_pieces_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "PIECE_BYTES", 100)
    async with lending(tmp_path) as running:
        peer = await running.peer(samples=0)
        content, received = running.server.model.shards.content(1), b""
        while len(received) < len(content):
            status, facts, body = await shard_of(running, peer, 1, range_=f"bytes={len(received)}-")
            assert status == 206
            assert facts["Content-Range"] == f"bytes {len(received)}-{len(received) + len(body) - 1}/{len(content)}"
            assert len(body) <= 100
            received += body
        assert received == content
        bad = (f"bytes={len(content)}-", "bytes=-5", "bytes=0-9", "bytes=0-,9-", "lines=0-", "bytes=" + "9" * 400 + "-")
        assert [(await shard_of(running, peer, 1, range_=range_))[0] for range_ in bad] == [416] * len(bad)


async def test_a_peer_that_does_not_read_needs_the_memory_of_one_piece(tmp_path, monkeypatch):
    size = 2**24  # more than all buffers of a socket
    monkeypatch.setattr(shards_module, "PIECE_BYTES", size)
    data = {"x_train": np.zeros((2, size), np.uint8), "y_train": np.zeros(2)}
    async with lending(tmp_path, data=data) as running:
        peer = await running.peer(samples=0)
        question = (
            f"GET /shard/1 HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nAuthorization: Bearer {peer.key}\r\n\r\n"
        )
        first, *later = [await asyncio.open_connection("127.0.0.1", running.port, limit=1000) for _ in range(3)]
        for reader, writer in (first, *later):
            writer.write(question.encode())
            assert await reader.readexactly(12) == b"HTTP/1.1 206"
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(first[0].readexactly(size), PATIENCE_S)
        last = await asyncio.wait_for(later[-1][0].readexactly(size), PATIENCE_S)
        assert len(last) == size
        for _, writer in (first, *later):
            writer.close()


@pytest.fixture
async def served(tmp_path, monkeypatch):
    """Serve digits in two shards, with a separate state folder for the keys of Python peers."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(shards_module, "PIECE_BYTES", 50_000)
    (tmp_path / "d.nnm").write_text(TEXT)
    serving_model = await asyncio.to_thread(serving.read_model, tmp_path / "d.nnm", "digits", None, 0, shards=1)
    serving_model.give_out(Plan(shards=2), 0)
    assert not {"x_train", "y_train"} & serving_model._trained.data.keys()  # the shards have them
    assert serving_model.can_test
    return serving_model


async def test_python_peers_train_on_shards_and_a_new_peer_gets_the_free_one(served, tmp_path):
    lines = []
    async with Running(tmp_path, model=served.model, shards=2, updates=5) as running:

        async def trained(most):
            [code] = await running.server.invite()
            peer = peer_of_shard(f"http://127.0.0.1:{running.port}/#{code}", say=lines.append)
            return await asyncio.to_thread(peer.run, most_updates=most)

        first, second = await asyncio.gather(trained(10), trained(10))
        parts = [opened(served.model.shards.content(number))["x_train"].tobytes() for number in (1, 2)]
        assert sorted(trained_peer.data["x_train"].tobytes() for trained_peer in (first, second)) == sorted(parts)
        assert {first.samples, second.samples} == set(served.model.shards.sizes)
        await running.until(lambda: not running.server.ledger.present)
        assert sorted(running.server.ledger.free_shards) == [1, 2]
        waits = running.server.ledger.free_shards[0]
        await trained(5)
        assert running.server.ledger.members[3].shard == waits
        [code] = await running.server.invite()
        with_data = peer_of_data(f"http://127.0.0.1:{running.port}/#{code}", {"x": np.zeros((9, 64)), "y": np.zeros(9)})
        with pytest.raises(ConfigError, match="a part of its data"):
            await asyncio.to_thread(with_data.run)
    assert any("samples of the server, shard" in line for line in lines)


def test_a_resumed_run_needs_the_same_data(tmp_path):
    (tmp_path / "d.nnm").write_text(TEXT)
    served = serving.read_model(tmp_path / "d.nnm", "digits", None, 0, shards=1)
    plan = Plan(shards=2)
    served.give_out(plan, 7)
    path = serving.make_folder(tmp_path, "d", plan, served, 7)
    (path / "journal-000001").write_text("records")
    earlier = serving.read_folder(path)
    serving.give_out_again(path, earlier, serving.read_model(tmp_path / "d.nnm", "digits", None, 0, shards=1), "digits")
    (x, y), _ = importlib.import_module("ddlf.data.datasets").with_classes("digits")
    np.savez(tmp_path / "less.npz", x=x[:500], y=y[:500])
    other = serving.read_model(tmp_path / "d.nnm", str(tmp_path / "less.npz"), None, 0, shards=1)
    with pytest.raises(CheckpointMismatch, match="other training data"):
        serving.give_out_again(path, earlier, other, "less.npz")


async def test_a_peer_that_was_away_for_longer_than_its_lease_waits_and_trains_another_shard(served, tmp_path):
    lines = []
    async with Running(tmp_path, model=served.model, shards=2, updates=5) as running:
        [code] = await running.server.invite()
        peer = peer_of_shard(f"http://127.0.0.1:{running.port}/#{code}", say=lines.append)
        run = asyncio.ensure_future(asyncio.to_thread(peer.run))
        ledger = running.server.ledger
        await running.until(lambda: ledger.counts.get("posts", 0) >= 1)
        await running.server.writer.commit(Left(at=1.0, peer=1, why="its lease has run out"))
        light = await running.peer(samples=0)
        assert ledger.members[2].shard == 2
        await running.server.writer.commit(Left(at=1.0, peer=2, why="gone"))
        await running.until(lambda: ledger.members[1].present)
        await running.until(lambda: ledger.counts["posts"] >= 3)
        assert light.number == 0
        peer.leave()
        await asyncio.wait_for(run, PATIENCE_S)
    assert peer.trained.samples == served.model.shards.sizes[ledger.members[1].shard - 1]
