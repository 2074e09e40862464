"""Tests of the server of peers with real sockets and files. The peers share no code with it."""

import asyncio
import contextlib
import socket
import threading
import time

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ddlf.errors import AuthError, CheckpointError
from ddlf.peers import front, journal_writer, leases, ledger, server, serving, sessions
from ddlf.peers import peer as peer_of
from ddlf.peers.entries import Arrived, Ended, Invited, Left, Merged, Rejected, Validated
from ddlf.peers.frames import Broken
from ddlf.peers.journal import Journal, history
from ddlf.peers.peer import Peer
from ddlf.peers.plan import Plan
from ddlf.peers.served_model import Model
from ddlf.peers.server import PeerServer
from ddlf.peers.sets import layout_of
from tests.patience import PATIENCE_S
from tests.peers.light import BROKEN, BYE, HELLO, POST, SCORE, Light, frame, get, opened

WEIGHTS = {"dense/kernel": np.zeros((3, 2), np.float32), "dense/bias": np.zeros(2, np.float32)}
LAYOUT = layout_of(WEIGHTS)


def a_set(value):
    return LAYOUT.encode([np.full_like(array, value) for array in WEIGHTS.values()])


def value(data):
    return float(LAYOUT.decode(data)[0][0, 0])


class Running:
    """A running server, and the lines that it has printed."""

    port = 0

    def __init__(
        self, folder, *, converged=None, model=None, tell=lambda event: None, port=0, test=None, url="", **plan
    ):
        self.folder, self.lines, self.peers, self.port = folder, [], [], port
        model = model or Model(text="a model", layout=LAYOUT, first=a_set(0.0), trainable=(True, True))
        plan = Plan(**({"validate_s": 0.0, "merge": "average"} | plan))
        how = {
            "say": self.lines.append,
            "tell": tell,
            "control": "secret",
            "converged": converged,
            "test": test,
            "url": url,
        }
        self.server = PeerServer(folder, model, plan, **how)
        self.server.recover()

    async def __aenter__(self):
        sock = socket.create_server(("127.0.0.1", self.port))
        self.port = sock.getsockname()[1]
        ready = asyncio.Event()
        self.task = asyncio.ensure_future(self.server.serve(sock, ready.set))
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
        return self

    async def __aexit__(self, *exc):
        for peer in self.peers:
            await peer.abort()
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def peer(self, **how):
        peer = Light(self.port, **how)
        self.peers.append(peer)
        [code] = await self.server.invite()
        await peer.join(code)
        return peer

    async def validated(self, number, accuracy):
        entry = Validated(at=time.time(), set=number, accuracy=accuracy, loss=1 - accuracy, samples=64, peer=1)
        await self.server.writer.commit(entry)

    async def until(self, holds):
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110  the condition depends on several tasks
                await asyncio.sleep(0.01)


@pytest.fixture
async def running(tmp_path):
    async with Running(tmp_path) as running:
        yield running


async def test_peers_swap_their_sets(running):
    first, second = await running.peer(), await running.peer()
    assert value(first.set) == 0.0
    assert (await first.post(a_set(1.0), accuracy=0.5))["answer"] == "continue"
    answer = await second.post(a_set(2.0))
    assert (answer["answer"], answer["trainings"], answer["accuracy"], value(second.set)) == ("merge", 1, 0.5, 1.0)
    assert (await first.post(a_set(3.0)))["answer"] == "merge"
    assert value(first.set) == 2.0
    assert running.server.ledger.sets.keys() == running.server.sets.travelling.keys()


async def test_a_peer_that_reconnects_stays_the_same_peer_and_is_answered_once(running):
    first, second = await running.peer(), await running.peer()
    await first.post(a_set(1.0))
    await second.send_post(a_set(2.0))
    await running.until(lambda: running.server.ledger.members[2].number == 1)
    await second.socket.close()
    welcome = await second.connect(keeps=True)
    assert (welcome["peer"], welcome["number"], welcome["set_number"]) == (2, 1, 0)
    await second.send_again(a_set(2.0))
    assert ((await second.answer())["answer"], value(second.set)) == ("merge", 1.0)
    assert running.server.ledger.counts["posts"] == 2


