"""Tests of the end of a training.

The server stays until each peer has the last set or is gone. A peer that returns receives it.
"""

import asyncio

import pytest

from ddlf.errors import ConnectError
from ddlf.peers import ledger, server
from ddlf.peers.entries import Ended, Left
from ddlf.peers.journal import history
from ddlf.peers.peer import Peer
from tests.patience import PATIENCE_S
from tests.peers.light import get
from tests.peers.test_server import Added, Running, a_set, value


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(server, "SAID_END_S", 0.0)


async def stop(running):
    assert (await get(running.port, "/control/stop", {"Authorization": "Bearer secret"}))[0] == 200


async def ended(running):
    await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_S)


def leaving_reasons(folder):
    return {entry.peer: entry.why for entry in history(folder) if isinstance(entry, Left)}


async def test_the_server_waits_for_a_peer_that_reads_slowly(tmp_path):
    async with Running(tmp_path) as running:
        quick, slow = await running.peer(), await running.peer()
        await quick.post(a_set(1.0))
        slow.socket.transport.pause_reading()
        await stop(running)
        assert value((await quick.answer())["set"]) == 1.0
        await running.until(lambda: any(line.startswith("waiting   until") for line in running.lines))
        await running.until(lambda: running.server.ledger.present == [2])
        assert not running.task.done()
        slow.socket.transport.resume_reading()
        assert value((await slow.answer())["set"]) == 1.0
        await ended(running)
    assert leaving_reasons(tmp_path) == dict.fromkeys((1, 2), "it has received the last set")
    assert not any(line.startswith("missing") for line in running.lines)


async def test_the_server_leaves_when_a_peer_is_gone_for_its_lease(tmp_path, monkeypatch):
    async with Running(tmp_path) as running:
        silent = await running.peer()
        await silent.post(a_set(1.0))
        silent.socket.transport.pause_reading()
        await stop(running)
        await running.until(lambda: running.server.ledger.over)
        monkeypatch.setattr(ledger, "LEASE_S", 0.1)
        await ended(running)
    [line] = [line for line in running.lines if line.startswith("left")]
    assert "no sign of life" in line
    assert "it has not received the last set" in line


async def test_bytes_that_reach_a_peer_are_a_sign_of_life(tmp_path):
    """On a slow line, a fragment of a set may need longer than a lease, and the peer cannot answer pings at that time."""
    async with Running(tmp_path) as running:
        peer = await running.peer()
        peer.socket.transport.pause_reading()
        socket = running.server._leases.connections[1].socket
        socket.note_acknowledged()
        socket.heard_at = 0.0
        socket.note_acknowledged()
        assert socket.heard_at == 0.0
        await socket.ping()
        await running.until(lambda: socket.note_acknowledged() or socket.heard_at > 0.0)


async def test_ctrl_c_ends_the_wait_and_a_later_server_waits_again(tmp_path):
    async with Running(tmp_path) as running:
        peer = await running.peer()
        await peer.post(a_set(1.0))
        peer.socket.transport.pause_reading()
        await stop(running)
        await running.until(lambda: any(line.startswith("waiting") for line in running.lines))
        running.server.leave()
        await ended(running)
        assert any(line.startswith("missing   peer 1 (light) has not received") for line in running.lines)
    async with Running(tmp_path) as again:
        peer.port = again.port
        again.peers = [peer]
        assert (await peer.connect(keeps=True))["end"]["over"]
        await ended(again)
    assert leaving_reasons(tmp_path)[1] == "it has received the last set"


async def test_a_server_that_was_killed_between_the_end_and_its_last_set_waits_for_its_peers(tmp_path):
    async with Running(tmp_path) as running:
        peer = await running.peer()
        await peer.post(a_set(1.0))

        async def never(mean):
            await asyncio.Event().wait()

        running.server._means.merge = never
        await stop(running)
        assert [type(entry) for entry in history(tmp_path)][-1] is Ended
    async with Running(tmp_path) as again:
        peer.port = again.port
        again.peers = [peer]
        assert (await peer.connect(keeps=True))["end"]["over"]
        await ended(again)
        assert value(await again.server.last_set()) == 1.0


@pytest.mark.parametrize("computes", [False, True], ids=["over", "while the last set is computed"])
async def test_a_peer_whose_connection_breaks_at_the_end_comes_back_for_the_last_set(tmp_path, monkeypatch, computes):
    async with Running(tmp_path, updates=1) as running:
        [code] = await running.server.invite()
        lines, may_merge, merge = [], asyncio.Event(), running.server._means.merge
        peer = Peer(f"http://127.0.0.1:{running.port}/#{code}", lambda welcome: Added(), say=lines.append)
        training = asyncio.ensure_future(asyncio.to_thread(peer.run))
        await running.until(lambda: running.server.ledger.counts.get("posts", 0) > 2)

        async def merges(mean):
            await may_merge.wait()
            await merge(mean)

        async def cut(reason):
            running.server._leases.connections[1].socket.transport.abort()
            running.server._over.set()
            running.server.done.set()

        if computes:
            monkeypatch.setattr(running.server._means, "merge", merges)
        else:
            monkeypatch.setattr(running.server, "_end", cut)
        await stop(running)
        if computes:
            running.server._leases.connections[1].socket.transport.abort()
            await running.until(lambda: 1 in running.server._leases.connections)
            may_merge.set()
        await asyncio.wait_for(training, PATIENCE_S)
        await ended(running)
        last = value(await running.server.last_set())
    assert peer.why_over == "stopped by ddlf peers stop"
    assert float(peer.trained.live[0][0, 0]) == last
    assert lines[-1] == "over      stopped by ddlf peers stop"
    assert leaving_reasons(tmp_path) == {1: "it has received the last set"}


async def test_a_program_that_connects_again_after_the_end_receives_the_end(tmp_path):
    async with Running(tmp_path) as running:
        [code] = await running.server.invite()
        link = f"http://127.0.0.1:{running.port}/#{code}"
        slow, first = await running.peer(), Peer(link, lambda welcome: Added(), say=[].append)
        await asyncio.to_thread(first.join)
        slow.socket.transport.pause_reading()  # so that the server stays
        await stop(running)
        await asyncio.to_thread(first.close)
        with pytest.raises(ConnectError, match="is over: stopped by ddlf peers stop; ask for another training"):
            await asyncio.to_thread(Peer(link, lambda welcome: Added()).join)
