"""Tests of the launcher for Spark, with a stand-in for its context."""

import asyncio
import sys
import threading
from types import SimpleNamespace

import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.launcher import Cause, Left, Workers, from_keys, installed
from ddlf.cluster.launch.spark import Spark, SparkKeys, run_worker
from ddlf.cluster.launch.supervisor import Supervisor, WorkerStart
from ddlf.errors import ConfigError, ConnectError
from tests.patience import PATIENCE_S


class Attempt:
    """The information of Spark about an attempt of a task."""

    def __init__(self, number, status, words=None):
        self.attempt = lambda: number
        self.status = lambda: status
        self.executorId = lambda: "7"
        self.host = lambda: "pc07"
        self.errorMessage = lambda: SimpleNamespace(isDefined=lambda: words is not None, get=lambda: words)


class Context:
    """A context that blocks in each job until it is cancelled, or fails with the error of a test."""

    master = "spark://here:7077"
    uiWebUrl = None

    def __init__(self, error=None, attempts=()):
        self.error = error
        self.attempts = list(attempts)
        self.groups = []
        self.ended = threading.Event()
        self.is_stopped = False
        self.answers = threading.Event()  # a test clears it when Spark does not answer
        self.answers.set()
        store = SimpleNamespace(taskList=lambda stage, attempt, most: self)
        infos = SimpleNamespace(getExecutorInfos=lambda: ["driver", "one", "two"])
        self._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(statusStore=lambda: store, statusTracker=lambda: infos))

    def size(self):
        return len(self.attempts)

    def apply(self, index):
        return self.attempts[index]

    def statusTracker(self):
        self.answers.wait()
        return SimpleNamespace(
            getJobIdsForGroup=lambda group: [4] if group in self.groups else [],
            getJobInfo=lambda job: SimpleNamespace(stageIds=[9]),
        )

    def setJobGroup(self, group, description, interruptOnCancel):
        self.groups.append(group)

    def parallelize(self, items, slices):
        assert slices == len(items) == 1
        return self

    def foreachPartition(self, function):
        if self.error is not None:
            raise self.error
        self.ended.wait(PATIENCE_S)

    def cancelJobGroup(self, group):
        self.answers.wait()
        self.ended.set()

    def stop(self):
        self.answers.wait()
        self.is_stopped = True


@pytest.fixture
def spark(monkeypatch):
    """Return a function that installs a stand-in for ``pyspark`` with this context in the active session."""

    def install(context, create=None):
        active = SimpleNamespace(_active_spark_context=context)
        settings = {}

        class Conf:
            def setAll(self, pairs):
                settings.update(pairs)
                return self

            def setMaster(self, master):
                settings["spark.master"] = master

        def make(conf):
            return create(settings)

        make._active_spark_context = active._active_spark_context
        monkeypatch.setitem(sys.modules, "pyspark", SimpleNamespace(SparkContext=make, SparkConf=Conf))
        return context

    monkeypatch.setattr("ddlf.cluster.launch.engine.END_S", 0.1)
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    return install


def spark_launcher(workers=1, **keys):
    return Spark(SparkKeys(**{"workers": Workers.of(workers), "start_timeout": 0.2, **keys}))


async def error_of(launcher):
    with pytest.raises(ConnectError) as caught:
        await asyncio.wait_for(Cluster(launcher).connect(), PATIENCE_S)
    return caught.value.message


def test_keys_come_from_a_text_and_from_a_mapping():
    text = "spark:master=local-cluster[3,1,512],conf.spark.task.cpus=2,env.A=b"
    keys = installed(text, Workers(2, 8)).keys
    assert (keys.master, keys.conf, keys.env) == ("local-cluster[3,1,512]", {"spark.task.cpus": "2"}, {"A": "b"})
    assert from_keys("spark", {"workers": 3, "conf": {"spark.task.cpus": "2"}}).keys.conf == keys.conf
    with pytest.raises(ConfigError, match="launcher spark: env must have names of environment variables, got 'A-B'"):
        installed("spark:env.A-B=c", Workers(1, 1))


async def test_spark_must_be_installed_and_named(monkeypatch, spark):
    spark(None)
    with pytest.raises(ConfigError, match="no Spark session is active, and no master is named"):
        await Cluster(spark_launcher()).connect()
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ConfigError, match="launcher spark: Spark is not installed here") as caught:
        await Cluster(spark_launcher()).connect()
    assert caught.value.hint == "pip install pyspark"


@pytest.mark.parametrize("keys", [{"master": "spark://other:7077"}, {"conf": {"spark.task.cpus": "2"}}])
async def test_active_session_is_used_as_it_is(spark, keys):
    context = spark(Context())
    with pytest.raises(ConfigError, match="a Spark session is active, with the master spark://here:7077"):
        await Cluster(spark_launcher(**keys)).connect()
    await error_of(spark_launcher(2, master="spark://here:7077"))
    assert len(set(context.groups)) == 2
    assert not context.is_stopped
    assert context.ended.is_set()


async def test_own_session_gets_the_settings_and_is_stopped(spark):
    context, session_settings = Context(), {}

    def create(settings):
        session_settings.update(settings)
        return context

    spark(None, create)
    await error_of(spark_launcher(master="spark://there:7077", conf={"spark.task.cpus": "2"}))
    assert (session_settings["spark.master"], session_settings["spark.task.cpus"]) == ("spark://there:7077", "2")
    assert context.is_stopped