async def test_a_server_that_was_killed_knows_every_acknowledged_set(tmp_path):
    async with Running(tmp_path) as running:
        first, second = await running.peer(), await running.peer()
        await first.post(a_set(1.0))
        await second.post(a_set(2.0))
        before, sets = running.server.ledger.state(), dict(running.server.sets.travelling)
        await first.socket.close()
        await second.socket.close()
    async with Running(tmp_path) as again:
        assert (again.server.ledger.state(), again.server.sets.travelling) == (before, sets)
        first.port = second.port = again.port
        again.peers = [first, second]
        assert (await first.connect(keeps=True))["number"] == 1
        assert (await first.post(a_set(3.0)))["answer"] == "merge"
        assert value(first.set) == 2.0


async def test_a_set_that_is_not_finite_is_rejected_and_the_run_continues(running):
    first, second = await running.peer(), await running.peer()
    await first.post(a_set(1.0))
    answer = await second.post(a_set(float("nan")))
    assert (answer["answer"], value(second.set)) == ("rejected", 0.0)
    assert answer["why"] == "6 of 6 values of 'dense/kernel' are NaN or infinite"
    assert (await second.post(a_set(2.0)))["answer"] == "merge"


async def test_a_far_too_long_set_is_rejected_and_three_strikes_exclude_its_peer(running):
    first, second, bad = [await running.peer() for _ in range(3)]
    for peer in (first, second, bad):
        await peer.post(a_set(1.0))
    for _ in range(3):
        answer = await bad.post(a_set(1e6))
        assert (answer["answer"], value(bad.set)) == ("rejected", 0.0)
    assert answer["why"].endswith("times as long as is usual")
    answer = await bad.post(a_set(1.0))
    assert (answer["answer"], answer["why"][:36]) == ("rejected", "after 3 strikes, posts count again i")
    assert any(line == "out       peer 3 (light): its posts count again in 60 s" for line in running.lines)
    for peer in (first, second):
        await peer.post(a_set(2.0))
        assert value(peer.set) in (0.0, 1.0, 2.0)
    [listed] = [peer for peer in running.server.overview().peers if peer.peer == 3]
    assert listed.out_s > 0
    rejected = [entry for entry in history(running.folder) if isinstance(entry, Rejected)]
    assert [entry.strike for entry in rejected] == ["yes", "yes", "yes", "no"]


async def test_a_peer_moves_only_partly_towards_a_distant_set(tmp_path):
    async with Running(tmp_path, longest=2.0) as running:
        first, second, far = [await running.peer() for _ in range(3)]
        for peer in (first, second, far):
            await peer.post(a_set(1.0), contains=0)
        for distance in (2.5, 4.0, 5.5, 7.0, 8.5, 10.0, 11.5):
            await far.post(a_set(distance), contains=0)
        await first.post(a_set(1.5), contains=0)
        await first.post(a_set(2.0), contains=first.set_number)
        await second.post(a_set(1.5), contains=second.set_number)
        steps = [peer.set for peer in (first, second)]
        assert any(2.0 < value(data) < 11.5 for data in steps), [value(data) for data in steps]


async def test_a_trial_rejects_a_set_whose_accuracy_is_lower(tmp_path):
    plan = {"validated_by": "server", "trial": 0.2, "validate_s": 1.0}
    async with Running(
        tmp_path, test=lambda weights: (0.9 if weights[0][0, 0] < 5 else 0.5, 0.1, 100), **plan
    ) as running:
        peer = await running.peer()
        await running.until(lambda: running.server.ledger.validations)
        assert (await peer.post(a_set(1.0)))["answer"] == "continue"
        answer = await peer.post(a_set(9.0))
        assert answer["answer"] == "rejected"
        assert answer["why"] == "its accuracy on the server's data is 0.5000, and that of the last validations 0.9000"


async def test_a_peer_restarts_from_the_validated_set_after_a_failed_merge(running):
    first, second = await running.peer(), await running.peer()
    await first.post(a_set(1.0))
    await running.validated(2, 0.5)
    assert (await second.post(a_set(5.0)))["answer"] == "merge"
    await second.socket.send(frame(BROKEN, {"why": "NaN after a merge"}))
    assert ((await second.answer())["answer"], value(second.set)) == ("replace", 1.0)
    assert any("NaN after a merge" in line for line in running.lines)


async def test_after_a_merge_all_peers_get_the_mean_by_trainings(running):
    first, second = await running.peer(), await running.peer()
    for _ in range(3):
        await first.post(a_set(1.0))
    await second.post(a_set(5.0))
    await running.server._command("merge", "")
    await running.until(lambda: running.server.ledger.base > 1)
    for peer in (first, second):
        assert (await peer.post(a_set(9.0)))["answer"] == "replace"
        assert value(peer.set) == pytest.approx((3 * 1.0 + 1 * 5.0) / 4)


