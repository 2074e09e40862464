"""Workers in the tasks of ``srun``, which all run the same command."""

from __future__ import annotations

import os
from typing import ClassVar

from ddlf.cluster.launch.keys import Keys
from ddlf.cluster.launch.launcher import Requeue
from ddlf.cluster.launch.ranks import Ranked, slurm
from ddlf.cluster.launch.slurm.munge_rendezvous import munged
from ddlf.cluster.launch.slurm.requeue import requeue


class Tasks(Ranked):
    """The launcher for the tasks of ``srun``, which all run the same command."""

    name = "slurm"
    uses: ClassVar = frozenset(Keys.model_fields)
    where: ClassVar = "in a task of srun, which has its resources already"
    instead: ClassVar = "give it to srun: srun --ntasks 4 --cpus-per-task 2"
    commands: ClassVar = ()
    meeting_hint = (
        "begin all tasks in a folder that they share; without one, the nodes need the commands munge and unmunge, and must "
        "reach each other's ports"
    )

    def __init__(self, keys: Keys) -> None:
        ranks = slurm()
        super().__init__(keys, ranks, more_points=munged(ranks.job, os.environ))

    def requeue(self) -> Requeue:
        return requeue()
