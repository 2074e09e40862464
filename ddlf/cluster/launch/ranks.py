"""Tasks that an engine starts together, each with a rank: ``srun ddlf run app.py --launcher slurm``, or ``mpirun``.

All tasks run the same command. The task with rank 0 is the master. Every task, including the master's, has a worker at
the place of its rank, which joins the master. The tasks meet by a file in the working folder, which they share. The file
has the master's addresses and a token of this run, and only its owner can read it. An engine may have other meeting
points, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddlf.cluster.launch.engine import check_folder
from ddlf.cluster.launch.gate import Gate
from ddlf.cluster.launch.guard import Guard
from ddlf.cluster.launch.keys import Keys
from ddlf.cluster.launch.launcher import Address, Check, Workers
from ddlf.cluster.launch.rank_launcher import Leading
from ddlf.cluster.launch.rendezvous import Meeting, MeetingFile, MeetingPoint
from ddlf.cluster.launch.supervisor import LOOK_S, Supervisor, WorkerStart
from ddlf.errors import ConfigError, ConnectError

INTERACTIVE_STEP = "4294967290"
"""SLURM_STEP_ID in the shell of ``salloc`` on clusters that start this shell on a node."""
NO_PARENT = -1


def own_parent() -> int:
    """Return the process that started this one; ``NO_PARENT`` if that has ended already, so that another process has
    taken this one over.

    A process is in the session of its parent, unless it is the first one of a session.
    """
    parent, session = os.getppid(), os.getsid(0)
    with contextlib.suppress(OSError):  # it ends in this moment
        if session != os.getpid() and os.getsid(parent) != session:
            return NO_PARENT
    return parent


PARENT = own_parent()
"""The engine's process that started this one. Taken early, because the engine may be killed while the app is imported."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The facts about this process as one of the tasks that an engine, Slurm or MPI, starts together.

    Args:
        engine: Name of the engine.
        rank: Rank of this task, from 0.
        size: Number of tasks.
        job: A text that no other job on this cluster has.
        cores: Number of CPUs that the engine gives this task; None if the operating system says it.
    """

    engine: str
    rank: int
    size: int
    job: str
    cores: int | None = None


def is_task(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a task that was started to run a program, and not an interactive shell."""
    step = environment.get("SLURM_STEP_ID", INTERACTIVE_STEP)
    is_shell = "SLURM_PTY_PORT" in environment and environment.get("SLURM_STEP_NUM_TASKS") == "1"
    return step != INTERACTIVE_STEP and not is_shell


