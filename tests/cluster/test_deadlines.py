"""Tests of deadlines of requests.

A deadline holds while a request waits for a connection, and ``may_have_run`` is true if the request may have run.
"""

import asyncio
import time

import pytest

from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import LeaseError, RequestTimeout, WorkerLost
from ddlf.testing import in_process_cluster
from tests.patience import PATIENCE_S

WAIT = "import asyncio; await asyncio.sleep(60)"


@pytest.fixture
async def cluster():
    async with in_process_cluster(1, proxied=True) as cluster:
        yield cluster


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the other side has no event
            await asyncio.sleep(0.005)


async def without_data_connection(cluster):
    """Cut all data connections, but not the control connection. Return the worker and its proxy."""
    worker, proxy = cluster.workers[0], cluster.machine(1).proxy
    proxy.partition(kind="data")
    proxy.reset(kind="data")
    await until(lambda: worker._link.data is None)
    return worker, proxy


@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_deadline_holds_while_the_data_connection_is_opened_again(cluster, idempotent):
    worker, _ = await without_data_connection(cluster)
    view = cluster.options(timeout_s=0.3, idempotent=idempotent)
    with pytest.raises(RequestTimeout, match=r"'1 \+ 1' could not be sent within 0.3 s") as raised:
        await asyncio.wait_for(view.run_code("1 + 1"), PATIENCE_S)
    assert raised.value.may_have_run is False
    assert raised.value.worker == worker.name


async def test_opening_a_connection_continues_when_waiting_requests_time_out(cluster):
    _, proxy = await without_data_connection(cluster)
    before = proxy.connections
    results = await asyncio.gather(
        *(cluster.options(timeout_s=0.1 + 0.01 * n).run_code("1") for n in range(5)), return_exceptions=True
    )
    assert [type(result) for result in results] == [RequestTimeout] * 5
    assert proxy.connections <= before + 1
    proxy.heal()
    assert await cluster.run_code("2") == [2]
    assert proxy.connections <= before + 1


async def test_requests_that_wait_for_a_connection_end_when_the_cluster_is_closed(cluster):
    await without_data_connection(cluster)
    waiting = asyncio.ensure_future(cluster.run_code("1"))
    await asyncio.sleep(0.05)
    await cluster.close()
    with pytest.raises(WorkerLost, match="closed on this side") as raised:
        await waiting
    assert raised.value.may_have_run is False


async def test_an_idempotent_request_keeps_its_deadline_during_a_reconnect(cluster):
    worker, proxy = cluster.workers[0], cluster.machine(1).proxy
    proxy.partition()
    proxy.reset()
    await until(lambda: not worker.connected)
    reconnecting = asyncio.ensure_future(worker.reconnect())
    await asyncio.sleep(0)
    with pytest.raises(WorkerLost):
        await cluster.options(timeout_s=0.3, idempotent=True).run_code("1")
    assert not reconnecting.done()
    reconnecting.cancel()
    await asyncio.gather(reconnecting, return_exceptions=True)


@pytest.mark.slow
async def test_an_error_names_the_whole_deadline_including_the_wait_for_the_connection(cluster):
    _, proxy = await without_data_connection(cluster)
    waiting = asyncio.ensure_future(cluster.options(timeout_s=6).run_code(WAIT))
    await asyncio.sleep(2)
    proxy.heal()
    begin = time.monotonic()
    with pytest.raises(RequestTimeout, match=r"did not end within 6 s"):
        await waiting
    assert time.monotonic() - begin < 6, "the deadline did not restart"


async def test_a_retried_request_may_have_run_although_another_master_has_the_worker_now(cluster):
    worker, proxy, daemon = cluster.workers[0], cluster.machine(1).proxy, cluster.machine(1)._daemon
    running = asyncio.ensure_future(cluster.options(idempotent=True).run_code(WAIT))
    while not (await worker.status()).busy:
        pass
    proxy.partition()
    proxy.reset()
    await until(lambda: not worker.connected and daemon.status().lease is None)
    second_master = ProxyWorker("127.0.0.1", daemon.port, worker._link.token)
    await second_master.connect()
    proxy.heal()
    with pytest.raises(LeaseError, match=r"leased by|was taken over by") as raised:
        await asyncio.wait_for(running, PATIENCE_S)
    assert raised.value.may_have_run is True
    await second_master.close()


async def test_a_request_that_cannot_be_sent_ends_with_a_single_error(cluster):
    worker = cluster.workers[0]
    futures = []

    def send(*_):
        futures.extend(worker._link.data.pending.values())
        worker._link.drop(WorkerLost("gone"))
        raise ConnectionResetError("reset")

    worker._link.data.stream.send = send
    with pytest.raises(WorkerLost) as raised:
        await cluster.run_code("1")
    assert raised.value.may_have_run is False
    assert [future.cancelled() or future._log_traceback for future in futures] == [False]
