"""The commands of Slurm: how to call them, and their words about the end of a job or a step."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence

from ddlf.cluster.launch.launcher import Cause
from ddlf.worker.process import child_environment

NEWS_S = 1.0
"""How long to wait for news from Slurm about a worker that was lost."""
STOP_S = 5.0
"""How long to wait for the end of a process, before it gets a stronger signal or is left alone."""
CAUSES = {
    **dict.fromkeys(("PREEMPTED", "PREEMPTION"), Cause.PREEMPTED),
    **dict.fromkeys(("TIMEOUT", "TIME LIMIT", "DEADLINE"), Cause.TIME_LIMIT),
    **dict.fromkeys(("OUT_OF_MEMORY", "OOM", "OUT OF MEMORY"), Cause.MEMORY),
    **dict.fromkeys(("NODE_FAIL", "NODE FAIL", "BOOT_FAIL"), Cause.NODE),
    **dict.fromkeys(("REQUEUE", "CANCELLED"), Cause.CANCELLED),
    "EXIT CODE 143": Cause.NOTICE,  # a worker that has handed its work over after SIGTERM
}
"""Words of Slurm about the end of a job or a step, the most precise first."""


def environment_of_command(keeps: Sequence[str]) -> dict[str, str]:
    """Return the environment for a command of Slurm: without the variables of this job that would change a step, and
    without a token.
    """
    all_ = child_environment()
    of_job = {name for name in all_ if name.startswith(("SLURM_", "SRUN_")) and name not in keeps}
    return {name: value for name, value in all_.items() if name not in of_job and name != "DDLF_TOKEN"}


async def call(*command: str) -> tuple[int, str, str]:
    """Run a command of Slurm. Return its exit code, its output, and its errors in one line. If this is cancelled, the
    command is killed.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment_of_command(keeps=("SLURM_CONF",)),
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


async def about_node(node: str) -> str:
    """Return what Slurm says about a node that is down; empty if it is not down."""
    code, out, _ = await call("sinfo", "--noheader", "--Node", f"--nodes={node}", "--Format=StateLong:24,Reason:96")
    state, reason = out[:24].strip(), out[24:120].strip()
    return f"NODE_FAIL, node {node} is {state}, {reason}" if not code and node and state.startswith("down") else ""


def cause_in(words: str) -> Cause:
    """Return the cause that Slurm's words name."""
    return next((cause for word, cause in CAUSES.items() if word in words.upper()), Cause.CRASH)


def clock(seconds: float) -> str:
    """Return a time in Slurm's form ``HH:MM:SS``. The hours may be more than 24."""
    whole_seconds = math.ceil(seconds)
    return f"{whole_seconds // 3600:02}:{whole_seconds // 60 % 60:02}:{whole_seconds % 60:02}"


def megabytes(size: int | None) -> int:
    """Return a size in Slurm's unit, rounded up; 0 if there is no size.

    Args:
        size: In bytes.
    """
    return math.ceil((size or 0) / 2**20)
