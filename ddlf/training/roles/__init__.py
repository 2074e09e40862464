"""What a worker is in a run: the Keras model behind a few verbs (``replica``). The only rooms that talk to a Keras model."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib
import sys
import threading
from collections.abc import Callable

PRELOADED = ("keras", "ddlf.training.slot.replica")
"""What executors that train are to come with, imported once for all of a machine."""

REPLICA = "replica"
"""What the role of training is called on workers."""
EXCHANGE = "exchange"
"""What the role is called that holds weights in the sharded exchange."""
COPIES = "copies"
"""What the role is called that gives other workers what slots have left."""
SERVERS = "servers"
"""What the role is called that has a worker's servers of Downpour."""

IMPORT = "ddlf import"
"""Name of the threads that do it on the master."""


def begin_import(then: Callable[[], object] = lambda: None) -> None:
    """Import Keras on a thread of its own. Nobody can end that, so the program's end waits for it.

    Args:
        then: Is called there when it is done.
    """

    def work() -> None:
        import_keras()
        with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile
            then()

    thread = threading.Thread(target=work, name=IMPORT, daemon=True)
    thread.start()
    atexit.register(thread.join)


async def have_keras() -> None:
    """Wait until Keras is imported, on a thread that goes on when this is cancelled."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    begin_import(lambda: loop.call_soon_threadsafe(done.set))
    await done.wait()


def is_importing() -> bool:
    """Whether such a thread is at work."""
    return any(thread.name == IMPORT for thread in threading.enumerate())


def import_keras() -> None:
    """Import Keras and its backend, on any thread. Errors are met by who needs it.

    The garbage collector is off meanwhile: it would take a fifth of the time to look at hundreds of thousands of objects that stay.
    """
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
                gc.unfreeze()  # into the oldest generation: else the next collection of the youngest looks at all of them
            gc.enable()
