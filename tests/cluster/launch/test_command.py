"""Tests of the launcher ``command``, which starts workers with a command of the user."""

import asyncio
import contextlib
import re
import shlex
import sys

import psutil
import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.command import Commanded, CommandKeys
from ddlf.cluster.launch.launcher import Cause, Left, Workers, installed
from ddlf.errors import ConfigError, ConnectError, WorkerLost
from tests.patience import PATIENCE_S


def launcher_of(command, workers, folder, **keys):
    return Commanded(CommandKeys(command=command, workers=workers, folder=folder, **keys))


def number(self):
    return self.id


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{worker} & {worker} & wait", id="in the foreground", marks=pytest.mark.slow),
        pytest.param("{worker} # {place}", id="once for each place"),
        pytest.param("for i in $(seq {n}); do {worker} > /dev/null & done", id="in the background"),
    ],
)
async def test_command_starts_workers_that_end_with_the_run(text, tmp_path, descendants):
    launcher = launcher_of(text, 2, tmp_path)
    async with asyncio.timeout(PATIENCE_S):
        async with Cluster(launcher) as cluster:
            assert await cluster.run_method(number) == [1, 2]
            (token,) = tmp_path.iterdir()
            assert token.stat().st_mode & 0o777 == 0o600
            secret = token.read_text()
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):  # it has ended
                    assert secret not in " ".join(process.cmdline())
        assert list(tmp_path.iterdir()) == []


async def test_token_file_is_removed_although_the_master_is_killed(tmp_path):
    program = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom tests.cluster.launch.test_command import launcher_of\n"
        "async def main():\n    launcher = launcher_of('true # {worker}', 1, Path(sys.argv[1]))\n    await launcher.start()\n"
        "asyncio.run(main())\n"
    )
    master = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(tmp_path))
    async with asyncio.timeout(PATIENCE_S):
        while not list(tmp_path.iterdir()):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        master.kill()
        await master.wait()
        while list(tmp_path.iterdir()):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


async def test_failed_command_is_an_error_with_its_last_lines(tmp_path):
    launcher = launcher_of("echo no such queue >&2; exit 7 # {worker}", 2, tmp_path)
    with pytest.raises(ConnectError, match="ended with exit code 7:\nno such queue"):
        await asyncio.wait_for(Cluster(launcher).connect(), PATIENCE_S)
    assert list(tmp_path.iterdir()) == []


async def test_command_that_starts_nothing_ends_at_the_timeout(tmp_path):
    launcher = launcher_of("true # {worker}", 1, tmp_path, start_timeout=0.2)
    with pytest.raises(ConnectError, match=r"no worker joined at port \d+ within 0\.2 s"):
        await asyncio.wait_for(Cluster(launcher).connect(), PATIENCE_S)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["sleep 1000 # {worker}", "sleep 1000 # {worker} {place}"])
async def test_command_that_runs_without_a_worker_is_named_as_the_reason_to_wait(text, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("ddlf.cluster.launch.gate.SAY_AFTER_S", 0.1)
    launcher = launcher_of(text, 2, tmp_path, start_timeout=0.5)
    with pytest.raises(ConnectError, match=r"within 0\.5 s: its command runs, and no worker has come yet"):
        await asyncio.wait_for(Cluster(launcher).connect(), PATIENCE_S)
    lines = [line for line in caplog.messages if line.startswith("waiting for workers")]
    assert lines == ["waiting for workers at places 0 and 1: its command runs, and no worker has come yet"]


async def test_command_gets_the_number_the_place_and_a_worker(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write = f"{shlex.quote(sys.executable)} -c 'import sys; print(sys.argv[1:])' {{n}} {{place}} {{worker}} > {out}/{{place}}"
    launcher = launcher_of(write, 2, tmp_path, start_timeout=PATIENCE_S)
    starting = asyncio.ensure_future(Cluster(launcher).connect())
    async with asyncio.timeout(PATIENCE_S):
        while sum(path.read_text().endswith("]\n") for path in out.iterdir()) < 2:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await launcher.stop()
    for place in ("0", "1"):
        output = (out / place).read_text()
        assert output.startswith(f"['2', '{place}', ")
        assert re.search(rf"'-m', 'ddlf.cli.worker', '--join', '127.0.0.1:\d+.*'--place', '{place}'", output)


def test_command_is_checked():
    with pytest.raises(ConfigError, match=r"does not contain \{worker\}"):
        installed("command:qsub -t 1-{n}", Workers(4, 4))
    with pytest.raises(ConfigError, match="launcher command needs the number of workers"):
        installed("command:{worker}")
    launcher = installed("command:qsub {worker}", Workers(2, 3))
    assert (len(launcher.addresses), launcher.least) == (3, 2)


async def test_killed_worker_of_a_place_is_started_again(tmp_path, descendants):
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher_of("exec {worker} # {place}", 2, tmp_path)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ValueError):  # it has ended, or has no place
                words = process.cmdline()
                if str(tmp_path) in " ".join(words) and words[words.index("--place") + 1] == "1":
                    process.kill()
        while True:
            with contextlib.suppress(WorkerLost, ConnectError):
                await cluster.workers[1].reconnect()
                assert await cluster.run_method(number) == [1, 2]
                break
        while (left := cluster._launcher._lefts.get(1)) is None:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        assert left == Left(Cause.CRASH, "its command was ended by SIGKILL", -9)


async def test_worker_of_a_killed_command_ends_before_the_next_one_starts(tmp_path, descendants):
    command = "sh -c '{worker}; exit $?' place-{place}"
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher_of(command, 1, tmp_path)) as cluster:
        assert await cluster.run_method(number) == [1]
        first = cluster._launcher.gate.incarnation(0)
        (shell,) = [
            process for process in descendants() if process.cmdline()[0] == "sh" and process.cmdline()[-1] == "place-0"
        ]
        (worker,) = shell.children()
        shell.kill()
        while worker.is_running():
            assert cluster._launcher.gate.incarnation(0) == first, "two workers are at one place"
            await asyncio.sleep(0.01)
        while cluster._launcher.gate.incarnation(0) == first:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
