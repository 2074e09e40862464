"""The members of a cluster: reaches and numbers the workers, and continues without missing ones. Runs on the master."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

from ddlf.cluster.launch.launcher import Launcher
from ddlf.cluster.proxy import MAX_ATTEMPTS, ProxyWorker
from ddlf.errors import ConfigError, ConnectError, DDLFError, ExecutorCrashed, LeaseError, WorkerLost
from ddlf.events import Event
from ddlf.events.phases import Phase
from ddlf.rpc.connection import Deadline

log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Seconds between two attempts to connect to a worker that died during the connection."""


class Members:
    """The workers that belong to a cluster and to all its views, whether they are connected or missing.

    Args:
        launcher: Launcher of the workers.
        workers: The workers' proxies, in order.
        min_workers: How many workers are enough; None requires all.
        timeout_s: Seconds for the connection to each worker.
        emit: Receives the events of slow phases.

    Attributes:
        present: The connected workers, in the order of their numbers. It stays the same list object.
        missing: The workers that were not reached.
        loop: The event loop of the connections; None while there are none.
    """

    def __init__(
        self,
        launcher: Launcher,
        workers: list[ProxyWorker],
        min_workers: int | None,
        timeout_s: float,
        emit: Callable[[Event], None],
    ) -> None:
        self.launcher = launcher
        self.present = workers
        self.missing: list[ProxyWorker] = []
        self._highest = 0  # the highest number of a worker; 0 before ``connect`` has numbered them
        self._min_workers = min_workers
        self._timeout_s = timeout_s
        self._emit = emit
        self._lock = asyncio.Lock()
        self._connecting: asyncio.Task[None] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._shown_reasons: dict[str, str] = {}  # the reasons in the last warning about missing workers

    @property
    def workers(self) -> list[ProxyWorker]:
        """All workers, in the order of their numbers."""
        return sorted([*self.present, *self.missing], key=attrgetter("id"))

    async def connect(self, modules: Sequence[str]) -> None:
        """Connect to all workers; ``Cluster.connect`` describes the arguments, errors and guarantees."""
        async with self._lock:
            self._connecting = asyncio.ensure_future(self._connect(modules))
            try:
                await self._connecting
                self.loop = asyncio.get_running_loop()
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if caller is not None and caller.cancelling():
                    raise
                raise ConnectError("the cluster was closed while it connected") from None
            finally:
                self._connecting = None

    async def _connect(self, modules: Sequence[str]) -> None:
        connected = [worker for worker in self.workers if worker.connected]
        try:
            starting = self.launcher.revives and not all(worker.is_open for worker in self.workers)
            count: dict[str, Any] = {"total": len(self.workers), "unit": "workers"}
            with Phase(self._emit, "starting", **count) if starting else nullcontext():
                await self.launcher.start(modules)
            # Reach every daemon first, so that the number of workers is known before any executor receives its number.
            await self._reach(self.workers, ProxyWorker.connect_control)
            self._give_numbers()
            await self._share_cpus()
            await self._reach(list(self.present), ProxyWorker.connect)
        except BaseException:
            await asyncio.gather(*(worker.close() for worker in self.workers if worker not in connected))
            if not connected:
                await self.launcher.stop()
            raise

    async def _reach(self, workers: list[ProxyWorker], connect: Callable[..., Coroutine[Any, Any, None]]) -> None:
        outcomes = await asyncio.gather(
            *(self._reach_one(worker, connect) for worker in workers), return_exceptions=True
        )
        self._check_reached(workers, outcomes)

    async def _reach_one(self, worker: ProxyWorker, connect: Callable[..., Coroutine[Any, Any, None]]) -> None:
        """Connect to one worker. If it dies meanwhile, try again, provided that its daemon was reached or can be
        restarted.
        """
        deadline = Deadline(self._timeout_s)
        for attempt in itertools.count(1):
            try:
                facts: dict[str, Any] = {"worker": worker.id, "name": worker.nickname, "address": worker.address}
                with nullcontext() if worker.is_open else Phase(self._emit, "connecting", **facts):
                    await connect(worker, timeout_s=self._timeout_s)
                return
            except (WorkerLost, ConnectError, ExecutorCrashed):
                was_reached = connect is ProxyWorker.connect or self.launcher.revives
                is_away = not self.launcher.revives and not worker.connected
                if (
                    not was_reached
                    or self.launcher.never(worker.id - 1)
                    or (deadline.left_s() == 0 if is_away else attempt == MAX_ATTEMPTS)
                ):
                    raise
                await asyncio.sleep(RETRY_S)

    def _give_numbers(self) -> None:
        """Give each worker its number at the first connection, reached workers first. Later workers get higher numbers.

        A number never changes: after an absence, a worker returns to its part of the data and to its own variables. A
        worker with a place has its number from the start.
        """
        workers = [*self.present, *self.missing]
        is_given = self._highest or self.launcher.fixed_places
        numbers = [worker.id for worker in workers] if is_given else range(1, len(workers) + 1)
        self._highest = max(self._highest, *itertools.islice(numbers, len(self.present)))
        for worker, number in zip(workers, numbers, strict=True):
            worker.renumber(number, self._highest)

    async def _share_cpus(self) -> None:
        """Divide the CPUs of each machine among the workers that have joined from it. Only now the master knows where
        they are.
        """
        joined = [worker for worker in self.present if worker.joins and not worker.is_open]
        cpu_groups = [endpoint.cpus for endpoint in await asyncio.gather(*(worker.endpoint() for worker in joined))]
        for worker, group in zip(joined, cpu_groups, strict=True):
            worker.share(cpu_groups.count(group))

    def _check_reached(self, workers: Sequence[ProxyWorker], outcomes: Sequence[BaseException | None]) -> None:
        """Continue if enough workers were reached. Otherwise raise an error with the reason of each missing worker."""
        failures = [outcome for outcome in outcomes if outcome is not None]
        reached = [worker for worker, outcome in zip(workers, outcomes, strict=True) if outcome is None]
        for failure in failures:
            if not isinstance(failure, DDLFError):
                raise failure
        if not failures:
            self._keep(reached, [worker for worker in self.missing if worker not in reached])
            return
        used = sum(isinstance(failure, LeaseError) for failure in failures)
        late = sum(
            isinstance(outcome, ConnectError) and self.launcher.comes_later(worker.id - 1)
            for worker, outcome in zip(workers, outcomes, strict=True)
        )
        lost = len(failures) - used - late
        rows, reasons = [], {}
        for worker, outcome in zip(workers, outcomes, strict=True):
            if isinstance(outcome, DDLFError):
                outcome.worker = ""  # The row of the table already names the worker.
                label = worker.label
                # If all missing workers are in use, the error gives the hint once, at its end.
                reason = (str(outcome) if lost or late else outcome.message).removeprefix(label).lstrip(": ")
                reasons[label] = reason
                rows.append(f"  {worker.id:>3}  {label:<21}  {reason}")
        verb = "is" if used == 1 else "are"
        problems = [f"{lost} of {len(workers)} workers could not be reached"] * bool(lost)
        problems += [f"{late} of {len(workers)} workers {'has' if late == 1 else 'have'} not come yet"] * bool(late)
        problems += [f"{used} of {len(workers)} workers {verb} in use"] * bool(used)
        text = "\n".join([f"{', and '.join(problems)}:", *rows])
        if len(reached) >= (self._min_workers or len(workers)):
            if reasons != self._shown_reasons:  # a run connects repeatedly; warn only about changes
                join = "; the others join when they come" if late else ""
                log.warning("%s\ncontinuing with %d worker%s%s", text, len(reached), "s" * (len(reached) != 1), join)
            self._shown_reasons = reasons
            self._keep(reached, [worker for worker in (*workers, *self.missing) if worker not in reached])
            return
        hint = next((failure.hint for failure in failures if isinstance(failure, LeaseError)), "")
        error = ConnectError(text) if lost or late else LeaseError(text, hint=hint)
        error.exit_code = max(getattr(failure, "exit_code", 3) for failure in failures)
        raise error

    def _keep(self, reached: Sequence[ProxyWorker], missing: Sequence[ProxyWorker]) -> None:
        # Change the lists in place, because all views share them.
        self.present[:] = sorted(reached, key=attrgetter("id"))
        self.missing[:] = sorted(dict.fromkeys(missing), key=attrgetter("id"))

    def next_number(self, host: str, port: int) -> int:
        """Return the number that a new worker with this address gets.

        Raises:
            ConfigError: The worker is already a member.
        """
        for worker in self.workers:
            if (worker.host, worker.port) == (host, port):
                raise ConfigError(f"{host}:{port} is already in the cluster, as {worker.name}")
        return self.workers[-1].id + 1

    async def add(self, worker: ProxyWorker) -> None:
        """Connect to a new worker, and add it to the present ones."""
        try:
            await worker.connect(timeout_s=self._timeout_s)
        except BaseException:
            await worker.close()
            raise
        self.present.append(worker)
        self._highest = worker.id

    def take_in(self, worker: ProxyWorker) -> None:
        """Move a missing worker to the present ones, after it has been reached."""
        if worker in self.missing:
            self._keep([*self.present, worker], [other for other in self.missing if other is not worker])

    async def close(self) -> None:
        """Disconnect from the workers, and end the ones that the launcher has started."""
        if self._connecting is not None:
            self._connecting.cancel()
        async with self._lock:
            await asyncio.gather(*(worker.close() for worker in self.workers))
            await self.launcher.stop()
            self.loop, self._shown_reasons = None, {}
