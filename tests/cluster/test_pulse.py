"""Tests of the thread that sends heartbeats while the event loop of a master is blocked."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import LeaseError
from tests.patience import PATIENCE_S
from tests.processes import python

DEAD_S = 4.0
"""The default value, which is so long that a busy machine does not reach it."""


def add(a, b):
    return a + b


def claim_elsewhere(worker):
    """Try to claim the worker in another thread with its own event loop. Return the error, or None."""

    async def claim():
        second_master = ProxyWorker(worker.host, worker.port, worker._link.token)
        try:
            await second_master.connect_control()
        except LeaseError as error:
            return error
        finally:
            await second_master.close()
        return None

    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(asyncio.run(claim())))
    thread.start()
    thread.join()
    return outcomes[0]


@pytest.mark.slow
async def test_a_master_with_a_blocked_event_loop_keeps_its_worker_and_running_method(start_worker, token_file):
    async with Cluster(["127.0.0.1"], start_worker().port, token_file=token_file, dead_after_s=10_000) as patient:
        # the thread sleeps for long heartbeats now, and must notice the shorter ones of the next cluster
        await patient.ping()
    process = start_worker()
    async with Cluster(["127.0.0.1"], process.port, token_file=token_file, dead_after_s=DEAD_S) as cluster:
        worker = cluster.workers[0]
        epoch = worker.epoch
        call = asyncio.ensure_future(cluster.run_method(wait, seconds=DEAD_S + 1))
        await cluster.ping()
        time.sleep(DEAD_S + 1)  # noqa: ASYNC251
        assert isinstance(claim_elsewhere(worker), LeaseError)
        assert await call == ["waited"]
        assert worker.epoch == epoch


def wait(seconds):
    time.sleep(seconds)
    return "waited"


def test_a_worker_is_free_after_its_masters_event_loop_closed_without_the_cluster(start_worker, token_file):
    process = start_worker()
    arguments = f"['127.0.0.1'], {process.port}, token_file={str(token_file)!r}, dead_after_s=0.4"
    code = (
        f"import asyncio, ddlf; cluster = ddlf.Cluster({arguments}); asyncio.run(cluster.connect()); print(); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as master:
        try:
            assert master.stdout.readline() == b"\n"
            (worker,) = Cluster(["127.0.0.1"], process.port, token_file=token_file).workers
            limit = time.monotonic() + PATIENCE_S
            while (refused := claim_elsewhere(worker)) and time.monotonic() < limit:
                assert isinstance(refused, LeaseError)
            assert refused is None
            assert master.poll() is None
        finally:
            master.kill()


async def test_the_thread_ends_with_the_last_cluster_of_its_process(start_worker, token_file):
    process = start_worker()
    code = (
        "import asyncio, threading\n"
        "from ddlf import Cluster\n"
        "async def main():\n"
        f"    async with Cluster(['127.0.0.1'], {process.port}, token_file={str(token_file)!r}, dead_after_s=0.4):\n"
        "        print('ddlf-pulse' in [t.name for t in threading.enumerate()])\n"
        "asyncio.run(main())\n"
        "[t.join(5) for t in threading.enumerate() if t.name == 'ddlf-pulse']\n"
        "print('ddlf-pulse' in [t.name for t in threading.enumerate()])\n"
    )
    assert python(code) == "True\nFalse\n"
