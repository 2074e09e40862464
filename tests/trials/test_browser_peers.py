"""Test the search for private pictures in the trial of peers in Chromium, and run its short form in rounds."""

import base64
import os
import zlib

import numpy as np
import pytest

from tests.trials import browser_peers

MARK = np.arange(101, 117, dtype=np.uint8)


def masked(content):
    """Return a frame of a WebSocket with a client's mask."""
    key = os.urandom(4)
    body = bytes(byte ^ key[n % 4] for n, byte in enumerate(content))
    return bytes([0x82, 0xFE]) + len(content).to_bytes(2, "big") + key + body


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (b"......" + MARK.tobytes() + b".", "raw"),
        (b"......" + (MARK / np.float32(255)).astype("<f4").tobytes(), "float32 of 0 to 1"),
        (base64.b64encode(b".." + MARK.tobytes() + b"."), "base64 of raw at 2"),
        (b"...." + zlib.compress(b"......" + MARK.astype("<f4").tobytes()), "float32"),
        (b"......" + bytes(200), None),
    ],
)
def test_search_finds_a_mark_in_each_form_inside_of_a_masked_frame(content, form):
    sent = b"GET /live HTTP/1.1\r\nUpgrade: websocket\r\n\r\n" + masked(b"DDLP....") + masked(content)
    forms = browser_peers.leaks(list(browser_peers.payloads(sent)), [MARK])
    assert forms == ([form] if form else [])


@pytest.mark.slow
async def test_two_browsers_and_a_python_peer_reach_the_bars_in_rounds(tmp_path):
    options = browser_peers.parsed(["--seconds=5", "--browsers=2", "--pythons=1", "--block=2", "--way=rounds"])
    results = await browser_peers.measure(options, tmp_path)
    # A short run does not show growth, and a busy machine trains unevenly. The whole trial measures both.
    assert browser_peers.missed(results, memory=2.0, slower=0.1) == [], results
