"""Tests of the numbers and values of workers, which stay the same while other workers are missing."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.errors import ConfigError, WorkerLost
from ddlf.testing.in_process import InProcessDaemon
from ddlf.worker.options import Options
from tests.daemons import TOKEN
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")


def identity(self):
    return self.id, self.N, self.variables.get("mine")


class Machines:
    """Daemons in this process, which a test can end and start again on their ports."""

    def __init__(self, count):
        self.daemons = [InProcessDaemon(options(0)) for _ in range(count)]
        self.ports = [daemon.port for daemon in self.daemons]
        self.ready = [asyncio.Event() for _ in self.daemons]
        self.tasks = [
            asyncio.ensure_future(daemon.run(ready.set)) for daemon, ready in zip(self.daemons, self.ready, strict=True)
        ]

    async def end(self, number):
        await self.ready[number - 1].wait()
        self.daemons[number - 1].stop()
        await self.tasks[number - 1]

    def start(self, number):
        daemon = self.daemons[number - 1] = InProcessDaemon(options(self.ports[number - 1]))
        self.tasks[number - 1] = asyncio.ensure_future(daemon.run())

    def crash(self, number):
        assert self.daemons[number - 1].process.kill()


def options(port):
    return Options(host="127.0.0.1", port=port, tokens=(TOKEN,), state_dir=None)


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_bytes(TOKEN)
    path.chmod(0o600)
    return path


@contextlib.asynccontextmanager
async def three_workers(token, *, absent=()):
    machines = Machines(3)
    for number in absent:
        await machines.end(number)
    cluster = Cluster(["127.0.0.1"] * 3, machines.ports, token_file=token, min_workers=1)
    try:
        yield machines, await cluster.connect()
    finally:
        await cluster.close()
        for number in (1, 2, 3):
            await machines.end(number)


async def until_lost(cluster, number):
    worker = next(worker for worker in cluster.workers if worker.id == number)
    async with asyncio.timeout(PATIENCE_S):
        while worker.connected:
            with contextlib.suppress(WorkerLost):
                await worker.ping()


async def test_a_worker_keeps_its_number_and_value_when_another_one_is_missing(token):
    async with three_workers(token) as (machines, cluster):
        await cluster.set_variable("mine", each=["A", "B", "C"])
        await machines.end(1)
        await until_lost(cluster, 1)
        await cluster.connect()
        assert [worker.id for worker in cluster.workers] == [2, 3]
        assert await cluster.run_method(identity) == [(2, 3, "B"), (3, 3, "C")]
        machines.crash(2)
        assert await cluster.options(idempotent=True).run_method(identity) == [(2, 3, "B"), (3, 3, "C")]
        with pytest.raises(ConfigError, match="there is no worker 1; the cluster has workers 2, 3"):
            cluster.options(workers=[1])


async def test_connect_tries_missing_workers_again_and_restores_their_numbers_and_values(token):
    async with three_workers(token) as (machines, cluster):
        await cluster.set_variable("mine", each=["A", "B", "C"])
        await cluster.add_method(identity)
        await machines.end(1)
        await until_lost(cluster, 1)
        await cluster.connect()
        assert [worker.id for worker in cluster.missing] == [1]
        machines.start(1)
        await cluster.connect()
        assert cluster.missing == []
        assert await cluster.run("identity") == [(1, 3, "A"), (2, 3, "B"), (3, 3, "C")]


async def test_close_and_connect_tries_missing_workers_again(token):
    async with three_workers(token) as (machines, cluster):
        await machines.end(2)
        await until_lost(cluster, 2)
        await cluster.connect()
        await cluster.close()
        machines.start(2)
        await cluster.connect()
        assert await cluster.run_method(identity) == [(1, 3, None), (2, 3, None), (3, 3, None)]


async def test_workers_that_were_missing_at_the_start_get_the_last_numbers(token):
    async with three_workers(token, absent=[1]) as (machines, cluster):
        everybody = cluster.options()
        assert await cluster.run_method(identity) == [(1, 2, None), (2, 2, None)]
        machines.start(1)
        await cluster.connect()
        assert await cluster.run_method(identity) == [(1, 3, None), (2, 3, None), (3, 3, None)]
        assert cluster.workers[2].port == machines.ports[0]
        assert everybody.N == 3


async def test_values_of_some_workers_are_not_given_to_the_rest(token):
    async with three_workers(token) as (machines, cluster):
        await cluster.set_variable("mine", "all")
        await cluster.options(workers=[2]).set_variable("mine", "two")
        await cluster.options(workers=[3]).delete_variable("mine")
        await cluster.options(workers=[1]).add_method(identity)
        for number in (1, 2, 3):
            machines.crash(number)
        idempotent = cluster.options(idempotent=True)
        assert await idempotent.run_method(identity) == [(1, 3, "all"), (2, 3, "two"), (3, 3, None)]
        assert await cluster.methods() == [["identity"], [], []]


async def test_an_added_worker_is_counted(token):
    machines = Machines(2)
    cluster = Cluster(["127.0.0.1"], machines.ports[0], token_file=token)
    async with cluster:
        await cluster.options().add("127.0.0.1", machines.ports[1])
        assert (await cluster.run_method(identity))[1] == (2, 2, None)
        await cluster.connect()
        assert await cluster.run_method(identity) == [(1, 2, None), (2, 2, None)]
    for number in (1, 2):
        await machines.end(number)