async def test_the_end_gives_all_peers_the_last_set(running):
    first, second = await running.peer(), await running.peer()
    await first.post(a_set(1.0))
    await second.post(a_set(3.0))
    status, _, _ = await get(running.port, "/control/stop", {"Authorization": "Bearer secret"})
    assert status == 200
    for peer in (first, second):
        end = await peer.answer()
        assert (end["end"]["over"], value(end["set"])) == (True, 2.0)
    await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_S)


async def test_a_round_is_the_mean_of_its_sets_by_samples(tmp_path):
    async with Running(tmp_path, way="rounds", merge="mean") as running:
        first, second = await running.peer(samples=100), await running.peer(samples=300)
        await first.send_post(a_set(1.0), base=1)
        assert (await second.post(a_set(5.0), base=1))["answer"] == "replace"
        await first.answer()
        assert value(first.set) == value(second.set) == 0.25 * 1.0 + 0.75 * 5.0
        late = await running.peer()
        assert value(late.set) == 4.0


@pytest.mark.parametrize(("longest", "weight"), [(6.0, 3000), (0.0, 10**9)])
async def test_a_peer_that_claims_a_billion_samples_counts_as_ten_usual_ones(tmp_path, longest, weight):
    """The server cannot verify the number. Without checks, it accepts it."""
    plan = {"way": "rounds", "merge": "mean", "update_policy": "stop", "longest": longest}
    async with Running(tmp_path, **plan) as running:
        first, second, liar = [await running.peer(samples=samples) for samples in (100, 300, 10**9)]
        for number in range(2):
            base = first.set_number or 1
            await first.send_post(a_set(1.0), base=base)
            await second.send_post(a_set(1.0 + number), base=base)
            await liar.send_post(a_set(3.0), base=base)
            for peer in (first, second, liar):
                await peer.answer()
        assert value(first.set) == pytest.approx((100 + 300 * 2 + weight * 3) / (400 + weight))
        sentence = "peer 3 (light) says that it has 1,000,000,000 samples, and counts with 3,000: 10 times as many"
        lines = [line for line in running.lines if line.startswith("capped")]
        assert lines == [f"capped    {sentence} as is usual here"] * (longest > 0)


async def rounds_of(folder, plan, *, restarts):
    """Return the value of the base after three rounds. The peer adds 1 in each round."""
    running = Running(folder, **plan)
    await running.__aenter__()
    peer = await running.peer()
    for _ in range(3):
        await peer.post(a_set(value(peer.set) + 1.0), base=peer.set_number or 1)
        if restarts:
            await running.__aexit__()
            running = Running(folder, **plan)
            await running.__aenter__()
            running.peers, peer.port = [peer], running.port
            await peer.connect(keeps=True)
    await running.__aexit__()
    return value(peer.set)


async def test_the_outer_optimizer_keeps_its_state_across_a_restart(tmp_path):
    plan = {"way": "rounds", "merge": "mean", "outer": "nesterov:learning_rate=1,momentum=0.5"}

    bases = []
    for name, restarts in (("one", False), ("other", True)):
        (tmp_path / name).mkdir()
        bases.append(await rounds_of(tmp_path / name, plan, restarts=restarts))
    assert bases[0] == bases[1] != 3.0


async def test_a_code_is_used_once_and_expires(running, monkeypatch):
    monkeypatch.setattr(front, "WRONG_CODE_S", 0.0)
    [code] = await running.server.invite()
    status, headers, body = await get(running.port, "/join", {"X-DDLF-Code": code})
    assert status == 200
    cookie = headers["Set-Cookie"]
    assert "HttpOnly; SameSite=Strict" in cookie
    assert code not in cookie + body
    assert (await get(running.port, "/join", {"X-DDLF-Code": code}))[0] == 403
    assert (await get(running.port, "/join", {"X-DDLF-Code": "x" * 43}))[0] == 403
    assert (await get(running.port, "/join"))[0] == 403
    monkeypatch.setattr(sessions, "CODE_S", -1.0)
    [code] = await running.server.invite()
    status, _, body = await get(running.port, "/join", {"X-DDLF-Code": code})
    assert (status, body.strip()) == (403, "the code of the link has expired; ask for a new link")


