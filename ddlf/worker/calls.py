"""Serves calls: reads requests from data connections, finds their functions, runs them in turn, and answers each once.

Runs in the executor, on its event loop. A request names a command of the worker, a hosted method, or a verb of a hosted
role.

Each hosted method has a file. The file is in the daemon's own folder, so that it survives a crash of the executor. With
``persist=True`` it is in the state folder, so that it survives the daemon too. A file is unpickled at the first call of
its method, because that may import TensorFlow.

A role belongs to a run. It has a model and slot states, which are freed when its run ends or another run begins.

Methods run one at a time unless they are concurrent. A plain function runs inside the callback that read its request,
so a small call costs no task and no thread. A function that blocks makes only this worker busy, because the daemon
still answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import difflib
import gc
import inspect
import os
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddlf.errors import AppMissing, DDLFError, LeaseError, NotPicklable, ProtocolError, RequestCancelled, RequestTimeout
from ddlf.rpc.buffers import POOL
from ddlf.rpc.code import CodeMissing, dump_result, pickle_object, unpickle
from ddlf.rpc.connection import Connection
from ddlf.rpc.iworker import NAME, awaited
from ddlf.rpc.messages import (
    DOING,
    Frame,
    Kind,
    Limits,
    Request,
    Response,
    describe,
    dumps,
    loads,
    read_arguments,
    refuse_objects,
)
from ddlf.worker.activity import Activity
from ddlf.worker.lease import MASTER_ID_BYTES
from ddlf.worker.peers import CALLER, Admitted, Peers, refuse_between_workers, refuse_code


@dataclass(slots=True)
class Method:
    """A function that a request can call, with facts about the way to call it.

    Args:
        name: Its name in messages and status.
        function: The function, or None while it is only on disk.
        takes_self: Whether its first parameter is ``self``.
        concurrent: Whether it may run at the same time as another method.
        path: Its file; None for a function that is run once.
        skip: Number of leading arguments of a request that identify the method. The other arguments are for the
            function.
        at_once: Whether it runs at once, and ``status`` does not show it as running.
        stateful: Whether it changes state that would be lost with the executor.
    """

    name: str
    function: Callable[..., Any] | None
    takes_self: bool = False
    concurrent: bool = False
    path: Path | None = None
    skip: int = 1
    at_once: bool = False
    stateful: bool = False


def single_use_method(function: Callable[..., Any]) -> Method:
    """Wrap a function, which the request itself contains, as a ``Method``. It runs once, and is not kept on the worker."""
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
    """Return the names of a function's positional parameters; ``"*"`` stands for any number, or for an unknown
    signature.
    """
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
        """Return the command, hosted method or verb of a role that a request names.

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
                return single_use_method(request.args[0])
        except IndexError:
            raise ProtocolError(f"{command} without a method") from None
        if command not in self.commands:
            raise ProtocolError(f"unknown command {command!r}")
        return self.commands[command]

    def names(self) -> list[str]:
        """Return the names of all hosted methods, sorted."""
        return sorted(self._methods)

    def add(self, function: Callable[..., Any], name: str | None, persist: bool, concurrent: bool) -> str:
        """Keep a function on this worker, so that requests can call it by name, and return its name. It replaces a
        method of the same name.

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
        """Remove a hosted method from this worker.

        Raises:
            LookupError: There is no method of this name.
        """
        self.get(name)
        self._discard_file(name)
        del self._methods[name]

    def get(self, name: str) -> Method:
        """Return the hosted method of this name, after unpickling its function if necessary.

        Raises:
            LookupError: There is no method of this name. The text lists the existing methods.
        """
        method = self._methods.get(name)
        if method is None:
            similar = difflib.get_close_matches(str(name), self._methods, 1)
            methods = f"it has: {', '.join(self.names())}" if self._methods else "it has none; add it with add_method"
            guess = f" (did you mean {similar[0]!r}?)" if similar else ""
            raise LookupError(f"no method {name!r} here; {methods}{guess}")
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
        """End running work and release all resources of this role. No verb is called afterwards."""


class Hosting:
    """The roles (objects that take part in a run) that one worker hosts.

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
        """Return the verb, a method of a role, that the arguments of a request ``call`` name: run, name of the role,
        verb, and the verb's own arguments.

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
        """Call a verb (a method) of a role on this worker, in the same way as another worker calls it.

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
        """End a role and stop hosting it, if this worker hosts it."""
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
        """Stop hosting this role, which another role has made, unless its name now belongs to a different role."""
        if self._roles.get((run, name)) is role:
            del self._roles[run, name]

    def close_all(self) -> None:
        """End all roles that this worker hosts."""
        for key in list(self._roles):
            if key in self._roles:
                self._end(key)

    def _end(self, key: tuple[str, str]) -> None:
        """End a role in a background task. No request waits for it, because its computations may take time to end."""
        run, _ = key
        task = asyncio.get_running_loop().create_task(self._end_behind(self._remove(key)))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        if all(run != other for other, _ in self._roles):
            self._over(run)

    def _remove(self, key: tuple[str, str]) -> list[Role]:
        """Remove a role and the roles that it has made, and return them."""
        role = self._roles.pop(key, None)
        companions = [companion for name in self._companions.pop(key, ()) for companion in self._remove((key[0], name))]
        return companions if role is None else [role, *companions]

    async def _end_behind(self, roles: list[Role]) -> None:
        for role in roles:
            await role.close()
        del role
        roles.clear()
        await asyncio.sleep(FREE_AFTER_S)
        self._free()


