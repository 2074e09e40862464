"""Workers that Slurm starts: ``--launcher slurm``. Runs on the master.

Where the command runs decides how the workers start:

- In a task of ``srun``, all tasks run the same command. The task with rank 0 is the master.
- In the shell of ``salloc`` or in the script of ``sbatch``, this process is the master, and each worker is a step of the job.
- Elsewhere, as on a login node, this process is the master, and the workers are an array job. Element 2 has place 2, and
  Slurm queues it again if its node fails or if another job takes its node.

The token never reaches a job's record. A task reads it from a file of its owner, and so does an element of an array.
A step reads it from standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from ddlf.cluster.launch.command import write_token
from ddlf.cluster.launch.engine import PlaceEngine
from ddlf.cluster.launch.gate import Gate
from ddlf.cluster.launch.keys import Bytes, Cores, Env, Gpus, Keys, Seconds, parse_keys, read_keys
from ddlf.cluster.launch.launcher import Cause, Launcher, Left, Requeue, Workers
from ddlf.cluster.launch.ranks import Ranked, counts, is_task, slurm
from ddlf.cluster.launch.slurm_requeue import requeue
from ddlf.cluster.launch.supervisor import WorkerStart
from ddlf.errors import ConfigError, ConnectError
from ddlf.worker.machine import CORES_VARIABLE
from ddlf.worker.process import child_environment

log = logging.getLogger(__name__)

LOOKS_S = (2.0, 10.0)
"""Seconds between two calls of ``squeue``: while an element does not run, and while all run."""
LAST_LOOKS_S = 0.2
"""Seconds between two calls of ``squeue`` when the run is over, until all elements have ended."""
NEWS_S = 1.0
"""How long to wait for news from Slurm about a worker that was lost."""
PAUSE_S = 5.0
"""How long an element waits before it starts again. If it starts on the same node within a second, Slurm ends it with
``Job credential revoked``.
"""
STOP_S = 5.0
SUBMIT_S = 30.0
"""How long the end of a run waits for an ``sbatch`` that still runs."""
SAID_BYTES = 4000
"""Bytes of a step's errors that the launcher keeps."""
COLUMNS = {"JobArrayID": 40, "State": 24, "RestartCnt": 12, "NodeList": 64, "PreemptTime": 24, "Reason": 128}
"""Fields of ``squeue``, with their widths."""
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED"})
ALIVE = frozenset({*WAITING, "RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"})
"""States of a job that has not ended."""
CAUSES = {
    **dict.fromkeys(("PREEMPTED", "PREEMPTION"), Cause.PREEMPTED),
    **dict.fromkeys(("TIMEOUT", "TIME LIMIT", "DEADLINE"), Cause.TIME_LIMIT),
    **dict.fromkeys(("OUT_OF_MEMORY", "OOM", "OUT OF MEMORY"), Cause.MEMORY),
    **dict.fromkeys(("NODE_FAIL", "NODE FAIL", "BOOT_FAIL"), Cause.NODE),
    **dict.fromkeys(("REQUEUE", "CANCELLED"), Cause.CANCELLED),
}
"""Words of Slurm about the end of a job or a step, the most precise first."""
NEVER = ("Invalid job id", "already completing or completed", "Expired or invalid job", "revoked")
"""Words of ``srun`` if the job has ended, so that it gets no step any more."""


class SlurmKeys(Keys):
    """The keys of the launcher ``slurm``. Which have an effect depends on where the command runs."""

    cores: Cores | None = Field(default=None, description="Number of CPUs of each worker.")
    memory: Bytes | None = Field(default=None, description="Memory of each worker, such as 8GiB.")
    gpus: Gpus | None = Field(default=None, description="Number of GPUs of each worker.")
    python: str = Field(default=sys.executable, description="Path of Python on the nodes.")
    env: Env = Field(default={}, description="Environment variables of the workers.")
    time: Seconds | None = Field(default=None, description="Time limit of each worker's job, such as 2h.")
    partition: str | None = Field(default=None, description="Partition of Slurm.")
    account: str | None = Field(default=None, description="Account of Slurm.")
    qos: str | None = Field(default=None, description="Quality of service of Slurm.")
    constraint: str | None = Field(default=None, description="Features that the nodes must have.")
    folder: Path = Field(default_factory=Path.cwd, description="A folder that the workers share, for the token.")


