"""What tests ask the operating system about processes and ports."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from typing import Any

import psutil

from tests.patience import PATIENCE_S


def end_of(pid: int, timeout_s: float = PATIENCE_S) -> None:
    """Wait until a process is gone.

    Raises:
        psutil.TimeoutExpired: It is still there.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout_s)


def is_listening(port: int) -> bool:
    """Whether somebody listens on a port of loopback."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def command(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ...`` to its end, with the text of both outputs."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        **options,
    )


def without_waits(output: str) -> str:
    """What a command of ``ddlf`` printed, but for the lines about what takes long, which a busy machine makes it print."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("waiting "))


def python(code: str) -> str:
    """What a new Python process prints that runs this code."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
