"""Workers that Dask starts: ``ddlf run app.py --launcher dask --workers 4``. Runs on the master, and in Dask's workers.

Each place is one long task. If the Dask worker around it ends, Dask runs the task elsewhere. The worker inside ends when
the master's gate says that the run is over, because Dask cannot stop a task that runs. If the scheduler is lost, the Dask
workers end themselves; the workers inside continue without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import platform
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any

from pydantic import Field

from ddlf.cluster.launch.engine import PlaceEngine
from ddlf.cluster.launch.keys import Cores, Env, Keys
from ddlf.cluster.launch.launcher import Cause, Check, Left, Workers
from ddlf.cluster.launch.supervisor import Supervisor, WorkerStart
from ddlf.errors import ConfigError, ConnectError
from ddlf.version import __version__

log = logging.getLogger(__name__)

CONNECT_S = 10.0
LOOK_S = 3.0
"""Seconds between two looks at a task whose worker has not joined."""
ANSWER_S = 3.0
"""Seconds to wait for the scheduler's answer about a task, or to its end."""
CONNECTED, TRIES = "running", ("connecting", "closing")
"""Status of Dask's client with a scheduler, and while it tries to find a lost one."""
LOOK_AGAIN_S = 0.1
"""Seconds between two looks at that status."""
NANNY_S = 3.0
"""Seconds in which a worker hands its work over. The nanny of a Dask worker kills it 4 s after it has asked it to end."""
CAUSES = {"KilledWorker": Cause.NODE, "FutureCancelledError": Cause.CANCELLED}
"""Causes by Dask's errors."""
RUNNING = ("executing", "long-running")
"""States of a task in a Dask worker."""
SCHEDULER_LOST = "worker-handle-scheduler-connection-broken"
"""Dask's reason for the end of a Dask worker that has lost its scheduler."""
GONE_S = 5.0
"""Seconds without a worker until its place is empty, if its Dask worker has ended before it."""
ENDING = ("closing", "closed", "failed")
"""States of a Dask worker that runs no task any more."""


class DaskKeys(Keys):
    """The keys of the launcher ``dask``."""

    scheduler: str | None = Field(
        default=None,
        description="Address of the scheduler. Default: that of the current client, or DASK_SCHEDULER_ADDRESS.",
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Dask's abstract resources for each worker, such as resources.GPU=1."
    )
    cores: Cores | None = Field(default=None, description="CPUs of a worker. Default: the threads of its Dask worker.")
    env: Env = Field(default_factory=dict, description="Environment variables, such as env.NAME=VALUE.")


