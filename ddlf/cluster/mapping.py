"""``Cluster.map``: one function for many items, each on a free worker. Runs on the master."""

from __future__ import annotations

import asyncio
import itertools
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Sequence
from typing import Any

from ddlf.cluster.dispatch import Behaviour, Dispatch, Job
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import DDLFError, ExecutorCrashed, NotPicklable, RemoteError, ResultNotData, WorkerLost
from ddlf.events import Event, HowMapped, MapBegan, MapEnded, MapMoved
from ddlf.rpc.code import Pickled, pickle_object
from ddlf.rpc.iworker import checked_function
from ddlf.rpc.messages import Request
from ddlf.worker.timing import Timed

BUFFER_BYTES = 64 * 1024 * 1024
"""Limit for the bytes of items and results that are in transit or wait for the consumer, if their size is known."""
MOST_UNTAKEN = 2000
"""Limit for the number of items that are in transit or wait for the consumer."""
UNSENT = 2
"""Number of items that the map reads from its source before a worker is free for them."""
TOLD_S = 0.2
"""Minimum seconds between two events about a map's progress."""
NAMED = (int, float, complex, str, bytes, type(None))
"""Types of items that errors show by value. For other types, errors show the name of the type."""

_numbers = itertools.count(1)


class Function:
    """A function as it was when this object was made, to call it on any worker.

    Args:
        function: Any callable that can be sent.
        dispatch: Dispatch of the cluster.
        behaviour: Options of the calls.
        workers: The workers that may do the calls; None allows all, also workers that join later.

    Raises:
        TypeError: The function is not callable.
        NotPicklable: The function cannot be sent.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        dispatch: Dispatch,
        behaviour: Behaviour,
        workers: list[ProxyWorker] | None = None,
    ) -> None:
        checked_function(function, "a map")
        self.dispatch = dispatch
        self._timed = Timed(function, behaviour.per_worker > 1)
        try:
            self._pickled = Pickled(self._timed)
        except NotPicklable:
            pickle_object(function)  # raises an error that names the part that cannot be sent
            raise
        self.name = self._timed.__name__
        self.job = Job(dispatch.habit(self._pickled.address), behaviour, workers)

    async def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function on a free worker; ``Dispatch.run`` describes the errors."""
        request = Request("run_method", self._timed, *args, **kwargs)
        request.pickle = self._pickle
        try:
            return await self.dispatch.run(self.job, request)
        except (ResultNotData, NotPicklable) as error:
            if error.worker:  # the worker returned [seconds, result], so positions in the result begin with [1]
                error.message = error.message.replace(" (at [1] of the value)", "").replace("(at [1]", "(at ")
            raise
        except (ExecutorCrashed, WorkerLost) as error:
            if error.may_have_run and not self.job.idempotent:
                error.hint = "options(idempotent=True) repeats such items on another worker"
            raise

    def _pickle(self, value: Any) -> bytes:
        return self._pickled if value is self._timed else pickle_object(value)


