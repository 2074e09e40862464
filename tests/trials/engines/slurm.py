"""The rigs for Slurm: tasks of ``srun``, steps of a job, and an array job. Slurm runs four nodes on this machine."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import time
from collections.abc import Sequence

import psutil

from tests.engines.slurm_cluster import Lab, wait_for
from tests.trials.engines.rig import DDLF, MARK, End, Rig, Run, Victim, kill, terminate
from tests.trials.engines.stuck import TIMEOUT, Stuck

ENGINE = {"slurmctld", "slurmd", "munged"}
NODE_LOST_S = 45.0
"""Seconds until an element of a lost node runs again. Slurm notices the loss after 30 s, and then starts the element on another
node."""
REQUEUED_S = 15.0
"""Seconds that a requeued job waits, at least until its processes have ended."""


class SlurmRig(Rig):
    """The common part of the three rigs for Slurm."""

    lab: Lab

    def open(self) -> None:
        self.lab = Lab(self.folder, {MARK: self.mark, "DDLF_GRACE": f"{self.notice_s:g}"})
        self.folder.chmod(0o755)
        self.lab.start()

    def close(self) -> None:
        self.lab.stop()

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **self.lab.environment}

    def is_engine(self, process: psutil.Process) -> bool:
        return process.name() in ENGINE

    def jobs(self) -> list[str]:
        """Return the jobs and elements that have not ended, as text."""
        return self.lab.call("squeue", "--noheader", "--array", "--format=%i %T %r").splitlines()

    def left(self, run: Run) -> list[str]:
        return super().left(run) + [f"job {words}" for words in self.jobs()]

    def cancel(self) -> None:
        """Cancel all jobs."""
        self.lab.call("scancel", f"--user={getpass.getuser()}", check=False)

    def clean(self, run: Run) -> None:
        self.cancel()
        super().clean(run)
        wait_for(lambda: not self.jobs())

    def victims(self) -> dict[str, Victim]:
        return {
            "executor": Victim(lambda run, place: kill(run.executor(place)), "SIGKILL"),
            "daemon": Victim(lambda run, place: kill(run.daemon(place)), ""),
        }


class TasksRig(SlurmRig):
    """A rig whose places are tasks of ``srun``. A lost node ends the whole step, so only executors and daemons can be lost."""

    name = "slurm-tasks"

    def launcher(self, run: Run) -> list[str]:
        return ["--launcher", "slurm"]

    def command(self, run: Run, options: Sequence[str]) -> list[str]:
        count = str(self.places)
        return ["srun", "-N", count, "-n", count, *DDLF, *self.launcher(run), *options]

    def empty(self) -> list[str]:
        return ["srun", "-N", str(self.places), "-n", str(self.places), "true"]

    def ends(self) -> dict[str, End]:
        return {
            "Ctrl-C twice": End(interrupt_twice),
            "SIGTERM": End(lambda run: run.terminate()),
            "kill -9 of the master": End(lambda run: run.kill()),
            "kill -9 of srun": End(lambda run: kill(run.process)),
            "scancel": End(lambda run: self.cancel()),
        }


def interrupt_twice(run: Run) -> None:
    """Press Ctrl-C twice: ``srun`` prints the states of its tasks the first time, and ends them the second time."""
    run.interrupt()
    time.sleep(0.3)
    run.interrupt()


class StepsRig(SlurmRig):
    """A rig whose places are steps of a job of ``salloc``. Slurm 22.05 gives no notice: ``scancel`` kills a step at once."""

    name = "slurm-steps"

    def launcher(self, run: Run) -> list[str]:
        return ["--launcher", "slurm"]

    def command(self, run: Run, options: Sequence[str]) -> list[str]:
        count = str(self.places)
        return ["salloc", "-Q", "-N", count, "-n", count, *DDLF, *self.launcher(run), *options]

    def empty(self) -> list[str]:
        count = str(self.places)
        return ["salloc", "-Q", "-N", count, "-n", count, "srun", "true"]

    def victims(self) -> dict[str, Victim]:
        return {
            "executor": Victim(lambda run, place: kill(run.executor(place)), "SIGKILL"),
            "daemon": Victim(lambda run, place: kill(run.daemon(place)), "(?i)killed|137|SIGKILL"),
            "step daemon": Victim(lambda run, place: kill(run.daemon(place).parent()), ".", own_s=REQUEUED_S),
        }

    def ends(self) -> dict[str, End]:
        # A kill -9 of salloc is not in this list: Slurm keeps the job, so the run rightly continues in it.
        return {
            "Ctrl-C": End(interrupt_command),
            "SIGTERM of the master": End(terminate_master),
            "kill -9 of the master": End(lambda run: run.kill()),
            "scancel": End(lambda run: self.cancel(), ends_master=False),
        }


def interrupt_command(run: Run) -> None:
    """Press Ctrl-C like in a terminal. The foreground group is the command of ``salloc``, or ``salloc`` itself before it has
    started the command.
    """
    master = run.master()
    if master is None:
        run.interrupt()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(master.pid), signal.SIGINT)


def terminate_master(run: Run) -> None:
    """Send SIGTERM to the master, or to ``salloc`` if the master has not started yet."""
    terminate(run.master() or run.process)


class ArrayRig(SlurmRig):
    """A rig whose places are elements of an array job, each on a separate node. There is one more node than places."""

    name = "slurm-array"

    def launcher(self, run: Run) -> list[str]:
        return ["--workers", str(self.places), "--launcher", "slurm:cores=2"]

    def element(self, run: Run, place: int) -> tuple[str, str]:
        """Return the number of the job and the node of a running place."""
        job, _, node = wait_for(lambda: parts if len(parts := self.lab.jobs().get(place, [])) == 3 else None)
        return job, node

    def victims(self) -> dict[str, Victim]:
        return {
            "executor": Victim(lambda run, place: kill(run.executor(place)), "SIGKILL"),
            "daemon": Victim(lambda run, place: kill(run.daemon(place)), ""),
            "node": Victim(self._lose_node, "", own_s=NODE_LOST_S, prints="NODE_FAIL", mend=self._mend_node),
            "preemption": Victim(self._preempt, "SIGTERM", own_s=REQUEUED_S, is_notice=True),
        }

    def _lose_node(self, run: Run, place: int) -> None:
        _, self._lost = self.element(run, place)
        self.lab.kill_node(self._lost)

    def _mend_node(self) -> None:
        self.lab.call("slurmd", "-N", self._lost)
        wait_for(lambda: "down" not in self.lab.call("sinfo", "-hN", "-n", self._lost, "-p", "low", "-o", "%T"))

    def _preempt(self, run: Run, place: int) -> None:
        _, node = self.element(run, place)
        self.lab.call("sbatch", "-p", "high", "-w", node, "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")

    def notice(self, run: Run, place: int) -> None:
        """Requeue the element: Slurm sends SIGTERM, and SIGKILL after KillWait."""
        job, _ = self.element(run, place)
        self.lab.call("scontrol", "requeue", f"{job}_{place}")

    def empty(self) -> list[str]:
        elements = f"--array=0-{self.places - 1}"
        return ["sbatch", "--wait", elements, "-c", "2", "-o", "/dev/null", "--wrap", "true"]

    def stuck(self) -> dict[str, Stuck]:
        def slurm(*keys: str, workers: int = 2) -> list[str]:
            return ["--workers", str(workers), "--launcher", ",".join(("slurm:cores=2", TIMEOUT, *keys))]

        reason = r"is PENDING, reason (Resources|Priority)"
        return {
            "no resources": Stuck(slurm(), reason, before=slurm(workers=4)),
            "wrong partition": Stuck(slurm("partition=nope"), "invalid partition specified: nope", ends_with="."),
            "infeasible": Stuck(slurm("memory=500GiB"), "Memory specification can not be satisfied", ends_with="."),
            "wrong Python": Stuck(slurm("python=/nowhere/python"), "/nowhere/python"),
        }

    def ends(self) -> dict[str, End]:
        return {**super().ends(), "scancel": End(lambda run: self.cancel(), ends_master=False)}
