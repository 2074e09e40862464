"""The keys of the launcher ``slurm``."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field

from ddlf.cluster.launch.keys import Bytes, Cores, Env, Gpus, Keys, Seconds


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
