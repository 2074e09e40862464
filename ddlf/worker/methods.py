"""The functions that a request can call by name: hosted methods with their files, and hosted roles. Runs in the
executor.

Each method has a file. The file is in the daemon's own folder, so that it survives a crash of the executor. With
``persist=True`` it is in the state folder, so that it survives the daemon too. A file is unpickled at the first call of
its method, because that may import TensorFlow.

A role belongs to a run. It has a model and slot states, which are freed when its run ends or another run begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import gc
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddlf.errors import AppMissing, ProtocolError
from ddlf.rpc.code import pickle_object, unpickle
from ddlf.rpc.iworker import NAME
from ddlf.rpc.messages import Request


@dataclass(slots=True)
class Method:
    """A function, and facts about the way to call it.

    Args:
        name: Its name in messages and status.
        function: The function, or None while it is only on disk.
        takes_self: Whether its first parameter is ``self``.
        concurrent: Whether it may run at the same time as another method.
        path: Its file; None for a function that is run once.
        skip: Number of leading arguments of a request that identify the method. The other arguments are for the
            function.
        at_once: Whether it runs at once, and ``status`` does not show it as running.
        kept: Whether it changes state that would be lost with the executor.
    """

    name: str
    function: Callable[..., Any] | None
    takes_self: bool = False
    concurrent: bool = False
    path: Path | None = None
    skip: int = 1
    at_once: bool = False
    kept: bool = False


def once(function: Callable[..., Any]) -> Method:
    """Return the method for a function that runs once without being hosted."""
    name = getattr(function, "__name__", type(function).__name__)
    return Method(name, function, takes_self(function), getattr(function, "concurrent", False))


def concurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function so that it may run on a worker at the same time as another method.

    An async function runs on the worker's event loop, which switches between functions when they await. A plain
    function gets its own thread, so it must not use objects of the event loop. If cancelled, a plain function ends at
    its next line of Python, and the caller does not wait for its end.
    """
    function.concurrent = True  # type: ignore[attr-defined]
    return function


