"""What can be asked of all workers at once. Runs on the master.

Every call goes to all workers concurrently and returns a list in worker order. ``options`` gives a view with other behaviour, so that no option can
collide with a method's own keyword arguments.
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
    """Some workers that are asked together.

    Args:
        members: Members of the cluster.
        hosted: What its workers were given to keep.
        events: Who wants to know what happens to the workers.

    Attributes:
        behaviour: What ``options`` has changed.
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
        """What a notebook shows of it: its workers, and those that ``connect`` did not reach."""
        return workers_table([*self._workers, *(self._members.missing if self._is_whole else ())])

    @property
    def workers(self) -> list[ProxyWorker]:
        """The workers, in order; of a view made by ``options`` only its own."""
        return list(self._workers)

    @property
    def N(self) -> int:
        """Number of workers."""
        return len(self._workers)

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Have ``sink(event)`` called on the master for all that happens to the workers: they are connected and lost, user code on them writes lines.

        Of a view made by ``options`` it is not told of other workers. It is to return at once, and is told no more when it raises.

        Returns:
            Takes the sink off.
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
        """A view of this cluster, over the same connections.

        Args:
            on_error: ``"return"`` puts a failed worker's exception in its place of the result list instead of raising.
            timeout_s: Seconds for each request.
            idempotent: Whether requests may run more than once: a lost one is tried again on the same worker, up to 3 times in all.
                Requests that are not marked start at most once.
            workers: A part of the workers, as proxies or by their numbers from 1.
            per_worker: How many calls of ``map``, ``starmap`` and ``submit`` may run at the same time on each worker: 1 by default. With more,
                each plain function has a thread of its own, and async ones run in turns on the worker's event loop.
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
        """Whether this is a view of all workers."""
        return self._workers is self._members.present

    async def _collect(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Wait for all calls, then return their results in order or raise what failed.

        Raises:
            DDLFError: Of the first that failed, in worker order; those of the others are its ``others``.
        """
        results = await asyncio.gather(*calls, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, Exception):
                raise failure
        if failures and self.behaviour.on_error == "raise":
            first, *others = (failure for failure in failures if isinstance(failure, Exception))
            # What cannot be sent fails on this side, the same way for each worker.
            if others and isinstance(first, DDLFError) and not isinstance(first, NotPicklable):
                first.join(others, len(results))
            if isinstance(first, RemoteError):
                first = first.with_traceback(None)  # it has the worker's; how the answer was received says nothing
            raise first
        return results

    def _for_each(self, value: Any) -> dict[int | None, Any]:
        """A value by the number of each worker that this is a view of; under None when it is all of them, also those that come later."""
        if self._is_whole:
            return {None: value}
        return {worker.id: value for worker in self._workers}

    async def _all(self, command: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        return await self._send([Request(command, *args, **kwargs)] * len(self._workers))

    async def _send(self, requests: Sequence[Request]) -> list[Any]:
        """One request for each of the first workers. What they have in common is pickled once."""
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
            method: Plain or async. If its first parameter is named ``self`` it gets the ``Worker`` that runs it.
            per_worker: A dict of keyword arguments for each of the first workers; the others do nothing.
            kwargs: The same arguments for all workers. Arrays travel without a copy; other objects are pickled, once for all.

        Returns:
            The results in worker order.

        Raises:
            RemoteError: The method raised; the text ends with the worker's own traceback. It is also of the class that was raised there, if
                this side knows it. When several workers failed it is the error of the first; ``others`` has the rest.
            NotPicklable: The function or an argument holds something that cannot be sent; nothing ran.
            ValueError: More sets of arguments than workers.

        On failure:
            All workers are waited for before the error is raised, and the cluster stays usable.
        """
        return await self._each("run_method", checked_function(method), per_worker, kwargs)

    async def run(self, method: str | Callable[..., Any], /, *per_worker: dict[str, Any], **kwargs: Any) -> list[Any]:
        """Run a hosted method, by function or by name; nothing of it is sent again. Otherwise as ``run_method``.

        A function that was defined anew since ``add_method`` takes the place of the one that was added.
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
            worker: The proxy, or its number from 1.
            method: By function or by name.
            args: For the method; so are ``kwargs``.
        """
        found = self._find(worker)
        await self._renew(method, [found])
        return await self._rpc(found, Request("run", method_name(method), *args, **kwargs))

    run_on = run_at

    # -- any worker -------------------------------------------------------------------------------------------------

    def map(self, function: Callable[..., Any], /, *iterables: Any, ordered: bool = True) -> Map:
        """Call a function once for each item, on whichever worker is free.

        Args:
            function: Plain or async; as in ``run_method``. It is sent once to each worker, as it is now, with what it uses: give what all items share
                to it with ``functools.partial``.
            iterables: The items: anything to iterate over, also endless and asynchronous; several are taken together, as by ``zip``.
            ordered: Whether results come in the order of the items, or as they come.

        Returns:
            What gives all results in a list when it is awaited, or one by one with ``async for``.

        Raises:
            DDLFError: An item has failed: what ``run_method`` raises, with ``item_index``, from 0, and the item in its text. What was begun of
                the others is cancelled; ``options(on_error="return")`` goes on instead, and puts the error in the place of the result.
            NotPicklable: The function holds something that cannot be sent; nothing ran.

        On failure:
            An item that cannot have begun on a worker that is lost goes to another one; one that may have run ends with that error, unless
            ``options(idempotent=True)`` says that it may run twice. Lost workers take part again when they are back; local ones are started again.
        """
        source, total = items_of(iterables)
        return Map(self.tally(function, total), source, ordered=ordered)

    def starmap(self, function: Callable[..., Any], items: Any, /, *, ordered: bool = True) -> Map:
        """``map`` for items that are tuples of arguments."""
        source, total = items_of([items])
        return Map(self.tally(function, total), untupled(source), ordered=ordered)

    def tally(self, function: Callable[..., Any], total: int | None) -> Tally:
        """What ``map`` is made of, for others who take results: what calls the function for each item, and counts."""
        keep_errors = self.behaviour.on_error == "return"
        return Tally(self._function(function), self._events.emit, total, self._workers, keep_errors=keep_errors)

    def _function(self, function: Callable[..., Any]) -> Function:
        return Function(function, self._dispatch, self.behaviour, None if self._is_whole else self._workers)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Call a function once, on a worker that is free, now or as soon as there is one.

        Returns:
            A future: ``await`` it, ``cancel`` it, or give many of them to ``asyncio.as_completed``, ``gather`` or ``wait``.
        """
        call = self._function(function)
        self._dispatch.look()
        return asyncio.get_running_loop().create_task(call(*args, **kwargs))

    async def add_method(
        self, method: Callable[..., Any], *, name: str | None = None, persist: bool = False, concurrent: bool = False
    ) -> None:
        """Host a function on all workers until it is removed. See ``IWorker.add_method``."""
        checked_function(method, "add_method")
        options = dict(name=name, persist=persist, concurrent=concurrent)
        request = Request("add_method", Snapshot(method), **options)  # another one: it outlives the call
        await self._all("add_method", method, **options)
        self._hosted.keep(self._hosted.methods, name or method_name(method), self._for_each(request))

    async def remove_method(self, method: str | Callable[..., Any]) -> None:
        """Forget a hosted method on all workers."""
        self._hosted.forget(self._hosted.methods, method_name(method), self._for_each(None))
        await self._all("remove_method", method_name(method))

    async def methods(self) -> list[list[str]]:
        """Names of each worker's hosted methods."""
        return await self._all("list_methods")

    async def run_code(self, code: str) -> list[Any]:
        """Run source text on all workers; the value of its last expression comes back."""
        return await self._all("run_code", code)

    async def set_variable(self, name: str, value: Any = None, *, each: Sequence[Any] | None = None) -> None:
        """Set a named value on all workers.

        Args:
            name: A Python identifier.
            value: The same for all.
            each: One value for each worker instead.
        """
        if each is None:
            kept = copied(value)
            await self._all("set_variable", name, value)
            self._hosted.keep(self._hosted.variables, name, self._for_each(kept))
            return
        if len(each) != len(self._workers):
            raise ValueError(f"{len(each)} values for {len(self._workers)} workers")
        workers = list(self._workers)  # as they are now
        own_of = {worker.id: copied(own) for worker, own in zip(workers, each, strict=True)}
        await self._send([Request("set_variable", name, own) for own in each])
        self._hosted.keep(self._hosted.variables, name, own_of)

    async def get_variable(self, name: str) -> list[Any]:
        """The variable's value on each worker."""
        return await self._all("get_variable", name)

    async def delete_variable(self, name: str) -> None:
        """Forget a variable on all workers."""
        self._hosted.forget(self._hosted.variables, name, self._for_each(None))
        await self._all("delete_variable", name)

    async def variables(self) -> list[dict[str, str]]:
        """Names and types of each worker's variables."""
        return await self._all("list_variables")

    async def load_mnist(self) -> list[dict[str, Any]]:
        """Load MNIST on all workers, where it is not loaded yet."""
        return await self._all("load_mnist")

    async def load_cifar10(self) -> list[dict[str, Any]]:
        """Load CIFAR-10 on all workers, where it is not loaded yet."""
        return await self._all("load_cifar10")

    async def clean(self) -> None:
        """Free data, model and variables on all workers. Methods stay."""
        for name in list(self._hosted.variables):
            self._hosted.forget(self._hosted.variables, name, self._for_each(None))
        await self._all("clean")

    async def ping(self) -> list[float]:
        """Seconds of a round trip to each worker's daemon."""
        return await self._collect([worker.ping() for worker in self._workers])

    async def status(self) -> list[dict[str, Any]]:
        """What each worker is and does."""
        return await self._collect([worker.status() for worker in self._workers])


def _numbers(workers: Sequence[ProxyWorker]) -> str:
    """Which workers there are, for an error."""
    numbers = [worker.id for worker in workers]
    if numbers == list(range(1, len(numbers) + 1)):
        return f"workers 1 to {len(numbers)}"
    return f"workers {', '.join(map(str, numbers))}"
