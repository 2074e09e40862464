"""The executors' processes and their template, as a daemon and a launcher see them. Runs in both; see ``template``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ANSWER_BYTES = 65536
FULL_RETRY_S = 0.01
FORK_S = 10.0
"""How long to wait for a fork before a process is started instead: somebody may have stopped the template."""
END_S = 5.0
"""How long a template may take to end before it is killed."""
UNKNOWN = 256
"""The exit code of a fork whose template has ended: nobody else is told."""

EXECUTOR_NAME = "ddlf-exec"

NO_FORK = "DDLF_FORK"
"""The environment variable that is ``0`` where executors are to be processes of their own."""


def can_fork() -> bool:
    """Whether there can be templates: the lifeline of a fork is Linux's alone, and elsewhere libraries do not bear a fork."""
    return sys.platform.startswith("linux") and hasattr(os, "pidfd_open") and os.environ.get(NO_FORK) != "0"


def child_environment() -> dict[str, str]:
    """This environment, in which a child may keep a bytecode cache: without one TensorFlow takes 7 s to import, not 3."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def executor_name(port: int) -> str:
    """What the executor of the worker on a port is called, in the 15 bytes that a kernel takes."""
    return f"{EXECUTOR_NAME}:{port}"


class Template:
    """The way to a template.

    Args:
        requests: This side of its socket, which other processes may share.
        process: The template, if this process started it.

    Attributes:
        environment: Environment of its forks, if this process started it.
    """

    def __init__(self, requests: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        requests.setblocking(False)
        requests.set_inheritable(False)
        self._requests = requests
        self._process = process
        self.environment: dict[str, str] = {}

    @classmethod
    def start(cls, environment: dict[str, str], cwd: Path | None = None) -> Template:
        """Start one.

        Args:
            environment: For it and its forks.
            cwd: Folder that it starts in.

        Raises:
            OSError: No process could be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "ddlf.worker.template", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                    cwd=cwd,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self = cls(ours, process)
        self.environment = environment
        return self

    @property
    def ended(self) -> bool:
        """Whether the template that this process started has ended."""
        return self._process is not None and self._process.poll() is not None

    def fileno(self) -> int:
        """Descriptor of the socket, for other processes."""
        return self._requests.fileno()

    def begin_preload(self, modules: tuple[str, ...]) -> socket.socket:
        """Ask for a preload; see ``preload``.

        Returns:
            The socket that the answer comes to.

        Raises:
            OSError: The template has ended, or so many ask that it does not keep up.
        """
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._send({"do": "preload", "modules": modules}, [theirs.fileno()])
            except BaseException:
                reply.close()
                raise
        reply.setblocking(False)
        return reply

    async def preload(self, modules: tuple[str, ...]) -> str:
        """Let forks come with modules imported, and wait until they do.

        Returns:
            Why they do not; empty if they do.
        """
        try:
            with self.begin_preload(modules) as reply:
                answer = await asyncio.get_running_loop().sock_recv(reply, ANSWER_BYTES)
        except OSError:
            answer = b""
        return str(json.loads(answer)["reason"]) if answer else "the template has ended"

    async def fork(
        self, environment: dict[str, str], channel: int, activity: int, stdout: int, stderr: int
    ) -> Forked | None:
        """Fork an executor.

        Args:
            environment: What it has beyond the template's.
            channel: Descriptors of the executor; they stay the caller's, too. So are the others.

        Returns:
            None if that is not possible, for any reason.
        """
        request = {"do": "fork", "cwd": os.getcwd(), "environment": environment}
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reply.setblocking(False)
        read_end, lifeline = os.pipe()
        try:
            try:
                with theirs:
                    descriptors = [theirs.fileno(), channel, activity, read_end, stdout, stderr]
                    while True:
                        with contextlib.suppress(BlockingIOError):  # it does not keep up
                            self._send(request, descriptors)
                            break
                        await asyncio.sleep(FULL_RETRY_S)
            finally:
                os.close(read_end)
            async with asyncio.timeout(FORK_S):
                answer = await asyncio.get_running_loop().sock_recv(reply, ANSWER_BYTES)
            facts = json.loads(answer) if answer else {}
            if "pid" in facts:
                return Forked(reply, lifeline, **facts)
        except OSError:  # it has ended, or does not answer
            pass
        except BaseException:
            reply.close()
            os.close(lifeline)
            raise
        reply.close()
        os.close(lifeline)
        return None

    def _send(self, request: dict[str, Any], descriptors: list[int]) -> None:
        socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)

    def kill(self) -> None:
        """End a template that nobody has used."""
        self._requests.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def close(self) -> None:
        """Let go of it, which ends it if nobody else uses it. Who started it waits for that, and kills it if it has to."""
        self._requests.close()
        if self._process is not None:
            await asyncio.to_thread(self._end)

    def _end(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Forked:
    """A process that a template forked: what ``asyncio.subprocess.Process`` is for one that was started here.

    Args:
        reply: The template says there how it ended; its end lets go of it.
        lifeline: Descriptor whose end kills the process, also when this process dies.
        pid: Process id.
        modules: What it came with, of what was to be preloaded.

    Attributes:
        returncode: None while it runs, negative for a signal, ``UNKNOWN`` if the template did not live to say so.
    """

    def __init__(self, reply: socket.socket, lifeline: int, pid: int, modules: list[str]) -> None:
        self.pid = pid
        self.modules = frozenset(modules)
        self.returncode: int | None = None
        self._reply = reply
        self._lifeline = lifeline
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.get_running_loop().create_task(self._watch())

    async def wait(self) -> int:
        """Wait for its end and return ``returncode``."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def release(self) -> None:
        """Let go of it: what is left of its group ends, and its number is free. Safe to call again."""
        if self._pidfd >= 0:
            self._ended.cancel()
            self._reply.close()
            os.close(self._lifeline)
            os.close(self._pidfd)
            self._pidfd = -1

    async def _watch(self) -> int:
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.sock_recv(self._reply, ANSWER_BYTES)
        except OSError:
            answer = b""
        if answer:
            self.returncode = int(json.loads(answer)["code"])
            return self.returncode
        ended = asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._pidfd)
        self.returncode = UNKNOWN
        return UNKNOWN


class Forks:
    """A daemon's use of templates: of one that others have, too, or of its own, which is started when something is first to be preloaded.

    Args:
        fd: Socket of the template that others have, too; None if there is none.
    """

    def __init__(self, fd: int | None) -> None:
        self._template = None if fd is None else Template(socket.socket(fileno=fd))

    async def fork(self, environment: dict[str, str], *descriptors: int) -> Forked | None:
        """See ``Template.fork``; None also while there is no template."""
        return None if self._template is None else await self._template.fork(environment, *descriptors)

    async def preload(self, modules: tuple[str, ...]) -> str:
        if not can_fork():
            return "executors are forked on Linux only, and not with DDLF_FORK=0"
        if self._template is not None and self._template.ended:
            self._template.kill()
            self._template = None
        if self._template is None:
            try:
                self._template = Template.start(child_environment())
            except OSError as error:
                return f"no template could be started: {error.strerror}"
        return await self._template.preload(modules)

    async def close(self) -> None:
        """Let go of the template."""
        if self._template is not None:
            await self._template.close()