class Dask(PlaceEngine):
    """Workers in tasks of Dask, one for each place."""

    name = "dask"
    model = DaskKeys
    keys: DaskKeys

    def __init__(self, keys: DaskKeys, workers: Workers | None = None) -> None:
        super().__init__(keys, workers)
        self._client: Any = None
        self._address, self._security = "", dict[str, Any]()
        self._connecting = asyncio.Lock()  # a lost scheduler is dialled once for all places
        self._has_said_gone = False  # whether it is known to people that the scheduler is gone
        self._tasks: dict[str, int] = {}  # place by the key of its task
        self._former_incarnations: dict[int, int] = {}  # incarnation of a place when its task began to wait

    async def check(self) -> AsyncIterator[Check]:
        """Ask each Dask worker for its versions of Python and DDLF."""
        client = await self._connect()
        try:
            import distributed

            yield Check(f"Dask {distributed.__version__}; the scheduler is {client.scheduler.address}")
            workers: dict[str, Any] = (await client.scheduler.identity(n_workers=-1))["workers"]
            if not any(map(self._fits, workers.values())):
                condition = f" with the resources {self._names()}" if self.keys.resources else ""
                yield Check(f"the scheduler has no Dask workers{condition}", "start some, or scale the cluster")
            own_versions = versions()
            for address, answer in (await client.run(versions, on_error="return")).items():
                if isinstance(answer, BaseException):
                    yield Check(f"{address}: {answer}", "install DDLF in the environment of the Dask workers")
                elif answer != own_versions:
                    yield Check(f"{address}: {answer} there, {own_versions} here", "install the same versions on both")
                else:
                    threads = workers.get(address, {}).get("nthreads", 1)
                    yield Check(f"{address}: {answer}, nthreads={threads}")
        finally:
            await client.close()
        async for check in super().check():
            yield check

    async def prepare(self) -> None:
        self._client = await self._connect()
        self._client.subscribe_topic("all", self._hear)

    async def _connect(self) -> Any:
        """Return a new client of the scheduler.

        Raises:
            ConfigError: Dask is not installed, or no scheduler is known.
            ConnectError: The scheduler does not answer.
        """
        try:
            import distributed
        except ImportError:
            raise ConfigError("launcher dask: Dask is not installed here", hint="pip install distributed") from None
        current = distributed.client._get_global_client()
        address = self.keys.scheduler or (current and current.scheduler.address)
        if address is None:
            address = distributed.client.dask.config.get("scheduler-address", None)
        if address is None:
            raise ConfigError(
                "launcher dask: no scheduler is known",
                hint="name it: --launcher dask:scheduler=tcp://HOST:8786, or set DASK_SCHEDULER_ADDRESS",
            )
        self._address = address
        self._security = {"security": current.security} if current and not self.keys.scheduler else {}
        try:
            return await self._new_client()
        except (OSError, ValueError) as error:
            raise ConnectError(
                f"no Dask scheduler answers at {address}: {error}", hint="start one with: dask scheduler"
            ) from None

    async def _new_client(self) -> Any:
        import distributed

        client = distributed.Client(
            self._address, asynchronous=True, set_as_default=False, timeout=CONNECT_S, **self._security
        )
        try:
            return await client
        except BaseException:
            with contextlib.suppress(Exception):
                await client.close()  # otherwise it warns when it is collected
            raise

    async def _is_connected(self) -> bool:
        """Return whether the scheduler can be used. After a lost connection, connect again."""
        async with self._connecting:
            if self._client.status == CONNECTED:
                return True
            while self._client.status in TRIES:  # noqa: ASYNC110 - Dask itself tries for CONNECT_S, without an event
                await asyncio.sleep(LOOK_AGAIN_S)
            try:
                if self._client.status == CONNECTED:
                    self._client.subscribe_topic("all", self._hear)  # the scheduler may be another process
                else:
                    self._client = await self._new_client()
                    self._client.subscribe_topic("all", self._hear)
            except (OSError, ValueError):
                return False
            self._has_said_gone = False
            return True

    async def _close(self) -> None:
        with contextlib.suppress(Exception):  # Dask has many errors for a scheduler that is gone
            async with asyncio.timeout(ANSWER_S):
                if self._client.status == CONNECTED:
                    self._client.unsubscribe_topic("all")
                await self._client.close()

    def _hear(self, event: tuple[float, dict[str, Any]]) -> None:
        """Remember why a place is without its Dask worker. Dask runs the task elsewhere without a word."""
        message = event[1]
        if message.get("action") != "remove-worker":
            return
        for place in {self._tasks[key] for key in message["processing-tasks"] if key in self._tasks}:
            cause, event_words = (Cause.NOTICE, "was retired") if message["expected"] else (Cause.NODE, "is gone")
            self._former_incarnations[place] = self.gate.incarnation(place)
            left = Left(cause, f"the Dask worker {message['worker']} {event_words}")
            self.has_left(place, left)
            log.warning("place %d: %s; Dask runs its task elsewhere", place, left.words)

    def worker(self, gate: Any, place: int | None) -> WorkerStart:
        return dataclasses.replace(super().worker(gate, place), cores=self.keys.cores, env=self.keys.env)

    async def run(self, place: int, worker: WorkerStart) -> Left | None:
        if not await self._is_connected():
            return Left(Cause.NODE, f"no Dask scheduler answers at {self._address}")
        incarnation = self.gate.incarnation(place)
        while (left := await self._run_task(place, worker)) is None:
            log.info("place %d: its task waited behind another one; it is submitted again", place)
        if left == self._scheduler_gone() and self.gate.incarnation(place) != incarnation:
            if self.gate.has_begun and not self._has_said_gone:
                log.warning("%s; the training continues with the workers that still run", left.words)
            self._has_said_gone = True
            await self.gate.wait_until_gone(place, incarnation, GONE_S)
        return left

    async def _run_task(self, place: int, worker: WorkerStart) -> Left | None:
        """Run the worker of a place in a task until it ends, and return how; None if the task was stuck."""
        key = f"ddlf-worker-{place}-{uuid.uuid4().hex[:8]}"
        self._tasks[key] = place
        self._former_incarnations[place] = self.gate.incarnation(place)
        task: Any = None
        ending: Any = None
        try:
            task = self._client.submit(
                run_worker, worker, key=key, pure=False, resources=self.keys.resources or None, priority=1
            )
            ending = asyncio.ensure_future(task)
            while not (await asyncio.wait({ending}, timeout=LOOK_S))[0]:
                if self.gate.incarnation(place) == self._former_incarnations[place] and await self._is_stuck(key):
                    ending.cancel()
                    await self._cancel(task)
                    return None
            code, address = ending.result()
        except asyncio.CancelledError:  # our own; that of Dask is another class
            ending.cancel()
            await self._cancel(task)
            raise
        except Exception as error:  # whatever the task has raised in the Dask worker, or Dask here
            if self._client.status != CONNECTED:
                return self._scheduler_gone()
            kind = type(error).__name__
            return Left(CAUSES.get(kind, Cause.CRASH), f"Dask has given its task up: {kind}: {error}")
        finally:
            del self._tasks[key]
        if code == 0:
            return Left(Cause.CANCELLED, f"its worker in the Dask worker {address} was stopped", 0)
        return Left(Cause.CRASH, f"its worker ended with exit code {code}: see the output of {address}", code)

    def _scheduler_gone(self) -> Left:
        return Left(Cause.NODE, f"the Dask scheduler {self._address} is gone")

    async def _cancel(self, task: Any) -> None:
        with contextlib.suppress(Exception):  # the scheduler may be gone
            async with asyncio.timeout(ANSWER_S):
                await self._client.cancel([task], force=True)

    async def _is_stuck(self, key: str) -> bool:
        """Return whether a task waits behind another task, although another Dask worker is free. Dask can leave it there
        for as long as the other task runs, if the free worker came later.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                workers = (await self._client.scheduler.identity(n_workers=-1))["workers"]
                tasks = await self._client.processing()
        except (TimeoutError, OSError):
            return False
        is_behind = any(
            key in keys and address in workers and len(keys) > workers[address]["nthreads"]
            for address, keys in tasks.items()
        )
        return is_behind and any(
            len(tasks.get(address, ())) < has["nthreads"] and self._fits(has) for address, has in workers.items()
        )

    def _fits(self, worker: dict[str, Any]) -> bool:
        return all(worker["resources"].get(name, 0) >= number for name, number in self.keys.resources.items())

    def _names(self) -> str:
        return ", ".join(f"{name}={number:g}" for name, number in self.keys.resources.items())

    async def waits(self, index: int) -> str:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self.gate.run(self._waits(index))
        except Exception:  # Dask has many errors for a scheduler that is gone
            return "the Dask scheduler does not answer"

    async def _waits(self, place: int) -> str:
        scheduler = self._client.scheduler
        workers: dict[str, Any] = (await scheduler.identity(n_workers=-1))["workers"]
        if not workers:
            return f"the scheduler {scheduler.address} has no Dask workers"
        if not any(map(self._fits, workers.values())):
            return f"its task is unrunnable, because none of the {len(workers)} Dask workers has the resources {self._names()}"
        for address, keys in (await self._client.processing()).items():
            if any(self._tasks.get(key) == place for key in keys):
                threads = workers[address]["nthreads"] if address in workers else 0
                return f"its task is at the Dask worker {address}, which has {len(keys)} tasks and nthreads={threads}"
        left = self._lefts.get(place)
        return left.words if left else f"its task waits for one of the {len(workers)} Dask workers"

    def engine_name(self, index: int) -> str:
        return next((f"task {key}" for key, place in list(self._tasks.items()) if place == index), "")

    async def release(self) -> None:
        if self._client is not None:
            await self._close()


def versions() -> str:
    """Return the versions of this process that must be equal on both sides."""
    return f"DDLF {__version__}, Python {'.'.join(platform.python_version_tuple()[:2])}"


def run_worker(worker: WorkerStart) -> tuple[int, str]:
    """Run the worker of a place in a task of Dask until the run is over, or Dask gives the task up.

    Returns:
        The worker's exit code, and the address of the Dask worker.
    """
    import distributed

    dask = distributed.get_worker()
    key = dask.get_current_task()
    if worker.cores is None:
        worker = dataclasses.replace(worker, cores=dask.state.nthreads)

    supervisor = Supervisor(worker)
    reasons = _reasons_to_close(dask)

    def is_over() -> bool:
        task = dask.state.tasks.get(key)
        is_ending = dask.status.name in ENDING
        if is_ending and SCHEDULER_LOST in reasons:
            supervisor.stay()
        elif is_ending and dask.nanny:
            supervisor.leave(NANNY_S)
        return is_ending or task is None or task.state not in RUNNING

    return supervisor.run(is_over), dask.address


def _reasons_to_close(dask: Any) -> list[str]:
    """Return a list that gets the reason when a Dask worker begins to close. Dask tells it to nobody else than its
    scheduler, which may be gone.
    """
    reasons: list[str] = []
    log_event = dask.log_event

    def hear(topic: Any, message: Any) -> None:
        if isinstance(message, dict) and message.get("action") == "closing-worker":
            reasons.append(str(message.get("reason")))
        log_event(topic, message)

    dask.log_event = hear
    return reasons
