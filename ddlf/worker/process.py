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
"""Seconds to wait for a fork. After that, a new process is started instead. The template may be suspended."""
END_S = 5.0
"""Seconds that a template may take to end before it is killed."""
UNKNOWN = 256
"""The exit code of a fork whose template has ended. Only the template receives the real code."""

EXECUTOR_NAME = "ddlf-exec"

NO_FORK = "DDLF_FORK"
"""The environment variable that is ``0`` if executors must be started as new processes, without a fork."""


def can_fork() -> bool:
    """Return whether this system can fork executors from a template. Only Linux can kill a fork when its daemon dies,
    and on other systems libraries do not survive a fork.
    """
    return sys.platform.startswith("linux") and hasattr(os, "pidfd_open") and os.environ.get(NO_FORK) != "0"


def child_environment() -> dict[str, str]:
    """Return a copy of this process's environment for a child process, in which the child may keep a bytecode cache.
    Without this cache the import of
    TensorFlow takes 7 s instead of 3 s.
    """
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment.pop("DDLF_TOKEN", None)  # a child gets its token in another way, if it needs one
    return environment


def executor_name(of: int | str) -> str:
    """Return the process name of a worker's executor, of at most the 15 bytes that a kernel accepts.

    Args:
        of: The worker's port, or its place as ``"p3"`` if it listens nowhere.
    """
    return f"{EXECUTOR_NAME}:{of}"


class Template:
    """A connection to a template, the process that imports Keras once and forks executors.

    Args:
        requests: This side of the template's socket. Other processes may share it.
        process: The template's process, if this process started it.

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
        """Start a new template process, and return the connection to it.

        Args:
            environment: Environment of the template and its forks.
            cwd: Folder in which it starts.

        Raises:
            OSError: No process could be started.
        """
        ours, template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with template_end:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "ddlf.worker.template", str(template_end.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(template_end.fileno(),),
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
        """Whether the template has ended, if this process started it."""
        return self._process is not None and self._process.poll() is not None

    def fileno(self) -> int:
        """Return the descriptor of the socket, for other processes."""
        return self._requests.fileno()

    def begin_preload(self, modules: tuple[str, ...]) -> socket.socket:
        """Ask the template to import modules for later forks, like ``preload`` does, without waiting for the answer.

        Returns:
            The socket for the answer.

        Raises:
            OSError: The template has ended, or cannot keep up with the requests.
        """
        reply, template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with template_end:
            try:
                self._send({"do": "preload", "modules": modules}, [template_end.fileno()])
            except BaseException:
                reply.close()
                raise
        reply.setblocking(False)
        return reply

    async def preload(self, modules: tuple[str, ...]) -> str:
        """Let the template import modules, so that later forks have them, and wait until it has.

        Returns:
            The reason why forks start without the modules; empty if they start with the modules.
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
        """Let the template fork a new executor.

        Args:
            environment: Variables in addition to the template's environment.
            channel: Descriptor of the executor's end of the channel. The caller still owns this descriptor and the
                others.
            activity: Descriptor of the page.
            stdout: Descriptor of standard output.
            stderr: Descriptor of standard error.

        Returns:
            The fork; None if the template could not fork for any reason.
        """
        request = {"do": "fork", "cwd": os.getcwd(), "environment": environment}
        reply, template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reply.setblocking(False)
        read_end, lifeline = os.pipe()
        try:
            try:
                with template_end:
                    descriptors = [template_end.fileno(), channel, activity, read_end, stdout, stderr]
                    while True:
                        with contextlib.suppress(BlockingIOError):  # the template is too slow for so many requests
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
        except OSError:  # the template has ended, or does not answer
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
        """Kill the template. It must have no users."""
        self._requests.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def close(self) -> None:
        """Close the connection. The template ends after its last user has gone. The process that started it waits for
        its end, and kills it if necessary.
        """
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
    """A process that a template forked. It has the interface of ``asyncio.subprocess.Process``.

    Args:
        reply: Socket for the template's report of how the process ended. After this socket is closed, the template
            releases the process.
        lifeline: Descriptor whose end kills the process, even if this process dies.
        pid: Process id.
        modules: The preloaded modules that it started with.

    Attributes:
        returncode: None while it runs, negative for a signal, ``UNKNOWN`` if the template ended before it could report.
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
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def release(self) -> None:
        """Release the process: the rest of its group is killed, and its process id becomes free. Safe to call again."""
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
    """A daemon's access to templates: a shared template, or its own, which starts with the first preload.

    Args:
        fd: Socket of a shared template; None if there is none.
    """

    def __init__(self, fd: int | None) -> None:
        self._template = None if fd is None else Template(socket.socket(fileno=fd))

    async def fork(self, environment: dict[str, str], *descriptors: int) -> Forked | None:
        """Fork an executor as in ``Template.fork``. Return None also while there is no template."""
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
        """Close the connection to the template."""
        if self._template is not None:
            await self._template.close()
