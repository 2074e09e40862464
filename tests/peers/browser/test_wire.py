"""Tests that compare frames and merges of the browser's peer, which runs in Node, with Python."""

import base64
import json
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ddlf.algorithms.set_merge import SET_MERGE, WeightSet
from ddlf.peers import frames
from ddlf.peers.browser.assets import ENGINE
from ddlf.peers.frames import Answer, Broken, Bye, End, Hello, Post, Score, Welcome
from ddlf.peers.sets import layout_of
from ddlf.peers.wire import Wire
from ddlf.training.checkpoints.tensors import read
from tests.patience import PATIENCE_S
from tests.peers.test_wire import SPECIAL

HERE = Path(__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "peers_protocol.md"
SET = bytes(range(24))
FROM_PEER = [
    Hello(name='Zoë "7"', samples=64, layout="ab", run="r", keeps=True, updates=3),
    Post(number=2, contains=7, updates=20, base=1, accuracy=0.5, loss=1.25, set=SET),
    Score(set_number=3, accuracy=-1.0, loss=0.25, samples=64),
    Broken(why="a weight is not finite"),
    Bye(),
]
FROM_SERVER = [
    Welcome(
        run="r",
        peer=3,
        plan={"merge": "weighted", "end": 0.5},
        model="Zoë",
        layout="ab",
        number=1,
        set_number=4,
        trainings=9,
        rate=0.1,
        set=SET,
    ),
    Answer(number=2, answer="merge", set_number=5, trainings=8, accuracy=0.75, rate=0.125, set=SET),
    Answer(number=2, answer="rejected", why="late"),
    End(why="stopped", hint="join", over=False),
]


def in_node(*cases):
    """Return the engine's result of each case."""
    done = subprocess.run(
        ["node", HERE / "wire.js", ENGINE.as_uri()],
        input="\n".join(map(json.dumps, cases)),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def b64(data):
    return base64.b64encode(data).decode()


def fields(message):
    """Return the kind and the fields of a message as the engine names them."""
    values = {name: getattr(message, name) for name in frames.FIELDS[type(message)]}
    return {"is": type(message).__name__.lower(), **values, "set": b64(getattr(message, "set", b"")) or None}


def test_engine_writes_every_frame_that_python_reads_and_the_reverse():
    written = in_node(*({"do": "encode", "message": fields(message)} for message in FROM_PEER))
    assert [frames.decode(base64.b64decode(row["result"]), frames.FROM_PEER, 24) for row in written] == FROM_PEER
    read = in_node(*({"do": "decode", "frame": b64(frames.encode(message)), "setBytes": 24} for message in FROM_SERVER))
    assert [row["result"] for row in read] == [fields(message) for message in FROM_SERVER]


def test_engine_writes_the_bytes_of_the_protocols_page():
    blocks = dict(re.findall(r"```hex (\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    hexes = {
        name: bytes.fromhex("".join(line.partition(";")[0] for line in text.splitlines()))
        for name, text in blocks.items()
    }
    post = {"is": "post", "number": 1, "contains": 0, "updates": 20, "accuracy": 0.5, "loss": 1.25}
    bye, posted = in_node(
        {"do": "encode", "message": {"is": "bye"}}, {"do": "encode", "message": post | {"set": b64(hexes["set"])}}
    )
    assert base64.b64decode(bye["result"]) == hexes["bye"]
    assert base64.b64decode(posted["result"]) == hexes["post"] + hexes["set"]


@pytest.fixture(scope="module")
def good():
    return frames.encode(FROM_SERVER[1])


def test_engine_refuses_frames_that_a_server_does_not_send(good):
    def with_text(content):
        text = content + b" " * (-len(content) % 8)
        return struct.pack("<4sBBHII", b"DDLP", 1, 4, 0, len(text), 0) + text

    bad = {
        "at least 16 bytes": good[:15],
        "begins with DDLP": b"X" + good[1:],
        "speaks version 2": good[:4] + b"\2" + good[5:],
        "of kind 3 is not expected": frames.encode(FROM_PEER[1]),
        "of kind 99 is not expected": good[:5] + b"\x63" + good[6:],
        "of kind 4 is not expected": good[:6] + b"\1\0" + good[8:],
        "cut off or unaligned": good[:8] + struct.pack("<I", 2**31) + good[12:],
        "has 24 bytes, got 23": good[:-1],
        "is not JSON": with_text(b"{"),
        "not a table": with_text(b"[]"),
        "has no other": with_text(b'{"number": 1, "answer": "merge", "other": 1}'),
        "answer is incomplete": with_text(b'{"number": 1}'),
        "number of answer is -1": with_text(b'{"number": -1, "answer": "merge"}'),
        "number of answer is 1.5": with_text(b'{"number": 1.5, "answer": "merge"}'),
        "answer of answer is 5": with_text(b'{"number": 1, "answer": 5}'),
    }
    rows = in_node(*({"do": "decode", "frame": b64(data), "setBytes": 24} for data in bad.values()))
    for sentence, row in zip(bad, rows, strict=True):
        assert sentence in row.get("error", "accepted")


def as_text(weights):
    return {name: b64(array.tobytes()) for name, array in weights.items()}


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "float16"])
def test_engine_makes_the_bytes_of_pythons_sets(codec):
    chance = np.random.default_rng(5)
    scaled = chance.normal(size=3000) * 2.0 ** chance.integers(-30, 17, 3000)
    weights = {"special": SPECIAL, "any": scaled.astype(np.float32).reshape(60, 50), "norm/mean": SPECIAL[:5]}
    wire = Wire(layout_of(weights), codec, (True, True, False))
    expected = wire.encode(list(weights.values()))
    [row] = in_node({"do": "set", "like": b64(expected), "weights": as_text(weights)})
    assert base64.b64decode(row["result"]["set"]) == expected
    for name, array in zip(weights, wire.decode(expected), strict=True):
        decoded = base64.b64decode(row["result"]["decoded"][name])
        np.testing.assert_array_equal(np.frombuffer(decoded, "<f4"), array.reshape(-1))
    file = read(base64.b64decode(row["result"]["file"]), Path("a file"))
    assert {name: array.tobytes() for name, array in file.items()} == {
        name: array.tobytes() for name, array in weights.items()
    }


def test_engine_names_values_that_a_codec_makes_infinite():
    weights = {"small": np.array([65519.9, np.inf], np.float32), "large": np.array([0, -65520], np.float32)}
    rows = in_node(
        *(
            {"do": "set", "like": b64(Wire(layout_of(weights), codec, (True, True)).encode(list(weights.values())))}
            | {"weights": as_text(weights)}
            for codec in ("float16", "bfloat16", "float32")
        )
    )
    assert [row["result"]["beyond"] for row in rows] == [
        "large has values of 65520 or more, which float16 makes infinite",
        "",
        "",
    ]


def a_set(weights, trainings, accuracy=None):
    return {"weights": weights, "trainings": trainings, "accuracy": accuracy}


GOLDEN = [
    ("average", 3, 1, [3, 4]),
    ("weighted", 3, 1, [2, 3]),
    ("mimic", 3, 1, [-1 / 3, 2 / 3]),
    ("average", 3, 5, [3, 4]),
    ("weighted", 3, 5, [3.5, 4.5]),
    ("mimic", 3, 5, [7 / 3, 10 / 3]),
    ("weighted", 3, 3, [3, 4]),
    ("mimic", 3, 3, [-1, 0]),
    ("weighted", 0, 0, [3, 4]),
    ("weighted", 300, 100, [2, 3]),
    ("elastic:0.25", 3, 1, [2, 3]),
    ("elastic:alpha=0.25", 3, 1, [2, 3]),
    ("elastic", 3, 1, [2, 3]),
]


def test_merges_have_the_golden_values():
    rows = in_node(
        *(
            {"do": "merge", "rule": rule, "mine": a_set([1, 2], s), "theirs": a_set([5, 6], q)}
            for rule, s, q, _ in GOLDEN
        )
    )
    for (rule, s, q, weights), row in zip(GOLDEN, rows, strict=True):
        assert row["result"]["weights"] == pytest.approx(weights, abs=1e-6), (rule, s, q)
        assert row["result"]["trainings"] == (max(s, q) if rule in ("weighted", "mimic") else s), rule


def test_merges_have_the_bits_of_python():
    random = np.random.default_rng(7)
    cases = []
    for rule in ("average", "weighted", "mimic", "copy", "elastic:0.3"):
        for s, q, own_accuracy, peer_accuracy in ((3, 1, 0.5, 0.75), (1, 9, 0.75, 0.5), (4, 4, 0.5, 0.5)):
            w, p = (random.normal(size=50).astype(np.float32) for _ in range(2))
            cases.append((rule, WeightSet(weights=[w], trainings=s, accuracy=own_accuracy), (p, q, peer_accuracy)))
    rows = in_node(
        *(
            {
                "do": "merge",
                "rule": rule,
                "mine": a_set(own_set.weights[0].tolist(), own_set.trainings, own_set.accuracy),
                "theirs": a_set(p.tolist(), q, accuracy),
            }
            for rule, own_set, (p, q, accuracy) in cases
        )
    )
    for (rule, own_set, (p, q, accuracy)), row in zip(cases, rows, strict=True):
        expected = SET_MERGE.read(rule).merge(own_set, WeightSet(weights=[p], trainings=q, accuracy=accuracy))
        np.testing.assert_array_equal(np.float32(row["result"]["weights"]), expected.weights[0], err_msg=rule)
        assert (row["result"]["trainings"], row["result"]["accuracy"]) == (expected.trainings, expected.accuracy)


def test_merges_refuse_unknown_rules_and_copy_no_set_without_accuracy():
    sets = {"mine": a_set([1], 1, 0.5), "theirs": a_set([2], 1)}
    unknown, copied = in_node({"do": "merge", "rule": "sum", **sets}, {"do": "merge", "rule": "copy", **sets})
    assert "no merge sum" in unknown["error"]
    assert copied["result"]["weights"] == [1]
