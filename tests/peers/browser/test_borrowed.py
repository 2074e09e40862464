"""Tests of a browser's peer that cannot fetch its leased shard. It runs in Node, with a scripted server."""

import json
import subprocess
from itertools import groupby
from pathlib import Path

from ddlf.peers.browser.assets import ENGINE
from tests.patience import PATIENCE_S


def test_a_peer_that_loses_the_server_before_its_new_shard_waits_and_asks_again():
    """The server is lost twice between a welcome and its shard; in one of the cases the connection stays open."""
    program = Path(__file__).with_name("borrowed.js")
    done = subprocess.run(
        ["node", program, ENGINE.as_uri()], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    output = json.loads(done.stdout)
    assert [shard for shard, _ in groupby(output["trained"])] == [1, 2]
    lines = [message["text"] for message in output["told"] if message["told"] == "line"]
    assert sum(line.startswith("waits ") for line in lines) == 2
    assert sum(line.startswith("back ") for line in lines) == 4
    states = [message["state"] for message in output["told"] if message["told"] == "state"]
    assert states == ["connecting", "training", "lost", "training", "lost"]
    assert output["told"][-1] == {"told": "failed", "why": "the shard cannot be read", "hint": "tell its owner"}
