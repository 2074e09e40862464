"""The rigs without an engine: local workers, listening workers, and joining workers. All run on this machine."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Sequence

import psutil

from tests.trials.engines.below import Started
from tests.trials.engines.rig import Rig, Run, Victim, wait_for

HOST = "127.0.0.1"


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
        return port


class LocalRig(Rig):
    """A rig whose workers the master starts: ``--local``."""

    name = "local"

    def launcher(self, run: Run) -> list[str]:
        return ["--local", str(self.places)]

    def victims(self) -> dict[str, Victim]:
        return {}


class HostsRig(LocalRig):
    """A rig with running workers that listen: ``--hosts``."""

    name = "hosts"

    def open(self) -> None:
        self._engine = Started(self)
        self._ports = [free_port() for _ in range(self.places)]
        for port in self._ports:
            self.worker("--host", HOST, "--port", str(port))
        for port in self._ports:
            wait_for(lambda port=port: self._answers(port), 120.0)  # type: ignore[misc]

    def worker(self, *options: str) -> None:
        """Start a worker that runs until the rig ends."""
        self._engine.start(sys.executable, "-m", "ddlf.cli.worker", *options)

    def _answers(self, port: int) -> bool | None:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1.0):
            return True
        return None

    def close(self) -> None:
        self._engine.end()

    def is_engine(self, process: psutil.Process) -> bool:
        engine_pids = {root.pid for root in self._engine.processes}
        with contextlib.suppress(psutil.Error):
            return any(ancestor.pid in engine_pids for ancestor in [process, *process.parents()])
        return False

    def launcher(self, run: Run) -> list[str]:
        return ["--hosts", ",".join(f"{HOST}:{port}" for port in self._ports)]


class JoinRig(HostsRig):
    """A rig with running workers that dial the master: ``--join`` and ``--listen``."""

    name = "join"

    def open(self) -> None:
        self._engine = Started(self)
        self._port = free_port()

    def command(self, run: Run, options: Sequence[str]) -> list[str]:
        if not self._engine.processes:
            for place in range(self.places):
                self.worker("--join", f"{HOST}:{self._port}", "--place", str(place))
        return super().command(run, options)

    def launcher(self, run: Run) -> list[str]:
        return ["--listen", f"{HOST}:{self._port}", "--workers", str(self.places)]
