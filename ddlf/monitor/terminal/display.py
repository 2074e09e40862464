"""What shows a run to people: told its events, it keeps their state. This one shows nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from ddlf import events as e
from ddlf.events.record import RoundRecord, put
from ddlf.monitor.state import Phase, State


class Display:
    """Nothing is shown.

    Attributes:
        state: What is known of the run.
        prints: Whether lines are printed.
    """

    prints = False

    def __init__(self) -> None:
        self.state = State()

    def tell(self, event: e.Event) -> None:
        """Take an event in."""
        self.state.tell(event, time.monotonic())

    def say(self, text: str) -> None:
        """Print a line, if lines are printed."""
        if self.prints:
            put(text)

    def is_due(self, record: RoundRecord) -> bool:
        """Whether a record gets a line now."""
        return True

    def note(self, text: str) -> None:
        """Say something on standard error, from a signal handler, too, which may have interrupted a print."""
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), f"\n{text}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Show nothing more. Safe to call again."""

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Meanwhile the master does something that no event tells of.

        Args:
            what: What it does, as ``"importing app.py"``.
        """
        self.state.phases[0] = Phase(what, 0, time.monotonic())
        try:
            yield
        finally:
            self.state.phases.pop(0, None)