@pytest.mark.parametrize("path", ["/", "/join", "/live", "/control/list"])
@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
async def test_foreign_hosts_and_origins_are_refused(running, path, headers):
    assert (await get(running.port, path, headers))[0] == 403


async def test_each_answer_carries_the_policy(running):
    for path in ("/", "/join", "/nothing"):
        _, headers, _ = await get(running.port, path)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "'unsafe-" not in headers["Content-Security-Policy"]
        assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer other"}, {"Cookie": "ddlf-peer-1=x"}])
async def test_without_a_session_there_is_no_connection(running, headers):
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"ws://127.0.0.1:{running.port}/live", additional_headers=headers, proxy=None)
    assert refused.value.response.status_code == 401


async def test_a_browser_connects_with_its_cookie(running):
    [code] = await running.server.invite()
    _, headers, _ = await get(running.port, "/join", {"X-DDLF-Code": code})
    cookie = headers["Set-Cookie"].partition(";")[0]
    origin = f"http://127.0.0.1:{running.port}"
    async with connect(
        f"ws://127.0.0.1:{running.port}/live", additional_headers={"Cookie": cookie}, origin=origin, proxy=None
    ) as socket:
        await socket.send(frame(HELLO, {"name": "browser", "samples": 5}))
        assert opened(await socket.recv())[1]["peer"] == 1


async def test_commands_need_the_secret_of_the_server(running):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert (await get(running.port, "/control/stop", headers))[0] == 401
    assert (await get(running.port, "/control/nothing", {"Authorization": "Bearer secret"}))[0] == 409
    assert not running.server.ledger.ended


async def test_the_list_leaves_out_members_that_have_never_arrived(running):
    [code] = await running.server.invite()
    assert (await get(running.port, "/join", {"X-DDLF-Code": code}))[0] == 200
    await running.peer()
    assert [peer.peer for peer in running.server.overview().peers] == [2]


async def test_a_full_disk_refuses_a_merge_until_there_is_space(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_writer, "AGAIN_S", 0.0)
    async with Running(tmp_path, way="rounds", merge="mean") as running:
        peer = await running.peer()
        append, refused = running.server._journal.append, []

        def full(entries, heads):
            if any(isinstance(entry, Merged) for entry, _ in entries) and len(refused) < 3:
                refused.append(entries)
                raise CheckpointError("the disk is full")
            append(entries, heads)

        running.server._journal.append = full
        assert (await peer.post(a_set(1.0), base=1))["answer"] == "replace"
        assert (len(refused), value(peer.set)) == (3, 1.0)


async def test_the_app_ends_the_training_by_the_newest_record(tmp_path):
    async with Running(tmp_path, converged=lambda record: record.version >= 2 and record.loss < 1.0) as running:
        peer = await running.peer()
        await peer.post(a_set(1.0), loss=2.0)
        await peer.post(a_set(2.0), loss=0.5)
        assert (await peer.answer())["end"]["why"] == "is_convergent of the app has ended it"


async def test_an_error_of_is_convergent_is_printed_and_the_training_continues(tmp_path):
    async with Running(tmp_path, converged=lambda record: 1 / 0) as running:
        peer = await running.peer()
        await peer.post(a_set(1.0))
        await running.until(lambda: any("ZeroDivisionError" in line for line in running.lines))
        assert (await peer.post(a_set(2.0)))["answer"] == "continue"


async def test_five_accuracies_above_the_target_end_the_training(tmp_path):
    async with Running(tmp_path, end=0.98) as running:
        peer = await running.peer()
        await peer.post(a_set(1.0))
        for _ in range(4):
            await running.validated(2, 0.99)
        assert not list(running.server.ledger.due_entries(time.time(), {1: time.time()}))
        await running.validated(2, 0.99)
        assert (await peer.answer())["end"]["why"] == "the mean of the last 5 accuracies is 0.9900"


async def test_seconds_end_the_training_after_the_first_peer(tmp_path):
    async with Running(tmp_path, end=1.0) as running:
        began = time.time()
        peer = await running.peer()
        assert (await peer.answer())["end"]["why"] == "the first peer came 1 s ago"
        assert time.time() - began >= 1.0
    entries = list(history(tmp_path))
    first = next(entry.at for entry in entries if isinstance(entry, Arrived))
    [ended] = [entry.at for entry in entries if isinstance(entry, Ended)]
    assert 1.0 <= ended - first < PATIENCE_S


