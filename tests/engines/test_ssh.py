"""Tests of workers that the real ssh starts, with an sshd of these tests on loopback."""

import asyncio
import contextlib
import hashlib
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.launcher import from_keys
from ddlf.errors import ConnectError, WorkerLost
from ddlf.rpc.tokens import new_token
from tests.engines.sshd import NOISY, Sshd
from tests.fake_ssh import write_script
from tests.patience import PATIENCE_S

APP = """
import numpy as np, ddlf

class App(ddlf.IApp):
    batch_size = 32; master_epochs = 3; seed = 3; slots = 4; threads = 1

    async def load_dataset(self):
        r = np.random.default_rng(0)
        self.x_train = r.normal(size=(512, 8)).astype("float32")
        self.y_train = np.eye(2, dtype="float32")[(self.x_train.sum(1) > 0).astype(int)]

    async def create_model(self):
        import keras
        from keras import layers

        self.model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dropout(0.3), layers.Dense(2, "softmax")]
        )
        self.model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "categorical_crossentropy")
"""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    result = Sshd(tmp_path_factory.mktemp("ssh"))
    yield result
    result.end()


@pytest.fixture(autouse=True)
def own_ssh(sshd, monkeypatch):
    monkeypatch.setenv("PATH", sshd.path)


def number(self):
    return self.id


def launcher(*hosts, **keys):
    return from_keys("ssh", {"hosts": list(hosts), "python": sys.executable, **keys})


def ddlf(folder, *words, **options):
    return subprocess.run(
        [sys.executable, "-m", "ddlf", *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        **options,
    )


async def until_idle(sshd):
    """Wait until sshd has no connection and no child process."""
    async with asyncio.timeout(PATIENCE_S):
        while sshd.process.children():  # noqa: ASYNC110 - there is no event to await
            await asyncio.sleep(0.05)


@pytest.mark.short
def test_weights_equal_the_weights_of_local_workers(sshd, tmp_path):
    (tmp_path / "app.py").write_text(APP)
    sums = []
    for where in (["--local", "2"], ["--launcher", f"ssh:hosts=pc01,pc02,python={sys.executable}", "--workers", "3"]):
        ended = ddlf(tmp_path, "run", "app.py", *where, "--save", "m.safetensors", "--out", "none", "--quiet")
        assert ended.returncode == 0, ended.stderr
        sums.append(hashlib.sha256((tmp_path / "m.safetensors").read_bytes()).hexdigest())
    assert sums[0] == sums[1]


@pytest.mark.parametrize("shell", ["sh", "bash"])
async def test_noise_of_login_scripts_is_skipped(sshd, shell):
    write_script(sshd.folder / "noisy", NOISY.replace("LOGIN_SHELL:-sh", f"LOGIN_SHELL:-{shell}"))
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher("pc01", "behind")) as cluster:
        assert await cluster.run_method(number) == [1, 2]
    await until_idle(sshd)


@pytest.mark.short
async def test_killed_ssh_and_killed_worker_are_replaced(sshd):
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher("pc01", "pc02")) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        [client] = [process for process in psutil.Process().children() if "pc01" in process.cmdline()]
        [worker] = [
            process for process in sshd.started("--place") if "1" in process.cmdline() and "--join" in process.cmdline()
        ]
        secret = cluster._launcher.tokens.primary.decode()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                assert secret not in " ".join([*process.cmdline(), *process.environ().values()])
        listening = [connection.laddr.ip for connection in worker.net_connections() if connection.status == "LISTEN"]
        assert listening == []
        client.kill()
        worker.kill()
        while True:
            with contextlib.suppress(WorkerLost, ConnectError):
                for proxy in cluster.workers:
                    await proxy.reconnect()
                if await cluster.run_method(number) == [1, 2]:
                    break
        assert worker.pid not in [process.pid for process in sshd.started("--place")]
    await until_idle(sshd)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_nothing_is_left_when_the_master_ends(sshd, tmp_path, number):
    (tmp_path / "fn.py").write_text(
        "import asyncio\nasync def main(cluster):\n    print('begun', flush=True)\n    await asyncio.sleep(1000)\n"
    )
    command = ["run", "fn.py", "--launcher", f"ssh:hosts=pc01,pc02,python={sys.executable}"]
    master = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ddlf", *command),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(PATIENCE_S):
        while b"begun" not in await master.stdout.readline():
            assert master.returncode is None
        master.send_signal(number)
        await master.wait()
    await until_idle(sshd)


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("refused", "refused: ssh: connect to host 127.0.0.1 port 1: Connection refused"),
        ("newkey", "newkey: its host key is unknown; connect once yourself"),
        ("changed", "changed: its host key has changed; if you trust the new key"),
        ("nokey", "Permission denied (publickey).; ssh must need no password here"),
    ],
)
async def test_error_has_the_message_of_ssh(sshd, host, sentence):
    with pytest.raises(ConnectError) as caught:
        await asyncio.wait_for(Cluster(launcher(host)).connect(), PATIENCE_S)
    assert sentence in str(caught.value)


async def test_missing_python_is_named(sshd):
    with pytest.raises(ConnectError, match=r"pc01: /no/python cannot run there: .*not found"):
        await asyncio.wait_for(Cluster(launcher("pc01", python="/no/python")).connect(), PATIENCE_S)


def test_lasting_workers_are_started_and_ended(sshd, tmp_path):
    token = new_token()
    (tmp_path / "token").write_text(token)
    (tmp_path / "token").chmod(0o600)
    ports = []
    for _ in range(2):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            ports.append(sock.getsockname()[1])
    rows = "".join(
        f"  - {{host: {host}, port: {port}, python: {sys.executable}}}\n"
        for host, port in zip(("127.0.0.1", "localhost"), ports, strict=True)
    )
    (tmp_path / "cluster.yaml").write_text(f"security: {{token_file: token}}\nworkers:\n{rows}")
    (tmp_path / "fn.py").write_text(
        "def number(self):\n    return self.id\nasync def main(cluster):\n    print(await cluster.run_method(number))\n"
    )
    try:
        ended = ddlf(tmp_path, "up")
        assert (ended.returncode, ended.stdout.count("started (pid ")) == (0, 2), ended.stdout + ended.stderr
        _, connections = psutil.wait_procs(sshd.process.children(), PATIENCE_S)
        assert connections == []
        assert "[1, 2]" in ddlf(tmp_path, "run", "fn.py").stdout
        assert ddlf(tmp_path, "up").stdout.count("runs already") == 2
        assert ddlf(tmp_path, "runcmd", "--", "echo", "a b").stdout.count("a b\n") == 2
    finally:
        ended = ddlf(tmp_path, "down", "--force")
    assert (ended.returncode, ended.stdout.count("ended (pid ")) == (0, 2), ended.stdout + ended.stderr
    assert {path.suffix for path in (sshd.state / "ddlf" / "up").iterdir()} == {".lock", ".log"}


async def test_check_tries_each_host_and_its_way_back(sshd):
    async with asyncio.timeout(PATIENCE_S):
        facts = [check async for check in launcher("pc01", "refused", "behind").check()]
    assert facts[0].fact.startswith("OpenSSH")
    assert [bool(check.do) for check in facts] == [False, False, True, False]
    assert "Connection refused" in facts[2].fact
