"""Tests of peers in real processes: they train halves of the classes of real digits, and the server is killed."""

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ddlf.peers.entries import Posted, Rejected
from ddlf.peers.journal import history
from ddlf.peers.serving import read_model
from tests.forks import Fork
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow
LIAR = Path(__file__).with_name("lying.py")
MODEL = """
digits:input shape=[64];
digits:output shape=[10];
digits:layers matmul(w), add(b), relu(shape=[32]), matmul(w), add(b), softmax();
digits:loss SCE;
train:optimizer SGD(learning_rate=0.1);
train:metrics accuracy;
"""


class Command:
    """A command in a separate process, and the lines that it prints.

    The command is ``ddlf peers``, ``ddlf`` with another ``part``, or the Python file ``script``. It is a fork of a process
    that has imported Keras. With ``is_new``, Python starts as for a user.
    """

    def __init__(self, folder, *words, part="peers", script=None, is_new=False):
        program = [*(["ddlf", part] if script is None else [str(script)]), *map(str, words)]
        environment = os.environ | {"DDLF_RUN_DIR": str(folder / "runs")}
        self.process = started(program, folder, environment) if is_new else Fork(program, folder, environment)
        self.lines = []

    def until(self, pattern):
        """Read lines until one matches, and return the match."""
        for line in self.process.stdout:
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line with {pattern}: {''.join(self.lines)}")

    def until_post(self, number):
        """Read lines until the peer has made this number of posts. It prints a line only for some posts."""
        while int(self.until(r"posted +set (\d+) ")[1]) < number:
            pass

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


