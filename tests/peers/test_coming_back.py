"""Tests of peers that lose their connection or lease in any phase of a round or swap: no training is lost or counts twice."""

import asyncio
import threading

import pytest
from websockets.exceptions import ConnectionClosed

from ddlf.peers import post_checks, server
from ddlf.peers.entries import Left
from ddlf.peers.frames import Post
from ddlf.peers.ledger import Reply
from ddlf.peers.peer import Peer
from ddlf.peers.peer_connection import PeerConnection
from tests.patience import PATIENCE_S
from tests.peers.test_server import Added, Running, a_set, value

ROUNDS = {"way": "rounds", "merge": "mean"}
CUT_IN = 3
"""The number of the post that loses the connection."""
BATCHES = 12


class Patient(Peer):
    """A peer that waits for each answer, as if its batches took longer than the answer."""

    def _take(self, timeout_s):
        super()._take(PATIENCE_S if self._connection.waits else timeout_s)


class Cutting(Running):
    """A server that cuts the connection of its first peer once, in one phase, and ends its lease if it ``expires``."""

    def __init__(self, folder, monkeypatch, phase, *, expires, **plan):
        super().__init__(folder, updates=2, **plan)
        self.phase, self.expires, self.cuts = phase, expires, 0
        self.may_come, self.has_lost = asyncio.Event(), asyncio.Event()
        self.may_come.set()
        received, admit, answer = self.server._on_message, self.server._admit, PeerConnection.answer

        async def receive(peer, connection, message):
            is_it = isinstance(message, Post) and message.number == CUT_IN
            if is_it and self.takes("post", connection.socket):
                return
            await received(peer, connection, message)
            if is_it:
                self.takes("acknowledged", connection.socket)

        async def admitted(peer, *args, **named):
            await self.may_come.wait()
            await admit(peer, *args, **named)
            if named["keeps"] and self.phase == "welcome" and self.cuts == 1:
                self.cuts += 1
                raise OSError("lost again, before the welcome")

        def answered(connection, reply, *rest):
            if reply.number == CUT_IN:
                self.takes("answer", connection.socket)
            answer(connection, reply, *rest)

        monkeypatch.setattr(self.server, "_on_message", receive)
        monkeypatch.setattr(self.server, "_admit", admitted)
        monkeypatch.setattr(PeerConnection, "answer", answered)

    def takes(self, phase, socket):
        """Cut the connection if this is the chosen phase. Return whether it is."""
        if self.cuts or phase != self.phase.replace("welcome", "post"):
            return False
        self.cuts += 1
        socket.transport.abort()
        if self.expires:
            self.may_come.clear()
            self.server._begin(self.expire())
        return True

    async def expire(self):
        await self.server.writer.commit(Left(at=0.0, peer=1, why="no sign of life"))
        self.may_come.set()


@pytest.mark.parametrize("expires", [False, True], ids=["kept", "expired"])
@pytest.mark.parametrize("phase", ["post", "acknowledged", "answer", "welcome"])
@pytest.mark.parametrize("plan", [ROUNDS, {}], ids=["rounds", "swap"])
async def test_each_batch_is_in_the_weights_once(plan, phase, expires, tmp_path, monkeypatch):
    async with Cutting(tmp_path, monkeypatch, phase, expires=expires, **plan) as running:
        [code] = await running.server.invite()
        peer = Patient(f"http://127.0.0.1:{running.port}/#{code}", lambda welcome: Added(), say=[].append)
        trained = await asyncio.wait_for(asyncio.to_thread(peer.run, most_updates=BATCHES), PATIENCE_S)
        assert running.cuts == 1 + (phase == "welcome")
        await running.until(lambda: not running.server.ledger.present and running.server.ledger.pending() is None)
        assert running.server.ledger.counts["posts"] == BATCHES // 2
        assert "late" not in running.server.ledger.counts
        assert value(await running.server.last_set()) == float(trained.live[0][0, 0]) == BATCHES


async def test_a_round_that_closes_while_its_peer_reconnects_is_answered_once(tmp_path):
    """A second answer would count the training since the post twice."""
    async with Running(tmp_path, **ROUNDS) as running:
        first, second = await running.peer(), await running.peer()
        await first.send_post(a_set(1.0), base=1)
        await running.until(lambda: running.server.ledger.members[1].number == 1)
        await first.socket.close()
        await first.connect(keeps=True)
        await second.post(a_set(3.0), base=1)
        assert ((await first.answer())["number"], value(first.set)) == (1, 2.0)
        await first.send_again(a_set(1.0), base=1)
        await first.send_post(a_set(4.0), base=first.set_number)
        await second.post(a_set(4.0), base=second.set_number)
        assert ((await first.answer())["number"], value(first.set)) == (2, 4.0)


