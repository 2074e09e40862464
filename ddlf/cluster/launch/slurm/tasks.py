"""Workers in the tasks of ``srun``, which all run the same command."""

from __future__ import annotations

from typing import ClassVar

from ddlf.cluster.launch.keys import Keys
from ddlf.cluster.launch.ranks import Ranked, slurm


class Tasks(Ranked):
    """The launcher for the tasks of ``srun``, which all run the same command."""

    name = "slurm"
    uses: ClassVar = frozenset(Keys.model_fields)
    where: ClassVar = "in a task of srun, which has its resources already"
    instead: ClassVar = "give it to srun: srun --ntasks 4 --cpus-per-task 2"
    commands: ClassVar = ()

    def __init__(self, keys: Keys) -> None:
        super().__init__(keys, slurm())
