"""What the tests and trials with a real engine need on this machine."""

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
        engine: Its name. ``DDLF_<NAME>_PYTHON`` is the Python that has its packages; by default, that is this one.
        install: How to install what is missing.
        programs: Names of programs that must all be there.
        modules: Modules that Python must find.
    """

    engine: str
    install: str
    programs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The environment variable that names the Python with this engine's packages."""
        return f"DDLF_{self.engine.upper()}_PYTHON"

    @property
    def python(self) -> str:
        """The Python with this engine's packages."""
        return os.environ.get(self.variable) or sys.executable

    def missing(self) -> str:
        """Return what is missing, as a sentence that says how to install it; empty if all is there."""
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
"""All engines by name. The tests of an engine are in ``test_<name>.py``, where there are any."""
