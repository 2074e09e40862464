"""One event loop on a background thread, for synchronous code such as ``ddlf.run`` and ``ddlf.Pool``.

Runs on the master.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
before_waiting: Callable[[Coroutine[Any, Any, Any]], None] | None = None
"""Called with each coroutine before ``wait_on`` waits for it. ``ddlf run`` sets it while it imports a script, because
that script may start a run itself."""


def wait_on(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T],
    caller: str = "ddlf.run",
    alternative: str = "await",
) -> T:
    """Wait for a coroutine on an event loop that runs in another thread.

    Args:
        loop: The event loop.
        coroutine: The coroutine to wait for.
        caller: Name of the function that the user called, for the error message.
        alternative: The asynchronous alternative, for the error message.

    Raises:
        RuntimeError: The caller is inside this event loop.
    """
    if before_waiting is not None:
        before_waiting(coroutine)
    if running_here() is loop:
        coroutine.close()
        raise RuntimeError(f"{caller} is for synchronous code; in a coroutine use {alternative}")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        # Wait until the cancelled coroutine has closed its connections.
        asyncio.run_coroutine_threadsafe(_settle(), loop).result()
        raise


def shared_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that all synchronous code shares. The first call starts it."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="ddlf", daemon=True).start()
    return _loop


def running_here() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _settle() -> None:
    """Wait until every cancelled task of the shared loop has ended, before the program exits."""
    current = asyncio.current_task()
    await asyncio.gather(
        *(task for task in asyncio.all_tasks() if task is not current and task.cancelling()), return_exceptions=True
    )
