"""Handles Ctrl-C while a command starts or ends, without a traceback. Only the commands' entry points import it.

After the import of this module, SIGINT ends the process like the system's default, with exit code 130 in a shell. There
is nothing to clean up yet, and a traceback through imports helps nobody. ``imported`` gives SIGINT back to Python,
which raises ``KeyboardInterrupt``. ``importing`` does the same around later imports of our own modules. After the
command, a first interrupt does not disturb the clean-up of libraries. A second one ends the process at once.
"""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Iterator
from typing import Any

_before = signal.getsignal(signal.SIGINT)


def _handle(handler: Any) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread: somebody uses this as a library
            signal.signal(signal.SIGINT, handler)


def _ignore_once(*_: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def imported() -> None:
    """Let SIGINT (Ctrl-C) raise ``KeyboardInterrupt`` from now on, because all imports are done."""
    if _before is signal.default_int_handler:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Let SIGINT end the process like the system's default while our own modules are imported.

    An exception is not enough: Python 3.11 turns a ``KeyboardInterrupt`` in ``__set_name__`` into a ``RuntimeError``.
    """
    usual = signal.getsignal(signal.SIGINT)
    _handle(signal.SIG_DFL)
    try:
        yield
    finally:
        if usual is signal.default_int_handler:
            imported()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """End the process with exit code 130 after an unhandled interrupt in this ``with`` block."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        _handle(_ignore_once)
        gc.freeze()  # Python's last collection would visit all objects of TensorFlow, which takes 1 s


_handle(signal.SIG_DFL)
