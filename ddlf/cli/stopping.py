"""Handle Ctrl-C and SIGTERM while a command runs, even if something blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from ddlf.errors import ClusterTooSmall, ConnectError, ExecutorCrashed, WorkerLost
from ddlf.monitor.terminal.display import Display
from ddlf.training.roles import is_importing
from ddlf.worker.grace import SAME_SIGNAL_S, hand_over_s


def interruptible(find: Callable[[], Any]) -> Any:
    """Call a function that imports the user's file.

    If SIGINT arrives meanwhile, raise ``KeyboardInterrupt`` afterwards.

    An import can lose a SIGINT: a callback swallows it, or native code turns it into an ImportError.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return find()
    is_interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        return find()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_interrupted:
            raise KeyboardInterrupt


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is an interrupt, or an error that Python has made of one: 3.11 raises a ``RuntimeError`` for
    it in ``__set_name__``, thus in the body of a class.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            return True
        cause = cause.__cause__
    return False


@contextlib.contextmanager
def swallowed_quietly() -> Iterator[None]:
    """Hide the traceback of an interrupt in a finalizer or a callback, where Python cannot raise it."""
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
    """Passes the user's wish that a run ends, by Ctrl-C or SIGTERM, to the run.

    Attributes:
        gently: Asks the present work to end soon, and returns whether any work will. Called by a signal handler.
        words: The sentence to print then, without a full stop.
        say: Prints the sentence. Called by a signal handler, which may have interrupted a print.
        tell: Notifies others that the run will end. Called by a signal handler, too.
        is_requested: Whether the run was asked to end.
        terminated: Whether SIGTERM came: the sender counts on a quick end, and sends SIGKILL some seconds later.
        is_complete: Whether the work is complete, so that another start of the command is not needed.
        requeue: Has an engine run the command again. Called at the end of work that SIGTERM has ended early.
    """

    def __init__(self) -> None:
        self.gently: Callable[[], bool] = lambda: False
        self.words = ""
        self.say = Display().note
        self.tell: Callable[[], None] = lambda: None
        self.is_requested = False
        self.terminated = False
        self.is_complete = False
        self.requeue: Callable[[], None] = lambda: None

    def interrupted(self) -> bool:
        """Handle Ctrl-C: ask the work to end soon. Return whether it will, so that nothing more has to be done."""
        if self.is_requested or not self.gently():
            return False
        self.is_requested = True
        self.say(f"stopping  {self.words}")
        self.tell()
        return True


@contextlib.contextmanager
def interrupting_blocked_code(stop: StopRequest) -> Iterator[None]:
    """Let SIGINT also end code that blocks the event loop: an import, a download, a computation on the master.

    asyncio only cancels its task, and such code does not notice that. If the loop does not run soon, the signal is sent
    again until it does. Each signal raises ``KeyboardInterrupt``, which an import may swallow.
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
    """Run a coroutine like ``asyncio.run``, with a clean end on SIGTERM and SIGINT, even if the event loop is blocked.

    After SIGTERM a training run ends with its round, if that takes less than ``hand_over_s``. Otherwise it ends with the last
    complete round. A second SIGTERM ends the process at once.

    Args:
        make: Returns the coroutine. It gets the ``StopRequest``, and may set its attributes.
    """

    async def supervised() -> int:
        task = asyncio.current_task()
        assert task is not None
        stop, grace, signalled_at = StopRequest(), hand_over_s(), 0.0

        def terminate(number: int, frame: Any) -> None:
            nonlocal signalled_at
            if stop.terminated and time.monotonic() - signalled_at < SAME_SIGNAL_S:
                return
            # From now on SIGTERM ends the process at once, even if the event loop is blocked or saving takes too long.
            if stop.terminated:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            signalled_at, stop.terminated = time.monotonic(), True
            grace_s = grace if not stop.is_requested and stop.gently() else 0.0
            stop.is_requested = True
            if grace_s:
                stop.say(f"stopping  by SIGTERM: after this round, or in {grace_s:g} s with the last complete one")
                stop.tell()
            loop.call_soon_threadsafe(lambda: loop.call_later(grace_s, task.cancel))

        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGTERM, terminate)
        try:
            with interrupting_blocked_code(stop):
                code = await make(stop)
        except asyncio.CancelledError:
            if not stop.terminated:
                raise
            code = 0
        except (ClusterTooSmall, ConnectError, ExecutorCrashed, WorkerLost) as error:
            if not stop.terminated:
                raise
            print(f"\n{error.message}", file=sys.stderr)  # the workers have got the notice, too
            code = 0
        finally:
            if not stop.terminated:  # the work has ended, so the signal needs no care
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if stop.terminated and stop.is_complete:
            return 0
        if stop.terminated and code in (0, 130):
            print("\nstopped   by SIGTERM", file=sys.stderr)
            stop.requeue()
            return 143
        return code

    return asyncio.run(supervised())


def leave_an_import(code: int) -> None:
    """End the process now if a thread still imports Keras. The import takes seconds and cannot be ended.

    Args:
        code: Exit code.
    """
    if is_importing():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
