"""Tasks that an engine starts together, each with a rank: ``srun ddlf run app.py --launcher slurm``, or ``mpirun``.

All tasks run the same command. The task with rank 0 is the master. Every task, including the master's, has a worker at
the place of its rank, which joins the master. The tasks meet by a file in the working folder, which they share. The file
has the master's addresses and a token of this run, and only its owner can read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddlf.cluster.launch.gate import START_TIMEOUT_S, Joined
from ddlf.cluster.launch.launcher import Address
from ddlf.errors import ConfigError, ConnectError
from ddlf.rpc.tokens import Tokens, new_token
from ddlf.worker.process import child_environment

LOOK_S = 0.1
"""Seconds between two looks at the file and at the worker's process."""
LEFT_S = 30
"""Seconds that a worker tries to find its master again, if the master was killed."""
STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """The facts about this process as one of the tasks that an engine, Slurm or MPI, starts together.

    Args:
        engine: Name of the engine.
        rank: Rank of this task, from 0.
        size: Number of tasks.
        job: A text that no other job on this cluster has.
    """

    engine: str
    rank: int
    size: int
    job: str


def slurm(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return the facts about this process as a task of Slurm's ``srun``, from its environment.

    A batch script and the shell of ``salloc`` have a job, too. Only a task has a step.

    Raises:
        ConfigError: This process is not a task of Slurm.
    """
    if "SLURM_STEP_ID" not in environment:
        where = (
            "this is the script of a job, not a task"
            if "SLURM_JOB_ID" in environment
            else "Slurm did not start this process"
        )
        raise ConfigError(
            f"--launcher slurm: {where}", hint="start it with: srun --ntasks 4 ddlf run app.py --launcher slurm"
        )
    job = ".".join(environment.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    return Ranks(
        "slurm", int(environment["SLURM_PROCID"]), _size(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), job
    )


def mpi(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return the facts about this process as a task of ``mpirun``. They come from its environment, and with MPICH from
    its process manager, so no MPI library is needed.

    Raises:
        ConfigError: This process was not started by ``mpirun`` of Open MPI or MPICH.
    """
    if "OMPI_COMM_WORLD_RANK" in environment:
        job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
        return Ranks("mpi", int(environment["OMPI_COMM_WORLD_RANK"]), int(environment["OMPI_COMM_WORLD_SIZE"]), job)
    if "PMI_RANK" in environment and ("PMI_JOBID" in environment or "PMI_FD" in environment):
        job = environment.get("PMI_JOBID") or _name_by_pmi(int(environment["PMI_FD"]))
        return Ranks("mpi", int(environment["PMI_RANK"]), int(environment["PMI_SIZE"]), job)
    raise ConfigError(
        "--launcher mpi: mpirun did not start this process", hint="mpirun -n 4 ddlf run app.py --launcher mpi"
    )


@functools.cache
def _name_by_pmi(descriptor: int) -> str:
    """Return the name of a job of MPICH, which its environment does not have. The process manager gives it over PMI-1.

    Args:
        descriptor: The socket to the process manager.
    """

    def ask(line: str) -> str:
        os.write(descriptor, line.encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n") and (letter := os.read(descriptor, 1)):
            answer += letter
        return answer.decode()

    ask("cmd=init pmi_version=1 pmi_subversion=1")
    answer = ask("cmd=get_my_kvsname")
    ask("cmd=finalize")  # otherwise the end of this process would end all others
    return answer.partition("kvsname=")[2].strip()


def _size(environment: Mapping[str, str], *names: str) -> int:
    return next((int(environment[name]) for name in names if name in environment), 1)


class Ranked(Joined):
    """The launcher for the workers of all tasks of one job: each task starts its own worker, which joins the master at
    rank 0.

    Args:
        ranks: This task.
        folder: A folder that all tasks share.
        start_timeout_s: Seconds to wait for all workers, and for the master.
    """

    ends_workers = True

    def __init__(self, ranks: Ranks, folder: Path | None = None, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self.ranks = ranks
        name = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in ranks.job)
        self._file = (folder or Path.cwd()) / f".ddlf-{ranks.engine}-{name}.json"
        token = new_token().encode()
        super().__init__(
            ranks.size,
            "0.0.0.0",
            0,
            tokens=Tokens((token,), source="a token of this run"),
            start_timeout_s=start_timeout_s,
        )
        self._own: Supervisor | None = None

    def follower(self) -> Callable[[], int] | None:
        return None if self.ranks.rank == 0 else self._follow

    def _follow(self) -> int:
        """Run the worker of a task that does not lead, until the master has ended. Return the exit code.

        Raises:
            ConnectError: The master did not begin in time.
        """
        while True:
            meeting = self._wait_for_meeting()
            supervisor = Supervisor(*meeting, self.ranks.rank)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_, mine=supervisor: mine.ask_to_stop())
            code = supervisor.run(is_over=lambda: not self._file.exists())
            # A file of an earlier run, whose master was killed, leads nowhere. The master has replaced it meanwhile.
            if not code or self._meeting() in (None, meeting):
                return code

    def _wait_for_meeting(self) -> tuple[str, bytes]:
        deadline = time.monotonic() + self._start_timeout_s
        while (meeting := self._meeting()) is None:
            if time.monotonic() > deadline:
                raise ConnectError(
                    f"rank {self.ranks.rank} found no file {self._file} within {self._start_timeout_s:g} s",
                    hint="begin all tasks in a folder that they share",
                )
            time.sleep(LOOK_S)
        return meeting

    def _meeting(self) -> tuple[str, bytes] | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            meeting = json.loads(self._file.read_text())
            return meeting["gates"], meeting["token"].encode()
        return None

    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        """Open the gate, write the file, start this task's own worker, and wait for all workers.

        Raises:
            ConfigError: This task has another rank than 0, so it is not the master.
        """
        if self.follower() is not None:
            raise ConfigError(
                f"this task has rank {self.ranks.rank}, and only rank 0 is the master",
                hint="start the app with ddlf run, which runs the worker of each other rank",
            )
        if self._own is None:
            gate = self.open()
            self._write({"gates": gate.addresses, "token": self.tokens.primary.decode()})
            self._own = Supervisor(f"127.0.0.1:{gate.port}", self.tokens.primary, 0)
            threading.Thread(target=self._own.run, name="ddlf-rank", daemon=True).start()
        return await super().start(modules)

    def _write(self, meeting: dict[str, object]) -> None:
        """Write the meeting file, which tells the tasks the master's addresses, so that no task sees an incomplete
        file.
        """
        descriptor, name = tempfile.mkstemp(dir=self._file.parent, prefix=f"{self._file.name}.")  # mode 0600
        with open(descriptor, "w") as file:
            json.dump(meeting, file)
        os.replace(name, self._file)

    async def stop(self) -> None:
        """Tell all workers that the run is over, and remove the file, so that no task waits for it."""
        own, self._own = self._own, None
        if own is not None:
            self._file.unlink(missing_ok=True)
        await super().stop()
        if own is not None:
            await asyncio.to_thread(own.stop)


class Supervisor:
    """Keeps the worker of one place running. A worker that is killed is started again.

    Args:
        gates: The master's addresses, with commas.
        token: The token of this run.
        place: The worker's place.
    """

    def __init__(self, gates: str, token: bytes, place: int) -> None:
        self._command = [
            *(sys.executable, "-m", "ddlf.cli.worker", "--join", gates, "--place", str(place)),
            *("--join-for", str(LEFT_S), "--exit-with-parent", "--quiet"),
        ]
        self._token = token
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self._starting = threading.Lock()  # no process starts after ``stop``

    def start(self) -> None:
        """Start the worker's process, unless ``stop`` was called."""
        with self._starting:
            if self._is_stopped:
                return
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, env=child_environment(), start_new_session=True
            )
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it was killed at once; ``run`` starts it again
                self._process.stdin.write(self._token + b"\n")
                self._process.stdin.flush()

    def run(self, is_over: Callable[[], bool] = lambda: False) -> int:
        """Keep the worker of this task running until the run is over: start it again if it is killed. Return the exit
        code for the task.
        """
        self.start()
        code = 0
        while not (self._is_stopped or is_over()):
            ended = self._process.poll() if self._process is not None else None
            if ended is not None and ended >= 0:
                code = ended  # it ended by itself, and has said why
                break
            if ended is not None:
                self._close_stdin()
                self.start()
            time.sleep(LOOK_S)
        self.stop()
        return code

    def ask_to_stop(self) -> None:
        """Let ``run`` end soon. A signal handler may call this."""
        self._is_stopped = True

    def stop(self) -> None:
        """End the worker and wait for it. Safe to call again."""
        with self._starting:
            self._is_stopped = True
            process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


