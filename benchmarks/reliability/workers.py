"""Start ``ddlf-worker`` processes, also inside a network namespace, and ask how much of one is left."""

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

import psutil

from benchmarks.reliability.link import inside
from ddlf.tokens import new_token


class Workers:
    """Worker processes with a token of their own. Use as a context manager.

    Attributes:
        token_file: The token.
        token: The same, as ``ProxyWorker`` takes it.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ddlf-reliability-"))
        self.token_file = self._folder / "token"
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
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(
        self, *, host: str = "127.0.0.1", port: int = 0, namespace: str = ""
    ) -> tuple[subprocess.Popen[bytes], int]:
        """Start one; returns it and its port when it is ready."""
        read_fd, write_fd = os.pipe()
        with inside(namespace) if namespace else contextlib.nullcontext(), open(self._folder / "log", "ab") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ddlf.cli.worker", "--host", host, "--port", str(port)),
                    *(
                        "--token-file",
                        str(self.token_file),
                        "--state-dir",
                        str(self._folder / f"state-{len(self._started)}"),
                    ),
                    *("--ready-fd", str(write_fd)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
                start_new_session=True,
            )
        os.close(write_fd)
        with open(read_fd) as pipe:
            line = pipe.readline()
        if not line:
            raise RuntimeError(f"a worker did not start:\n{(self._folder / 'log').read_text()}")
        self._started.append(process)
        return process, json.loads(line)["port"]


def stop(pid: int) -> None:
    """Freeze a process and all below it, as a machine that swaps or a laptop that is shut does."""
    for process in _family(pid):
        process.suspend()


def go_on(pid: int) -> None:
    """End ``stop``."""
    for process in _family(pid):
        process.resume()


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
