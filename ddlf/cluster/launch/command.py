"""Workers that a command starts: ``--launcher "command:qsub -t 1-{n} {worker}"``. Runs on the master.

The command may be that of any scheduler. It gets the command of a worker, which joins this master. The token travels in
a file that only its owner can read, so the command's folder must be shared with the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ddlf.cluster.launch.gate import START_TIMEOUT_S, Joined
from ddlf.cluster.launch.launcher import Address
from ddlf.errors import ConfigError, ConnectError
from ddlf.rpc.tokens import Tokens, new_token
from ddlf.worker.process import child_environment

JOIN_FOR_S = 60
"""Seconds that a worker tries to find its master again, if the master was killed."""
STOP_S = 5.0
SHOWN_BYTES = 2000
"""Bytes of a failed command's output in the error."""


class Commanded(Joined):
    """Workers that a command of the user starts.

    Args:
        text: The command, for a shell. ``{worker}`` stands for a worker's command and ``{n}`` for the number of workers.
            With ``{place}``, the command runs once for each place.
        workers: Number of workers.
        folder: A folder that the workers share, for the token.
        start_timeout_s: Seconds to wait for all workers.

    Raises:
        ConfigError: The text has no ``{worker}``.
    """

    ends_workers = True

    def __init__(
        self, text: str, workers: int, folder: Path | None = None, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        if "{worker}" not in text:
            raise ConfigError(
                "--launcher command: the command does not contain {worker}",
                hint="as in: --launcher 'command:qsub -t 1-{n} {worker}' --workers 4",
            )
        tokens = Tokens((new_token().encode(),), source="a token of this run")
        super().__init__(workers, "0.0.0.0", 0, tokens=tokens, start_timeout_s=start_timeout_s)
        self._text = text
        self._folder = folder or Path.cwd()
        self._file: Path | None = None
        self._errors: IO[bytes] | None = None  # what the commands and their workers write; they share it
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        """Run the command unless it has run, and wait for all workers.

        Raises:
            ConnectError: A command failed, or no worker joined in time.
        """
        if self._file is not None:
            return await super().start(modules)
        gate = self.open()
        self._file = self._write_token()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - ``stop`` closes it
        worker = [sys.executable, "-m", "ddlf.cli.worker", "--join", gate.addresses, "--token-file", str(self._file)]
        worker += ["--join-for", str(JOIN_FOR_S), "--quiet"]
        places: Sequence[int | None] = range(len(self.addresses)) if "{place}" in self._text else [None]
        for place in places:
            own = worker if place is None else [*worker, "--place", str(place)]
            line = self._text.replace("{worker}", shlex.join(own)).replace("{n}", str(len(self.addresses)))
            self._processes.append(await self._run(line.replace("{place}", str(place))))
        waiting = asyncio.ensure_future(super().start(modules))
        failing = asyncio.ensure_future(self._first_failure())
        try:
            await asyncio.wait([waiting, failing], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise failing.result()
            return waiting.result()
        finally:
            waiting.cancel()
            failing.cancel()
            await asyncio.gather(waiting, failing, return_exceptions=True)

    def _write_token(self) -> Path:
        descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=".ddlf-token-")  # mode 0600
        with open(descriptor, "wb") as file:
            file.write(self.tokens.primary)
        return Path(name)

    async def _run(self, line: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_shell(
            line,
            cwd=self._folder,
            env=child_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )

    async def _first_failure(self) -> ConnectError:
        """Wait until a command fails, and return the error. A command that ends well has handed its workers over."""
        failed: asyncio.Queue[int] = asyncio.Queue()

        async def watch(process: asyncio.subprocess.Process) -> None:
            if code := await process.wait():
                failed.put_nowait(code)

        async with asyncio.TaskGroup() as watching:
            tasks = [watching.create_task(watch(process)) for process in self._processes]
            code = await failed.get()
            for task in tasks:
                task.cancel()
        assert self._errors is not None
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - SHOWN_BYTES))
        output = self._errors.read()
        said = output.decode(errors="replace").strip()
        return ConnectError(
            f"the command of the launcher ended with exit code {code}" + (f":\n{said}" if said else ""),
            hint="run it yourself in a shell to see why",
        )

    async def stop(self) -> None:
        """Tell all workers that the run is over, remove the token, and end commands that still run."""
        await super().stop()
        file, self._file = self._file, None
        if file is not None:
            file.unlink(missing_ok=True)
        processes, self._processes = self._processes, []
        for process in processes:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_S):
                        await process.wait()
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            await process.wait()
        if self._errors is not None:
            self._errors.close()


def make_command(text: str, workers: int) -> Commanded:
    """Return the launcher of ``--launcher command:TEXT``."""
    return Commanded(text, workers)
