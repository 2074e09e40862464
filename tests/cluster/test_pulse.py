"""A master whose event loop is held up is not dead: its thread says so."""

import asyncio
import threading
import time

import pytest_asyncio

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import LeaseError
from tests.processes import python


def add(a, b):
    return a + b


@pytest_asyncio.fixture
async def quick(start_worker, token_file):
    """A worker that is given up after so long that a busy machine does not meet it."""
    process = start_worker()
    async with Cluster(["127.0.0.1"], process.port, token_file=token_file, dead_after_s=1.5) as cluster:
        yield cluster


def claim_elsewhere(worker):
    """Try to get the worker with an event loop of one's own, in another thread; returns what came of it."""

    async def claim():
        other = ProxyWorker(worker.host, worker.port, worker._link.token)
        try:
            await other.connect_control()
        except LeaseError as error:
            return error
        finally:
            await other.close()
        return None

    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(asyncio.run(claim())))
    thread.start()
    thread.join()
    return outcomes[0]


async def test_a_master_that_holds_up_its_event_loop_keeps_its_worker(quick):
    worker = quick.workers[0]
    await worker.run_method(add, a=1, b=2)
    epoch = worker.epoch
    time.sleep(2.5)  # noqa: ASYNC251
    refused = claim_elsewhere(worker)
    assert isinstance(refused, LeaseError)
    assert await quick.run_method(add, a=1, b=2) == [3]
    assert worker.epoch == epoch


async def test_what_runs_meanwhile_goes_on(quick):
    call = asyncio.ensure_future(quick.run_method(count_for, seconds=2.5))
    await quick.ping()
    time.sleep(2.2)  # noqa: ASYNC251
    assert await call == ["counted"]


def count_for(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "counted"


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