def offered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark an async verb of a role. Other workers of the run may call it, even while this worker trains.

    It runs on the worker's event loop, so long computations belong in a thread. Its result is sent from its own memory,
    so a returned array must not change afterwards.
    """
    function.offered = True  # type: ignore[attr-defined]
    return concurrent(function)


def takes_self(function: Callable[..., Any]) -> bool:
    """Return whether the function's first parameter is ``self``, so that it is called with the worker.

    For a decorated function the inner function decides, unless the wrapper takes fewer arguments. Such a wrapper passes
    ``self`` itself.
    """
    # A bound method already has its ``self``.
    code = None if inspect.ismethod(function) else getattr(function, "__code__", None)
    if code is not None and not hasattr(function, "__wrapped__"):
        return bool(code.co_argcount and code.co_varnames[0] == "self")
    outer, inner = _positional(function, follow_wrapped=False), _positional(function, follow_wrapped=True)
    return outer[:1] == ["self"] or (inner[:1] == ["self"] and ("*" in outer or len(outer) >= len(inner)))


def _positional(function: Callable[..., Any], *, follow_wrapped: bool) -> list[str]:
    """Return the names of the positional parameters; ``"*"`` for any number, or if the signature is unknown."""
    try:
        signature = inspect.signature(function, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        return ["*"]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        name if parameter.kind in by_position else "*"
        for name, parameter in signature.parameters.items()
        if parameter.kind in (*by_position, inspect.Parameter.VAR_POSITIONAL)
    ]


class Methods:
    """The functions that a request can call by name: commands of the worker, hosted methods, and verbs of hosted roles.

    Args:
        session_dir: Folder for methods that live as long as the daemon.
        persist_dir: Folder for methods that outlive the daemon.
        unpickle: Makes a function from its bytes.

    Attributes:
        commands: The commands by name, in addition to ``run``, ``run_method`` and ``call``.
        roles: The hosted roles.
    """

    commands: dict[str, Method]
    roles: Hosting

    def __init__(self, session_dir: Path, persist_dir: Path, unpickle: Callable[[bytes], Any] = unpickle) -> None:
        self._unpickle = unpickle
        self._session_dir = session_dir
        self._persist_dir = persist_dir
        self._methods: dict[str, Method] = {}
        for folder in (persist_dir, session_dir):
            if folder.is_dir():
                for path in folder.glob("*.method"):
                    flags, _, name = path.stem.rpartition("-")
                    self._methods[name] = Method(name, None, "s" in flags, "c" in flags, path)

    def find(self, request: Request, *, by_peer: bool) -> Method:
        """Return the method that a request names.

        Args:
            request: The request.
            by_peer: Whether another worker has sent it.

        Raises:
            ProtocolError: The command does not exist, or it lacks its method.
            LookupError: The method does not exist.
            AppMissing: The role does not exist.
        """
        command = request.command
        if command == "call":
            return self.roles.find(*request.args, by_peer=by_peer)
        try:
            if command == "run":
                name = request.args[0]
                return self.get(getattr(name, "__name__", name))
            if command == "run_method":
                return once(request.args[0])
        except IndexError:
            raise ProtocolError(f"{command} without a method") from None
        if command not in self.commands:
            raise ProtocolError(f"unknown command {command!r}")
        return self.commands[command]

    def names(self) -> list[str]:
        """Return the names of all hosted methods, sorted."""
        return sorted(self._methods)

    def add(self, function: Callable[..., Any], name: str | None, persist: bool, concurrent: bool) -> str:
        """Host a function and return its name. It replaces a method of the same name.

        Raises:
            ValueError: The name cannot be used.
        """
        name = name or str(getattr(function, "__name__", ""))
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a valid name for a method; set name=... to letters, digits and underscores"
            )
        method = Method(name, function, takes_self(function), concurrent or getattr(function, "concurrent", False))
        folder = self._persist_dir if persist else self._session_dir
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = ("s" if method.takes_self else "") + ("c" if method.concurrent else "")
        method.path = folder / f"{flags}-{name}.method"
        self._discard_file(name)
        temporary = method.path.with_suffix(".new")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(pickle_object(function))
        temporary.replace(method.path)
        self._methods[name] = method
        return name

    def remove(self, name: str) -> None:
        """Remove a method.

        Raises:
            LookupError: There is no method of this name.
        """
        self.get(name)
        self._discard_file(name)
        del self._methods[name]

    def get(self, name: str) -> Method:
        """Return the method of this name, loaded.

        Raises:
            LookupError: There is no method of this name. The text lists the existing methods.
        """
        method = self._methods.get(name)
        if method is None:
            similar = difflib.get_close_matches(str(name), self._methods, 1)
            known = f"it has: {', '.join(self.names())}" if self._methods else "it has none; add it with add_method"
            guess = f" (did you mean {similar[0]!r}?)" if similar else ""
            raise LookupError(f"no method {name!r} here; {known}{guess}")
        if method.function is None:
            assert method.path is not None
            method.function = self._unpickle(method.path.read_bytes())
        return method

    def _discard_file(self, name: str) -> None:
        old = self._methods.get(name)
        if old is not None and old.path is not None:
            with contextlib.suppress(FileNotFoundError):
                old.path.unlink()


FREE_AFTER_S = 1.0
"""Seconds between the end of a role and the release of its memory. The release can take some tenths of a second if this
process imported Keras itself, and the next run may be about to begin.
"""


class Role(Protocol):
    """An object that takes part in a run. Its public async methods are verbs. Verbs marked ``concurrent`` do not wait
    for their turn.
    """

    async def close(self) -> None:
        """End running work and release all resources. No verb follows."""


class Hosting:
    """The roles of one worker.

    Args:
        worker: The first argument of each role's constructor.
        free: Frees reference cycles, such as a model and its layers.
        over: Called with the name of each run whose last role has ended.
    """

    def __init__(
        self,
        worker: object,
        free: Callable[[], object] = gc.collect,
        over: Callable[[str], object] = lambda run: None,
    ) -> None:
        self._worker = worker
        self._free = free
        self._over = over
        self._roles: dict[tuple[str, str], Role] = {}
        # for each role, the names of the roles that end together with it
        self._companions: dict[tuple[str, str], set[str]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._open = Method("open", self.open, concurrent=True, skip=0)
        self._close = Method("close", self.close, concurrent=True, skip=0)

    def find(self, *args: Any, by_peer: bool = False) -> Method:
        """Return the method for the arguments of ``call``: run, name of the role, verb, and the verb's own arguments.

        Args:
            args: Arguments of the request.
            by_peer: Whether another worker calls. It may use only verbs marked ``offered``.

        Raises:
            AppMissing: The role does not exist in this run.
            ProtocolError: The role has no such verb, or the arguments name no role and verb.
        """
        if len(args) < 3 or not all(isinstance(word, str) for word in args[:3]):
            raise ProtocolError("call takes a run, the name of a role, and a verb")
        run, name, verb = args[:3]
        if verb == "open" and not by_peer:
            return self._open
        if verb == "close" and not by_peer:
            return self._close
        role = self._roles.get((run, name))
        if role is None:
            raise AppMissing(f"it hosts no {name} of this run")
        function = getattr(role, verb, None)
        if verb.startswith("_") or not inspect.iscoroutinefunction(function):
            raise ProtocolError(f"a {name} has no verb {verb!r}")
        if by_peer and not getattr(function, "offered", False):
            raise ProtocolError(f"a {name} does not offer {verb!r} to other workers")
        return Method(f"{name}.{verb}", function, concurrent=getattr(function, "concurrent", False), skip=3)

    async def call(self, run: str, name: str, verb: str, *args: Any) -> Any:
        """Call a verb of a role, as another worker would.

        Raises:
            AppMissing: The role does not exist in this run.
            ProtocolError: The role has no such verb for other workers.
        """
        function = self.find(run, name, verb, by_peer=True).function
        assert function is not None
        return await function(*args)

    async def open(self, run: str, name: str, verb: str, make: Callable[..., Role], *args: Any, **kwargs: Any) -> None:
        """Create and host a role. End the roles of other runs, and a role of the same name."""
        for key in [key for key in self._roles if key[0] != run or key == (run, name)]:
            if key in self._roles:  # the role may have ended together with the role that made it
                self._end(key)
        self._roles[run, name] = make(self._worker, *args, **kwargs)

    async def close(self, run: str, name: str, verb: str) -> None:
        """End a role, if it is hosted."""
        if (run, name) in self._roles:
            self._end((run, name))

    def play(self, run: str, name: str, role: Role, *, of: str) -> None:
        """Host a role that another role of the run has made, until that role ends.

        Args:
            run: Name of the run.
            name: Name of the role.
            role: The role.
            of: Name of the role that has made it.
        """
        self._companions.setdefault((run, of), set()).add(name)
        self._roles[run, name] = role

    def drop(self, run: str, name: str, role: Role) -> None:
        """Stop hosting a role that another role has made, unless the name now belongs to a different role."""
        if self._roles.get((run, name)) is role:
            del self._roles[run, name]

    def close_all(self) -> None:
        """End all roles."""
        for key in list(self._roles):
            if key in self._roles:
                self._end(key)

    def _end(self, key: tuple[str, str]) -> None:
        """End a role in the background. Nobody waits for it, because its computations may take time to end."""
        run, _ = key
        task = asyncio.get_running_loop().create_task(self._end_behind(self._taken(key)))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        if all(run != other for other, _ in self._roles):
            self._over(run)

    def _taken(self, key: tuple[str, str]) -> list[Role]:
        """Remove a role and the roles that it has made, and return them."""
        role = self._roles.pop(key, None)
        companions = [companion for name in self._companions.pop(key, ()) for companion in self._taken((key[0], name))]
        return companions if role is None else [role, *companions]

    async def _end_behind(self, roles: list[Role]) -> None:
        for role in roles:
            await role.close()
        del role
        roles.clear()
        await asyncio.sleep(FREE_AFTER_S)
        self._free()