def started(words, folder, environment):
    """Start ``ddlf`` with a new Python process, and return the process."""
    return subprocess.Popen(
        [sys.executable, "-m", "ddlf.cli.main", *words[1:]],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def stop(folder, port):
    """End a server with ``ddlf peers stop``, and return the exit code of this command."""
    with Command(folder, "stop", "--port", port) as command:
        return command.end()


@pytest.fixture
def digits(tmp_path):
    """Write the digits of scikit-learn to files, 0-4 and 5-9 separately, each with a test file."""
    from ddlf.data import datasets

    (x, y), (x_test, y_test) = datasets.with_classes("digits")
    x, x_test = x + 0.5, x_test + 0.5  # like --data digits
    for name, part, of in (("low", y < 5, y_test < 5), ("high", y >= 5, y_test >= 5)):
        np.savez(tmp_path / f"{name}.npz", x_train=x[part], y_train=y[part], x_test=x_test[of], y_test=y_test[of])
    (tmp_path / "digits.nnm").write_text(MODEL)
    return tmp_path


def test_two_peers_with_half_of_the_classes_each_learn_all_of_them(digits):
    """The server is killed and resumed, and its peers reconnect without help."""
    importlib.import_module("ddlf.extras.text.conversion.operator")  # the layers of the text
    load_model = importlib.import_module("keras").saving.load_model

    with Command(digits, "serve", "digits.nnm", "--data", "digits", "--invite", "2", "--port", "0") as server:
        links = [server.until(r"link +(\S+)")[1] for _ in range(2)]
        port = re.search(r":(\d+)/", links[0])[1]
        with (
            Command(digits, "join", links[0], "--data", "low.npz") as low,
            Command(digits, "join", links[1], "--data", "high.npz") as high,
        ):
            low.until_post(10)
            high.until_post(10)
            server.process.send_signal(signal.SIGKILL)
            server.end()
            low.until("lost ")
            with Command(digits, "serve", "--resume", "last", "--data", "digits", "--port", port) as again:
                again.until(r"resumed   (\d+) posts")
                low.until("back ")
                high.until_post(60)
                low.until_post(60)  # a busy machine may rarely run one of the peers
                assert stop(digits, port) == 0
                assert (low.end(), high.end(), again.end()) == (0, 0, 0)
    [folder] = (digits / "runs").glob("*-peers-digits")
    model = load_model(folder / "model.keras", compile=False)
    for name in ("low", "high"):
        with np.load(digits / f"{name}.npz") as data:
            predicted = np.argmax(model.predict(data["x_test"].reshape(-1, 64), verbose=0), axis=1)
            assert np.mean(predicted == data["y_test"]) >= 0.8, name
    posts = [entry for entry in history(folder) if isinstance(entry, Posted)]
    for peer in (1, 2):  # every post once and in order, across the kill
        assert [entry.number for entry in posts if entry.peer == peer] == list(
            range(1, 1 + sum(entry.peer == peer for entry in posts))
        )


def test_rounds_of_peers_that_trust_nobody_release_noised_sums(digits):
    """Two peers train two rounds, so the last set differs from the first one by two releases."""
    noise = ("--clip", "0.001", "--noise", "1000", "--trust", "nobody", "--quorum", "2", "--updates", "2")
    with Command(digits, "serve", "digits.nnm", "--way", "rounds", *noise, "--invite", "2", "--port", "0") as server:
        server.until(r"noise     each peer clips its update to the norm 0.001; the sum of a round has noise of 1, and")
        links = [server.until(r"link +(\S+)")[1] for _ in range(2)]
        port = re.search(r":(\d+)/", links[0])[1]
        join = ("--most-updates", "4")
        with (
            Command(digits, "join", links[0], "--data", "low.npz", *join) as low,
            Command(digits, "join", links[1], "--data", "high.npz", *join) as high,
        ):
            assert (low.end(), high.end()) == (0, 0)
        assert (stop(digits, port), server.end()) == (0, 0)
    [folder] = (digits / "runs").glob("*-peers-digits")
    first = read_model(digits / "digits.nnm", None, None, 0).model
    last = (folder / "model.safetensors").read_bytes()
    steps = zip(first.layout.decode(last), first.layout.decode(first.first), strict=True)
    step = np.concatenate([(after - before).ravel() for after, before in steps])
    assert step.std() == pytest.approx(
        np.sqrt(2) * 0.001 * 1000 / 2, rel=0.08
    )  # each sum has std 1, and is divided by 2
    posts = [entry for entry in history(folder) if isinstance(entry, Posted)]
    assert len(posts) == 4
    assert all(np.isnan([post.loss, post.accuracy]).all() for post in posts)


def test_a_lying_peer_harms_no_other_peer_and_the_record_says_why_it_is_excluded(digits):
    """The peer trains on its data as usual, but multiplies its updates by -30, and later by 1000."""
    parts = np.load(digits / "low.npz"), np.load(digits / "high.npz")
    np.savez(digits / "all.npz", **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    join = ("--data", "all.npz")
    with Command(digits, "serve", "digits.nnm", "--data", "digits", "--invite", "4", "--port", "0") as server:
        links = [server.until(r"link +(\S+)")[1] for _ in range(4)]
        port = re.search(r":(\d+)/", links[0])[1]
        with (
            Command(digits, "join", links[0], *join) as first,
            Command(digits, "join", links[1], *join) as second,
            Command(digits, "join", links[2], *join) as third,
        ):
            honest = (first, second, third)
            for peer in honest:
                peer.until_post(10)
            with Command(digits, links[3], "all.npz", script=LIAR) as liar:
                server.until(r"rejected  post \d+ of peer 4: its training is .* times as long as is usual, and")
                server.until(r"rejected  post \d+ of peer 4: its training is .* times as long as is usual$")
                server.until(r"out       peer 4: its posts count again in 60 s")
                with Command(digits, "list", "--port", port) as listing:
                    assert listing.end() == 0
                listed = "".join(listing.lines)
                assert re.findall(r"peer (\d+)  .*, out for \d+ s, 2 strikes", listed) == ["4"], listed
                assert stop(digits, port) == 0
                assert [peer.end() for peer in (*honest, liar, server)] == 5 * [0]
    [folder] = (digits / "runs").glob("*-peers-digits")
    importlib.import_module("ddlf.extras.text.conversion.operator")  # the layers of the text
    model = importlib.import_module("keras").saving.load_model(folder / "model.keras", compile=False)
    for part in parts:
        predicted = np.argmax(model.predict(part["x_test"].reshape(-1, 64), verbose=0), axis=1)
        assert np.mean(predicted == part["y_test"]) >= 0.9
    rejected = [entry for entry in history(folder) if isinstance(entry, Rejected)]
    assert {entry.peer for entry in rejected if entry.strike == "yes"} == {4}
    strikes = [entry.why for entry in rejected if entry.strike == "yes"]
    assert len(strikes) == 3
    assert all("times as long as is usual" in reason for reason in strikes)


def test_only_one_server_has_the_journal_of_a_run(digits, monkeypatch):
    """A server of another user or container does not find the first one in its own state folder."""
    with Command(digits, "serve", "digits.nnm", "--port", "0") as server:
        folder = server.until(r"folder +(\S+)")[1]
        monkeypatch.setenv("XDG_STATE_HOME", str(digits / "other"))
        with Command(digits, "serve", "--resume", folder, "--port", "0") as second:
            second.until("is being trained; stop it first: ddlf peers stop")
            assert second.end() == 2


def test_ctrl_c_ends_a_peer_and_sigterm_ends_the_server_without_losing_a_set(digits):
    with Command(digits, "serve", "digits.nnm", "--invite", "1", "--port", "0", is_new=True) as server:
        link = server.until(r"link +(\S+)")[1]
        with Command(digits, "join", link, "--data", "low.npz", is_new=True) as low:
            low.until_post(3)
            low.process.send_signal(signal.SIGINT)
            low.until("stopping ")
            assert low.end() == 128 + signal.SIGINT, "".join(low.lines)
        server.until("left      peer 1")  # it has said goodbye, because its lease of 10 s has not ended
        server.process.send_signal(signal.SIGTERM)
        server.until("saved ")
        server.until("--resume")
        assert server.end() == 128 + signal.SIGTERM
    [folder] = (digits / "runs").glob("*-peers-digits")
    assert (folder / "model.keras").exists()
    posts = [entry for entry in history(folder) if isinstance(entry, Posted)]
    assert sum(entry.updates for entry in posts) > 3 * 20 - 1
