"""Tests of workers in tasks of a real Spark, whose executors are processes on this machine."""

import asyncio
import os
import re
import signal
import sys
import urllib.request
from pathlib import Path

import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.launcher import Cause, Workers
from ddlf.cluster.launch.spark import Spark, SparkKeys
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

pytestmark = pytest.mark.filterwarnings("default")  # Spark warns about its own later changes
MASTER = "local-cluster[3,1,512]"
CONF = {"spark.executor.memory": "512m"}
OWN = f"spark:master={MASTER},conf.spark.executor.memory=512m"


@pytest.fixture(scope="module", autouse=True)
def python():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def context(python, events):
    from pyspark import SparkConf, SparkContext

    log = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": events.as_uri(), "spark.task.maxFailures": "2"}
    spark_context = SparkContext(conf=SparkConf().setMaster(MASTER).setAll([*CONF.items(), *log.items()]))
    yield spark_context
    spark_context.stop()


def sparked(workers, **keys):
    return Spark(SparkKeys(workers=Workers.of(workers), **keys))


def about(self):
    """Return the cores of a worker, and a variable of its environment."""
    return cores(), os.environ.get("GREETING")


def read(address):
    with urllib.request.urlopen(address) as answer:
        return answer.read()


def executor_around(worker):
    """Return the process of the executor that has a worker."""
    return next(
        process for process in worker.parents() if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
    )


async def test_workers_get_the_cores_of_their_task(context):
    async with asyncio.timeout(PATIENCE_S), Cluster(sparked(2, env={"GREETING": "hello"})) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        assert await cluster.run_method(about) == [(1, "hello")] * 2
        processes = workers_of(cluster).values()
        for process in processes:
            assert process.parent().environ()["OMP_NUM_THREADS"] == "1"
            assert "OMP_NUM_THREADS" not in process.environ()
    assert len(processes) == 2
    assert not any(map(is_alive, processes))
    assert context.parallelize([1, 2]).sum() == 3  # the user's session still works


@pytest.mark.short
async def test_worker_of_a_dead_executor_runs_on_another_one(context):
    async with asyncio.timeout(PATIENCE_S), Cluster(sparked(2)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        before = workers_of(cluster)[1]
        executor_around(before).kill()
        end = await left(cluster, 1)
        assert end.cause is Cause.NODE
        assert "ExecutorLostFailure" in end.words
        await until_ended(before)
        await numbers(cluster, [1, 2])


async def test_place_outlives_more_executors_than_spark_allows(context):
    async with asyncio.timeout(3 * PATIENCE_S), Cluster(sparked(2)) as cluster:
        other = None
        for _ in range(3):  # Spark gives a task up after the second
            await numbers(cluster, [1, 2])
            processes = workers_of(cluster)
            assert other in (None, processes[1])
            other = processes[1]
            executor_around(processes[0]).kill()
            await until_ended(processes[0])
        await numbers(cluster, [1, 2])
        assert workers_of(cluster)[1] == other


async def test_killed_worker_is_replaced_in_its_task(context):
    async with asyncio.timeout(PATIENCE_S), Cluster(sparked(2)) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        before = workers_of(cluster)[0]
        task = before.parent()
        after = await replaced(cluster, before)
        assert after.parent() == task
        await numbers(cluster, [1, 2])


async def test_worker_that_ends_is_an_error_with_its_exit_code(context):
    words = "place 0: RuntimeError: the worker at place 0 ended with exit code 1; its output is in the executor's log"
    with pytest.raises(ConnectError, match=words):
        await asyncio.wait_for(Cluster(sparked(1, env={"PYTHONHOME": "/nowhere"})).connect(), PATIENCE_S)


async def test_run_begins_without_the_places_that_wait_for_an_executor(context):
    async with asyncio.timeout(PATIENCE_S), Cluster(sparked("1..4", start_timeout=PATIENCE_S)) as cluster:
        while len(workers_of(cluster)) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        (absent,) = set(range(4)) - set(workers_of(cluster))
        words = await cluster._launcher.waits(absent)
        assert words.startswith("Initial job has not accepted any resources: Spark has 3 executors (http")


async def test_error_says_that_spark_has_no_room(context):
    async with asyncio.timeout(PATIENCE_S), Cluster(sparked(3)) as cluster:
        assert await cluster.run_method(number) == [1, 2, 3]
        words = r"no worker joined at port \d+ within 1 s: Initial job has not accepted any resources: Spark has 3 executors"
        with pytest.raises(ConnectError, match=words):
            await Cluster(sparked(1, start_timeout=1)).connect()
        await numbers(cluster, [1, 2, 3])
    async with asyncio.timeout(PATIENCE_S), Cluster(sparked(3)) as cluster:  # the failed job holds no executor
        assert await cluster.run_method(number) == [1, 2, 3]


async def test_token_is_visible_nowhere(context, events):
    launcher = sparked(2)
    secret = launcher.tokens.primary
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        app = f"api/v1/applications/{context.applicationId}"
        for page in ("jobs/", "stages/", "stages/stage/?id=0&attempt=0", "environment/", "executors/", f"{app}/jobs"):
            assert secret not in await asyncio.to_thread(read, f"{context.uiWebUrl}/{page}")
        logs = Path(os.environ.get("SPARK_HOME", Path(sys.modules["pyspark"].__file__).parent)) / "work"
        assert list(logs.rglob("stderr"))
        assert list(events.rglob("*"))
        assert_hidden(secret, [logs / context.applicationId, events])


async def test_session_has_its_own_settings(context):
    with pytest.raises(ConfigError, match=r"a Spark session is active, with the master local-cluster\[3,1,512\]"):
        await Cluster(sparked(1, master="spark://other:7077")).connect()
    with pytest.raises(ConfigError, match="a Spark session is active"):
        await Cluster(sparked(1, conf={"spark.task.cpus": "2"})).connect()


@pytest.mark.short
def test_same_weights_as_on_this_machine(tmp_path):
    options = ["--launcher", OWN, "--workers", "2"]
    assert weights_after(tmp_path, *options) == weights_after(tmp_path, "--local", "2")


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_nothing_remains_when_the_master_ends(tmp_path, ending):
    mark = tmp_path.name
    launcher = ["--launcher", f"{OWN},env.MARK={mark},conf.spark.ddlf.mark={mark}", "--workers", "2"]
    process = started(tmp_path, *launcher, "-p", "master_epochs=100000")
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(processes("ddlf.cli.worker", mark=mark)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            process.send_signal(ending)
            while processes("ddlf.cli.worker", mark=mark) or processes("java", mark):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        process.kill()
        process.communicate()


async def test_master_that_does_not_answer_is_named(tmp_path):
    process = started(tmp_path, "--launcher", "spark:master=spark://127.0.0.1:1,start_timeout=8", "--workers", "1")
    output, _ = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    assert process.returncode == 3
    assert output.count("Spark does not run yet at spark://127.0.0.1:1") == 2
    assert "destroyed" not in output


async def test_check_finds_java_and_a_master_that_is_silent():
    facts = [check async for check in sparked(1, master="spark://127.0.0.1:1").check()]
    assert re.match(r"Spark [\d.]+ with Java: openjdk", facts[0].fact)
    assert facts[1].fact.startswith("no Spark master answers at 127.0.0.1:1: ")
    assert facts[1].do