async def test_a_post_that_is_sent_again_during_its_check_is_accepted_once(tmp_path, monkeypatch):
    monkeypatch.setattr(post_checks, "INLINE_BYTES", 0)  # checked on threads, like large sets
    checks, going = [], [threading.Event(), threading.Event()]

    def slowly(data):
        number = len(checks)
        checks.append(data)
        going[number].wait(PATIENCE_S)
        return sketch(data)

    async with Running(tmp_path) as running:
        sketch = running.server.sets._sketcher.sketch
        monkeypatch.setattr(running.server.sets._sketcher, "sketch", slowly)
        peer = await running.peer()
        await peer.send_post(a_set(1.0))
        await running.until(lambda: len(checks) == 1)
        await peer.socket.close()
        await peer.connect(keeps=True)
        await peer.send_again(a_set(1.0))
        await running.until(lambda: len(checks) == 2)
        going[0].set()
        await running.until(lambda: running.server.ledger.members[1].number == 1)
        going[1].set()
        assert (await peer.answer())["answer"] == "continue"
        monkeypatch.undo()
        assert (await peer.post(a_set(2.0)))["number"] == 2
        assert running.server.ledger.counts["posts"] == 2


async def test_a_peer_that_waits_for_its_round_comes_back_when_its_lease_has_run_out(tmp_path, monkeypatch):
    """A computer that was suspended may have an open connection, but the server answers only peers with a lease."""
    monkeypatch.setattr(server, "TICK_S", 0.0)
    async with Running(tmp_path, **ROUNDS) as running:
        first, second = await running.peer(), await running.peer()
        await first.send_post(a_set(1.0), base=1)
        await running.until(
            lambda: (
                running.server.ledger.members[1].number == 1 and not running.server._leases.connections[1].is_working
            )
        )
        running.server._leases.last_signs[1] = running.server._leases.connections[1].socket.heard_at = 0.0
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(first.socket.recv(), PATIENCE_S)
        await first.connect(keeps=True)
        await first.send_again(a_set(1.0), base=1)
        await second.post(a_set(3.0), base=1)
        assert ((await first.answer())["answer"], value(first.set)) == ("replace", 2.0)


async def test_a_set_that_arrives_during_a_batch_is_merged_once(tmp_path):
    """A post before this merge would report that the peer lacks the set, so the server would send it again."""
    async with Running(tmp_path, updates=1) as running:
        other = await running.peer()
        [code] = await running.server.invite()
        peer = Peer(f"http://127.0.0.1:{running.port}/#{code}", lambda welcome: Added(), say=[].append)
        await asyncio.to_thread(peer.join)
        await other.post(a_set(5.0))
        peer.trained.batch(1)
        peer.updates = peer._since = 1
        await asyncio.to_thread(peer._post)
        await running.until(lambda: peer._connection.has_news)
        await asyncio.to_thread(peer._step, trains=True)
        await running.until(lambda: not peer._connection.waits)
        await asyncio.to_thread(peer._take, 0.0)
        await asyncio.to_thread(peer.close)
        assert (peer.posts, peer.merges) == (2, 1)
        assert float(peer.trained.live[0][0, 0]) == (1 + 1 + 5.0) / 2
        assert running.server.ledger.counts["contained"] >= 2


@pytest.mark.parametrize(("kind", "answer", "number"), [("replace", "replace", 1), ("merge", "continue", 0)])
async def test_a_replacing_answer_has_the_base_if_its_set_is_gone(kind, answer, number, tmp_path):
    """The base contains the set. Without a base, a peer in rounds would continue from one that no round accepts."""
    async with Running(tmp_path) as running:
        peer = await running.peer()
        running.server._leases.connections[1].answer(Reply(peer=1, number=1, answer=kind, set=99))
        reply = await peer.answer()
        assert (reply["answer"], reply["set_number"]) == (answer, number)


async def test_a_new_peer_tries_again_when_its_first_connection_breaks(tmp_path, monkeypatch):
    async with Running(tmp_path, updates=2) as running:
        admit, lines, cuts = running.server._admit, [], []

        async def admitted(*args, **named):
            if len(cuts) < 2:
                cuts.append(1)
                raise OSError("lost before the welcome")
            await admit(*args, **named)

        monkeypatch.setattr(running.server, "_admit", admitted)
        [code] = await running.server.invite()
        peer = Peer(f"http://127.0.0.1:{running.port}/#{code}", lambda welcome: Added(), say=lines.append)
        await asyncio.wait_for(asyncio.to_thread(peer.run, most_updates=BATCHES), PATIENCE_S)
        await running.until(lambda: not running.server.ledger.present and running.server.ledger.pending() is None)
        assert value(await running.server.last_set()) == BATCHES
    assert [line for line in lines if line.startswith("lost")] == [
        "lost      the connection to the server before training began; it is tried again"
    ]