async def test_another_peer_validates_if_the_first_one_leaves(tmp_path):
    async with Running(tmp_path, validate_s=0.01) as running:
        first, second = await running.peer(), await running.peer()
        assert (await first.post(a_set(1.0)))["answer"] == "validate"
        await first.socket.send(frame(BYE, {}))
        await running.until(lambda: running.server.ledger.present == [2])
        for step in range(2):  # a single peer validates each time
            await running.until(lambda: time.time() - running.server.ledger.asked_at > 0.01)
            assert (await second.post(a_set(2.0 + step)))["answer"] == "validate"


async def test_a_removed_peer_cannot_come_back(running):
    peer = await running.peer()
    await peer.post(a_set(1.0))
    await get(running.port, "/control/kick?peer=1", {"Authorization": "Bearer secret"})
    assert "removed" in (await peer.answer())["end"]["why"]
    with pytest.raises(InvalidStatus):
        await peer.connect(keeps=True)


ONE = {"number": 1, "contains": 0, "updates": 1}
BAD = {
    "text": ("text", "a frame is a binary message, got text"),
    "empty": (b"", "at least 16 bytes"),
    "set": (a_set(1.0), "begins with DDLP"),
    "half": (frame(POST, ONE, a_set(1.0))[:-1], "a set of this model has"),
    "number": (frame(POST, ONE | {"number": 5}, a_set(1.0)), "post 1 must come next, got post 5"),
    "updates": (frame(POST, ONE | {"updates": 2**40}, a_set(1.0)), "cannot have 1099511627776 updates"),
    "hello": (frame(HELLO, {"name": "again", "samples": 5}), "kind 1 is not expected here"),
    "score": (frame(SCORE, {"set_number": 1, "accuracy": 7.0, "loss": 0.0, "samples": 1}), "from 0 to 1, got 7"),
    "kind": (frame(99, {}), "kind 99 is not expected here"),
    "version": (b"DDLP\2" + frame(BYE, {})[5:], "version 2 of the peers' protocol, and this one version 1"),
    "header": (frame(POST, ONE, a_set(1.0)).replace(b'"dense/bias"', b'"dense_bias"'), ""),
}


@pytest.mark.parametrize(("message", "reason"), BAD.values(), ids=BAD)
async def test_bad_frames_are_answered_with_the_reason_and_harm_no_other_peer(running, message, reason):
    bad, good = await running.peer(), await running.peer()
    await bad.socket.send(message)
    answer = await bad.answer()
    if reason:
        assert reason in answer["end"]["why"]
        with pytest.raises(ConnectionClosed):
            await bad.socket.recv()
    else:
        assert (answer["answer"], answer["why"]) == ("rejected", "the set has no 'dense/bias'")
    assert (await good.post(a_set(1.0)))["answer"] == "continue"


async def test_a_huge_frame_ends_its_connection_while_it_arrives(running):
    bad, good = await running.peer(), await running.peer()
    await bad.socket.send(frame(POST, ONE, bytes(100_000)))
    with pytest.raises(ConnectionClosed) as closed:
        await bad.socket.recv()
    assert closed.value.rcvd.code == 1009
    assert (await good.post(a_set(1.0)))["answer"] == "continue"


async def test_a_frame_may_arrive_in_parts_and_frames_after_a_goodbye_are_not_read(running):
    peer = await running.peer()
    post = frame(POST, ONE, a_set(1.0))
    await peer.socket.send([post[:3], post[3:50], post[50:]])
    assert (await peer.answer())["answer"] == "continue"
    await peer.socket.send(frame(BYE, {}))
    with contextlib.suppress(ConnectionClosed):
        await peer.socket.send(frame(POST, ONE | {"number": 2}, a_set(2.0)))
        await peer.socket.recv()
    assert running.server.ledger.counts["posts"] == 1


async def test_a_silent_peer_is_refused_with_the_reason(running, monkeypatch):
    monkeypatch.setattr(server, "HELLO_S", 0.05)
    [code] = await running.server.invite()
    _, headers, _ = await get(running.port, "/join", {"X-DDLF-Code": code})
    cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
    async with connect(f"ws://127.0.0.1:{running.port}/live", additional_headers=cookie, proxy=None) as socket:
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "no hello within 0 s")


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"samples": 0}, "1 to 1,000,000,000 samples"),
        ({"samples": 10**12}, "1 to 1,000,000,000 samples"),
        ({"samples": 5, "layout": "other"}, "other weights than the server's"),
        ({"samples": 5, "run": "an older one"}, "another run"),
    ],
)
async def test_an_invalid_hello_is_answered_with_the_reason(running, hello, reason):
    peer = await running.peer()
    await peer.socket.close()
    peer.socket = await connect(
        f"ws://127.0.0.1:{running.port}/live", additional_headers={"Authorization": f"Bearer {peer.key}"}, proxy=None
    )
    peer.sockets.append(peer.socket)
    await peer.socket.send(frame(HELLO, {"name": "x"} | hello))
    assert reason in (await peer.answer())["end"]["why"]


