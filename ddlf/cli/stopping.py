"""Handle Ctrl-C and SIGTERM while a command runs, even if something blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from ddlf.monitor.terminal.display import Display
from ddlf.training.roles import is_importing


def interruptible(find: Callable[[], Any]) -> Any:
    """Call a function that imports the user's file, and raise ``KeyboardInterrupt`` if SIGINT came meanwhile.

    An import can lose a SIGINT: a callback swallows it, or native code turns it into an ImportError.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return find()
    came = False

    def interrupt(*_: Any) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        return find()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt


@contextlib.contextmanager
def swallowed_quietly() -> Iterator[None]:
    """Do not print the traceback of an interrupt that came while Python called a finalizer or a callback, where it cannot be raised."""
    usual = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            usual(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


BLOCKED_S = 2.0
"""Seconds that code may block the event loop after Ctrl-C. Shorter than a person waits before pressing again."""


class StopRequest:
    """How a run is asked to end.

    Attributes:
        gently: Asks what goes on to end by itself soon; returns whether anything will. Called by a signal handler.
        words: What to say then, without a full stop.
        say: Says it. Called by a signal handler, which may have interrupted a print.
        tell: Tells others that it will end. Called likewise.
        asked: Whether that was done.
        terminated: Whether SIGTERM came: the sender counts on a quick end, and sends SIGKILL some seconds later.
    """

    def __init__(self) -> None:
        self.gently: Callable[[], bool] = lambda: False
        self.words = ""
        self.say = Display().note
        self.tell: Callable[[], None] = lambda: None
        self.asked = False
        self.terminated = False

    def interrupted(self) -> bool:
        """Handle Ctrl-C; returns whether that was all that is to be done about it."""
        if self.asked or not self.gently():
            return False
        self.asked = True
        self.say(f"stopping  {self.words}")
        self.tell()
        return True


@contextlib.contextmanager
def ending_what_blocks(stop: StopRequest) -> Iterator[None]:
    """Let SIGINT also end code that holds up the event loop: an import, a download, a computation on the master.

    asyncio only cancels its task, which such code does not notice. When the loop does not run soon, the signal is sent again, as a person would,
    until it does: each raises ``KeyboardInterrupt``, which an import may swallow.
    """
    loop = asyncio.get_running_loop()
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual) or usual is signal.default_int_handler:
        yield
        return
    noticed = threading.Event()
    insisting = threading.Thread(target=_insist, args=(noticed,), daemon=True)

    def interrupt(number: int, frame: Any) -> None:
        if stop.interrupted():
            return
        if not insisting.ident:
            loop.call_soon_threadsafe(noticed.set)
            insisting.start()
        usual(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        noticed.set()
        signal.signal(signal.SIGINT, usual)


def _insist(noticed: threading.Event) -> None:
    main = threading.main_thread().ident
    assert main is not None
    while not noticed.wait(BLOCKED_S):
        signal.pthread_kill(main, signal.SIGINT)


def run_until_signal(make: Callable[[StopRequest], Coroutine[Any, Any, int]]) -> int:
    """``asyncio.run``, which ends tidily on SIGTERM too, and on SIGINT also when the event loop is held up. A second SIGTERM ends it at once.

    Args:
        make: Returns what is run, and may say there how it is asked to end.
    """

    async def supervised() -> int:
        task = asyncio.current_task()
        assert task is not None
        stop = StopRequest()

        def terminate(number: int, frame: Any) -> None:
            # From now on SIGTERM ends the process at once: also where something holds up the event loop, or saving takes too long.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            stop.asked = stop.terminated = True
            loop.call_soon_threadsafe(task.cancel)

        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGTERM, terminate)
        try:
            with ending_what_blocks(stop):
                return await make(stop)
        except asyncio.CancelledError:
            if stop.terminated:
                print("\nstopped   by SIGTERM", file=sys.stderr)
                return 143
            raise

    return asyncio.run(supervised())


def leave_an_import(code: int) -> None:
    """End the process now if a thread still imports Keras: nothing can end that, it takes seconds, and all else is closed.

    Args:
        code: Exit code.
    """
    if is_importing():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
