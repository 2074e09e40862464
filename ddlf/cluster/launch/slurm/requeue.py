"""Has Slurm run this command's own batch job again after a notice: ``ddlf run --requeue``. Runs on the master."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

from ddlf.cluster.launch.launcher import Requeue
from ddlf.errors import ConfigError

CALL_S = 30.0
"""How long a command of Slurm may take."""
BEGINS_IN_S = 5
"""How long the job waits before it may start again. By itself, Slurm lets it wait for two minutes."""
HINT = "start it with: ddlf slurm render app.py --workers 4 --requeue --checkpoint DIR | sbatch"


def requeue(environment: Mapping[str, str] = os.environ) -> Requeue:
    """Return how Slurm runs the batch job again that this process belongs to.

    Raises:
        ConfigError: It is not a batch job, it may not be queued again, or Slurm's command is not here.
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]  # the id of an array means all elements
    if shutil.which("scontrol") is None:
        raise ConfigError(
            "--requeue needs Slurm's command scontrol, which is not on this machine, perhaps because this is a container",
            hint="leave it out, or run this where Slurm is",
        )
    facts = _facts(job)
    if facts.get("BatchFlag") == "0":
        raise ConfigError(f"--requeue has no effect in Slurm's job {job}, which is not a batch job", hint=HINT)
    if facts.get("Requeue") == "0":
        raise ConfigError(f"--requeue needs a job that Slurm may queue again, but job {job} may not", hint=HINT)
    return Requeue(f"job {job} of Slurm", partial(_queue_again, job))


def _queue_again(job: str) -> None:
    """Queue the job again if it runs. Slurm then ends all its processes, including this one.

    Slurm may queue it again by itself, as after a preemption. A job that somebody cancels must stay cancelled.
    """
    state = _facts(job).get("JobState", "UNKNOWN")
    if state != "RUNNING":
        print(f"requeue   left to Slurm: its job {job} is {state}", file=sys.stderr)
        return
    script = f"trap '' TERM; scontrol requeue {job} && scontrol update JobId={job} StartTime=now+{BEGINS_IN_S}"
    print(f"requeue   Slurm starts job {job} again", file=sys.stderr, flush=True)
    process = _call("sh", "-c", script)
    if process.returncode:
        print(
            f"requeue   Slurm refused: {process.stderr.strip() or f'exit code {process.returncode}'}", file=sys.stderr
        )


def _facts(job: str) -> dict[str, str]:
    """Return what Slurm says about a job; empty if it does not answer."""
    process = _call("scontrol", "show", "job", "--oneliner", job)
    return dict(re.findall(r"(\S+?)=(\S*)", process.stdout))


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CALL_S,
            start_new_session=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
