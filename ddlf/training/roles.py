"""Imports Keras, on any thread, and names the roles of workers. Runs on master and workers."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable

from ddlf.worker.assignment import GROWING

PRELOADED = ("keras", "ddlf.training.slot.replica")
"""Modules of executors that train. A machine imports them once for all of its executors."""

REPLICA = "replica"
"""Name of the role that trains."""
SERVERS = "servers"
"""Name of the role that has a worker's Downpour servers."""

IMPORT = "ddlf import"
"""Name of the threads that import Keras on the master."""


def begin_import(then: Callable[[], object] = lambda: None) -> None:
    """Import Keras on a new thread. Nothing can stop the import, so the program waits for it at exit.

    Args:
        then: Called on that thread after the import.
    """

    def work() -> None:
        import_keras()
        with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile
            then()

    thread = threading.Thread(target=work, name=IMPORT, daemon=True)
    thread.start()
    atexit.register(thread.join)


async def have_keras() -> None:
    """Wait until Keras is imported on another thread. The import continues if this coroutine is cancelled."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    begin_import(lambda: loop.call_soon_threadsafe(done.set))
    await done.wait()


def is_importing() -> bool:
    """Return whether a thread is importing Keras now."""
    return any(thread.name == IMPORT for thread in threading.enumerate())


def import_keras() -> None:
    """Import Keras and its backend, on any thread.

    Errors are suppressed: the code that needs Keras gets them when it imports Keras itself.

    On a card, the backend then takes memory by need, because master and workers of one machine use the same card.

    The garbage collector is off meanwhile. It would spend a fifth of the time on hundreds of thousands of objects that
    stay.
    """
    for name, value in GROWING.items():
        os.environ.setdefault(name, value)
    collecting = gc.isenabled() and "keras" not in sys.modules
    if collecting:
        gc.disable()
    try:
        with contextlib.suppress(Exception):
            importlib.import_module("keras")
    finally:
        if collecting:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # moves them into the oldest generation, which spares the next young collection
            gc.enable()