class Slurm(Launcher):
    """The launcher ``slurm``. It makes one of three launchers, by where this process runs."""

    model = SlurmKeys

    @classmethod
    def from_text(cls, text: str, workers: Workers | None = None) -> Launcher:
        return choose(parse_keys(text, "slurm"), workers)

    @classmethod
    def from_keys(cls, values: Mapping[str, Any]) -> Launcher:
        return choose(values)


def choose(
    values: Mapping[str, Any], workers: Workers | None = None, environment: Mapping[str, str] = os.environ
) -> Launcher:
    """Return the launcher for the place where this process runs: a task, an allocation, or a machine outside of jobs.

    Raises:
        ConfigError: A key is invalid or has no effect here, or Slurm's commands are not here.
    """
    keys = read_keys(SlurmKeys, "slurm", values, workers)
    kind: type[Tasks | Steps | Array] = Array
    if "SLURM_JOB_ID" in environment:
        kind = Tasks if is_task(environment) else Steps
    if unused := sorted(keys.model_fields_set - kind.uses):
        raise ConfigError(f"launcher slurm: {', '.join(unused)} has no effect {kind.where}", hint=kind.instead)
    missing = [name for name in kind.commands if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"launcher slurm: Slurm's command {missing[0]} is not on this machine, perhaps because this is a container",
            hint="run this where Slurm is, or start it in a job: srun --ntasks 4 ddlf run app.py --launcher slurm",
        )
    return kind(keys)


class Tasks(Ranked):
    """The launcher for the tasks of ``srun``, which all run the same command."""

    name = "slurm"
    uses: ClassVar = frozenset(Keys.model_fields)
    where: ClassVar = "in a task of srun, which has its resources already"
    instead: ClassVar = "give it to srun: srun --ntasks 4 --cpus-per-task 2"
    commands: ClassVar = ()

    def __init__(self, keys: Keys) -> None:
        super().__init__(keys, slurm())

    def requeue(self) -> Requeue:
        return requeue()


