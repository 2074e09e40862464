"""Tests of secure sums of the browser's peer, which runs in Node: it makes the same bytes as Python, and joins its sums."""

import asyncio
import json
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ddlf.data import datasets
from ddlf.peers import frames
from ddlf.peers.browser.assets import ENGINE
from ddlf.peers.entries import Posted, Summed
from ddlf.peers.frames import Members
from ddlf.peers.journal import history
from ddlf.peers.peer import Peer
from ddlf.peers.sets import layout_of
from ddlf.privacy.secure_sum import FixedPoint, Identity, add_mask, code_of, pair_secret
from tests.monitor.dashboard.browser import chromium, opened
from tests.patience import PATIENCE_S
from tests.peers.browser.joining import DOCUMENT, MODEL, BrowserPeer
from tests.peers.browser.test_peers import peers_command
from tests.peers.test_processes import Command
from tests.peers.test_secure_rounds import BASE, PLAN, Table, assert_mean
from tests.privacy.vectors import AES_KEY, AES_OF_ZERO, ALICE, BOB_PUBLIC, ED25519, KNOWN_SECRETS

HERE = Path(__file__).parent
NAMES = ("dense/kernel", "dense/bias")


class Node:
    """A program in Node that runs one case after another."""

    def __enter__(self):
        command = ["node", HERE / "secure.js", ENGINE.as_uri()]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *exc):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def ask(self, action, **arguments):
        self.process.stdin.write(json.dumps({"do": action, **arguments}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def result(self, action, **arguments):
        answer = self.ask(action, **arguments)
        assert "error" not in answer, answer
        return answer["result"]


@pytest.fixture(scope="module")
def node():
    with Node() as node:
        yield node


def test_engine_makes_the_bytes_of_published_vectors_and_of_python(node):
    alice = X25519PrivateKey.from_private_bytes(ALICE)
    secret = node.result("pair", key=ALICE.hex(), theirs=BOB_PUBLIC.hex(), context="a context")
    assert secret == pair_secret(alice, BOB_PUBLIC, "a context").hex()
    assert node.result("sign", key=ED25519["private"].hex(), text="r") == ED25519["signature of 72"].hex()
    size = 2**20 + 7  # one whole block of the loop, and a part of a block
    for sign in (1, -1):
        total = np.zeros(size, np.uint32)
        add_mask(total, AES_KEY, sign)
        assert node.result("mask", secret=AES_KEY.hex(), size=size, sign=sign) == total.astype("<u4").tobytes().hex()
    assert node.result("mask", secret=AES_KEY.hex(), size=4, sign=1) == AES_OF_ZERO.hex()
    identities = [Identity().public for _ in range(5)]
    assert node.result("code", identities=[identity.hex() for identity in identities]) == code_of(identities)


@pytest.mark.parametrize("key", KNOWN_SECRETS)
def test_engine_refuses_a_key_with_a_known_secret(node, key):
    assert "on no curve" in node.ask("pair", key=ALICE.hex(), theirs=key.hex(), context="")["error"]


def test_engine_rounds_to_the_same_numbers(node):
    random = np.random.default_rng(7)
    base, live = (random.normal(0, 1, 20_000).astype(np.float32) for _ in range(2))
    live[:4] = base[:4] - np.float32(2.0**-23) * np.array([0.5, 1.5, 2.5, -0.5], np.float32)
    for share, limit in ((1.0, 8.0), (1 / 3, 8.0), (0.37, 5.5)):
        numbers = node.result("numbers", base={"w": base.tolist()}, live={"w": live.tolist()}, share=share, limit=limit)
        expected = FixedPoint(limit).numbers(np.subtract(base, live, dtype=np.float64), share)
        assert numbers == expected.astype("<u4").tobytes().hex()
    error = node.ask("numbers", base={"w": [9.0, 0.0]}, live={"w": [0.0, 0.0]}, share=1, limit=8)["error"]
    assert error == "1 of 2 values of the update are beyond the limit of 8, or not finite"


def test_page_without_web_crypto_has_an_error_of_one_sentence(node):
    answer = node.ask("crypto", scope={"crypto": {}})
    assert "needs WebCrypto, and browsers have it on https and localhost only" in answer["error"]
    assert answer["hint"] == "ask for a link that begins with https"


def record(arrays):
    return {name: array.ravel().tolist() for name, array in zip(NAMES, arrays, strict=True)}


class InNode:
    """The peer in Node, with the interface of ``SecurePeer`` that ``Table`` uses."""

    def __init__(self, node, number, samples):
        self.node = node
        plan = {name: getattr(PLAN, name) for name in ("quorum", "update_limit", "updates", "batch_size")}
        about = {"run": "run", "number": number, "samples": samples, "text": "text", "set": b"set".hex()}
        node.result("begin", plan=plan, base=1, weights=record(BASE), **about)

    def received(self, message):
        fields = {name: getattr(message, name) for name in frames.FIELDS[type(message)]}
        answer = self.node.ask("received", message={"is": type(message).__name__.lower(), **fields})
        assert "error" not in answer, answer
        return message_of(answer["result"])

    def masked(self, live, number, updates):
        row = self.node.result("masked", live=record(live), number=number, updates=updates)
        return message_of(row, set=bytes.fromhex(row.pop("set")))

    def begin(self, base, weights, set):
        pass


def message_of(row, **more):
    if row is None:
        return None
    kinds = {kind.__name__.lower(): kind for kind in frames.FROM_PEER}
    return kinds[row.pop("is")](**row, **more)


@pytest.mark.parametrize("lost", [(), (2, 5)])
def test_peer_in_node_and_python_peers_make_one_sum(node, lost):
    table = Table(5)
    table.peers[3] = InNode(node, 3, 30)
    table.step()
    for member in lost:
        table.leave(member)
    members = tuple(member for member in range(1, 6) if member not in lost)
    table.post(*members)
    assert_mean(table, table.work[0], members)
    [line] = node.result("lines")
    assert line in table.codes


def posted(node):
    """Return an attempt of a sum of four, before any list is named. The peer in Node has posted its masked numbers."""
    table = Table(4)
    table.peers[3] = InNode(node, 3, 30)
    table.step()
    table.post(3)
    table.silent = {3}
    table.post(1, 2, 4)
    return table.rounds.attempt


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("1,3", "needs 3 survivors"),
        ("1,2,3,9", "peer 9 as a survivor"),
        ("1,2,2,3", "a survivor of a sum twice"),
        ("1,2,4", "it counts as lost"),
    ],
)
def test_peer_in_node_refuses_a_list_of_survivors(node, named, reason):
    message = {"is": "survivors", "attempt": posted(node), "members": named}
    assert reason in node.ask("received", message=message)["error"]


