"""Tests of the promises of the README through the command line, with real processes, sockets and data."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.commands import several
from tests.mnist import folder_with_mnist
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "ddlf.cli.main")


@pytest.fixture
def environment(tmp_path):
    """Return an environment with separate folders for tokens, state and caches, and a folder with ``mnist.npz``."""
    folders = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("CONFIG", "STATE", "CACHE")}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DDLF_")}
    return {**inherited, **folders, "DDLF_DATA": str(folder_with_mnist(tmp_path / "data"))}


@pytest.fixture
def start_workers(environment, tmp_path):
    """Return a function that starts a ``ddlf-worker`` for each addition to the environment, and returns their cluster file."""
    processes = []

    def start(*additions):
        for addition in additions:
            command = (sys.executable, "-m", "ddlf.cli.worker", "--port", "0")
            options = dict(stdout=subprocess.PIPE, env={**environment, **addition}, text=True, cwd=tmp_path)
            processes.append(subprocess.Popen(command, **options))
        ports = []
        for process in processes:
            ready = next(line for line in process.stdout if line.startswith("ready on "))
            ports.append(re.search(r":(\d+),", ready)[1])
        config = tmp_path / "cluster.yaml"
        config.write_text("workers:\n" + "".join(f"  - 127.0.0.1:{port}\n" for port in ports))
        return config

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(PATIENCE_S)
        process.stdout.close()


def run(environment, *arguments):
    return subprocess.run((*COMMAND, *map(str, arguments)), env=environment, text=True, capture_output=True, cwd=ROOT)


def started_with(environment) -> list[psutil.Process]:
    """Return the processes that use the folders of this test."""
    return [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("XDG_STATE_HOME") == environment["XDG_STATE_HOME"]
    ]


def accuracy(output: str) -> float:
    return float(re.search(r"^test .*accuracy (\S+)", output, re.M)[1])


@pytest.mark.slow
def test_mnist_trains_on_two_workers_in_both_modes_and_loads_once(environment, start_workers, tmp_path):
    part = tmp_path / "part"
    part.mkdir()
    with np.load(Path(environment["DDLF_DATA"]) / "mnist.npz") as mnist:
        sizes = {"train": 4000, "test": 1000}
        np.savez(part / "mnist.npz", **{name: mnist[name][: sizes[name[2:]]] for name in mnist})
    environment["DDLF_DATA"] = str(part)
    config = start_workers({}, {})
    app = ROOT / "apps" / "mnist_cnn.py"
    options = ("--config", config, "--batch-size", 16, "-p", "learning_rate=0.05", "--master-epochs", 1)
    command = ["ddlf", "run", app, *options]
    first, second = several([command, [*command, "--mode", "async"]], ROOT, env=environment)
    assert accuracy(first) > 0.75
    assert "4,000 samples of shape (28, 28, 1)" in first
    assert "loaded on 2 workers" in first
    rounds = re.findall(r"(\S+) MB out, (\S+) MB back", first)
    # Each of two workers gets 515,146 weights of 4 bytes and 2,000 indices of 2 bytes, and sends back its update.
    assert len(rounds) == 1
    assert float(rounds[0][0]) == pytest.approx(2 * 515_146 * 4e-6 + 4000 * 2e-6, abs=0.02)
    assert float(rounds[0][1]) == pytest.approx(2 * 515_146 * 4e-6, abs=0.02)
    assert accuracy(second) > 0.7
    assert "already on all 2 workers, not loaded again" in second


@pytest.mark.slow
def test_sigterm_writes_a_checkpoint_and_ends_everything(environment, tmp_path):
    number = signal.SIGTERM  # Ctrl-C: tests/cli/test_stopping.py
    process = subprocess.Popen(
        (
            *(*COMMAND, "run", "apps/digits_cnn.py", "--local", "2", "--master-epochs", "1000"),
            *("--checkpoint", tmp_path, "--checkpoint-every", "1000"),
        ),
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("round"):
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 4  # two daemons, two executors
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.glob("round-*")]  # the last complete round, although no checkpoint was due
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.slow
def test_master_and_workers_may_have_different_backends(environment, start_workers):
    config = start_workers({"KERAS_BACKEND": "jax"}, {"KERAS_BACKEND": "tensorflow"})
    for backend in ("tensorflow", "jax"):
        result = run(
            {**environment, "KERAS_BACKEND": backend},
            "run",
            "apps/digits_cnn.py",
            "--config",
            config,
            "--master-epochs",
            3,
        )
        assert result.returncode == 0, result.stderr
        assert accuracy(result.stdout) >= 0.8
        assert "on jax" in result.stdout
        assert result.stdout.count("this run computes on worker 1 with jax and worker 2 with tensorflow") == 1
