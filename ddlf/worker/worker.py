"""The ``Worker`` that a method gets as ``self``: it hosts methods, variables and data, and answers requests. Runs in the executor.

Methods run on the event loop, one at a time unless added with ``concurrent=True``: a plain function runs inside the callback that read its request,
so a small call costs no task and no thread. A function that blocks makes this worker busy and harms nobody, because the daemon answers for it.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import ctypes
import difflib
import gc
import inspect
import keyword
import linecache
import os
import platform
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data.held import HeldData
from ddlf.errors import LeaseError, NotPicklable, ProtocolError, RequestCancelled, RequestTimeout
from ddlf.iworker import IWorker
from ddlf.net.buffers import POOL
from ddlf.net.connection import Connection
from ddlf.wire.code import CodeCache, CodeMissing, dump_result, unpickle
from ddlf.wire.frame import Frame, Limits
from ddlf.wire.messages import Kind, Request, Response, describe, read_arguments
from ddlf.wire.values import dumps, loads, refuse_objects
from ddlf.worker import methods as hosting
from ddlf.worker.activity import Activity
from ddlf.worker.imports import MasterFinder
from ddlf.worker.lease import SESSION_BYTES

MAX_WAITING_REQUESTS = 1024
"""A connection with this many unanswered requests is not read from until half are answered."""
MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""Answers that a master has not taken yet; above it none of its requests is read or started."""
STALLED_AFTER_S = 60.0
"""A master that takes nothing of such answers for so long loses the connection. Not sooner: one that computes in its event loop does not read either,
and its answers wait at no more cost than the bytes above. One that is stopped or gone is noticed by its silence on the control connection."""

EAGER: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}
"""A coroutine runs until it first waits before its task meets the event loop; one that never waits costs as little as a function."""


QUEUED = frozenset({"run_code", "load_mnist", "load_cifar10", "clean"})
"""Commands that wait for their turn as methods do: they run user code, or change what a running method uses."""
KEPT = frozenset({"set_variable", "delete_variable"})
"""Commands that wait for nobody and that a new executor would not know of."""


class Interrupted(BaseException):
    """Raised by a signal inside a method that blocks, so that a loop in plain Python ends."""


class Job:
    """One request on its way through the worker."""

    __slots__ = ("deadline", "id", "method", "name", "reply", "request", "session", "task")

    def __init__(
        self,
        id: int,
        request: Request,
        reply: Callable[[Response], None],
        deadline: float | None,
        session: Session | None = None,
    ) -> None:
        self.id = id
        self.session = session
        self.request = request
        self.reply = reply
        self.deadline = deadline
        self.method: hosting.Method | None = None
        self.task: asyncio.Task[Any] | None = None