class Tally:
    """Counts the progress of a map, and runs each of its items.

    Args:
        function: Function of the map.
        emit: Receives the map's events.
        total: Number of items; None if unknown.
        workers: The workers that may do the items, a list that may grow.
        keep_errors: Whether an item's error replaces its result, instead of ending the map.

    Attributes:
        done: Number of items with a result so far.
        failed: Number of items with an error so far.
    """

    def __init__(
        self,
        function: Function,
        emit: Callable[[Event], None],
        total: int | None,
        workers: Sequence[object],
        *,
        keep_errors: bool,
    ) -> None:
        self.done = 0
        self.failed = 0
        self.total = total
        self.function = function
        self.keep_errors = keep_errors
        self._emit = emit
        self._workers = workers
        self._names: dict[str, Any] = {"map": next(_numbers), "function": function.name}
        self._emitted_at = 0.0
        self._begin: float | None = None
        self._has_ended = False

    @property
    def begun(self) -> bool:
        """Whether the map has begun."""
        return self._begin is not None

    @property
    def window(self) -> int:
        """Maximum number of items that may be in transit or wait for the consumer."""
        job = self.function.job
        least = job.per_worker * len(self._workers) + UNSENT
        size = job.habit.bytes
        return 2 * least if size is None else max(least, min(MOST_UNTAKEN, int(BUFFER_BYTES / max(size, 1))))

    def begin(self) -> None:
        """Begin the map, and emit ``MapBegan``."""
        self._begin = self._emitted_at = time.monotonic()
        self.function.dispatch.find_workers()
        facts: dict[str, Any] = {"workers": len(self._workers), "per_worker": self.function.job.per_worker}
        self._emit(MapBegan(**self._names, items=self.total, **facts))

    async def item(self, number: int, args: tuple[Any, ...]) -> Any:
        """Compute one item of the map on a free worker, and return its result.

        Args:
            number: Number of the item, from 0.
            args: Arguments of the function.

        Raises:
            DDLFError: The item failed. The text and ``item_index`` name the item.
        """
        try:
            result = await self.function(*args)
        except DDLFError as error:
            self.failed += 1
            error.item_index = number
            error.message = f"item {number} ({', '.join(map(_brief, args))}): {error.message}"
            if isinstance(error, RemoteError):
                error = error.with_traceback(None)  # its text has the worker's traceback; the master's adds nothing
            if not self.keep_errors:
                raise error from error.__cause__
            return error
        else:
            self.done += 1
            return result
        finally:
            now = time.monotonic()
            if now - self._emitted_at >= TOLD_S:
                self._emitted_at = now
                self._emit(MapMoved(**self._names, done=self.done, failed=self.failed))

    def end(self, error: BaseException | None = None) -> None:
        """End the map, and emit ``MapEnded``. Safe to call again.

        Args:
            error: The error that ended the map; None if all items are complete.
        """
        if self._begin is None or self._has_ended:
            return
        self._has_ended = True
        how: HowMapped = "complete" if error is None else "failed" if isinstance(error, Exception) else "cancelled"
        self._emit(
            MapEnded(
                **self._names,
                how=how,
                done=self.done,
                failed=self.failed,
                seconds=time.monotonic() - self._begin,
                compute_s=self.function.job.compute_s,
                why=str(error) if how == "failed" else "",
            )
        )


