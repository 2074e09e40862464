"""Limits the time and memory of the user's methods during ``ddlf advise``. A thread ends the process when a method exceeds them."""

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
"""Minimum free share of the memory. With less, the machine would swap instead of working."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Doing:
    """A method of the user's app that is running now.

    Attributes:
        label: The name of the method.
        since: The time when it started, on ``time.monotonic``.
        thread: The thread that runs it.
        free: The free bytes of memory when it started; None if unknown.
    """

    label: str
    since: float
    thread: int
    free: int | None


_now: Doing | None = None


@contextlib.contextmanager
def doing(label: str) -> Iterator[None]:
    """Record, within this context, that a method of the user is running, so that its time and memory can be limited."""
    global _now
    _now = Doing(label, time.monotonic(), threading.get_ident(), machine.memory()[1])
    try:
        yield
    finally:
        _now = None


def limit_error(
    seconds: float, clock: float | None = None, memory: tuple[int | None, int | None] | None = None
) -> AppError | None:
    """Return an error about the user's running method if it exceeds its limits; else None.

    Args:
        seconds: Maximum seconds of a method.
        clock: The time to compare with; None for the current time.
        memory: The total and free bytes of memory; None to ask this machine.
    """
    if (now := _now) is None:
        return None
    total, free = machine.memory() if memory is None else memory
    took = (time.monotonic() if clock is None else clock) - now.since
    at = _line(now.thread)
    if took > seconds:
        return AppError(
            f"{now.label} has not ended within {seconds:g} s{at}",
            hint="reduce its work, or give it more time: --limit SECONDS",
        )
    if total is not None and free is not None and free < LEAST_FREE * total:
        grown = f"{((now.free or free) - free) / 1e9:,.1f} GB less than before" if now.free else "nearly nothing"
        return AppError(
            f"{now.label} takes all memory: {free / 1e9:,.1f} of {total / 1e9:,.1f} GB are free, {grown}{at}",
            hint="take fewer samples, smaller layers, or a machine with more memory",
        )
    return None


@contextlib.contextmanager
def time_limit(seconds: float, end: Callable[[AppError], None]) -> Iterator[None]:
    """Watch, within this context, the time and memory of the user's methods.

    Args:
        seconds: Maximum seconds of a method.
        end: Called on a watching thread with the error, when a method exceeds a limit. It ends the process.
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            if (error := limit_error(seconds)) is not None:
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
    """Return the file and line of the user's code that a thread is running now."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        file = frame.f_code.co_filename
        if not tracebacks.is_machinery(file) and not tracebacks.LIBRARIES.search(file) and os.path.isfile(file):
            return f", at {os.path.relpath(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
