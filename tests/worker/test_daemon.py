"""Tests of the daemon of a worker: its start, its end, its memory, and how it keeps an executor running."""

import asyncio
import ctypes
import errno
import gc
import os
import signal
import sys

import psutil
import pytest
import pytest_asyncio

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import ConfigError, ConnectError, ExecutorCrashed, WorkerLost
from ddlf.rpc.dial import dial
from ddlf.rpc.handshake import Role
from ddlf.testing.network import FaultProxy
from ddlf.worker.daemon import Daemon
from ddlf.worker.executor_process import MAX_START_FAILURES
from ddlf.worker.options import Options
from ddlf.worker.source import source
from tests.daemons import TOKEN, RunningDaemon, connected
from tests.patience import PATIENCE_S
from tests.processes import copied_package, end_of, is_listening

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("new_processes")]

# -- starting and ending ------------------------------------------------------------------------------------------------


async def test_a_state_folder_that_cannot_be_used_is_named(tmp_path, own_folders):
    (tmp_path / "file").write_text("")
    before = set((own_folders / "tmp").iterdir())
    with pytest.raises(ConfigError, match=r"the state folder .*file cannot be used.*--state-dir"):
        Daemon(Options("127.0.0.1", 0, (TOKEN,), tmp_path / "file"))
    assert set((own_folders / "tmp").iterdir()) <= before


async def test_a_daemon_that_ends_leaves_no_process_port_folder_or_descriptor(tmp_path, own_folders):
    # The first daemon opens some descriptors that stay open until this process ends, and remains of other tests may
    # open some during the loop. A leak of the daemon itself shows in every round.
    for _ in range(5):
        gc.collect()
        descriptors = set(os.listdir("/proc/self/fd"))
        folders = set((own_folders / "tmp").iterdir())
        running = RunningDaemon(tmp_path)
        await running.ready.wait()
        pid = running.daemon.status().executor_pid
        await running.end()
        assert not psutil.pid_exists(pid)
        assert not is_listening(running.port)
        assert set((own_folders / "tmp").iterdir()) == folders
        if (leaked := set(os.listdir("/proc/self/fd")) - descriptors) == set():
            break
    assert leaked == set()


async def test_a_daemon_can_be_stopped_before_its_executor_is_ready(tmp_path, own_folders):
    folders = set((own_folders / "tmp").iterdir())
    running = RunningDaemon(tmp_path)
    await asyncio.sleep(0)
    await running.end()
    assert set((own_folders / "tmp").iterdir()) == folders


async def test_without_a_state_folder_nothing_outlives_the_daemon(tmp_path, own_folders):
    folders = set((own_folders / "tmp").iterdir())
    states = set((own_folders / "state").rglob("*"))
    running = RunningDaemon(tmp_path, state_dir=None)
    await running.ready.wait()
    async with connected(running.port) as worker:
        await worker.add_method(add, persist=True)
        assert await worker.run("add", a=1, b=2) == 3
    await running.end()
    assert set((own_folders / "tmp").iterdir()) == folders
    assert set((own_folders / "state").rglob("*")) == states


def add(a, b):
    return a + b


