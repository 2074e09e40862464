"""Workers that a command starts: ``--launcher "command:qsub -t 1-{n} {worker}"``. Runs on the master.

The command may be that of any scheduler. It gets the command of a worker, which joins this master. The token travels in
a file that only its owner can read, so the command's folder must be shared with the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Self

from pydantic import Field

from ddlf.cluster.launch.engine import PlaceEngine, check_folder, writable
from ddlf.cluster.launch.gate import Gate
from ddlf.cluster.launch.guard import Guard
from ddlf.cluster.launch.keys import Keys, read_keys
from ddlf.cluster.launch.launcher import Cause, Check, Left, Workers
from ddlf.cluster.launch.processes import STOP_S, end
from ddlf.cluster.launch.supervisor import LOOK_S, WorkerStart
from ddlf.errors import ConfigError, ConnectError
from ddlf.worker.grace import grace_s
from ddlf.worker.process import child_environment

BUILTIN = frozenset(
    {"exec", "eval", "(", "{", "if", "for", "while", "{worker}", "cd", "export", ".", "source", "ulimit"}
)
"""First words of a command that a shell knows itself."""
SHOWN_BYTES = 2000
"""Bytes of a failed command's output in the error."""


class CommandKeys(Keys):
    """The keys of the launcher ``command``."""

    command: str = Field(description="The command, for a shell, with {worker}, {n} and perhaps {place}.")
    folder: Path = Field(default_factory=Path.cwd, description="A folder that the workers share, for the token.")


class Commanded(PlaceEngine):
    """Workers that a command of the user starts. In the command, ``{worker}`` stands for a worker's command and ``{n}``
    for the number of workers. With ``{place}``, the command runs once for each place, and again if its worker ends.

    Raises:
        ConfigError: The command has no ``{worker}``.
    """

    name = "command"
    model = CommandKeys
    keys: CommandKeys

    def __init__(self, keys: CommandKeys, workers: Workers | None = None) -> None:
        if "{worker}" not in keys.command:
            raise ConfigError(
                "launcher command: the command does not contain {worker}",
                hint="as in: --launcher 'command:qsub -t 1-{n} {worker}' --workers 4",
            )
        super().__init__(keys, workers)
        self._file: Path | None = None
        self._guard: Guard | None = None
        self._is_handed_over = False
        self._errors: IO[bytes] | None = None  # what the commands and their workers write; they share it

    @classmethod
    def from_text(cls, text: str, workers: Workers | None = None) -> Self:
        return cls(read_keys(cls.model, cls.name, {"command": text}, workers))

    async def check(self) -> AsyncIterator[Check]:
        async for check in super().check():
            yield check
        with contextlib.suppress(ValueError):  # quotes that only a shell can read
            word = next((word for word in shlex.split(self.keys.command) if "=" not in word), "")
            if path := shutil.which(word):
                yield Check(f"the command {word} is {path}")
            elif word and word not in BUILTIN:
                yield Check(f"there is no command {word} on this machine", "install it, or correct the command")
        yield check_folder(self.keys.folder)

    async def prepare(self) -> None:
        self._file = new_token_file(writable(self.keys.folder))
        self._guard = Guard(self._file)  # before the file exists, so that it never remains
        write_new(self._file, self.tokens.primary)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - ``release`` closes it

    async def _run_all(self, gate: Gate) -> None:
        if "{place}" in self.keys.command:
            await super()._run_all(gate)
            return
        try:
            left = await self.run(None, self.worker(gate, None))
            reason = "" if left is None else left.words
        except ConnectError as error:
            reason = error.message
        self._is_handed_over = not reason
        for place in range(len(self.addresses)) if reason else ():  # the one command was for all of them
            self._fail(place, reason)

    async def waits(self, index: int) -> str:
        if self._is_handed_over:
            return "its command has ended well, and no worker has come yet"
        runs = index in self._runs_in or "{place}" not in self.keys.command
        return "its command runs, and no worker has come yet" if runs else ""

    async def run(self, place: int | None, worker: WorkerStart) -> Left | None:
        """Run the command. If it ends well before its worker, it has handed the worker over to a scheduler.

        Raises:
            ConnectError: The command failed.
        """
        arguments = [sys.executable, "-m", "ddlf.cli.worker", *worker.arguments(), "--token-file", str(self._file)]
        line = self.keys.command.replace("{worker}", shlex.join(arguments)).replace("{n}", str(len(self.addresses)))
        process = await asyncio.create_subprocess_shell(
            line.replace("{place}", str(place)),
            cwd=self.keys.folder,
            env=child_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        if place is not None:
            self._runs_in[place] = f"process {process.pid} of the command"
        try:
            code = await process.wait()
        finally:
            await end(process, signal.SIGTERM, signal.SIGKILL, group=True)
        if code:  # otherwise its worker, which it may have left, would compete with the next one
            await _end_rest(process.pid)
        if code > 0 and self.gate.has_begun:
            return Left(Cause.CRASH, f"its command ended with exit code {code}", code)
        if code > 0:
            output = self._last_output()
            raise ConnectError(
                f"the command of the launcher ended with exit code {code}" + (f":\n{output}" if output else "")
            )
        return Left(Cause.CRASH, f"its command was ended by {signal.Signals(-code).name}", code) if code else None

    def _last_output(self) -> str:
        assert self._errors is not None
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - SHOWN_BYTES))
        return self._errors.read().decode(errors="replace").strip()

    async def release(self) -> None:
        if self._guard is not None:
            await asyncio.to_thread(self._guard.close)
        if self._errors is not None:
            self._errors.close()


def write_token(folder: Path, token: bytes) -> Path:
    """Write a token to a new file in a folder, which only its owner can read."""
    path = new_token_file(folder)
    write_new(path, token)
    return path


def new_token_file(folder: Path) -> Path:
    """Return a name for the file of a token, which no other file has."""
    return folder / f".ddlf-token-{secrets.token_hex(8)}"


def write_new(path: Path, data: bytes) -> None:
    """Write a file that does not exist, so that only its owner can read it."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


async def _end_rest(group: int) -> None:
    """End what a command has left in its process group. A worker hands its work over first."""
    for number, seconds in ((signal.SIGTERM, grace_s() + STOP_S), (signal.SIGKILL, STOP_S)):
        try:
            os.killpg(group, number)
            async with asyncio.timeout(seconds):
                while True:
                    await asyncio.sleep(LOOK_S)
                    os.killpg(group, 0)
        except ProcessLookupError:
            return
        except TimeoutError:
            pass
