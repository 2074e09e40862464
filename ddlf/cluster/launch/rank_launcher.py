"""The base class of launchers whose engine starts the same command at each place: tasks with ranks, and pods of one Job.

The process at place 0 leads: it is the master. Each place has its own worker, also that of the master. Runs in all of
these processes.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from ddlf.cluster.launch.engine import Engine
from ddlf.cluster.launch.gate import Gate
from ddlf.cluster.launch.launcher import Address
from ddlf.cluster.launch.supervisor import Supervisor, WorkerStart
from ddlf.errors import ConfigError


class Leading(Engine):
    """A launcher in one of several processes that run the same command.

    Attributes:
        place: Place of this process.
        called: How people call this process and its number, such as ``("task", "rank")``.
    """

    place: int
    called: ClassVar[tuple[str, str]]
    _supervisor: Supervisor | None = None

    def follower(self) -> Callable[[], int] | None:
        return self._follow if self.place else None

    @abstractmethod
    def _follow(self) -> int:
        """Run the worker of a process that does not lead, until the run is over. Return the exit code."""

    @abstractmethod
    def _own_worker(self, gate: str) -> WorkerStart:
        """Return how to start the worker of this process, which leads.

        Args:
            gate: Address of the gate.
        """

    def _tell_others(self, gate: Gate) -> None:
        """Let the other processes find the gate."""

    def _lead(self, supervisor: Supervisor) -> None:
        """Run the worker of this process, in its own thread."""
        supervisor.run()

    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        """Open the gate, start the worker of this process, and wait for all workers.

        Raises:
            ConfigError: This process does not lead, so it is not the master.
        """
        process, number = self.called
        if self.place:
            raise ConfigError(
                f"this {process} has {number} {self.place}, and only {number} 0 is the master",
                hint=f"start the app with ddlf run, which runs the worker of each other {process}",
            )
        if self._supervisor is None:
            gate = self.open()
            self._tell_others(gate)
            self._supervisor = Supervisor(self._own_worker(f"127.0.0.1:{gate.port}"))
            threading.Thread(target=self._lead, args=(self._supervisor,), name=f"ddlf-{process}", daemon=True).start()
        return await super().start(modules)

    async def stop(self) -> None:
        """End the run for all workers, and the worker of this process."""
        supervisor, self._supervisor = self._supervisor, None
        await super().stop()
        if supervisor is not None:
            await asyncio.to_thread(supervisor.stop)
