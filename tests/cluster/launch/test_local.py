"""Tests of local workers: they need no preparation, and leave nothing behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.launcher import Cause, Left
from ddlf.cluster.launch.local import Local
from ddlf.errors import ConnectError, WorkerLost
from tests.patience import PATIENCE_S
from tests.processes import end_of, is_listening

pytestmark = pytest.mark.asyncio(loop_scope="session")


def process_id():
    return os.getpid()


@pytest.fixture
def leftovers(own_folders, descendants):
    """Return a function that lists the remains of a test: processes, temporary folders and files of state."""
    folders = [own_folders / "tmp", own_folders / "state"]
    before = {path for folder in folders for path in folder.rglob("*")}

    def find():
        new_paths = {path for folder in folders for path in folder.rglob("*")} - before
        return descendants(), sorted(
            path for path in new_paths if "pytest-of" not in str(path) and path.suffix != ".pyc"
        )

    return find


async def test_after_close_no_process_port_or_folder_is_left(new_processes, leftovers):
    async with Cluster.local(2) as cluster:
        pids = await cluster.run_method(process_id)
        ports = [worker.port for worker in cluster.workers]
        assert len(leftovers()[0]) == 5  # each worker has two processes, and all executors share a template
        assert all(is_listening(port) for port in ports)
    assert leftovers() == ([], [])
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not any(is_listening(port) for port in ports)


async def test_a_closed_local_cluster_can_be_opened_again():
    cluster = Cluster.local(1)
    async with cluster:
        first = await cluster.run_method(process_id)
    async with cluster:
        assert await cluster.run_method(process_id) != first


async def test_a_worker_whose_daemon_is_killed_is_lost_at_once_and_the_signal_is_named():
    async with Cluster.local(2) as cluster:
        first, second = cluster.workers
        running = asyncio.ensure_future(first.run_method(sleep_long))
        pid = (await first.status()).pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="its process was ended by SIGKILL; connect again: that starts") as caught:
            await asyncio.wait_for(running, PATIENCE_S)
        assert caught.value.signal == "SIGKILL"
        assert first.state == "dead"
        assert await second.run_method(process_id) > 0


def sleep_long():
    time.sleep(60)


async def test_the_signal_is_known_although_a_busy_system_reports_it_late():
    class Killed:
        async def wait(self):
            await asyncio.sleep(0.2)
            return -signal.SIGKILL

    workers = Local(1)
    workers._processes = [Killed()]
    assert await workers.left(0) == Left(Cause.CRASH, exit_code=-signal.SIGKILL)


async def test_a_busy_worker_does_not_delay_the_close(leftovers, monkeypatch):
    monkeypatch.setattr("ddlf.cluster.launch.processes.STOP_S", 1000)
    async with Cluster.local(1) as cluster:
        call = asyncio.ensure_future(cluster.run_code("while True: pass"))
        while not (await cluster.status())[0].busy:
            pass
        closing = asyncio.ensure_future(cluster.close())
        await asyncio.wait_for(closing, PATIENCE_S)
    assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], ConnectionError)
    assert leftovers() == ([], [])


@pytest.mark.parametrize("steps", [0, 1, 5, 50])
async def test_a_cancelled_start_leaves_nothing_behind(leftovers, steps):
    connecting = asyncio.ensure_future(Cluster.local(2).connect())
    for _ in range(steps):
        await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert leftovers() == ([], [])


async def test_a_start_that_is_cancelled_after_a_daemon_created_its_folder_leaves_nothing_behind(leftovers):
    connecting = asyncio.ensure_future(Cluster.local(2).connect())
    while not any(path.name == "lock" for path in leftovers()[1]):  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert leftovers() == ([], [])


@pytest.mark.parametrize("steps", [1, 5, 50, 500])
async def test_a_close_while_the_workers_start_ends_the_start_and_leaves_nothing(leftovers, steps):
    cluster = Cluster.local(2)
    connecting = asyncio.ensure_future(cluster.connect())
    for _ in range(steps):
        await asyncio.sleep(0)
    await cluster.close()
    with pytest.raises(ConnectError, match="the cluster was closed while"):
        await connecting
    assert leftovers() == ([], [])


async def test_two_connects_at_once_start_the_workers_once(leftovers):
    cluster = Cluster.local(2)
    await asyncio.gather(cluster.connect(), cluster.options(workers=[2]).connect())
    twice = len(leftovers()[0])
    await asyncio.gather(cluster.close(), cluster.close())
    assert leftovers() == ([], [])
    async with cluster:
        assert len(leftovers()[0]) == twice


async def test_a_connect_continues_if_the_one_that_it_waits_for_is_cancelled(leftovers):
    cluster = Cluster.local(1)
    first, second = (asyncio.ensure_future(cluster.connect()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert await cluster.run_method(process_id)
    await cluster.close()
    assert leftovers() == ([], [])


async def test_connect_restarts_a_dead_worker_and_the_rest_keep_their_state():
    async with Cluster.local(2) as cluster:
        await cluster.set_variable("kept", 1)
        await cluster.workers[0].run_code("self.data['mine'] = 2")
        await kill_daemon(cluster.workers[1])
        await cluster.connect()
        assert await cluster.get_variable("kept") == [1, 1]
        assert await cluster.run_code("self.data.get('mine')") == [2, None]
        assert await cluster.run_code("self.id") == [1, 2]


async def test_reconnect_restarts_a_dead_worker_but_not_after_close(leftovers):
    async with Cluster.local(1) as cluster:
        (worker,) = cluster.workers
        await kill_daemon(worker)
        await worker.reconnect(PATIENCE_S)
        assert await worker.run_code("6 * 7") == 42
    with pytest.raises(ConnectError, match="the local workers were ended"):
        await worker.connect()
    assert leftovers() == ([], [])


async def kill_daemon(worker):
    running = asyncio.ensure_future(worker.run_method(sleep_long))
    os.kill((await worker.status()).pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await running


async def test_a_worker_that_is_killed_while_it_starts_is_started_again(monkeypatch, leftovers):
    usual, killed = Local._try_to_start, []

    async def try_to_start(self, *arguments):
        if not killed:
            killed.append(True)
            process = await asyncio.create_subprocess_exec("sleep", "1000")
            process.kill()
            return process, {}
        return await usual(self, *arguments)

    monkeypatch.setattr(Local, "_try_to_start", try_to_start)
    async with Cluster.local(2) as cluster:
        assert len(await cluster.run_method(process_id)) == 2
    assert leftovers() == ([], [])


async def test_a_worker_that_cannot_start_gives_the_reason_and_the_rest_end(tmp_path, monkeypatch, leftovers):
    (tmp_path / "numpy.py").write_text("raise ImportError('libopenblas.so.0 is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(
        ConnectError, match=r"a local worker cannot start its executor[\s\S]*libopenblas.so.0 is missing"
    ):
        await asyncio.wait_for(Cluster.local(2).connect(), PATIENCE_S)
    assert leftovers() == ([], [])


async def test_output_of_a_method_is_shown_even_if_the_worker_crashes_afterwards():
    script = """