def check_one_task(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to run the same program in several tasks that do not know each other.

    Raises:
        ConfigError: This process is one of several tasks of Slurm or MPI.
    """
    for engine, read in (("slurm", slurm), ("mpi", mpi)):
        try:
            ranks = read(environment)
        except ConfigError:
            continue
        if ranks.size > 1:
            raise ConfigError(
                f"this is task {ranks.rank} of {ranks.size}, and each would train alone",
                hint=f"add --launcher {engine}, or start one task",
            )


def make_slurm(text: str) -> Ranked:
    """Make the launcher of ``--launcher slurm`` from its text."""
    return Ranked(slurm(), start_timeout_s=start_timeout(text))


def make_mpi(text: str) -> Ranked:
    """Make the launcher of ``--launcher mpi`` from its text."""
    return Ranked(mpi(), start_timeout_s=start_timeout(text))


def start_timeout(text: str) -> float:
    """Return the seconds in the text of a launcher, whose only option is ``start_timeout=SECONDS``."""
    if not text:
        return START_TIMEOUT_S
    name, _, value = text.partition("=")
    if name != "start_timeout":
        raise ConfigError(f"the launcher has no option {name!r}", hint="it has: start_timeout=SECONDS")
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"start_timeout must be a number of seconds above 0, got {value!r}")
    return seconds
