"""Ctrl-C while a command starts or ends: no traceback. Runs in the commands' own processes; only their entry points import it.

Importing this module lets SIGINT end the process as the system does it, for a shell with exit code 130 too: nothing exists yet that would have to be
tidied up, and a traceback through imports helps nobody. ``imported`` gives SIGINT back to Python, which raises ``KeyboardInterrupt``. When the
command is over, what libraries tidy up is not disturbed by a first interrupt; a second one ends it at once.
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
    """Everything is imported: from here on an interrupt is an exception."""
    if _before is signal.default_int_handler:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Around a command: an interrupt that nobody handled ends it with 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        _handle(_ignore_once)
        gc.freeze()  # Python's last collection would go through all objects of TensorFlow: 1 s for nothing


_handle(signal.SIG_DFL)
