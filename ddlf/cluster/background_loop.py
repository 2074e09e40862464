"""One event loop on a background thread, for code that is not async: ``ddlf.run`` and ``ddlf.Pool`` share it. Runs on the master."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
before_waiting: Callable[[Coroutine[Any, Any, Any]], None] | None = None
"""Is called with each coroutine that is to be waited for; ``ddlf run`` sets it while it imports a script, which may run by itself."""


def wait_on(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], who: str = "ddlf.run", instead: str = "await"
) -> T:
    """Wait for a coroutine on an event loop that runs in another thread.

    Args:
        loop: The event loop.
        coroutine: What to wait for.
        who: What the user called, for the error.
        instead: What to use in async code, for the error.

    Raises:
        RuntimeError: Called from inside the event loop.
    """
    if before_waiting is not None:
        before_waiting(coroutine)
    if running_here() is loop:
        coroutine.close()
        raise RuntimeError(f"{who} is for code that is not async; inside a coroutine use {instead}")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        # The cancelled coroutine still closes its connections.
        asyncio.run_coroutine_threadsafe(_settle(), loop).result()
        raise


def shared_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that all code without async shares; it is started at the first call."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="ddlf", daemon=True).start()
    return _loop


def running_here() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs on this thread, if there is one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _settle() -> None:
    """Let every cancelled task of this loop end."""
    mine = asyncio.current_task()
    await asyncio.gather(
        *(task for task in asyncio.all_tasks() if task is not mine and task.cancelling()), return_exceptions=True
    )
