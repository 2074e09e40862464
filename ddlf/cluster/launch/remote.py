"""Programs on other machines, by the system's ``ssh``. Runs on the master.

The system's ssh reads the user's own configuration, and knows agents and jump hosts. It never asks a question here: where it
would need an answer, it ends with an error. ``remote_programs.py`` has the programs. Their text travels through standard input, so
another machine needs only a Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import shutil
import signal
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ddlf.cluster.launch import remote_programs
from ddlf.cluster.launch.processes import end, exit_code
from ddlf.errors import ConfigError, ConnectError
from ddlf.version import __version__
from ddlf.worker.process import child_environment

PYTHON = "python3"
OPTIONS = (
    *("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3"),
    "LogLevel=INFO",  # below it, ssh does not print the port of a forward
    *("ControlMaster=no", "ControlPath=none"),  # a forward over a shared connection would outlive this one
    "ExitOnForwardFailure=no",  # the user's own forwards may be in use by another session
    *("ForwardAgent=no", "ForwardX11=no", "RemoteCommand=none", "RequestTTY=no"),
)
"""Options of each ssh. They have precedence over the user's configuration."""
CONNECTING = 8
"""Connections that log in at the same time. sshd drops some from the tenth on (``MaxStartups``)."""
ANSWER_S = 60.0
"""Seconds until a program there must answer."""
RESULT_S = 240.0
"""Seconds until a program that starts or ends a worker must have ended. ``there.READY_S`` is a part of it."""
LAST_LINES_S = 1.0
"""Seconds for the rest of an output after the end of its process."""
SHOWN_LINES = 5
KEPT_LINES = 40
MAX_LINE_BYTES = 1 << 20
TOO_OLD = 98
"""Exit code of a Python that is too old to read ``remote_programs.py``."""
SSH_FAILED = 255
BOOTSTRAP = (
    f"import os,sys,json;sys.version_info<(3,7)and os._exit({TOO_OLD});"
    "exec(json.loads(bytes().join(iter(lambda:os.read(0,1)or os._exit(0),bytes([10])))))"
)
"""Reads a program from the first line of standard input, byte by byte, because the rest belongs to the program. It has no
quotes: the login shell there may be any.
"""
NOISE = re.compile(r"Warning: Permanently added|Allocated port|Connection to \S+ closed|Killed|debug\d:")

_KNOWN = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key has changed",
        "if you trust the new key: ssh-keygen -R {host}, then ssh {host}",
    ),
    (
        r"Host key verification failed|host key is known for",
        "its host key is unknown",
        "connect once yourself and compare the key: ssh {host}",
    ),
    (
        r"Permission denied|Too many authentication failures",
        None,
        "ssh must need no password here: try ssh {host}, then ssh-copy-id {host}; ssh-add, if the key has a passphrase",
    ),
    (r"Could not resolve hostname", None, "check the name, and ~/.ssh/config"),
    (r"Bad configuration option|Bad owner or permissions", None, "correct the configuration of ssh"),
    (
        r"administratively prohibited|remote port forwarding failed",
        None,
        "allow it there: AllowTcpForwarding in sshd_config",
    ),
)
"""Failures that another try does not repair: a pattern in ssh's output, a sentence instead of ssh's own line, and a
hint.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a program on another machine ended.

    Args:
        sentence: The end, with the machine's name.
        hint: What to do.
        is_final: Whether another try must fail, too.
        code: Exit code of ssh; None if it was not that of the program.
    """

    sentence: str
    hint: str = ""
    is_final: bool = False
    code: int | None = None

    def error(self) -> ConnectError:
        """Return the failure as an error."""
        return ConnectError(self.sentence, hint=self.hint)


