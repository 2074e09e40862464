"""Workers that Spark starts: ``ddlf run app.py --launcher spark --workers 4``. Runs on the master, and in Spark's executors.

Each place is a job of one long task, so a place that Spark gives up takes no other place with it. If the executor around
a task ends, Spark runs the task again on another one, as often as ``spark.task.maxFailures`` allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import uuid
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from pydantic import Field

from ddlf.cluster.launch.engine import PlaceEngine, first_line
from ddlf.cluster.launch.gate import Gate
from ddlf.cluster.launch.keys import Env, Keys
from ddlf.cluster.launch.launcher import Cause, Check, Left, Workers
from ddlf.cluster.launch.supervisor import Supervisor, WorkerStart
from ddlf.cluster.launch.threads import in_thread
from ddlf.errors import ConfigError, ConnectError

REFUSED = "Initial job has not accepted any resources"
"""Spark's own words in its log if no executor takes a job."""
ANSWER_S = 3.0
"""Seconds to wait for Spark's answer about a task, or to its end."""
STOP_S = 20.0
"""Seconds to wait until Spark has stopped."""
SHOWN = 300
"""Characters of Spark's words about a failed task that a message shows."""


class SparkKeys(Keys):
    """The keys of the launcher ``spark``."""

    master: str | None = Field(
        default=None,
        description="Address of Spark's master. Default: the Spark session of this program, or spark-submit's.",
    )
    conf: dict[str, str] = Field(
        default_factory=dict, description="Spark's settings, such as conf.spark.task.cpus=2, if no session is active."
    )
    env: Env = Field(default_factory=dict, description="Environment variables, such as env.NAME=VALUE.")


