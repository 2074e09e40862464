"""The cluster of one master: finds its workers, connects to them, and calls all of them at once.

Runs on the master. Every call goes to all workers concurrently and returns a list in worker order. ``options`` returns
a view with other options, so that no option can collide with a method's own keyword arguments.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ddlf.cluster.config.addresses import find_config, parse_advertised
from ddlf.cluster.dispatch import Behaviour, Dispatch, OnError, is_number
from ddlf.cluster.introduce import introduce, introduced
from ddlf.cluster.launch.launcher import Given, Launcher, Requeue, addresses, machine
from ddlf.cluster.link import CONNECT_TIMEOUT_S
from ddlf.cluster.mapping import Function, Map, Tally, items_of, untupled
from ddlf.cluster.members import Members
from ddlf.cluster.proxy import ProxyWorker, workers_table
from ddlf.data.app import UserApp
from ddlf.errors import ConfigError, DDLFError, NotPicklable, RemoteError
from ddlf.events import Event
from ddlf.events.facts import to_data
from ddlf.events.sinks import Events, Sink
from ddlf.monitor.terminal.echo import Echo
from ddlf.rpc.code import PickleOnce, Snapshot
from ddlf.rpc.heartbeats import Timing
from ddlf.rpc.iworker import checked_function, method_name
from ddlf.rpc.messages import Request
from ddlf.rpc.tls import Security, client_context
from ddlf.worker.assignment import NO_WISH, CardWish
from ddlf.worker.status import WorkerStatus

if TYPE_CHECKING:
    from ddlf.monitor.dashboard.server import Dashboard

_REMOVED = object()


class Hosted:
    """Records the methods and variables that the master has given to workers, to give them to new executors again.

    It has no reference to the cluster, so that Python frees an unused cluster at once.

    Attributes:
        methods: The request that added each method, by name, then by the worker's number; None stands for all others.
        variables: The value of each variable, by the same keys.
    """

    def __init__(self) -> None:
        self.methods: dict[str, dict[int | None, Any]] = {}
        self.variables: dict[str, dict[int | None, Any]] = {}

    def keep(self, table: dict[str, dict[int | None, Any]], name: str, values: dict[Any, Any]) -> None:
        """Record a method or variable that workers got under a name, with its value for each worker.

        If ``None`` is among the numbers, the values replace all earlier values. Otherwise other workers keep their
        values.
        """
        table[name] = values if None in values else table.get(name, {}) | values

    def forget(self, table: dict[str, dict[int | None, Any]], name: str, numbers: Iterable[int | None]) -> None:
        """Record that a method or variable was removed from all or some workers."""
        if None in numbers:
            table.pop(name, None)
        elif name in table:
            table[name] |= dict.fromkeys(numbers, _REMOVED)

    def renewals(self, method: Callable[..., Any], workers: Sequence[ProxyWorker]) -> dict[ProxyWorker, Request]:
        """Return, for each worker that hosts an older version of a function under its name, the request that sends it
        the new one.
        """
        hosted = self.methods.get(method_name(method), {})
        requests = {}
        for worker in workers:
            old = hosted.get(worker.id, hosted.get(None, _REMOVED))
            if old is not _REMOVED and old.args[0].function is not method:
                now = Snapshot(method)
                if old.args[0].data == now.data:
                    old.args = (now,)  # the next comparison is then an identity check
                else:
                    requests[worker] = Request("add_method", now, **old.kwargs)
        return requests

    def requests_for(self, number: int) -> list[Request]:
        """Return the requests that give a worker's new executor the methods and variables of the previous one.

        Methods and values are copies from the time when workers first got them. Later changes on the master have no
        effect.
        """
        methods = [values.get(number, values.get(None, _REMOVED)) for values in self.methods.values()]
        variables = {name: values.get(number, values.get(None, _REMOVED)) for name, values in self.variables.items()}
        return [
            *(request for request in methods if request is not _REMOVED),
            *(Request("set_variable", name, value) for name, value in variables.items() if value is not _REMOVED),
        ]


def copied(value: Any) -> Any:
    """Return a copy of a value, or the value itself if it cannot be copied."""
    try:
        return bytes(value) if isinstance(value, memoryview) else copy.deepcopy(value)
    except Exception:  # the class's own __deepcopy__ failed, or the object cannot be copied
        return value


LOOK_S = 2.0
"""Seconds that ``look`` waits for an answer. For a slower worker, it returns only the facts that the master already
knows."""
SHOWN = (
    "host",
    "executor",
    "restarts",
    "last_exit",
    "busy",
    "uptime_s",
    "cores",
    "gpus",
    "cards",
    "memory",
    "lease",
    "python",
    "datasets",
)


async def look(members: Members, *, reach: bool = False) -> list[dict[str, Any]]:
    """Return the state of all workers of a cluster. All daemons are asked at once.

    Args:
        members: Members of the cluster.
        reach: Whether to connect to daemons without a connection. During a run this is not needed, because the run
            connects.

    Returns:
        A dict for each worker: its number and name; its state for this master (``"alive"``, ``"suspect"``, ``"dead"``
        or ``"missing"``); the bytes on its data connections; and its daemon's answer, or the reason ``"why"`` there is
        none.
    """
    return list(await asyncio.gather(*(_look(worker, members, reach) for worker in members.workers)))


async def _look(worker: ProxyWorker, members: Members, reach: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"worker": worker.id, "name": worker.label, "address": worker.address}
    try:
        if reach and not worker.connected:
            await worker.connect_control(timeout_s=LOOK_S)
        if worker.connected:
            status = await worker.status(LOOK_S)
            facts |= {name: to_data(getattr(status, name)) for name in SHOWN}
    except DDLFError as error:
        error.worker = ""
        facts["why"] = str(error).removeprefix(worker.label).lstrip(": ")
    missing = worker in members.missing
    return facts | {
        "state": "missing" if missing and not worker.connected else worker.state,
        "silent_s": worker.silent_s,
        "sent": worker.bytes_sent,
        "received": worker.bytes_received,
    }


class Group:
    """The workers of one call: a cluster, or a view of some of its workers.

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
        raise TypeError("a cluster belongs to its master: functions on workers can neither use it nor start a map")

    def _repr_html_(self) -> str:
        """Return the HTML table for notebooks. It has all workers, including those not reached by ``connect``."""
        return workers_table([*self._workers, *(self._members.missing if self._is_whole else ())])

    @property
    def workers(self) -> list[ProxyWorker]:
        """The workers, in order. A view made by ``options`` lists only its own workers."""
        return list(self._workers)

    @property
    def N(self) -> int:
        """Number of workers."""
        return len(self._workers)

    @property
    def places(self) -> int:
        """Number of workers of the whole cluster. It includes workers that have not come yet, if the launcher gives each
        worker a fixed place.
        """
        launcher = self._members.launcher
        return len(launcher.addresses) if launcher.fixed_places and self._is_whole else self.N

    def requeue(self) -> Requeue:
        """Return how an engine runs this command again after a notice (``ddlf run --requeue``).

        Raises:
            ConfigError: No engine runs it again. The message says why.
        """
        return self._members.launcher.requeue()

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
        view.behaviour = self.behaviour.changed_by(
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
        for member in self._workers:
            if member.id == worker:
                return member
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
            first, *other_failures = (failure for failure in failures if isinstance(failure, Exception))
            # A value that cannot be sent fails on the master, with the same error for each worker.
            if other_failures and isinstance(first, DDLFError) and not isinstance(first, NotPicklable):
                first.join(other_failures, len(results))
            if isinstance(first, RemoteError):
                # The error's text has the worker's traceback. The master's traceback adds nothing.
                first = first.with_traceback(None)
            raise first
        return results

    def _by_worker(self, value: Any) -> dict[int | None, Any]:
        """Return a dict with a value for the number of each worker of this view.

        For the whole cluster its only key is None, which also stands for workers that join later.
        """
        if self._is_whole:
            return {None: value}
        return {worker.id: value for worker in self._workers}

    async def _call_all(self, command: str, /, *args: Any, **kwargs: Any) -> list[Any]:
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

    async def _send_to_each(
        self, command: str, method: Any, per_worker: tuple[dict[str, Any], ...], same: dict[str, Any]
    ) -> list[Any]:
        if not per_worker:
            return await self._call_all(command, method, **same)
        if same:
            raise ValueError("pass either the same arguments for all workers or one dict for each worker, not both")
        if len(per_worker) > len(self._workers):
            raise ValueError(f"{len(per_worker)} sets of arguments for {len(self._workers)} workers")
        for arguments in per_worker:
            if not isinstance(arguments, dict):
                raise TypeError(
                    f"pass keyword arguments such as a=1, or one dict of them for each worker, not {type(arguments).__name__}"
                )
        return await self._send([Request(command, method, **arguments) for arguments in per_worker])

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
        return await self._send_to_each("run_method", checked_function(method), per_worker, kwargs)

    async def run(self, method: str | Callable[..., Any], /, *per_worker: dict[str, Any], **kwargs: Any) -> list[Any]:
        """Run a hosted method, given as a function or by name, without sending it again. See ``run_method``.

        If you have redefined the function since ``add_method``, the new definition replaces the hosted one.
        """
        await self._renew(method, self._workers)
        return await self._send_to_each("run", method_name(method), per_worker, kwargs)

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
        proxy = self._find(worker)
        await self._renew(method, [proxy])
        return await self._rpc(proxy, Request("run", method_name(method), *args, **kwargs))

    run_on = run_at

    # -- any worker -------------------------------------------------------------------------------------------------

    def map(self, function: Callable[..., Any], /, *iterables: Any, ordered: bool = True) -> Map:
        """Call a function once for each item, each time on a free worker.

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
        """Return the object that runs a map: it calls the function for each item and counts the results. ``Pool`` uses
        it, too.
        """
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
        self._dispatch.find_workers()
        return asyncio.get_running_loop().create_task(call(*args, **kwargs))

    async def add_method(
        self, method: Callable[..., Any], *, name: str | None = None, persist: bool = False, concurrent: bool = False
    ) -> None:
        """Host a function on all workers until it is removed. ``IWorker.add_method`` describes the arguments."""
        checked_function(method, "add_method")
        options = dict(name=name, persist=persist, concurrent=concurrent)
        # a separate request, because the master keeps it after the call
        request = Request("add_method", Snapshot(method), **options)
        await self._call_all("add_method", method, **options)
        self._hosted.keep(self._hosted.methods, name or method_name(method), self._by_worker(request))

    async def remove_method(self, method: str | Callable[..., Any]) -> None:
        """Remove a hosted method from all workers."""
        self._hosted.forget(self._hosted.methods, method_name(method), self._by_worker(None))
        await self._call_all("remove_method", method_name(method))

    async def methods(self) -> list[list[str]]:
        """Return the names of each worker's hosted methods."""
        return await self._call_all("list_methods")

    async def run_code(self, code: str) -> list[Any]:
        """Run source text on all workers, and return the value of its last expression from each."""
        return await self._call_all("run_code", code)

    async def set_variable(self, name: str, value: Any = None, *, each: Sequence[Any] | None = None) -> None:
        """Store a value under a name on all workers.

        Args:
            name: A Python identifier.
            value: The same value for all workers.
            each: One value for each worker instead.
        """
        if each is None:
            kept_value = copied(value)
            await self._call_all("set_variable", name, value)
            self._hosted.keep(self._hosted.variables, name, self._by_worker(kept_value))
            return
        if len(each) != len(self._workers):
            raise ValueError(f"{len(each)} values for {len(self._workers)} workers")
        workers = list(self._workers)  # a copy, because workers may join during the call
        values_by_worker = {worker.id: copied(item) for worker, item in zip(workers, each, strict=True)}
        await self._send([Request("set_variable", name, item) for item in each])
        self._hosted.keep(self._hosted.variables, name, values_by_worker)

    async def get_variable(self, name: str) -> list[Any]:
        """Return the variable's value on each worker."""
        return await self._call_all("get_variable", name)

    async def delete_variable(self, name: str) -> None:
        """Delete a variable, a value that ``set_variable`` stored, on all workers."""
        self._hosted.forget(self._hosted.variables, name, self._by_worker(None))
        await self._call_all("delete_variable", name)

    async def variables(self) -> list[dict[str, str]]:
        """Return the names and types of each worker's variables."""
        return await self._call_all("list_variables")

    async def load_mnist(self) -> list[dict[str, Any]]:
        """Load MNIST on the workers that have not loaded it yet."""
        return await self._call_all("load_mnist")

    async def load_cifar10(self) -> list[dict[str, Any]]:
        """Load CIFAR-10 on the workers that have not loaded it yet."""
        return await self._call_all("load_cifar10")

    async def clean(self) -> None:
        """Free data, model and variables on all workers. Hosted methods stay."""
        for name in list(self._hosted.variables):
            self._hosted.forget(self._hosted.variables, name, self._by_worker(None))
        await self._call_all("clean")

    async def ping(self) -> list[float]:
        """Return the seconds of a round trip to each worker's daemon."""
        return await self._collect([worker.ping() for worker in self._workers])

    async def status(self) -> list[WorkerStatus]:
        """Return the state of each worker; ``ProxyWorker.status`` describes it."""
        return await self._collect([worker.status() for worker in self._workers])


def _numbers(workers: Sequence[ProxyWorker]) -> str:
    """Return the numbers of workers as text, such as ``workers 1 to 4``, for an error message."""
    numbers = [worker.id for worker in workers]
    if numbers == list(range(1, len(numbers) + 1)):
        return f"workers 1 to {len(numbers)}"
    return f"workers {', '.join(map(str, numbers))}"


class Cluster(Group):
    """The workers that one master works with.

    Args:
        hosts: Names or addresses of the workers' machines, or a ``Launcher``, which starts workers.
        ports: One port for each host, or one port for all.
        token_file: File with the shared token; by default ``$DDLF_TOKEN_FILE``, ``$DDLF_TOKEN``, then the user's own
            token file.
        threads: Threads for computation on each worker. None divides the cores of each machine by its workers.
        pickle_results: Whether to unpickle results that are not plain data. A worker could then run code on the master.
        connect_timeout_s: Seconds to wait for each worker; the master dials all workers at once.
        min_workers: Start with this number of workers, with a warning, if the others do not answer. None requires all.
        tls_ca: File with the certificates of the authorities that sign the workers' certificates. By default only the
            token proves a worker's identity. Connections to other machines are encrypted in any case.
        tls_cert: File with a certificate to show to workers that demand one.
        tls_key: File with the private key of ``tls_cert``.
        insecure_plaintext: Encrypt nothing, for workers that were started with ``--insecure-plaintext``.
        heartbeat_s: Seconds between two heartbeats, in both directions; by default an eighth of ``dead_after_s``.
        suspect_after_s: Seconds of silence that make a worker's ``state`` ``"suspect"``; by default half of
            ``dead_after_s``.
        dead_after_s: Seconds of silence; 4 by default. After them the master gives up a worker, and another master may
            take this master's workers.
        takeover: Take the workers from another master that has their leases.
        guest: Connect without leases, for status and measurements. This works while another master has the workers.
        names: Names of the workers for people, instead of their addresses.
        advertise: The address of each worker for other workers, as ``HOST`` or ``HOST:PORT``. With an empty text the
            master asks the worker.
        echo: Print the output of user code on the workers to standard error, with the worker's name. You can set this
            attribute at any time.
        gpus: The cards that each worker must have been started with, as in cluster.yaml.

    Raises:
        ConfigError: The addresses or the certificates are invalid, or the times contradict each other.

    Example::

        async with Cluster(["10.0.0.11", "10.0.0.12"], [9000, 9000]) as cluster:
            print(await cluster.run_method(calculate, a=10, b=8, c=2))
    """

    def __init__(
        self,
        hosts: Sequence[str] | Launcher,
        ports: Sequence[int] | int = 9000,
        *,
        token_file: str | Path | None = None,
        threads: int | None = None,
        pickle_results: bool = False,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        min_workers: int | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        insecure_plaintext: bool = False,
        heartbeat_s: float | None = None,
        suspect_after_s: float | None = None,
        dead_after_s: float | None = None,
        takeover: bool = False,
        guest: bool = False,
        names: Sequence[str] = (),
        advertise: Sequence[str] = (),
        echo: bool = True,
        gpus: Sequence[CardWish] = (),
    ) -> None:
        if isinstance(hosts, Launcher) and token_file is not None:
            raise ConfigError(
                "token_file cannot be combined with a launcher, which has its own token", hint="leave out token_file"
            )
        launcher = hosts if isinstance(hosts, Launcher) else Given(hosts, ports, token_file=token_file, names=names)
        count = len(launcher.addresses)
        if len(advertise) not in (0, count):
            raise ConfigError(
                f"{count} workers but {len(advertise)} advertised addresses",
                hint="use an empty text for a worker without an advertised address",
            )
        for text in filter(None, advertise):
            parse_advertised(text)
        self._advertise = advertise or [""] * count
        self._wishes = dict(zip(launcher.addresses, gpus, strict=False))
        if not is_number(connect_timeout_s) or not 0 < connect_timeout_s < math.inf:
            raise ConfigError(f"connect_timeout_s must be a number of seconds above 0, got {connect_timeout_s!r}")
        if min_workers is not None and not 1 <= min_workers <= count:
            raise ConfigError(f"min_workers must be 1-{count}, got {min_workers}")
        if min_workers is not None and launcher.least is not None and min_workers != launcher.least:
            raise ConfigError(
                f"min_workers is {min_workers}, but the launcher begins with {launcher.least} workers",
                hint="leave one of them out",
            )
        ca, certificate, key = (Path(file).expanduser() if file else None for file in (tls_ca, tls_cert, tls_key))
        security = Security(ca, certificate, key, insecure_plaintext)
        if ca or certificate:
            client_context(security)  # check the files now, because a wrong file is a mistake of the caller
        self.takeover = takeover
        self._machines = Counter(machine(host) for host, _ in launcher.addresses)
        hosted, events = Hosted(), Events()
        self._echo = Echo(on=echo)
        events.subscribe(self._echo)
        self._options: dict[str, Any] = dict(
            threads=threads,
            pickle_results=pickle_results,
            security=security,
            timing=Timing.of(heartbeat_s, suspect_after_s, dead_after_s),
            takeover=takeover,
            guest=guest,
            replay=hosted.requests_for,
            emit=events.emit,
        )
        self._launcher = launcher
        members = Members(launcher, self._proxies(count), min_workers or launcher.least, connect_timeout_s, events.emit)
        super().__init__(members, hosted, events)

    def _proxies(self, count: int) -> list[ProxyWorker]:
        launcher = self._launcher
        return [
            self._proxy(
                *launcher.addresses[index],
                id=index + 1,
                N=count,
                configured_name=launcher.names[index] if launcher.names else "",
                advertise=self._advertise[index],
                incarnation=partial(launcher.incarnation, index),
                never=partial(launcher.never, index),
                when_lost=launcher.when_lost,
                options=self._wishes.get(launcher.addresses[index], NO_WISH).arguments(),
                find_end=partial(launcher.left, index),
                revive=partial(launcher.revive, index) if launcher.revives else None,
                take_offer=launcher.way(index),
            )
            for index in range(count)
        ]

    def _proxy(self, host: str, port: int, **arguments: Any) -> ProxyWorker:
        share = self._machines[machine(host)]
        return ProxyWorker(host, port, self._launcher.tokens.primary, share=share, **self._options, **arguments)

    @classmethod
    def from_config(
        cls,
        path: str | Path | None = None,
        *,
        token_file: str | Path | None = None,
        takeover: bool = False,
        pickle_results: bool = False,
        guest: bool = False,
    ) -> Self:
        """Return the cluster of a configuration file: ``path``, else ``$DDLF_CONFIG``, else ``./cluster.yaml``.

        Args:
            path: The file.
            token_file: Overrides the file's own ``token_file``.
            takeover: The argument of ``Cluster``.
            pickle_results: Whether to unpickle results, also if the file does not allow it.
            guest: The argument of ``Cluster``.

        Raises:
            ConfigError: There is no file, or it has mistakes. The message has the line and column of each mistake.
        """
        from ddlf.cluster.config.cluster_file import load_config

        config = load_config(path)
        security = dict(config.security)
        if token_file is not None:
            security["token_file"] = token_file
        security["pickle_results"] = pickle_results or config.security.pickle_results
        workers: dict[str, Any] = {
            "hosts": [worker.host for worker in config.workers],
            "ports": [worker.port for worker in config.workers],
            "names": [worker.name or "" for worker in config.workers],
            "advertise": [worker.advertise or "" for worker in config.workers],
            "gpus": [worker.wish for worker in config.workers],
        }
        return cls(
            **(workers if config.launcher is None else {"hosts": config.new_launcher()}),
            **security,
            connect_timeout_s=config.run.connect_timeout_s,
            min_workers=config.run.min_workers,
            heartbeat_s=config.run.heartbeat_s,
            suspect_after_s=config.run.suspect_after_s,
            dead_after_s=config.run.dead_after_s,
            takeover=takeover,
            guest=guest,
        )

    @classmethod
    def local(
        cls,
        n: int | None = None,
        *,
        gpus: Sequence[int | str] | str | None = None,
        gpu_memory: int | str | None = None,
        **options: Any,
    ) -> Self:
        """Return a cluster of ``n`` new workers on this machine. ``connect`` starts them and ``close`` ends them.

        Args:
            n: Number of workers, 1 to 1,024. By default, each card of this machine gets one worker. Without a card, there
                are two.
            gpus: The cards to use, by their numbers in ``nvidia-smi``, such as ``[0, 1]``, or ``"none"``. By default all
                that have no worker. If there are more workers than cards, they share cards.
            gpu_memory: Limit of each worker's memory on its card, such as ``"8GiB"``. Workers that share a card without
                this limit get equal parts of it.
            options: Arguments of ``Cluster``, such as ``threads``, ``pickle_results`` and ``dead_after_s``.
        """
        from ddlf.cluster.launch.local import Local
        from ddlf.worker.assignment import wish

        return cls(Local(n, wish(gpus, gpu_memory)), **options)

    @classmethod
    def on(cls, launcher: str, **keys: Any) -> Self:
        """Return a cluster of workers that a launcher starts, such as ``Cluster.on("slurm", workers=4, cores=2)``.
        ``connect`` starts them and ``close`` ends them.

        Args:
            launcher: Name of the launcher, from DDLF or from an installed package.
            keys: Its keys, as in ``--launcher NAME:KEY=VALUE``.

        Raises:
            ConfigError: There is no such launcher, or a key is invalid.
        """
        from ddlf.cluster.launch.launcher import from_keys

        return cls(from_keys(launcher, keys))

    def __repr__(self) -> str:
        return f"Cluster({', '.join(worker.address for worker in self._workers)})"

    @property
    def threads(self) -> int | None:
        """Threads for computation on each worker, as given to ``Cluster``."""
        threads: int | None = self._options["threads"]
        return threads

    @property
    def echo(self) -> bool:
        """Whether the master prints the output of user code on the workers."""
        return self._echo.on

    @echo.setter
    def echo(self, on: bool) -> None:
        self._echo.on = on

    # -- life -------------------------------------------------------------------------------------------------------

    async def connect(self, *, modules: Sequence[str] = ()) -> Self:
        """Connect to all workers at once, also to workers that did not answer before. Safe to call again.

        A view connects and closes the whole cluster. The first call numbers the workers that answer, from 1. A worker
        keeps its number for as long as this object lives.

        Args:
            modules: Modules that the workers will import. Workers that start now can begin with these imports at once.

        Raises:
            ConnectError: Some workers do not answer; the message is a table of these workers with the reasons.
            LeaseError: Other masters have all workers that could not be connected; the message has the same table.

        On failure:
            Connections from before stay open. All new ones are closed, also when the caller is cancelled.
        """
        await self._members.connect(modules)
        try:
            self._check_cards()
        except ConfigError:
            await self.close()
            raise
        return self

    def _check_cards(self) -> None:
        """Compare the cards of the workers with cluster.yaml, because only ``ddlf-worker`` can set them.

        Raises:
            ConfigError: A worker was started with others.
        """
        for worker in self._members.present:
            check_cards(self, worker, worker.executor.gpus, worker.executor.gpu_uuids)

    async def add(self, host: str, port: int = 9000) -> ProxyWorker:
        """Add a worker to the cluster. A training run gives it slots from its next round.

        Args:
            host: Name or address of the worker's machine.
            port: Port of the worker's daemon.

        Returns:
            The connected proxy. It has the next free number, and the methods and variables of all workers.

        Raises:
            ConnectError: The worker does not answer; the cluster stays as it was.
            AuthError: The worker has another token; the cluster stays as it was.
            VersionError: The worker has another version of DDLF; the cluster stays as it was.
        """
        ((host, port),) = addresses([host], [port])
        number = self._members.next_number(host, port)
        self._machines[machine(host)] += 1
        worker = self._proxy(host, port, id=number, N=number)
        await self._members.add(worker)
        self._dispatch.find_workers()
        return worker

    @property
    def missing(self) -> list[ProxyWorker]:
        """The workers that ``connect`` did not reach. A training run uses them as soon as they answer."""
        return list(self._members.missing)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the connections; None while the cluster is not connected."""
        return self._members.loop

    def take_in(self, worker: ProxyWorker) -> None:
        """Move a worker from the missing ones to the workers, after the master has reached it."""
        self._members.take_in(worker)
        self._dispatch.find_workers()

    async def introduce(self, workers: Sequence[ProxyWorker], run: str) -> None:
        """Let each of these workers call every other one in a run; ``ddlf.cluster.introduce`` has the details."""
        await introduce(workers, run)

    async def introduced(
        self, workers: Sequence[ProxyWorker], run: str, *, calls: Mapping[int, Collection[int]] | None = None
    ) -> list[tuple[ProxyWorker, ProxyWorker, str]]:
        """Introduce workers like ``introduce``, but return the pairs without a connection instead of raising an error.

        Returns:
            For each such pair: the caller, the called worker, and the reason.
        """
        return await introduced(workers, run, calls=calls)

    async def look(self) -> list[dict[str, Any]]:
        """Return the state of each worker, missing ones included, as its daemon reports it.

        Returns:
            The dicts that ``ddlf.cluster.cluster`` describes. A guest connects to daemons that have returned.
        """
        return await look(self._members, reach=bool(self._options["guest"]))

    def dashboard(
        self,
        app: UserApp | None = None,
        *,
        port: int | None = None,
        stop: Callable[[], bool] | None = None,
        **about: Any,
    ) -> Dashboard:
        """Return a page that shows the work of the workers in a browser on this machine.

        Args:
            app: An ``IApp`` whose runs the page shows, too.
            port: The only port to try; None takes the first free one of 8900 to 8919.
            stop: The function that the page's button calls, instead of the app's ``stop_training``.
            about: Facts for the page: ``title``, ``cluster``.

        Returns:
            The page. ``async with`` or its method ``open`` opens it, and ``close`` ends it. Its ``url`` contains the
            token that the page asks for.

        Example::

            async with cluster.dashboard() as page:
                print(page.url)
                await cluster.run_method(calculate, a=10, b=8, c=2)
        """
        from ddlf.monitor.dashboard.server import Dashboard

        stop = stop or (None if app is None else app.stop_training)
        follow = [self] if app is None else [app, self]
        return Dashboard(self.look, port=port, stop=stop, follow=follow, **{"cluster": repr(self), **about})

    async def close(self) -> None:
        """Disconnect from the workers. They keep running, except workers that the launcher started, as ``local`` does.

        Safe to call again.
        """
        self._dispatch.close()
        await self._members.close()
        self._echo.flush()

    async def shutdown(self) -> None:
        """End the workers' processes."""
        await asyncio.gather(*(worker.shutdown() for worker in self._workers))
        if self._is_whole:
            await self._launcher.stop()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def default_cluster() -> Cluster:
    """Return the cluster of the configuration file if one exists, else workers on this machine: one on each card, or two
    without a card.
    """
    path = find_config()
    return Cluster.from_config(path) if path is not None else Cluster.local()


def check_cards(cluster: Cluster, worker: ProxyWorker, cards: Sequence[str], uuids: Sequence[str]) -> None:
    """Compare the cards of a worker with cluster.yaml.

    Args:
        cluster: The cluster.
        worker: Its worker.
        cards: The worker's cards.
        uuids: Their unique names.

    Raises:
        ConfigError: It was started with others.
    """
    wish = cluster._wishes.get((worker.host, worker.port), NO_WISH)
    if wish.differs(cards, uuids):
        raise ConfigError(
            f"{worker.name} computes on {', '.join(cards) or 'no card'}, and cluster.yaml says "
            f"{' '.join(wish.arguments())}",
            hint="end it, and start it with these options, or with ddlf up",
        )