class Steps(PlaceEngine):
    """The launcher for workers in the job that this process belongs to. Each worker is a step with one task.

    The steps do not share CPUs. With ``--overlap``, Slurm would give two steps on a node the same ones.

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
        self._said: dict[int, bytes] = {}  # the end of the step's errors, by place
        self._without_node: set[int] = set()

    def requeue(self) -> Requeue:
        return requeue()

    def worker(self, gate: Gate, place: int | None) -> WorkerStart:
        assert place is not None
        gates, (_, cores) = gate.addresses(self.keys.network), self._seats[place]
        return WorkerStart(gates, place, self.tokens.primary, cores, self.keys.env)

    async def run(self, place: int, worker: WorkerStart) -> Left | None:
        """Run a step with the worker, and return how it ended.

        Raises:
            ConnectError: The job has ended.
        """
        self._said[place] = b""
        process = await asyncio.create_subprocess_exec(
            *("srun", *self._options(place), self.keys.python, "-m", "ddlf.cli.worker", *worker.arguments()),
            "--exit-with-parent",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**_environment(keeps=("SLURM_JOB_ID", "SLURM_CONF")), **worker.environment()},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            process.stdin.write(worker.token + b"\n")
            while chunk := await process.stderr.read(4096):
                self._said[place] = (self._said[place] + chunk)[-SAID_BYTES:]
            code = await process.wait()
        finally:
            await _end_step(process)
        said = self._said[place].decode(errors="replace")
        words = _last_words(said)
        if any(never in said for never in NEVER):
            raise ConnectError(words)
        if re.search("error: .*node", said):
            self._without_node.add(place)  # its node was taken out of the job, or is down
        return Left(_cause(words), words or f"its step ended with exit code {code}", code)

    def _options(self, place: int) -> list[str]:
        node, cores = self._seats[place]
        return [
            *("--nodes=1", "--ntasks=1", f"--cpus-per-task={cores}", "--exact", "--quit-on-interrupt", *self._shares),
            *([] if place in self._without_node else [f"--relative={node}"]),
            f"--mem={_megabytes(self.keys.memory)}",  # 0: steps share the memory of the job
            *([] if self._gpus is None else [f"--gres=gpu:{self._gpus}" if self._gpus else "--gres=none"]),
            f"--job-name=ddlf-place-{place}",
        ]

    async def waits(self, index: int) -> str:
        return _last_words(self._said.get(index, b"").decode(errors="replace"))

    async def left(self, index: int) -> Left | None:
        for _ in range(10):  # srun tells the end of a task a moment after the master has lost the connection
            if (left := await super().left(index)) is not None:
                return left
            await asyncio.sleep(NEWS_S / 20)
        return None


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
    room = [there // (cores or 1) for there in cpus]
    while len(nodes) < count:
        free = [node for node, most in enumerate(room) if nodes.count(node) < most]
        if not free:
            raise ConfigError(
                f"launcher slurm: {count} workers with {cores or 1} CPU{'s' * ((cores or 1) > 1)} each do not fit into this "
                f"job, which has {', '.join(map(str, cpus))} CPUs on its nodes",
                hint=f"start {sum(room)} workers, or ask Slurm for a larger job",
            )
        nodes += free[: count - len(nodes)]
    return [(node, cores or cpus[node] // nodes.count(node)) for node in nodes]


@dataclass(frozen=True, slots=True)
class Element:
    """The state of one element of an array job, as ``squeue`` tells it."""

    state: str
    restarts: int
    node: str
    reason: str
    is_preempted: bool = False


@dataclass(slots=True)
class Job:
    """The job of one place.

    Attributes:
        name: Its id, such as ``12_3``.
        now: Its last known state; None before the first.
        restarts: How often Slurm has queued it again, as far as the launcher has told it.
        begins_at: Where this job's part of the output file begins.
        begins_again_at: When to ask Slurm to start it again, by the clock of the gate's loop; None if Slurm was asked.
    """

    name: str
    now: Element | None = None
    restarts: int = 0
    begins_at: int = 0
    begins_again_at: float | None = None


class Array(PlaceEngine):
    """The launcher for workers in an array job, which this process submits. Slurm queues an element again by itself if its
    node fails or another job takes it. A worker that is killed is started again in its element.

    A small process beside this one cancels the job and removes the token if this process is killed.
    """

    name = "slurm"
    model = SlurmKeys
    keys: SlurmKeys
    uses: ClassVar = frozenset(SlurmKeys.model_fields)
    where: ClassVar = ""
    instead: ClassVar = ""
    commands: ClassVar = ("sbatch", "squeue", "scancel")

    def __init__(self, keys: SlurmKeys) -> None:
        super().__init__(keys)
        self._folder: Path | None = None
        self._guard: asyncio.subprocess.Process | None = None
        self._jobs: dict[int, Job] = {}
        self._submitting: set[asyncio.Task[None]] = set()
        self._look_now: asyncio.Event  # ``prepare`` makes these two, because they belong to one gate's loop
        self._news: asyncio.Condition
        self._is_silent = False

    def requeue(self) -> Requeue:
        raise ConfigError(
            "--requeue has no effect here: this command is in no job of Slurm, which could start it again",
            hint="start it in a job: ddlf slurm render app.py --workers 4 --requeue --checkpoint DIR | sbatch",
        )

    async def prepare(self) -> None:
        """Submit the array job.

        Raises:
            ConnectError: Slurm refuses it. The error has the line of ``sbatch``.
        """
        self._look_now, self._news = asyncio.Event(), asyncio.Condition()
        self._folder = Path(tempfile.mkdtemp(prefix=".ddlf-slurm-", dir=self.keys.folder.resolve()))  # mode 0700
        token = write_token(self._folder, self.tokens.primary)
        script = array_script(self.keys, self.worker(self.gate, None), token)
        (self._folder / "job.sh").write_text(script)
        self._guard = await asyncio.create_subprocess_exec(
            *("sh", "-c", 'read -r _; scancel --quiet --name="$1"; rm -rf "$2"', "ddlf-guard"),
            *(self._folder.name[1:], str(self._folder)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        await self._submit(range(len(self.addresses)))

    async def _submit(self, places: Sequence[int]) -> None:
        """Submit the elements of places. If this is cancelled, ``sbatch`` continues, and ``release`` waits for it."""
        submitting = asyncio.create_task(self._call_sbatch(places))
        self._submitting.add(submitting)
        submitting.add_done_callback(self._submitting.discard)
        await asyncio.shield(submitting)

    async def _call_sbatch(self, places: Sequence[int]) -> None:
        assert self._folder is not None
        array = f"{places[0]}-{places[-1]}" if len(places) > 1 else str(places[0])
        code, out, errors = await _call(
            *("sbatch", "--parsable", f"--array={array}", f"--job-name={self._folder.name[1:]}"),
            *(
                f"--chdir={self.keys.folder.resolve()}",
                f"--output={self._folder}/place-%a.log",
                *job_options(self.keys),
            ),
            str(self._folder / "job.sh"),
        )
        if code:
            raise ConnectError(f"sbatch refused the job: {errors or f'exit code {code}'}")
        job = out.partition(";")[0].strip()
        self._jobs.update({place: Job(f"{job}_{place}", begins_at=self._output_bytes(place)) for place in places})

    async def _run_all(self, gate: Gate) -> None:
        looking = asyncio.create_task(self._look(gate))
        try:
            await super()._run_all(gate)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def run(self, place: int, worker: WorkerStart) -> Left | None:
        """Wait until the element of a place has ended. Submit it again if the last one has ended.

        Raises:
            ConnectError: The element was cancelled, or Slurm does not take another one.
        """
        if place not in self._jobs:
            await self._submit([place])
            self._look_now.set()
        async with self._news:
            await self._news.wait_for(lambda: self._has_ended(self._jobs[place]))
        job = self._jobs.pop(place)
        left = self._end_of(place, job)
        if left.cause is Cause.CANCELLED:
            raise ConnectError(left.words)
        return left

    def _has_ended(self, job: Job) -> bool:
        over = self._gate is None or self._gate.is_over
        return job.now is not None and (job.now.state not in ALIVE or (over and job.now.state == "COMPLETING"))

    async def _look(self, gate: Gate) -> None:
        """Ask Slurm for the states of the elements again and again."""
        while True:
            found = await self._states()
            for place, job in list(self._jobs.items()):
                if found is not None:
                    await self._update(place, job, found.get(job.name))
            async with self._news:
                self._news.notify_all()
            all_run = all(job.now is not None and job.now.state == "RUNNING" for job in self._jobs.values())
            pause = LAST_LOOKS_S if gate.is_over else LOOKS_S[all_run]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look_now.wait()
            self._look_now.clear()

    async def _states(self) -> dict[str, Element] | None:
        assert self._folder is not None
        form = ",".join(f"{name}:{width}" for name, width in COLUMNS.items())
        code, out, errors = await _call(
            *("squeue", "--noheader", "--array", "--states=all", f"--name={self._folder.name[1:]}", f"--Format={form}")
        )
        if bool(code) != self._is_silent:
            self._is_silent = bool(code)
            if code:
                log.warning("Slurm does not answer, and the run continues: %s", errors)
            else:
                log.warning("Slurm answers again")
        return None if code else dict(map(_element, out.splitlines()))

    async def _update(self, place: int, job: Job, now: Element | None) -> None:
        if now is None and job.now is None:
            return
        before, job.now = job.now, now or Element("UNKNOWN", job.restarts, job.now.node if job.now else "", "")
        if job.now.restarts > job.restarts:
            node = (before or job.now).node
            said = self._slurms_line(place, job)
            words = said or await _about_node(node) or "the reason is unknown"
            left = Left(_cause(words), f"Slurm has queued job {job.name} again: {words}")
            job.restarts, job.begins_at = job.now.restarts, self._output_bytes(place)
            self.has_left(place, left)
            log.warning("place %d: %s", place, left.words)
            job.begins_again_at = asyncio.get_running_loop().time() + PAUSE_S
        again_at = job.begins_again_at
        if job.now.reason == "BeginTime" and again_at is not None and asyncio.get_running_loop().time() >= again_at:
            # Otherwise Slurm would let the element wait for two minutes.
            job.begins_again_at = None
            if shutil.which("scontrol"):
                await _call("scontrol", "update", f"JobId={job.name}", "StartTime=now")

    def _end_of(self, place: int, job: Job) -> Left:
        assert job.now is not None
        if job.now.is_preempted and job.now.state in {"COMPLETED", "COMPLETING"}:
            return Left(Cause.PREEMPTED, f"Slurm gave the node of job {job.name} to another job (PREEMPTED)")
        words = f"Slurm ended job {job.name} with {job.now.state}"
        said = self._slurms_line(place, job) or self._last_line(place, job)
        return Left(_cause(job.now.state), f"{words}: {said}" if said else words)

    async def left(self, index: int) -> Left | None:
        with contextlib.suppress(ConnectError):
            await self.gate.run(self._news_soon())
        job = self._jobs.get(index)
        if job is not None and (said := self._slurms_line(index, job)):
            return Left(_cause(said), f"Slurm ended it: {said}")
        if job is not None and job.now is not None and job.now.is_preempted:
            return Left(Cause.PREEMPTED, f"Slurm gives the node of job {job.name} to another job (PREEMPTED)")
        return await super().left(index)

    async def _news_soon(self) -> None:
        self._look_now.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NEWS_S), self._news:
                await self._news.wait()

    async def waits(self, index: int) -> str:
        job = self._jobs.get(index)
        if job is None or job.now is None:
            left = self._lefts.get(index)
            return left.words if left is not None else ""
        if job.now.state in WAITING:
            return f"Slurm's job {job.name} is {job.now.state}, reason {job.now.reason}"
        said = self._last_line(index, job)
        return f"Slurm's job {job.name} is {job.now.state} on {job.now.node}" + (f": {said}" if said else "")

    def _output(self, place: int, job: Job) -> list[str]:
        assert self._folder is not None
        with contextlib.suppress(OSError), open(self._folder / f"place-{place}.log", "rb") as file:
            file.seek(job.begins_at)
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return []

    def _output_bytes(self, place: int) -> int:
        assert self._folder is not None
        with contextlib.suppress(OSError):
            return (self._folder / f"place-{place}.log").stat().st_size
        return 0

    def _last_line(self, place: int, job: Job) -> str:
        return next(reversed(self._output(place, job)), "")

    def _slurms_line(self, place: int, job: Job) -> str:
        """Return what Slurm has written into the output about the end of a job, such as ``CANCELLED AT ... DUE TO
        PREEMPTION``.
        """
        lines = (re.search(r"\*\*\* JOB \S+ ON (.*) \*\*\*", line) for line in self._output(place, job))
        return next((line[1] for line in lines if line is not None), "")

    async def _end(self, gate: Gate) -> None:
        if self._running is not None:
            self._look_now.set()
        await super()._end(gate)

    async def release(self) -> None:
        """Have the guard cancel the job and remove the folder."""
        if submitting := list(self._submitting):  # a job that it submits after the scancel would stay
            await asyncio.wait(submitting, timeout=SUBMIT_S)
            for task in submitting:
                task.cancel()
            await asyncio.gather(*submitting, return_exceptions=True)
        guard, self._guard = self._guard, None
        self._jobs.clear()
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await guard.wait()


def array_script(keys: SlurmKeys, worker: WorkerStart, token: Path) -> str:
    """Return the script of an array job. It runs a worker, and starts it again if it is killed.

    The worker is a step, because Slurm warns only steps of a preemption or of the time limit.
    """
    command = shlex.join([keys.python, "-m", "ddlf.cli.worker", *worker.arguments(), "--token-file", str(token)])
    return "\n".join(
        [
            "#!/bin/sh",
            f'export {CORES_VARIABLE}="$SLURM_CPUS_ON_NODE"',
            *(f"export {name}={shlex.quote(value)}" for name, value in keys.env.items()),
            "over=",
            "step=",
            "if command -v srun > /dev/null; then",
            '  step="srun --nodes=1 --ntasks=1 --cpus-per-task=$SLURM_CPUS_ON_NODE"',
            "fi",
            """trap 'over=1; if [ -z "$step" ]; then kill "$worker"; fi' TERM""",
            'while [ -z "$over" ]; do',
            f'  $step {command} --place "$SLURM_ARRAY_TASK_ID" &',
            "  worker=$!",
            '  wait "$worker"',
            "  code=$?",
            '  if [ -n "$over" ]; then wait "$worker"; fi',
            '  if [ "$code" -le 128 ]; then exit "$code"; fi',
            "  sleep 1",
            "done",
            "",
        ]
    )


def job_options(keys: SlurmKeys) -> list[str]:
    """Return the options of ``sbatch`` for a job with one worker in each element."""
    options = {
        "cpus-per-task": keys.cores,
        "mem": keys.memory and f"{_megabytes(keys.memory)}M",
        "gres": keys.gpus and f"gpu:{keys.gpus}",
        "time": keys.time and clock(keys.time),
        "partition": keys.partition,
        "account": keys.account,
        "qos": keys.qos,
        "constraint": keys.constraint,
    }
    given = [f"--{name}={value}" for name, value in options.items() if value]
    return ["--nodes=1", "--ntasks=1", "--requeue", "--open-mode=append", *given]


def clock(seconds: float) -> str:
    """Return a time in Slurm's form ``HH:MM:SS``. The hours may be more than 24."""
    whole = math.ceil(seconds)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}"


