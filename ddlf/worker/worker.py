"""The ``Worker`` that a method gets as ``self``: it hosts methods, variables and data. Runs in the executor."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import difflib
import gc
import inspect
import keyword
import linecache
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ddlf.data.array_cache import ArrayCache
from ddlf.rpc.iworker import IWorker, awaited
from ddlf.worker.activity import Shard
from ddlf.worker.hosting import Hosting
from ddlf.worker.machine import cores
from ddlf.worker.methods import Method, Methods, once
from ddlf.worker.peers import Peers


class Worker(IWorker):
    """What user code sees of the worker that runs it.

    Args:
        methods: The hosted ones.
        datasets: Where loaded data is kept.

    Attributes:
        id: Number of this worker in its cluster, from 1.
        N: Number of workers in the cluster.
        data: A dict for methods to keep things in.
        variables: The values set by ``set_variable``, by name.
        datasets: Loaded data sets of this run and the one before, by content hash or name; they serve later runs without loading again.
        on_tell: Takes what ``tell`` is given.
        on_shard: Takes the ``Shard`` that one of its roles keeps now, for ``ddlf status``; None for none.
        peers: Other workers that its roles may call.
        roles: The roles that it plays.
    """

    def __init__(self, methods: Methods, datasets: ArrayCache) -> None:
        self.id = 0
        self.N = 0
        self.data: dict[Any, Any] = {}
        self.variables: dict[str, Any] = {}
        self.datasets = datasets
        self._methods = methods
        self.on_tell: Callable[[dict[str, Any]], None] = lambda facts: None
        self.on_shard: Callable[[Shard | None], None] = lambda shard: None
        self._namespace: dict[str, Any] = {"self": self}
        self._name = os.urandom(8).hex()  # a master notices by it that this is a new executor
        self._compute: ThreadPoolExecutor | None = None
        self._own_threads = threads_of_environment()
        self._threads = 0
        self.peers = Peers(self._name)
        self.roles: Hosting
        self._own_attributes = frozenset(vars(self)) | {"_own_attributes"}

    async def connect(self, **session: Any) -> dict[str, Any]:
        """Begin a session.

        Args:
            session: ``id`` and ``N`` of this worker; ``threads``, for computation, or ``share``, the number of workers that share
                this machine's cores (the first session of a process decides: libraries read the number once); ``pickle_results``,
                whether the master unpickles; ``lease``, its key; or ``guest``, who has none and changes nothing.

        Returns:
            Versions, process id and host name; ``cores``, which the environment of this worker may have limited; ``threads``, those of this process.
        """
        if not session.get("guest"):
            self.id = session.get("id", 0)
            self.N = session.get("N", 0)
            self._threads = self._threads or self._set_threads(session.get("threads"), session.get("share", 1))
        return {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "pid": os.getpid(),
            "executor": self._name,
            "host": platform.node(),
            "cores": min(cores(), self._own_threads or cores()),
            "threads": self._threads,
        }

    def _set_threads(self, threads: int | None, share: int) -> int:
        """Bound the threads of the numeric libraries, before they are imported; returns how many there are now."""
        return set_threads(threads or self._own_threads or max(1, cores() // share))

    async def close(self) -> None:
        """End the session; everything stays for the next one."""

    async def load_mnist(self) -> dict[str, Any]:
        """Load MNIST into ``x_train``, ``y_train``, ``x_test``, ``y_test``. Shapes as in ``ddlf.load_mnist``."""
        return await self._load("mnist")

    async def load_cifar10(self) -> dict[str, Any]:
        """Load CIFAR-10 into the same attributes."""
        return await self._load("cifar10")

    async def _load(self, name: str) -> dict[str, Any]:
        from ddlf.data import datasets

        held = name in self.datasets
        if not held:
            self.datasets.make_room()
            self.datasets[name] = await asyncio.to_thread(datasets.load, name)
        self.datasets.use([name])
        (self.x_train, self.y_train), (self.x_test, self.y_test) = self.datasets[name]
        return {"name": name, "samples": len(self.x_train), "loaded": not held}

    async def add_method(
        self, method: Callable[..., Any], *, name: str | None = None, persist: bool = False, concurrent: bool = False
    ) -> str:
        """Host a function; see ``IWorker``."""
        return self._methods.add(method, name, persist, concurrent)

    async def remove_method(self, method: str | Callable[..., Any]) -> None:
        """Forget a hosted method."""
        self._methods.remove(getattr(method, "__name__", method))  # type: ignore[arg-type]

    async def list_methods(self) -> list[str]:
        """Names of the hosted methods."""
        return self._methods.names()

    async def run(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a hosted method of this worker, from inside another method. It does not wait for its turn: the caller has it."""
        found = self._methods.get(getattr(method, "__name__", method))  # type: ignore[arg-type]
        return await self._call(found, args, kwargs)

    async def run_method(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function with this worker, from inside another method."""
        return await self._call(once(method), args, kwargs)

    async def _call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert method.function is not None
        return await awaited(method.function(*((self, *args) if method.takes_self else args), **kwargs))

    async def run_code(self, code: str) -> Any:
        """Run source text with ``self`` as this worker; names it defines stay for later code. See ``IWorker``."""
        file = f"<run_code {abs(hash(code)) % 10**6}>"
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        tree = ast.parse(code, file)
        last = tree.body[-1] if tree.body else None
        parts: list[ast.Module | ast.Expression] = [tree]
        if isinstance(last, ast.Expr):
            tree.body.pop()
            parts.append(ast.Expression(last.value))
        value = None
        for part in parts:
            mode = "eval" if isinstance(part, ast.Expression) else "exec"
            compiled = compile(part, file, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            value = eval(compiled, self._namespace)
            if compiled.co_flags & inspect.CO_COROUTINE:
                value = await value
        return value

    async def set_variable(self, name: str, value: Any) -> None:
        """Set a named value.

        Raises:
            ValueError: The name is no Python identifier.
        """
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
            raise ValueError(f"{name!r} is no valid variable name")
        self.variables[name] = value

    async def get_variable(self, name: str) -> Any:
        """The value of a variable.

        Raises:
            KeyError: It is not set.
        """
        self._check_variable(name)
        return self.variables[name]

    async def delete_variable(self, name: str) -> None:
        """Forget a variable.

        Raises:
            KeyError: It is not set.
        """
        self._check_variable(name)
        del self.variables[name]

    def _check_variable(self, name: str) -> None:
        if name not in self.variables:
            near = difflib.get_close_matches(str(name), self.variables, 1)
            guess = (
                f"; did you mean {near[0]!r}?" if near else f"; set are: {', '.join(sorted(self.variables)) or 'none'}"
            )
            raise KeyError(f"no variable {name!r} here{guess}")

    async def list_variables(self) -> dict[str, str]:
        """Names of the variables, with the types of their values."""
        return {name: type(value).__name__ for name, value in self.variables.items()}

    async def clean(self) -> None:
        """Free data, model, variables and whatever methods set on ``self``. Methods stay."""
        for name in set(vars(self)) - self._own_attributes:
            delattr(self, name)
        self.data, self.variables = {}, {}
        self.datasets.clear()
        self._namespace.clear()
        self._namespace["self"] = self
        if "keras" in sys.modules:
            await self.compute(sys.modules["keras"].utils.clear_session)
        gc.collect()

    async def shutdown(self) -> None:
        """End this process; its daemon decides what follows."""
        asyncio.get_running_loop().call_soon(sys.exit, 0)

    def tell(self, **facts: Any) -> None:
        """Tell who asked for what runs now how far it is. Any thread may; what comes while much is being sent is dropped.

        Args:
            facts: Data, of a few bytes.
        """
        self.on_tell(facts)

    async def compute(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run a function on the one thread that Keras lives on, so that weights and indices keep flowing meanwhile.

        When this is cancelled the function is still waited for: what it uses is not free before it returned.
        """
        if self._compute is None:
            self._compute = ThreadPoolExecutor(1, "compute")
        future = asyncio.get_running_loop().run_in_executor(self._compute, function, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await future
            raise


THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")
"""Variables of the environment from which numeric libraries take their number of threads; JAX's is ``NPROC``."""


def threads_of_environment() -> int:
    """The number of threads that the environment of this process allows; 0 without a limit."""
    limits = (os.environ.get(name, "") for name in THREADS[:2])
    return next((int(limit) for limit in limits if limit.isdecimal() and int(limit)), 0)


def set_threads(threads: int) -> int:
    """Have the numeric libraries compute with this many threads. Has an effect only before they are first used.

    Args:
        threads: At least 1.

    Returns:
        The same.
    """
    for name in THREADS:
        os.environ[name] = str(threads)
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
    return threads
