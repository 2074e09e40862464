"""The rig for Spark: a standalone cluster with a master and Spark workers with one core each, as processes."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

import psutil

from tests.trials.engines.below import Started
from tests.trials.engines.rig import End, Rig, Run, Victim, kill, wait_for

SPARE = 1
"""Number of additional Spark workers, so that a task need not wait for a new one."""
EXECUTOR_S = 10.0
"""Seconds that Spark needs until a new executor takes a task, because it starts a JVM."""
DAEMON = "org.apache.spark.deploy"
EXECUTOR = "CoarseGrainedExecutorBackend"


class SparkRig(Rig):
    """A rig with Spark's master, and one more Spark worker than places."""

    name = "spark"
    gone_says = "."
    gone_s = 0.0
    gone_ends = False

    def environment(self) -> dict[str, str]:
        import pyspark

        home = str(Path(pyspark.__file__).parent)
        variables = {"SPARK_HOME": home, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m"}
        return {**super().environment(), **variables, "PYSPARK_PYTHON": sys.executable, "SPARK_NO_DAEMONIZE": "1"}

    def open(self) -> None:
        self._engine = Started(self)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._master = self._start(f"{DAEMON}.master.Master", "--port", str(self._port))
        wait_for(self._answers, 120.0)
        for _ in range(self.places + SPARE):
            self._add()

    def _answers(self) -> bool | None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1.0):
            return True
        return None

    def _start(self, *words: str) -> psutil.Popen:
        program = str(Path(self.environment()["SPARK_HOME"]) / "bin" / "spark-class")
        return self._engine.start(program, *words, "--host", "127.0.0.1", "--webui-port", "0")

    def _add(self) -> None:
        """Start a Spark worker."""
        size = ("--cores", "1", "--memory", "600m", "--work-dir", str(self.folder / "work"))
        self._start(f"{DAEMON}.worker.Worker", *size, f"spark://127.0.0.1:{self._port}")

    def close(self) -> None:
        self._engine.end()

    def launcher(self, run: Run) -> list[str]:
        keys = f"master=spark://127.0.0.1:{self._port},conf.spark.executor.memory=512m,conf.spark.driver.memory=512m"
        return ["--workers", str(self.places), "--launcher", f"spark:{keys}"]

    def empty(self) -> list[str]:
        keys = {"executor.memory": "512m", "driver.memory": "512m"}
        start = f"SparkSession.builder.master('spark://127.0.0.1:{self._port}')" + "".join(
            f".config('spark.{key}', '{value}')" for key, value in keys.items()
        )
        run = f"{start}.getOrCreate().sparkContext.parallelize(range({self.places}), {self.places}).foreach(abs)"
        return [sys.executable, "-c", f"from pyspark.sql import SparkSession; {run}"]

    def is_engine(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return any(word.startswith((f"{DAEMON}.master.", f"{DAEMON}.worker.")) for word in process.cmdline())
        return False

    def victims(self) -> dict[str, Victim]:
        lost = "ExecutorLostFailure"
        return {
            "executor": Victim(lambda run, place: kill(run.executor(place)), "SIGKILL"),
            "daemon": Victim(lambda run, place: kill(run.daemon(place)), "."),
            "Spark executor": Victim(lambda run, place: kill(self._above(run, place, EXECUTOR)), lost, EXECUTOR_S),
            "node": Victim(self._lose_node, lost, EXECUTOR_S),
        }

    def _above(self, run: Run, place: int, word: str) -> psutil.Process:
        return next(parent for parent in run.daemon(place).parents() if any(word in text for text in parent.cmdline()))

    def _lose_node(self, run: Run, place: int) -> None:
        """Kill a Spark worker and its executor, and start another one."""
        executor = self._above(run, place, EXECUTOR)
        kill(next(parent for parent in executor.parents() if self.is_engine(parent)))
        kill(executor)
        self._add()

    def ends(self) -> dict[str, End]:
        return {**super().ends(), "driver stopped": End(self._stop_driver, ends_master=False)}

    def _stop_driver(self, run: Run) -> None:
        """End the driver of the run, if it has started."""
        master = run.master()
        if master is not None:
            for process in master.children():
                with contextlib.suppress(psutil.Error):
                    if process.name() == "java":
                        process.terminate()

    def lose_engine(self, run: Run) -> None:
        """Kill Spark's master."""
        self._master.kill()

    def clean(self, run: Run) -> None:
        super().clean(run)
        if not self._master.is_running() or self._master.status() == psutil.STATUS_ZOMBIE:
            self.close()
            self.open()