async def test_the_number_of_samples_must_not_change_after_the_first_post(running):
    """Before the first post, the owner of a peer may repair data that the model has refused."""
    peer = await running.peer(samples=50)
    peer.samples = 100
    assert "end" not in await peer.connect()
    await peer.post(a_set(1.0))
    peer.samples = 200
    assert "must not change: it was 100, and is 200" in (await peer.connect(keeps=True))["end"]["why"]


class Added:
    """A training that adds 1 to each weight in a batch."""

    layout = LAYOUT
    trainable = (True, True)
    samples = 10

    def __init__(self):
        self.live = LAYOUT.decode(a_set(0.0))

    def batch(self, size):
        self.live = [array + 1 for array in self.live]

    def means(self):
        return {"loss": 1.0}

    def weights(self):
        return self.live

    def assign(self, weights):
        self.live = weights


async def test_an_unknown_code_is_refused_with_one_thing_to_do(running, monkeypatch):
    monkeypatch.setattr(front, "WRONG_CODE_S", 0.0)
    peer = Peer(f"http://127.0.0.1:{running.port}/#wrong", lambda welcome: Added())
    with pytest.raises(AuthError) as error:
        await asyncio.to_thread(peer.run)
    assert str(error.value).count("ask for a new link") == 1


async def test_a_peer_posts_its_last_batches_before_it_leaves(running):
    [code] = await running.server.invite()
    link = f"http://127.0.0.1:{running.port}/#{code}"
    peer = Peer(link, lambda welcome: Added(), say=lambda line: None)
    await asyncio.to_thread(peer.run, most_updates=running.server.plan.updates + 3)
    await running.until(lambda: not running.server.ledger.present)
    assert running.server.ledger.members[1].updates == running.server.plan.updates + 3


async def test_a_peer_prints_its_first_and_last_post_and_few_between_them(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_of, "SHOWN_S", PATIENCE_S)
    async with Running(tmp_path, updates=1) as running:
        [code] = await running.server.invite()
        lines = []
        peer = Peer(f"http://127.0.0.1:{running.port}/#{code}", lambda welcome: Added(), say=lines.append)

        def train():
            peer.join()
            for _ in range(5):
                peer._step(trains=True)
                while peer._connection.waits:
                    peer._take(PATIENCE_S)
            peer.close()

        await asyncio.to_thread(train)
    assert [line.partition(" batch")[0] for line in lines if line.startswith("posted")] == [
        "posted    set 1 after 1",
        "posted    set 5 after 5",
    ]


async def test_a_second_window_replaces_the_first(running):
    peer = await running.peer()
    first = peer.socket
    await peer.connect(keeps=True)
    assert "connected again" in opened(await first.recv())[1]["why"]
    assert (await peer.post(a_set(1.0)))["answer"] == "continue"


async def test_a_peer_that_says_goodbye_leaves_nothing_outstanding(running):
    first, second = await running.peer(), await running.peer()
    await first.post(a_set(1.0))
    await second.post(a_set(2.0))
    await second.socket.send(frame(BYE, {}))
    await running.until(lambda: "merged" in running.server.ledger.counts)
    assert [weight_set.state for weight_set in running.server.ledger.sets.values()] == ["base", "waiting"]


async def test_a_peer_that_does_not_answer_pings_is_gone_after_its_lease(running, monkeypatch):
    monkeypatch.setattr(leases, "PING_S", 0.05)
    first, second = await running.peer(), await running.peer()
    await first.post(a_set(1.0))
    await second.post(a_set(2.0))
    running.server.ledger.members[1].interval_s = PATIENCE_S  # so that it keeps its lease on a busy machine
    monkeypatch.setattr(ledger, "LEASE_S", 0.5)
    second.socket.transport.pause_reading()  # like a machine that has lost its network
    await running.until(lambda: not running.server.ledger.members[2].present)
    assert running.server.ledger.present == [1]
    await running.until(
        lambda: "outstanding" not in {weight_set.state for weight_set in running.server.ledger.sets.values()}
    )


