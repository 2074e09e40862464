"""Tests of the properties that all launchers share."""

import asyncio
import importlib
import sys

import pytest

from ddlf.cli.main import main
from ddlf.cli.options import add_options, named_cluster
from ddlf.cli.parsing import Parser
from ddlf.cli.run import resolve_cluster
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.launcher import OWN, Cause, Given, Launcher, Left, Workers, installed
from ddlf.cluster.launch.local import Local
from ddlf.errors import ConfigError, ConnectError, WorkerLost
from ddlf.testing.in_process import InProcessDaemon, InProcessWorkers
from ddlf.testing.local import ProcessWorkers
from ddlf.worker.options import Options
from tests.daemons import TOKEN
from tests.patience import PATIENCE_S
from tests.processes import is_listening


class GivenWorkers(Given):
    """A launcher for given workers. The test starts and ends the workers."""

    def __init__(self, n, folder):
        token = folder / "token"
        token.write_bytes(TOKEN)
        token.chmod(0o600)
        options = Options(host="127.0.0.1", port=0, tokens=(TOKEN,), state_dir=None)
        self.daemons = [InProcessDaemon(options) for _ in range(n)]
        self.running = [asyncio.ensure_future(daemon.run()) for daemon in self.daemons]
        super().__init__(["127.0.0.1"] * n, [daemon.port for daemon in self.daemons], token_file=token)

    async def kill(self, index):
        self.daemons[index].stop()
        await self.running[index]

    async def end(self):
        for index in range(len(self.daemons)):
            await self.kill(index)


KINDS = {
    "given": GivenWorkers,
    "local": lambda n, folder: Local(n),
    "processes": lambda n, folder: ProcessWorkers(n, proxied=False),
    "proxied": lambda n, folder: ProcessWorkers(n, proxied=True),
    "in process": lambda n, folder: InProcessWorkers(n, proxied=False),
}


@pytest.fixture(params=KINDS)
async def launcher(request, tmp_path, descendants):
    """Yield a launcher of each kind, with two workers."""
    launcher = KINDS[request.param](2, tmp_path)
    yield launcher
    await launcher.stop()
    if isinstance(launcher, GivenWorkers):
        await launcher.end()
    assert descendants() == []


async def test_each_worker_has_an_address_and_accepts_the_token_of_the_launcher(launcher):
    assert len(launcher.addresses) == 2
    addresses = await launcher.start(["json"])
    assert len(set(addresses)) == 2
    assert all(0 < port < 65536 for _, port in addresses)
    async with Cluster(launcher) as cluster:
        assert [(worker.host, worker.port) for worker in cluster.workers] == addresses
        assert await cluster.run_code("self.id") == [1, 2]


async def test_starting_again_or_twice_at_once_keeps_running_workers(launcher):
    first, second = await asyncio.gather(launcher.start(), launcher.start())
    assert first == second == await launcher.start()
    addresses = list(first)
    for index in (0, 1):
        assert await launcher.left(index) is None
        assert await launcher.revive(index) == addresses[index]


async def test_stopping_before_and_after_a_start_leaves_nothing_behind(launcher, descendants):
    await launcher.stop()
    addresses = list(await launcher.start())
    await launcher.stop()
    await launcher.stop()
    assert descendants() == []
    assert any(is_listening(port) for _, port in addresses) is isinstance(launcher, Given)


async def test_a_stop_ends_a_start(launcher, descendants):
    starting = asyncio.ensure_future(launcher.start())
    await asyncio.sleep(0)
    await launcher.stop()
    await asyncio.wait([starting], timeout=PATIENCE_S)
    if launcher.revives and descendants():
        await launcher.stop()
    assert starting.done()
    assert descendants() == []


@pytest.mark.parametrize("kind", ["local", "given"])
async def test_a_death_is_reported_and_the_worker_returns_if_the_launcher_can_start_it(kind, tmp_path):
    launcher = KINDS[kind](2, tmp_path)
    async with Cluster(launcher) as cluster:
        if kind == "local":
            running = asyncio.ensure_future(cluster.workers[1].run_code("import time; time.sleep(1000)"))
            launcher._processes[1].kill()
            with pytest.raises(WorkerLost, match="its process was ended by SIGKILL"):
                await asyncio.wait_for(running, PATIENCE_S)
            assert await launcher.left(1) == Left(Cause.CRASH, exit_code=-9)
            await cluster.connect()
            assert await cluster.run_code("self.id") == [1, 2]
        else:
            await launcher.kill(1)
            assert await launcher.left(1) is None, "nobody here can know"
            with pytest.raises(ConnectError, match="1 of 2 workers could not be reached"):
                await cluster.connect()
            await launcher.kill(0)


