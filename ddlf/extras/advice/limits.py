"""How long the user's methods may take when advice is asked for, and with how much memory: a thread ends the process of one that goes beyond."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ddlf.errors import AppError, tracebacks
from ddlf.worker import machine

LEAST_FREE = 0.02
"""Share of all memory, below which the machine would soon do nothing but swap."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Doing:
    """What runs of the user's.

    Attributes:
        what: Its name.
        since: When it began, as ``time.monotonic`` has it.
        thread: Where it runs.
        free: Bytes of memory that were free then; None if that is not known.
    """

    what: str
    since: float
    thread: int
    free: int | None


_now: Doing | None = None


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Note that one of the user's methods runs, as long as this is open."""
    global _now
    _now = Doing(what, time.monotonic(), threading.get_ident(), machine.memory()[1])
    try:
        yield
    finally:
        _now = None


def beyond(
    seconds: float, clock: float | None = None, memory: tuple[int | None, int | None] | None = None
) -> AppError | None:
    """What is to be said of a method of the user's that has gone beyond its limits; None if none has.

    Args:
        seconds: How long one may take.
        clock: The time, by default now.
        memory: All of it and what is free, in bytes, by default as it is.
    """
    if (now := _now) is None:
        return None
    total, free = machine.memory() if memory is None else memory
    took = (time.monotonic() if clock is None else clock) - now.since
    at = _line(now.thread)
    if took > seconds:
        return AppError(
            f"{now.what} has not come to its end in {seconds:g} s{at}",
            hint="let it do less, or give it more time: --limit SECONDS",
        )
    if total is not None and free is not None and free < LEAST_FREE * total:
        grown = f"{((now.free or free) - free) / 1e9:,.1f} GB less than before" if now.free else "nearly nothing"
        return AppError(
            f"{now.what} takes all memory: {free / 1e9:,.1f} of {total / 1e9:,.1f} GB are free, {grown}{at}",
            hint="take fewer samples, smaller layers, or a machine with more memory",
        )
    return None


@contextlib.contextmanager
def time_limit(seconds: float, end: Callable[[AppError], None]) -> Iterator[None]:
    """Look, as long as this is open, whether the user's methods stay within their limits.

    Args:
        seconds: How long one may take.
        end: Is given what is to be said of one that does not, on a thread; it ends the process.
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            if (error := beyond(seconds)) is not None:
                end(error)
                return

    thread = threading.Thread(target=look, name="limits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _line(thread: int) -> str:
    """Where in the user's code a thread is."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        file = frame.f_code.co_filename
        if not tracebacks.is_machinery(file) and not tracebacks.LIBRARIES.search(file) and os.path.isfile(file):
            return f", at {os.path.relpath(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
