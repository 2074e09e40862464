"""Questions to the operating system about processes and ports, and commands in new processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

import ddlf
from tests import warm
from tests.patience import PATIENCE_S


def copied_package(folder: Path) -> Path:
    """Copy DDLF's files into a folder, so that other processes can import it from there, and return the copy."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(Path(ddlf.__file__).parent, folder / "ddlf", ignore=ignored)


def end_of(pid: int, timeout_s: float = PATIENCE_S) -> None:
    """Wait until a process has ended.

    Raises:
        psutil.TimeoutExpired: The process still runs after ``timeout_s`` seconds.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout_s)


def is_listening(port: int) -> bool:
    """Return whether a process listens on a port of loopback."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def command(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python -m`` with these arguments until it ends, and return its exit code and both outputs.

    The process is a fork of one that has imported DDLF, if that makes no difference.
    """
    module, *words = map(str, arguments)
    if options.keys() <= {"cwd", "env"} and warm.suits(module, options.get("env") or os.environ):
        fork = warm.begin(module, *words, **options)
        out, err = fork.communicate(PATIENCE_S)
        return subprocess.CompletedProcess(fork.args, fork.wait(), out, err)
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        **options,
    )


def without_waits(output: str) -> str:
    """Return the output of a command of ``ddlf`` without its lines about waiting: it prints them only on a busy machine."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("waiting "))


def python(code: str) -> str:
    """Run code in a new Python process, and return its output."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
