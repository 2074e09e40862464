"""The demos of the parameter server in their shortest form, as a user starts them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mnist import folder_with_mnist

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(tmp_path, app, *options, code=0):
    data = folder_with_mnist(tmp_path / "data")
    own = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("CONFIG", "STATE", "CACHE")}
    command = [sys.executable, ROOT / "apps" / app, "--local", "2", *options]
    ended = subprocess.run(
        command,
        env={**os.environ, **own, "DDLF_DATA": str(data)},
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_the_classic_demo_logs_what_many_replicas_read_and_update(tmp_path):
    said = run(tmp_path, "xor.py", "--hidden", "2", "-p", "examples=600", "-p", "log_every=15", "--ui", "plain")
    assert "xor: 9 parameters" in said
    for what in ("layer 0 weights read", "layer 1 weights read", "layer 0 weights updated", "layer 1 weights updated"):
        assert len(set(re.findall(rf"{what} by model replica (\d+)", said))) > 12, what
    outputs = re.findall(r"replica id (\d+), output: (0\.\d{5}), target ([01])\.0", said)
    assert {int(replica) for replica, _, _ in outputs} <= set(range(25))
    assert re.search(r"^test +loss 0\.\d+  within [01]\.\d+", said, re.M)


def test_ways_to_train_stand_side_by_side_with_time_and_bytes(tmp_path):
    said = run(
        tmp_path,
        "mnist_distbelief.py",
        "-p",
        "ways=sync,default",
        "-p",
        "samples=2400",
        "-p",
        "epochs=1",
        "-p",
        "replicas=4",
    )
    rows = {
        row[0]: [float(x) for x in row[1:]]
        for row in re.findall(r"^(sync|default) +(\S+) +(\S+) +(\S+) +(\S+)%", said, re.M)
    }
    (_, master, workers, accuracy), (_, of_shards, between, learned) = rows["sync"], rows["default"]
    assert accuracy > 25
    assert learned > 25
    assert workers == 0 < between
    assert of_shards < between
    assert master == pytest.approx(4 * 79_510 * 4e-6, rel=0.1)  # out and back, of two workers


def test_an_lstm_is_trained_by_downpour_too(tmp_path):
    said = run(
        tmp_path,
        "mnist_distbelief.py",
        "--model",
        "lstm",
        "-p",
        "ways=default",
        "-p",
        "samples=1200",
        "-p",
        "epochs=1",
        "-p",
        "replicas=2",
    )
    assert re.search(r"^default +\S+ +\S+ +\S+ +\d+\.\d\d%", said, re.M)


def test_a_way_that_is_not_there_is_named(tmp_path):
    said = run(tmp_path, "mnist_distbelief.py", "-p", "ways=sync,snyc", code=2)
    assert "there is no 'snyc' here: choose of sync, downpour, adagrad, default" in said
