"""Tests of the properties that all launchers of engines share.

They run on the launchers of DDLF that need no engine, and on a launcher of another package.
"""

import asyncio
import contextlib
import importlib
import os
import shlex
import signal
import subprocess
import sys

import psutil
import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.engine import PlaceEngine, check_folder
from ddlf.cluster.launch.keys import Keys
from ddlf.cluster.launch.launcher import Cause, Workers, from_keys, installed
from ddlf.cluster.proxy import NoWorkerComes
from ddlf.errors import ConfigError, ConnectError, DDLFError, WorkerLost
from ddlf.events import WorkerConnected, WorkerDisconnected, WorkerLogged, WorkerWrote
from tests.patience import PATIENCE_S

PACKAGE = '''
import asyncio, signal, sys
from pydantic import Field
from ddlf.cluster.launch.engine import PlaceEngine
from ddlf.cluster.launch.keys import Keys
from ddlf.cluster.launch.launcher import Cause, Left
from ddlf.errors import ConnectError


class HerdKeys(Keys):
    most: int = Field(default=8, description="Number of sheep.")


class Herd(PlaceEngine):
    """An engine in 20 lines: each worker is a process of this program."""

    name = "herd"
    model = HerdKeys

    async def run(self, place, worker):
        if place >= self.keys.most:
            raise ConnectError(f"the herd has only {self.keys.most} sheep")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ddlf.cli.worker", *worker.arguments(), "--exit-with-parent",
            stdin=asyncio.subprocess.PIPE, start_new_session=True,
        )
        process.stdin.write(worker.token + b"\\n")
        try:
            code = await process.wait()
        finally:
            process.stdin.close()
            if process.returncode is None:
                process.terminate()
                await process.wait()
        return Left(Cause.CRASH if code else Cause.CANCELLED, f"the sheep ended with {code}", code)

    async def waits(self, index):
        return "it grazes"
'''


@pytest.fixture
def herd(tmp_path, monkeypatch):
    """Install a distribution with the launcher ``herd``."""
    (tmp_path / "some_herd.py").write_text(PACKAGE)
    info = tmp_path / "some_herd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-herd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ddlf.launchers]\nherd = some_herd:Herd\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("some_herd", None)


@pytest.fixture(params=["command", pytest.param("herd", marks=pytest.mark.slow)])
def keys(request, herd, tmp_path):
    """Return the name of a launcher, and the keys that it needs."""
    shared = tmp_path / "shared"
    shared.mkdir()
    keys_by_launcher = {"command": {"command": "exec {worker} # {place}", "folder": str(shared)}, "herd": {}}
    return request.param, keys_by_launcher[request.param]


def launcher_of(keys, **more):
    name, own_keys = keys
    return from_keys(name, {**own_keys, **more})


def number(self):
    return self.id


