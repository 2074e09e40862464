"""The interface of a worker. ``Worker`` implements it on the worker's machine, ``ProxyWorker`` on the master's."""

from __future__ import annotations

import asyncio
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ddlf.errors import ConfigError

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,127}")
"""A valid name of a hosted method."""


class IWorker(ABC):
    """A machine that hosts methods, variables and data.

    Attributes:
        id: Number of the worker in its cluster, from 1.
        N: Number of workers in the cluster.
    """

    id: int
    N: int

    @abstractmethod
    async def connect(self, **session: Any) -> Any:
        """Begin a session with the worker. Safe to call again."""

    @abstractmethod
    async def close(self) -> None:
        """End the session. The worker continues to run. Safe to call again."""

    @abstractmethod
    async def load_mnist(self) -> Any:
        """Load MNIST on the worker as ``x_train``, ``y_train``, ``x_test`` and ``y_test``, unless it is loaded
        already."""

    @abstractmethod
    async def load_cifar10(self) -> Any:
        """Load CIFAR-10 on the worker as ``x_train``, ``y_train``, ``x_test``, ``y_test``, unless it is loaded
        already."""

    @abstractmethod
    async def add_method(
        self, method: Callable[..., Any], *, name: str | None = None, persist: bool = False, concurrent: bool = False
    ) -> Any:
        """Host a function: the worker keeps it, so that ``run`` can call it by name, until it is removed.

        Args:
            method: A function. If its first parameter is named ``self``, it receives the ``Worker`` that runs it.
            name: The name to call it by. The default is the function's own name.
            persist: Keep the method on disk, so that a restarted worker has it again.
            concurrent: Let it run at the same time as another method; see ``ddlf.concurrent``.
        """

    @abstractmethod
    async def remove_method(self, method: str | Callable[..., Any]) -> Any:
        """Remove a hosted method from the worker."""

    @abstractmethod
    async def run(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a hosted method and return its result."""

    @abstractmethod
    async def run_method(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function once without hosting it and return its result."""

    @abstractmethod
    async def run_code(self, code: str) -> Any:
        """Run source text in which ``self`` is the worker; return the value of its last expression, or None."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End the worker's processes."""


def checked_function(method: Callable[..., Any], call: str = "run_method") -> Callable[..., Any]:
    """Return ``method``, the argument of ``run_method`` or of another call, after a check.

    Raises:
        TypeError: ``method`` cannot be called.
    """
    if not callable(method):
        raise TypeError(
            f"{call} takes a function, got a {type(method).__name__}; hosted methods are run by name with run"
        )
    return method


def drop_error(task: asyncio.Future[Any]) -> None:
    """Mark the error of a task as seen, because its caller was cancelled. Otherwise asyncio prints it."""
    if not task.cancelled():
        task.exception()


async def awaited(result: Any) -> Any:
    """Return the result of a user's function, which may be plain or async."""
    return await result if inspect.isawaitable(result) else result


def method_name(method: str | Callable[..., Any]) -> str:
    """Return the name of a hosted method, given by its name or as the added function.

    Raises:
        ConfigError: The name is not valid. A worker never looks up such a name.
    """
    name = method if isinstance(method, str) else getattr(method, "__name__", method)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{str(name)[:60]!r} is not a valid name of a method",
            hint="a name has letters, digits and underscores, up to 128, and begins with a letter",
        )
    return name
