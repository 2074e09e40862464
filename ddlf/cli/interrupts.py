"""Ctrl-C while a command starts or ends: it ends at once and says nothing. Runs in the commands' own processes.

Importing this module lets SIGINT end the process as the system does it, for a shell with exit code 130 too: nothing exists yet that would have to be
tidied up, and a traceback through imports helps nobody. ``imported`` gives SIGINT back to Python, which raises ``KeyboardInterrupt``.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_before = signal.getsignal(signal.SIGINT)


def _take() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread: somebody imports this as a library
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def imported() -> None:
    """Everything is imported: from here on an interrupt is an exception."""
    if _before is signal.default_int_handler:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Around a command: an interrupt that nobody handled ends it with 130, and one that comes while Python ends does not disturb."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        _take()


_take()