import asyncio, os
from ddlf import Cluster

def speak():
    print("seen")
    os._exit(1)

async def main():
    async with Cluster.local(1) as cluster:
        await cluster.options(on_error="return").run_method(speak)

asyncio.run(main())
"""
    process = await start(script)
    output, errors = await process.communicate()
    assert output == b""
    assert "[worker 1] seen" in errors.decode().splitlines()


async def test_a_script_needs_no_guard_around_its_main_part(tmp_path):
    script = """
from ddlf import Cluster, run

def double(x):
    return 2 * x

cluster = run(Cluster.local(2).connect())
print(run(cluster.run_method(double, x=21)))
run(cluster.close())
"""
    path = tmp_path / "no_guard.py"
    path.write_text(script)
    process = await asyncio.create_subprocess_exec(sys.executable, str(path), stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    assert (output.decode(), process.returncode) == ("[42, 42]\n", 0)


MASTER = """
import asyncio, json, os
from ddlf import Cluster

def loop_indefinitely():
    while True:
        pass

async def main():
    async with Cluster.local(2) as cluster:
        pids = [[status.pid, status.executor_pid] for status in await cluster.status()]
        call = asyncio.ensure_future(cluster.run_method(loop_indefinitely))
        while not all(status.busy for status in await cluster.status()):
            pass
        print(json.dumps({"pids": sum(pids, []), "ports": [worker.port for worker in cluster.workers]}), flush=True)
        await call

asyncio.run(main())
"""


async def start(script):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(ending, marks=pytest.mark.slow) for ending in (signal.SIGTERM, signal.SIGINT))],
)
async def test_local_workers_end_with_their_master_after_any_signal(number, leftovers):
    master = await start(MASTER)
    facts = json.loads(await asyncio.wait_for(master.stdout.readline(), PATIENCE_S))
    assert all(psutil.pid_exists(pid) for pid in facts["pids"])
    master.send_signal(number)
    await master.communicate()
    for pid in facts["pids"]:
        end_of(pid)
    assert not any(is_listening(port) for port in facts["ports"])
    assert leftovers() == ([], [])


async def test_a_cancelled_start_leaves_no_process():
    workers = Local(1)
    try:
        await workers.start()
        starting = asyncio.ensure_future(workers._start_one(0))
        async with asyncio.timeout(PATIENCE_S):
            while len(workers._started) == 1:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0)
            starting.cancel()
            await workers._started[-1].wait()
    finally:
        await workers.stop()
