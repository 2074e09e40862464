"""Tests of a server with broken, late and foreign peers: each one gets one sentence, and does not harm another peer."""

import asyncio
import errno
import time
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from ddlf import events as e
from ddlf.cluster.cluster import Cluster
from ddlf.errors import AuthError, CheckpointError, ConfigError, ConnectError
from ddlf.monitor.runs.folder import read_state
from ddlf.peers import clock, journal, leases, ledger, server, serving
from ddlf.peers.entries import Arrived, Ended
from ddlf.peers.journal import history
from ddlf.peers.peer import Peer
from ddlf.peers.plan import Plan
from ddlf.peers.served_model import Model
from ddlf.peers.serving import protection
from ddlf.peers.turns import TurnConnection
from ddlf.rpc import dial
from ddlf.training.checkpoints import durable
from tests.peers.light import HELLO, POST, frame, get
from tests.peers.test_server import LAYOUT, ONE, Added, Running, a_set

STEP_S = 0.9 * server.HELD_UP_S


class Clock:
    """A clock of a server that a test can move."""

    def __init__(self):
        self.ahead_s = 0.0

    def time(self):
        return time.time() + self.ahead_s


class Ticking(Running):
    """A server with its own clock, which counts its checks of the leases and of the end."""

    def __init__(self, folder, monkeypatch, **plan):
        self.clock, self.looks = Clock(), 0
        super().__init__(folder, **plan)
        monkeypatch.setattr(clock, "now", lambda: self.clock.time())
        monkeypatch.setattr(server, "TICK_S", 0.0)
        due = self.server.ledger.due_entries

        def counted(now, heard_at):
            self.looks += 1
            return due(now, heard_at)

        monkeypatch.setattr(self.server.ledger, "due_entries", counted)

    async def passes(self, seconds):
        """Move the clock in short steps, so that the server does not take the time for a pause of its machine."""
        for _ in range(ceil(seconds / STEP_S)):
            self.clock.ahead_s += STEP_S
            await self.look()

    async def look(self):
        """Wait until the server has made a full check at the present time."""
        looks = self.looks
        await self.until(lambda: self.looks >= looks + 2)


async def test_a_training_of_seconds_ends_when_they_have_passed_since_the_first_peer(tmp_path, monkeypatch):
    async with Ticking(tmp_path, monkeypatch, end=5.0) as running:
        running.clock.ahead_s = 3600.0  # the time before the first peer does not count
        await running.look()
        await running.peer()
        now = running.server.ledger.first_at + 4.999
        monkeypatch.setattr(running.clock, "time", lambda: now)
        await running.look()
        assert running.server.ledger.present == [1]
        assert not running.server.ledger.ended
        now = running.server.ledger.first_at + 5.0
        await running.until(lambda: running.server.ledger.over)
    [first] = [entry.at for entry in history(tmp_path) if isinstance(entry, Arrived)]
    [ended] = [entry for entry in history(tmp_path) if isinstance(entry, Ended)]
    assert (ended.why, ended.at - first) == ("the first peer came 5 s ago", pytest.approx(5.0))


async def test_a_training_without_an_end_continues_until_it_is_stopped(tmp_path, monkeypatch):
    async with Ticking(tmp_path, monkeypatch, end=0.0) as running:
        peer = await running.peer()
        await peer.post(a_set(1.0))
        for _ in range(6):
            await running.validated(2, 1.0)
        await running.until(lambda: running.server.ledger.validation_count == 6)
        running.clock.ahead_s = 10 * 365 * 24 * 3600.0
        await running.look()
        assert not running.server.ledger.ended
        assert (await get(running.port, "/control/stop", {"Authorization": "Bearer secret"}))[0] == 200
        assert (await peer.answer())["end"]["why"] == "stopped by ddlf peers stop"


async def test_a_server_does_not_drop_its_peers_after_a_pause_of_its_machine(tmp_path, monkeypatch):
    """The machine was overloaded or suspended, so the server sent no pings that peers could answer."""
    async with Ticking(tmp_path, monkeypatch) as running:
        await running.peer()
        running.clock.ahead_s = 3600.0
        await running.look()
        assert running.server.ledger.present == [1]


