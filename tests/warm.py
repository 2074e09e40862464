"""Runs commands of DDLF in forks of one process that has imported DDLF: the imports take longer than most commands.

Each process of pytest starts at most one such server, with its first command. The server ends with its process of pytest.
A fork has the environment, the folder and the outputs of its command, and executes the module as ``python -m`` does.
Commands that need a new interpreter get one; see ``suits``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MODULES = ("ddlf.cli.main", "ddlf.cli.worker")
"""The modules that a fork can execute."""
READ_AT_START = ("PYTHON", "LD_", "DDLF_TOKEN")
"""Beginnings of the names of variables that a process reads, or overwrites, in the environment of its start."""
NUMBER = struct.Struct("!i")


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
        request = json.dumps([module, list(arguments), cwd, dict(env)]).encode()
        (out, write_out), (err, write_err), (self._status, status) = os.pipe(), os.pipe(), socket.socketpair()
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        with status:
            socket.send_fds(server, [NUMBER.pack(len(request))], [write_out, write_err, status.fileno()])
        server.sendall(request)
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
    global _server
    environment = os.environ if env is None else env
    assert suits(module, environment)
    with _lock:
        if _server is None or _server.process.poll() is not None:  # a test may have killed it
            end()
            _server = Server()
        return Fork(_server.connection, module, arguments, os.fspath(cwd or os.getcwd()), environment)


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


def _serve(connection: socket.socket) -> Any:
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
        size, descriptors, *_ = socket.recv_fds(connection, NUMBER.size, 3)
        if not size:
            return None
        out, err, status = descriptors
        request = json.loads(_received(connection, *NUMBER.unpack(size)))
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            os.dup2(out, 1)
            os.dup2(err, 2)
            for descriptor in (out, err, status, woken, wakes, *running.values()):
                os.close(descriptor)
            return request
        os.write(status, NUMBER.pack(child))
        running[child] = status
        os.close(out)
        os.close(err)


def _import_all() -> None:
    main = importlib.import_module("ddlf.cli.main")
    for _, _, home, _ in main.CORE:
        importlib.import_module(home.partition(":")[0])
    for name in ("ddlf.cli.run", "ddlf.cli.worker", "ddlf.cluster.launch.local", "ddlf.training.start", "numpy"):
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
        module, sys.argv[1:], cwd, environment = request
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[0] = os.getcwd()
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
