"""Start ``ddlf-worker`` processes, also inside a network namespace, and find what remains of a worker after its end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from ddlf.rpc.tokens import new_token
from tests.trials.machines import inside


class Workers:
    """Worker processes that share a new token. Use as a context manager.

    Attributes:
        folder: A folder for temporary files, which is removed at the end.
        token_file: The file with the token.
        token: The token as bytes, for ``ProxyWorker``.
        log: The file with the output of all workers.
        template: A template that all workers share. With None, each worker starts its own template.
    """

    template: Any = None

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ddlf-trial-"))
        self.log = self.folder / "log"
        self.token_file = self.folder / "token"
        self.token_file.write_text(f"{new_token()}\n")
        self.token_file.chmod(0o600)
        self.token = self.token_file.read_text().strip().encode()
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._started:
            if process.poll() is None:
                for number in (signal.SIGCONT, signal.SIGKILL):
                    process.send_signal(number)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self,
        *options: Any,
        host: str = "127.0.0.1",
        port: int = 0,
        namespace: str = "",
        environment: dict[str, str] | None = None,
    ) -> tuple[subprocess.Popen[bytes], int]:
        """Start a worker, wait until it is ready, and return its process and its port.

        Args:
            options: More options of ``ddlf-worker``.
            host: The address to listen at; empty for the default.
            namespace: The network namespace of the worker; empty for the current one.
            environment: The environment of another user, whose own token replaces the token of these workers.
        """
        state_dir = self.folder / f"state-{len(self._started)}"
        address = ["--host", host] if host else []
        token = ["--token-file", self.token_file] if environment is None else []
        suits = self.template is not None and environment is None and self.template.suits()
        shared = [self.template.fileno()] if suits else []
        read_fd, write_fd = os.pipe()
        with inside(namespace) if namespace else contextlib.nullcontext(), self.log.open("ab") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ddlf.cli.worker", "--port", str(port), *address, *token),
                    *("--state-dir", state_dir, "--ready-fd", str(write_fd), *map(str, options)),
                    *(f"--template-fd={fd}" for fd in shared),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd, *shared),
                env=environment,
                start_new_session=True,
            )
        os.close(write_fd)
        self._started.append(process)
        with open(read_fd) as pipe:
            line = pipe.readline()
        if not line:
            raise RuntimeError(f"a worker did not start:\n{self.log.read_text()}")
        return process, json.loads(line)["port"]


def stop(pid: int) -> None:
    """Freeze a process and its descendants, like a machine that swaps or a closed laptop."""
    for process in _family(pid):
        process.suspend()


def resume(pid: int) -> None:
    """Resume the processes that ``stop`` has frozen."""
    for process in _family(pid):
        process.resume()


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
