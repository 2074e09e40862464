"""Test of two workers that are one peer, with a Python peer, in real processes. A worker, the server and the master are killed."""

import re
import signal

import numpy as np
import pytest

from ddlf.peers.entries import Posted
from ddlf.peers.journal import history
from tests.patience import PATIENCE_S
from tests.peers.test_processes import MODEL, Command, stop

pytestmark = pytest.mark.slow
APP = """
import os, signal
import numpy as np
import ddlf

class App(ddlf.IApp):
    notation = "digits.nnm"
    worker_steps, batch_size, master_epochs = 2, 16, 400

    async def load_dataset(self):
        with np.load("low.npz") as data:
            for name in ("x_train", "y_train", "x_test", "y_test"):
                setattr(self, name, data[name])

    async def on_round(self, record):
        print("round", record.round, flush=True)
        if record.round == 10 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill((await self.cluster.workers[1].status()).executor_pid, signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    from ddlf.data import datasets

    monkeypatch.setenv("DDLF_STATE_DIR", str(tmp_path / "state"))
    (x, y), (x_test, y_test) = datasets.with_classes("digits")
    x, x_test = x + 0.5, x_test + 0.5  # like --data digits
    x, x_test = x.reshape(len(x), -1), x_test.reshape(len(x_test), -1)
    for name, part, of in (("low", y < 5, y_test < 5), ("high", y >= 5, y_test >= 5)):
        np.savez(tmp_path / f"{name}.npz", x_train=x[part], y_train=y[part], x_test=x_test[of], y_test=y_test[of])
    (tmp_path / "digits.nnm").write_text(MODEL)
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def test_cluster_and_python_peer_train_one_model_through_kills(folder):
    with Command(folder, "serve", "digits.nnm", "--data", "digits", "--invite", "2", "--port", "0") as server:
        links = [server.until(r"link +(\S+)")[1] for _ in range(2)]
        port = re.search(r":(\d+)/", links[0])[1]
        run = ("app.py", "--local", "2", "--peer", links[0], "--checkpoint", "kept", "--checkpoint-every", "5")
        with (
            Command(folder, *run, "--ui", "plain", part="run") as first,
            Command(folder, "join", links[1], "--data", "high.npz") as high,
        ):
            first.until("joined ")
            first.until(r"round 30\b")  # the worker that was killed in round 10 has returned
            server.process.send_signal(signal.SIGKILL)
            server.end()
            [journal] = (folder / "runs").glob("*-peers-digits")
            first.until("lost ")
            with Command(folder, "serve", "--resume", "last", "--data", "digits", "--port", port) as again:
                again.until(r"resumed   (\d+) posts")
                first.until("back ")
                number = int(first.until(r"round (\d+)")[1])
                first.until(rf"round {number + 30}\b")
                first.process.send_signal(signal.SIGKILL)
                first.process.wait(PATIENCE_S)
                with Command(folder, *run, "--ui", "plain", "--resume", "auto", "--takeover", part="run") as second:
                    second.until("joined ")
                    number = int(second.until(r"round (\d+)")[1])
                    assert number > 40
                    second.until(rf"round {number + 30}\b")
                    assert stop(folder, port) == 0
                    assert (second.end(), high.end(), again.end()) == (0, 0, 0), "".join(second.lines)
    posts = [entry for entry in history(journal) if isinstance(entry, Posted)]
    assert {entry.peer for entry in posts} == {1, 2}  # the resumed run is the same peer
    for peer in (1, 2):
        numbers = [entry.number for entry in posts if entry.peer == peer]
        assert numbers == list(range(1, len(numbers) + 1))
