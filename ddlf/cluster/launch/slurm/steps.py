"""Workers in steps of the job that the master belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar

from ddlf.cluster.launch.engine import PlaceEngine, first_line
from ddlf.cluster.launch.gate import Gate
from ddlf.cluster.launch.keys import Keys
from ddlf.cluster.launch.launcher import Cause, Check, Left, Requeue, Workers
from ddlf.cluster.launch.processes import end
from ddlf.cluster.launch.ranks import counts
from ddlf.cluster.launch.slurm.commands import cause_in, environment_of_command, megabytes
from ddlf.cluster.launch.slurm.keys import SlurmKeys
from ddlf.cluster.launch.slurm.requeue import requeue
from ddlf.cluster.launch.supervisor import WorkerStart
from ddlf.errors import ConfigError, ConnectError

SAID_BYTES = 4000
"""Bytes of a step's errors that the launcher keeps."""
GONE_S = 10.0
"""Seconds without a worker until its step is ended. If the ``slurmstepd`` of a step is killed, ``srun`` does not end."""
NEVER = ("Invalid job id", "already completing or completed", "Expired or invalid job", "revoked")
"""Words of ``srun`` if the job has ended, so that it gets no step any more."""


class Steps(PlaceEngine):
    """The launcher for workers in the job that this process belongs to. Each worker is a step with one task.

    The steps do not share CPUs. With ``--overlap``, Slurm would give two steps on a node the same ones. Only a place whose
    ``slurmstepd`` was killed needs this: Slurm believes that its step runs until the job ends.

    Args:
        keys: The keys of the launcher. The number of workers is by default that of the job's tasks or nodes.
        environment: The environment of this process.

    Raises:
        ConfigError: The job has not enough CPUs.
    """

    name = "slurm"
    model = SlurmKeys
    keys: SlurmKeys
    uses: ClassVar = frozenset({*Keys.model_fields, "cores", "memory", "gpus", "python", "env"})
    where: ClassVar = "in a job, which has its resources already"
    instead: ClassVar = "give it to salloc or sbatch"
    commands: ClassVar = ("srun",)

    def __init__(self, keys: SlurmKeys, environment: Mapping[str, str] = os.environ) -> None:
        cpus = counts(environment.get("SLURM_JOB_CPUS_PER_NODE", "")) or [1]
        count = int(environment.get("SLURM_NTASKS") or len(cpus))
        super().__init__(keys, keys.workers or Workers(count, count))
        cores = keys.cores or int(environment.get("SLURM_CPUS_PER_TASK") or 0) or None
        self._seats = seats(cpus, len(self.addresses), cores)
        self._gpus = keys.gpus
        if self._gpus is None and (gpus := environment.get("SLURM_GPUS_ON_NODE", "")).isdigit():
            self._gpus = int(gpus) // max(map([node for node, _ in self._seats].count, range(len(cpus))))
        self._shares = ["--overlap"] if "SLURM_PTY_PORT" in environment else []  # this shell's step has the CPUs
        self._errors: dict[int, bytes] = {}  # the end of the step's errors, by place
        self._without_node: set[int] = set()
        self._occupied: set[int] = set()  # places whose CPUs Slurm still gives to a step that has ended

    def requeue(self) -> Requeue:
        return requeue()

    async def check(self) -> AsyncIterator[Check]:
        yield Check(await first_line("srun", "--version"))
        shares = sorted({cores for _, cores in self._seats})
        yield Check(
            f"job {os.environ.get('SLURM_JOB_ID', '')} on {os.environ.get('SLURM_JOB_NODELIST', 'its nodes')}: each "
            f"worker gets {' or '.join(map(str, shares))} CPU{'s' * (shares != [1])}"
        )
        async for check in super().check():
            yield check

    def worker(self, gate: Gate, place: int | None) -> WorkerStart:
        assert place is not None
        gates, (_, cores) = gate.addresses(self.keys.network), self._seats[place]
        return WorkerStart(gates, place, self.tokens.primary, cores, self.keys.env)

    async def run(self, place: int, worker: WorkerStart) -> Left | None:
        """Run a step with the worker, and return how it ended.

        Raises:
            ConnectError: The job has ended.
        """
        self._errors[place] = b""
        incarnation = self.gate.incarnation(place)
        process = await asyncio.create_subprocess_exec(
            *("srun", *self._options(place), self.keys.python, "-m", "ddlf.cli.worker", *worker.arguments()),
            "--exit-with-parent",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**environment_of_command(keeps=("SLURM_JOB_ID", "SLURM_CONF")), **worker.environment()},
            start_new_session=True,
        )
        assert process.stdin is not None
        ending = asyncio.ensure_future(self._exit_code_of(place, process))
        leaving = asyncio.ensure_future(self.gate.wait_until_gone(place, incarnation, GONE_S))
        try:
            process.stdin.write(worker.token + b"\n")
            await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                self._occupied.add(place)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # this ends its tasks, too, should one still run
                return Left(Cause.NODE, "its worker has ended, and srun still waits for it")
            code = ending.result()
        finally:
            await _end_step(process)
            for task in (ending, leaving):
                task.cancel()
            await asyncio.gather(ending, leaving, return_exceptions=True)
        errors = self._errors[place].decode(errors="replace")
        words = _last_words(errors)
        if any(phrase in errors for phrase in NEVER):
            raise ConnectError(words)
        if re.search("error: .*node", errors):
            self._without_node.add(place)  # its node was taken out of the job, or is down
        return Left(cause_in(words), words or f"its step ended with exit code {code}", code)

    async def _exit_code_of(self, place: int, process: asyncio.subprocess.Process) -> int:
        """Keep the errors of a step, and return its exit code."""
        assert process.stderr is not None
        while chunk := await process.stderr.read(4096):
            self._errors[place] = (self._errors[place] + chunk)[-SAID_BYTES:]
        return await process.wait()

    def _options(self, place: int) -> list[str]:
        node, cores = self._seats[place]
        shares = ["--overlap"] if place in self._occupied else self._shares
        return [
            *("--nodes=1", "--ntasks=1", f"--cpus-per-task={cores}", "--exact", "--quit-on-interrupt", *shares),
            *([] if place in self._without_node else [f"--relative={node}"]),
            f"--mem={megabytes(self.keys.memory)}",  # 0: steps share the memory of the job
            *([] if self._gpus is None else [f"--gres=gpu:{self._gpus}" if self._gpus else "--gres=none"]),
            f"--job-name=ddlf-place-{place}",
        ]

    def engine_name(self, index: int) -> str:
        return f"job {os.environ.get('SLURM_JOB_ID', '')}, step ddlf-place-{index}"

    async def waits(self, index: int) -> str:
        return _last_words(self._errors.get(index, b"").decode(errors="replace"))


