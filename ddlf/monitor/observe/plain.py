"""Lines about a run, for files, pipes and terminals that cannot draw: few enough to be read, and one whenever nothing is said for long."""

from __future__ import annotations

import contextlib
import threading
import time

from ddlf import events as e
from ddlf.events.record import RoundRecord, put
from ddlf.monitor.observe.display import Display
from ddlf.monitor.observe.lines import line
from ddlf.monitor.observe.phrases import waiting

APART_S = 2.0
"""Between two lines about what a worker, or all of them together, have come to."""
QUIET_S = 5.0
"""After which a line says what takes so long; the next one after twice as long, and so on."""
LONGEST_QUIET_S = 60.0
LOOK_S = 0.5


class Lines(Display):
    """A run in lines. They are printed where they are made; this one says which records get one, and adds what takes long."""

    prints = True

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[int | None, float] = {}  # slot, or None for all: time of its last line
        self._held: RoundRecord | None = None
        self._said = time.monotonic()
        self._quiet_s = QUIET_S
        self._done = threading.Event()
        # A thread, for the event loop is held up just when something takes long.
        self._thread = threading.Thread(target=self._watch, name="ddlf lines", daemon=True)
        self._thread.start()

    def tell(self, event: e.Event) -> None:
        """Take an event in; at the end of a run, print the last record if it was held back, before what is said of all."""
        super().tell(event)
        if isinstance(event, e.RunEnded | e.Converged) and self._held is not None:
            put(str(self._held))
            self._held = None
        if isinstance(event, e.RunBegan) or (line(event) and not isinstance(event, e.Committed)):
            self._has_said()

    def is_due(self, record: RoundRecord) -> bool:
        """Whether a record gets a line now. The first does, and the last at the end of the run."""
        now = time.monotonic()
        if now - self._told.get(record.slot, -APART_S) < APART_S:
            self._held = record
            return False
        self._told[record.slot], self._held = now, None
        self._has_said()
        return True

    def close(self) -> None:
        """Say nothing more. Safe to call again."""
        self._done.set()
        self._thread.join()

    def _has_said(self) -> None:
        self._said, self._quiet_s = time.monotonic(), QUIET_S

    def _watch(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # who trains hears of that when it prints
            while not self._done.wait(LOOK_S):
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Say what takes so long, if nothing was said for long."""
        if now - self._said >= self._quiet_s and (text := waiting(self.state, now)):
            put(f"{'training' if self.state.is_training else 'waiting':<9} {text}")
            self._said, self._quiet_s = now, min(2 * self._quiet_s, LONGEST_QUIET_S)
