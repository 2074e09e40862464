"""What a cluster tells of its workers, whether they train or are called."""

import asyncio

import pytest

from ddlf.cluster.launch.launcher import Cause, Left
from ddlf.errors import ConnectError, ExecutorCrashed, ProtocolError, WorkerLost
from ddlf.events import (
    ExecutorEnded,
    PhaseBegan,
    PhaseEnded,
    PhaseEvent,
    WorkerConnected,
    WorkerDisconnected,
    WorkerNotReached,
)
from ddlf.rpc.messages import Request
from ddlf.testing import in_process_cluster
from tests.patience import PATIENCE_S


def of(kind, told):
    return [event for event in told if isinstance(event, kind)]


async def test_a_cluster_tells_who_is_connected_and_who_is_left():
    cluster, told, of_second = in_process_cluster(2), [], []
    take_off = cluster.subscribe(told.append)
    cluster.options(workers=[2]).subscribe(of_second.append)
    async with cluster:
        connected = sorted(of(WorkerConnected, told), key=lambda event: event.worker)  # all are dialled at once
        assert [(event.worker, event.name, event.again) for event in connected] == [
            (1, "worker 1", False),
            (2, "worker 2", False),
        ]
        first = connected[0]
        assert first.address == f"127.0.0.1:{cluster.workers[0].port}"
        assert min(first.cores, first.threads) >= 1
        before = list(told)
        await cluster.connect()
        assert told == before
    assert sorted((event.worker, event.why) for event in of(WorkerDisconnected, told)) == [(1, ""), (2, "")]
    assert {event.worker for event in of_second} == {0, 2}  # 0 is for all: they start
    await cluster.connect()
    assert [event.again for event in of(WorkerConnected, told)[2:]] == [True, True]
    take_off()
    told.clear()
    await cluster.close()
    assert told == []
    assert len(of(WorkerDisconnected, of_second)) == 2


async def test_a_cluster_tells_whom_it_waits_for_while_it_starts_and_connects():
    cluster, told = in_process_cluster(2), []
    cluster.subscribe(told.append)
    async with cluster:
        phases = of(PhaseEvent, told)
    assert {(event.what, event.worker) for event in phases} == {("starting", 0), ("connecting", 1), ("connecting", 2)}
    assert {event.phase for event in of(PhaseBegan, phases)} == {event.phase for event in of(PhaseEnded, phases)}


async def test_a_cluster_tells_that_an_executor_has_ended_and_that_a_worker_is_lost_and_back():
    async def wait(self):
        await asyncio.sleep(60)

    cluster, told = in_process_cluster(1, proxied=True), []
    cluster.subscribe(told.append)
    async with cluster:
        (worker,) = cluster.workers
        waiting = asyncio.ensure_future(worker.run_method(wait))
        while not (await worker.status())["busy"]:
            pass
        cluster.machine(1).kill()
        (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(outcome, ExecutorCrashed)
        (ended,) = of(ExecutorEnded, told)
        assert "SIGKILL" in ended.why
        lost = asyncio.Event()
        cluster.subscribe(lambda event: isinstance(event, WorkerDisconnected) and lost.set())
        cluster.machine(1).proxy.reset()
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        assert "the connection was lost" in of(WorkerDisconnected, told)[0].why
        await worker.reconnect(60)
        assert [event.again for event in of(WorkerConnected, told)] == [False, True]


async def test_a_worker_that_is_tried_in_vain_is_told_with_its_address_and_the_reason(monkeypatch):
    cluster, told = in_process_cluster(1, proxied=True), []
    lost, twice = asyncio.Event(), asyncio.Event()
    cluster.subscribe(told.append)
    cluster.subscribe(lambda event: isinstance(event, WorkerDisconnected) and lost.set())
    cluster.subscribe(lambda event: isinstance(event, WorkerNotReached) and event.tries == 2 and twice.set())
    async with cluster:
        (worker,) = cluster.workers

        async def refused(*_, **__):
            raise ConnectError(f"{worker.host}:{worker.port}: connection refused", worker="worker 1")

        monkeypatch.setattr("ddlf.cluster.link.dial", refused)
        cluster.machine(1).proxy.reset()
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        trying = asyncio.ensure_future(worker.reconnect())
        async with asyncio.timeout(PATIENCE_S):
            await twice.wait()
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
    first = of(WorkerNotReached, told)[0]
    assert (first.worker, first.name, first.tries) == (1, "worker 1", 1)
    assert first.why == f"127.0.0.1:{worker.port}: connection refused"


async def test_a_worker_of_an_earlier_release_which_cannot_flush_is_left_all_the_same(monkeypatch):
    async def ask(command, **options):
        raise ProtocolError(f"unknown control command {command!r}")

    async with in_process_cluster(1) as cluster:
        monkeypatch.setattr(cluster.workers[0], "ask", ask)
        assert await cluster.run_code("1") == [1]
    assert not cluster.workers[0].connected


async def test_who_asks_hears_what_the_method_tells_while_it_runs_and_nobody_else_does():
    async def count(self):
        for number in range(3):
            self.tell(done=number)
            await asyncio.sleep(0.01)

    heard = []
    async with in_process_cluster(1) as cluster:
        request = Request("run_method", count)
        request.hear = heard.append
        await cluster.workers[0].rpc(request)
        await cluster.workers[0].run_method(count)
    assert heard == [{"done": 0}, {"done": 1}, {"done": 2}]


async def test_worker_that_is_lost_while_nobody_asks_it_has_its_launchers_reason():
    async def left():
        return Left(Cause.NODE, "node n1 is down")

    cluster, told, lost = in_process_cluster(1, proxied=True), [], asyncio.Event()
    cluster.subscribe(told.append)
    cluster.subscribe(lambda event: isinstance(event, WorkerDisconnected) and lost.set())
    async with cluster:
        (worker,) = cluster.workers
        worker._link.link_state._left = left
        cluster.machine(1).proxy.reset()
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        assert [event.why for event in of(WorkerDisconnected, told)] == ["node n1 is down"]
        for _ in range(2):
            with pytest.raises(WorkerLost) as refused:
                await worker.run_code("1")
            assert (refused.value.cause, refused.value.message) == (Cause.NODE, "node n1 is down")
        await worker.reconnect(60)
        assert await worker.run_code("1") == 1
    assert [event.why for event in of(WorkerDisconnected, told)] == ["node n1 is down", ""]