async def test_a_full_disk_acknowledges_nothing_and_the_peer_posts_again(running, monkeypatch):
    peer = await running.peer()
    journal = running.server._journal
    append = journal.append

    def full(entries, heads):
        raise CheckpointError("no space: need 1 kB in the folder")

    monkeypatch.setattr(journal, "append", full)
    await peer.send_post(a_set(1.0))
    with pytest.raises(ConnectionClosed) as closed:
        await peer.socket.recv()
    assert closed.value.rcvd.code == 1013
    monkeypatch.setattr(journal, "append", append)
    await peer.connect(keeps=True)
    await peer.send_again(a_set(1.0))
    assert (await peer.answer())["answer"] == "continue"
    assert any("no space" in line for line in running.lines)


def _refuses(entries):
    raise CheckpointError("no space: need 1 kB, free 0 B in the folder")


@pytest.mark.parametrize("how", ["seconds", "stop", "last set"])
async def test_a_server_ends_with_a_full_disk_and_a_later_one_ends_the_training(tmp_path, monkeypatch, how):
    async with Running(tmp_path, end=1.0 if how == "seconds" else 0.0) as running:
        journal, append = running.server._journal, running.server._journal.append
        peer = await running.peer()
        await peer.post(a_set(1.0))

        def no_room(entries, heads):
            if how != "last set" or isinstance(entries[0][0], Merged):
                _refuses(entries)
            append(entries, heads)

        journal.append = no_room
        if how != "seconds":
            status, _, body = await get(running.port, "/control/stop", {"Authorization": "Bearer secret"})
            message = "the server ends, and its training is not over" if how == "stop" else '{"secure": false}'
            assert (status, body.strip().partition(", because")[0]) == (507 if how == "stop" else 200, message)
        with pytest.raises(
            CheckpointError, match=r"^the server ends, .* cannot be written: no space: .*--resume last$"
        ):
            await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_S)
        assert running.lines.count("error     no space: need 1 kB, free 0 B in the folder") == 1
        running.task = asyncio.ensure_future(asyncio.sleep(0))  # the test has already checked its error
    async with Running(tmp_path, end=1.0 if how == "seconds" else 0.0) as again:
        if how == "seconds":  # the end waits for the peer, which has not reconnected yet
            due, looks = again.server.ledger.due_entries, []
            again.server.ledger.due_entries = lambda now, heard_at: looks.append(now) or due(now, heard_at)
            await again.until(lambda: len(looks) == 2)
            peer.port = again.port
            again.peers = [peer]
            assert (await peer.connect(keeps=True))["peer"] == 1
            assert (await peer.answer())["end"]["over"]
        else:
            monkeypatch.setattr(ledger, "LEASE_S", 0.1)  # the peer does not return
        if how == "stop":
            assert (await get(again.port, "/control/stop", {"Authorization": "Bearer secret"}))[0] == 200
        await asyncio.wait_for(asyncio.shield(again.task), PATIENCE_S)
        assert again.server.ledger.over
        assert value(await again.server.last_set()) == 1.0


async def test_posts_that_arrive_together_share_a_sync(running):
    peers = [await running.peer() for _ in range(8)]
    journal, begun, going = running.server._journal, asyncio.Event(), asyncio.Event()
    append, loop, sizes = journal.append, asyncio.get_running_loop(), []

    def slow(entries, heads):
        sizes.append(len(entries))
        if len(sizes) == 1:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(going.wait(), loop).result()
        append(entries, heads)

    journal.append = slow
    await peers[0].send_post(a_set(1.0))
    await begun.wait()
    for peer in peers[1:]:
        await peer.send_post(a_set(2.0))
    await running.until(lambda: len(running.server.writer._waiting) == 7)
    going.set()
    for peer in peers:
        await peer.answer()
    assert sizes == [1, 7]


async def test_a_new_peer_is_not_taken_for_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "TICK_S", 0.0)  # the server checks leases between any two steps of other tasks
    async with Running(tmp_path) as running:
        for _ in range(10):
            peer = await running.peer()
            await peer.post(a_set(1.0))
        assert running.server.ledger.present == list(range(1, 11))