async def test_name_of_the_application_can_be_set(spark):
    names = []

    def create(settings):
        names.append(settings["spark.app.name"])
        return Context()

    spark(None, create)
    await error_of(spark_launcher(master="spark://there:7077"))
    await error_of(spark_launcher(master="spark://there:7077", conf={"spark.app.name": "mine"}))
    assert names == ["DDLF", "mine"]


async def test_run_ends_without_spark(spark, monkeypatch):
    for limit in ("ANSWER_S", "STOP_S"):
        monkeypatch.setattr(f"ddlf.cluster.launch.spark.{limit}", 0.1)
    context = Context()
    context.answers.clear()
    spark(None, lambda settings: context)
    launcher = spark_launcher(master="spark://there:7077", start_timeout=PATIENCE_S)
    connecting = asyncio.create_task(Cluster(launcher).connect())
    try:
        async with asyncio.timeout(PATIENCE_S / 2):
            while not context.groups:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await launcher.left(0) is None
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await launcher.stop()
        assert not context.is_stopped
    finally:
        context.answers.set()
        context.ended.set()


async def test_spark_that_does_not_start_is_an_error_in_its_words(spark):
    def create(settings):
        raise RuntimeError("An error occurred\n: org.SparkException: All masters are unresponsive\n\tat a.b.C\n")

    spark(None, create)
    words = "place 0: Spark does not start: org.SparkException: All masters are unresponsive"
    assert await error_of(spark_launcher(master="spark://there:7077", start_timeout=PATIENCE_S)) == words


async def test_spark_that_starts_too_late_is_stopped(spark):
    context, is_time = Context(), threading.Event()

    def create(settings):
        is_time.wait(PATIENCE_S)
        return context

    spark(None, create)
    words = r"no worker joined at port \d+ within 0.2 s: Spark does not run yet at spark://there:7077"
    with pytest.raises(ConnectError, match=words):
        await Cluster(spark_launcher(master="spark://there:7077")).connect()
    is_time.set()
    async with asyncio.timeout(PATIENCE_S):
        while not context.is_stopped:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


TRACEBACK = """org.apache.PythonException: Traceback (most recent call last):
  File "worker.py", line 1, in process
    import ddlf
ModuleNotFoundError: No module named 'ddlf'
 SQLSTATE: 38000
\tat org.apache.spark.Runner(Runner.scala:1)
"""
LOST = "ExecutorLostFailure (executor 7 exited) Reason: Command exited with code 137"


@pytest.mark.parametrize(
    ("attempts", "words"),
    [
        ([], "Initial job has not accepted any resources: Spark has 2 executors (spark://here:7077)"),
        ([Attempt(0, "RUNNING")], "its task runs on executor 7 on pc07"),
        ([Attempt(1, "RUNNING"), Attempt(0, "FAILED", LOST)], f"its task runs on executor 7 on pc07, after: {LOST}"),
        ([Attempt(0, "FAILED", LOST), Attempt(1, "FAILED", TRACEBACK)], "ModuleNotFoundError: No module named 'ddlf'"),
    ],
    ids=["no room", "runs", "runs again", "failed"],
)
async def test_error_has_the_information_of_spark_about_a_place(spark, attempts, words):
    spark(Context(attempts=attempts))
    assert (await error_of(spark_launcher())).endswith(f"within 0.2 s: {words}")


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (LOST, Left(Cause.NODE, LOST)),
        (f"{LOST} Container killed: out of memory", Left(Cause.MEMORY, f"{LOST} Container killed: out of memory")),
        ("Executor was preempted", Left(Cause.PREEMPTED, "Executor was preempted")),
        ("Executor decommission finished", Left(Cause.NOTICE, "Executor decommission finished")),
        (TRACEBACK, Left(Cause.CRASH, "ModuleNotFoundError: No module named 'ddlf'")),
    ],
)
async def test_job_that_fails_again_and_again_fails_the_start(spark, words, left):
    context = spark(Context(RuntimeError("job aborted"), [Attempt(0, "FAILED", words)]))
    launcher = spark_launcher(start_timeout=PATIENCE_S)
    assert await error_of(launcher) == f"place 0: {left.words}"
    assert len(context.groups) == 3


@pytest.mark.parametrize("code", [0, 3])
def test_task_runs_the_worker_of_its_place_with_the_resources_of_spark(monkeypatch, code):
    gpus = {"gpu": SimpleNamespace(addresses=["2", "5"])}
    task = SimpleNamespace(resources=lambda: gpus, cpus=lambda: 4)
    monkeypatch.setitem(sys.modules, "pyspark", SimpleNamespace(TaskContext=SimpleNamespace(get=lambda: task)))
    started = []

    def init(self, worker):
        started.append(worker)

    monkeypatch.setattr(Supervisor, "__init__", init)
    monkeypatch.setattr(Supervisor, "run", lambda self: code)
    worker = WorkerStart("h:1", 3, b"secret", env={"A": "b"})
    if code:
        with pytest.raises(RuntimeError, match="the worker at place 3 ended with exit code 3"):
            run_worker(worker, [3])
    else:
        run_worker(worker, [3])
    assert started[0].place == 3
    assert started[0].cores == 4
    assert started[0].env == {"A": "b", "CUDA_VISIBLE_DEVICES": "2,5"}
