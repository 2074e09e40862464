"""The rigs for ranks of ``mpirun``, with Open MPI and with MPICH."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from tests.trials.engines.rig import DDLF, End, Rig, Run, Victim, kill


class OpenMpiRig(Rig):
    """A rig with ranks of Open MPI. A killed rank ends the whole job, so only executors and daemons can be lost."""

    name = "mpi"
    programs: tuple[str, ...] = ("mpirun.openmpi", "mpirun")
    options: tuple[str, ...] = ("--oversubscribe", "--bind-to", "none")

    def open(self) -> None:
        self.mpirun()

    def mpirun(self) -> str:
        """Return the path of the program.

        Raises:
            FileNotFoundError: No ``mpirun`` is installed.
        """
        for program in self.programs:
            if path := shutil.which(program):
                return path
        raise FileNotFoundError(f"none of {', '.join(self.programs)} is installed")

    def environment(self) -> dict[str, str]:
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # A path of a socket has at most 107 bytes, so Open MPI's folder is not below this rig's.
        return {**super().environment(), **root}

    def launcher(self, run: Run) -> list[str]:
        return ["--launcher", "mpi"]

    def command(self, run: Run, options: Sequence[str]) -> list[str]:
        return [self.mpirun(), *self.options, "-n", str(self.places), *DDLF, *self.launcher(run), *options]

    def empty(self) -> list[str]:
        return [self.mpirun(), *self.options, "-n", str(self.places), "true"]

    def victims(self) -> dict[str, Victim]:
        return {
            "executor": Victim(lambda run, place: kill(run.executor(place)), "SIGKILL"),
            "daemon": Victim(lambda run, place: kill(run.daemon(place)), ""),
        }

    def ends(self) -> dict[str, End]:
        return {**super().ends(), "kill -9 of mpirun": End(lambda run: kill(run.process))}


class MpichRig(OpenMpiRig):
    """A rig with Hydra, the process manager of MPICH. ``$MPICH`` is the path of another ``mpirun``."""

    name = "mpich"
    programs = (os.environ.get("MPICH", "mpirun.mpich"), "mpiexec.hydra")
    options = ()
