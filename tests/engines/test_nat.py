"""Tests of workers behind the kernel's NAT, which passes only connections of the workers and forgets idle ones.

They need Linux and root.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddlf.rpc.tokens import new_token
from tests.patience import PATIENCE_S
from tests.trials.nat import Nat, on

pytestmark = pytest.mark.timeout(6 * PATIENCE_S)
ROOT = Path(__file__).parents[2]
FORGETS_AFTER_S = 60
PAUSE_S = float(os.environ.get("DDLF_NAT_PAUSE", "75"))
"""Seconds without traffic. The router forgets a connection earlier. Use 300 for the full measurement."""
APP = """
import os, time
import numpy as np
import ddlf

class App(ddlf.IApp):
    batch_size, master_epochs, seed, slots, threads = 32, 4, 3, 4, 1

    async def load_dataset(self):
        random = np.random.default_rng(0)
        self.x_train = random.normal(size=(512, 8)).astype("float32")
        self.y_train = np.eye(2, dtype="float32")[(self.x_train.sum(1) > 0).astype(int)]

    async def create_model(self):
        import keras
        from keras import layers

        self.model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dropout(0.3), layers.Dense(2, "softmax")]
        )
        self.model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "categorical_crossentropy")

    def on_round(self, record):
        if record.round == 2:
            time.sleep(float(os.environ["PAUSE"]))
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a command in a network namespace, in the folder of the app."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "token").write_text(new_token())
    (tmp_path / "token").chmod(0o600)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DDLF_TOKEN_FILE": str(tmp_path / "token")}
    with contextlib.ExitStack() as stack:

        def start(namespace, *command, pause=0.0):
            process = subprocess.Popen(
                on(namespace, sys.executable, "-m", *command),
                cwd=tmp_path,
                env={**environment, "PAUSE": str(pause)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def result(process, file):
    output, _ = process.communicate(timeout=PAUSE_S + 3 * PATIENCE_S)
    assert process.returncode == 0, output
    return hashlib.sha256(file.read_bytes()).hexdigest(), output


def test_run_continues_after_a_pause_that_makes_the_nat_forget_its_connections(start, tmp_path):
    train = ("ddlf", "run", "app.py", "--no-dashboard")
    with Nat(FORGETS_AFTER_S) as nat:
        gate = f"{nat.address_outside}:9100"
        workers = ("--token-file", "token", "--join-for", str(PATIENCE_S), "--quiet")
        for place in ("0", "1"):
            start(nat.inside, "ddlf.cli.worker", "--join", gate, "--place", place, *workers)
        joined = ("--listen", "9100", "--workers", "2", "--token-file", "token", "--save", "nat.safetensors")
        master = start(nat.outside, *train, *joined, pause=PAUSE_S)
        listening = subprocess.run(on(nat.inside, "ss", "-Hltn"), capture_output=True, text=True, check=True).stdout
        behind_nat, output = result(master, tmp_path / "nat.safetensors")
        local = start(nat.outside, *train, "--local", "2", "--save", "local.safetensors")
        assert behind_nat == result(local, tmp_path / "local.safetensors")[0]
    assert listening == ""
    assert "lost" not in output
