"""Tests of faults in real processes: kill, freeze, slow, partition and restart act on the named worker only."""

import asyncio
import time

import psutil
import pytest
import pytest_asyncio

from ddlf.errors import ConfigError, ExecutorCrashed, WorkerLost
from ddlf.testing.local import local_cluster
from tests.patience import PATIENCE_S
from tests.processes import end_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("one_bare_template")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared():
    async with local_cluster(2, proxied=True) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(shared):
    """Two workers, which are restored after each test."""
    yield shared
    for machine in shared.machines:
        machine.recover()
    await shared.connect()
    await shared.clean()


async def process_ids(cluster):
    return [(status.pid, status.executor_pid) for status in await cluster.status()]


async def stopped(process):
    """Wait until a signal to stop has arrived."""
    async with asyncio.timeout(PATIENCE_S):
        while process.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - the kernel sends no event
            await asyncio.sleep(0)


async def test_the_processes_belong_to_the_worker(cluster):
    for machine, (daemon, executor) in zip(cluster.machines, await process_ids(cluster), strict=True):
        assert (machine.daemon.pid, machine.executor.pid) == (daemon, executor)


async def test_a_killed_executor_crashes_only_its_worker(cluster):
    before = cluster.machine(1).executor.pid, cluster.machine(2).executor.pid
    running = asyncio.ensure_future(cluster.workers[1].run_code("while True: pass"))
    while not (await cluster.workers[1].status()).busy:
        pass
    assert cluster.machine(2).kill()
    with pytest.raises(ExecutorCrashed, match="SIGKILL"):
        await running
    after = await cluster.run_code("import os; os.getpid()")
    assert after[0] == before[0]
    assert after[1] != before[1]


async def test_killed_daemon_ends_its_executor_and_can_be_restarted(cluster):
    machine = cluster.machine(1)
    port, pids = cluster.workers[0].port, (machine.daemon.pid, machine.executor.pid)
    assert machine.kill("daemon")
    for pid in pids:
        end_of(pid)
    with pytest.raises(WorkerLost):
        await cluster.workers[0].run_code("1")
    assert not machine.kill()
    await machine.restart()
    await cluster.connect()
    assert cluster.workers[0].port == port
    assert await cluster.run_code("1 + 1") == [2, 2]


@pytest.mark.parametrize(("part", "answers"), [("executor", True), ("daemon", False), ("both", False)])
async def test_a_frozen_part_does_not_answer_and_continues_when_thawed(cluster, part, answers):
    machine = cluster.machine(2)
    machine.freeze(part)
    for name in ("executor", "daemon"):
        if part in (name, "both"):
            await stopped(getattr(machine, name))
    asking = asyncio.ensure_future(cluster.workers[1].ping())
    await asyncio.wait([asking], timeout=PATIENCE_S if answers else 0.3)
    assert asking.done() == answers
    machine.thaw()
    await asking
    assert await cluster.run_code("2") == [2, 2]


async def test_a_hang_ends_by_itself_and_also_when_it_is_cancelled(cluster):
    machine = cluster.machine(1)
    begin = time.monotonic()
    hanging = asyncio.ensure_future(machine.hang(0.5))
    await asyncio.sleep(0)
    assert await cluster.workers[0].run_code("3") == 3
    assert time.monotonic() - begin >= 0.5
    await hanging
    hanging = asyncio.ensure_future(machine.hang(60))
    await asyncio.sleep(0)
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    assert machine.daemon.status() != psutil.STATUS_STOPPED


async def test_a_slowed_executor_gets_only_its_share_of_the_time(cluster):
    def compute(self):
        import time

        begin, used = time.monotonic(), time.process_time()
        while time.process_time() - used < 0.3:
            pass
        return time.monotonic() - begin

    slowing = asyncio.ensure_future(cluster.machine(1).slow(4))
    await asyncio.sleep(0)
    assert await cluster.workers[0].run_method(compute) > 0.3 * 4 * 0.8
    slowing.cancel()
    await asyncio.gather(slowing, return_exceptions=True)
    assert cluster.machine(1).executor.status() != psutil.STATUS_STOPPED
    await cluster.machine(1).slow(2, seconds=0.1)
    with pytest.raises(ConfigError, match="more than 1"):
        await cluster.machine(1).slow(1)


async def test_a_partition_is_silent_and_ends_by_itself(cluster):
    begin = time.monotonic()
    parting = asyncio.ensure_future(cluster.machine(2).partition(0.5))
    await asyncio.sleep(0)
    assert await cluster.run_code("4") == [4, 4]
    assert time.monotonic() - begin >= 0.5
    await parting


async def test_a_connection_without_a_proxy_cannot_be_cut():
    async with local_cluster(1) as cluster:
        with pytest.raises(ConfigError, match="proxied=True"):
            cluster.machine(1).cut_off()
        with pytest.raises(ConfigError, match="'executor', 'daemon' or 'both'"):
            cluster.machine(1).kill("worker")


async def test_the_end_of_a_cluster_leaves_no_process_or_folder(own_folders, descendants):
    before = set((own_folders / "tmp").iterdir())
    async with local_cluster(2, proxied=True) as cluster:
        cluster.machine(1).freeze()
        cluster.machine(2).cut_off()
        cluster.machine(2).kill()
    assert descendants() == []
    assert set((own_folders / "tmp").iterdir()) <= before
