"""Runs calls one after another and answers each of them exactly once. Runs in the executor, on its event loop.

Methods run one at a time unless they are concurrent. A plain function runs inside the callback that read its request,
so a small call costs no task and no thread. A function that blocks makes only this worker busy, because the daemon
still answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ddlf.errors import RequestCancelled, RequestTimeout
from ddlf.rpc.iworker import awaited
from ddlf.rpc.messages import Request, Response
from ddlf.worker.activity import Activity
from ddlf.worker.methods import Method

EAGER: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}
"""A coroutine runs until it first waits before its task meets the event loop. A coroutine that never waits costs as
little as a function.
"""


class Interrupted(BaseException):
    """A signal raises this inside a blocking method, so that a loop in plain Python ends."""


class Asker(Protocol):
    """The sender of requests, as far as their order depends on it."""

    held_back: bool
    """Whether too many answers wait for it to read them. No request of it begins meanwhile."""

    def refusal(self) -> Exception | None:
        """Return why its requests are not run; None if they are run."""

    def answer(self, call: Call, response: Response) -> None:
        """Send the one answer of a call."""

    def keep_answers(self) -> None:
        """Copy the arrays of answers that are still being sent, because the next method may change them."""


class Call:
    """One request on its way through the worker.

    Args:
        id: Number of the request; below 1 if the daemon must not see it.
        request: The command and its arguments.
        asker: Gets the answer.
        deadline: Last time, on the event loop's clock, when the request may start; None means no limit.

    Attributes:
        method: The method that it runs, once that is known.
        task: The task that runs it, if it awaits.
    """

    __slots__ = ("asker", "deadline", "id", "method", "request", "task")

    def __init__(self, id: int, request: Request, asker: Asker, deadline: float | None = None) -> None:
        self.id = id
        self.request = request
        self.asker = asker
        self.deadline = deadline
        self.method: Method | None = None
        self.task: asyncio.Task[Any] | None = None


class Calls:
    """The calls of one worker.

    Args:
        worker: The object that methods receive as ``self``.
        find: Returns the method for a request and its asker. An exception from it is the answer.
        askers: All present askers.
        activity: The page in which the daemon sees the running method; None without a daemon.

    Attributes:
        running: The call whose turn it is; None between two calls.
        on_turn_over: Called at the end of each turn, before the answer.
    """

    def __init__(
        self,
        worker: object,
        find: Callable[[Request, Asker], Method],
        askers: Iterable[Asker] = (),
        activity: Activity | None = None,
    ) -> None:
        self.running: Call | None = None
        self.on_turn_over: Callable[[], None] = lambda: None
        self._worker = worker
        self._find = find
        self._askers = askers
        self._activity = activity
        self._waiting: deque[Call] = deque()
        self._blocking_id = 0

    def submit(self, call: Call) -> None:
        """Run a call now or when its turn comes. It is answered exactly once."""
        try:
            call.method = method = self._find(call.request, call.asker)
        except Exception as error:
            call.asker.answer(call, Response(error=error))
            return
        if method.at_once:
            self._run_at_once(call, method)
        elif call.asker.held_back or ((self.running is not None or self._waiting) and not method.concurrent):
            self._waiting.append(call)
            if self.running is None:  # earlier calls may wait for their master to read
                asyncio.get_running_loop().call_soon(self.go_on)
        else:
            self._run(call, method)

    def cancel(self, call: Call) -> None:
        """Remove a waiting call from the queue, or cancel the task of a running one."""
        if call in self._waiting:
            self._waiting.remove(call)
            call.asker.answer(call, Response(error=RequestCancelled("cancelled before it started")))
        elif call.task is not None:
            # Not at once: a task that is cancelled before its first step never runs, and the request would get no
            # answer.
            asyncio.get_running_loop().call_soon(call.task.cancel)

    def go_on(self) -> None:
        """Run the first waiting call whose asker reads its answers."""
        if self.running is not None:
            return
        for place, call in enumerate(self._waiting):
            if not call.asker.held_back:
                del self._waiting[place]
                break
        else:
            return
        assert call.method is not None
        self._run(call, call.method)
        if call.method.concurrent:  # a concurrent call ends no turn
            asyncio.get_running_loop().call_soon(self.go_on)

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
        refusal = call.asker.refusal()
        if refusal is not None:
            call.asker.answer(call, Response(error=refusal))
            return
        if method.kept and self._activity is not None:
            self._activity.use()
        self._start(call, method, call.request.args)

    def _run(self, call: Call, method: Method) -> None:
        for asker in self._askers:
            asker.keep_answers()
        if not method.concurrent:
            self.running = call
        if call.deadline is not None and asyncio.get_running_loop().time() > call.deadline:
            late = RequestTimeout("its time was over before its turn came", may_have_run=False)
            self._finish(call, Response(error=late))
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
            refusal = RequestCancelled("cancelled before it started") if cancelled else call.asker.refusal()
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
        try:
            call.task = asyncio.Task(self._complete(call, result), loop=asyncio.get_running_loop(), **EAGER)
            self._blocking_id = 0
        except Interrupted:
            # The signal came at the moment when the method began to wait. The master's cancellation follows and ends
            # the task.
            self._blocking_id = 0

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
                asyncio.get_running_loop().call_soon(self.go_on)
        call.asker.answer(call, response)