def seats(cpus: Sequence[int], count: int, cores: int | None) -> list[tuple[int, int]]:
    """Return the node and the number of CPUs of each place. Places go to the nodes by turns, as long as a node has CPUs.

    Args:
        cpus: Number of the job's CPUs on each node.
        count: Number of places.
        cores: Number of CPUs for each place; None divides the CPUs of a node among its places.

    Raises:
        ConfigError: There are not enough CPUs.
    """
    nodes: list[int] = []
    most_by_node = [node_cpus // (cores or 1) for node_cpus in cpus]
    while len(nodes) < count:
        free = [node for node, most in enumerate(most_by_node) if nodes.count(node) < most]
        if not free:
            raise ConfigError(
                f"launcher slurm: {count} workers with {cores or 1} CPU{'s' * ((cores or 1) > 1)} each do not fit into this "
                f"job, which has {', '.join(map(str, cpus))} CPUs on its nodes",
                hint=f"start {sum(most_by_node)} workers, or ask Slurm for a larger job",
            )
        nodes += free[: count - len(nodes)]
    return [(node, cores or cpus[node] // nodes.count(node)) for node in nodes]


def _last_words(errors: str) -> str:
    """Return the last line that tells why a step ended or waits, in the words of ``srun``."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and " Terminat" not in line]
    of_slurm = [line for line in lines if line.startswith(("srun: ", "slurmstepd"))]
    return re.sub(r"^(srun|slurmstepd\S*): (error: )?", "", next(reversed(of_slurm or lines), "")).strip("* ")


async def _end_step(process: asyncio.subprocess.Process) -> None:
    """End a step: first by the end of its worker's standard input, then by the signals of ``srun``."""
    if process.stdin is not None:
        process.stdin.close()
    await end(process)
