"""``ddlf slurm``: print the script of a job of Slurm that trains an app."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ddlf.cli.options import checked_run_options, variables, workers_range
from ddlf.cli.parsing import Command, Parser, action, number
from ddlf.errors import ConfigError

KEYS = ("cores", "memory", "gpus", "time", "partition", "account", "qos", "constraint", "python", "start_timeout")
"""The options that are keys of the launcher."""
NOTICE_S = 60
"""Slurm sends a signal up to a minute earlier or later than asked for."""


def render(options: argparse.Namespace) -> int:
    """Run ``ddlf slurm render``: print a script for ``sbatch``."""
    from ddlf.cluster.launch.keys import read_keys
    from ddlf.cluster.launch.slurm.keys import SlurmKeys
    from ddlf.cluster.launch.slurm.render import job_script

    values: dict[str, Any] = {key: getattr(options, key) for key in KEYS if getattr(options, key) is not None}
    values["env"] = variables(options.env)
    keys = read_keys(SlurmKeys, "slurm", values, options.workers)
    if not options.app.is_file():
        raise ConfigError(f"there is no file {options.app}", hint="name the app's file, as the job finds it")
    run = checked_run_options(options.app, options.options)
    if options.notice is not None and not options.requeue:
        raise ConfigError("--notice has no effect without --requeue", hint="add it, and --checkpoint DIR")
    if options.requeue and options.checkpoint is None:
        raise ConfigError(
            "--requeue needs a folder of checkpoints, because the next start continues from them",
            hint="add --checkpoint DIR",
        )
    checkpoint = [] if options.checkpoint is None else ["--checkpoint", str(options.checkpoint)]
    notice = (options.notice or NOTICE_S) if options.requeue else None
    print(job_script(options.app, keys, [*checkpoint, *run], notice), end="")
    return 0


def _render_options(parser: Parser) -> None:
    parser.add("app", type=Path, help="file of the app")
    parser.add("--workers", type=workers_range, required=True, metavar="N", help="number of tasks, such as 4, or 2..8")
    parser.add("--options", default="", metavar="TEXT", help="options of ddlf run, such as '--master-epochs 5'")
    parser.add("--cores", metavar="N", help="CPUs of each task")
    parser.add("--memory", metavar="SIZE", help="memory of each task, such as 4GiB")
    parser.add("--gpus", metavar="N", help="GPUs of each task")
    parser.add("--time", metavar="TIME", help="time limit of the job, such as 2h")
    parser.add("--partition", metavar="NAME", help="partition of Slurm")
    parser.add("--account", metavar="NAME", help="account of Slurm")
    parser.add("--qos", metavar="NAME", help="quality of service of Slurm")
    parser.add("--constraint", metavar="TEXT", help="features that the nodes must have")
    parser.add("--env", action="append", metavar="NAME=VALUE", help="environment variable of each task; repeatable")
    parser.add("--python", metavar="PATH", help="Python on the nodes (default: the command ddlf there)")
    parser.add(
        "--requeue", action="store_true", help="have Slurm run the job again after a notice, such as its time limit"
    )
    parser.add("--checkpoint", type=Path, metavar="DIR", help="folder of checkpoints, which --requeue needs")
    parser.add(
        "--notice",
        type=number(1),
        metavar="SECONDS",
        help=f"with --requeue: time between the notice and the time limit (default: {NOTICE_S})",
    )
    parser.add("--start-timeout", metavar="TIME", help="how long tasks wait for each other (default: 10m)")


SLURM = Command(
    description="Train in a job of Slurm.",
    examples=("ddlf slurm render app.py --workers 4 --cores 2 --time 2h | sbatch",),
    actions={
        "render": action(
            "print the script of a job",
            "Print a script for sbatch. Its tasks train the app: the first one is the master, and each has a worker. It "
            "contains no token.",
            _render_options,
            render,
            "ddlf slurm render app.py --workers 4 --cores 2 --time 2h | sbatch",
            "ddlf slurm render app.py --workers 2..8 --partition gpu --gpus 1 > job.sh",
            "ddlf slurm render app.py --workers 4 --options '--master-epochs 20 --seed 1'",
            "ddlf slurm render app.py --workers 4 --time 4h --requeue --checkpoint checkpoints | sbatch",
        ),
    },
)
