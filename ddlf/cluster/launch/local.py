"""Workers on this machine: ``ddlf-worker`` commands, started as subprocesses. Runs on the master.

They are not children of ``multiprocessing``, so a script needs no ``if __name__ == "__main__"``. They receive a
throw-away token through a pipe, and report their port through another pipe. They end when this process ends, even if it
is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from ddlf.cluster.launch.launcher import Address, Cause, Incarnation, Launcher, Left
from ddlf.cluster.launch.processes import end
from ddlf.errors import ConfigError, ConnectError
from ddlf.rpc.tokens import Tokens, new_token
from ddlf.worker.assignment import GROWING, NO_WISH, CardWish, count_of_workers, replacement_card, spread, unused_cards
from ddlf.worker.process import Template, can_fork, child_environment

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
EXIT_NEWS_S = 1.0
"""Seconds to wait for the exit code of a process after its connections have ended. On a busy machine it comes late."""
USUAL_WORKERS = 2
"""Number of workers on a machine without cards, if nobody names the number."""
MAX_STARTS = 3
"""Maximum number of starts of a worker that a signal ends before it is ready. A worker that exits by itself is not
started again, because it would exit again."""

T = TypeVar("T")


class Local(Launcher):
    """The launcher that starts new workers on this machine. They share a throw-away token with this process.

    Args:
        n: Number of workers, 1 to 1,024; None for one on each free card, or two without a card.
        wish: The cards for all of them, and the limit of memory for each.
    """

    revives = True
    when_lost = "its launcher starts another one"

    def __init__(self, n: int | None = None, wish: CardWish = NO_WISH) -> None:
        if n is None:
            n = count_of_workers(wish, USUAL_WORKERS)
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1024:
            raise ConfigError(f"the number of local workers must be 1-1024, got {n!r}")
        self.tokens = Tokens((new_token().encode(),), source="a throw-away token")
        self.addresses = [("127.0.0.1", 0)] * n
        self._wish = wish
        self._cards: list[CardWish] = []
        self._template: Template | None = None
        self._processes: list[asyncio.subprocess.Process] = []  # in the order of the workers
        self._started: list[asyncio.subprocess.Process] = []  # all processes that may still run
        self._starting: set[asyncio.Task[Any]] = set()
        self._start_lock = asyncio.Lock()
        self._locks = [asyncio.Lock() for _ in range(n)]

    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        """Start all workers, as ``Launcher.start`` describes. If one fails, its output appears above the error."""
        async with self._start_lock:
            if not self._processes:
                try:
                    processes_and_ports = await self._unless_stopped(self._start_all(tuple(modules)))
                except BaseException:  # also when the caller is cancelled: no process may remain
                    await self._end_all()
                    raise
                self._processes = [process for process, _ in processes_and_ports]
                self.addresses = [("127.0.0.1", port) for _, port in processes_and_ports]
            return self.addresses

    async def _start_all(self, modules: tuple[str, ...]) -> list[tuple[asyncio.subprocess.Process, int]]:
        self._cards = spread(len(self.addresses), self._wish)
        if self._wish.names is None:
            for reason in unused_cards():
                log.warning("the workers leave cards of this machine unused: %s", reason)
        self._template = self._template or start_template(modules)
        starting = (self._start_one(index) for index in range(len(self.addresses)))
        outcomes = await asyncio.gather(*starting, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def revive(self, index: int) -> Address:
        """Restart one worker if it has ended. It gets another port."""
        if not self._processes:
            raise ConnectError("the local workers were ended", hint="connect the cluster again")
        async with self._locks[index]:
            if await self.left(index) is not None:
                if self._cards:
                    self._cards[index] = replacement_card(self._cards[index])
                process, port = await self._unless_stopped(self._start_one(index))
                self._processes[index], self.addresses[index] = process, ("127.0.0.1", port)
            return self.addresses[index]

    async def _unless_stopped(self, starting: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine that starts workers, so that ``stop`` can cancel it."""
        task = asyncio.ensure_future(starting)
        self._starting.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise ConnectError("the cluster was closed while its workers started") from None
        finally:
            self._starting.discard(task)

    async def _start_one(self, index: int, port: int = 0, *options: str) -> tuple[asyncio.subprocess.Process, int]:
        options = (*self._cards[index].arguments(), *options) if self._cards else options
        for attempt in range(1, MAX_STARTS + 1):
            process, facts = await self._try_to_start(port, *options)
            if facts or attempt == MAX_STARTS or await process.wait() >= 0:
                break
        if not facts:
            raise ConnectError(
                f"a local worker ended with exit code {await process.wait()} before it was ready",
                hint="see its output above",
            )
        if "refused" in facts:
            raise ConfigError(facts["refused"], hint=facts["hint"])
        if facts["failure"]:
            raise ConnectError(f"a local worker cannot start its executor, the last one {facts['failure']}")
        return process, int(facts["port"])

    async def _try_to_start(self, port: int, *options: str) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
        """Start the process of one worker, and return it with the facts that it reports, such as its port. They are
        empty if it ended before its report.
        """
        read_fd, write_fd = os.pipe()
        has_started = False
        template = [self._template.fileno()] if self._template is not None else []
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "ddlf.cli.worker", "--port", str(port), "--quiet"),
                *("--exit-with-parent", "--ready-fd", str(write_fd), *options),
                *(f"--template-fd={fd}" for fd in template),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(write_fd, *template),
                env=child_environment(),
                # Ctrl-C in the terminal reaches the master only, which ends its workers in order.
                start_new_session=True,
            )
            has_started = True
        finally:
            os.close(write_fd)
            if not has_started:
                os.close(read_fd)
        self._started.append(process)
        assert process.stdin is not None
        process.stdin.write(self.tokens.primary + b"\n")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await _read_line(read_fd)
        except BaseException as error:
            await _end(process)  # Otherwise this process would keep running, and might use the port of the next one.
            if isinstance(error, TimeoutError):
                raise ConnectError(f"a local worker did not start within {START_TIMEOUT_S:g} s") from None
            raise
        return process, json.loads(line) if line else {}

    def incarnation(self, index: int) -> Incarnation:
        if index >= len(self._processes):
            return Incarnation()
        pid = self._processes[index].pid
        return Incarnation(pid, f"process {pid}")

    async def left(self, index: int) -> Left | None:
        """Return how the daemon's process ended; None if it runs."""
        with contextlib.suppress(TimeoutError, IndexError):
            async with asyncio.timeout(EXIT_NEWS_S):
                return Left(Cause.CRASH, exit_code=await self._processes[index].wait())
        return None

    async def stop(self) -> None:
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await self._end_all()

    async def _end_all(self) -> None:
        processes, self._started, self._processes = self._started, [], []
        await asyncio.gather(*map(_end, processes))
        template, self._template = self._template, None
        if template is not None:
            await template.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask a worker's process to end, so that it removes its folder. Kill the process if that takes too long."""
    await end(process, signal.SIGTERM, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()


_early: Template | None = None

SET_BY_IMPORTS = frozenset(
    {
        *("TF2_BEHAVIOR", "TF_CPP_MIN_LOG_LEVEL", "ENABLE_RUNTIME_UPTIME_TELEMETRY", "HDF5_PLUGIN_PATH"),
        *("TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION", "TPU_SKIP_MDS_QUERY"),
        *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
        *GROWING,
    }
)
"""Environment variables that the backends and scikit-learn set when they are imported, or ``import_keras``."""


def start_template_early(modules: tuple[str, ...]) -> None:
    """Start the template for local workers that this process will probably start, before any slow work.

    ``Local.start`` uses it if the environment has not changed. Otherwise ``end_early_template`` ends it.
    """
    global _early
    if can_fork() and _early is None:
        _early = _start_template(child_environment(), modules)


def end_early_template() -> None:
    """End the template of ``start_template_early``, unless workers use it."""
    global _early
    early, _early = _early, None
    if early is not None:
        early.kill()


def start_template(modules: tuple[str, ...]) -> Template | None:
    """Start a template, or return the one that was started early; return None where the platform cannot fork."""
    global _early
    environment = child_environment()
    early, _early = _early, None
    if early is not None:
        if _unchanged(early.environment) == _unchanged(environment):
            return early
        early.kill()
    return _start_template(environment, modules) if can_fork() else None


def _start_template(environment: dict[str, str], modules: tuple[str, ...]) -> Template | None:
    with contextlib.suppress(OSError):
        template = Template.start(environment)
        try:
            if modules:
                template.begin_preload(modules).close()
        except OSError:
            template.kill()
            raise
        return template
    return None


def _unchanged(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in SET_BY_IMPORTS}


async def _read_line(fd: int) -> bytes:
    """Read a pipe until the first line or the pipe ends, and close it."""
    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)
    readable = asyncio.Event()
    data = b""
    loop.add_reader(fd, readable.set)
    try:
        while not data.endswith(b"\n"):
            await readable.wait()
            readable.clear()
            chunk = os.read(fd, 4096)
            if not chunk:
                break
            data += chunk
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return data