class Map:
    """The results of a function for each of many items. Nothing runs before the first await or iteration.

    A map can be used once. ``await`` it for a list of all results, or take them one by one with ``async for``. An
    iteration takes items from their source as fast as you take results, so there may be any number of items. If you
    leave the loop early, all running items are cancelled.

    Args:
        tally: Tally of the map.
        source: Arguments of each item, as tuples. A synchronous source that blocks also blocks the event loop.
        ordered: Whether results come in the order of the items, or in the order of completion.
    """

    def __init__(
        self,
        tally: Tally,
        source: Iterable[tuple[Any, ...]] | AsyncIterable[tuple[Any, ...]],
        *,
        ordered: bool,
    ) -> None:
        self._tally = tally
        self._job = tally.function.job
        self._source = source
        self._ordered = ordered
        self._open: set[asyncio.Task[Any]] = set()
        self._next: asyncio.Queue[asyncio.Task[Any] | Exception | None] = asyncio.Queue()
        self._untaken = 0
        self._room: asyncio.Future[None] | None = None
        self._is_unlimited = False

    def __repr__(self) -> str:
        return f"<map of {self._tally.function.name!r}>"

    def __del__(self) -> None:
        if not self._tally.begun:
            warnings.warn(f"{self!r} was neither awaited nor iterated over: nothing ran", RuntimeWarning, stacklevel=2)

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._gather().__await__()

    async def _gather(self) -> list[Any]:
        self._is_unlimited = True  # the list keeps all results anyway
        return [result async for result in self]

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        self._job.on_sent = self._go_on
        self._tally.begin()
        feeding = asyncio.get_running_loop().create_task(self._feed())
        has_ended = False
        error: BaseException | None = None
        try:
            while not has_ended or self._untaken:
                task = await self._next.get()
                if not isinstance(task, asyncio.Task):
                    has_ended, error = True, task
                    continue
                result = await task
                self._untaken -= 1
                self._go_on()
                yield result
            if error is not None:
                raise error
        except BaseException as reason:
            error = reason
            raise
        finally:
            self._tally.end(error)
            feeding.cancel()
            for task in self._open:
                task.cancel()
            await asyncio.gather(feeding, *self._open, return_exceptions=True)

    async def _feed(self) -> None:
        """Take items from their source and start their calls, as long as fewer than ``Tally.window`` are open."""
        error = None
        numbers = itertools.count()
        try:
            if isinstance(self._source, AsyncIterable):
                async for args in self._source:
                    await self._push(next(numbers), args)
            else:
                for args in self._source:
                    await self._push(next(numbers), args)
        except Exception as failure:
            error = failure
        self._next.put_nowait(error)

    async def _push(self, number: int, args: tuple[Any, ...]) -> None:
        task = asyncio.get_running_loop().create_task(self._tally.item(number, args))
        self._untaken += 1
        self._open.add(task)
        task.add_done_callback(self._on_task_end)
        if self._ordered:
            self._next.put_nowait(task)
        await asyncio.sleep(0)  # lets the new task ask for a worker first
        while not self._has_room():
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def _has_room(self) -> bool:
        return self._job.waiting < UNSENT and (self._is_unlimited or self._untaken < self._tally.window)

    def _go_on(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._open.discard(task)
        if not self._ordered:
            self._next.put_nowait(task)
        if not task.cancelled():
            task.exception()  # retrieve it, because another task's error may have ended the map


def items_of(iterables: Sequence[Any]) -> tuple[Any, int | None]:
    """Return the arguments for each item as tuples, and the number of items if it is known.

    There is one iterable for each parameter, or a single asynchronous one.
    """
    if len(iterables) == 1 and isinstance(iterables[0], AsyncIterable):
        return _tuples(iterables[0]), None
    if not iterables:
        raise TypeError("map takes a function and its items, got no items")
    for items in iterables:
        if not isinstance(items, Iterable) and not hasattr(items, "__getitem__"):
            several = " as one of several" if isinstance(items, AsyncIterable) else ""
            raise TypeError(f"map takes items to iterate over, got {type(items).__name__}{several}")
    lengths = [len(items) if hasattr(items, "__len__") else None for items in iterables]
    known_lengths = [length for length in lengths if length is not None]
    return zip(*iterables, strict=False), min(known_lengths) if len(known_lengths) == len(lengths) else None


def untupled(source: Any) -> Any:
    """Convert the items of ``items_of`` for ``starmap``: each item, which is a tuple of arguments itself, becomes the
    arguments.
    """
    if isinstance(source, AsyncIterable):
        return _untupled(source)
    return (_arguments(args) for (args,) in source)


async def _untupled(source: AsyncIterable[Any]) -> AsyncGenerator[tuple[Any, ...], None]:
    async for (args,) in source:
        yield _arguments(args)


def _arguments(item: Any) -> tuple[Any, ...]:
    if not isinstance(item, Iterable):
        raise TypeError(f"starmap takes items that are tuples of arguments, got {_brief(item)}")
    return tuple(item)


async def _tuples(items: AsyncIterable[Any]) -> AsyncGenerator[tuple[Any, ...], None]:
    async for item in items:
        yield (item,)


def _brief(value: Any) -> str:
    if not isinstance(value, NAMED):
        return type(value).__name__
    return repr(value[:40] if isinstance(value, str | bytes) else value)
