"""Workers on this machine: the ``ddlf-worker`` command, started as subprocesses. Runs on the master.

They are not children by ``multiprocessing``, so a script needs no ``if __name__ == "__main__"``. They get a throw-away token through a pipe, say on
which port they listen through another one, and end when this process does, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from ddlf.cluster.launch.launcher import Address, Launcher
from ddlf.errors import ConfigError, ConnectError
from ddlf.rpc.tokens import Tokens, new_token
from ddlf.worker.process import Template, can_fork, child_environment

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
EXIT_NEWS_S = 0.1
"""How long after the end of its connections the end of a process may still be unknown."""
MAX_STARTS = 3
"""A worker that a signal ended before it was ready is started so often; one that ended by itself would do it again."""

T = TypeVar("T")


class Local(Launcher):
    """New workers on this machine, which share a throw-away token with this process.

    Args:
        n: How many, 1 to 1,024.
    """

    revives = True

    def __init__(self, n: int) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1024:
            raise ConfigError(f"the number of local workers must be 1-1024, got {n!r}")
        self.tokens = Tokens((new_token().encode(),), source="a throw-away token")
        self.addresses = [("127.0.0.1", 0)] * n
        self._template: Template | None = None
        self._processes: list[asyncio.subprocess.Process] = []  # in the order of the workers
        self._started: list[asyncio.subprocess.Process] = []  # all that may still run
        self._starting: set[asyncio.Task[Any]] = set()
        self._start_lock = asyncio.Lock()
        self._locks = [asyncio.Lock() for _ in range(n)]

    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        """See ``Launcher``. The error's text has what the worker wrote."""
        async with self._start_lock:
            if not self._processes:
                try:
                    started = await self._unless_stopped(self._start_all(tuple(modules)))
                except BaseException:  # also when the caller is cancelled: nothing is left running
                    await self._end_all()
                    raise
                self._processes = [process for process, _ in started]
                self.addresses = [("127.0.0.1", port) for _, port in started]
            return self.addresses

    async def _start_all(self, modules: tuple[str, ...]) -> list[tuple[asyncio.subprocess.Process, int]]:
        self._template = self._template or start_template(modules)
        outcomes = await asyncio.gather(*(self._start_one() for _ in self.addresses), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def revive(self, index: int) -> Address:
        """See ``Launcher``; a worker that is started again has another port."""
        if not self._processes:
            raise ConnectError("the local workers were ended", hint="connect the cluster again")
        async with self._locks[index]:
            if await self.how_ended(index) is not None:
                process, port = await self._unless_stopped(self._start_one())
                self._processes[index], self.addresses[index] = process, ("127.0.0.1", port)
            return self.addresses[index]

    async def _unless_stopped(self, starting: Coroutine[Any, Any, T]) -> T:
        """Start something, which ``stop`` can end."""
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

    async def _start_one(self, port: int = 0, *options: str) -> tuple[asyncio.subprocess.Process, int]:
        for attempt in range(1, MAX_STARTS + 1):
            process, facts = await self._try_to_start(port, *options)
            if facts or attempt == MAX_STARTS or await process.wait() >= 0:
                break
        if not facts:
            raise ConnectError(
                f"a local worker ended with exit code {await process.wait()} before it was ready",
                hint="see its lines above",
            )
        if facts["failure"]:
            raise ConnectError(f"a local worker cannot start its executor, the last one {facts['failure']}")
        return process, int(facts["port"])

    async def _try_to_start(self, port: int, *options: str) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
        """Start a process and read what it says of itself; nothing if it ended before."""
        read_fd, write_fd = os.pipe()
        started = False
        template = [self._template.fileno()] if self._template is not None else []
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "ddlf.cli.worker", "--port", str(port), "--quiet"),
                *("--exit-with-parent", "--ready-fd", str(write_fd), *options),
                *(f"--template-fd={fd}" for fd in template),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(write_fd, *template),
                env=child_environment(),
                # Ctrl-C in the terminal is the master's: it ends its workers itself, in order.
                start_new_session=True,
            )
            started = True
        finally:
            os.close(write_fd)
            if not started:
                os.close(read_fd)
        self._started.append(process)
        assert process.stdin is not None
        process.stdin.write(self.tokens.primary + b"\n")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await _read_line(read_fd)
        except BaseException as error:
            await _end(process)  # nobody would know it, and it may hold the port that the next one is to have
            if isinstance(error, TimeoutError):
                raise ConnectError(f"a local worker did not start within {START_TIMEOUT_S:g} s") from None
            raise
        return process, json.loads(line) if line else {}

    async def how_ended(self, index: int) -> int | None:
        """See ``Launcher``; the process is the daemon's."""
        with contextlib.suppress(TimeoutError, IndexError):
            async with asyncio.timeout(EXIT_NEWS_S):
                return await self._processes[index].wait()
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
    """Let it end tidily, so that it removes its folder; by force if that takes too long."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    if process.stdin is not None:
        process.stdin.close()


_early: Template | None = None

SET_BY_IMPORTS = frozenset(
    {
        *("TF2_BEHAVIOR", "TF_CPP_MIN_LOG_LEVEL", "ENABLE_RUNTIME_UPTIME_TELEMETRY", "HDF5_PLUGIN_PATH"),
        *("TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION", "TPU_SKIP_MDS_QUERY"),
        *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
    }
)
"""Environment variables that the backends and scikit-learn set when they are imported, for themselves."""


def start_template_early(modules: tuple[str, ...]) -> None:
    """Start the template of the local workers that this process is likely to start, before it does anything that takes long.

    ``Local.start`` takes it if the environment is still the same. ``end_early_template`` ends it if nobody took it.
    """
    global _early
    if can_fork() and _early is None:
        _early = _start_template(child_environment(), modules)


def end_early_template() -> None:
    """End what ``start_template_early`` started, unless workers took it."""
    global _early
    early, _early = _early, None
    if early is not None:
        early.kill()


def start_template(modules: tuple[str, ...]) -> Template | None:
    """Start the process that executors are forked from, or take the one that was started early; None where that is not possible."""
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
    """Read a pipe until a line or its end; closes it."""
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
