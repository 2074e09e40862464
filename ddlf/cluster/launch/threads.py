"""Calls functions of an engine's library, which block, in threads. Runs on the master."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: object) -> T:
    """Call a function in a new thread, and return its result. The call may never end if the engine is gone, and a
    pool would then be full of such calls, and keep this process alive.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()  # nobody can cancel the call

    def work() -> None:
        try:
            result = function(*args)
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=work, name="ddlf-engine", daemon=True).start()
    return await asyncio.wrap_future(outcome)
