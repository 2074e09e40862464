"""What a worker does, whichever side one is on: ``Worker`` implements it on the worker's machine, ``ProxyWorker`` on the master's."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ddlf.errors import ConfigError

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,127}")
"""Of a hosted method."""


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
        """Begin a session. Safe to call again."""

    @abstractmethod
    async def close(self) -> None:
        """End the session; the worker goes on. Safe to call again."""

    @abstractmethod
    async def load_mnist(self) -> Any:
        """Make MNIST ``x_train``, ``y_train``, ``x_test``, ``y_test`` of the worker; what is there already is not loaded again."""

    @abstractmethod
    async def load_cifar10(self) -> Any:
        """The same with CIFAR-10."""

    @abstractmethod
    async def add_method(
        self, method: Callable[..., Any], *, name: str | None = None, persist: bool = False, concurrent: bool = False
    ) -> Any:
        """Host a function until it is removed.

        Args:
            method: A function; if its first parameter is named ``self`` it gets the ``Worker`` that runs it.
            name: To call it by; the function's own by default.
            persist: Keep it on disk, so that it is there after a restart of the worker.
            concurrent: Let it run while another method does; see ``ddlf.concurrent``.
        """

    @abstractmethod
    async def remove_method(self, method: str | Callable[..., Any]) -> Any:
        """Forget a hosted method."""

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
    """Return what ``run_method``, or another call, was given if it can run.

    Raises:
        TypeError: It is no function.
    """
    if not callable(method):
        raise TypeError(
            f"{call} takes a function, got a {type(method).__name__}; hosted methods are run by name with run"
        )
    return method


async def awaited(result: Any) -> Any:
    """What a function of the user's came to, plain or async."""
    return await result if inspect.isawaitable(result) else result


def method_name(method: str | Callable[..., Any]) -> str:
    """The name of a hosted method, which may be given as the function that was added.

    Raises:
        ConfigError: It can be no name of one. Nothing of this kind is ever looked up.
    """
    name = method if isinstance(method, str) else getattr(method, "__name__", method)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{str(name)[:60]!r} is no name of a method",
            hint="a name has letters, digits and underscores, up to 128, and begins with a letter",
        )
    return name
