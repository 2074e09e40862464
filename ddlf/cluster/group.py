"""Calls to all workers at once. Runs on the master.

Every call goes to all workers concurrently and returns a list in worker order. ``options`` returns a view with other
options, so that no option can collide with a method's own keyword arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn, Self

from ddlf.cluster.behaviour import Behaviour, OnError
from ddlf.cluster.dispatch import Dispatch
from ddlf.cluster.hosted import Hosted, copied
from ddlf.cluster.mapping import Function, Map, Tally, items_of, untupled
from ddlf.cluster.members import Members
from ddlf.cluster.proxy import ProxyWorker
from ddlf.cluster.shown import workers_table
from ddlf.errors import ConfigError, DDLFError, NotPicklable, RemoteError
from ddlf.events import Event
from ddlf.events.sinks import Events, Sink
from ddlf.rpc.code import PickleOnce, Snapshot
from ddlf.rpc.iworker import checked_function, method_name
from ddlf.rpc.messages import Request


class Group:
    """Workers that are called together: a cluster, or a view of some of its workers.

    Args:
        members: Members of the cluster.
        hosted: The methods and variables that its workers host.
        events: Receives the workers' events and passes them to subscribers.

    Attributes:
        behaviour: The call options, as ``options`` has set them.
    """

    def __init__(self, members: Members, hosted: Hosted, events: Events) -> None:
        self._members = members
        self._hosted = hosted
        self._events = events
        self._dispatch = Dispatch(members)
        self._workers = members.present
        self.behaviour = Behaviour()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cluster is its master's; what runs on a worker cannot use it, nor begin a map within a map")

    def _repr_html_(self) -> str:
        """Return the HTML table for notebooks: the workers, and the ones that ``connect`` did not reach."""
        return workers_table([*self._workers, *(self._members.missing if self._is_whole else ())])

    @property
    def workers(self) -> list[ProxyWorker]:
        """The workers, in order. A view made by ``options`` lists only its own workers."""
        return list(self._workers)

    @property
    def N(self) -> int:
        """Number of workers."""
        return len(self._workers)

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Call ``sink(event)`` on the master for each event of the workers: connections, losses, lines from user code.

        A sink that subscribes to a view made by ``options`` receives no events of other workers. A sink must return at
        once. A sink that raises is unsubscribed.

        Returns:
            A function that unsubscribes the sink.
        """
        if self._is_whole:
            return self._events.subscribe(sink)

        def sink_of_view(event: Event) -> None:
            if getattr(event, "worker", 0) in (0, *(worker.id for worker in self._workers)):
                sink(event)

        return self._events.subscribe(sink_of_view)

    def options(
        self,
        *,
        on_error: OnError | None = None,
        timeout_s: float | None = None,
        idempotent: bool | None = None,
        workers: Sequence[ProxyWorker | int] | None = None,
        per_worker: int | None = None,
    ) -> Self:
        """Return a view of this cluster, over the same connections.

        Args:
            on_error: ``"return"`` returns a failed worker's exception in the list of results instead of raising it.
            timeout_s: Seconds for each request.
            idempotent: Whether requests may run more than once. A lost request is then tried again on the same worker,
                up to 3 times in all. Other requests start at most once.
            workers: The workers of the view, as proxies or by their numbers from 1.
            per_worker: How many calls of ``map``, ``starmap`` and ``submit`` may run on each worker at the same time; 1
                by default. With more, each plain function gets its own thread, and async functions share the worker's
                event loop.
        """
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view.behaviour = self.behaviour.but(
            on_error=on_error, timeout_s=timeout_s, idempotent=idempotent, per_worker=per_worker
        )
        if workers is not None:
            view._workers = [self._find(worker) for worker in workers]
            if len(set(map(id, view._workers))) != len(view._workers):
                raise ConfigError("the same worker is named twice")
        return view

    def _find(self, worker: ProxyWorker | int) -> ProxyWorker:
        if isinstance(worker, ProxyWorker):
            return worker
        for found in self._workers:
            if found.id == worker:
                return found
        raise ConfigError(f"there is no worker {worker!r}; the cluster has {_numbers(self._workers)}")

    @property
    def _is_whole(self) -> bool:
        """Whether this is the whole cluster, or a view of all its workers."""
        return self._workers is self._members.present

    async def _collect(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Wait for all calls, then return their results in worker order.

        Raises:
            DDLFError: The error of the first failed worker, in worker order. The errors of the others are its
                ``others``.
        """
        results = await asyncio.gather(*calls, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, Exception):
                raise failure
        if failures and self.behaviour.on_error == "raise":
            first, *others = (failure for failure in failures if isinstance(failure, Exception))
            # A value that cannot be sent fails on the master, with the same error for each worker.
            if others and isinstance(first, DDLFError) and not isinstance(first, NotPicklable):
                first.join(others, len(results))
            if isinstance(first, RemoteError):
                first = first.with_traceback(None)  # its text has the worker's traceback; the master's adds nothing
            raise first
        return results

    def _for_each(self, value: Any) -> dict[int | None, Any]:
        """Return a dict with a value for the number of each worker of this view.

        For the whole cluster its only key is None, which also stands for workers that join later.
        """
        if self._is_whole:
            return {None: value}
        return {worker.id: value for worker in self._workers}

    async def _all(self, command: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        return await self._send([Request(command, *args, **kwargs)] * len(self._workers))

    async def _send(self, requests: Sequence[Request]) -> list[Any]:
        """Send one request to each of the first workers. Objects that the requests share are pickled once."""
        pickle = PickleOnce()
        for request in requests:
            request.pickle = pickle
        return await self._collect(
            [self._rpc(worker, request) for worker, request in zip(self._workers, requests, strict=False)]
        )

    def _rpc(self, worker: ProxyWorker, request: Request) -> Coroutine[Any, Any, Any]:
        return worker.rpc(request, self.behaviour.timeout_s, idempotent=self.behaviour.idempotent)

    async def _each(
        self, command: str, method: Any, per_worker: tuple[dict[str, Any], ...], same: dict[str, Any]
    ) -> list[Any]:
        if not per_worker:
            return await self._all(command, method, **same)
        if same:
            raise ValueError("give either the same arguments for all workers or one dict for each, not both")
        if len(per_worker) > len(self._workers):
            raise ValueError(f"{len(per_worker)} sets of arguments for {len(self._workers)} workers")
        for given in per_worker:
            if not isinstance(given, dict):
                raise TypeError(
                    f"arguments are named, as in a=1, or for one worker each a dict of its keyword arguments, got a {type(given).__name__}"
                )
        return await self._send([Request(command, method, **given) for given in per_worker])

    async def run_method(self, method: Callable[..., Any], /, *per_worker: dict[str, Any], **kwargs: Any) -> list[Any]:
        """Run a function once on the workers, without hosting it.

        Args:
            method: A plain or async function. If its first parameter is named ``self``, it gets the ``Worker`` that
                runs it.
            per_worker: A dict of keyword arguments for each of the first workers. The other workers do nothing.
            kwargs: The same keyword arguments for all workers. Arrays travel without a copy; other objects are pickled
                once for all workers.

        Returns:
            The results in worker order.

        Raises:
            RemoteError: The method raised an exception. The text ends with the worker's own traceback. The error is
                also an instance of the exception's class, if the master knows it. If several workers failed, it is the
                error of the first one, and ``others`` has the rest.
            NotPicklable: The function or an argument holds an object that cannot be sent. Nothing ran.
            ValueError: There are more dicts of arguments than workers.

        On failure:
            The error is raised after all workers have finished, and the cluster stays usable.
        """
        return await self._each("run_method", checked_function(method), per_worker, kwargs)

    async def run(self, method: str | Callable[..., Any], /, *per_worker: dict[str, Any], **kwargs: Any) -> list[Any]:
        """Run a hosted method, given as a function or by name, without sending it again. See ``run_method``.

        If you have redefined the function since ``add_method``, the new definition replaces the hosted one.
        """
        await self._renew(method, self._workers)
        return await self._each("run", method_name(method), per_worker, kwargs)

    async def _renew(self, method: str | Callable[..., Any], workers: Sequence[ProxyWorker]) -> None:
        requests = {} if isinstance(method, str) else self._hosted.renewals(method, workers)
        if requests:
            await self._collect([self._rpc(worker, request) for worker, request in requests.items()])
            values: dict[int | None, Any] = {worker.id: request for worker, request in requests.items()}
            if len(requests) == len(self._members.present):
                values = {None: next(iter(requests.values()))}
            self._hosted.keep(self._hosted.methods, method_name(method), values)

    async def run_at(
        self, worker: ProxyWorker | int, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a hosted method on one worker.

        Args:
            worker: The proxy, or the worker's number from 1.
            method: The hosted method, as a function or by name.
            args: Positional arguments of the method.
            kwargs: Keyword arguments of the method.
        """
        found = self._find(worker)
        await self._renew(method, [found])
        return await self._rpc(found, Request("run", method_name(method), *args, **kwargs))

    run_on = run_at

    # -- any worker -------------------------------------------------------------------------------------------------

    def map(self, function: Callable[..., Any], /, *iterables: Any, ordered: bool = True) -> Map:
        """Call a function once for each item, on whichever worker is free.

        Args:
            function: A plain or async function, like in ``run_method``. Each worker receives it once, in its present
                state, with the objects that it uses. Bind objects that all items share with ``functools.partial``.
            iterables: The items. An iterable may be endless or asynchronous; several are combined as by ``zip``.
            ordered: Whether results come in the order of the items, or in the order of completion.

        Returns:
            An object to await for a list of all results, or to iterate over with ``async for``.

        Raises:
            DDLFError: An item has failed, with an error that ``run_method`` may raise. It has the item's index from 0
                as ``item_index``, and the item in its text. The other running items are cancelled. With
                ``options(on_error="return")`` the map continues instead, and the error replaces the item's result.
            NotPicklable: The function holds an object that cannot be sent. Nothing ran.

        On failure:
            If a worker is lost, an item that cannot have begun there goes to another worker. An item that may have run
            fails, unless ``options(idempotent=True)`` says that it may run twice. Lost workers take part again when
            they return, and lost local workers are restarted.
        """
        source, total = items_of(iterables)
        return Map(self.tally(function, total), source, ordered=ordered)

    def starmap(self, function: Callable[..., Any], items: Any, /, *, ordered: bool = True) -> Map:
        """Call a function like ``map`` does, for items that are tuples of arguments."""
        source, total = items_of([items])
        return Map(self.tally(function, total), untupled(source), ordered=ordered)

    def tally(self, function: Callable[..., Any], total: int | None) -> Tally:
        """Return the part of ``map`` that calls the function for each item and counts, for ``Pool``'s own results."""
        keep_errors = self.behaviour.on_error == "return"
        return Tally(self._function(function), self._events.emit, total, self._workers, keep_errors=keep_errors)

    def _function(self, function: Callable[..., Any]) -> Function:
        return Function(function, self._dispatch, self.behaviour, None if self._is_whole else self._workers)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Call a function once, as soon as a worker is free.

        Returns:
            A future: ``await`` it, ``cancel`` it, or pass many to ``asyncio.as_completed``, ``gather`` or ``wait``.
        """
        call = self._function(function)
        self._dispatch.look()
        return asyncio.get_running_loop().create_task(call(*args, **kwargs))

    async def add_method(
        self, method: Callable[..., Any], *, name: str | None = None, persist: bool = False, concurrent: bool = False
    ) -> None:
        """Host a function on all workers until it is removed. ``IWorker.add_method`` describes the arguments."""
        checked_function(method, "add_method")
        options = dict(name=name, persist=persist, concurrent=concurrent)
        request = Request("add_method", Snapshot(method), **options)  # a separate request, because it outlives the call
        await self._all("add_method", method, **options)
        self._hosted.keep(self._hosted.methods, name or method_name(method), self._for_each(request))

    async def remove_method(self, method: str | Callable[..., Any]) -> None:
        """Remove a hosted method from all workers."""
        self._hosted.forget(self._hosted.methods, method_name(method), self._for_each(None))
        await self._all("remove_method", method_name(method))

    async def methods(self) -> list[list[str]]:
        """Return the names of each worker's hosted methods."""
        return await self._all("list_methods")

    async def run_code(self, code: str) -> list[Any]:
        """Run source text on all workers, and return the value of its last expression from each."""
        return await self._all("run_code", code)

    async def set_variable(self, name: str, value: Any = None, *, each: Sequence[Any] | None = None) -> None:
        """Set a named value on all workers.

        Args:
            name: A Python identifier.
            value: The same value for all workers.
            each: One value for each worker instead.
        """
        if each is None:
            kept = copied(value)
            await self._all("set_variable", name, value)
            self._hosted.keep(self._hosted.variables, name, self._for_each(kept))
            return
        if len(each) != len(self._workers):
            raise ValueError(f"{len(each)} values for {len(self._workers)} workers")
        workers = list(self._workers)  # a copy, because workers may join during the call
        own_of = {worker.id: copied(own) for worker, own in zip(workers, each, strict=True)}
        await self._send([Request("set_variable", name, own) for own in each])
        self._hosted.keep(self._hosted.variables, name, own_of)

    async def get_variable(self, name: str) -> list[Any]:
        """Return the variable's value on each worker."""
        return await self._all("get_variable", name)

    async def delete_variable(self, name: str) -> None:
        """Delete a variable on all workers."""
        self._hosted.forget(self._hosted.variables, name, self._for_each(None))
        await self._all("delete_variable", name)

    async def variables(self) -> list[dict[str, str]]:
        """Return the names and types of each worker's variables."""
        return await self._all("list_variables")

    async def load_mnist(self) -> list[dict[str, Any]]:
        """Load MNIST on the workers that have not loaded it yet."""
        return await self._all("load_mnist")

    async def load_cifar10(self) -> list[dict[str, Any]]:
        """Load CIFAR-10 on the workers that have not loaded it yet."""
        return await self._all("load_cifar10")

    async def clean(self) -> None:
        """Free data, model and variables on all workers. Hosted methods stay."""
        for name in list(self._hosted.variables):
            self._hosted.forget(self._hosted.variables, name, self._for_each(None))
        await self._all("clean")

    async def ping(self) -> list[float]:
        """Return the seconds of a round trip to each worker's daemon."""
        return await self._collect([worker.ping() for worker in self._workers])

    async def status(self) -> list[dict[str, Any]]:
        """Return the state of each worker; ``ProxyWorker.status`` describes it."""
        return await self._collect([worker.status() for worker in self._workers])


def _numbers(workers: Sequence[ProxyWorker]) -> str:
    """Return a description of the workers' numbers, for an error message."""
    numbers = [worker.id for worker in workers]
    if numbers == list(range(1, len(numbers) + 1)):
        return f"workers 1 to {len(numbers)}"
    return f"workers {', '.join(map(str, numbers))}"
