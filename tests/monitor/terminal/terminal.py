"""Programs in a terminal of their own, whose screen can be read as text."""

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
        arguments: Of the interpreter.
        columns: Of the terminal.
        rows: Of it.
        echo: Whether it shows what is typed.
        environment: More or other variables.

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
        ours = ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, *arguments], {**kept, "TERM": "xterm-256color", **environment})
        modes = termios.tcgetattr(self._fd)
        modes[3] = modes[3] | termios.ECHO if echo else modes[3] & ~termios.ECHO
        termios.tcsetattr(self._fd, termios.TCSANOW, modes)
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        """Make the terminal another size."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    @property
    def lines(self) -> list[str]:
        """What is on the screen, without empty lines at its end."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def until(self, seen: Callable[[list[str]], bool]) -> list[str]:
        """Read until something is on the screen, or the program has ended; returns the screen."""
        deadline = time.monotonic() + PATIENCE_S
        while not seen(self.lines) and self.code is None:
            assert time.monotonic() < deadline, self.lines
            self._read()
        return self.lines

    def end(self) -> list[str]:
        """Read until the program has ended, whose exit code is ``code`` then; returns the screen."""
        self.until(lambda lines: False)
        return self.lines

    def press(self, keys: str) -> None:
        """Type something; ``"\\x03"`` is Ctrl-C."""
        os.write(self._fd, keys.encode())

    def close(self) -> None:
        """End it at once if it still runs."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def _read(self) -> None:
        if select.select([self._fd], [], [], 0.1)[0]:
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # nobody has it open any more
                data = b""
            self.written += data
            self._stream.feed(data)
            if not data:
                self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
