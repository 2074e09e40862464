"""What workers write, on the master's standard error, with the worker's name. Lines that several workers write come once."""

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
"""For how long lines are held back, so that equal ones of others can come."""

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")

Line = tuple[str, str]
"""Name of a worker, and what it wrote."""


class Echo:
    """A sink that prints ``WorkerWrote``.

    Attributes:
        on: Whether it does.
    """

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self._names: set[str] = set()
        self._held: list[Line] = []
        self._timer: asyncio.TimerHandle | None = None
        weakref.finalize(self, show, self._held)  # also at the end of the program

    def __call__(self, event: e.Event) -> None:
        """Take an event."""
        if isinstance(event, e.WorkerConnected):
            self._names.add(event.name)
        elif isinstance(event, e.WorkerWrote) and self.on:
            self._held += lines(event)
            if len(self._names) < 2:
                self.flush()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self.flush)
        elif isinstance(event, e.WorkerDisconnected):
            self.flush()

    def flush(self) -> None:
        """Print what is held back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        show(self._held)


def lines(event: e.WorkerWrote) -> list[Line]:
    """What there is to print of it."""
    missing = f"({event.dropped:,} lines are missing, which came too fast)"
    return [(event.name, text) for text in ([missing] * bool(event.dropped) + list(event.lines))]


def collapsed(held: Sequence[Line]) -> list[str]:
    """Lines with names: one for each, but one for equal lines of several workers. Those of one worker stay as many as they were, in their order."""
    times: Counter[Line] = Counter()
    writers: dict[tuple[str, int], list[str]] = {}
    for name, text in held:
        times[name, text] += 1
        writers.setdefault((text, times[name, text]), []).append(name)
    return [
        f"[{names[0] if len(names) == 1 else f'{len(names)} workers'}] {text}" for (text, _), names in writers.items()
    ]


def show(held: list[Line]) -> None:
    """Print lines, and hold them no more."""
    shown = collapsed(held)
    held.clear()
    if shown and sys.stderr is not None:
        colours = sys.stderr.isatty()
        with contextlib.suppress(OSError):  # a full disk, or nobody reads it: they are told to other sinks all the same
            sys.stderr.write("".join(f"{harmless(line, colours=colours)}\n" for line in shown))
            sys.stderr.flush()


def harmless(text: str, *, colours: bool) -> str:
    """A line of another machine for this terminal: with its colours, if there may be any, and all that would move or ask the terminal spelled out."""
    parts = COLOUR.split(text)
    codes = [*COLOUR.findall(text), "\x1b[0m" if colours and len(parts) > 1 else ""] if colours else [""] * len(parts)
    spelled = (CONTROL.sub(lambda found: repr(found[0])[1:-1], part) for part in parts)
    return "".join(part + code for part, code in zip(spelled, codes, strict=True))
