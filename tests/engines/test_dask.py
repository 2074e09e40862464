"""Tests of workers in tasks of a real Dask, whose own workers are processes on this machine."""

import asyncio
import os
import signal

import psutil
import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.dask import Dask, DaskKeys
from ddlf.cluster.launch.launcher import Cause, Workers
from ddlf.errors import ConfigError, ConnectError
from ddlf.worker.machine import cores
from tests.engines.running import (
    assert_hidden,
    is_alive,
    left,
    number,
    numbers,
    processes,
    replaced,
    started,
    until_ended,
    weights_after,
    workers_of,
)
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def engine():
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=3, threads_per_worker=1, processes=True, dashboard_address=":0", resources={"PLACE": 1}
    ) as dask_cluster:
        yield dask_cluster


@pytest.fixture
def dasked(engine):
    def make(workers, **keys):
        return Dask(DaskKeys(**{"workers": Workers.of(workers), "scheduler": engine.scheduler_address, **keys}))

    return make


def about(self):
    """Return the cores of a worker, and a variable of its environment."""
    return cores(), os.environ.get("GREETING")


async def test_workers_get_the_cores_of_their_dask_worker_and_not_its_threads(dasked, descendants):
    launcher = dasked(2, env={"GREETING": "hello"})
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        assert await cluster.run_method(about) == [(1, "hello")] * 2
        for process in workers_of(cluster).values():
            assert process.parent().environ()["OMP_NUM_THREADS"] == "1"
            assert "OMP_NUM_THREADS" not in process.environ()
        processes = workers_of(cluster).values()
    assert len(processes) == 2
    assert not any(map(is_alive, processes))


@pytest.mark.short
async def test_worker_of_a_dead_dask_worker_runs_on_another_one(dasked):
    async with asyncio.timeout(PATIENCE_S), Cluster(dasked(2)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        before = workers_of(cluster)[1]
        before.parent().kill()
        end = await left(cluster, 1)
        assert end.cause is Cause.NODE
        assert end.words.startswith("the Dask worker tcp://127.0.0.1:")
        await until_ended(before)
        await numbers(cluster, [1, 2])


async def test_place_outlives_more_dask_workers_than_dask_allows(dasked):
    async with asyncio.timeout(PATIENCE_S), Cluster(dasked(1)) as cluster:
        for _ in range(5):  # Dask gives a task up after the fourth
            await numbers(cluster, [1])
            worker = workers_of(cluster)[0]
            worker.parent().kill()
            await until_ended(worker)
        await numbers(cluster, [1])


async def test_worker_moves_to_a_later_dask_worker(dasked, engine):
    async with asyncio.timeout(2 * PATIENCE_S), Cluster(dasked(2)) as cluster:
        await numbers(cluster, [1, 2])
        for worker in engine.workers.values():  # all except the one of place 1 restart
            if worker.process.pid != workers_of(cluster)[1].ppid():
                psutil.Process(worker.process.pid).kill()
        await left(cluster, 0)
        await numbers(cluster, [1, 2])


async def test_killed_worker_is_replaced_in_its_task(dasked):
    async with asyncio.timeout(PATIENCE_S), Cluster(dasked(2)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        before = workers_of(cluster)[0]
        task = before.parent()
        after = await replaced(cluster, before)
        assert after.parent() == task
        await numbers(cluster, [1, 2])


async def test_worker_that_ends_is_an_error_with_its_exit_code(dasked):
    with pytest.raises(ConnectError, match=r"place 0: its worker ended with exit code 1: see the output of tcp:"):
        await asyncio.wait_for(Cluster(dasked(1, env={"PYTHONHOME": "/nowhere"})).connect(), PATIENCE_S)


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"GPU": 1}, r"its task is unrunnable, because none of the \d Dask workers has the resources GPU=1"),
        ({"PLACE": 2}, r"its task is unrunnable, because none of the \d Dask workers has the resources PLACE=2"),
    ],
)
async def test_error_says_which_resource_is_missing(dasked, resources, words, descendants):
    with pytest.raises(ConnectError, match=rf"no worker joined at port \d+ within 1 s: {words}"):
        await asyncio.wait_for(Cluster(dasked(2, resources=resources, start_timeout=1)).connect(), PATIENCE_S)


