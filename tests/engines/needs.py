"""The programs and Python packages that tests and trials with real engines need on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Needs:
    """The programs and Python packages of one engine.

    Args:
        engine: Its name. The environment variable ``DDLF_<NAME>_PYTHON`` names the Python with the packages of the engine.
            Without it, tests use the Python that runs them.
        install: How to install missing programs and packages.
        programs: Names of programs that must be installed.
        modules: Names of modules that Python must find.
    """

    engine: str
    install: str
    programs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The environment variable for the Python with this engine's packages."""
        return f"DDLF_{self.engine.upper()}_PYTHON"

    @property
    def python(self) -> str:
        """The Python with this engine's packages."""
        return os.environ.get(self.variable) or sys.executable

    def missing(self) -> str:
        """Return a sentence about the missing program or module and how to install it; empty if none is missing."""
        programs = [name for name in self.programs if shutil.which(name, path=PATH) is None]
        if programs:
            return f"{self.engine}: {' and '.join(programs)} is not installed: {self.install}"
        find = f"import sys, importlib.util as u; sys.exit(any(u.find_spec(name) is None for name in {self.modules!r}))"
        try:
            has_modules = not self.modules or not subprocess.run([self.python, "-c", find], check=False).returncode
        except OSError as error:
            return f"{self.engine}: {self.variable}={self.python} does not start: {error.strerror}"
        names = " and ".join(self.modules)
        other = f"{self.install}; or name a Python that has it: {self.variable}=/path/to/python"
        return "" if has_modules else f"{self.engine}: {self.python} has no module {names}: {other}"


NEEDS = {
    needs.engine: needs
    for needs in (
        Needs("ssh", "apt-get install openssh-server openssh-client", ("sshd", "ssh")),
        Needs(
            "slurm",
            "apt-get install slurmctld slurmd slurm-client munge",
            ("slurmctld", "slurmd", "srun", "sbatch", "munged"),
        ),
        Needs("mpi", "apt-get install openmpi-bin mpich", ("mpirun.openmpi", os.environ.get("MPICH", "mpirun.mpich"))),
        Needs("ray", "pip install 'ray[default,tune]'", modules=("ray",)),
        Needs("dask", "pip install distributed", modules=("distributed",)),
        Needs("spark", "pip install pyspark, and apt-get install default-jre-headless", ("java",), ("pyspark",)),
        Needs(
            "kubernetes",
            "pip install kubernetes-validate, and apt-get install kubernetes-client",
            ("kubectl",),
            ("kubernetes_validate",),
        ),
        Needs("nat", "apt-get install nftables", ("nft",)),
    )
}
"""All engines by name. An engine that has tests has them in ``test_<name>.py``."""