async def test_a_host_that_does_not_answer_is_named(tmp_path):
    launcher = KINDS["given"](1, tmp_path)
    await launcher.end()
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:\d+ +connection refused"):
        await Cluster(launcher).connect()


async def test_names_of_given_workers_replace_their_addresses(tmp_path):
    launcher = KINDS["given"](2, tmp_path)
    launcher.names = ["kitchen", ""]
    assert [worker.label for worker in Cluster(launcher).workers] == [
        "kitchen",
        f"127.0.0.1:{launcher.addresses[1][1]}",
    ]
    await launcher.end()


async def test_a_launcher_has_its_own_token():
    with pytest.raises(
        ConfigError,
        match="token_file cannot be combined with a launcher, which has its own token; leave out token_file",
    ):
        Cluster(Local(1), token_file="token")


# -- launchers of other packages ------------------------------------------------------------------------------------------

PACKAGE = """
from ddlf.cluster.launch.local import Local

def make(text):
    return Local(int(text or 1))

class Counted(Local):
    @classmethod
    def from_text(cls, text, workers=None):
        return cls(workers.most)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a distribution with two launchers; one of them is invalid."""
    (tmp_path / "some_launchers.py").write_text(PACKAGE)
    info = tmp_path / "some_launchers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-launchers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ddlf.launchers]\nherd = some_launchers:make\ncounted = some_launchers:Counted\nwrong = builtins:str\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("some_launchers", None)


def test_an_installed_package_adds_launchers(package):
    assert isinstance(installed("herd:3"), Launcher)
    assert len(installed("herd:3").addresses) == 3
    assert len(installed("herd").addresses) == 1
    assert len(installed("counted", Workers(4, 4)).addresses) == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "heard:3",
            "there is no launcher 'heard'; did you mean 'herd'",
        ),
        ("SHH:hosts=pc01", "there is no launcher 'SHH'; did you mean 'ssh'"),
        (
            "nobody",
            f"there is no launcher 'nobody'; there are: {', '.join(sorted([*OWN, 'counted', 'herd', 'wrong']))}",
        ),
        ("wrong:x", "the launcher 'wrong' makes a str"),
    ],
)
def test_an_invalid_launcher_is_refused(package, text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        installed(text)
    with pytest.raises(ConfigError, match="--workers has no effect with --launcher herd; leave it out"):
        installed("herd", Workers(2, 2))


def test_without_a_package_there_is_no_additional_launcher():
    names = ", ".join(sorted(OWN))
    with pytest.raises(
        ConfigError, match=f"there is no launcher 'herd'; there are: {names}; other packages can bring more"
    ):
        installed("herd:workers=16")


def test_ddlf_run_accepts_a_launcher_instead_of_local(package):
    parser = Parser()
    add_options(parser)
    cluster, described = resolve_cluster(parser.parse_args(["--launcher", "herd:3"]))
    assert (cluster.N, described) == (3, "--launcher herd:3 (3 workers)")
    with pytest.raises(ConfigError, match="token_file cannot be combined with a launcher, which has its own token"):
        resolve_cluster(parser.parse_args(["--launcher", "herd", "--token-file", "token"]))


@pytest.mark.slow
def test_the_cluster_file_may_name_a_launcher_instead_of_workers(package, tmp_path, capsys):
    path = tmp_path / "cluster.yaml"
    path.write_text("launcher: herd:3\nname: lab\nrun: {min_workers: 2}\n")
    parser = Parser()
    add_options(parser)
    options = parser.parse_args(["-c", str(path)])
    cluster, described = resolve_cluster(options)
    assert (cluster.N, described) == (3, f"lab, {path} (3 workers)")
    with pytest.raises(ConfigError, match="has each run start its workers with launcher 'herd': none can be asked"):
        named_cluster(options)
    (tmp_path / "some.py").write_text("async def main(cluster): pass\n")
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "some.py"), "-c", str(path), "--dry-run"])
    assert "3 would be started" in capsys.readouterr().out
    path.write_text("launcher: herd:3\nsecurity: {token_file: cluster.yaml}\n")
    with pytest.raises(ConfigError, match="token_file cannot be combined with a launcher, which has its own token"):
        resolve_cluster(options)
