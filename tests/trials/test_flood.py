"""Run the short form of the flood trial, with the limits that do not depend on the machine."""

import json

from tests.processes import command


def test_masters_connect_during_a_flood_and_idle_connections_are_small():
    ended = command(
        "tests.trials.flood", "--drips", "100", "--garbage", "50", "--idle", "1200", "--seconds", "2", "--json"
    )
    results = json.loads(ended.stdout)
    assert results["flooded"]["failed"] == 0
    assert results["flooded"]["handshakes"] > 0
    for encryption in ("plaintext", "TLS"):
        idle = results[f"idle, {encryption}"]
        assert idle["held"] + idle["refused politely"] == 1200
        assert idle["refused politely"] > 0
        assert idle["KiB each"] < 60
    assert results["log"]["lines"] < 1000, "a line for each address and kind"