def _megabytes(size: int | None) -> int:
    return math.ceil((size or 0) / 2**20)


def _element(line: str) -> tuple[str, Element]:
    values, begin = [], 0
    for width in COLUMNS.values():
        values.append(line[begin : begin + width].strip())
        begin += width
    name, state, restarts, node, preempted_at, reason = values
    return name, Element(
        state, int(restarts) if restarts.isdigit() else 0, node, reason, is_preempted=preempted_at[:1].isdigit()
    )


async def _about_node(node: str) -> str:
    """Return what Slurm says about a node that is down; empty if it is not down."""
    code, out, _ = await _call("sinfo", "--noheader", "--Node", f"--nodes={node}", "--Format=StateLong:24,Reason:96")
    state, reason = out[:24].strip(), out[24:120].strip()
    return f"NODE_FAIL, node {node} is {state}, {reason}" if not code and node and state.startswith("down") else ""


def _cause(words: str) -> Cause:
    return next((cause for word, cause in CAUSES.items() if word in words.upper()), Cause.CRASH)


def _last_words(said: str) -> str:
    """Return the last line that tells why a step ended or waits, in the words of ``srun``."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and " Terminat" not in line]
    of_slurm = [line for line in lines if line.startswith(("srun: ", "slurmstepd"))]
    return re.sub(r"^(srun|slurmstepd\S*): (error: )?", "", next(reversed(of_slurm or lines), "")).strip("* ")


def _environment(keeps: Sequence[str]) -> dict[str, str]:
    """Return the environment for a command of Slurm: without the variables of this job that would change a step, and
    without a token.
    """
    all_ = child_environment()
    of_job = {name for name in all_ if name.startswith(("SLURM_", "SRUN_")) and name not in keeps}
    return {name: value for name, value in all_.items() if name not in of_job and name != "DDLF_TOKEN"}


async def _call(*command: str) -> tuple[int, str, str]:
    """Run a command of Slurm. Return its exit code, its output, and its errors in one line. If this is cancelled, the
    command is killed.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(keeps=("SLURM_CONF",)),
            start_new_session=True,
        )
    except OSError as error:
        return 127, "", str(error)
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:  # this was cancelled
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    lines = [line.split("error: ")[-1].strip() for line in errors.decode(errors="replace").splitlines()]
    return process.returncode or 0, out.decode(errors="replace"), "; ".join(filter(None, lines))


async def _end_step(process: asyncio.subprocess.Process) -> None:
    """End a step: first by the end of its worker's standard input, then by the signals of ``srun``."""
    if process.stdin is not None:
        process.stdin.close()
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
                return
