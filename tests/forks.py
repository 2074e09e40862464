"""Start commands as forks of one process that has imported Keras: the import takes seconds in each new process.

A fork is a process like any other: signals, files, output and exit code are its own. ``tests/peers/test_processes.py`` also
starts commands as a user does.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddlf.worker import template

ROOT = Path(__file__).parents[1]
BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")


class Fork:
    """A command in a fork. It has the part of ``subprocess.Popen`` that tests use.

    Args:
        words: ``ddlf`` or a Python file, and its arguments.
        cwd: The current folder of the command.
        environment: The environment of the command, with the backend of Keras that the tests have.
        descriptors: Files for the command, at most four. Their numbers in the fork are its last arguments.

    Attributes:
        stdout: The standard output and the standard error of the command, as one text file.
        pid: Its process id.
    """

    def __init__(
        self, words: Sequence[str], cwd: Path, environment: Mapping[str, str], descriptors: Sequence[int] = ()
    ) -> None:
        assert environment.get("KERAS_BACKEND", BACKEND) == BACKEND, "the forks have imported another backend"
        request = {"words": list(words), "cwd": str(cwd), "environment": dict(environment)}
        self._reply, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_end, write_end = os.pipe()
        self.stdout = os.fdopen(read_end)
        with other:
            socket.send_fds(_server(), [json.dumps(request).encode()], [other.fileno(), write_end, *descriptors])
        os.close(write_end)
        self.pid: int = self._next()["pid"]
        self._code: int | None = None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self._code is None:  # until then, the system does not use the process id again
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the command, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end, and return the exit code: negative for a signal.

        Raises:
            TimeoutError: The command still runs after ``timeout_s`` seconds.
        """
        if self._code is None:
            self._reply.settimeout(timeout_s)
            self._code = int(self._next()["code"])
            self._reply.close()
        return self._code

    def _next(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self._reply.recv(template.MESSAGE_BYTES))
        return facts


@functools.cache
def _server() -> socket.socket:
    """Start the process that imports Keras, at the first use, and return the socket for requests."""
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        words = [sys.executable, "-m", "tests.forks", str(other.fileno())]
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, "KERAS_BACKEND": BACKEND},
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


class Server(template.Template):
    """Serves the forks. A request has a socket for the answers, the output of the command, and its other files."""

    def _handle(self, message: bytes, descriptors: list[int]) -> template.MainFunction | None:
        request = json.loads(message)
        is_fork = self._fork(request, descriptors) is not None
        return (lambda: become(request, descriptors)) if is_fork else None


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Run a command in a fork, like a new process."""
    os.setsid()
    for target in (1, 2):
        os.dup2(descriptors[1], target)
    os.close(descriptors[1])
    with socket.socket(fileno=descriptors[0]) as client:
        template.tell(client, {"pid": os.getpid()})
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    tempfile.tempdir = None
    sys.argv = [*request["words"], *map(str, descriptors[2:])]
    if sys.argv[0] == "ddlf":
        from ddlf.cli.main import main

        main(sys.argv[1:])
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def serve(requests: socket.socket) -> None:
    """Import what most commands need, and serve forks until the client has closed its socket."""
    os.environ.setdefault(*template.NO_THREAD)
    import keras  # noqa: F401

    from ddlf.cli import main, peers, run  # noqa: F401
    from ddlf.extras.text.conversion import operator  # noqa: F401
    from ddlf.peers import joining, serving  # noqa: F401
    from ddlf.training.slot import replica  # noqa: F401

    if reason := template.fork_danger():
        raise AssertionError(f"forks of this process would not be safe: {reason}")
    template.freeze()
    function: template.MainFunction | None = Server(requests, []).serve
    while function is not None:
        function = function()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
