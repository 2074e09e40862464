"""The processes of an engine, and the processes that it has started for a run."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Collection

import psutil

from tests.trials.engines.rig import Rig

END_S = 10.0


class Started:
    """The processes that a rig has started for its engine. Their output goes to ``engine.log`` in the rig's folder.

    Args:
        rig: The rig.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.processes: list[psutil.Popen] = []

    def start(self, *words: str) -> psutil.Popen:
        """Start a process of the engine."""
        with (self._rig.folder / "engine.log").open("ab") as log:
            process = psutil.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._rig.environment(),
                cwd=self._rig.folder,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def above(self, process: psutil.Process) -> psutil.Process:
        """Return the process of the engine that is an ancestor of a process."""
        return next(parent for parent in process.parents() if parent.pid in {root.pid for root in self.processes})

    def end(self) -> None:
        """End these processes and their descendants."""
        family = []
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                family += process.children(recursive=True)
            family.append(process)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, END_S)
        self.processes.clear()


def is_below(process: psutil.Process, engine: Collection[psutil.Process]) -> bool:
    """Return whether a process belongs to an engine: it is one of its processes or a descendant, and not below a worker."""
    engine_pids = {member.pid for member in engine}
    with contextlib.suppress(psutil.Error):
        for ancestor in [process, *process.parents()]:
            if "ddlf.cli.worker" in ancestor.cmdline():
                return False
            if ancestor.pid in engine_pids:
                return True
    return False
