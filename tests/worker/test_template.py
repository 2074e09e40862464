"""Tests of executors that are forks of a template, a process that has imported their modules.

A fork must behave like a new process, and must not outlive its daemon.
"""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from ddlf.cluster.cluster import Cluster
from ddlf.errors import ExecutorCrashed, RemoteError, WorkerLost
from ddlf.worker import template
from ddlf.worker.activity import Activity
from ddlf.worker.process import UNKNOWN, Template
from ddlf.worker.status import Preloaded
from tests.daemons import connected, preload
from tests.patience import PATIENCE_S
from tests.processes import end_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("new_processes")]

MODULE = "module_that_says_where_it_was_imported"
SOURCE = "import os\nimported_in = os.getpid()\n"
FAILS = "module_that_cannot_be_imported"
THREADS = "module_with_a_thread"
MANY = "module_that_makes_many"


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """Write small modules, which the tests preload instead of Keras."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / f"{MODULE}.py").write_text(SOURCE)
    (folder / f"{MODULE}_2.py").write_text(SOURCE)
    (folder / f"{FAILS}.py").write_text("raise ImportError('libsomething.so is missing')\n")
    (folder / f"{THREADS}.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), name='pool', daemon=True).start()\n"
    )
    (folder / f"{MANY}.py").write_text(
        "import sys, types\n"
        "for name in map('one_of_many_{}'.format, range(40_000)):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared():
    async with Cluster.local(2) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared):
    """Yield a cluster of two workers with one template."""
    yield shared
    await shared.connect()
    await shared.clean()


def process_of_module(module):
    """Return the process id, the id of the parent, and the id of the process that imported the module."""
    return os.getpid(), os.getppid(), getattr(sys.modules.get(module), "imported_in", None)


# -- importing once -----------------------------------------------------------------------------------------------------


async def test_all_local_workers_have_a_module_from_one_import():
    cluster = Cluster.local(3)
    await cluster.connect(modules=[MODULE])
    async with cluster:
        await preload(cluster, MODULE)
        rows = await cluster.run_method(process_of_module, module=MODULE)
        (parent,) = {parent for _, parent, _ in rows}
        assert {imported_in for *_, imported_in in rows} == {parent}
        assert parent not in {pid for pid, *_ in rows}


async def test_calls_in_a_fork_do_not_copy_shared_modules():
    def private_mb():
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")) / 1024

    def look_at_all():
        return len([vars(module) for module in list(sys.modules.values())])

    async with Cluster.local(1) as cluster:
        await preload(cluster, MANY)
        await cluster.run_method(private_mb)
        (before,) = await cluster.run_method(private_mb)
        await cluster.run_method(look_at_all)
        (after,) = await cluster.run_method(private_mb)
    assert before < after / 2, "an earlier call has read the modules already"


async def test_an_idle_executor_is_replaced_by_one_that_has_the_module():
    async with Cluster.local(1) as cluster:
        (before,) = await cluster.status()
        await preload(cluster, MODULE)
        ((pid, parent, imported_in),) = await cluster.run_method(process_of_module, module=MODULE)
        assert (imported_in, pid != before.executor_pid) == (parent, True)
        (after,) = await cluster.status()
        assert (after.restarts, after.last_exit) == (0, None)  # the replacement does not count as a restart


async def test_a_killed_executor_is_back_without_an_import(cluster):
    await preload(cluster, MODULE)
    await cluster.workers[0].restart()  # it may have been used before
    pid, _, imported_in = await cluster.workers[0].run_method(process_of_module, MODULE)
    assert imported_in
    for _ in range(2):
        running = asyncio.ensure_future(cluster.workers[0].run_code("while True: pass"))
        while not (await cluster.workers[0].status()).busy:
            pass
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ExecutorCrashed, match="was ended by SIGKILL"):
            await running
        before, (pid, _, imported_at) = pid, await cluster.workers[0].run_method(process_of_module, MODULE)
        assert pid != before
        assert imported_at == imported_in


@pytest.mark.parametrize(
    "use",
    [
        lambda cluster: cluster.set_variable("kept", 1),
        lambda cluster: cluster.run_code("import sys; sys.kept = 1"),
        lambda cluster: cluster.run_method(process_of_module, module=MODULE),
    ],
    ids=["variable", "code", "method"],
)
async def test_an_executor_that_may_hold_something_is_not_replaced(use):
    async with Cluster.local(1) as cluster:
        await use(cluster)
        (before,) = await cluster.status()
        await preload(cluster, MODULE)
        assert (await cluster.status())[0].executor_pid == before.executor_pid


async def test_hosted_methods_survive_the_replacement():
    async with Cluster.local(1) as cluster:
        await cluster.add_method(process_of_module)
        await preload(cluster, MODULE)
        ((_, parent, imported_in),) = await cluster.run("process_of_module", module=MODULE)
        assert imported_in == parent


async def test_more_modules_can_be_preloaded_later():
    async with Cluster.local(1) as cluster:
        await preload(cluster, MODULE)
        await preload(cluster, MODULE, f"{MODULE}_2")
        ((_, parent, imported_in),) = await cluster.run_method(process_of_module, module=f"{MODULE}_2")
        assert imported_in == parent
        ((_, _, before),) = await cluster.run_method(process_of_module, module=MODULE)
        assert before not in (parent, None)  # the parent of this fork imported it


async def test_a_worker_that_was_started_alone_has_its_own_template(running):
    async with connected(running.port) as worker:
        _, parent, imported_in = await worker.run_method(process_of_module, MODULE)
        # no master asked for modules, so there is no fork of a template
        assert (parent, imported_in) == (os.getpid(), None)
        await worker.restart()
        await worker.ask("ping")
    async with connected(running.port) as worker:
        await worker.preload(MODULE)
        _, parent, imported_in = await worker.run_method(process_of_module, MODULE)
        assert imported_in == parent != os.getpid()
    async with connected(running.port) as worker:  # the next run
        await worker.preload(MODULE)
        assert (await worker.run_method(process_of_module, MODULE))[2] == imported_in


async def test_modules_to_preload_must_be_a_list_of_names(running):
    async with connected(running.port) as worker:
        for wrong in ("keras", [1], ["os; import sys"], None):
            with pytest.raises(RemoteError, match="preload takes a list of names of modules"):
                await worker.ask("preload", wrong)


# -- modules that make a fork unsafe ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "reason"),
    [(THREADS, "it has the threads MainThread, pool"), (FAILS, "ImportError: libsomething.so is missing")],
)
async def test_the_executor_itself_imports_modules_that_make_a_fork_unsafe(running, module, reason):
    async with connected(running.port) as worker:
        await worker.restart()
        for _ in range(2):
            assert await worker.ask("preload", [module], replace=True) == Preloaded(reason=reason, replaceable=False)
        assert await worker.run_code("1 + 1") == 2


async def test_an_open_accelerator_makes_a_fork_unsafe(monkeypatch):
    monkeypatch.setattr(template, "DEVICES", ("/dev/null",))
    with Path("/dev/null").open():  # noqa: ASYNC230
        assert template.fork_danger() == "it has /dev/null open"


async def test_without_a_template_executors_are_separate_processes(monkeypatch):
    monkeypatch.setenv("DDLF_FORK", "0")
    async with Cluster.local(1) as cluster:
        await preload(cluster, MODULE)
        (status,) = await cluster.status()
        ((_, parent, _),) = await cluster.run_method(process_of_module, module=MODULE)
        assert parent == status.pid


async def test_workers_survive_when_their_template_is_killed(descendants):
    async with Cluster.local(2) as cluster:
        await cluster.set_variable("kept", each=["A", "B"])
        (process,) = (
            candidate
            for candidate in descendants()
            if "ddlf.worker.template" in candidate.cmdline() and candidate.ppid() == os.getpid()
        )
        process.kill()
        assert await cluster.get_variable("kept") == ["A", "B"]
        await preload(cluster, MODULE)
        with pytest.raises(
            ExecutorCrashed, match="has ended for an unknown reason, because the process that started it has ended, too"
        ):
            await cluster.workers[0].run_code("import os; os._exit(3)")
        assert await cluster.workers[0].run_code("1 + 1") == 2
        assert await cluster.options(workers=[2]).get_variable("kept") == ["B"]


async def test_a_template_that_does_not_answer_is_not_waited_for(monkeypatch, lone_template, tmp_path):
    monkeypatch.setattr("ddlf.worker.process.FORK_S", 0.0)
    forked, channel = await fork(lone_template, tmp_path)
    assert forked is None
    channel.close()


async def test_a_killed_import_does_not_prevent_the_next_one(tmp_path, monkeypatch):
    flag = tmp_path / "again"
    (tmp_path / "killed_once.py").write_text(
        f"import os, signal\nif not os.path.exists({str(flag)!r}):\n"
        f"    open({str(flag)!r}, 'w').close()\n    os.kill(os.getpid(), signal.SIGKILL)\nimported_in = os.getpid()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    async with Cluster.local(1) as cluster:
        await preload(cluster, "killed_once")
        assert (await cluster.run_method(process_of_module, module="killed_once"))[0][2] is None
        await cluster.workers[0].restart()
        await preload(cluster, "killed_once")
        assert (await cluster.run_method(process_of_module, module="killed_once"))[0][2]


# -- as good as new processes -------------------------------------------------------------------------------------------


async def test_each_fork_has_its_own_randomness_session_folder_and_name(cluster):
    def facts():
        import random
        import secrets
        import threading

        return {
            "random": random.random(),
            "numpy": np.random.rand(),
            "secret": secrets.token_hex(8),
            "folder": tempfile.gettempdir(),
            "name": Path("/proc/self/comm").read_text(),
            "group": os.getpgid(0),
            "pid": os.getpid(),
            "session": os.getsid(0),
            "threads": threading.active_count(),
            "files": sorted(os.listdir("/proc/self/fd")),
            "interrupt": callable(signal.getsignal(signal.SIGTERM)),
            "frozen": __import__("gc").get_freeze_count() > 0,
            "collects": __import__("gc").isenabled(),
        }

    first, second = await cluster.run_method(facts)
    for name in ("random", "numpy", "secret", "folder", "name", "pid"):
        assert first[name] != second[name], name
    for worker, fork_facts in zip(cluster.workers, (first, second), strict=True):
        assert fork_facts["name"] == f"ddlf-exec:{worker.port}\n"
        assert fork_facts["pid"] == fork_facts["group"] == fork_facts["session"]
        assert (fork_facts["threads"], fork_facts["interrupt"]) == (1, True)
        assert (fork_facts["frozen"], fork_facts["collects"]) == (True, True)
    assert first["files"] == second["files"]


async def test_a_fork_has_only_its_own_descriptors():
    """A second copy of a connection would keep it open after its worker ended, so other workers would not see the end."""

    def pipes_and_sockets():
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")
        ]
        return [link for link in links if link.startswith(("pipe:", "socket:"))]

    async with Cluster.local(3) as cluster:
        first, *other_forks = map(set, await cluster.run_method(pipes_and_sockets))
        assert not first.intersection(*other_forks)
        assert not any(links_of_fork & links_of_other for links_of_fork in (first,) for links_of_other in other_forks)


async def test_exit_codes_signals_and_last_output_are_reported_for_the_executor(cluster):
    worker = cluster.workers[0]
    with pytest.raises(ExecutorCrashed, match="ended with exit code 3") as caught:
        await worker.run_code("import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos._exit(3)")
    assert "last words" in caught.value.stderr_tail
    with pytest.raises(ExecutorCrashed, match="was ended by SIGSEGV") as caught:
        await worker.run_code("import faulthandler; faulthandler._sigsegv()")
    assert caught.value.signal == "SIGSEGV"
    assert "Fatal Python error: Segmentation fault" in caught.value.stderr_tail


async def test_a_method_that_blocks_is_interrupted(cluster):
    running = asyncio.ensure_future(cluster.workers[0].run_code("while True: pass"))
    while not (await cluster.workers[0].status()).busy:
        pass
    pid = (await cluster.workers[0].status()).executor_pid
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    while (await cluster.workers[0].status()).busy:
        pass
    assert (await cluster.workers[0].status()).executor_pid == pid


async def processes(worker):
    status = await worker.status()
    return status.pid, status.executor_pid


# -- nothing outlives its daemon ----------------------------------------------------------------------------------------


async def test_a_looping_executor_ends_after_its_daemon_was_killed(descendants):
    async with Cluster.local(2) as cluster:
        running = asyncio.ensure_future(cluster.workers[0].run_code("while True: pass"))
        while not (await cluster.workers[0].status()).busy:
            pass
        daemon, executor = await processes(cluster.workers[0])
        os.kill(daemon, signal.SIGKILL)
        end_of(executor)
        with pytest.raises(WorkerLost):
            await running
        assert await cluster.workers[1].run_code("1 + 1") == 2
    assert descendants() == []


async def test_a_looping_executor_ends_after_its_template_and_its_daemon_were_killed(descendants):
    async with Cluster.local(1) as cluster:
        running = asyncio.ensure_future(cluster.workers[0].run_code("while True: pass"))
        while not (await cluster.workers[0].status()).busy:
            pass
        daemon, executor = await processes(cluster.workers[0])
        (process,) = (
            candidate
            for candidate in descendants()
            if "ddlf.worker.template" in candidate.cmdline() and candidate.ppid() == os.getpid()
        )
        process.kill()
        os.kill(daemon, signal.SIGKILL)
        end_of(executor)
        with pytest.raises(WorkerLost):
            await running


async def test_an_ended_executor_is_released_when_the_next_one_starts(running):
    forks = running.daemon.process._forks
    assert await forks.preload((MODULE,)) == ""
    ended = forks._template
    ended._process.kill()
    ended._process.wait(PATIENCE_S)
    assert await forks.preload((MODULE,)) == ""
    assert forks._template is not ended
    assert ended.fileno() == -1


async def test_processes_of_user_code_end_with_the_executor(cluster):
    def start():
        import subprocess

        return subprocess.Popen(["sleep", "1000"]).pid

    child = await cluster.workers[0].run_method(start)
    with pytest.raises(ExecutorCrashed):
        await cluster.workers[0].run_code("import os; os._exit(1)")
    end_of(child)


async def test_a_closed_cluster_leaves_no_process_also_while_the_template_imports(tmp_path, monkeypatch, descendants):
    (tmp_path / "imports_for_ever.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    cluster = Cluster.local(1)
    await cluster.connect(modules=["imports_for_ever"])
    async with cluster:
        preloading = asyncio.ensure_future(preload(cluster, "imports_for_ever"))
        assert await cluster.run_code("1 + 1") == [2]  # a call does not wait for an import that it does not need
    await asyncio.gather(preloading, return_exceptions=True)
    assert descendants() == []


# -- the connection of a template to its clients ------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module")
async def lone_template(modules):
    template = Template.start(dict(os.environ))
    yield template
    await template.close()


async def fork(lone_template, folder):
    """Start an executor without a daemon; it waits for its settings."""
    parent_end, child_end = socket.socketpair()
    page = Activity.create()
    try:
        with child_end, (folder / "log").open("w+b") as log:
            return await lone_template.fork(
                {"TMPDIR": str(folder)}, child_end.fileno(), page, 1, log.fileno()
            ), parent_end
    except BaseException:
        parent_end.close()
        raise
    finally:
        os.close(page)


async def test_the_end_of_a_fork_is_reported_once_and_its_pid_is_kept_until_its_release(lone_template, tmp_path):
    forked, channel = await fork(lone_template, tmp_path)
    channel.close()
    assert await forked.wait() == 0
    assert forked.returncode == 0
    assert psutil.Process(forked.pid).status() == psutil.STATUS_ZOMBIE
    forked.release()
    forked.release()
    end_of(forked.pid)


async def test_a_released_fork_ends(lone_template, tmp_path):
    forked, channel = await fork(lone_template, tmp_path)
    forked.release()
    end_of(forked.pid)
    channel.close()


async def test_a_fork_outlives_its_template_and_its_end_is_noticed(lone_template, tmp_path):
    forked, channel = await fork(lone_template, tmp_path)
    lone_template.kill()
    assert forked.returncode is None
    channel.close()
    assert await forked.wait() == UNKNOWN
    forked.release()


async def test_a_template_that_cannot_start_gives_no_forks(tmp_path, modules):
    (tmp_path / "numpy.py").write_text("raise ImportError\n")
    template = Template.start({**os.environ, "PYTHONPATH": str(tmp_path)})
    forked, channel = await fork(template, tmp_path)
    assert forked is None
    assert await template.preload((MODULE,)) == "the template has ended"
    channel.close()
    await template.close()


async def test_a_caller_that_gives_up_leaves_no_process(lone_template, tmp_path):
    for steps in (0, 1, 2):
        task = asyncio.ensure_future(fork(lone_template, tmp_path))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    process = psutil.Process(lone_template._process.pid)
    forked, channel = await fork(lone_template, tmp_path)
    async with asyncio.timeout(PATIENCE_S):
        while [child.pid for child in process.children()] != [forked.pid]:  # noqa: ASYNC110 - the kernel has no event
            await asyncio.sleep(0)
    forked.release()
    channel.close()
