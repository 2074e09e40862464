"""Tests of the frames of peers: encoding is reversible, invalid bytes are refused, and the documentation has the same bytes."""

import json
import re
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.errors import ProtocolError
from ddlf.peers import frames
from ddlf.peers.frames import PREFIX, Answer, Bye, End, Hello, Post, Score, Welcome
from ddlf.peers.sets import layout_of
from ddlf.peers.wire import Wire

MESSAGES = [
    Hello(name="Ann", samples=100, keeps=True, run="r", updates=3),
    Welcome(
        run="r",
        peer=1,
        plan={"way": "swap"},
        model="m",
        layout="l",
        number=0,
        set_number=1,
        trainings=2,
        rate=0.1,
        set=b"1234",
    ),
    Post(number=1, contains=2, updates=3, accuracy=0.5, loss=1.25, set=b"12345678"),
    Answer(number=1, answer="continue"),
    Score(set_number=4, accuracy=1.0, loss=0.0, samples=64),
    Bye(),
    End(why="over", set_number=9, set=b"12"),
]
PAGE = Path(__file__).parents[2] / "docs/reference/peers_protocol.md"
ALL = frames.FROM_PEER + frames.FROM_SERVER


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_decoded_message_equals_the_encoded_one(message):
    data = frames.encode(message)
    assert frames.decode(data, ALL, 0) == message
    assert (len(data) - len(getattr(message, "set", b""))) % 8 == 0  # a set begins at a multiple of 8


def framed(kind, text, set=b"", *, magic=b"DDLP", version=1, zero=0, length=None):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    text += b" " * (-len(text) % 8)
    return PREFIX.pack(magic, version, kind, zero, len(text) if length is None else length, 0) + text + set


POST = {"number": 1, "contains": 0, "updates": 1}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "at least 16 bytes"),
        (framed(3, POST, magic=b"HTTP"), "begins with DDLP"),
        (framed(3, POST, b"12345678", version=2), "version 2"),
        (framed(99, POST), "kind 99"),
        (framed(2, {}), "kind 2 is not expected"),
        (framed(3, POST, b"12345678", zero=1), "not expected"),
        (framed(3, POST, b"12345678", length=8000), "too long, cut off or unaligned"),
        (framed(3, POST, b"12345678", length=3), "unaligned"),
        (framed(3, POST), "needs a set"),
        (framed(3, POST, b"1234"), "has 8 bytes, got 4"),
        (framed(7, {}, b"12345678"), "has no set"),
        (framed(3, b"{", b"12345678"), "not JSON"),
        (framed(3, b"[" * 4000, b"12345678"), "not JSON"),
        (framed(3, [1], b"12345678"), "not a table"),
        (framed(3, {**POST, "more": 1}, b"12345678"), "has no 'more'"),
        (framed(3, {**POST, "number": -1}, b"12345678"), "must be from 0"),
        (framed(3, {**POST, "number": 1e12}, b"12345678"), "number of Post"),
        (framed(3, {**POST, "number": True}, b"12345678"), "number of Post"),
        (framed(3, b'{"number": 1, "contains": 0, "updates": 1, "loss": NaN}', b"12345678"), "loss of Post"),
        (framed(3, {**POST, "loss": 10**400}, b"12345678"), "loss of Post"),
        (framed(3, {"number": 1}, b"12345678"), "incomplete"),
        (framed(3, {**POST, "number": 2**53}, b"12345678"), "must be from 0"),
    ],
)
def test_invalid_bytes_are_refused(data, sentence):
    with pytest.raises(ProtocolError, match=sentence):
        frames.decode(data, frames.FROM_PEER, 8)


@given(st.binary(max_size=200), st.integers(0, 9))
def test_any_bytes_give_a_message_or_are_refused(data, kind):
    for content in (data, PREFIX.pack(b"DDLP", 1, kind, 0, len(data) // 8 * 8, 0) + data):
        try:
            message = frames.decode(content, ALL, 8)
        except ProtocolError:
            continue
        assert all(getattr(message, field.name) is not None for field in fields(message))


def on_the_page(name):
    """Return the bytes of a block of the page. In each line, a comment begins with ``;``."""
    block = re.search(rf"^```hex {name}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return bytes.fromhex("".join(line.partition(";")[0] for line in block[1].splitlines()))


def test_the_page_of_the_protocol_has_the_bytes_of_frames():
    post = Post(number=1, contains=0, updates=20, accuracy=0.5, loss=1.25)
    assert on_the_page("post") == frames.encode(post)
    assert on_the_page("bye") == frames.encode(Bye())
    assert frames.decode(on_the_page("post") + b"12345678", ALL, 8).loss == 1.25


def test_the_page_of_the_protocol_has_the_bytes_of_a_set():
    kernel, bias = np.array([[1, 2]], np.float32), np.array([3, 4], np.float32)
    layout = layout_of({"dense/kernel": kernel, "dense/bias": bias})
    assert on_the_page("set") == layout.encode([kernel, bias])
    assert on_the_page("coded") == Wire(layout, "bfloat16", (True, True)).encode([kernel, bias])


def test_the_page_of_the_protocol_lists_each_message_and_each_limit():
    text = PAGE.read_text()
    for number, kind in frames.KINDS.items():
        [row] = re.findall(rf"^\| {number} \| (?:peer|server) \| {kind.__name__.lower()} \|.*$", text, re.MULTILINE)
        names = {field.name for field in fields(kind)} - {"set"}
        assert {name for name in names if f"`{name}`" not in row} == set()
    for name, value in re.findall(r"^\| `((?:peers|privacy)\.\S+)` \| ([\d.,]+) \|", text, re.MULTILINE):
        assert resolve_name(f"ddlf.{name}") == float(value.replace(",", "")), name