EAGER: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}
"""Arguments for a task that runs its coroutine at once until the coroutine first waits. So a coroutine that never waits
costs as little as a function.
"""


class Interrupted(BaseException):
    """Raised by the handler of SIGINT inside a method that blocks, so that even a loop in plain Python ends."""


class Call:
    """One request on its way through the worker.

    Args:
        id: Number of the request; below 1 if the daemon must not see it.
        request: The command and its arguments.
        session: Gets the answer.
        deadline: The latest time when the request may start, on the event loop's clock; None means no limit.

    Attributes:
        method: The method that the request runs, once it is known.
        task: The task that runs the method, if the method awaits.
    """

    __slots__ = ("deadline", "id", "method", "request", "session", "task")

    def __init__(self, id: int, request: Request, session: Session, deadline: float | None = None) -> None:
        self.id = id
        self.request = request
        self.session = session
        self.deadline = deadline
        self.method: Method | None = None
        self.task: asyncio.Task[Any] | None = None


class Calls:
    """Runs the calls of one worker in turn, and answers them.

    Args:
        worker: The object that methods receive as ``self``.
        methods: Finds the method of a request.
        sessions: All open sessions.
        activity: The page in which the daemon sees the running method; None without a daemon.

    Attributes:
        running: The call whose turn it is; None between two calls.
        on_turn_over: Called at the end of each turn, before the answer.
    """

    def __init__(
        self,
        worker: object,
        methods: Methods,
        sessions: Iterable[Session] = (),
        activity: Activity | None = None,
    ) -> None:
        self.running: Call | None = None
        self.on_turn_over: Callable[[], None] = lambda: None
        self._worker = worker
        self._methods = methods
        self._sessions = sessions
        self._activity = activity
        self._waiting: deque[Call] = deque()
        self._blocking_id = 0

    def submit(self, call: Call) -> None:
        """Run a call at once if the worker is free, or when its turn comes. The call is answered exactly once."""
        try:
            call.method = method = self._methods.find(call.request, by_peer=call.session.peer is not None)
        except Exception as error:
            call.session.answer(call, Response(error=error))
            return
        if method.at_once:
            self._run_at_once(call, method)
        elif call.session.is_held_back or ((self.running is not None or self._waiting) and not method.concurrent):
            self._waiting.append(call)
            if self.running is None:  # earlier calls may wait until their master reads answers
                asyncio.get_running_loop().call_soon(self.run_next)
        else:
            self._run(call, method)

    def cancel(self, call: Call) -> None:
        """Remove a waiting call from the queue, or cancel the task of a running one."""
        if call in self._waiting:
            self._waiting.remove(call)
            call.session.answer(call, Response(error=RequestCancelled("cancelled before it started")))
        elif call.task is not None:
            # Do not cancel at once: a task that is cancelled before its first step never runs, and the request would
            # get no answer.
            asyncio.get_running_loop().call_soon(call.task.cancel)

    def run_next(self) -> None:
        """Run the first waiting call whose master reads its answers."""
        if self.running is not None:
            return
        for index, call in enumerate(self._waiting):
            if not call.session.is_held_back:
                del self._waiting[index]
                break
        else:
            return
        assert call.method is not None
        self._run(call, call.method)
        if call.method.concurrent:  # a concurrent call ends no turn
            asyncio.get_running_loop().call_soon(self.run_next)

    def interrupt(self, *_: Any) -> None:
        """Handle SIGINT: end the method that the signal is meant for, if it runs at this moment.

        A coroutine that waits is cancelled through its task. A coroutine that computes between two awaits is ended
        here.
        """
        id, call = self._blocking_id, self.running
        if call is not None and call.task is not None and asyncio.current_task(call.task.get_loop()) is call.task:
            id = call.id
        if self._activity is not None and id > 0 and self._activity.is_to_end(id):
            raise Interrupted

    def _run_at_once(self, call: Call, method: Method) -> None:
        refusal = call.session.refusal()
        if refusal is not None:
            call.session.answer(call, Response(error=refusal))
            return
        if method.stateful and self._activity is not None:
            self._activity.use()
        self._start(call, method, call.request.args)

    def _run(self, call: Call, method: Method) -> None:
        for session in self._sessions:
            session.keep_answers()
        if not method.concurrent:
            self.running = call
        if call.deadline is not None and asyncio.get_running_loop().time() > call.deadline:
            error = RequestTimeout("its time limit ended before its turn came", may_have_run=False)
            self._finish(call, Response(error=error))
            return
        activity, beside = self._activity, None
        if activity is not None and call.id > 0:
            if method.concurrent:
                beside = activity.shown()
                activity.begin_beside(call.id)
            activity.begin(call.id, method.name)
            # Check this after recording that the call runs. The daemon first asks for the end and then looks at the
            # running call, so one of the two sees the other.
            cancelled = activity.is_to_end(call.id)
            refusal = RequestCancelled("cancelled before it started") if cancelled else call.session.refusal()
            if refusal is not None:
                if beside is not None:
                    activity.show(beside)
                self._finish(call, Response(error=refusal))
                return
        args = call.request.args[method.skip :]
        self._start(call, method, (self._worker, *args) if method.takes_self else args)
        if activity is not None and beside is not None:
            activity.show(beside)

    def _start(self, call: Call, method: Method, args: tuple[Any, ...]) -> None:
        function = method.function
        assert function is not None
        try:
            try:
                self._blocking_id = call.id
                if method.concurrent and not inspect.iscoroutinefunction(function):
                    result: Any = self._in_thread(call, method, args)
                else:
                    result = function(*args, **call.request.kwargs)
            finally:
                self._blocking_id = 0  # inside the try, so that a signal just before it is caught below
        except Interrupted:
            response = Response(error=RequestCancelled("interrupted while it ran"))
        except BaseException as error:  # also SystemExit: a method must not end the worker
            response = Response(error=error)
        else:
            if inspect.isawaitable(result):
                self._start_task(call, result)
                return
            response = Response(result)
        self._finish(call, response)

    def _start_task(self, call: Call, result: Any) -> None:
        peer = call.session.peer
        caller = CALLER.set(None if peer is None else peer.number)  # the task has a copy of this context
        try:
            call.task = asyncio.Task(self._complete(call, result), loop=asyncio.get_running_loop(), **EAGER)
            self._blocking_id = 0
        except Interrupted:
            # The signal came at the moment when the method began to wait. The master's cancellation follows and ends
            # the task.
            self._blocking_id = 0
        finally:
            CALLER.reset(caller)

    async def _complete(self, call: Call, result: Any) -> None:
        try:
            try:
                self._blocking_id = call.id if EAGER else 0  # until it first waits it is a blocking method
                response = Response(await result)
            finally:
                call.task, self._blocking_id = None, 0  # inside the try: a signal just before it is caught below
        except (asyncio.CancelledError, Interrupted):
            response = Response(error=RequestCancelled("cancelled while it ran"))
        except BaseException as error:
            response = Response(error=error)
        self._finish(call, response)

    async def _in_thread(self, call: Call, method: Method, args: tuple[Any, ...]) -> Any:
        """Run a plain function at the same time as other methods. It gets its own thread, so an exception raised into
        it on cancellation hits no other call.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Response] = loop.create_future()

        def run() -> None:
            try:
                assert method.function is not None
                response = Response(method.function(*args, **call.request.kwargs))
            except BaseException as error:  # also an error that a future refuses, such as StopIteration
                response = Response(error=error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(response))

        thread = threading.Thread(target=run, name=f"concurrent {method.name}", daemon=True)
        thread.start()
        try:
            response = await ended
        except asyncio.CancelledError:
            if thread.ident is not None and thread.is_alive():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupted))
            raise
        return await awaited(response.unwrap())

    def _finish(self, call: Call, response: Response) -> None:
        if call is self.running:
            self.running = None
            self.on_turn_over()
            if self._activity is not None:
                self._activity.end()
            if self._waiting:
                # Not at once: first read what arrived meanwhile, such as a cancellation.
                asyncio.get_running_loop().call_soon(self.run_next)
        call.session.answer(call, response)


MAX_WAITING_REQUESTS = 1024
"""Maximum number of unanswered requests of a connection. Above this limit, the worker reads no requests from the
connection until half of them are answered."""
MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""Maximum bytes of answers that a master has not read. Above this limit, the worker reads and starts none of the
master's requests."""
STALLED_AFTER_S = 60.0
"""The worker closes the connection of a master that reads no bytes of waiting answers for this number of seconds.

The time is long, because a master that computes in its event loop does not read either, and its answers take at most
``MAX_QUEUED_BYTES``. The control connection shows earlier that a master is suspended or lost.
"""