def slurm(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return the facts about this process as a task of Slurm's ``srun``, from its environment.

    A batch script and the shell of ``salloc`` have a job, too. Only a task has a step.

    Raises:
        ConfigError: This process is not a task of Slurm.
    """
    if "SLURM_JOB_ID" not in environment or not is_task(environment):
        raise ConfigError(
            "launcher slurm: srun did not start this process",
            hint="start it with: srun --ntasks 4 ddlf run app.py --launcher slurm",
        )
    job = ".".join(environment.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    size = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    return Ranks("slurm", int(environment["SLURM_PROCID"]), int(size), job, _cores_of_task(environment))


def _cores_of_task(environment: Mapping[str, str]) -> int | None:
    with contextlib.suppress(KeyError, ValueError):
        return int(environment["SLURM_CPUS_PER_TASK"])
    with contextlib.suppress(KeyError, ValueError, IndexError):
        tasks = counts(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]
        return max(1, int(environment["SLURM_CPUS_ON_NODE"]) // tasks)
    return None


def counts(text: str) -> list[int]:
    """Return the numbers in Slurm's short form of a list, such as ``"2(x3),1"``: a number for each node."""
    parts = (re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(","))
    return [int(part[1]) for part in parts if part is not None for _ in range(int(part[2] or 1))]


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


def is_orphan() -> bool:
    """Return whether the engine's process that started this task was killed. Nobody would end this task any more."""
    return os.getppid() != PARENT


@functools.cache
def _end_with_parent() -> None:
    """From now on, end this process as SIGTERM does if the engine is killed."""

    def watch() -> None:
        while not is_orphan():
            time.sleep(LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="ddlf-parent", daemon=True).start()


class Ranked(Leading):
    """The launcher for the workers of all tasks of one job: each task starts its own worker, which joins the master at
    rank 0.

    Args:
        keys: The keys of the launcher.
        ranks: This task.
        folder: A folder that all tasks share.
        more_points: Meeting points for tasks that share no folder.

    Raises:
        ConfigError: ``workers`` is not the number of tasks.
    """

    uses_tasks = True
    called = ("task", "rank")
    meeting_hint = "begin all tasks in a folder that they share"

    def __init__(
        self, keys: Keys, ranks: Ranks, folder: Path | None = None, more_points: Sequence[MeetingPoint] = ()
    ) -> None:
        self.ranks, self.place = ranks, ranks.rank
        workers = keys.workers or Workers(ranks.size, ranks.size)
        if workers.most != ranks.size:
            raise ConfigError(
                f"launcher {ranks.engine}: {ranks.size} tasks run, but workers={workers}",
                hint=f"leave it out, or start {workers.most} tasks",
            )
        name = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in ranks.job)
        self._file = (folder or Path.cwd()) / f".ddlf-{ranks.engine}-{name}.json"
        self._points: list[MeetingPoint] = [MeetingFile(self._file), *more_points]
        super().__init__(keys, workers)
        self._guard: Guard | None = None

    async def check(self) -> AsyncIterator[Check]:
        ranks = self.ranks
        cores = "" if ranks.cores is None else f", and each has {ranks.cores} CPU{'s' * (ranks.cores != 1)}"
        yield Check(f"this is task {ranks.rank} of {ranks.size}{cores}")
        async for check in super().check():
            yield check
        yield check_folder(self._file.parent)

    def follower(self) -> Callable[[], int] | None:
        follow = super().follower()
        if follow is None:
            _end_with_parent()
        return follow

    def _follow(self) -> int:
        """Run the worker of a task that does not lead, until the master has ended. Return the exit code.

        Raises:
            ConnectError: The master did not begin in time, or the engine was killed before.
        """
        while True:
            point, meeting = self._wait_for_meeting()
            supervisor = Supervisor(WorkerStart(meeting.gates, self.ranks.rank, meeting.token, self.ranks.cores))
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_, own_supervisor=supervisor: own_supervisor.ask_to_stop())
            code = supervisor.run(lambda point=point: point.is_over() or is_orphan())  # type: ignore[misc]
            if is_orphan():
                return code
            # A file of an earlier run, whose master was killed, leads nowhere. The master has replaced it meanwhile.
            if not code or point.find() in (None, meeting):
                return code

    def _wait_for_meeting(self) -> tuple[MeetingPoint, Meeting]:
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() <= deadline:
            for point in self._points:
                if (meeting := point.find()) is not None:
                    return point, meeting
            if is_orphan():
                raise ConnectError(f"rank {self.ranks.rank}: the process that started it was killed")
            time.sleep(LOOK_S)
        reasons = "; ".join(point.reason() for point in self._points)
        raise ConnectError(
            f"rank {self.ranks.rank} has not found the master within {self._start_timeout_s:g} s: {reasons}",
            hint=self.meeting_hint,
        )

    def engine_name(self, index: int) -> str:
        return f"job {self.ranks.job}, rank {index}"

    def _tell_others(self, gate: Gate) -> None:
        self._guard = Guard(self._file)
        meeting = Meeting(gate.addresses(self.network), self.tokens.primary)
        for point in self._points:
            point.open(meeting)

    def _own_worker(self, gate: str) -> WorkerStart:
        return WorkerStart(gate, 0, self.tokens.primary, self.ranks.cores)

    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        """Start as ``Leading`` does. The tasks that have met need no meeting point any more."""
        addresses = await super().start(modules)
        if not self.gate.absent_at_start:
            for point in self._points:
                await asyncio.to_thread(point.forget_facts)
        return addresses

    async def stop(self) -> None:
        """Tell all workers that the run is over, and no more tasks where the master is."""
        guard, self._guard = self._guard, None
        if self._supervisor is not None:
            for point in self._points:
                point.close()
        if guard is not None:
            await asyncio.to_thread(guard.close)
        await super().stop()


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
                hint=f"use --launcher {engine}, or start one task",
            )


class Mpi(Ranked):
    """The launcher for the tasks of ``mpirun``."""

    name = "mpi"

    def __init__(self, keys: Keys) -> None:
        super().__init__(keys, mpi())
