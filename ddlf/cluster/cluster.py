"""All workers at once. Runs on the master.

Every call goes to all workers concurrently and returns a list in worker order. ``options`` gives a view with other behaviour, so that no option can
collide with a method's own keyword arguments.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from ddlf.cluster.proxy import CONNECT_TIMEOUT_S, MAX_ATTEMPTS, ProxyWorker
from ddlf.errors import (
    ConfigError,
    ConnectError,
    DDLFError,
    ExecutorCrashed,
    LeaseError,
    NotPicklable,
    RemoteError,
    WorkerLost,
)
from ddlf.iworker import checked_function, method_name
from ddlf.liveness import Timing
from ddlf.net.tls import TOKEN_ONLY, Security, client_context
from ddlf.tokens import Tokens, find_tokens, loopback_tokens
from ddlf.wire.code import PickleOnce, Snapshot
from ddlf.wire.messages import Request

if TYPE_CHECKING:
    from ddlf.launch.local import LocalWorkers

log = logging.getLogger(__name__)

LOOPBACK = "loopback"
RETRY_S = 0.2
"""Between two attempts to connect to a worker that died while it was connected to."""


class Cluster:
    """The workers one master works with.

    Args:
        hosts: Names or addresses of the workers' machines.
        ports: One for each host, or one for all.
        token_file: File with the shared token; by default ``$DDLF_TOKEN_FILE``, ``$DDLF_TOKEN``, then the user's own token file.
        threads: For computation on each worker; None divides the cores of each machine by the workers on it.
        pickle_results: Whether to unpickle results that are not plain data. A worker could then run code on the master.
        connect_timeout_s: For each worker; all are tried at once.
        min_workers: Go on with as many, with a warning, if others do not answer; None wants all.
        tls_ca: File with the certificates that workers' certificates must be signed by. By default the token alone proves who a
            worker is; connections to other machines are encrypted in any case.
        tls_cert: File with a certificate to show to workers that demand one.
        tls_key: File with its private key.
        insecure_plaintext: Encrypt nothing, for workers that were started with ``--insecure-plaintext``.
        heartbeat_s: How often master and workers give each other a sign of life; by default an eighth of ``dead_after_s``.
        suspect_after_s: Silence after which a worker's ``state`` is ``"suspect"``; by default half of ``dead_after_s``.
        dead_after_s: Silence after which a worker is given up, and after which another master may have its workers; 4 by default.
        takeover: Take the workers from another master that has them.

    Raises:
        ConfigError: The addresses or the certificates cannot be used, or the times contradict each other.

    Example::

        async with Cluster(["10.0.0.11", "10.0.0.12"], [9000, 9000]) as cluster:
            print(await cluster.run_method(calculate, a=10, b=8, c=2))
    """

    def __init__(
        self,
        hosts: Sequence[str],
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
    ) -> None:
        addresses = _addresses(hosts, ports)
        if not is_number(connect_timeout_s) or not 0 < connect_timeout_s < math.inf:
            raise ConfigError(f"connect_timeout_s must be a number of seconds above 0, got {connect_timeout_s!r}")
        if min_workers is not None and not 1 <= min_workers <= len(addresses):
            raise ConfigError(f"min_workers must be 1-{len(addresses)}, got {min_workers}")
        ca, certificate, key = (Path(file).expanduser() if file else None for file in (tls_ca, tls_cert, tls_key))
        security = Security(ca, certificate, key, insecure_plaintext)
        if ca or certificate:
            client_context(security)  # now, not at the first connection: a wrong file is a mistake of the caller
        tokens = find_tokens(token_file)
        timing = Timing.of(heartbeat_s, suspect_after_s, dead_after_s)
        self._setup(
            addresses, tokens, threads, pickle_results, timing, connect_timeout_s, min_workers, takeover, security
        )

    def _setup(
        self,
        addresses: list[tuple[str, int]],
        tokens: Tokens | None,
        threads: int | None,
        pickle_results: bool,
        timing: Timing,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        min_workers: int | None = None,
        takeover: bool = False,
        security: Security = TOKEN_ONLY,
    ) -> None:
        self._machines = machines = Counter(_machine(host) for host, _ in addresses)
        self._hosted = hosted = _Hosted()
        if tokens is None and set(machines) != {LOOPBACK}:
            raise ConfigError(
                "no token for workers on other machines",
                hint="run 'ddlf token new' and copy the file to the other machines",
            )
        tokens = tokens or loopback_tokens()
        self._min_workers = min_workers

        def proxy(host: str, port: int, number: int) -> ProxyWorker:
            worker = ProxyWorker(
                host,
                port,
                tokens.primary,
                id=number,
                N=len(addresses),
                threads=threads,
                share=machines[_machine(host)],
                pickle_results=pickle_results,
                security=security,
                timing=timing,
                takeover=takeover,
            )
            worker.replay = hosted.requests_for
            return worker

        self._proxy = proxy
        self._workers = [proxy(host, port, number) for number, (host, port) in enumerate(addresses, 1)]
        self._missing: list[ProxyWorker] = []
        self._highest = 0  # number of a worker; 0 until ``connect`` has given them
        self._connect_timeout_s = connect_timeout_s
        self._on_error: Literal["raise", "return"] = "raise"
        self._timeout_s: float | None = None
        self._idempotent = False
        self._local: LocalWorkers | None = None
        self._connecting = asyncio.Lock()
        self._dialling: asyncio.Task[None] | None = None
        self._whole: Self | None = None  # of a view: the cluster it is a view of

    @classmethod
    def from_config(
        cls,
        path: str | Path | None = None,
        *,
        token_file: str | Path | None = None,
        takeover: bool = False,
        pickle_results: bool = False,
    ) -> Self:
        """The cluster of a configuration file: ``path``, else ``$DDLF_CONFIG``, else ``./cluster.yaml``.

        Args:
            path: The file.
            token_file: Instead of the one that the file names.
            takeover: As in ``Cluster``.
            pickle_results: Likewise, also if the file does not say so.

        Raises:
            ConfigError: There is none, or it has mistakes; the text has line and column of each.
        """
        from ddlf.config.cluster_file import load_config

        config = load_config(path)
        security = dict(config.security)
        if token_file is not None:
            security["token_file"] = token_file
        security["pickle_results"] = pickle_results or config.security.pickle_results
        cluster = cls(
            [worker.host for worker in config.workers],
            [worker.port for worker in config.workers],
            **security,
            connect_timeout_s=config.run.connect_timeout_s,
            min_workers=config.run.min_workers,
            heartbeat_s=config.run.heartbeat_s,
            suspect_after_s=config.run.suspect_after_s,
            dead_after_s=config.run.dead_after_s,
            takeover=takeover,
        )
        for worker, given in zip(cluster.workers, config.workers, strict=True):
            worker.called = given.name or ""
        return cluster

    @classmethod
    def local(
        cls,
        n: int = 2,
        *,
        threads: int | None = None,
        pickle_results: bool = False,
        heartbeat_s: float | None = None,
        suspect_after_s: float | None = None,
        dead_after_s: float | None = None,
    ) -> Self:
        """A cluster of ``n`` new workers on this machine, which ``connect`` starts and ``close`` ends.

        Args:
            n: 1 to 1,024.
            threads: For computation on each; by default this machine's cores divided by ``n``.
            pickle_results: As in ``Cluster``; so are the times.
        """
        from ddlf.launch.local import LocalWorkers

        self = cls.__new__(cls)
        timing = Timing.of(heartbeat_s, suspect_after_s, dead_after_s)
        self._setup_local(LocalWorkers, n, threads, pickle_results, timing)
        return self

    def _setup_local(
        self, kind: Callable[[int], LocalWorkers], n: int, threads: int | None, pickle_results: bool, timing: Timing
    ) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1024:
            raise ConfigError(f"the number of local workers must be 1-1024, got {n!r}")
        local = kind(n)
        self._setup([("127.0.0.1", 0)] * n, local.tokens, threads, pickle_results, timing)
        self._local = local
        for index, worker in enumerate(self._workers):
            worker.how_ended = partial(local.how_ended, index)
            worker.revive = partial(local.revive, index)

    @property
    def workers(self) -> list[ProxyWorker]:
        """The workers, in order; of a view made by ``options`` only its own."""
        return list(self._workers)

    @property
    def N(self) -> int:
        """Number of workers."""
        return len(self._workers)

    def __repr__(self) -> str:
        return f"Cluster({', '.join(f'{worker.host}:{worker.port}' for worker in self._workers)})"

    def options(
        self,
        *,
        on_error: Literal["raise", "return"] | None = None,
        timeout_s: float | None = None,
        idempotent: bool | None = None,
        workers: Sequence[ProxyWorker | int] | None = None,
    ) -> Self:
        """A view of this cluster, over the same connections.

        Args:
            on_error: ``"return"`` puts a failed worker's exception in its place of the result list instead of raising.
            timeout_s: For each request.
            idempotent: Whether requests may run more than once: a lost one is tried again on the same worker, up to 3 times in all.
                Requests that are not marked start at most once.
            workers: A part of the workers, as proxies or by their numbers from 1.
        """
        if on_error not in (None, "raise", "return"):
            raise ConfigError(f"on_error must be 'raise' or 'return', got {on_error!r}")
        if timeout_s is not None and (not is_number(timeout_s) or not 0 <= timeout_s < math.inf):
            raise ConfigError(f"timeout_s must be a number of seconds of 0 or more, got {timeout_s!r}")
        view = copy.copy(self)
        view._whole = self._whole or self
        view._on_error = on_error or self._on_error
        view._timeout_s = self._timeout_s if timeout_s is None else timeout_s
        view._idempotent = self._idempotent if idempotent is None else idempotent
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

    # -- life -------------------------------------------------------------------------------------------------------

    def expect(self, *modules: str) -> None:
        """Say before ``connect`` what ``preload`` will be asked for: workers on this machine begin with it at once."""
        if self._local is not None:
            self._local.modules = modules

    async def preload(self, *modules: str) -> None:
        """Let the executors of all workers come with modules imported; see ``ProxyWorker.preload``. A lost worker is no error here."""
        outcomes = await asyncio.gather(*(worker.preload(*modules) for worker in self._workers), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None and not isinstance(outcome, DDLFError):
                raise outcome

    async def connect(self) -> Self:
        """Connect to all workers at once, also to those that were missing. Safe to call again. A view connects and closes the whole cluster.

        The first time numbers the workers that answer from 1; a worker keeps its number for as long as this object lives.

        Raises:
            ConnectError: Some do not answer; the text is a table of them with the reasons.
            LeaseError: Those that were not got are all with another master; the same table.

        On failure:
            What was open before stays open, everything else is closed, also when the caller is cancelled.
        """
        if self._whole is not None:
            await self._whole.connect()
            return self
        async with self._connecting:
            self._dialling = asyncio.ensure_future(self._connect())
            try:
                await self._dialling
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if caller is not None and caller.cancelling():
                    raise
                raise ConnectError("the cluster was closed while it connected") from None
            finally:
                self._dialling = None
        return self

    async def _connect(self) -> None:
        before = [worker for worker in self._known() if worker.connected]
        try:
            if self._local is not None:
                for worker, port in zip(self._known(), await self._local.start(), strict=False):
                    worker.port = port
            # First every daemon, so that all are known before the workers learn their numbers. Missing ones are tried again.
            await self._reach(ProxyWorker.connect_control)
            self._give_numbers()
            await self._reach(ProxyWorker.connect)
        except BaseException:
            await asyncio.gather(*(worker.close() for worker in self._known() if worker not in before))
            if self._local is not None and not before:
                await self._local.stop()
            raise

    def _known(self) -> list[ProxyWorker]:
        return sorted([*self._workers, *self._missing], key=_number)

    async def _reach(self, connect: Callable[..., Coroutine[Any, Any, None]]) -> None:
        known = list(self._workers) if connect is ProxyWorker.connect else self._known()
        outcomes = await asyncio.gather(*(self._reach_one(worker, connect) for worker in known), return_exceptions=True)
        self._check_reached(known, outcomes)

    async def _reach_one(self, worker: ProxyWorker, connect: Callable[..., Coroutine[Any, Any, None]]) -> None:
        """Connect to a worker, again if it dies in this moment: after its daemon was reached, or where it is started again."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._connect_timeout_s
        for attempt in itertools.count(1):
            try:
                await connect(worker, timeout_s=self._connect_timeout_s)
                return
            except (WorkerLost, ConnectError, ExecutorCrashed):
                was_reached = connect is ProxyWorker.connect or worker.revive is not None
                is_away = worker.revive is None and not worker.connected
                if not was_reached or (loop.time() >= deadline if is_away else attempt == MAX_ATTEMPTS):
                    raise
                await asyncio.sleep(RETRY_S)

    def _give_numbers(self) -> None:
        """Number the workers once, those that were reached first; later only how many there are can grow.

        A number is for life: a worker that is away for a while comes back to its part of the data and to its own variables.
        """
        workers = [*self._workers, *self._missing]
        if not self._highest:
            for number, worker in enumerate(workers, 1):
                worker.id = number
        self._highest = max(self._highest, *(worker.id for worker in self._workers))
        for worker in workers:
            worker.N = self._highest

    def _check_reached(self, known: Sequence[ProxyWorker], outcomes: Sequence[BaseException | None]) -> None:
        """Go on with the workers that were reached, if they are enough; else say which were not, and why."""
        failures = [outcome for outcome in outcomes if outcome is not None]
        reached = [worker for worker, outcome in zip(known, outcomes, strict=True) if outcome is None]
        for failure in failures:
            if not isinstance(failure, DDLFError):
                raise failure
        if not failures:
            self._keep(reached, [worker for worker in self._missing if worker not in reached])
            return
        rows = []
        for worker, outcome in zip(known, outcomes, strict=True):
            if isinstance(outcome, DDLFError):
                outcome.worker = ""  # the row says which
                where = worker.label
                reason = str(outcome).removeprefix(where).lstrip(": ")
                rows.append(f"  {worker.id:>3}  {where:<21}  {reason}")
        used = sum(isinstance(failure, LeaseError) for failure in failures)
        lost = len(failures) - used
        are = "is" if used == 1 else "are"
        problems = [f"{lost} of {len(known)} workers could not be reached"] * bool(lost)
        problems += [f"{used} of {len(known)} workers {are} in use"] * bool(used)
        text = "\n".join([f"{', and '.join(problems)}:", *rows])
        if len(reached) >= (self._min_workers or len(known)):
            log.warning("%s\ngoing on with %d workers", text, len(reached))
            self._keep(reached, [worker for worker in (*known, *self._missing) if worker not in reached])
            return
        error = LeaseError(text) if all(isinstance(failure, LeaseError) for failure in failures) else ConnectError(text)
        error.exit_code = max(getattr(failure, "exit_code", 3) for failure in failures)
        raise error

    def _keep(self, reached: Sequence[ProxyWorker], missing: Sequence[ProxyWorker]) -> None:
        # In place: views over all workers share the lists.
        self._workers[:] = sorted(reached, key=_number)
        self._missing[:] = sorted(dict.fromkeys(missing), key=_number)

    async def add(self, host: str, port: int = 9000) -> ProxyWorker:
        """Take another worker into the cluster. Training that goes on gives it slots from its next round.

        Args:
            host: Name or address of its machine.
            port: Its port.

        Returns:
            Its proxy, connected, with the next free number and the methods and variables that all workers have.

        Raises:
            ConnectError: It does not answer; the cluster is as before. So it is with ``AuthError`` and ``VersionError``.
        """
        if self._whole is not None:
            return await self._whole.add(host, port)
        ((host, port),) = _addresses([host], [port])
        known = [*self._workers, *self._missing]
        for worker in known:
            if (worker.host, worker.port) == (host, port):
                raise ConfigError(f"{host}:{port} is in the cluster already, as {worker.name}")
        self._machines[_machine(host)] += 1
        worker = self._proxy(host, port, max(worker.id for worker in known) + 1)
        worker.N = worker.id
        try:
            await worker.connect(timeout_s=self._connect_timeout_s)
        except BaseException:
            await worker.close()
            raise
        self._workers.append(worker)
        self._highest = worker.id
        return worker

    @property
    def missing(self) -> list[ProxyWorker]:
        """Workers that ``connect`` did not reach. Training that goes on takes them in when they answer."""
        return list(self._missing)

    def take_in(self, worker: ProxyWorker) -> None:
        """Count a missing worker that has been reached now among the workers."""
        if worker in self._missing:
            self._keep([*self._workers, worker], [other for other in self._missing if other is not worker])

    async def close(self) -> None:
        """Leave the workers; they go on, but those started by ``local`` end. Safe to call again."""
        if self._whole is not None:
            await self._whole.close()
            return
        if self._dialling is not None:
            self._dialling.cancel()
        async with self._connecting:
            await asyncio.gather(*(worker.close() for worker in self._known()))
            if self._local is not None:
                await self._local.stop()

    async def shutdown(self) -> None:
        """End the workers' processes."""
        await asyncio.gather(*(worker.shutdown() for worker in self._workers))
        if self._local is not None and self._whole is None:
            await self._local.stop()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- calls ------------------------------------------------------------------------------------------------------

    async def gather(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Wait for all calls, then return their results in order or raise what failed.

        Raises:
            DDLFError: Of the first that failed, in worker order; those of the others are its ``others``.
        """
        results = await asyncio.gather(*calls, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, Exception):
                raise failure
        if failures and self._on_error == "raise":
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
        if self._whole is None or self._whole._workers is self._workers:
            return {None: value}
        return {worker.id: value for worker in self._workers}

    async def _all(self, command: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        return await self._send([Request(command, *args, **kwargs)] * len(self._workers))

    async def _send(self, requests: Sequence[Request]) -> list[Any]:
        """One request for each of the first workers. What they have in common is pickled once."""
        pickle = PickleOnce()
        for request in requests:
            request.pickle = pickle
        return await self.gather(
            [self._rpc(worker, request) for worker, request in zip(self._workers, requests, strict=False)]
        )

    def _rpc(self, worker: ProxyWorker, request: Request) -> Coroutine[Any, Any, Any]:
        return worker.rpc(request, self._timeout_s, idempotent=self._idempotent)

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
                    f"arguments for one worker are a dict of its keyword arguments, got a {type(given).__name__}"
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
            await self.gather([self._rpc(worker, request) for worker, request in requests.items()])
            values: dict[int | None, Any] = {worker.id: request for worker, request in requests.items()}
            if len(requests) == len((self._whole or self)._workers):
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
            kept = _copy(value)
            await self._all("set_variable", name, value)
            self._hosted.keep(self._hosted.variables, name, self._for_each(kept))
            return
        if len(each) != len(self._workers):
            raise ValueError(f"{len(each)} values for {len(self._workers)} workers")
        workers = list(self._workers)  # as they are now
        own_of = {worker.id: _copy(own) for worker, own in zip(workers, each, strict=True)}
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
        return await self.gather([worker.ping() for worker in self._workers])

    async def status(self) -> list[dict[str, Any]]:
        """What each worker is and does."""
        return await self.gather([worker.status() for worker in self._workers])


class _Hosted:
    """The methods and variables that workers were given. It knows no cluster, so that one that nobody holds is gone at once.

    Attributes:
        methods: By name, then by the worker's number, or None for all others: what gave it.
        variables: Likewise the value.
    """

    def __init__(self) -> None:
        self.methods: dict[str, dict[int | None, Any]] = {}
        self.variables: dict[str, dict[int | None, Any]] = {}

    def keep(self, what: dict[str, dict[int | None, Any]], name: str, values: dict[Any, Any]) -> None:
        """Note what was given under a name: to all, if ``None`` is among the numbers; else those of other workers stay."""
        what[name] = values if None in values else what.get(name, {}) | values

    def forget(self, what: dict[str, dict[int | None, Any]], name: str, numbers: Iterable[int | None]) -> None:
        """Note that it was taken away, from all or from some."""
        if None in numbers:
            what.pop(name, None)
        elif name in what:
            what[name] |= dict.fromkeys(numbers, _GONE)

    def renewals(self, method: Callable[..., Any], workers: Sequence[ProxyWorker]) -> dict[ProxyWorker, Request]:
        """What gives a function to those of the workers that were given another one under its name."""
        hosted = self.methods.get(method_name(method), {})
        found = {}
        for worker in workers:
            old = hosted.get(worker.id, hosted.get(None, _GONE))
            if old is not _GONE and old.args[0].function is not method:
                now = Snapshot(method)
                if old.args[0].data == now.data:
                    old.args = (now,)  # so that the next comparison takes no time
                else:
                    found[worker] = Request("add_method", now, **old.kwargs)
        return found

    def requests_for(self, worker: ProxyWorker) -> list[Request]:
        """What gives a worker's new executor what the one before had.

        Methods and values are those of the time when they were given, whatever this side has changed in them since.
        """
        methods = [values.get(worker.id, values.get(None, _GONE)) for values in self.methods.values()]
        variables = {name: values.get(worker.id, values.get(None, _GONE)) for name, values in self.variables.items()}
        return [
            *(request for request in methods if request is not _GONE),
            *(Request("set_variable", name, value) for name, value in variables.items() if value is not _GONE),
        ]


_GONE = object()


def _copy(value: Any) -> Any:
    try:
        return bytes(value) if isinstance(value, memoryview) else copy.deepcopy(value)
    except Exception:  # a class's own __deepcopy__, or something that has no second one
        return value


def _number(worker: ProxyWorker) -> int:
    return worker.id


def _numbers(workers: Sequence[ProxyWorker]) -> str:
    """Which workers there are, for an error."""
    numbers = [worker.id for worker in workers]
    if numbers == list(range(1, len(numbers) + 1)):
        return f"workers 1 to {len(numbers)}"
    return f"workers {', '.join(map(str, numbers))}"


def is_number(value: Any) -> bool:
    """Whether a value is an int or float and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _machine(host: str) -> str:
    """What workers share when they are on the same machine."""
    return LOOPBACK if host == "::1" or host.startswith(("localhost", "127.")) else host


def _addresses(hosts: Sequence[str], ports: Sequence[int] | int) -> list[tuple[str, int]]:
    if isinstance(hosts, str):
        raise ConfigError(
            f"hosts must be a list of names or addresses, got the text {hosts!r}", hint=f"write [{hosts!r}]"
        )
    ports = [ports] * len(hosts) if isinstance(ports, int) else list(ports)
    if not hosts:
        raise ConfigError("a cluster needs at least one worker", hint="name one, or use Cluster.local(2)")
    if len(hosts) != len(ports):
        raise ConfigError(f"{len(hosts)} hosts but {len(ports)} ports")
    for host in hosts:
        if not isinstance(host, str):
            raise ConfigError(f"a host must be text, got {host!r}")
    for port in ports:
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
            raise ConfigError(f"a port must be 1-65535, got {port!r}")
    addresses = list(zip(hosts, ports, strict=True))
    for (host, port), count in Counter(addresses).items():
        if count > 1:
            raise ConfigError(f"{host}:{port} is named twice")
    return addresses