# -- the executor -------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken_numpy(tmp_path, monkeypatch):
    """An environment in which every executor crashes at its start; it can be repaired."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "numpy.py").write_text("raise ImportError('libopenblas.so.0 is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return folder / "numpy.py"


async def test_an_executor_that_crashes_at_every_start_is_given_up_with_its_last_words(tmp_path, broken_numpy):
    running = RunningDaemon(tmp_path)
    await asyncio.wait_for(running.ready.wait(), PATIENCE_S)
    assert running.daemon.status().executor == "failed"
    assert running.daemon.status().restarts == MAX_START_FAILURES - 1
    assert "libopenblas.so.0 is missing" in running.daemon.failure
    worker = ProxyWorker("127.0.0.1", running.port, TOKEN)
    with pytest.raises(ExecutorCrashed, match=r"cannot start its executor.*exit code 1.*ddlf stop --restart") as caught:
        await worker.connect()
    assert "libopenblas.so.0 is missing" in str(caught.value)
    assert running.daemon.status().restarts == MAX_START_FAILURES - 1  # there was no further attempt
    broken_numpy.unlink()
    await worker.restart()
    await worker.connect()
    assert await worker.run_method(add, a=1, b=2) == 3
    await worker.close()
    await running.end()


async def test_a_failed_process_start_is_tried_again(tmp_path, monkeypatch):
    start, failures = asyncio.create_subprocess_exec, [OSError(errno.EAGAIN, "no more processes")] * 2

    async def fail_at_first(*arguments, **options):
        if failures:
            raise failures.pop()
        return await start(*arguments, **options)

    monkeypatch.setattr("ddlf.worker.executor_process.START_RETRY_S", 0)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail_at_first)
    running = RunningDaemon(tmp_path)
    await asyncio.wait_for(running.ready.wait(), PATIENCE_S)
    assert running.daemon.status().executor == "ready"
    assert [line for line in running.lines if "could not be started: no more processes" in line] == running.lines
    await running.end()


async def test_a_late_report_of_a_crash_is_not_taken_for_a_crash_of_the_next_executor(running, monkeypatch):
    # otherwise a busy machine may deliver the event too late
    monkeypatch.setattr("ddlf.cluster.link.NEWS_S", PATIENCE_S)
    async with FaultProxy("127.0.0.1", running.port) as network, connected(network.port) as worker:
        await worker.run_method(add, a=1, b=2)
        network.partition("to_master", kind="control")
        killed = asyncio.ensure_future(worker.run_method(kill_itself))
        await running.line_with("executor was ended by SIGKILL; starting a new one")
        assert await worker.run_method(add, a=1, b=2) == 3, "the new executor answers"
        network.heal()
        with pytest.raises(ExecutorCrashed, match="SIGKILL while it ran 'kill_itself'") as caught:
            await killed
        assert caught.value.may_have_run
        with pytest.raises(ExecutorCrashed, match="SIGSEGV while it ran 'segfault'") as caught:
            await worker.run_method(segfault)
        assert caught.value.may_have_run


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def segfault():
    ctypes.string_at(0)


async def test_restart_starts_a_new_executor_that_knows_the_hosted_methods(running):
    async with connected(running.port) as worker:
        await worker.add_method(add)
        before = (await worker.status()).executor_pid
        await worker.restart()
        assert await worker.run("add", a=1, b=2) == 3
        assert (await worker.status()).executor_pid != before
        await worker.remove_method("add")


async def test_status_describes_the_executor_and_its_methods(running):
    async with connected(running.port) as worker:
        status = await worker.status()
    assert status.executor == "ready"
    assert status.busy is None
    assert status.pid == os.getpid()
    assert status.insecure_plaintext is False
    assert status.masters >= 1


# -- several masters, one after another ---------------------------------------------------------------------------------

MASTER = """
import asyncio, sys
from ddlf.cluster.proxy import ProxyWorker

def loop_indefinitely():
    while True:
        pass

async def main():
    worker = ProxyWorker("127.0.0.1", int(sys.argv[1]), sys.argv[2].encode())
    await worker.connect()
    await asyncio.gather(*(worker.run_method(loop_indefinitely) for _ in range(3)))