def explain(host: str, code: int, lines: list[str], python: str = PYTHON) -> Failure:
    """Return why ssh, or the program that it started, has ended.

    Args:
        host: Name of the machine.
        code: Exit code of ssh.
        lines: The last lines of its standard error.
        python: The Python that should have run there.
    """
    lines = [line for line in lines if line.strip() and not NOISE.match(line)]
    if code == SSH_FAILED:
        for pattern, sentence, hint in _KNOWN:
            matches = [line for line in lines if re.search(pattern, line)]
            if matches:
                return Failure(f"{host}: {(sentence or matches[-1]).rstrip('.')}", hint.format(host=host), True, code)
        of_ssh = [line for line in lines if line.startswith("ssh: ")]  # the last line may be that of a jump host's end
        return Failure(f"{host}: {(of_ssh or lines or ['ssh lost the connection'])[-1]}", code=code)
    if code in (126, 127):
        return Failure(
            f"{host}: {python} cannot run there: {''.join(lines[-1:])}", remote_programs.NAME_ANOTHER, True, code
        )
    if code == TOO_OLD:
        return Failure(f"{host}: {python} there is older than Python 3.7", remote_programs.NAME_ANOTHER, True, code)
    output = "\n".join(lines[-SHOWN_LINES:])
    return Failure(f"{host}: {ending(code)}" + (f":\n{output}" if output else ""), code=code)


def ending(code: int) -> str:
    """Return how a process ended, in words."""
    number = -code if code < 0 else code - 128
    if code < 0 or 0 < number < signal.NSIG:
        with contextlib.suppress(ValueError):
            return f"{'its ssh client' if code < 0 else 'its worker'} was ended by {signal.Signals(number).name}"
    return f"its worker ended with exit code {code}"


def facts() -> list[Any]:
    """Return the versions that a program there must have, too."""
    return [list(sys.version_info[:2]), __version__]


class Remote:
    """A program on another machine, within one connection of ssh. It ends with this process.

    Args:
        host: A name that ssh knows.
        process: The running ssh.
        python: The Python that it starts there.
        target: Address of this machine that the forward leads to; empty without a forward.
    """

    def __init__(self, host: str, process: asyncio.subprocess.Process, python: str, target: str = "") -> None:
        loop = asyncio.get_running_loop()
        self.host = host
        self._process = process
        self._python = python
        self._target = target
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._port: asyncio.Future[int | None] = loop.create_future()
        self._reading = [loop.create_task(self._read_answers()), loop.create_task(self._read_errors())]

    @classmethod
    async def open(cls, host: str, python: str | None = None, gate: int | None = None) -> Self:
        """Start ssh.

        Args:
            host: A name that ssh knows.
            python: The Python to start there.
            gate: A port of this machine, for a forward: a port there then leads to it.

        Raises:
            ConfigError: This machine has no ssh.
        """
        python = python or PYTHON
        target = "" if gate is None else f"127.0.0.1:{gate}"
        path = python.replace("~/", "$HOME/", 1) if python.startswith("~/") else python
        script = f'"{path}" -c "{BOOTSTRAP}";exit $?'
        process = await start_ssh(
            host,
            f"exec sh -c {shlex.quote(script)}",
            *(("-R", f"0:{target}") if target else ()),
            stdin=asyncio.subprocess.PIPE,
        )
        return cls(host, process, python, target)

    async def port(self, timeout_s: float = ANSWER_S) -> int | Failure:
        """Return the port there that leads to this machine, or why there is none.

        Args:
            timeout_s: Seconds to wait for the login and for the port.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._port) or await self.failure()
        except TimeoutError:
            lines = [f": {line}" for line in self._lines if not NOISE.match(line)]
            return Failure(
                f"{self.host}: ssh has not forwarded a port there within {timeout_s:g} s{''.join(lines[-1:])}; to see what "
                f"it waits for: ssh -v -R 0:{self._target} {self.host} true"
            )

    def begin(self, program: str, arguments: Mapping[str, Any]) -> None:
        """Send the program to the Python there.

        Args:
            program: A name of ``there.PROGRAMS``.
            arguments: Its arguments.
        """
        text = Path(remote_programs.__file__).read_text(encoding="utf-8")
        call = json.dumps({"program": program, "facts": facts(), **arguments})
        self.send(json.dumps(f"{text}\nmain({call!r})\n").encode())

    def send(self, line: bytes) -> None:
        """Send one line."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # ssh has ended; the next answer tells why
            self._process.stdin.write(line + b"\n")

    async def answer(self, timeout_s: float | None = ANSWER_S) -> dict[str, Any] | Failure:
        """Return the program's next answer, or why there is none: it has ended, or the time is over.

        Args:
            timeout_s: Seconds to wait for it; None waits for as long as the program runs.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._answers.get()
        except TimeoutError:
            return Failure(f"{self.host}: it has not answered within {timeout_s:g} s")
        if answer is None:
            self._answers.put_nowait(None)
            return await self.failure()
        if "error" in answer:
            return Failure(f"{self.host}: {answer['error']}", answer["hint"], is_final=True)
        return answer

    async def wait(self) -> int:
        """Wait until ssh ends, and return its exit code: that of the program, or 255 if ssh itself failed."""
        code = await exit_code(self._process)
        await asyncio.wait(self._reading, timeout=LAST_LINES_S)
        return code

    async def failure(self) -> Failure:
        """Wait until ssh ends, and return why."""
        if self._port.done() and self._port.result() == 0:  # ssh would continue without the forward
            return explain(self.host, SSH_FAILED, list(self._lines))
        return explain(self.host, await self.wait(), list(self._lines), self._python)

    async def end(self) -> None:
        """End the program and ssh. The program there sees that its standard input has ended. Safe to call again."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await end(self._process)
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def _read_answers(self) -> None:
        assert self._process.stdout is not None
        async for line in lines_of(self._process.stdout):
            if line.startswith(remote_programs.PREFIX):
                self._lines.clear()  # what login scripts have printed explains no later end
                with contextlib.suppress(ValueError):
                    self._answers.put_nowait(json.loads(line.removeprefix(remote_programs.PREFIX)))
        self._answers.put_nowait(None)

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        async for line in lines_of(self._process.stderr):
            allocated = re.match(r"Allocated port (\d+) for remote forward to (\S+)", line)
            if allocated and allocated[2] == self._target and not self._port.done():
                self._port.set_result(int(allocated[1]))
                continue
            self._lines.append(line)
            if "remote port forwarding failed for listen port 0" in line and not self._port.done():
                self._port.set_result(0)
        if not self._port.done():
            self._port.set_result(None)