async def test_a_peer_on_a_slow_line_is_not_dropped_and_does_not_delay_another_one(tmp_path, monkeypatch):
    """Its set needs three leases to arrive, like 20 MB at 5 Mbit/s. Each part is a sign of life, but silence is not."""
    monkeypatch.setattr(leases, "PING_S", 1e9)  # an answer to a ping would be a sign of life, too
    async with Ticking(tmp_path, monkeypatch) as running:
        slow, other = await running.peer(), await running.peer()
        part_s, answers = 0.8 * ledger.LEASE_S, []
        data = frame(POST, ONE, a_set(1.0))
        parts = [data[begin : begin + len(data) // 5] for begin in range(0, len(data), len(data) // 5)]

        async def slowly():
            for part in parts:
                yield part
                await running.until(
                    lambda: running.server._leases.connections[1].socket.heard_at >= running.clock.time() - 1
                )
                if part is not parts[-1]:
                    answers.append(await other.post(a_set(1.0 + len(answers))))
                    await running.passes(part_s)
                    assert running.server.ledger.present == [1, 2]

        await slow.socket.send(slowly())
        assert (await slow.answer())["answer"] in ("continue", "merge")
        assert len(answers) == 4
        await running.passes(1.5 * ledger.LEASE_S)
        await running.until(lambda: 1 not in running.server.ledger.present)


async def test_a_lease_that_runs_out_prints_a_line_and_has_an_event(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "LEASE_S", 0.0)
    events = []
    running = Running(tmp_path, tell=events.append)
    async with running:
        peer = await running.peer()
        await peer.abort()
        await running.until(lambda: "left      peer 1 (light): no sign of life for 0 s" in running.lines)
        [left] = [event for event in events if isinstance(event, e.PeerLeft)]
        assert (left.peer, left.name, left.why) == (1, "light", "no sign of life for 0 s")


async def test_a_peer_is_not_dropped_while_its_post_waits_for_the_disk(tmp_path):
    async with Running(tmp_path) as running:
        peer, heard = await running.peer(), []
        journal, leases = running.server._journal, running.server._leases
        append, connection = journal.append, leases.connections[1]

        def slow(entries, heads):
            leases.last_signs[1] = connection.socket.heard_at = 0.0  # like after a long time
            heard.append(leases.heard_from(1, connection))
            append(entries, heads)

        journal.append = slow
        before = time.time()
        await peer.post(a_set(1.0))
        assert heard[0] >= before


async def test_each_part_of_a_set_that_a_peer_reads_is_a_sign_of_life():
    connection, heard = TurnConnection.__new__(TurnConnection), []
    connection.heard_at = 0.0

    async def send(pieces):
        for _ in pieces:
            heard.append(connection.heard_at)
            connection.heard_at = 0.0

    connection.send = send
    await connection.send_alive(iter([b"1", b"2", b"3"]))
    assert len(heard) == 3
    assert min(heard) > 0


async def test_the_events_count_the_bytes_of_sets_each_way(tmp_path):
    events = []
    async with Running(tmp_path, tell=events.append) as running:
        first, second = await running.peer(), await running.peer()
        await first.post(a_set(1.0))
        await second.post(a_set(2.0))
        size = running.server.model.layout.bytes
        records = lambda: [event.record for event in events if isinstance(event, e.Committed)]  # noqa: E731
        await running.until(lambda: sum(record.bytes_back for record in records()) == 2 * size)
        await first.post(a_set(3.0))  # the record of this post counts all earlier bytes
        await running.until(lambda: sum(record.bytes_back for record in records()) == 3 * size)
        assert sum(record.bytes_out for record in records()) == 4 * size  # two first sets, and two answers


async def test_the_key_of_another_run_opens_nothing(tmp_path, monkeypatch):
    """A new server on the same port receives a cookie of an earlier server, and a peer with an old link."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    async with Running(tmp_path / "one") as first:
        [code] = await first.server.invite()
        _, headers, _ = await get(first.port, "/join", {"X-DDLF-Code": code})
        _, _, key = headers["Set-Cookie"].partition(";")[0].partition("=")
        [code] = await first.server.invite()
        link = f"http://127.0.0.1:{first.port}/#{code}"
        await asyncio.to_thread(Peer(link, lambda welcome: Added(), say=[].append).run, most_updates=1)
    async with Running(tmp_path / "other", port=first.port) as second:
        with pytest.raises(InvalidStatus) as refused:
            await connect(
                f"ws://127.0.0.1:{second.port}/live",
                additional_headers={"Cookie": f"ddlf-peer-{second.port}={key}"},
                proxy=None,
            )
        assert refused.value.response.status_code == 401
        assert refused.value.response.body.strip() == b"you have no session here: join with a link first"
        again = Peer(link, lambda welcome: Added(), say=[].append)
        with pytest.raises(AuthError, match=r"refuses this peer: you have no session here.*; ask for a new link"):
            await asyncio.to_thread(again.run, most_updates=1)
        assert not second.server.ledger.members


async def test_two_tabs_with_one_cookie_are_one_peer_and_the_newer_one_stays(tmp_path):
    async with Running(tmp_path) as running:
        [code] = await running.server.invite()
        _, headers, _ = await get(running.port, "/join", {"X-DDLF-Code": code})
        cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        url = f"ws://127.0.0.1:{running.port}/live"
        async with (
            connect(url, additional_headers=cookie, proxy=None) as tab,
            connect(url, additional_headers=cookie, proxy=None) as newer,
        ):
            for socket in (tab, newer):
                await socket.send(frame(HELLO, {"name": "browser", "samples": 5}))
                assert b'"peer":1' in await socket.recv()
            end = await tab.recv()
            assert b"the same peer has connected again" in end
            assert b"close other windows and programs" in end
            await tab.wait_closed()
            assert list(running.server._leases.connections) == [1]


async def test_a_huge_set_is_rejected_although_checks_are_off(tmp_path):
    """There is no limit of lengths and no usual length yet. Regression test: peers that merged the set were lost."""
    async with Running(tmp_path, longest=0.0) as running:
        honest, other = await running.peer(), await running.peer()
        answer = await other.post(a_set(1e30))
        assert (answer["answer"], answer["why"]) == ("rejected", "its values are not finite, or too large")
        assert (await honest.post(a_set(1.0)))["answer"] == "continue"


async def test_a_peer_that_is_kicked_again_or_does_not_exist_is_named_with_a_hint(tmp_path):
    """Regression test: the message advised the owner of the server to ask for a new link."""
    secret = {"Authorization": "Bearer secret"}
    async with Running(tmp_path) as running:
        await running.peer()
        kick = lambda number: get(running.port, f"/control/kick?peer={number}", secret)  # noqa: E731
        assert (await kick(1))[0] == 200
        for number, sentence in ((1, "peer 1 is removed already"), (2, "there is no peer 2")):
            status, _, body = await kick(number)
            assert (status, body.strip()) == (409, f"{sentence}; ddlf peers list shows the peers")


async def test_a_negative_number_of_samples_is_refused(tmp_path):
    async with Running(tmp_path) as running:
        peer = await running.peer()
        peer.samples = -1
        assert "samples of Hello must be from 0 to 2^53, got -1" in (await peer.connect())["end"]["why"]


async def test_a_master_of_workers_on_the_port_of_peers_learns_that_another_program_listens(tmp_path, monkeypatch):
    monkeypatch.setattr(dial, "HANDSHAKE_TIMEOUT_S", 0.2)
    async with Running(tmp_path) as running:
        # The random bytes of a hello may contain a line break. Then the server closes the connection.
        reason = r"no DDLF handshake within .* another program listens there|closed .* it is not a DDLF worker"
        with pytest.raises(ConnectError, match=rf"connected, but .*({reason})"):
            await Cluster(["127.0.0.1"], [running.port]).connect()
        assert not running.server.ledger.members


@pytest.mark.parametrize(
    ("cert", "key", "proxy", "sentence"),
    [
        ("no.pem", None, "", "no.pem"),
        ("bad.pem", None, "", "bad.pem"),
        (None, "bad.pem", "", "--tls-key has no effect without --tls-cert"),
        ("bad.pem", None, "https://peers.example", "--tls-cert has no effect with --proxy"),
        (None, None, "http://peers.example", "is not a URL with https"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused_by_name(tmp_path, monkeypatch, cert, key, proxy, sentence):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("bad.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=sentence) as refused:
        protection("0.0.0.0", cert and Path(cert), key and Path(key), proxy)
    assert "\n" not in str(refused.value)


def test_a_server_beyond_loopback_always_has_a_certificate(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for host, secure in (("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("::", True)):
        context, pin = protection(host, None, None, "")
        assert (context is not None, bool(pin)) == (secure, secure), host
    certificate = tmp_path / "ddlf/peers-certificate.pem"
    context, pin = protection("127.0.0.1", certificate, None, "")  # one file with certificate and key
    assert (context is not None, len(pin)) == (True, 64)


class Kept:
    """A stand-in of a Keras model with the one method that the end of a server calls."""

    def save(self, path):
        path.write_bytes(b"a model")


async def served(path, model, lines):
    """Serve until the first link is printed. Then end the server, but not the training."""
    stop = SimpleNamespace(gently=None)

    def say(line):
        lines.append(line)
        if line.startswith("join "):
            stop.gently()

    how = {"host": "127.0.0.1", "port": 0, "invitations": 1, "cert": None, "key": None, "proxy": "", "dashboard": False}
    return await serving.serve(path, model, Plan(), say=say, stop=stop, **how)


@pytest.mark.parametrize("file", ["journal-000001", "server.json", "model.safetensors"])
async def test_a_full_disk_ends_a_server_with_one_sentence_and_a_later_one_continues(tmp_path, monkeypatch, file):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    model = serving.Served(
        Model(text="a", layout=LAYOUT, first=a_set(0.5), trainable=(True, True)), None, lambda weights: Kept()
    )
    path, lines, write = serving.make_folder(tmp_path, "a", Plan(), model, 0), [], durable.write_new

    def full(target, *parts):
        if file in target.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(target, *parts)

    for module in (durable, journal):
        monkeypatch.setattr(module, "write_new", full)
    with pytest.raises(CheckpointError, match=r"^no space: need") as refused:
        await served(path, model, lines)
    assert "\n" not in str(refused.value)
    assert "checkpoint" not in str(refused.value)
    assert read_state(path).state == "failed"
    for module in (durable, journal):
        monkeypatch.setattr(module, "write_new", write)
    assert not await served(path, model, lines)
    assert lines[-2].startswith("saved ")
    assert (path / "model.keras").read_bytes() == b"a model"
    assert read_state(path).state == "stopped"


def test_a_full_disk_refuses_a_new_run_with_one_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(serving.runs, "write_text", full)
    model = serving.Served(Model(text="a", layout=LAYOUT, first=a_set(0.0), trainable=(True, True)), None, Kept)
    with pytest.raises(CheckpointError, match=r"^no space: need"):
        serving.make_folder(tmp_path, "a", Plan(), model, 0)