async def test_a_peer_that_returns_while_other_leases_expire_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "TICK_S", 0.0)
    async with Running(tmp_path) as running:
        first, second = await running.peer(), await running.peer()
        await first.post(a_set(1.0))
        commit, back = running.server.writer.commit, asyncio.Event()

        async def slowly(entry, data=b""):
            if isinstance(entry, Left) and not back.is_set():
                await second.connect(keeps=True)  # the lease of this peer has expired, too
                back.set()
            await commit(entry, data)

        monkeypatch.setattr(running.server.writer, "commit", slowly)
        for peer in (first, second):
            await peer.abort()
        await running.until(lambda: not running.server._leases.connections)
        running.server._leases.last_signs = {1: 0.0, 2: 0.0}
        await running.until(back.is_set)
        assert (await second.post(a_set(2.0)))["answer"] != "rejected"
        assert running.server.ledger.present == [2]


async def test_a_post_after_the_end_is_answered_with_the_end(running):
    peer = await running.peer()
    await peer.post(a_set(1.0))
    running.server.ledger.all_asked = True  # a mean is being computed, which delays the end
    await get(running.port, "/control/stop", {"Authorization": "Bearer secret"})
    await peer.send_post(a_set(2.0))
    assert (await peer.answer())["end"]["over"]


async def test_a_connected_peer_with_an_expired_lease_returns_with_its_post(running):
    peer = await running.peer()
    await running.server.writer.commit(Left(at=0.0, peer=1, why="no sign of life"))
    await peer.send_post(a_set(1.0))
    with pytest.raises(ConnectionClosed) as closed:
        await peer.socket.recv()
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "the lease has run out")
    await peer.connect(keeps=True)
    await peer.send_again(a_set(1.0))
    assert (await peer.answer())["answer"] == "continue"


async def test_a_server_that_ends_writes_the_entries_that_wait_for_the_disk(tmp_path, monkeypatch):
    began, may_go_on = threading.Event(), threading.Event()
    append = Journal.append

    def slowly(self, entries, heads=()):
        began.set()
        assert may_go_on.wait(PATIENCE_S)
        append(self, entries, heads)

    running = Running(tmp_path)
    async with asyncio.timeout(PATIENCE_S):
        await running.__aenter__()
        peer = await running.peer()
        monkeypatch.setattr(Journal, "append", slowly)
        await peer.socket.send(frame(BYE, {}))
        await asyncio.to_thread(began.wait)
        ending = asyncio.ensure_future(running.__aexit__())
        await running.until(lambda: running.server.writer._is_closing)
        may_go_on.set()
        await ending
    assert [type(entry) for entry in history(tmp_path)][-1] is Left
    with pytest.raises(CheckpointError, match="ends"):
        await running.server.writer.commit(Invited(at=0.0, code="c", until=1.0))


async def test_a_peer_that_is_disconnected_during_its_restart_asks_again(running, monkeypatch):
    received, cut = running.server._on_message, asyncio.Event()

    async def cut_off(peer, line, message):
        if isinstance(message, Broken) and not cut.is_set():
            cut.set()
            line.socket.transport.abort()
        else:
            await received(peer, line, message)

    class OnceBroken(Added):
        broke = False

        def weights(self):
            if self.broke:
                return self.live
            self.broke = True
            return [array * np.nan for array in self.live]

    monkeypatch.setattr(running.server, "_on_message", cut_off)
    [code] = await running.server.invite()
    peer = Peer(f"http://127.0.0.1:{running.port}/#{code}", lambda welcome: OnceBroken(), say=lambda line: None)
    await asyncio.wait_for(asyncio.to_thread(peer.run, most_updates=2 * running.server.plan.updates), PATIENCE_S)
    assert cut.is_set()
    assert running.server.ledger.members[1].number == 1


async def test_resuming_an_ended_training_reports_its_end(tmp_path):
    async with Running(tmp_path) as first:
        await first.server.writer.commit(Ended(at=time.time(), why="stopped by ddlf peers stop"))
        await first.until(lambda: first.server.ledger.over)
    async with Running(tmp_path) as again:
        await asyncio.wait_for(again.server.done.wait(), PATIENCE_S)
        assert any("has ended before: stopped by ddlf peers stop" in line for line in again.lines)


def test_the_last_run_is_the_last_one_with_peers(tmp_path):
    for name, files in (("20260101-000000-peers-a", [serving.PLAN]), ("20260102-000000-App", [])):
        (tmp_path / name).mkdir()
        for file in (*files, "state.json"):
            (tmp_path / name / file).write_text("{}")
    assert serving.find_run(tmp_path, "last").name == "20260101-000000-peers-a"
    assert serving.find_run(tmp_path, "App").name == "20260102-000000-App"