def test_peer_in_node_signs_only_one_list(node):
    message = {"is": "survivors", "attempt": posted(node), "members": "1,2,3,4"}
    first = node.result("received", message=message)
    assert node.result("received", message=message) == first
    error = node.ask("received", message=message | {"members": "1,2,3"})["error"]
    assert "two lists of survivors" in error


def test_peer_in_node_answers_only_when_all_have_signed_its_list(node):
    attempt = posted(node)
    signed = node.result("received", message={"is": "survivors", "attempt": attempt, "members": "1,2,3,4"})["signature"]
    signatures = {"1": "00" * 64, "2": "00" * 64, "3": signed, "4": "00" * 64}
    message = {"is": "signatures", "attempt": attempt, "signatures": signatures}
    assert "peer 1 has not signed" in node.ask("received", message=message)["error"]


def test_peer_in_node_refuses_offers(node):
    table = Table(3)
    table.peers[3] = InNode(node, 3, 30)
    table.mute = dict.fromkeys((1, 2, 3), Members)
    messages = []
    table.peers[3].received = lambda message: messages.append(
        message
    )  # this peer gets no messages; the test keeps them
    table.rounds._least = 3
    table.step()
    attempt = table.rounds.attempt
    offer = node.result("received", message={"is": "attempt", "attempt": attempt, "base": 1})
    rows = {
        str(offered.member): (offered.identity + offered.key + offered.signature).hex()
        for offered in table.rounds._roster
    }
    rows["3"] = offer["identity"] + offer["key"] + offer["signature"]
    for change, samples, reason in (
        ({"2": rows["1"]}, 30, "have the same key"),
        ({"3": rows["1"]}, 30, "another key than this peer's own"),
        ({"2": rows["2"][:-2] + "ff"}, 30, "peer 2 is not signed"),
        ({"2": rows["2"][:-2]}, 30, "has 127 bytes"),
        ({}, 0, "a whole share has 0 samples"),
    ):
        message = {"is": "members", "attempt": attempt, "samples": samples, "offers": rows | change}
        assert reason in node.ask("received", message=message)["error"], reason
    message = {"is": "members", "attempt": attempt, "samples": 30, "offers": {key: rows[key] for key in ("1", "3")}}
    assert "3 to 50 members" in node.ask("received", message=message)["error"]


