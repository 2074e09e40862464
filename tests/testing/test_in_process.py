"""Tests of workers without processes: they behave like real workers."""

import asyncio
import contextlib
import os

import numpy as np
import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.errors import ConfigError, ExecutorCrashed, RemoteError, RequestTimeout, WorkerLost
from ddlf.testing.in_process import in_process_cluster
from tests.training.models import Quick, app, equal


@pytest.fixture
async def cluster():
    async with in_process_cluster(3) as cluster:
        yield cluster


async def test_workers_run_methods_in_this_process_and_each_has_its_own_state(cluster):
    def remember(self, value):
        self.data["value"] = value
        return self.id, self.N, os.getpid()

    assert await cluster.run_method(remember, *(dict(value=i) for i in "abc")) == [
        (number, 3, os.getpid()) for number in (1, 2, 3)
    ]
    assert await cluster.run_code("self.data['value']") == ["a", "b", "c"]
    assert isinstance(cluster, Cluster)


async def test_cluster_starts_no_process_and_leaves_none(descendants):
    async with in_process_cluster(2, proxied=True) as cluster:
        await cluster.run_code("1")
        assert descendants() == []
        ports = [worker.port for worker in cluster.workers]
        folders = [machine._daemon._folder.path for machine in cluster.machines]
    assert not any(folder.exists() for folder in folders)
    assert len(set(ports)) == 2
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_methods_variables_and_errors_work_like_on_real_workers(cluster):
    await cluster.add_method(lambda a, b: a + b, name="add")
    assert await cluster.run("add", a=np.arange(1000), b=1) is not None
    await cluster.set_variable("v", each=[1, 2, 3])
    assert await cluster.get_variable("v") == [1, 2, 3]
    with pytest.raises(ZeroDivisionError) as raised:
        await cluster.run_at(1, "add", a=1, b=1) and await cluster.options(workers=[2]).run_code("1 / 0")
    assert isinstance(raised.value, RemoteError)


async def test_values_travel_as_bytes_so_nothing_is_shared(cluster):
    values = {"list": [1, 2]}
    await cluster.run_method(lambda self, values: values["list"].append(3), values=values)
    assert values == {"list": [1, 2]}


async def test_each_worker_has_its_own_classes(cluster):
    counts = []

    class Counted:
        count = 0

        def step(self):
            type(self).count += 1
            counts.append(self.count)
            return self.count, len(counts)

    step = Counted.step
    for _ in range(2):  # each call sends the classes as they are in the test
        assert await cluster.run_method(lambda counted: counted.step(), counted=Counted()) == [(1, 1)] * 3
    assert Counted.step is step
    assert (Counted.count, counts) == (0, [])
    assert Counted().step() == (1, 1)
    assert counts == [1], "the test's own list"
    await cluster.add_method(lambda counted: counted.step(), name="step")
    assert await cluster.run("step", counted=Counted()) == [(2, 2)] * 3
    assert Counted.count == 1


async def test_a_method_that_waits_can_be_cancelled_and_times_out(cluster):
    with pytest.raises(RequestTimeout):
        await cluster.options(timeout_s=0.1, workers=[1]).run_code("import asyncio; await asyncio.sleep(60)")
    assert await cluster.run_code("2") == [2, 2, 2]
    assert [status.busy for status in await cluster.status()] == [None] * 3


async def test_a_kill_crashes_only_its_worker_which_loses_its_data(cluster):
    await cluster.set_variable("v", 1)
    await cluster.run_code("self.data['kept'] = 1")
    await cluster.add_method(lambda: "still here", name="hosted")
    waiting = [
        asyncio.ensure_future(worker.run_code("import asyncio; await asyncio.sleep(60)")) for worker in cluster.workers
    ]
    while any(status.busy is None for status in await cluster.status()):
        pass
    assert cluster.machine(2).kill()
    with pytest.raises(ExecutorCrashed, match="SIGKILL"):
        await waiting[1]
    assert not waiting[0].done()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await cluster.run_code("len(self.data)") == [1, 0, 1]
    assert [len(variables) for variables in await cluster.variables()] == [1, 1, 1]  # the master sends them again
    assert await cluster.run("hosted") == ["still here"] * 3
    assert [status.restarts for status in await cluster.status()] == [0, 1, 0]


async def test_a_restart_gives_a_new_executor(cluster):
    await cluster.run_code("self.data['kept'] = 1")
    await cluster.workers[0].restart()
    assert await cluster.run_code("len(self.data)") == [0, 1, 1]


async def test_faults_of_the_network_can_be_injected():
    async with in_process_cluster(2, proxied=True) as cluster:
        waiting = asyncio.ensure_future(cluster.workers[1].run_code("import asyncio; await asyncio.sleep(60)"))
        while (await cluster.workers[1].status()).busy is None:
            pass
        cluster.machine(2).proxy.reset()
        with pytest.raises(WorkerLost):
            await waiting
        assert await cluster.workers[0].run_code("1") == 1


async def test_faults_that_need_processes_are_refused(cluster):
    machine = cluster.machine(1)
    for attempt in (machine.freeze, lambda: machine.kill("daemon"), machine.cut_off):
        with pytest.raises(ConfigError, match=r"local_cluster|proxied=True"):
            attempt()
    with pytest.raises(ConfigError, match="workers 1 to 3"):
        cluster.machine(4)


async def test_the_environment_of_the_test_stays_unchanged(cluster):
    before = dict(os.environ)
    async with in_process_cluster(1) as other:
        await other.run_code("1")
    assert dict(os.environ) == before


async def test_a_worker_whose_method_blocks_for_long_is_not_declared_dead():
    async with in_process_cluster(2, dead_after_s=0.5) as cluster:
        assert await cluster.run_code("import time; time.sleep(0.8)") == [None, None]
        assert [worker.state for worker in cluster.workers] == ["alive", "alive"]
        assert await cluster.run_code("1") == [1, 1]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.slow
async def test_an_app_trains_to_the_same_bits_as_on_real_workers(two_workers):
    runs = []
    for make in (in_process_cluster, lambda _: contextlib.nullcontext(two_workers)):
        async with make(2) as cluster:
            trained = app(cluster, dropout=0.3, norm=True)
            records = await trained.train_sync(master_epochs=2)
            assert len(records) == 2
            runs.append(trained.model.get_weights())
            await trained.evaluate_model()
    assert equal(*runs)


@pytest.mark.slow
async def test_an_app_trains_asynchronously(cluster):
    trained = app(cluster, Quick)
    assert len(await trained.train_async(master_epochs=2)) == 6


async def test_downpour_is_refused_before_training_begins(cluster):
    quick = app(cluster, Quick, mode="downpour")
    with pytest.raises(ConfigError, match=r"workers of in_process_cluster do one thing at a time; use local_cluster"):
        await quick.train_model()
