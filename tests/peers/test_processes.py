"""Peers as users start them: real processes, real digits, halves of the classes, and a server that is killed."""

import importlib
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from ddlf.peers.entries import Posted
from ddlf.peers.journal import history
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow
MODEL = """
digits:input shape=[64];
digits:output shape=[10];
digits:layers matmul(w), add(b), relu(shape=[32]), matmul(w), add(b), softmax();
digits:loss SCE;
train:optimizer SGD(learning_rate=0.1);
train:metrics accuracy;
"""


class Command:
    """A command of ``ddlf peers``, or of another ``part``, in a process of its own, and the lines that it prints."""

    def __init__(self, folder, *words, part="peers"):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddlf.cli.main", part, *map(str, words)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"DDLF_RUN_DIR": str(folder / "runs")},
        )
        self.lines = []

    def until(self, pattern):
        """Read lines until one matches, and return the match."""
        for line in self.process.stdout:
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line with {pattern}: {''.join(self.lines)}")

    def end(self):
        """Read all lines, and return the exit code."""
        self.lines += self.process.stdout.readlines()
        return self.process.wait(PATIENCE_S)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def digits(tmp_path):
    """The digits of scikit-learn: 0-4 in one file, 5-9 in another one, and the tests of each."""
    from ddlf.data import datasets

    (x, y), (x_test, y_test) = datasets.with_classes("digits")
    x, x_test = x + 0.5, x_test + 0.5  # as --data digits
    for name, part, of in (("low", y < 5, y_test < 5), ("high", y >= 5, y_test >= 5)):
        np.savez(tmp_path / f"{name}.npz", x_train=x[part], y_train=y[part], x_test=x_test[of], y_test=y_test[of])
    (tmp_path / "digits.nnm").write_text(MODEL)
    return tmp_path


def test_two_peers_with_half_of_the_classes_each_learn_all_of_them(digits):
    """The server is killed in the middle, continues, and its peers come back by themselves."""
    importlib.import_module("ddlf.extras.text.conversion.operator")  # the layers of the text
    load_model = importlib.import_module("keras").saving.load_model

    with Command(digits, "serve", "digits.nnm", "--data", "digits", "--invite", "2", "--port", "0") as server:
        links = [server.until(r"link +(\S+)")[1] for _ in range(2)]
        port = re.search(r":(\d+)/", links[0])[1]
        with (
            Command(digits, "join", links[0], "--data", "low.npz") as low,
            Command(digits, "join", links[1], "--data", "high.npz") as high,
        ):
            low.until("posted    set 10 ")
            high.until("posted    set 10 ")
            server.process.send_signal(signal.SIGKILL)
            server.end()
            low.until("lost ")
            with Command(digits, "serve", "--resume", "last", "--data", "digits", "--port", port) as again:
                again.until(r"resumed   (\d+) posts")
                low.until("back ")
                high.until("posted    set 60 ")
                stopped = subprocess.run(
                    [sys.executable, "-m", "ddlf.cli.main", "peers", "stop", "--port", port],
                    capture_output=True,
                    text=True,
                )
                assert stopped.returncode == 0, stopped.stderr
                assert (low.end(), high.end(), again.end()) == (0, 0, 0)
    [folder] = (digits / "runs").glob("*-peers-digits")
    model = load_model(folder / "model.keras", compile=False)
    for name in ("low", "high"):
        with np.load(digits / f"{name}.npz") as data:
            found = np.argmax(model.predict(data["x_test"].reshape(-1, 64), verbose=0), axis=1)
            assert np.mean(found == data["y_test"]) >= 0.8, name
    posts = [entry for entry in history(folder) if isinstance(entry, Posted)]
    for peer in (1, 2):  # every post once and in order, across the kill
        assert [entry.number for entry in posts if entry.peer == peer] == list(
            range(1, 1 + sum(entry.peer == peer for entry in posts))
        )


def test_ctrl_c_ends_a_peer_and_sigterm_ends_the_server_without_losing_a_set(digits):
    with Command(digits, "serve", "digits.nnm", "--invite", "1", "--port", "0") as server:
        link = server.until(r"link +(\S+)")[1]
        with Command(digits, "join", link, "--data", "low.npz") as low:
            low.until("posted    set 3 ")
            low.process.send_signal(signal.SIGINT)
            low.until("stopping ")
            assert low.end() == 128 + signal.SIGINT, "".join(low.lines)
        server.until("left      peer 1")  # it has said goodbye: its lease is 10 s
        server.process.send_signal(signal.SIGTERM)
        server.until("saved ")
        server.until("--resume")
        assert server.end() == 128 + signal.SIGTERM
    [folder] = (digits / "runs").glob("*-peers-digits")
    assert (folder / "model.keras").exists()
    posts = [entry for entry in history(folder) if isinstance(entry, Posted)]
    assert sum(entry.updates for entry in posts) > 3 * 20 - 1
