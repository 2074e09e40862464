"""Launchers for engines: Slurm, Ray, ssh and others start the workers, and the workers join this master. Runs on the
master.

An engine places, restarts and accounts for workers. Everything else is the same everywhere: the master opens a gate, the
workers dial it, and they prove a token that this run alone has. Tensors never go through an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ddlf.cluster.launch.gate import SAY_AFTER_S, Gate, Joined
from ddlf.cluster.launch.keys import Keys, WorkersKeys, parse_keys, read_keys
from ddlf.cluster.launch.launcher import Address, Cause, Check, Launcher, Left, Requeue, Workers, WorkersMissing
from ddlf.cluster.launch.supervisor import WorkerStart
from ddlf.errors import ConfigError, ConnectError, DDLFError
from ddlf.rpc.tokens import Tokens, new_token
from ddlf.worker.machine import addresses_in, addresses_of
from ddlf.worker.process import child_environment

log = logging.getLogger(__name__)

MAX_STARTS = 3
"""How often a worker is started in a row without joining, before the start of the run fails."""
PAUSES_S = (0.2, 30.0)
"""First and longest pause, in seconds, before a worker is started again."""
NEWS_S = 0.5
"""Seconds for the engine to say how a worker has ended, after its connection has ended."""
END_S = 5.0
"""Seconds for workers to end by themselves after the run."""
RELEASE_S = 30.0
"""Longest time for an engine to end the workers that still run, and then to give back the rest."""


class Engine(Joined):
    """The base class of launchers whose workers an engine starts. They join this master with a token of this run, and end
    with the run.

    Args:
        keys: The keys of the launcher.
        workers: The number of workers; None takes it from the keys.

    Attributes:
        name: Name of the launcher.
        model: The class of its keys.

    Raises:
        WorkersMissing: The number of workers is missing.
    """

    name: ClassVar[str]
    model: ClassVar[type[WorkersKeys]] = Keys
    ends_workers = True
    when_lost = "its launcher starts another one"

    def __init__(self, keys: WorkersKeys, workers: Workers | None = None) -> None:
        workers = workers or keys.workers
        if workers is None:
            raise WorkersMissing(
                f"launcher {self.name} needs the number of workers",
                hint=f"start it with: ddlf run app.py --launcher {self.name} --workers 4",
            )
        self.keys = keys
        super().__init__(
            workers.most,
            "0.0.0.0",
            0,
            least=workers.least,
            tokens=Tokens((new_token().encode(),), source="a token of this run"),
            start_timeout_s=keys.start_timeout,
        )

    @classmethod
    def from_text(cls, text: str, workers: Workers | None = None) -> Launcher:
        return cls(read_keys(cls.model, cls.name, parse_keys(text, cls.name, cls.model.example), workers))

    @classmethod
    def from_keys(cls, values: Mapping[str, Any]) -> Launcher:
        return cls(read_keys(cls.model, cls.name, values))

    async def check(self) -> AsyncIterator[Check]:
        """Yield the addresses of this master that workers will dial."""
        network = self.network
        hosts = addresses_of(self.host) if network is None else addresses_in(network)
        if reachable := [host for host in hosts if not ipaddress.ip_address(host).is_loopback]:
            yield Check(f"workers reach this machine at {' or '.join(reachable)}")
        else:
            yield Check(
                "this machine has no address that other machines can reach",
                "connect it to a network, or start the run on another machine",
            )

    @property
    def network(self) -> str | None:
        """The interface or network of this master that workers dial; None for all, or if they dial none."""
        return self.keys.network if isinstance(self.keys, Keys) else None

    def requeue(self) -> Requeue:
        raise ConfigError(
            f"--requeue has no effect with --launcher {self.name}, which starts workers again, but not this command",
            hint="start it again yourself, with --checkpoint DIR --resume auto",
        )


class PlaceEngine(Engine):
    """The base class of engines that start a worker on request. A subclass writes ``run``, and what else it needs.

    Everything runs in the gate's event loop, so it continues while user code blocks the master's.

    Attributes:
        restarts: The part of the engine that starts an ended worker again, such as ``"its Job"``. ``run`` then waits for
            the end of the next one. Empty if this launcher starts it again.
    """

    restarts = ""

    def __init__(self, keys: WorkersKeys, workers: Workers | None = None) -> None:
        super().__init__(keys, workers)
        self._runs_in: dict[int, str] = {}  # what runs the worker of each place; ``run`` sets them
        self._lefts: dict[int, Left] = {}
        self._left_by: dict[int, int] = {}  # the incarnation of the worker that ended, by place
        self._ended = asyncio.Event()  # ``_begin`` makes a new one, because it belongs to one gate's loop
        self._running: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[ConnectError] | None = None
        self._given_up: dict[int, str] = {}

    async def prepare(self) -> None:
        """Connect to the engine, before the first worker starts.

        Raises:
            ConfigError: The engine cannot be used with these keys.
            ConnectError: The engine does not answer.
        """

    @abstractmethod
    async def run(self, place: int, worker: WorkerStart) -> Left | None:
        """Run a worker at a place until it ends, and return how it ended. The caller may cancel this, which ends it.

        None means that the engine has taken the worker over: it starts it, and starts it again, without this process.

        Raises:
            ConnectError: The engine will never run this worker.
        """

    async def release(self) -> None:
        """Give back what ``prepare`` has taken, after all workers have ended."""

    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        """Have the engine start all workers, and wait for them.

        Raises:
            ConfigError: The engine cannot be used with these keys.
            ConnectError: No worker joined in time, or the engine will never run one.
        """
        gate = self.open()
        if self._running is None:
            await self._have_begun(gate)
        return await super().start(modules)

    async def _have_begun(self, gate: Gate) -> None:
        """Wait until the engine has taken the places, and say so if it does not answer at once."""
        beginning = asyncio.ensure_future(gate.run(self._begin(gate)))
        try:
            if not (await asyncio.wait({beginning}, timeout=SAY_AFTER_S))[0]:
                log.warning("waiting for the engine of the launcher %s, which has not answered yet", self.name)
            await beginning
        finally:
            beginning.cancel()

    async def left(self, index: int) -> Left | None:
        """Return how the worker at a place ended. The connection to a worker ends a moment before the engine knows that
        the worker has, so this waits for that.
        """
        if self._left(index) is None and self._running is not None:
            with contextlib.suppress(ConnectError):
                await self.gate.run(self._wait_for_end(index))
        return self._left(index)

    async def _wait_for_end(self, index: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NEWS_S):
                while self._left(index) is None:
                    self._ended.clear()
                    await self._ended.wait()

    def _left(self, index: int) -> Left | None:
        latest = 0 if self._gate is None else self._gate.incarnation(index)
        return self._lefts.get(index) if self._left_by.get(index, latest) == latest else None

    def never(self, index: int) -> str:
        return self._given_up.get(index, "")

    def engine_name(self, index: int) -> str:
        return self._runs_in.get(index, "")

    def has_left(self, place: int, left: Left) -> None:
        """Keep the reason why the worker at a place ended, until the next worker joins there."""
        self._lefts[place] = left
        if self._gate is not None:
            self._left_by[place] = self._gate.incarnation(place)
            self._ended.set()

    def worker(self, gate: Gate, place: int | None) -> WorkerStart:
        """Return how to start the worker of a place."""
        return WorkerStart(gate.addresses(self.network), place, self.tokens.primary)

    async def _begin(self, gate: Gate) -> None:
        loop = asyncio.get_running_loop()
        self._failure, self._ended = loop.create_future(), asyncio.Event()
        self._lefts.clear()
        self._left_by.clear()
        self._given_up.clear()
        await self.prepare()
        self._running = loop.create_task(self._run_all(gate))
        self._running.add_done_callback(self._look_at)

    def _look_at(self, running: asyncio.Task[None]) -> None:
        """Fail the start if the task that runs the places has failed."""
        error = None if running.cancelled() else running.exception()
        if error is not None and self._failure is not None:
            log.error("the launcher %s failed", self.name, exc_info=error)
            if not self._failure.done():
                self._failure.set_result(
                    ConnectError(f"the launcher {self.name} failed ({type(error).__name__}: {error})")
                )

    async def _run_all(self, gate: Gate) -> None:
        async with asyncio.TaskGroup() as group:
            for place in range(len(self.addresses)):
                group.create_task(self._keep(gate, place))

    async def _keep(self, gate: Gate, place: int) -> None:
        """Keep a worker at a place until the run is over."""
        starts, pause, shown = 0, PAUSES_S[0], ""
        while not gate.is_over:
            incarnation = gate.incarnation(place)
            try:
                left = await self.run(place, self.worker(gate, place))
            except DDLFError as error:
                self._fail(place, error.message, error.hint)
                return
            except Exception as error:  # of the engine's library: the other places continue
                log.exception("place %d: the launcher %s failed", place, self.name)
                self._fail(place, f"{type(error).__name__}: {error}")
                return
            if left is None:
                return
            self.has_left(place, left)
            has_joined = gate.incarnation(place) != incarnation
            starts, pause = (0, PAUSES_S[0]) if has_joined else (starts + 1, min(2 * pause, PAUSES_S[1]))
            if starts >= MAX_STARTS and not gate.has_begun:
                self._fail(place, left.words or f"its worker ended {starts} times before it joined")
                return
            if not gate.is_over:
                words = f"{left.words or 'its worker ended'} ({left.cause})"
                if gate.has_begun and (has_joined or words != shown):  # an engine that is gone is named once
                    restarts = f"{self.restarts} starts it again" if self.restarts else "starting it again"
                    log.warning("place %d: %s; %s", place, words, restarts)
                shown = words
                await asyncio.sleep(0.0 if self.restarts else pause)

    def _fail(self, place: int, reason: str, hint: str = "") -> None:
        """Give a place up. The start fails if too few places remain."""
        assert self._failure is not None
        if (left := self._lefts.get(place)) is None or left.words != reason:  # otherwise its cause is known
            self.has_left(place, Left(Cause.CANCELLED, reason))
        self._given_up[place] = reason
        count = len(self.addresses)
        if self._gate is not None:
            self._gate.give_up(place, reason)
        if count - len(self._given_up) >= (self.least or count) or (self._gate is not None and self._gate.has_begun):
            log.warning("place %d gets no worker any more: %s", place, reason)
        elif not self._failure.done():
            self._failure.set_result(ConnectError(f"place {place}: {reason}", hint=hint))

    async def _failed(self) -> ConnectError:
        async def wait() -> ConnectError:
            assert self._failure is not None
            return await asyncio.shield(self._failure)

        return await self.gate.run(wait())

    async def _wait_for_workers_end(self, gate: Gate) -> None:
        await gate.run(self._end(gate))

    async def _end(self, gate: Gate) -> None:
        running, self._running = self._running, None
        if running is not None:
            if any(gate.incarnation(place) for place in range(len(self.addresses))):  # they know that the run is over
                await asyncio.wait({running}, timeout=END_S)
            running.cancel()
            await asyncio.wait({running}, timeout=RELEASE_S)
        try:
            async with asyncio.timeout(RELEASE_S):
                await self.release()
        except TimeoutError:
            log.warning("the engine of the launcher %s does not answer at the end", self.name)


MOUNTS = Path("/proc/self/mounts")
OWN_DISKS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
"""File systems of a disk or of memory, which other machines do not see."""


def check_folder(folder: Path) -> Check:
    """Return whether a folder that workers must share can be written to, and its file system."""
    path = folder.resolve()
    if not os.access(path, os.W_OK | os.X_OK):
        return Check(
            f"the folder {path} cannot be written to", "name a folder that the workers share", ConfigError.exit_code
        )
    kind = _file_system(path)
    location = f"on {kind}, which only this machine sees" if kind in OWN_DISKS else f"on {kind}" if kind else ""
    return Check(f"the workers must share the folder {path}" + (f" ({location})" if location else ""))


def writable(folder: Path) -> Path:
    """Return the absolute path of a folder that workers share.

    Raises:
        ConfigError: It cannot be written to.
    """
    check = check_folder(folder)
    if check.do:
        raise ConfigError(check.fact, hint=check.do)
    return folder.resolve()


def _file_system(path: Path) -> str:
    """Return the kind of file system that a path is on; empty if the operating system does not tell it."""
    with contextlib.suppress(OSError):
        mounts = [line.split(" ")[1:3] for line in MOUNTS.read_text().splitlines()]
        mount_points = [(Path(folder.replace("\\040", " ")), kind) for folder, kind in mounts]
        matches = [(len(folder.parts), kind) for folder, kind in mount_points if path.is_relative_to(folder)]
        return max(matches, key=lambda pair: pair[0])[1] if matches else ""
    return ""


async def first_line(*command: str) -> str:
    """Return the first line that a command prints, such as its version.

    Raises:
        ConfigError: There is no such command, or it fails.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(),
        )
    except OSError as error:
        raise ConfigError(
            f"the command {command[0]} cannot run on this machine: {error.strerror}", hint="install it"
        ) from None
    output = (await process.communicate())[0].decode(errors="replace").strip().partition("\n")[0]
    if process.returncode:
        raise ConfigError(
            f"{' '.join(command)} ended with exit code {process.returncode}: {output}", hint="correct that"
        )
    return output
