"""Runs commands of DDLF in forks of one process that has imported DDLF: the imports take longer than most commands.

Each process of pytest starts at most one such server, with its first command. The server ends with its process of pytest.
A fork has the environment, the folder and the files of its command, and executes the module as ``python -m`` does.
Commands that need a new interpreter get one; see ``suits``.

``begin`` starts a command. On Linux, ``fork_exec`` starts the daemons and the templates that ``subprocess`` and ``asyncio``
should start: their forks become children of the process of pytest, so nothing else in these modules changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

MODULES = ("ddlf.cli.main", "ddlf.cli.worker", "ddlf.worker.template")
"""The modules that a fork can execute."""
STARTED_BY_PROGRAMS = ("ddlf.cli.worker", "ddlf.worker.template")
"""The modules that ``fork_exec`` executes in forks: programs start them. Tests start commands with ``begin``."""
READ_AT_START = ("PYTHON", "LD_", "DDLF_TOKEN")
"""Beginnings of the names of variables that a process reads, or overwrites, in the environment of its start."""
NUMBER = struct.Struct("!i")
MAX_FILES = 16
ADOPT = 36
"""``PR_SET_CHILD_SUBREAPER`` of Linux: the children of this process's descendants become its own when their parent ends."""
new_process = subprocess._fork_exec  # type: ignore[attr-defined]
"""The function of ``subprocess`` that starts a process."""


@dataclass
class Request:
    """A command for a fork.

    Attributes:
        module: One of ``MODULES``.
        arguments: Its arguments.
        cwd: Its current folder.
        environment: Its environment.
        files: The numbers of its files. They come with the request, in this order.
        is_child: Whether it becomes a child of the process of pytest.
        in_new_session: Whether it begins a session.
    """

    module: str
    arguments: list[str]
    cwd: str
    environment: dict[str, str]
    files: list[int]
    is_child: bool = False
    in_new_session: bool = False