def worker_at(gate, place):
    """Return the process of the worker that joins the gate at a place."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError, IndexError):
            words = process.cmdline()
            if any(f":{gate.port}" in word for word in words) and words[words.index("--place") + 1] == str(place):
                return process
    return None


async def test_number_of_a_worker_is_its_place_plus_one_and_nothing_remains(keys, descendants):
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher_of(keys, workers=3)) as cluster:
        assert await cluster.run_method(number) == [1, 2, 3]
    assert descendants() == []


async def test_run_begins_with_the_least_number_and_more_workers_join_later(keys, descendants):
    launcher = launcher_of(keys, workers="1..3")
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        assert cluster.places == 3
        for worker in [*cluster.workers, *cluster.missing]:
            await worker.reconnect()
            assert worker.id in (1, 2, 3)
    assert descendants() == []


@pytest.mark.slow
async def test_killed_worker_is_replaced_and_the_reason_is_known(keys, descendants):
    launcher = launcher_of(keys, workers=2)
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        before = launcher.gate.incarnation(1)
        os.kill(worker_at(launcher.gate, 1).pid, signal.SIGKILL)
        while launcher.gate.incarnation(1) == before:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        while True:
            with contextlib.suppress(DDLFError):
                await cluster.workers[1].reconnect()
                assert await cluster.run_method(number) == [1, 2]
                break
        while (left := launcher._lefts.get(1)) is None:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        assert (left.cause, left.exit_code) == (Cause.CRASH, -signal.SIGKILL)
        assert await launcher.left(1) is None, "another worker is there"
        assert await launcher.left(0) is None
    assert descendants() == []


@pytest.mark.parametrize("is_busy", [True, False])
async def test_error_of_a_request_has_the_reason_of_the_engine(keys, descendants, is_busy):
    launcher = launcher_of(keys, workers=1)
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        assert await cluster.run_method(number) == [1]
        (worker,) = cluster.workers
        running = asyncio.ensure_future(worker.run_code("import time; time.sleep(1000)")) if is_busy else None
        process = worker_at(launcher.gate, 0)
        if is_busy:
            while not (await worker.status()).busy:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        while not is_busy and worker.connected:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.001)
        with pytest.raises(WorkerLost, match=r"was ended by SIGKILL|the sheep ended with -9") as caught:
            await (running or worker.run_method(number))
        assert caught.value.cause is Cause.CRASH
    assert descendants() == []


def write_in_all_ways(self):
    print("of Python")
    os.write(1, b"native output\n")
    os.write(2, b"native error\n")
    subprocess.run(["sh", "-c", "echo of a program"], check=True)


async def test_all_output_of_a_worker_reaches_the_master_and_once_its_terminal(keys, descendants, capfd):
    events, arrived = [], asyncio.Event()
    native = {"native output", "native error", "of a program"}

    def hear(event):
        events.append(event)
        if isinstance(event, WorkerLogged) and native <= set(lines_of(WorkerLogged)):
            arrived.set()

    def lines_of(kind):
        return [line for event in events if isinstance(event, kind) for line in event.lines]

    launcher = launcher_of(keys, workers=1)
    cluster = Cluster(launcher)
    cluster.subscribe(hear)
    async with asyncio.timeout(PATIENCE_S), cluster:
        await cluster.run_method(write_in_all_ways)
        await arrived.wait()  # lines arrive also while the worker is idle
        (connected,) = [event for event in events if isinstance(event, WorkerConnected)]
        assert connected.incarnation == 1
        os.kill(worker_at(launcher.gate, 0).pid, signal.SIGKILL)
        while cluster.workers[0].connected:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.001)
        with pytest.raises(WorkerLost) as lost:
            await cluster.run_method(number)
        assert "native error" in lost.value.output_tail
        assert "its last output:\n" in str(lost.value)
        await cluster.workers[0].reconnect()
    assert lines_of(WorkerWrote) == ["of Python"]
    assert not any(launcher.tokens.primary.decode() in line for line in lines_of(WorkerLogged))
    incarnations = [event.incarnation for event in events if isinstance(event, WorkerConnected)]
    assert (incarnations[0], incarnations[-1]) == (1, 2)
    (disconnected, _) = [event for event in events if isinstance(event, WorkerDisconnected)]
    assert disconnected.cause == "crash"
    shown = "".join(capfd.readouterr())
    assert shown.count("of Python") == 1
    assert not any(line in shown for line in native)


@pytest.mark.slow
async def test_cluster_connects_again_after_it_was_closed(keys, descendants):
    cluster = Cluster(launcher_of(keys, workers=2))
    for _ in range(2):
        async with asyncio.timeout(PATIENCE_S), cluster:
            assert await cluster.run_method(number) == [1, 2]
        assert descendants() == []


async def test_cancelled_start_leaves_nothing_behind(keys, descendants):
    cluster = Cluster(launcher_of(keys, workers=2))
    starting = asyncio.ensure_future(cluster.connect())
    await asyncio.sleep(0)
    while not descendants() and not starting.done():  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await cluster.close()
    assert descendants() == []


def test_unknown_key_is_refused_by_name(keys):
    with pytest.raises(ConfigError, match=f"launcher {keys[0]} has no key 'wrong'"):
        launcher_of(keys, workers=2, wrong=1)


def test_number_of_workers_is_needed(keys):
    with pytest.raises(ConfigError, match=f"launcher {keys[0]} needs the number of workers"):
        launcher_of(keys)


async def test_engine_that_never_runs_a_worker_ends_the_start_with_its_words(herd, descendants):
    with pytest.raises(ConnectError, match="place 2: the herd has only 2 sheep"):
        await asyncio.wait_for(Cluster(installed("herd:workers=3,most=2")).connect(), PATIENCE_S)
    assert descendants() == []


async def test_reconnecting_ends_if_the_engine_never_starts_the_worker_again(herd, descendants):
    """Regression test: a run tried to reach the worker indefinitely."""
    async with asyncio.timeout(PATIENCE_S), Cluster(installed("herd:workers=1..2,most=1")) as cluster:
        (missing,) = cluster.missing
        with pytest.raises(NoWorkerComes, match=r"worker 2 \(place 1\): the herd has only 1 sheep"):
            await missing.reconnect()
    assert descendants() == []


async def test_engine_that_does_not_answer_is_named(herd, monkeypatch, caplog):
    monkeypatch.setattr("ddlf.cluster.launch.engine.SAY_AFTER_S", 0.01)
    launcher = installed("herd:workers=1")

    async def prepare():
        while "launcher herd, which has not answered yet" not in caplog.text:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        raise ConnectError("it refuses")

    launcher.prepare = prepare
    with pytest.raises(ConnectError, match="it refuses"):
        await asyncio.wait_for(Cluster(launcher).connect(), PATIENCE_S)


async def test_timeout_has_the_words_of_the_engine(herd, monkeypatch):
    launcher = installed("herd:workers=1,start_timeout=0.1")

    async def never(place, worker):
        await asyncio.get_running_loop().create_future()

    launcher.run = never
    with pytest.raises(ConnectError, match=r"no worker joined at port \d+ within 0\.1 s: it grazes") as caught:
        await asyncio.wait_for(Cluster(launcher).connect(), PATIENCE_S)
    assert caught.value.exit_code == 3


def test_command_line_names_the_launcher_of_a_package(herd):
    from ddlf.cli.options import add_options
    from ddlf.cli.parsing import Parser
    from ddlf.cli.run import resolve_cluster

    parser = Parser()
    add_options(parser)
    options = parser.parse_args(shlex.split("--launcher herd:most=4 --workers 2..4"))
    cluster, described = resolve_cluster(options)
    assert (cluster.places, described) == (4, "--launcher herd:most=4 (4 workers)")


async def test_check_starts_nothing_and_has_no_problem_here(keys, descendants):
    name, own_keys = keys
    facts = [check async for check in from_keys(name, {"workers": 2, **own_keys}).check()]
    assert facts
    assert [check for check in facts if check.do] == []


async def test_check_names_a_command_that_is_missing_and_a_folder_without_rights(tmp_path, monkeypatch):
    monkeypatch.setattr("ddlf.cluster.launch.engine.os.access", lambda path, mode: False)
    own_keys = {"workers": 1, "command": "no-such-qsub {worker}", "folder": str(tmp_path)}
    problems = [check async for check in from_keys("command", own_keys).check() if check.do]
    assert [problem.fact for problem in problems] == [
        "there is no command no-such-qsub on this machine",
        f"the folder {tmp_path} cannot be written to",
    ]


def test_check_names_the_file_system_of_the_folder(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nserver:/home {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr("ddlf.cluster.launch.engine.MOUNTS", mounts)
    assert check_folder(tmp_path).fact == f"the workers must share the folder {tmp_path} (on nfs4)"
    assert check_folder(tmp_path.parent).fact.endswith("(on ext4, which only this machine sees)")


class Cancelled(PlaceEngine):
    """An engine that cancels its workers after they have joined, before the master has connected to them."""

    name = "cancelled"

    async def run(self, place, worker):
        self.gate._states[place].incarnation = 1
        self.gate.came.set()
        while not self.gate.has_begun:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        raise ConnectError("ann has cancelled it")


async def test_connect_ends_at_once_when_all_workers_are_cancelled():
    cluster = Cluster(Cancelled(Keys(workers=Workers(least=2, most=2))), connect_timeout_s=10 * PATIENCE_S)
    with pytest.raises(ConnectError, match=r"(?s)place 0.*ann has cancelled it.*place 1"):
        await asyncio.wait_for(cluster.connect(), PATIENCE_S)