class Session:
    """Reads and answers the requests of one data connection. The caller is a master or another worker.

    Args:
        sock: An authenticated socket.
        limits: The sizes that this side accepts.
        peer_limits: The sizes that the other side accepts.
        calls: Runs the requests.
        load: Makes an object from a tag and bytes; see ``loads``.
        begin: Called for a master that has the worker, with its id and whether it answers the questions of ``imports``.
        peers: The other workers and the requests that they may send.
        activity: The page that names the master that has the worker; None without a daemon, when every master may send
            requests.

    Attributes:
        is_held_back: Whether the master has too many unread answers. Until it has read them, no request of the session
            begins.
        is_guest: Whether the master of the session is a guest, which sends requests without a lease.
        peer: The admission of another worker, if one sends the requests; None for a master.
        closed: Done when the connection has ended.
    """

    def __init__(
        self,
        sock: socket.socket,
        limits: Limits,
        peer_limits: Limits,
        *,
        calls: Calls,
        load: Callable[..., Any],
        begin: Callable[[bytes, bool], None],
        peers: Peers,
        activity: Activity | None,
    ) -> None:
        self._calls = calls
        self._load = load
        self._begin = begin
        self._peers = peers
        self._activity = activity
        self._loop = asyncio.get_running_loop()
        self._pickle_results = False
        self._begun = activity is None  # without a daemon there are no leases
        self._lease: bytes | None = None  # the key of its lease; None before ``connect`` and for a guest
        self._reading_again: asyncio.Task[None] | None = None
        self._open: dict[int, Call] = {}
        self.is_guest = activity is None
        self.peer: Admitted | None = None
        self.is_held_back = False
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._connection = Connection(
            sock, self._on_frame, self._on_close, limits=limits, peer_limits=peer_limits, allocate=POOL.take
        )

    def refusal(self) -> LeaseError | None:
        """Return the reason why the session's requests do not run; None if its master has the lease or is a guest."""
        if self.peer is not None:
            return self._peers.refusal(self.peer)
        if self.is_guest:
            return None
        if self._lease is None:
            return _no_connect()
        if self._activity is not None and self._activity.holds(self._lease):
            return None
        return LeaseError("this master no longer has the worker", hint="connect again")

    @property
    def _had_lease(self) -> bool:
        """Whether a lease allowed the session: the lease of its master, or of the master that introduced its peer."""
        return self._lease is not None or self.peer is not None

    def end_without_lease(self) -> None:
        """End the connection if its master has lost the lease, or if another worker may no longer call this one."""
        if self._had_lease and self.refusal() is not None:
            self._connection.close()

    def cancel_all(self) -> None:
        """Cancel all open requests of this session, because nobody waits for their answers any more."""
        for call in list(self._open.values()):
            self._calls.cancel(call)

    def keep_answers(self) -> None:
        """Copy the arrays of answers that are still being sent, because the next method may change them."""
        if self.peer is None:  # a verb's result for a peer does not change
            self._connection.detach()

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == Kind.CANCEL:
            if frame.id in self._open:
                self._calls.cancel(self._open[frame.id])
            return
        if frame.kind != Kind.REQUEST:
            raise ProtocolError(f"a worker expects requests, not messages of kind {frame.kind}")
        if frame.id < 1:
            raise ProtocolError(f"a request has a number from 1, not {frame.id}")
        if frame.id in self._open:
            raise ProtocolError(f"request {frame.id} is open already")
        if self.peer is not None or frame.name == "greet":
            self._on_peer(frame)
            return
        if not self._begun and frame.name != "connect":
            self._answer(frame.id, Response(error=self.refusal() or _no_connect()))
            return
        try:
            args, kwargs = read_arguments(loads(frame.buffers, self._load))
        except (CodeMissing, NotPicklable) as error:
            if isinstance(error, CodeMissing):
                error.may_have_run = False
            self._answer(frame.id, Response(error=error))
            return
        if frame.name == "connect":
            refusal = self._connect(kwargs)
            if refusal is not None:
                self._answer(frame.id, Response(error=refusal))
                return
        self._submit(frame, frame.id, args, kwargs)

    def _submit(self, frame: Frame, shown_as: int, args: list[Any], kwargs: dict[str, Any]) -> None:
        timeout_s = frame.extra
        deadline = self._loop.time() + timeout_s if timeout_s is not None else None
        call = self._open[frame.id] = Call(shown_as, Request(frame.name, *args, **kwargs), self, deadline)
        if len(self._open) >= MAX_WAITING_REQUESTS:
            self._connection.pause_reading()
        self._calls.submit(call)

    def _on_peer(self, frame: Frame) -> None:
        """Accept a request that another worker sends. It contains only data, and does not wait for its turn among the
        master's requests.
        """
        try:
            args, kwargs = read_arguments(loads(frame.buffers, refuse_code))
        except NotPicklable as error:  # its type is not available on this machine
            self._answer(frame.id, Response(error=error.with_traceback(None)))
            return
        try:
            if frame.name == "greet" and self.peer is None and self._lease is None:
                facts, self.peer = self._peers.greet(*args)
                self._answer(frame.id, Response(facts))
                return
            self._peers.check(self.peer, frame.name, args)
        except DDLFError as error:
            self._answer(frame.id, Response(error=error.with_traceback(None)))
            return
        self._submit(frame, -frame.id, args, kwargs)  # negative: hidden from the daemon

    def _connect(self, facts: dict[str, Any]) -> LeaseError | None:
        """Record the sender of a request to begin a session, and remove lease and modules from the facts that it sent.
        Return the reason why its requests do not run, or None.
        """
        # This choice applies to this connection only, because another master may choose differently.
        self._pickle_results = bool(facts.get("pickle_results"))
        self.is_guest = self.is_guest or facts.get("guest") is True
        lease = facts.pop("lease", b"")
        # A free worker's page contains zeros. No master has this key.
        self._lease = None if self.is_guest else lease if isinstance(lease, bytes) and any(lease) else b""
        modules = facts.pop("modules", False) is True
        refusal = self.refusal()
        self._begun = refusal is None
        if self._begun and self._lease:
            self._begin(self._lease[:MASTER_ID_BYTES], modules)
        return refusal

    def tell(self, call: Call, facts: dict[str, Any]) -> None:
        """Send the caller a report about the progress of a call. Any thread may call this."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(self._tell, abs(call.id), facts)

    def _tell(self, id: int, facts: dict[str, Any]) -> None:
        if id in self._open and not self._connection.queued_bytes:  # the next report says more
            with contextlib.suppress(ConnectionError):
                self._connection.send(Kind.EVENT, id, DOING, dumps(facts))

    def answer(self, call: Call, response: Response) -> None:
        """Send the answer of a call, its result or error. Each call gets exactly one."""
        self._answer(abs(call.id), response)

    def _answer(self, id: int, response: Response) -> None:
        self._open.pop(id, None)
        if len(self._open) == MAX_WAITING_REQUESTS // 2 and not self.is_held_back:
            self._connection.resume_reading()
        connection, error = self._connection, response.error
        if connection.closed:
            return
        try:
            if error is None:
                connection.send(Kind.RESULT, id, "", dumps(response.result, self._dump))
        except ConnectionError:
            return
        except Exception as problem:  # the result cannot be sent, for any reason: every request is answered
            error = problem.with_traceback(None)  # the frames of this traceback belong to DDLF and the encoder
        if error is not None:
            if isinstance(error, RequestCancelled) and self._had_lease and self.refusal() is not None:
                connection.close()  # The call ended because the lease ended, not because the master cancelled it.
                return
            self._send_error(id, error)
        if connection.queued_bytes > MAX_QUEUED_BYTES and not self.is_held_back:
            self._hold_back()

    def _send_error(self, id: int, error: BaseException) -> None:
        if isinstance(error, MemoryError):
            traceback.clear_frames(error.__traceback__)  # arrays of the method: the answer needs memory, too
        try:
            self._connection.send(Kind.ERROR, id, "", dumps(describe(error)))
        except ConnectionError:
            pass
        except MemoryError:  # each call gets an answer: now the daemon's, which names the crash
            os.write(2, b"no memory was left to answer a call\n")
            os._exit(1)

    @property
    def _dump(self) -> Callable[[Any], Any]:
        """Return the function that encodes the objects in a result."""
        if self.peer is not None:
            return refuse_between_workers
        return dump_result if self._pickle_results else refuse_objects

    def _hold_back(self) -> None:
        self.is_held_back = True
        self._connection.pause_reading()
        self._reading_again = self._loop.create_task(self._wait_for_reader())

    async def _wait_for_reader(self) -> None:
        """Continue after the master has read half of the waiting answers. End the connection if the master reads
        nothing.
        """
        connection = self._connection
        while connection.queued_bytes > MAX_QUEUED_BYTES // 2:
            sent = connection.bytes_sent
            try:
                async with asyncio.timeout(STALLED_AFTER_S):
                    await connection.drain(leave=MAX_QUEUED_BYTES // 2)
            except TimeoutError:
                if connection.bytes_sent == sent:
                    _log_closing(
                        f"its master has read nothing for {STALLED_AFTER_S:g} s, {connection.queued_bytes:,} bytes wait for it"
                    )
                    connection.abort()
            except ConnectionError:
                break
        self.is_held_back = False
        if len(self._open) < MAX_WAITING_REQUESTS:
            connection.resume_reading()
        self._calls.run_next()

    def _on_close(self, reason: BaseException | None) -> None:
        if isinstance(reason, ProtocolError):
            _log_closing(str(reason))
        if not self.closed.done():
            self.closed.set_result(None)


def _no_connect() -> LeaseError:
    return LeaseError("a session begins with connect")


def _log_closing(reason: str) -> None:
    print(f"ddlf-worker: closed a connection: {reason}", file=sys.__stderr__, flush=True)
