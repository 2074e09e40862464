"""Tests of how a worker survives user code: crashes, endless loops and cancellation, in real processes."""

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.errors import ExecutorCrashed, RemoteError, RequestTimeout
from ddlf.rpc.messages import Request
from tests.patience import PATIENCE_S
from tests.processes import end_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

"""Upper limit, in seconds, for requests that must end immediately."""


def segfault():
    ctypes.string_at(0)


def exit_at_once():
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def abort():
    os.abort()


async def segfault_later():
    await asyncio.sleep(0)
    ctypes.string_at(0)


def add(a, b):
    return a + b


def process_id():
    return os.getpid()


def loop_indefinitely():
    while True:
        pass


def loop_and_say_so(self):
    self.data["state"] = "loops"
    try:
        while True:
            pass
    finally:
        self.data["state"] = "ended"


def loop_stubbornly(begun=""):
    while True:
        try:
            if begun:
                Path(begun).touch()
            while True:
                pass
        except BaseException:
            continue


def hold_the_gil():
    re.match(r"(a+)+$", "a" * 40 + "b")


async def await_then_loop():
    await asyncio.sleep(0)
    while True:
        pass


async def await_stubbornly(begun):
    while True:
        try:
            Path(begun).touch()  # noqa: ASYNC240
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


async def busy(worker, method=None):
    """Wait until the worker runs something."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            call = (await worker.status()).busy
            if call and method in (None, call.method):
                return call


@pytest.mark.parametrize(
    ("method", "signal_name", "exit_code", "words"),
    [
        (segfault, "SIGSEGV", None, "Segmentation fault"),
        (segfault_later, "SIGSEGV", None, "Segmentation fault"),
        (abort, "SIGABRT", None, "Aborted"),
        (exit_at_once, None, 3, "last words"),
        (kill_itself, "SIGKILL", None, ""),
    ],
)
async def test_a_crash_is_an_error_at_once_and_the_worker_stays_usable(cluster, method, signal_name, exit_code, words):
    first, second = cluster.workers
    before = await first.status()
    pid_of_second = await second.run_method(process_id)
    with pytest.raises(ExecutorCrashed) as caught:
        await asyncio.wait_for(first.run_method(method), PATIENCE_S)
    error = caught.value
    assert (error.signal, error.exit_code_of_process) == (signal_name, exit_code)
    assert words in error.stderr_tail
    assert str(error).startswith(f"worker 1 (127.0.0.1:{first.port}): the executor ")
    assert method.__name__ in str(error)
    assert await first.run_method(add, a=1, b=2) == 3
    after = await first.status()
    assert after.restarts == before.restarts + 1
    assert after.executor_pid != before.executor_pid
    assert after.pid == before.pid
    assert await second.run_method(process_id) == pid_of_second


async def test_a_crash_does_not_affect_the_method_and_connection_of_another_worker(cluster):
    first, second = cluster.workers
    gate = "import asyncio\nself.gate = asyncio.Event()"
    await second.run_code(gate)
    waiting = asyncio.ensure_future(second.run_method(wait_at_gate))
    await busy(second, "wait_at_gate")
    with pytest.raises(ExecutorCrashed):
        await first.run_method(segfault)
    await second.rpc(Request("run_method", open_gate))
    assert await waiting == "through"


async def wait_at_gate(self):
    await self.gate.wait()
    return "through"


def open_gate(self):
    self.gate.set()


open_gate.concurrent = True


async def test_killing_an_executor_from_outside_is_reported_as_a_crash(cluster):
    worker = cluster.workers[0]
    running = asyncio.ensure_future(worker.run_method(loop_indefinitely))
    await busy(worker)
    os.kill((await worker.status()).executor_pid, signal.SIGKILL)
    with pytest.raises(ExecutorCrashed, match=r"SIGKILL while it ran 'loop_indefinitely'.*memory"):
        await asyncio.wait_for(running, PATIENCE_S)
    assert await worker.run_method(add, a=1, b=2) == 3


async def test_a_worker_survives_many_crashes_in_a_row(cluster):
    worker = cluster.workers[0]
    for _ in range(6):
        with pytest.raises(ExecutorCrashed):
            await worker.run_method(exit_at_once)
    assert await worker.run_method(add, a=1, b=2) == 3


async def test_all_open_requests_of_a_crashed_executor_end(cluster):
    worker = cluster.workers[0]
    await worker.run_code("import asyncio\nself.gate = asyncio.Event()")
    calls = [worker.run_method(crash_at_gate), *(worker.run_method(add, a=1, b=n) for n in range(20))]
    open_requests = asyncio.gather(*calls, return_exceptions=True)
    await worker.run_method(look)
    with contextlib.suppress(ExecutorCrashed):
        await worker.run_method(open_gate)
    outcomes = await asyncio.wait_for(open_requests, PATIENCE_S)
    assert {type(outcome) for outcome in outcomes} == {ExecutorCrashed}


async def crash_at_gate(self):
    await self.gate.wait()
    segfault()


def look():
    return None


look.concurrent = True


async def test_hosted_methods_survive_a_crash_and_variables_do_not(cluster):
    worker = cluster.workers[0]
    await worker.add_method(add)
    await worker.rpc(Request("set_variable", "v", 1))
    with pytest.raises(ExecutorCrashed):
        await worker.run_method(segfault)
    assert await worker.run("add", a=1, b=2) == 3
    assert await worker.rpc(Request("list_variables")) == {}


async def test_sys_exit_is_an_ordinary_error_and_the_process_survives(cluster):
    worker = cluster.workers[0]
    pid = await worker.run_method(process_id)
    with pytest.raises(RemoteError, match="SystemExit: 7") as caught:
        await worker.run_method(sys_exit)
    assert caught.value.type_name == "SystemExit"
    assert await worker.run_method(process_id) == pid


def sys_exit():
    sys.exit(7)


async def test_a_memory_error_is_an_ordinary_error(cluster):
    worker = cluster.workers[0]
    with pytest.raises(MemoryError):
        await worker.run_method(use_up_memory)
    assert await worker.run_method(add, a=1, b=2) == 3


async def test_an_executor_without_memory_for_an_answer_crashes(cluster):
    """Regression test: the answer was lost, and the caller waited indefinitely."""
    worker = cluster.workers[0]
    with pytest.raises(ExecutorCrashed) as caught:
        await asyncio.wait_for(worker.run_method(leave_no_memory), PATIENCE_S)
    assert "no memory was left to answer a call" in caught.value.stderr_tail
    assert await worker.run_method(add, a=1, b=2) == 3


def leave_no_memory():
    from ddlf.worker import calls

    def encode(*arguments):
        raise MemoryError

    calls.dumps = encode


def use_up_memory():
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 64 * 1024**2, limit[1]))
    try:
        return len(bytearray(1024**3))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


async def test_processes_that_user_code_started_end_with_a_crashed_executor(cluster):
    worker = cluster.workers[0]
    child = await worker.run_method(start_a_child)
    with pytest.raises(ExecutorCrashed):
        await worker.run_method(kill_itself)
    assert await worker.run_method(add, a=1, b=2) == 3
    end_of(child)


def start_a_child():
    import subprocess

    return subprocess.Popen(["sleep", "600"], close_fds=False).pid


# -- a worker that is busy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [loop_indefinitely, hold_the_gil, await_then_loop])
async def test_ping_and_status_answer_while_a_method_blocks_and_a_cancelled_call_frees_the_worker(cluster, method):
    worker = cluster.workers[0]
    pid = await worker.run_method(process_id)
    running = asyncio.ensure_future(worker.run_method(method))
    assert (await busy(worker)).method == method.__name__
    await worker.ping()
    assert (await worker.status()).busy, "it is the daemon that answers, and does not wait for the method"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.wait_for(worker.run_method(process_id), PATIENCE_S) == pid


@pytest.mark.parametrize("method", [loop_indefinitely, await_then_loop])
async def test_a_call_is_interrupted_when_its_time_is_over(cluster, method):
    worker = cluster.workers[0]
    pid = await worker.run_method(process_id)
    with pytest.raises(RequestTimeout, match=f"'{method.__name__}' did not end within 0.2 s") as caught:
        await asyncio.wait_for(worker.rpc(Request("run_method", method), timeout_s=0.2), PATIENCE_S)
    assert caught.value.may_have_run
    assert await asyncio.wait_for(worker.run_method(process_id), PATIENCE_S) == pid


async def test_looping_code_is_interrupted_too(cluster):
    worker = cluster.workers[0]
    running = asyncio.ensure_future(worker.run_code("while True: pass"))
    assert (await busy(worker)).method == "run_code"
    running.cancel()
    assert await asyncio.wait_for(worker.run_code("1 + 1"), PATIENCE_S) == 2


async def test_a_looping_concurrent_method_is_interrupted_too(cluster):
    worker = cluster.workers[0]
    await worker.add_method(loop_and_say_so, concurrent=True)
    running = asyncio.ensure_future(worker.run("loop_and_say_so"))
    while await worker.run_code("self.data.get('state')") != "loops":
        pass
    assert (await worker.status()).busy is None, "others can run"
    running.cancel()
    while await worker.run_code("self.data['state']") != "ended":
        pass


@pytest.mark.parametrize("method", [loop_stubbornly, await_stubbornly])
async def test_a_method_that_ignores_the_interrupt_is_killed_and_a_new_executor_starts(cluster, method, tmp_path):
    worker = cluster.workers[0]
    pid = await worker.run_method(process_id)
    running = asyncio.ensure_future(worker.run_method(method, begun=str(tmp_path / "begun")))
    async with asyncio.timeout(PATIENCE_S):
        while not (tmp_path / "begun").exists():  # a method that is cancelled before it has begun simply ends
            await worker.status()
    id = (await busy(worker)).id
    assert await worker.ask("cancel", id, 0.2) == "killed"
    with pytest.raises(ExecutorCrashed):
        await running
    assert await worker.run_method(process_id) != pid


async def test_calls_waiting_behind_a_killed_method_run_in_the_new_executor(cluster, caplog):
    worker = cluster.workers[0]
    running = asyncio.ensure_future(worker.run_method(loop_stubbornly))
    id = (await busy(worker)).id
    waiting = asyncio.gather(*(worker.run_method(add, a=1, b=number) for number in range(5)), worker.run_code("1 + 1"))
    timed = asyncio.ensure_future(worker.rpc(Request("run_method", add, a=1, b=1), PATIENCE_S))
    assert await worker.ask("cancel", id, 0.2) == "killed"
    assert await asyncio.wait_for(waiting, PATIENCE_S) == [1, 2, 3, 4, 5, 2]
    assert await timed == 2
    with pytest.raises(
        ExecutorCrashed, match=r"ended by its daemon: 'loop_stubbornly' continued for 0\.2 s after it was"
    ):
        await running
    assert "'loop_stubbornly' continued for 0.2 s after it was cancelled" in caplog.text
    assert "the state that methods kept in it is lost" in caplog.text


async def test_calls_waiting_behind_a_crashed_one_report_that_they_have_not_begun(cluster, tmp_path):
    worker = cluster.workers[0]
    os.mkfifo(gate := tmp_path / "gate")
    calls = [worker.run_method(segfault_behind, str(gate)), *(worker.run_method(add, a=1, b=n) for n in range(3))]
    outcomes = asyncio.gather(*calls, return_exceptions=True)
    await busy(worker, "segfault_behind")  # the calls behind it were sent by then
    gate.write_text("open")
    crashed, *waited = await outcomes
    assert (type(crashed), crashed.may_have_run) == (ExecutorCrashed, True)
    for error in waited:
        assert (type(error), error.may_have_run) == (ExecutorCrashed, False)
        assert "SIGSEGV while it ran 'segfault_behind', before 'add' had begun" in str(error)


def segfault_behind(gate):
    with open(gate) as pipe:
        pipe.read()
    segfault()


async def test_a_concurrent_call_beside_a_crashed_one_may_have_run(cluster):
    worker = cluster.workers[0]
    await worker.run_code("import asyncio\nself.gate = asyncio.Event()")
    crashing = asyncio.ensure_future(worker.run_method(crash_at_gate))
    await busy(worker)
    concurrent_call = asyncio.ensure_future(worker.run_method(stay_beside))
    await worker.run_method(look)
    with contextlib.suppress(ExecutorCrashed):
        await worker.run_method(open_gate)
    outcomes = await asyncio.gather(crashing, concurrent_call, return_exceptions=True)
    assert [error.may_have_run for error in outcomes] == [True, True]


async def stay_beside(self):
    await asyncio.Event().wait()


stay_beside.concurrent = True


async def test_a_call_cancelled_behind_a_blocking_one_never_starts(cluster):
    worker = cluster.workers[0]
    await worker.run_method(clear_starts)
    first = asyncio.ensure_future(worker.run_method(loop_indefinitely))
    await busy(worker)
    second = asyncio.ensure_future(worker.run_method(note_start))
    third = asyncio.ensure_future(worker.run_method(add, a=1, b=2))
    await worker.ping()  # the second call has arrived by then
    second.cancel()
    await worker.ping()  # and so has its cancellation
    first.cancel()
    assert await asyncio.wait_for(third, PATIENCE_S) == 3
    assert await worker.run_method(starts) == []


def clear_starts(self):
    self.starts = []


def note_start(self):
    self.starts.append(1)


def starts(self):
    return self.starts


async def test_a_late_interrupt_does_not_hit_the_next_method(cluster):
    worker = cluster.workers[0]
    for _ in range(20):
        with contextlib.suppress(RequestTimeout):
            await worker.rpc(Request("run_method", loop_a_little), timeout_s=0.01)
        assert await worker.run_method(loop_a_little) == "done"


def loop_a_little():
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        pass
    return "done"


async def test_a_cleanup_after_an_interrupt_has_time_to_finish(cluster):
    worker = cluster.workers[0]
    running = asyncio.ensure_future(worker.run_method(loop_and_clean_up))
    await busy(worker)
    running.cancel()
    assert await asyncio.wait_for(worker.run_code("self.cleaned_up"), PATIENCE_S) is True


def loop_and_clean_up(self):
    self.cleaned_up = False
    try:
        while True:
            pass
    finally:
        time.sleep(0.2)
        self.cleaned_up = True


# -- inheritance by child processes -------------------------------------------------------------------------------------


async def test_no_token_is_in_the_environment_or_the_arguments_of_the_executor(new_processes):
    async with Cluster.local(1) as cluster:
        worker = cluster.workers[0]
        secret = worker._link.token.decode()
        status = await worker.status()
        process = psutil.Process(status.executor_pid)
        for member in (process, process.parent(), psutil.Process(status.pid)):
            assert secret not in " ".join(member.cmdline())
            assert secret not in " ".join(member.environ().values())


async def test_the_executors_connections_are_not_inherited_by_processes_that_user_code_starts(cluster):
    inherited = await cluster.workers[0].run_method(inheritable_descriptors)
    assert inherited == []


def inheritable_descriptors():
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and os.get_inheritable(int(name)):
                descriptors.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue
    return descriptors