async def start_ssh(host: str, command: str, *options: str, stdin: int) -> asyncio.subprocess.Process:
    """Start ssh with a command for the shell of another machine. It never asks a question.

    Raises:
        ConfigError: This machine has no ssh.
    """
    check_ssh()
    arguments = [word for option in OPTIONS for word in ("-o", option)]
    return await asyncio.create_subprocess_exec(
        *("ssh", *arguments, *options, "--", host, command),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(),
        limit=MAX_LINE_BYTES,
        start_new_session=True,  # Ctrl-C in the terminal reaches this process only
    )


def check_ssh() -> None:
    """Check that this machine has an ssh.

    Raises:
        ConfigError: It has none.
    """
    if shutil.which("ssh") is None:
        raise ConfigError("there is no ssh on this machine", hint="install the OpenSSH client")


async def hostname_of(host: str) -> str:
    """Return the address that the configuration of ssh has for a name; empty if it has none."""
    check_ssh()
    process = await asyncio.create_subprocess_exec(
        *("ssh", "-G", "--", host), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    match = re.search(rb"^hostname (\S+)$", (await process.communicate())[0], re.MULTILINE)
    address = match[1].decode() if match else ""
    return "" if address == host else address


def is_host(name: str) -> bool:
    """Return whether a text can be a name for ssh, and not an option."""
    return re.fullmatch(r"[\w.@:%+\[\]-]+", name) is not None and not name.startswith("-")


async def lines_of(stream: asyncio.StreamReader) -> Any:
    """Yield the lines of an output as text, without the end of a line. A line that is too long is left out."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip("\r\n")


async def call(
    host: str,
    program: str,
    arguments: Mapping[str, Any],
    python: str | None = None,
    connecting: asyncio.Semaphore | None = None,
    timeout_s: float | None = RESULT_S,
) -> dict[str, Any]:
    """Run a program on another machine to its end, and return its answer.

    Args:
        host: A name that ssh knows.
        program: A name of ``there.PROGRAMS``.
        arguments: Its arguments.
        python: The Python to start there.
        connecting: Limits how many connections log in at the same time.
        timeout_s: Seconds to wait for the program's answer; None waits for as long as it runs.

    Raises:
        ConnectError: ssh failed, the program told an error, or it did not answer in time.
    """
    async with contextlib.AsyncExitStack() as stack:
        async with connecting or contextlib.nullcontext():
            remote = await Remote.open(host, python)
            stack.push_async_callback(remote.end)
            remote.begin(program, arguments)
            answer = await remote.answer()
        if not isinstance(answer, Failure):
            answer = await remote.answer(timeout_s)
        if isinstance(answer, Failure):
            raise answer.error()
        return answer
