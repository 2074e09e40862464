"""Scripts for ``sbatch``: the array job of the launcher, and the job that ``ddlf slurm render`` prints."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from ddlf.cluster.launch.slurm.commands import clock, megabytes
from ddlf.cluster.launch.slurm.keys import SlurmKeys
from ddlf.cluster.launch.supervisor import WorkerStart
from ddlf.worker.grace import GRACE_VARIABLE
from ddlf.worker.machine import CORES_VARIABLE


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
        "mem": keys.memory and f"{megabytes(keys.memory)}M",
        "gres": keys.gpus and f"gpu:{keys.gpus}",
        "time": keys.time and clock(keys.time),
        "partition": keys.partition,
        "account": keys.account,
        "qos": keys.qos,
        "constraint": keys.constraint,
    }
    arguments = [f"--{name}={value}" for name, value in options.items() if value]
    return ["--nodes=1", "--ntasks=1", "--requeue", "--open-mode=append", *arguments]


def job_script(app: Path, keys: SlurmKeys, options: list[str], notice_s: int | None = None) -> str:
    """Return the script of a job whose tasks train an app.

    Args:
        app: The app's file.
        keys: The resources of each task, and the number of tasks.
        options: Options of ``ddlf run``.
        notice_s: Seconds between the notice to the tasks and the time limit; None if Slurm does not start the job again.
    """
    assert keys.workers is not None
    job = {
        "job-name": app.stem,
        "ntasks": keys.workers.most,
        "cpus-per-task": keys.cores,
        "mem-per-cpu": keys.memory and f"{math.ceil(keys.memory / (keys.cores or 1) / 2**20)}M",
        "gpus-per-task": keys.gpus,
        "time": keys.time and clock(keys.time),
        "partition": keys.partition,
        "account": keys.account,
        "qos": keys.qos,
        "constraint": keys.constraint,
        "output": "%x-%j.out",
        "open-mode": "append",
        # Without B:, the tasks get the signal, and the shell of this script does not, which would end with it.
        "signal": notice_s and f"TERM@{notice_s}",
    }
    requeue = [] if notice_s is None else ["--requeue"]
    env = keys.env if notice_s is None else {GRACE_VARIABLE: str(notice_s), **keys.env}
    least = [] if keys.workers.least == keys.workers.most else [f"workers={keys.workers}"]
    waits = [f"start_timeout={keys.start_timeout:g}"] if "start_timeout" in keys.model_fields_set else []
    launcher = ":".join(filter(None, ["slurm", ",".join([*least, *waits])]))
    ddlf = [keys.python, "-m", "ddlf"] if "python" in keys.model_fields_set else ["ddlf"]
    cores = [] if keys.cores is None else [f"--cpus-per-task={keys.cores}"]  # srun does not take it from the job
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=0", *cores]  # a task that ends does not end the others
    return "\n".join(
        [
            "#!/bin/sh",
            *(f"#SBATCH --{name}={value}" for name, value in job.items() if value),
            *(f"#SBATCH {option}" for option in requeue),
            *(f"export {name}={shlex.quote(value)}" for name, value in env.items()),
            shlex.join([*srun, *ddlf, "run", str(app), "--launcher", launcher, *requeue, *options]),
            "",
        ]
    )
