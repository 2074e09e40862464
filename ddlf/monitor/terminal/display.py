"""The base of all displays: it updates the state of the run with each event, and shows nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from ddlf import events as e
from ddlf.events.record import RoundRecord, print_at_once
from ddlf.monitor.state import RunningPhase, State


class Display:
    """The base class of displays of a run. It shows nothing itself.

    Attributes:
        state: The state of the run.
        prints: Whether lines are printed.
    """

    prints = False

    def __init__(self) -> None:
        self.state = State()

    def tell(self, event: e.Event) -> None:
        """Update the state of the run by an event. Subclasses also show the change."""
        self.state.tell(event, time.monotonic())

    def say(self, text: str) -> None:
        """Print a line, if lines are printed."""
        if self.prints:
            print_at_once(text)

    def is_due(self, record: RoundRecord) -> bool:
        """Return whether to print a line for the record of a round now."""
        return True

    def note(self, text: str) -> None:
        """Write a line to standard error. Safe in a signal handler, which may have interrupted a print."""
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), f"\n{text}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the display: show nothing any more. Safe to call again."""

    @contextlib.contextmanager
    def busy(self, activity: str) -> Iterator[None]:
        """Show that the master is busy with something that has no events.

        Args:
            activity: A phrase such as ``"importing app.py"``.
        """
        self.state.phases[0] = RunningPhase(activity, 0, time.monotonic())
        try:
            yield
        finally:
            self.state.phases.pop(0, None)
