"""Ctrl-C and SIGTERM for a server of peers and for a peer: the first one ends the work cleanly, the second one at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STDOUT = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """The wish of the user that the work ends.

    Args:
        words: The sentence to print then, without a full stop.
        say: Prints it.

    Attributes:
        gently: Asks the present work to end soon. Called by a signal handler.
        signal: The signal that has come; 0 before.
    """

    def __init__(self, words: str, say: Callable[[str], None]) -> None:
        self.gently: Callable[[], None] | None = None
        self.signal = 0
        self._words = words
        self._say = say

    @property
    def exit_code(self) -> int:
        """Exit code of a process that a signal has ended; 0 before."""
        return 128 + self.signal if self.signal else 0

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM in this ``with`` block. Before there is work to end, a signal ends the process."""

        def on_signal(number: int, _: Any) -> None:
            for signal_number in SIGNALS:
                signal.signal(signal_number, signal.SIG_DFL)
            if self.gently is None:
                os.kill(os.getpid(), number)
                return
            self.signal = number
            line = f"stopping  {self._words}; again ends at once"
            try:
                self._say(line)
            except RuntimeError:  # the signal has come in the middle of another line
                os.write(STDOUT, f"{line}\n".encode())
            self.gently()

        former_handlers = {number: signal.signal(number, on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in former_handlers.items():
                signal.signal(number, handler)