asyncio.run(main())
"""


async def test_a_worker_whose_master_was_killed_while_a_method_looped_serves_the_next_master(running):
    master = await asyncio.create_subprocess_exec(sys.executable, "-c", MASTER, str(running.port), TOKEN.decode())
    async with asyncio.timeout(PATIENCE_S):
        async with connected(running.port, guest=True) as looker:
            while not (await looker.status()).busy:
                pass
        pid = running.daemon.status().executor_pid
        master.kill()
        await master.wait()
        async with connected(running.port) as worker:
            assert await worker.run_method(add, a=1, b=2) == 3
    assert running.daemon.status().executor_pid == pid


async def test_a_master_that_disconnects_does_not_end_a_method_of_another_master(running):
    async with connected(running.port) as first:
        await first.run_code("import asyncio\nself.gate = asyncio.Event()")
        waiting = asyncio.ensure_future(first.run_method(wait_at_gate))
        async with connected(running.port, guest=True) as second:
            assert await second.run_method(add_concurrently, a=1, b=2) == 3
        opened = asyncio.ensure_future(first.run_method(open_gate))
        assert await asyncio.wait_for(waiting, PATIENCE_S) == "through"
        await opened


def add_concurrently(a, b):
    return a + b


add_concurrently.concurrent = True


async def wait_at_gate(self):
    await self.gate.wait()
    return "through"


def open_gate(self):
    self.gate.set()


open_gate.concurrent = True


# -- as a process -------------------------------------------------------------------------------------------------------


async def test_a_daemon_at_work_has_loaded_no_library_of_numpy(cluster_with_arrays):
    worker, pid = cluster_with_arrays
    libraries = {os.path.basename(region.path) for region in psutil.Process(pid).memory_maps()}
    assert not [name for name in libraries if "multiarray" in name or "openblas" in name]
    assert await worker.ping() < 5


@pytest_asyncio.fixture(loop_scope="module")
async def cluster_with_arrays(start_worker, token_file):
    """Start a worker process and send it arrays; yield the cluster and the process id of the daemon."""
    import numpy as np

    process = start_worker()
    async with Cluster(["127.0.0.1"], [process.port], token_file=token_file) as cluster:
        await cluster.run_method(add, a=np.ones(100_000), b=1)
        yield cluster.workers[0], process.process.pid


async def test_killing_the_daemon_ends_its_executor_and_the_master_sees_it(start_worker, token_file):
    process = start_worker()
    async with Cluster(["127.0.0.1"], [process.port], token_file=token_file) as cluster:
        worker = cluster.workers[0]
        executor = (await worker.status()).executor_pid
        waiting = asyncio.ensure_future(worker.run_method(loop_indefinitely))
        await worker.ping()
        process.end(signal.SIGKILL)
        with pytest.raises(WorkerLost, match="the connection was lost") as caught:
            await asyncio.wait_for(waiting, PATIENCE_S)
        assert caught.value.may_have_run
        with pytest.raises(WorkerLost, match="the connection was lost; connect again") as caught:
            await worker.run_method(add, a=1, b=2)
        assert not caught.value.may_have_run
    end_of(executor)


def loop_indefinitely():
    while True:
        pass


async def test_persistent_methods_survive_a_restart_on_the_same_port(start_worker, token_file, tmp_path):
    first = start_worker(state_dir=tmp_path / "state")
    async with Cluster(["127.0.0.1"], [first.port], token_file=token_file) as cluster:
        await cluster.add_method(add, persist=True)
        await cluster.add_method(loop_indefinitely)
    assert first.end() == 0
    second = start_worker(port=first.port, state_dir=tmp_path / "state")
    assert second.port == first.port, second.output
    async with Cluster(["127.0.0.1"], [first.port], token_file=token_file) as cluster:
        assert await cluster.methods() == [["add"]]
        assert await cluster.run("add", a=1, b=2) == [3]


async def test_a_worker_reports_the_source_that_it_started_with(start_worker, token_file, tmp_path):
    package = copied_package(tmp_path)
    edited = start_worker(PYTHONPATH=str(tmp_path))
    (package / "rpc/iworker.py").write_text("# edited while the worker runs\n")
    async with Cluster(
        ["127.0.0.1"] * 2, [edited.port, start_worker().port], token_file=token_file, guest=True
    ) as both:
        assert [await worker.ask("source") for worker in both.workers] == [source()._asdict()] * 2


async def test_the_port_of_an_ended_daemon_refuses_connections(start_worker, token_file):
    process = start_worker()
    async with Cluster(["127.0.0.1"], [process.port], token_file=token_file) as cluster:
        await cluster.shutdown()
    assert process.process.wait(PATIENCE_S) == 0
    with pytest.raises(ConnectError, match="connection refused"):
        await dial("127.0.0.1", process.port, Role.CONTROL, TOKEN, max_message_bytes=1000)


# -- cleaning up -----------------------------------------------------------------------------------------------------


def make_file():
    import tempfile

    return tempfile.mkstemp()[1]


async def test_temporary_files_of_methods_are_removed_with_their_executor(own_folders):
    async with Cluster.local(1) as cluster:
        first = (await cluster.run_method(make_file))[0]
        assert os.path.exists(first)  # noqa: ASYNC240
        await cluster.workers[0].restart()
        second = (await cluster.run_method(make_file))[0]
        assert not os.path.exists(first)  # noqa: ASYNC240
    assert not os.path.exists(second)  # noqa: ASYNC240


async def test_the_next_daemon_removes_the_folder_of_a_killed_one(start_worker, own_folders):
    def folders():
        return {path for path in (own_folders / "tmp").glob("ddlf-*") if (path / "lock").exists()}

    before = folders()
    worker = start_worker()
    leftovers = folders() - before
    assert len(leftovers) == 1
    worker.end(signal.SIGKILL)
    assert leftovers <= folders()
    second_daemon = start_worker()
    assert not leftovers & folders()
    second_daemon.end()
    assert folders() == before
