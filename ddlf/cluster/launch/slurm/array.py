"""Workers in the elements of an array job, which the master submits from outside of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ddlf.cluster.launch.command import write_token
from ddlf.cluster.launch.engine import PlaceEngine, check_folder, first_line, writable
from ddlf.cluster.launch.gate import Gate
from ddlf.cluster.launch.launcher import Cause, Check, Left, Requeue
from ddlf.cluster.launch.slurm.commands import NEWS_S, STOP_S, about_node, call, cause_in
from ddlf.cluster.launch.slurm.keys import SlurmKeys
from ddlf.cluster.launch.slurm.render import array_script, job_options
from ddlf.cluster.launch.supervisor import WorkerStart
from ddlf.errors import ConfigError, ConnectError

log = logging.getLogger(__name__)

LOOKS_S = (2.0, 10.0)
"""Seconds between two calls of ``squeue``: until all elements run and the run has begun, and then."""
LAST_LOOKS_S = 0.2
"""Seconds between two calls of ``squeue`` when the run is over, until all elements have ended."""
PAUSE_S = 5.0
"""How long an element waits before it starts again. If it starts on the same node within a second, Slurm ends it with
``Job credential revoked``.
"""
SUBMIT_S = 30.0
"""How long the end of a run waits for an ``sbatch`` that still runs."""
SHOWN_LINES = 5
"""Lines of the output of an element in the error about its end."""
COLUMNS = {"JobArrayID": 40, "State": 24, "RestartCnt": 12, "NodeList": 64, "PreemptTime": 24, "Reason": 128}
"""Fields of ``squeue``, with their widths."""
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED"})
NEVER_STARTS = frozenset(
    {
        *(
            "PartitionConfig",
            "PartitionNodeLimit",
            "PartitionTimeLimit",
            "BadConstraints",
            "InvalidAccount",
            "InvalidQOS",
        ),
        *("AssocMaxWallDurationPerJobLimit", "QOSMaxWallDurationPerJobLimit"),
    }
)
"""Reasons of jobs that never start, because they ask for more than the partition, the account or the limits allow."""
ALIVE = frozenset({*WAITING, "RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"})
"""States of a job that has not ended."""


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

    @property
    def never_starts(self) -> bool:
        """Whether it waits for something that does not come by itself."""
        return self.now is not None and self.now.state == "PENDING" and self.now.reason in NEVER_STARTS


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

    async def check(self) -> AsyncIterator[Check]:
        """Ask Slurm whether it would take the job. It checks the partition, the account and the limits, and queues
        nothing.
        """
        yield Check(await first_line("sbatch", "--version"))
        code, out, errors = await call("sinfo", "--noheader", "--format=%R %a %D")
        if code:
            yield Check(
                f"Slurm does not answer: {errors}", "ask the administrators of the cluster; 'sinfo' must work here"
            )
            return
        partitions = [line.split()[:1][0] for line in out.splitlines() if line.split()]
        if (partition := self.keys.partition) is not None and not set(partition.split(",")) & set(partitions):
            names = ", ".join(dict.fromkeys(partitions)) or "none"
            yield Check(f"Slurm has no partition {partition}", f"choose one with the key partition: {names}")
            return
        array = f"--array=0-{len(self.addresses) - 1}"
        code, out, errors = await call("sbatch", "--test-only", array, *job_options(self.keys), "--wrap=true")
        output = " ".join(filter(None, (out.strip(), errors))).replace("sbatch: ", "")
        if code:
            yield Check(f"Slurm refuses the job: {output}", "correct the key that Slurm names")
        else:
            yield Check(f"Slurm takes the job: {output}" if output else "Slurm takes the job")
        async for check in super().check():
            yield check
        yield check_folder(self.keys.folder)

    async def prepare(self) -> None:
        """Submit the array job.

        Raises:
            ConnectError: Slurm refuses it. The error has the line of ``sbatch``.
        """
        self._look_now, self._news = asyncio.Event(), asyncio.Condition()
        self._folder = Path(tempfile.mkdtemp(prefix=".ddlf-slurm-", dir=writable(self.keys.folder)))  # mode 0700
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
        begin = {place: self._output_bytes(place) for place in places}  # a job may write before sbatch has returned
        code, out, errors = await call(
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
        self._jobs.update({place: Job(f"{job}_{place}", begins_at=begin[place]) for place in places})
        self._runs_in.update({place: f"job {job}_{place}" for place in places})

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
        if job.never_starts and job.now is not None:
            await call("scancel", "--quiet", job.name)
            raise ConnectError(
                f"Slurm does not start job {job.name}, which is {job.now.state} with reason {job.now.reason}",
                hint="ask for what the partition allows: scontrol show partition",
            )
        left = self._end_of(place, job)
        if left.cause is Cause.CANCELLED:
            raise ConnectError(left.words)
        return left

    def _has_ended(self, job: Job) -> bool:
        over = self._gate is None or self._gate.is_over
        if job.now is None:
            return False
        return job.never_starts or job.now.state not in ALIVE or (over and job.now.state == "COMPLETING")

    async def _look(self, gate: Gate) -> None:
        """Ask Slurm for the states of the elements again and again."""
        while True:
            states = await self._states()
            for place, job in list(self._jobs.items()):
                if states is not None:
                    await self._update(place, job, states.get(job.name))
            async with self._news:
                self._news.notify_all()
            all_run = all(job.now is not None and job.now.state == "RUNNING" for job in self._jobs.values())
            pause = LAST_LOOKS_S if gate.is_over else LOOKS_S[all_run and gate.has_begun]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look_now.wait()
            self._look_now.clear()

    async def _states(self) -> dict[str, Element] | None:
        assert self._folder is not None
        form = ",".join(f"{name}:{width}" for name, width in COLUMNS.items())
        code, out, errors = await call(
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
        former = job.now
        if now is None and former is not None:
            # An element that was cancelled before it ran is in no list of Slurm any more.
            state = "CANCELLED" if former.state in WAITING else "UNKNOWN"
            now = Element(state, job.restarts, former.node, "")
        assert now is not None
        job.now = now
        if job.now.restarts > job.restarts:
            node = (former or job.now).node
            line = self._slurms_line(place, job)
            words = line or await about_node(node) or "the reason is unknown"
            left = Left(cause_in(words), f"Slurm has queued job {job.name} again: {words}")
            job.restarts, job.begins_at = job.now.restarts, self._output_bytes(place)
            self.has_left(place, left)
            log.warning("place %d: %s", place, left.words)
            job.begins_again_at = asyncio.get_running_loop().time() + PAUSE_S
        again_at = job.begins_again_at
        if job.now.reason == "BeginTime" and again_at is not None and asyncio.get_running_loop().time() >= again_at:
            # Otherwise Slurm would let the element wait for two minutes.
            job.begins_again_at = None
            if shutil.which("scontrol"):
                await call("scontrol", "update", f"JobId={job.name}", "StartTime=now")

    def _end_of(self, place: int, job: Job) -> Left:
        assert job.now is not None
        if job.now.is_preempted and job.now.state in {"COMPLETED", "COMPLETING"}:
            return Left(Cause.PREEMPTED, f"Slurm gave the node of job {job.name} to another job (PREEMPTED)")
        words = f"Slurm ended job {job.name} with {job.now.state}"
        if line := self._slurms_line(place, job):
            words += f": {line}"
        elif lines := self._output(place, job):  # the last line of srun has only the exit code
            words += ":\n" + "\n".join(lines[-SHOWN_LINES:])
        return Left(cause_in(job.now.state), words)

    async def left(self, index: int) -> Left | None:
        with contextlib.suppress(ConnectError):
            await self.gate.run(self._news_soon())
        job = self._jobs.get(index)
        if job is not None and (line := self._slurms_line(index, job)):
            return Left(cause_in(line), f"Slurm ended it: {line}")
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
        line = self._last_line(index, job)
        return f"Slurm's job {job.name} is {job.now.state} on {job.now.node}" + (f": {line}" if line else "")

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
        if guard is None and self._folder is not None:  # ``prepare`` was cancelled
            shutil.rmtree(self._folder, ignore_errors=True)
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await guard.wait()


def _element(line: str) -> tuple[str, Element]:
    values, begin = [], 0
    for width in COLUMNS.values():
        values.append(line[begin : begin + width].strip())
        begin += width
    name, state, restarts, node, preempted_at, reason = values
    return name, Element(
        state, int(restarts) if restarts.isdigit() else 0, node, reason, is_preempted=preempted_at[:1].isdigit()
    )
