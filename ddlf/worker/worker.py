"""The ``Worker`` that a method receives as ``self``. It hosts methods, variables and data. Runs in the executor."""

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
from ddlf.worker.activity import HeldPart, Shard
from ddlf.worker.assignment import cards_of_executor, uuids_of_executor
from ddlf.worker.calls import Hosting, Method, Methods, single_use_method
from ddlf.worker.determinism import set_environment
from ddlf.worker.machine import THREADS, cores, cores_of_engine
from ddlf.worker.peers import Peers
from ddlf.worker.status import ExecutorInfo


class Worker(IWorker):
    """The worker as the user's methods see it.

    Args:
        methods: The hosted methods.
        datasets: The cache of loaded data.

    Attributes:
        id: Number of this worker in its cluster, from 1.
        N: Number of workers in the cluster.
        data: A dict in which methods can keep values.
        variables: The values set by ``set_variable``, by name.
        datasets: Loaded data sets of this run and the previous one, by content hash or name. Later runs use them
            without loading them again.
        on_tell: Receives the arguments of ``tell``.
        on_shard: Receives the ``Shard`` that a role on this worker keeps now, for ``ddlf status``; None if there is
            none.
        on_part: Receives the ``HeldPart`` that a role on this worker has now, for ``ddlf status``; None if there is none.
        peers: Other workers that its roles may call.
        roles: The roles that it hosts.
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
        self.on_part: Callable[[HeldPart | None], None] = lambda part: None
        self._namespace: dict[str, Any] = {"self": self}
        self._name = os.urandom(8).hex()  # a master recognises a new executor by this name
        self._compute: ThreadPoolExecutor | None = None
        self._own_threads = threads_of_environment()
        self._threads = 0
        self._deterministic: bool | None = None  # None until a session decides
        self.peers = Peers(self._name)
        self.roles: Hosting
        self._own_attributes = frozenset(vars(self)) | {"_own_attributes"}

    async def connect(self, **session: Any) -> ExecutorInfo:
        """Begin a session of a master, or renew its settings.

        Args:
            session: The settings of the session. ``id`` and ``N`` of this worker. ``threads``, the threads for
                computation, or ``share``, the number of workers that share this machine's cores; the first session of a
                process decides, because libraries read the number once. The same holds for ``deterministic``, whether the
            framework computes equal bits in each run. ``pickle_results``, whether the master
                unpickles. ``lease``, the master's key, or ``guest``, for a master that has no lease and changes
                nothing.
        """
        if not session.get("guest"):
            self.id = session.get("id", 0)
            self.N = session.get("N", 0)
            self._threads = self._threads or self._set_threads(session.get("threads"), session.get("share", 1))
            if self._deterministic is None and session.get("deterministic") is not None:
                self._deterministic = set_environment(session["deterministic"] is True)
        return ExecutorInfo(
            name=self._name,
            pid=os.getpid(),
            host=platform.node(),
            python=platform.python_version(),
            numpy=np.__version__,
            cores=min(cores(), self._own_threads or cores()),
            has_own_cores=bool(cores_of_engine()),
            threads=self._threads,
            deterministic=bool(self._deterministic),
            gpus=cards_of_executor(),
            gpu_uuids=uuids_of_executor(),
        )

    def _set_threads(self, threads: int | None, share: int) -> int:
        """Limit the threads of the numeric libraries before they are imported. Return the number of threads."""
        return set_threads(threads or self._own_threads or max(1, cores() // share))

    async def close(self) -> None:
        """End the session. All state stays for the next session."""

    async def load_mnist(self) -> dict[str, Any]:
        """Load MNIST into ``x_train``, ``y_train``, ``x_test``, ``y_test``, with the shapes of ``ddlf.load_mnist``."""
        return await self._load("mnist")

    async def load_cifar10(self) -> dict[str, Any]:
        """Load CIFAR-10 into ``x_train``, ``y_train``, ``x_test``, ``y_test``, with the shapes of
        ``ddlf.load_cifar10``.
        """
        return await self._load("cifar10")

    async def _load(self, name: str) -> dict[str, Any]:
        from ddlf.data import datasets

        is_loaded = name in self.datasets
        if not is_loaded:
            self.datasets.make_room()
            self.datasets[name] = await asyncio.to_thread(datasets.load, name)
        self.datasets.use([name])
        (self.x_train, self.y_train), (self.x_test, self.y_test) = self.datasets[name]
        return {"name": name, "samples": len(self.x_train), "loaded": not is_loaded}

    async def add_method(
        self, method: Callable[..., Any], *, name: str | None = None, persist: bool = False, concurrent: bool = False
    ) -> str:
        """Host a function and return its name; see ``IWorker`` for the arguments."""
        return self._methods.add(method, name, persist, concurrent)

    async def remove_method(self, method: str | Callable[..., Any]) -> None:
        """Remove a hosted method from this worker."""
        self._methods.remove(getattr(method, "__name__", method))  # type: ignore[arg-type]

    async def list_methods(self) -> list[str]:
        """Return the names of the hosted methods, sorted."""
        return self._methods.names()

    async def run(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a hosted method of this worker from inside another method. It does not wait for its turn, because its
        caller has the turn.
        """
        hosted = self._methods.get(getattr(method, "__name__", method))  # type: ignore[arg-type]
        return await self._call(hosted, args, kwargs)

    async def run_method(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function, which gets this worker as ``self``, from inside another method."""
        return await self._call(single_use_method(method), args, kwargs)

    async def _call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert method.function is not None
        return await awaited(method.function(*((self, *args) if method.takes_self else args), **kwargs))

    async def run_code(self, code: str) -> Any:
        """Run source text in which ``self`` is this worker. Its names stay defined for later code. Return the value of
        its last expression, or None.
        """
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
        """Store a value under a name on this worker, for later code and methods.

        Raises:
            ValueError: The name is not a Python identifier.
        """
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
            raise ValueError(f"{name!r} is not a valid variable name")
        self.variables[name] = value

    async def get_variable(self, name: str) -> Any:
        """Return the value that ``set_variable`` stored under this name.

        Raises:
            KeyError: The variable is not set.
        """
        self._check_variable(name)
        return self.variables[name]

    async def delete_variable(self, name: str) -> None:
        """Delete a variable, a value that ``set_variable`` stored.

        Raises:
            KeyError: The variable is not set.
        """
        self._check_variable(name)
        del self.variables[name]

    def _check_variable(self, name: str) -> None:
        if name not in self.variables:
            similar = difflib.get_close_matches(str(name), self.variables, 1)
            guess = (
                f"; did you mean {similar[0]!r}?"
                if similar
                else f"; set are: {', '.join(sorted(self.variables)) or 'none'}"
            )
            raise KeyError(f"no variable {name!r} here{guess}")

    async def list_variables(self) -> dict[str, str]:
        """Return the names of the variables, with the types of their values."""
        return {name: type(value).__name__ for name, value in self.variables.items()}

    async def clean(self) -> None:
        """Free data, model, variables and all attributes that methods set on ``self``. Methods stay."""
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
        """End this process. Its daemon decides whether to start another one."""
        asyncio.get_running_loop().call_soon(sys.exit, 0)

    def tell(self, **facts: Any) -> None:
        """Report the progress of the running method to its caller. Any thread may call this. Reports are dropped while
        much data is being sent.

        Args:
            facts: Small data.
        """
        self.on_tell(facts)

    async def compute(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run a function on the one thread that uses Keras, while the event loop continues to send and receive.

        A cancelled call still waits for the function, because its data is in use until it returns.
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


def threads_of_environment() -> int:
    """Return the number of threads that the environment of this process allows; 0 without a limit."""
    limits = (os.environ.get(name, "") for name in THREADS[:2])
    return next((int(limit) for limit in limits if limit.isdecimal() and int(limit)), 0)


def set_threads(threads: int) -> int:
    """Set the number of threads of the numeric libraries. This has an effect only before their first use.

    PyTorch reads its number at its import. A template of executors may have imported it already, so this tells it again.

    Args:
        threads: At least 1.

    Returns:
        ``threads``.
    """
    for name in THREADS:
        os.environ[name] = str(threads)
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)
    return threads
