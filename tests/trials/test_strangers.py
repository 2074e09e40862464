"""The trials that show what strangers and distance cost run, in a short form, and hold their bars where those do not depend on the machine."""

import json
import subprocess
import sys
from pathlib import Path

from tests.trials import machines

ROOT = Path(__file__).parents[2]


def run(name, *arguments):
    return subprocess.run(
        [sys.executable, "-m", f"tests.trials.{name}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_strangers_do_not_keep_a_master_out_and_idle_connections_are_small():
    ended = run("flood", "--drips", "100", "--garbage", "50", "--idle", "1200", "--seconds", "2", "--json")
    found = json.loads(ended.stdout)
    assert found["flooded"]["failed"] == 0
    assert found["flooded"]["handshakes"] > 0
    for how in ("plaintext", "TLS"):
        idle = found[f"idle, {how}"]
        assert idle["held"] + idle["refused politely"] == 1200
        assert idle["refused politely"] > 0
        assert idle["KiB each"] < 60
    assert found["log"]["lines"] < 1000, "a line for each address and kind"


def test_no_guess_opens_a_worker():
    ended = run("guesses", "--guesses", "1000")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the worker is alive" in ended.stdout


if machines.available():  # Linux, and a user who may make namespaces

    def test_two_machines_meet_with_a_copied_token_and_every_wrong_secret_is_named():
        ended = run("credentials")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stdout.count("\nok ") + 1 == len(ended.stdout.splitlines()) == 14

    def test_throughput_is_shown_beside_plaintext():
        ended = run("encryption", "--megabytes", "8", "--calls", "100", "--repeats", "1")
        assert ended.returncode == 0, ended.stderr
        assert [line[:9].strip() for line in ended.stdout.splitlines()] == ["median of", "plaintext", "TLS 1.3"]
