"""Tests of noticing a suspended executor (SIGSTOP). An executor that computes for a long time is not disturbed."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from ddlf.errors import ExecutorCrashed
from ddlf.testing import local_cluster
from ddlf.worker import daemon
from ddlf.worker.daemon import STOP_CHECK_S, StoppedFor, is_stopped
from tests.patience import PATIENCE_S

linux = sys.platform.startswith("linux")


def test_only_a_suspended_process_counts_and_only_while_it_is_watched(monkeypatch):
    stopped_now = {7}
    monkeypatch.setattr(daemon, "is_stopped", stopped_now.__contains__)
    judge = StoppedFor()
    assert [judge.check(pid) for pid in (None, 7, 7, 7)] == [0, 0, STOP_CHECK_S, 2 * STOP_CHECK_S]
    assert judge.check(8) == 0
    assert [judge.check(7) for _ in range(2)] == [0, STOP_CHECK_S]
    stopped_now.clear()
    assert judge.check(7) == 0


def test_the_state_of_a_process_is_read_for_any_process_name(tmp_path):
    odd = tmp_path / "a) T b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "1000"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid) == linux
        process.kill()
    assert not is_stopped(process.pid)


def hold_the_gil(seconds):
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "done"


def wait_indefinitely():
    import time

    time.sleep(10_000)


@pytest.mark.slow
async def test_a_stopped_executor_is_ended_and_a_busy_one_is_not():
    async with local_cluster(2, dead_after_s=1) as cluster:
        first, second = cluster.workers
        asking = asyncio.ensure_future(first.run_method(wait_indefinitely))
        busy = asyncio.ensure_future(second.run_method(hold_the_gil, 3))
        while not (await first.status()).busy:
            pass
        cluster.machine(1).freeze("executor")
        with pytest.raises(ExecutorCrashed, match=r"was stopped \(SIGSTOP\) for \d s, so its daemon ended it while it"):
            await asyncio.wait_for(asking, PATIENCE_S)
        assert await first.run_code("6 * 7") == 42
        assert await busy == "done"
