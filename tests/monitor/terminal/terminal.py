"""Run programs in a pseudo-terminal, and read its screen as text."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable

import pyte

from tests.patience import PATIENCE_S


class Program:
    """A Python program in a pseudo-terminal.

    Args:
        arguments: The arguments of the interpreter.
        columns: The columns of the terminal.
        rows: The rows of the terminal.
        echo: Whether the terminal shows typed characters.
        environment: Variables that are added or changed.

    Attributes:
        written: All bytes so far.
    """

    def __init__(
        self, *arguments: str, columns: int = 80, rows: int = 24, echo: bool = False, **environment: str
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self.code: int | None = None
        own_names = ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
        inherited = {name: value for name, value in os.environ.items() if name not in own_names}
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(
                sys.executable, [sys.executable, *arguments], {**inherited, "TERM": "xterm-256color", **environment}
            )
        modes = termios.tcgetattr(self._fd)
        modes[3] = modes[3] | termios.ECHO if echo else modes[3] & ~termios.ECHO
        termios.tcsetattr(self._fd, termios.TCSANOW, modes)
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the terminal."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    @property
    def lines(self) -> list[str]:
        """The lines on the screen, without empty lines at the end."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def until(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Read until ``condition`` holds for the screen or the program has ended. Return the screen."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.lines) and self.code is None:
            assert time.monotonic() < deadline, self.lines
            self._read()
        return self.lines

    def end(self) -> list[str]:
        """Read until the program has ended, and set ``code`` to its exit code. Return the screen."""
        self.until(lambda lines: False)
        return self.lines

    def press(self, keys: str) -> None:
        """Type characters; ``"\\x03"`` is Ctrl-C."""
        os.write(self._fd, keys.encode())

    def close(self) -> None:
        """Kill the program if it still runs."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def _read(self) -> None:
        if select.select([self._fd], [], [], 0.1)[0]:
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # no process has the terminal open any more
                data = b""
            self.written += data
            self._stream.feed(data)
            if not data:
                self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