async def test_run_begins_without_the_places_that_wait_for_a_dask_worker(dasked, engine):
    launcher = dasked("1..4", resources={"PLACE": 1}, start_timeout=PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        while len(workers_of(cluster)) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        (absent,) = set(range(4)) - set(workers_of(cluster))
        assert await launcher.waits(absent) in {
            "its task waits for one of the 3 Dask workers",
            *(
                f"its task is at the Dask worker {address}, which has 2 tasks and nthreads=1"
                for address in engine.scheduler_info["workers"]
            ),
        }


async def test_cancelled_task_ends_its_worker(dasked, engine):
    from distributed import Client, Future

    launcher = dasked(1)
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        await numbers(cluster, [1])
        before = workers_of(cluster)[0]
        (key,) = launcher._tasks
        async with Client(engine.scheduler_address, asynchronous=True, set_as_default=False) as client:
            await client.cancel([Future(key, client)], force=True)
        end = await left(cluster, 0)
        assert end.cause is Cause.CANCELLED
        assert "cancelled" in end.words
        await until_ended(before)
        await numbers(cluster, [1])


async def test_token_is_visible_nowhere(dasked, engine, tmp_path):
    from distributed import Client

    launcher = dasked(2)
    secret = launcher.tokens.primary
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        async with Client(engine.scheduler_address, asynchronous=True, set_as_default=False) as client:
            await client.dump_cluster_state(str(tmp_path / "state"), format="yaml")
            visible = [await client.get_worker_logs(), await client.get_scheduler_logs(), await client.call_stack()]
            visible += [await client.story(*launcher._tasks), await client.get_events()]
        assert secret.decode() not in str(visible)
        assert_hidden(secret, [tmp_path])


async def test_scheduler_must_be_known_and_answer(dasked, monkeypatch):
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="launcher dask: no scheduler is known"):
        await Cluster(dasked(1, scheduler=None)).connect()
    monkeypatch.setattr("ddlf.cluster.launch.dask.CONNECT_S", 0.5)
    with pytest.raises(ConnectError, match=r"no Dask scheduler answers at tcp://127.0.0.1:1: "):
        await Cluster(dasked(1, scheduler="tcp://127.0.0.1:1")).connect()


async def test_current_client_names_the_scheduler(dasked, engine):
    from distributed import Client

    with Client(engine):
        async with asyncio.timeout(PATIENCE_S), Cluster(dasked(1, scheduler=None)) as cluster:
            assert await cluster.run_method(number) == [1]


@pytest.mark.short
def test_same_weights_as_on_this_machine(engine, tmp_path):
    options = ["--launcher", f"dask:scheduler={engine.scheduler_address}", "--workers", "2"]
    assert weights_after(tmp_path, *options) == weights_after(tmp_path, "--local", "2")


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_nothing_remains_when_the_master_ends(engine, tmp_path, ending):
    mark = tmp_path.name
    keys = f"scheduler={engine.scheduler_address},env.MARK={mark}"
    process = started(tmp_path, "--launcher", f"dask:{keys}", "--workers", "2", "-p", "master_epochs=100000")
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(processes("ddlf.cli.worker", mark=mark)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            process.send_signal(ending)
            while processes("ddlf.cli.worker", mark=mark):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        process.kill()
        process.communicate()


async def test_check_names_the_versions_of_each_dask_worker_and_missing_resources(dasked):
    async with asyncio.timeout(PATIENCE_S):
        facts = [check.fact async for check in dasked(2).check()]
        assert sum("DDLF" in fact and fact.endswith("nthreads=1") for fact in facts) == 3
        (problem,) = [check async for check in dasked(1, resources={"GPU": 1}).check() if check.do]
    assert problem.fact == "the scheduler has no Dask workers with the resources GPU=1"