class Fork:
    """A command that runs in a fork. It has the part of ``subprocess.Popen`` that tests use.

    Attributes:
        stdout: The text that it prints on standard output.
        stderr: The text that it prints on standard error.
        pid: Its process id.
        returncode: Its exit code, as ``subprocess.Popen`` gives it; None until ``poll`` or ``wait`` has seen the end.
    """

    def __init__(self, server: socket.socket, module: str, arguments: Sequence[str], cwd: str, env: Mapping[str, str]):
        self.args = ["-m", module, *arguments]
        self.returncode: int | None = None
        (out, write_out), (err, write_err) = os.pipe(), os.pipe()
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        files = {1: write_out, 2: write_err}
        self._status = _send(
            server, Request(module, list(arguments), cwd, dict(env), list(files)), list(files.values())
        )
        os.close(write_out)
        os.close(write_err)
        self.pid: int = NUMBER.unpack(_received(self._status, NUMBER.size))[0]

    def poll(self) -> int | None:
        """Return the exit code; None while the command runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: The command runs longer than ``timeout`` seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = NUMBER.unpack(_received(self._status, NUMBER.size))[0]
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return both outputs.

        Raises:
            subprocess.TimeoutExpired: The command runs longer than ``timeout`` seconds. It is killed.
        """
        with ThreadPoolExecutor(2) as pool, self.stdout, self.stderr:
            outputs = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except BaseException:
                self.kill()
                raise
            return outputs[0].result(), outputs[1].result()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, unless the command has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the command, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class Server:
    """A process that has imported DDLF.

    Attributes:
        environment: Its environment.
        process: The process.
        connection: Takes the requests.
    """

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.connection, server_end = socket.socketpair()
        with server_end:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(server_end.fileno())],
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def end(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.wait()


def _network() -> int:
    """Return the number of the network of this thread: tests may enter another one. 0 if this is not Linux."""
    try:
        return os.stat("/proc/thread-self/ns/net").st_ino
    except OSError:
        return 0


NETWORK = _network()
"""The network of pytest, and so of the server."""

_server: Server | None = None
_lock = threading.Lock()


def suits(module: str, environment: Mapping[str, str]) -> bool:
    """Return whether a fork can run a command: it reads no variable at its start that the server has read already."""

    def read(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if name.startswith(READ_AT_START)}

    return module in MODULES and read(environment) == read(os.environ if _server is None else _server.environment)


def begin(
    module: str, *arguments: str, cwd: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None
) -> Fork:
    """Execute a module with these arguments like ``python -m``. ``suits`` must be true."""
    environment = os.environ if env is None else env
    assert suits(module, environment)
    with _lock:
        return Fork(_running().connection, module, arguments, os.fspath(cwd or os.getcwd()), environment)


def fork_exec(
    words: Sequence[bytes],
    executables: Sequence[bytes],
    close_fds: bool,
    kept_files: Sequence[int],
    cwd: str | None,
    environment: Sequence[bytes] | None,
    *rest: Any,
) -> int:
    """Start a process like ``subprocess._fork_exec``, which this function replaces. Return its process id.

    The process is a fork of the server if it executes one of ``STARTED_BY_PROGRAMS``, and if that makes no difference.
    """
    stdin, _, _, stdout, _, stderr, _, errors, _, in_new_session, *rare = rest
    python, *options = map(os.fsdecode, words)
    variables = dict(os.environ)
    if environment is not None:
        variables = dict(os.fsdecode(variable).split("=", 1) for variable in environment)
    if (
        (python, options[:1]) != (sys.executable, ["-m"])
        or options[1] not in STARTED_BY_PROGRAMS
        or not suits(options[1], variables)
        or not close_fds
        or rare[:6] != [-1, None, None, None, -1, None]  # the group, the user, and what runs before the program
        or _network() != NETWORK
    ):
        return int(new_process(words, executables, close_fds, kept_files, cwd, environment, *rest))
    standard = {number: number if fd == -1 else fd for number, fd in enumerate((stdin, stdout, stderr))}
    files = standard | {fd: fd for fd in kept_files if fd != errors}
    folder = os.fspath(cwd or os.getcwd())
    request = Request(options[1], options[2:], folder, variables, list(files), True, bool(in_new_session))
    with _lock:
        server = _running()
        ctypes.CDLL(None).prctl(ADOPT, 1)
        try:
            with _send(server.connection, request, list(files.values())) as status:
                pid: int = NUMBER.unpack(_received(status, NUMBER.size))[0]
                status.recv(1)  # its end: the process is a child of this one now
        finally:
            ctypes.CDLL(None).prctl(ADOPT, 0)
    return pid


def _running() -> Server:
    """Return the server. Start it if there is none. ``_lock`` must be held."""
    global _server
    if _server is None or _server.process.poll() is not None:  # a test may have killed it
        end()
        _server = Server()
    return _server


def _send(server: socket.socket, request: Request, files: Sequence[int]) -> socket.socket:
    """Send a request with its files to the server. Return the socket for the numbers that it answers."""
    data = json.dumps(asdict(request)).encode()
    status, servers_end = socket.socketpair()
    with servers_end:
        socket.send_fds(server, [NUMBER.pack(len(data))], [servers_end.fileno(), *files])
    server.sendall(data)
    return status


def pid() -> int | None:
    """Return the process id of the server; None if there is none."""
    return None if _server is None else _server.process.pid


def end() -> None:
    """End the server, if there is one."""
    global _server
    if _server is not None:
        _server.end()
        _server = None


def _received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the other process has ended")
        data += part
    return data


def _serve(connection: socket.socket) -> Request | None:
    """Fork for each request until the connection ends, and report the ends of forks. In a fork, return the request."""
    running: dict[int, int] = {}  # by process id: where its numbers go
    woken, wakes = os.pipe()  # has a byte when a fork has ended
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    while True:
        ready = select.select([connection, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1024)
            for number, status in list(running.items()):
                ended, code = os.waitpid(number, os.WNOHANG)
                if ended:
                    with contextlib.suppress(BrokenPipeError):
                        os.write(status, NUMBER.pack(os.waitstatus_to_exitcode(code)))
                    os.close(running.pop(number))
        if connection not in ready:
            continue
        size, descriptors, *_ = socket.recv_fds(connection, NUMBER.size, MAX_FILES)
        if not size:
            return None
        status, *files = descriptors
        request = Request(**json.loads(_received(connection, *NUMBER.unpack(size))))
        ready_end, is_ready = os.pipe()  # has an end when a child of pytest may begin
        child = os.fork()
        if child == 0 and request.is_child:
            child = os.fork()
            if child:
                os.write(status, NUMBER.pack(child))
                os._exit(0)  # so the new process becomes a child of pytest
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            os.close(is_ready)
            os.read(ready_end, 1)
            for descriptor in (ready_end, status, woken, wakes, *running.values()):
                os.close(descriptor)
            _give(files, request.files)
            return request
        if request.is_child:
            os.waitpid(child, 0)
            os.close(status)
        else:
            os.write(status, NUMBER.pack(child))
            running[child] = status
        for descriptor in (ready_end, is_ready, *files):
            os.close(descriptor)


def _give(files: list[int], numbers: list[int]) -> None:
    """Let files of this process have these numbers, and no others."""
    above = max(*files, *numbers) + 1
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _import_all() -> None:
    main = importlib.import_module("ddlf.cli.main")
    for _, _, home, _ in main.CORE:
        importlib.import_module(home.partition(":")[0])
    for name in (
        "ddlf.cli.run",
        "ddlf.cli.worker",
        "ddlf.cluster.launch.local",
        "ddlf.training.start",
        "numpy",
        "ddlf.worker.daemon",
        "ddlf.worker.executor",
        "ddlf.worker.template",
    ):
        importlib.import_module(name)
    for name in MODULES:
        del sys.modules[name]  # each fork executes one of them
    gc.collect()
    gc.freeze()


def _main() -> None:
    _import_all()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        request = _serve(connection)
    if request is not None:
        if request.in_new_session:
            os.setsid()
        sys.argv[1:] = request.arguments
        os.chdir(request.cwd)
        os.environ.clear()
        os.environ.update(request.environment)
        sys.path[0] = os.getcwd()
        tempfile.tempdir = None
        random.seed()  # as unpredictable as in a new process
        sys.modules["numpy"].random.seed()
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
