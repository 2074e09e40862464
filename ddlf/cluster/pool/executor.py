"""Workers for synchronous programs, as a ``concurrent.futures.Executor``. Runs on the master, in any thread.

A cluster runs on its event loop, which belongs to another thread. A pool starts its calls there, and waits for them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from ddlf.cluster.background_loop import shared_loop, wait_on
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.mapping import Tally, items_of, untupled
from ddlf.errors import ConfigError
from ddlf.worker.machine import cores

T = TypeVar("T")

UNSENT = 16
"""Number of items that a map reads from its source before a worker is free for them. It is larger than in ``mapping``,
because the event loop, in another thread, notices new items late."""


class Pool(concurrent.futures.Executor):
    """Workers for synchronous programs. Each call runs on a free worker.

    It is a ``concurrent.futures.Executor``, so you can pass it to code that expects one.

    Args:
        workers: Number of new workers on this machine, by default one for each core; or a cluster. The pool connects a
            cluster at the first call and closes it at the end, unless the cluster is already connected.
        options: Arguments of ``Cluster`` for new workers. ``pickle_results`` is true by default, because the workers
            belong to this program.

    Attributes:
        cluster: The cluster of the workers.
        cluster: The workers.

    Example::

        with ddlf.Pool(4) as pool:
            for result in pool.map(function, items):
                print(result)
    """

    def __init__(self, workers: int | Cluster | None = None, **options: Any) -> None:
        if isinstance(workers, Cluster):
            if options:
                raise ConfigError(f"{', '.join(options)} has no effect on a cluster", hint="pass it to Cluster instead")
            self.cluster = workers
        else:
            count = cores() if workers is None else workers
            self.cluster = Cluster.local(count, **{"pickle_results": True, **options})
        self._owns = self.cluster.loop is None
        self._loop = self.cluster.loop or shared_loop()
        self._state = _State()

    def __repr__(self) -> str:
        return f"Pool({self.cluster!r})"

    def options(self, **options: Any) -> Self:
        """Return a view of this pool with other options, which ``Cluster.options`` describes."""
        view = copy.copy(self)
        view.cluster = self.cluster.options(**options)
        return view

    # -- calls ------------------------------------------------------------------------------------------------------

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function once, on a free worker.

        Returns:
            A future. Its ``cancel`` also ends a running call.
        """
        return self._start(self._submit(function, args, kwargs))

    async def _submit(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        await self._connect()
        return await self.cluster.submit(function, *args, **kwargs)

    def map(
        self,
        function: Callable[..., Any],
        /,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        ordered: bool = True,
    ) -> Iterator[Any]:
        """Call a function once for each item, each time on a free worker. ``Cluster.map`` describes the errors.

        Args:
            function: A plain or async function.
            iterables: The items, not asynchronous. The thread that takes the results also takes the items, at the same
                pace.
            timeout: Seconds from now until a missing result raises ``TimeoutError``.
            chunksize: An argument of the standard library's executors. It has no effect, and a value above 1 causes a
                warning, because short items are sent ahead of their turn in any case.
            ordered: Whether results come in the order of the items, or in the order of completion.

        Returns:
            The results one by one. The map begins when you ask for the first result, or else at the end of the pool.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be 1 or more")  # the text of the standard library
        if chunksize > 1:
            warnings.warn(
                "chunksize has no effect, because short items are sent ahead of their turn. Pass several very short items to one call",
                stacklevel=2,
            )
        source, total = items_of(iterables)
        return self._results(function, source, total, timeout, ordered)

    def starmap(
        self,
        function: Callable[..., Any],
        items: Iterable[Iterable[Any]],
        /,
        *,
        timeout: float | None = None,
        ordered: bool = True,
    ) -> Iterator[Any]:
        """Call a function like ``map`` does, for items that are tuples of arguments."""
        source, total = items_of([items])
        return self._results(function, untupled(source), total, timeout, ordered)

    def joblib(self) -> Any:
        """Return this pool as a backend of joblib: ``with joblib.parallel_config(backend=pool.joblib()): ...``.

        Raises:
            ModuleNotFoundError: joblib is not installed.
        """
        from ddlf.cluster.pool.joblib import PoolBackend

        return PoolBackend(self, self.cluster.N * self.cluster.behaviour.per_worker)

    def _results(
        self,
        function: Callable[..., Any],
        source: Iterable[tuple[Any, ...]],
        total: int | None,
        timeout: float | None,
        ordered: bool,
    ) -> Iterator[Any]:
        self._state.check_open()
        deadline = None if timeout is None else time.monotonic() + timeout
        key = object()
        results = self._take(key, function, source, total, deadline, ordered)
        self._state.unbegun[key] = results
        return results

    def _take(
        self,
        key: object,
        function: Callable[..., Any],
        source: Iterable[tuple[Any, ...]],
        total: int | None,
        deadline: float | None,
        ordered: bool,
    ) -> Iterator[Any]:
        self._state.unbegun.pop(key, None)
        tally = self._wait_for(self._begin(function, total))
        results = _Results(ordered, deadline)
        tally.function.job.on_sent = results.on_sent
        error: BaseException | None = None
        try:
            for number, args in enumerate(source):
                results.add(self._start(tally.item(number, args)))
                yield from results.results_until(lambda: results.has_room(tally.window))
            yield from results.results_until(lambda: not results.open)
        except BaseException as reason:
            error = reason
            raise
        finally:
            for future in results.open:
                future.cancel()
            self._loop.call_soon_threadsafe(tally.end, error)

    async def _begin(self, function: Callable[..., Any], total: int | None) -> Tally:
        await self._connect()
        tally = self.cluster.tally(function, total)
        tally.begin()
        return tally

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the cluster's event loop."""
        try:
            with self._state.lock:
                self._state.check_open()
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
                self._state.open.add(future)
        except RuntimeError:
            coroutine.close()
            raise
        future.add_done_callback(self._state.open.discard)
        return future

    def _wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return wait_on(self._loop, coroutine, "ddlf.Pool", "await on the cluster itself, as in await cluster.map(...)")

    # -- life -------------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        if self._owns and self.cluster.loop is None:
            await self.cluster.connect()

    def __enter__(self) -> Self:
        self._wait_for(self._connect())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the submitted calls, then end the workers. After an error, do not wait."""
        self.shutdown(cancel_futures=kind is not None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse new calls, and release the workers when earlier calls have ended. Safe to call again.

        Args:
            wait: Whether to wait for the end of earlier calls.
            cancel_futures: Whether to cancel earlier calls, also running ones.
        """
        state = self._state
        if cancel_futures:
            state.unbegun.clear()
        while wait and state.unbegun:
            deque(next(iter(state.unbegun.values())), maxlen=0)
        with state.lock:
            state.closed = True
            left = list(state.open)
        if cancel_futures:
            for future in left:
                future.cancel()
        if wait:
            try:
                concurrent.futures.wait(left)
            finally:
                self._wait_for(self._close([]))
        else:
            asyncio.run_coroutine_threadsafe(self._close(left), self._loop)

    async def _close(self, left: list[Future[Any]]) -> None:
        await asyncio.gather(*map(asyncio.wrap_future, left), return_exceptions=True)
        if self._owns:
            await self.cluster.close()


class _State:
    """The state that a pool shares with its views, the pools that ``options`` returns.

    Attributes:
        open: Calls that have not ended.
        unbegun: Iterators of maps whose first result has not been requested.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closed = False
        self.open: set[Future[Any]] = set()
        self.unbegun: dict[object, Iterator[Any]] = {}

    def check_open(self) -> None:
        if self.closed:
            raise RuntimeError("cannot schedule new futures after shutdown")  # the text of the standard library


class _Results:
    """Results that another thread produces and this thread takes.

    Args:
        ordered: Whether to take results in the order of ``add``.
        deadline: Latest time to wait until, by ``time.monotonic``; None waits indefinitely.

    Attributes:
        open: The calls whose results have not been taken, in the order of ``add``.
    """

    def __init__(self, ordered: bool, deadline: float | None) -> None:
        self.open: OrderedDict[Future[Any], None] = OrderedDict()
        self._ordered = ordered
        self._deadline = deadline
        self._done: deque[Future[Any]] = deque()  # stays empty if results are ordered
        self._added = self._sent = 0  # each is written by one thread only
        self._news = threading.Event()

    def add(self, future: Future[Any]) -> None:
        self._added += 1
        self.open[future] = None
        future.add_done_callback(self._on_done)

    def on_sent(self) -> None:
        """Record that another call has been sent to a worker."""
        self._sent += 1
        self._news.set()

    def _on_done(self, future: Future[Any]) -> None:
        if not self._ordered:
            self._done.append(future)
        self._news.set()

    def has_room(self, window: int) -> bool:
        """Return whether another call may start, because fewer than ``window`` results are open."""
        return self._added - self._sent < UNSENT and len(self.open) < window

    def results_until(self, satisfied: Callable[[], bool]) -> Iterator[Any]:
        """Yield the available results, and further ones until a condition is satisfied.

        Raises:
            TimeoutError: A result does not arrive in time.
        """
        while True:
            if future := self._ready():
                del self.open[future]
                yield future.result()
            elif satisfied():
                return
            elif self._news.wait(None if self._deadline is None else max(0.0, self._deadline - time.monotonic())):
                self._news.clear()
            else:
                raise TimeoutError("a result did not arrive in time")

    def _ready(self) -> Future[Any] | None:
        if not self._ordered:
            return self._done.popleft() if self._done else None
        first = next(iter(self.open), None)
        return first if first is not None and first.done() else None