class Spark(PlaceEngine):
    """Workers in tasks of Spark, one job of one task for each place."""

    name = "spark"
    model = SparkKeys
    keys: SparkKeys

    def __init__(self, keys: SparkKeys, workers: Workers | None = None) -> None:
        super().__init__(keys, workers)
        self._group = f"ddlf-{uuid.uuid4().hex}"
        self._context: Any = None
        self._is_own = False
        self._starting: asyncio.Task[None] | None = None

    async def check(self) -> AsyncIterator[Check]:
        """Look for Spark, Java and Spark's master."""
        context = self._active()
        import pyspark

        if context is not None:
            yield Check(f"Spark {pyspark.__version__}; the active session has the master {context.master}")
        else:
            java = os.path.join(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else "java"
            yield Check(f"Spark {pyspark.__version__} with Java: {await first_line(java, '-version')}")
            master = self.keys.master or self.keys.conf.get("spark.master", "")
            for address in master.removeprefix("spark://").split(",") if master.startswith("spark://") else ():
                host, _, port = address.rpartition(":")
                try:
                    async with asyncio.timeout(ANSWER_S):
                        _, writer = await asyncio.open_connection(host, int(port))
                    writer.close()
                except (OSError, TimeoutError, ValueError) as error:
                    yield Check(
                        f"no Spark master answers at {address}: {error or 'it is silent'}",
                        "start it, or correct the key master",
                    )
                else:
                    yield Check(f"a program listens at {address}")
        async for check in super().check():
            yield check

    def _active(self) -> Any:
        """Return the Spark context of this program; None if there is none and the keys name a master.

        Raises:
            ConfigError: Spark is not installed, no master is known, or the keys contradict the active session.
        """
        try:
            import pyspark
        except ImportError:
            raise ConfigError("launcher spark: Spark is not installed here", hint="pip install pyspark") from None
        context = pyspark.SparkContext._active_spark_context
        master, conf = self.keys.master, self.keys.conf
        if context is not None and (conf or master not in (None, context.master)):
            raise ConfigError(
                f"launcher spark: a Spark session is active, with the master {context.master}",
                hint="leave out master and conf, and set them in the session",
            )
        if context is None and not (master or "spark.master" in conf or "PYSPARK_GATEWAY_PORT" in os.environ):
            raise ConfigError(
                "launcher spark: no Spark session is active, and no master is named",
                hint="name it: --launcher spark:master=spark://HOST:7077",
            )
        return context

    async def prepare(self) -> None:
        self._context = self._active()
        master, conf = self.keys.master, self.keys.conf
        self._is_own = self._context is None
        # The start may take minutes, in which ``waits`` tells about it.
        self._starting = asyncio.create_task(in_thread(self._connect, master, conf) if self._is_own else _do_nothing())

    def _connect(self, master: str | None, conf: dict[str, str]) -> None:
        from pyspark import SparkConf, SparkContext

        settings = SparkConf().setAll([("spark.app.name", "DDLF"), *conf.items()])
        if master is not None:
            settings.setMaster(master)
        context = SparkContext(conf=settings)
        if self._gate is None:  # the run has ended meanwhile
            context.stop()
        else:
            self._context = context

    def worker(self, gate: Gate, place: int | None) -> WorkerStart:
        return dataclasses.replace(super().worker(gate, place), env=self.keys.env)

    async def run(self, place: int, worker: WorkerStart) -> Left | None:
        """Run the job of a place until its worker ends.

        Raises:
            ConnectError: Spark does not start.
        """
        assert self._starting is not None
        try:
            await asyncio.shield(self._starting)
        except Exception as error:  # Java, py4j and Spark raise their own errors
            raise ConnectError(f"Spark does not start: {_main_line(error)}") from None
        self._runs_in[place] = group = f"{self._group}-{place}"
        try:
            await in_thread(self._run_job, group, place, worker)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # Spark itself may be gone
                async with asyncio.timeout(ANSWER_S):
                    await in_thread(self._context.cancelJobGroup, group)
            raise
        except Exception as error:
            return await self.left(place) or _left(_main_line(error))
        return Left(Cause.CANCELLED, "its worker was stopped", 0)

    def _run_job(self, group: str, place: int, worker: WorkerStart) -> None:
        self._context.setJobGroup(group, f"DDLF worker at place {place}", interruptOnCancel=True)
        self._context.parallelize([place], 1).foreachPartition(partial(run_worker, worker))

    async def left(self, index: int) -> Left | None:
        """Return how the worker at a place ended. Spark starts it again by itself, so this asks Spark."""
        if self._context is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(ANSWER_S):
                    words = (await in_thread(self._attempts, index))[1]
                if words:
                    return _left(words)
        return await super().left(index)

    async def waits(self, index: int) -> str:
        if self._context is None:
            return f"Spark does not run yet at {self.keys.master or 'its master'}"
        try:
            async with asyncio.timeout(ANSWER_S):
                runs_at, words = await in_thread(self._attempts, index)
                executors = await in_thread(self._executors)
        except Exception as error:
            return f"Spark does not answer: {_main_line(error)}"
        if runs_at:
            return f"its task runs on {runs_at}" + (f", after: {words}" if words else "")
        return words or f"{REFUSED}: Spark has {executors} executors ({self._context.uiWebUrl or self._context.master})"

    def _executors(self) -> int:
        return len(self._context._jsc.sc().statusTracker().getExecutorInfos()) - 1  # the driver is one of them

    def _attempts(self, place: int) -> tuple[str, str]:
        """Return the executor that runs the task of a place, and the words about its last failed attempt; each may be
        empty.
        """
        tracker, store = self._context.statusTracker(), self._context._jsc.sc().statusStore()
        runs_at = words = ""
        for job in sorted(tracker.getJobIdsForGroup(f"{self._group}-{place}"))[-1:]:
            for stage in tracker.getJobInfo(job).stageIds:
                tasks = store.taskList(stage, 0, 100)
                for task in sorted((tasks.apply(i) for i in range(tasks.size())), key=lambda task: task.attempt()):
                    if task.status() == "RUNNING":
                        runs_at = f"executor {task.executorId()} on {task.host()}"
                    elif task.errorMessage().isDefined():
                        words = _main_line(task.errorMessage().get())
        return runs_at, words

    async def release(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        context, self._context = self._context, None
        if context is not None and self._is_own:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(STOP_S):
                    await in_thread(context.stop)


def run_worker(worker: WorkerStart, _: Iterable[int]) -> None:
    """Run the worker of a place in a task of Spark until the run is over.

    Raises:
        RuntimeError: The worker has ended with an error, so that Spark counts the task as failed.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    gpus = context.resources().get("gpu")
    env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses), **worker.env} if gpus else worker.env
    code = Supervisor(dataclasses.replace(worker, cores=context.cpus(), env=env)).run()
    if code:
        raise RuntimeError(
            f"the worker at place {worker.place} ended with exit code {code}; its output is in the executor's log"
        )


def _left(words: str) -> Left:
    """Return why a task ended, by Spark's words about it."""
    causes = {"memory": Cause.MEMORY, "preempt": Cause.PREEMPTED, "decommission": Cause.NOTICE}
    matches = (cause for word, cause in causes.items() if word in words.lower())
    return Left(next(matches, Cause.NODE if "ExecutorLost" in words else Cause.CRASH), words)


def _main_line(error: object) -> str:
    """Return the line of Spark's words that says most. Below it, only stack traces follow, which are indented."""
    lines = [line for line in str(error).splitlines() if line[:1].strip() and not line.endswith("stacktrace:")]
    return lines[-1].lstrip(": ")[:SHOWN] if lines else type(error).__name__


async def _do_nothing() -> None:
    pass
