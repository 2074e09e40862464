"""Tests of the events of a cluster about its workers, with and without a training."""

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


def events_of(kind, events):
    return [event for event in events if isinstance(event, kind)]


async def test_a_cluster_emits_events_about_connected_and_disconnected_workers():
    cluster, events, of_second = in_process_cluster(2), [], []
    take_off = cluster.subscribe(events.append)
    cluster.options(workers=[2]).subscribe(of_second.append)
    async with cluster:
        # all workers are dialled at the same time
        connected = sorted(events_of(WorkerConnected, events), key=lambda event: event.worker)
        assert [(event.worker, event.name, event.again) for event in connected] == [
            (1, "worker 1", False),
            (2, "worker 2", False),
        ]
        first = connected[0]
        assert first.address == f"127.0.0.1:{cluster.workers[0].port}"
        assert min(first.cores, first.threads) >= 1
        before = list(events)
        await cluster.connect()
        assert events == before
    assert sorted((event.worker, event.why) for event in events_of(WorkerDisconnected, events)) == [(1, ""), (2, "")]
    assert {event.worker for event in of_second} == {0, 2}  # worker 0 stands for all of them, in the phase of the start
    await cluster.connect()
    assert [event.again for event in events_of(WorkerConnected, events)[2:]] == [True, True]
    take_off()
    events.clear()
    await cluster.close()
    assert events == []
    assert len(events_of(WorkerDisconnected, of_second)) == 2


async def test_a_cluster_emits_phases_while_workers_start_and_connect():
    cluster, events = in_process_cluster(2), []
    cluster.subscribe(events.append)
    async with cluster:
        phases = events_of(PhaseEvent, events)
    assert {(event.what, event.worker) for event in phases} == {("starting", 0), ("connecting", 1), ("connecting", 2)}
    assert {event.phase for event in events_of(PhaseBegan, phases)} == {
        event.phase for event in events_of(PhaseEnded, phases)
    }


async def test_a_cluster_emits_events_about_ended_executors_and_lost_and_returned_workers():
    async def wait(self):
        await asyncio.sleep(60)

    cluster, events = in_process_cluster(1, proxied=True), []
    cluster.subscribe(events.append)
    async with cluster:
        (worker,) = cluster.workers
        waiting = asyncio.ensure_future(worker.run_method(wait))
        while not (await worker.status()).busy:
            pass
        cluster.machine(1).kill()
        (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(outcome, ExecutorCrashed)
        (ended,) = events_of(ExecutorEnded, events)
        assert "SIGKILL" in ended.why
        lost = asyncio.Event()
        cluster.subscribe(lambda event: isinstance(event, WorkerDisconnected) and lost.set())
        cluster.machine(1).proxy.reset()
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        assert "the connection was lost" in events_of(WorkerDisconnected, events)[0].why
        await worker.reconnect(60)
        assert [event.again for event in events_of(WorkerConnected, events)] == [False, True]


async def test_an_unreachable_worker_is_reported_with_its_address_and_the_reason(monkeypatch):
    cluster, events = in_process_cluster(1, proxied=True), []
    lost, twice = asyncio.Event(), asyncio.Event()
    cluster.subscribe(events.append)
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
    first = events_of(WorkerNotReached, events)[0]
    assert (first.worker, first.name, first.tries) == (1, "worker 1", 1)
    assert first.why == f"127.0.0.1:{worker.port}: connection refused"


async def test_a_worker_of_an_earlier_release_without_flush_is_disconnected_too(monkeypatch):
    async def ask(command, **options):
        raise ProtocolError(f"unknown control command {command!r}")

    async with in_process_cluster(1) as cluster:
        monkeypatch.setattr(cluster.workers[0], "ask", ask)
        assert await cluster.run_code("1") == [1]
    assert not cluster.workers[0].connected


async def test_only_the_caller_receives_the_reports_of_its_running_method():
    async def count(self):
        for number in range(3):
            self.tell(done=number)
            await asyncio.sleep(0.01)

    reports = []
    async with in_process_cluster(1) as cluster:
        request = Request("run_method", count)
        request.hear = reports.append
        await cluster.workers[0].rpc(request)
        await cluster.workers[0].run_method(count)
    assert reports == [{"done": 0}, {"done": 1}, {"done": 2}]


async def test_worker_that_is_lost_while_idle_has_the_reason_of_its_launcher():
    async def left():
        return Left(Cause.NODE, "node n1 is down")

    cluster, events, lost = in_process_cluster(1, proxied=True), [], asyncio.Event()
    cluster.subscribe(events.append)
    cluster.subscribe(lambda event: isinstance(event, WorkerDisconnected) and lost.set())
    async with cluster:
        (worker,) = cluster.workers
        worker._link.link_state._find_end = left
        cluster.machine(1).proxy.reset()
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        assert [event.why for event in events_of(WorkerDisconnected, events)] == ["node n1 is down"]
        for _ in range(2):
            with pytest.raises(WorkerLost) as refused:
                await worker.run_code("1")
            assert (refused.value.cause, refused.value.message) == (Cause.NODE, "node n1 is down")
        await worker.reconnect(60)
        assert await worker.run_code("1") == 1
    assert [event.why for event in events_of(WorkerDisconnected, events)] == ["node n1 is down", ""]