class Still:
    """A model of the digits without Keras. Its weights never change, so its update is 0."""

    trainable, model, samples = (True,) * 4, None, 100

    def __init__(self, welcome):
        shapes = {"dense/kernel": (64, 32), "dense/bias": (32,), "dense_1/kernel": (32, 10), "dense_1/bias": (10,)}
        self.layout = layout_of({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})

    def assign(self, weights):
        self.live = weights

    def weights(self):
        return list(self.live)

    def batch(self, size):
        pass

    def means(self):
        return {}


@pytest.mark.slow
async def test_eight_peers_two_of_them_in_chromium_train_under_masks(tmp_path, monkeypatch):
    """One page is closed in the middle of a round, and the server is killed and resumed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "digits.nnm").write_text(MODEL)
    options = ("--way", "rounds", "--secure-aggregation", "--deadline-s", "5", "--invite", "8", "--port", "0")
    with Command(tmp_path, "serve", "digits.nnm", *options, "--validate-s", "0") as server:
        links = [await asyncio.to_thread(lambda: server.until(r"link +(\S+)")[1]) for _ in range(8)]
        port = links[0].rpartition(":")[2].partition("/")[0]
        lines, threads = [], []
        for link in links[2:]:
            peer = Peer(link, Still, say=lines.append)
            threads.append(threading.Thread(target=peer.run, daemon=True))
            threads[-1].start()
        x, y = datasets.with_classes("digits")[0]
        x, y = (x + 0.5).reshape(-1, 64).astype("f4"), y.astype("i4")
        url = links[0].partition("/#")[0] + DOCUMENT
        async with chromium() as browser, opened(browser, url) as page, opened(browser, url) as other:
            survivor, doomed_peer = BrowserPeer(page), BrowserPeer(other)
            for member, link in ((survivor, links[0]), (doomed_peer, links[1])):
                await member.session(link)
                await member.join(x, y)
            both = (await survivor.until("line", lambda message: "the other 7 peers" in message["text"]))["text"]
            await doomed_peer.until("line", lambda message: message["text"] == both)
            progress = await survivor.until("progress", lambda message: message["code"] and message["code"] in both)
            async with asyncio.timeout(PATIENCE_S):
                while lines.count(both) < 6:  # noqa: ASYNC110  threads write these lines
                    await asyncio.sleep(0.05)
            await other.context.close()
            server.process.send_signal(signal.SIGKILL)
            server.end()
            with Command(tmp_path, "serve", "--resume", "last", "--port", port) as resumed:
                await survivor.until("progress", lambda message: message["posts"] > progress["posts"] + 3)
                await asyncio.to_thread(peers_command, "stop", "--port", port)
                await survivor.until("state", lambda message: message["state"] == "over")
                assert await asyncio.to_thread(resumed.end) == 0
            for thread in threads:
                await asyncio.to_thread(thread.join, PATIENCE_S)
            last = (await survivor.messages("progress"))[-1]
            parameters = 64 * 32 + 32 + 32 * 10 + 10
            assert last["bytesUp"] < (last["posts"] + 2) * 4 * parameters * 1.2 + 10_000
            weights = safetensors.numpy.load(await survivor.set())
    [folder] = (tmp_path / "runs").glob("*-peers-digits")
    saved = safetensors.numpy.load_file(folder / "model.safetensors")
    for name, array in saved.items():
        np.testing.assert_array_equal(weights[name], array)
    entries = list(history(folder))
    assert not any(isinstance(entry, Posted) for entry in entries)
    assert sum(isinstance(entry, Summed) and 1 in entry.peers for entry in entries) >= 4
