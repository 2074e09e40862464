"""The rig for Dask: a scheduler, and Dask workers with one thread each."""

from __future__ import annotations

import contextlib
import json
import sys

import psutil

from tests.trials.engines.below import Started, is_below
from tests.trials.engines.rig import End, Rig, Run, Victim, kill, wait_for, warn
from tests.trials.engines.stuck import TIMEOUT, Stuck

SPARE = 1
"""Number of additional Dask workers, so that a task need not wait for a new one."""


class DaskRig(Rig):
    """A rig with a scheduler, and one more Dask worker with a nanny than places."""

    name = "dask"
    gone_says = "the Dask scheduler .* is gone; the training continues"
    gone_ends = False
    gone_s = 5.0

    def open(self) -> None:
        self._engine = Started(self)
        self._file = self.folder / "scheduler.json"
        self._file.unlink(missing_ok=True)
        options = ("--host", "127.0.0.1", "--dashboard-address", ":0")
        self._scheduler = self._engine.start(
            *(sys.executable, "-m", "dask", "scheduler", "--port", "0", "--scheduler-file", str(self._file)), *options
        )
        self._address = wait_for(self._written, 120.0)
        for _ in range(self.places + SPARE):
            self._add()

    def _written(self) -> str | None:
        """Return the address that the scheduler has written; None before it has written one."""
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            address: str = json.loads(self._file.read_text())["address"]
            return address
        return None

    def _add(self) -> None:
        """Start a Dask worker with a nanny."""
        words = ("--nthreads", "1", "--host", "127.0.0.1", "--dashboard-address", ":0")
        self._engine.start(
            *(sys.executable, "-m", "dask", "worker", self._address, *words, "--local-directory", str(self.folder))
        )

    def close(self) -> None:
        self._engine.end()

    def launcher(self, run: Run) -> list[str]:
        return ["--workers", str(self.places), "--launcher", f"dask:scheduler={self._address}"]

    def empty(self) -> list[str]:
        program = f"from distributed import Client; client = Client({self._address!r}); "
        return [sys.executable, "-c", program + f"client.gather(client.map(abs, range({self.places})))"]

    def is_engine(self, process: psutil.Process) -> bool:
        return is_below(process, self._engine.processes)

    def victims(self) -> dict[str, Victim]:
        lost = r"the Dask worker tcp://127\.0\.0\.1:\d+ is gone"
        return {
            "executor": Victim(lambda run, place: kill(run.executor(place)), "SIGKILL"),
            "daemon": Victim(lambda run, place: kill(run.daemon(place)), "."),
            "Dask worker": Victim(lambda run, place: kill(run.daemon(place).parent()), lost, own_s=3.0),
            "node": Victim(self._lose_node, lost, own_s=3.0),
        }

    def _lose_node(self, run: Run, place: int) -> None:
        """Kill a Dask worker and its nanny, and start another one."""
        worker = run.daemon(place).parent()
        assert worker is not None
        kill(self._engine.above(worker))
        kill(worker)
        self._add()

    def notice(self, run: Run, place: int) -> None:
        """Send SIGTERM to the nanny, like Slurm or Kubernetes, and start another Dask worker."""
        worker = run.daemon(place).parent()
        assert worker is not None
        self._add()
        warn(self._engine.above(worker), self.notice_s)

    def stuck(self) -> dict[str, Stuck]:
        def dask(workers: int, *keys: str) -> list[str]:
            return ["--workers", str(workers), "--launcher", ",".join((f"dask:scheduler={self._address}", *keys))]

        return {
            "no resources": Stuck(
                dask(1, TIMEOUT),
                "its task is at the Dask worker .* which has . tasks",
                before=dask(self.places + SPARE),
            ),
            "infeasible": Stuck(dask(1, TIMEOUT, "resources.GPU=1"), "its task is unrunnable, because none of the"),
            "wrong Python": Stuck(dask(1, TIMEOUT, "env.PYTHONHOME=/nowhere"), "its worker ended with exit code 1"),
        }

    def ends(self) -> dict[str, End]:
        return {**super().ends(), "scheduler stopped": End(lambda run: self._scheduler.terminate(), ends_master=False)}

    def lose_engine(self, run: Run) -> None:
        """Kill the scheduler."""
        self._scheduler.kill()

    def clean(self, run: Run) -> None:
        super().clean(run)
        if not self._scheduler.is_running() or self._scheduler.status() == psutil.STATUS_ZOMBIE:
            self.close()
            self.open()
