"""The launcher ``slurm``: one of three launchers, by the place where the command runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from ddlf.cluster.launch.keys import parse_keys, read_keys
from ddlf.cluster.launch.launcher import Launcher, Workers
from ddlf.cluster.launch.ranks import is_task
from ddlf.cluster.launch.slurm.array import Array
from ddlf.cluster.launch.slurm.keys import SlurmKeys
from ddlf.cluster.launch.slurm.steps import Steps
from ddlf.cluster.launch.slurm.tasks import Tasks
from ddlf.errors import ConfigError


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
