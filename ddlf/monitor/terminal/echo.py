"""Prints workers' output on the master's standard error, with their names. Prints equal lines of several workers
once."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import weakref
from collections import Counter
from collections.abc import Sequence

from ddlf import events as e

WINDOW_S = 0.2
"""Seconds that lines wait for equal lines of other workers."""

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")

Line = tuple[str, str]
"""The name of a worker, and a line that it wrote."""


class Echo:
    """A sink of events that prints the lines that user code on workers has written (``WorkerWrote``).

    Attributes:
        on: Whether it prints.
    """

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self._names: set[str] = set()
        self._pending: list[Line] = []
        self._timer: asyncio.TimerHandle | None = None
        weakref.finalize(self, show, self._pending)  # also at the end of the program

    def __call__(self, event: e.Event) -> None:
        """Print an event's lines, possibly after a wait for equal lines of other workers."""
        if isinstance(event, e.WorkerConnected):
            self._names.add(event.name)
        elif isinstance(event, e.WorkerWrote) and self.on:
            self._pending += lines(event)
            if len(self._names) < 2:
                self.flush()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self.flush)
        elif isinstance(event, e.WorkerDisconnected):
            self.flush()

    def flush(self) -> None:
        """Print the lines that wait for equal lines of other workers."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        show(self._pending)


def lines(event: e.WorkerWrote) -> list[Line]:
    """Return the lines to print for an event of user code's output."""
    missing = f"({event.dropped:,} lines came too fast and were dropped)"
    return [(event.name, text) for text in ([missing] * bool(event.dropped) + list(event.lines))]


def collapsed(waiting: Sequence[Line]) -> list[str]:
    """Return the waiting lines with the names of their workers. Equal lines of several workers become one line. Each
    worker's lines keep their number and order.
    """
    times: Counter[Line] = Counter()
    writers: dict[tuple[str, int], list[str]] = {}
    for name, text in waiting:
        times[name, text] += 1
        writers.setdefault((text, times[name, text]), []).append(name)
    return [
        f"[{names[0] if len(names) == 1 else f'{len(names)} workers'}] {text}" for (text, _), names in writers.items()
    ]


def show(waiting: list[Line]) -> None:
    """Print the waiting lines and clear them."""
    shown = collapsed(waiting)
    waiting.clear()
    if shown and sys.stderr is not None:
        colours = sys.stderr.isatty()
        # the disk is full, or nobody reads the output; other sinks still get the lines
        with contextlib.suppress(OSError):
            sys.stderr.write("".join(f"{harmless(line, colours=colours)}\n" for line in shown))
            sys.stderr.flush()


def harmless(text: str, *, colours: bool) -> str:
    """Return a line of another machine without control codes: only colours may stay, others are spelled out."""
    parts = COLOUR.split(text)
    codes = [*COLOUR.findall(text), "\x1b[0m" if colours and len(parts) > 1 else ""] if colours else [""] * len(parts)
    spelled = (CONTROL.sub(lambda match: repr(match[0])[1:-1], part) for part in parts)
    return "".join(part + code for part, code in zip(spelled, codes, strict=True))