class Worker(IWorker):
    """What user code sees of the worker that runs it.

    Args:
        session_dir: Folder for methods that live as long as the daemon.
        persist_dir: Folder for methods that outlive it.
        activity: The page in which the daemon sees what runs; None without a daemon.

    Attributes:
        id: Number of this worker in its cluster, from 1.
        N: Number of workers in the cluster.
        data: A dict for methods to keep things in.
        variables: The values set by ``set_variable``, by name.
        datasets: Loaded data sets of this run and the one before, by content hash or name; they serve later runs without loading again.
    """

    def __init__(self, session_dir: Path, persist_dir: Path, activity: Activity | None = None) -> None:
        self.id = 0
        self.N = 0
        self.data: dict[Any, Any] = {}
        self.variables: dict[str, Any] = {}
        self.datasets = HeldData()
        self._shown: list[str] = []
        unpickle = self._make_unpickle()
        self.methods = hosting.Methods(session_dir, persist_dir, unpickle)
        self._namespace: dict[str, Any] = {"self": self}
        self._activity = activity
        self._code = CodeCache(unpickle)
        self._running: Job | None = None
        self._waiting: deque[Job] = deque()
        self._blocking_id = 0
        self._name = os.urandom(8).hex()  # a master notices by it that this is a new executor
        self._sessions: set[Session] = set()
        self._compute: ThreadPoolExecutor | None = None
        self._finder: MasterFinder | None = None
        self._master, self._master_gives = b"", False
        self._commands: dict[str, Callable[..., Any]] = {
            name: getattr(self, name)
            for name in (
                *("connect", "close", "load_mnist", "load_cifar10", "add_method", "remove_method", "list_methods"),
                *("run_code", "set_variable", "get_variable", "delete_variable", "list_variables", "clean"),
            )
        }
        self._own_attributes = frozenset(vars(self)) | {"_own_attributes"}

    def _make_unpickle(self) -> Callable[[bytes], Any]:
        return unpickle

    def import_from_master(self, ask: Callable[..., Any]) -> None:
        """Let methods import what lies below the script's folder on the master; see ``imports``."""
        self._finder = MasterFinder(ask, lambda: self._running.id if self._running is not None else None)
        self._finder.enabled = self._may_ask_master
        sys.meta_path.append(self._finder)

    def _may_ask_master(self) -> bool:
        """Not for a guest: the modules are those of the master that has the worker."""
        asker = self._running.session if self._running is not None else None
        return self._master_gives and not (asker is not None and asker.is_guest)

    def begin_session(self, session: bytes, gives_modules: bool) -> None:
        """Note which master has the worker.

        Args:
            session: Its random bytes.
            gives_modules: Whether it answers what ``imports`` asks.
        """
        if session != self._master and self._finder is not None:
            self._finder.forget()
        self._master, self._master_gives = session, gives_modules

    # -- the request loop -------------------------------------------------------------------------------------------

    async def start(self, accept: Callable[[], Awaitable[tuple[socket.socket, Limits, Limits]]]) -> None:
        """Serve connections until cancelled.

        Args:
            accept: Waits for the next authenticated socket and returns it with this side's and the other side's limits.
        """
        async with asyncio.TaskGroup() as connections:
            while True:
                connections.create_task(self.control(*await accept()))

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._sessions)

    async def control(self, sock: socket.socket, limits: Limits, peer_limits: Limits) -> None:
        """The request loop of one connection: read requests, handle each, answer.

        Args:
            sock: Authenticated.
            limits: What this side accepts.
            peer_limits: What the other side accepts.
        """
        session = Session(self, sock, limits, peer_limits)
        self._sessions.add(session)
        await session.closed
        self._sessions.discard(session)
        POOL.clear()
        for job in list(session.jobs.values()):
            self.cancel(job)

    async def handle(self, request: Request, timeout_s: float | None = None) -> Response:
        """Handle one request as if it had come over a connection, and wait for its response."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Response] = loop.create_future()
        deadline = None if timeout_s is None else loop.time() + timeout_s

        def reply(response: Response) -> None:
            if not answer.done():
                answer.set_result(response)

        job = Job(-1, request, reply, deadline)
        self.submit(job)
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancel(job)
            raise

    def submit(self, job: Job) -> None:
        """Run a request now or when its turn comes; ``job.reply`` is called exactly once."""
        request = job.request
        try:
            if request.command == "run_method":
                job.method = hosting.once(request.args[0])
            elif request.command == "run":
                name = request.args[0]
                job.method = self.methods.get(getattr(name, "__name__", name))
            elif request.command in QUEUED:
                job.method = hosting.Method(request.command, self._commands[request.command])
            elif request.command in self._commands:
                if job.session is not None and not job.session.may_ask():
                    raise job.session.refusal()
                if self._activity is not None and request.command in KEPT:
                    self._activity.use()
                self._start(job, self._commands[request.command], request.args)
                return
            else:
                raise ProtocolError(f"unknown command {request.command!r}")
        except IndexError:
            job.reply(Response(error=ProtocolError(f"{request.command} without a method")))
        except Exception as error:
            job.reply(Response(error=error))
        else:
            held_back = job.session is not None and job.session.held_back
            if held_back or ((self._running is not None or self._waiting) and not job.method.concurrent):
                self._waiting.append(job)
                if self._running is None:  # those before it may wait for their master to read
                    asyncio.get_running_loop().call_soon(self._next)
            else:
                self._run(job)

    def cancel(self, job: Job) -> None:
        """Take a waiting job out of the queue, or cancel the task of a running one."""
        if job in self._waiting:
            self._waiting.remove(job)
            job.reply(Response(error=RequestCancelled("cancelled before it started")))
        elif job.task is not None:
            # Not at once: a task that is cancelled before its first step never runs, and nobody would answer the request.
            asyncio.get_running_loop().call_soon(job.task.cancel)

    def _run(self, job: Job) -> None:
        method = job.method
        assert method is not None
        assert method.function is not None
        for session in self._sessions:
            session.keep_answers()
        if not method.concurrent:
            self._running = job
        if job.deadline is not None and asyncio.get_running_loop().time() > job.deadline:
            self._finish(
                job, Response(error=RequestTimeout("its time was over before its turn came", may_have_run=False))
            )
            return
        beside = None
        if self._activity is not None and job.id > 0:
            beside = self._activity.shown() if method.concurrent else None
            if method.concurrent:
                self._activity.begin_beside(job.id)
            self._activity.begin(job.id, method.name)
            # Asked after saying that it runs: the daemon asks first and then looks at what runs, so one of the two sees the other.
            cancelled = self._activity.is_to_end(job.id)
            asker = job.session
            replaced = asker is not None and asker.lease is not None and asker.lease != self._activity.lease
            if cancelled or replaced:
                if beside is not None:
                    self._activity.show(beside)
                refusal = RequestCancelled("cancelled before it started") if not asker or cancelled else asker.refusal()
                self._finish(job, Response(error=refusal))
                return
        args = job.request.args if job.request.command in QUEUED else job.request.args[1:]
        self._start(job, method.function, (self, *args) if method.takes_self else args)
        if beside is not None and self._activity is not None:
            self._activity.show(beside)

    def _start(self, job: Job, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            try:
                self._blocking_id = job.id
                if job.method is not None and job.method.concurrent and not inspect.iscoroutinefunction(function):
                    result: Any = self._in_thread(job, function, args)
                else:
                    result = function(*args, **job.request.kwargs)
            finally:
                self._blocking_id = 0  # in here, so that a signal just before it is caught below
        except Interrupted:
            response = Response(error=RequestCancelled("interrupted while it ran"))
        except BaseException as error:  # also SystemExit: a method must not end the worker
            response = Response(error=error)
        else:
            if inspect.isawaitable(result):
                self._start_task(job, result)
                return
            response = Response(result)
        self._finish(job, response)

    def _start_task(self, job: Job, result: Any) -> None:
        try:
            job.task = asyncio.Task(self._complete(job, result), loop=asyncio.get_running_loop(), **EAGER)
            self._blocking_id = 0
        except Interrupted:
            # It came in the moment in which the method began to wait. The master's cancellation, which follows, ends the task.
            self._blocking_id = 0

    async def _complete(self, job: Job, result: Any) -> None:
        try:
            try:
                self._blocking_id = job.id if EAGER else 0  # until it first waits it is a blocking method
                response = Response(await result)
            finally:
                job.task, self._blocking_id = None, 0  # in here, so that a signal just before it is caught below
        except (asyncio.CancelledError, Interrupted):
            response = Response(error=RequestCancelled("cancelled while it ran"))
        except BaseException as error:
            response = Response(error=error)
        self._finish(job, response)

    async def _in_thread(self, job: Job, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a plain function beside others. Each has a thread of its own: what is raised into it when it is cancelled hits nobody else."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Response] = loop.create_future()

        def run() -> None:
            try:
                response = Response(function(*args, **job.request.kwargs))
            except BaseException as error:  # also what cannot be raised into a future, as StopIteration
                response = Response(error=error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(response))

        thread = threading.Thread(target=run, name=f"concurrent {job.method.name if job.method else ''}", daemon=True)
        thread.start()
        try:
            response = await ended
        except asyncio.CancelledError:
            if thread.ident is not None and thread.is_alive():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupted))
            raise
        result = response.unwrap()
        return await result if inspect.isawaitable(result) else result

    def _finish(self, job: Job, response: Response) -> None:
        if self._activity is not None and (self.datasets or self._shown) and self._shown != [*self.datasets]:
            self._shown = [*self.datasets]
            self._activity.hold(len(self.datasets), self.datasets.nbytes)
        if job is self._running:
            self._running = None
            if self._activity is not None:
                self._activity.end()
            if self._waiting:
                # Not at once: what came meanwhile, a cancellation for instance, is read first.
                asyncio.get_running_loop().call_soon(self._next)
        job.reply(response)

    def _next(self) -> None:
        """Run the first of the waiting requests whose master reads its answers."""
        if self._running is not None:
            return
        for place, job in enumerate(self._waiting):
            if job.session is None or not job.session.held_back:
                del self._waiting[place]
                break
        else:
            return
        self._run(job)
        if job.method is not None and job.method.concurrent:  # after which nobody's turn ends
            asyncio.get_running_loop().call_soon(self._next)

    def end_sessions_without_lease(self) -> None:
        """End the connections of masters that no longer have this worker."""
        for session in list(self._sessions):
            if session.lease is not None and not session.may_ask():
                session.close()

    def interrupt(self, *_: Any) -> None:
        """Handle SIGINT: end the method it is meant for if that runs in this moment, and nothing else.

        A coroutine that waits is cancelled through its task; one that computes between two awaits is ended here.
        """
        id, job = self._blocking_id, self._running
        if job is not None and job.task is not None and asyncio.current_task(job.task.get_loop()) is job.task:
            id = job.id
        if self._activity is not None and id > 0 and self._activity.is_to_end(id):
            raise Interrupted

    def install_interrupt(self) -> None:
        """Take SIGINT for ``interrupt``; main thread only."""
        signal.signal(signal.SIGINT, self.interrupt)

    # -- what a master can ask for ----------------------------------------------------------------------------------

    async def connect(self, **session: Any) -> dict[str, Any]:
        """Begin a session.

        Args:
            session: ``id`` and ``N`` of this worker; ``threads``, for computation, or ``share``, the number of workers that share
                this machine's cores; ``pickle_results``, whether the master unpickles; ``lease``, its key; or ``guest``, who has none and
                changes nothing.

        Returns:
            Versions, process id and host name.
        """
        if not session.get("guest"):
            self.id = session.get("id", 0)
            self.N = session.get("N", 0)
            set_threads(session.get("threads") or max(1, cores() // session.get("share", 1)))
        return {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "pid": os.getpid(),
            "executor": self._name,
            "host": platform.node(),
            "cores": cores(),
            "threads": int(os.environ.get("OMP_NUM_THREADS", 0)),
        }

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
        return self.methods.add(method, name, persist, concurrent)

    async def remove_method(self, method: str | Callable[..., Any]) -> None:
        """Forget a hosted method."""
        self.methods.remove(getattr(method, "__name__", method))  # type: ignore[arg-type]

    async def list_methods(self) -> list[str]:
        """Names of the hosted methods."""
        return self.methods.names()

    async def run(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a hosted method of this worker, from inside another method. It does not wait for its turn: the caller has it."""
        found = self.methods.get(getattr(method, "__name__", method))  # type: ignore[arg-type]
        return await self._call(found, args, kwargs)

    async def run_method(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function with this worker, from inside another method."""
        return await self._call(hosting.once(method), args, kwargs)

    async def _call(self, method: hosting.Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert method.function is not None
        result = method.function(*((self, *args) if method.takes_self else args), **kwargs)
        return await result if inspect.isawaitable(result) else result

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
        self.data, self.variables, self.datasets = {}, {}, HeldData()
        self._namespace.clear()
        self._namespace["self"] = self
        if "keras" in sys.modules:
            await self.compute(sys.modules["keras"].utils.clear_session)
        gc.collect()

    async def shutdown(self) -> None:
        """End this process; its daemon decides what follows."""
        asyncio.get_running_loop().call_soon(sys.exit, 0)

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


class Session:
    """One connection's requests and answers.

    Attributes:
        jobs: Its open requests, by id.
        lease: The key of the lease under which it asks; None before ``connect`` and for a guest.
        held_back: Whether its master has too many answers to read.
        closed: Done when the connection has ended.
    """

    def __init__(self, worker: Worker, sock: socket.socket, limits: Limits, peer_limits: Limits) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._pickle_results = False
        self._guest = worker._activity is None  # without a daemon there are no leases
        self._holds = worker._activity.holds if worker._activity is not None else bool
        self._begun = self._guest
        self.lease: bytes | None = None
        self.held_back = False
        self._reading_again: asyncio.Task[None] | None = None
        self.jobs: dict[int, Job] = {}
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._connection = Connection(
            sock, self._on_frame, self._on_close, limits=limits, peer_limits=peer_limits, allocate=POOL.take
        )

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == Kind.CANCEL:
            if frame.id in self.jobs:
                self._worker.cancel(self.jobs[frame.id])
            return
        if frame.kind != Kind.REQUEST:
            raise ProtocolError(f"a worker expects requests, not messages of kind {frame.kind}")
        if frame.id < 1:
            raise ProtocolError(f"a request has a number from 1, not {frame.id}")
        if frame.id in self.jobs:
            raise ProtocolError(f"request {frame.id} is open already")
        if not self._begun and frame.name != "connect":
            self._answer(frame.id, Response(error=self.refusal()))
            return
        try:
            args, kwargs = read_arguments(loads(frame.buffers, self._worker._code.load))
        except (CodeMissing, NotPicklable) as error:
            if isinstance(error, CodeMissing):
                error.may_have_run = False
            self._answer(frame.id, Response(error=error))
            return
        if frame.name == "connect":
            # Of this connection alone: another master may have chosen otherwise.
            self._pickle_results = bool(kwargs.get("pickle_results"))
            self._guest = self._guest or kwargs.get("guest") is True
            lease = kwargs.pop("lease", b"")
            # A free worker's page holds zeros, which are nobody's key.
            self.lease = None if self._guest else lease if isinstance(lease, bytes) and any(lease) else b""
            self._begun = self.may_ask()
            if not self._begun:
                self._answer(frame.id, Response(error=self.refusal()))
                return
            modules = kwargs.pop("modules", False) is True
            if self.lease:
                self._worker.begin_session(self.lease[:SESSION_BYTES], modules)
        timeout_s = frame.extra
        deadline = self._loop.time() + timeout_s if timeout_s is not None else None
        job = Job(frame.id, Request(frame.name, *args, **kwargs), lambda r: self._answer(frame.id, r), deadline, self)
        self.jobs[frame.id] = job
        if len(self.jobs) >= MAX_WAITING_REQUESTS:
            self._connection.pause_reading()
        self._worker.submit(job)

    @property
    def is_guest(self) -> bool:
        """Whether its master asks without having the worker."""
        return self._guest

    def may_ask(self) -> bool:
        """Whether requests of this connection are to be run: its master has the lease, or it is a guest."""
        return self._guest or (self.lease is not None and self._holds(self.lease))

    def refusal(self) -> LeaseError:
        """What a request gets that is not to be run."""
        if self.lease is None:
            return LeaseError("a session begins with connect")
        return LeaseError("this master does not have the worker any more", hint="connect again")

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _hold_back(self) -> None:
        self.held_back = True
        self._connection.pause_reading()
        self._reading_again = self._loop.create_task(self._wait_for_reader())

    async def _wait_for_reader(self) -> None:
        """Go on when the master has read half of what waits for it; end the connection when it does not read at all."""
        connection = self._connection
        while connection.queued_bytes > MAX_QUEUED_BYTES // 2:
            sent = connection.bytes_sent
            try:
                async with asyncio.timeout(STALLED_AFTER_S):
                    await connection.drain(leave=MAX_QUEUED_BYTES // 2)
            except TimeoutError:
                if connection.bytes_sent == sent:
                    print(
                        f"ddlf-worker: closed a connection: its master has read nothing for {STALLED_AFTER_S:g} s, "
                        f"{connection.queued_bytes:,} bytes wait for it",
                        file=sys.stderr,
                        flush=True,
                    )
                    connection.abort()
            except ConnectionError:
                break
        self.held_back = False
        if len(self.jobs) < MAX_WAITING_REQUESTS:
            connection.resume_reading()
        self._worker._next()

    def _answer(self, id: int, response: Response) -> None:
        self.jobs.pop(id, None)
        if len(self.jobs) == MAX_WAITING_REQUESTS // 2 and not self.held_back:
            self._connection.resume_reading()
        connection, error = self._connection, response.error
        if connection.closed:
            return
        try:
            if error is None:
                dump = dump_result if self._pickle_results else refuse_objects
                connection.send(Kind.RESULT, id, "", dumps(response.result, dump))
        except ConnectionError:
            return
        except Exception as problem:  # the result cannot be sent, whatever the reason: every request is answered
            error = problem.with_traceback(None)  # its frames are ours and those of the encoder
        if error is not None:
            if isinstance(error, RequestCancelled) and self.lease is not None and not self.may_ask():
                self.close()  # the end of its lease ended it, not its master
                return
            with contextlib.suppress(ConnectionError):
                connection.send(Kind.ERROR, id, "", dumps(describe(error)))
        if connection.queued_bytes > MAX_QUEUED_BYTES and not self.held_back:
            self._hold_back()

    def keep_answers(self) -> None:
        """Let the arrays of answers that are still being sent change: the method that runs next may do that."""
        self._connection.detach()

    def _on_close(self, reason: BaseException | None) -> None:
        if isinstance(reason, ProtocolError):
            print(f"ddlf-worker: closed a connection: {reason}", file=sys.stderr, flush=True)
        if not self.closed.done():
            self.closed.set_result(None)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(threads: int) -> None:
    """Bound the threads of the numeric libraries. Only has effect before they are imported; an own setting is respected.

    Args:
        threads: For each of them, at least 1.
    """
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        os.environ.setdefault(name, str(threads))
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
