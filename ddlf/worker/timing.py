"""Measures how long a function of a map, or of ``submit``, takes on a worker. Runs in the executor."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from ddlf.rpc.iworker import awaited
from ddlf.worker.calls import takes_self


class Timed:
    """A function to send to workers that measures its own time there. A worker unpickles it as ``timed(function,
    concurrent)``.

    Args:
        function: A callable that can be sent.
        concurrent: Whether it may run at the same time as another method. A plain function then gets its own thread.
    """

    def __init__(self, function: Callable[..., Any], concurrent: bool) -> None:
        self.function = function
        self.concurrent = concurrent
        self.__name__ = name_of(function)

    def __reduce__(self) -> Any:
        return timed, (self.function, self.concurrent)


def timed(function: Callable[..., Any], concurrent: bool) -> Callable[..., Any]:
    """Return a function that calls ``function`` and returns a list: the seconds that it took, and its result."""

    def run(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        return ended(begin, result) if inspect.isawaitable(result) else [time.perf_counter() - begin, result]

    async def ended(begin: float, result: Any) -> list[Any]:
        value = await awaited(result)
        return [time.perf_counter() - begin, value]

    # an async function needs no thread, even if it is concurrent
    async def run_async(*args: Any, **kwargs: Any) -> list[Any]:
        begin = time.perf_counter()
        value = await function(*args, **kwargs)
        return [time.perf_counter() - begin, value]

    inner: Callable[..., Any] = run_async if inspect.iscoroutinefunction(function) else run
    outer = inner
    if takes_self(function):  # computed once, not at every call

        def outer(self: object, /, *args: Any, **kwargs: Any) -> Any:
            return inner(self, *args, **kwargs)

    outer.__name__ = name_of(function)
    outer.concurrent = concurrent  # type: ignore[attr-defined]
    return outer


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of another callable."""
    inner = getattr(function, "func", function)  # the inner function of a partial
    return str(getattr(inner, "__name__", type(inner).__name__))
