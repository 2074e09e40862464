"""The workers of one master: where they come from, and how the master connects to them. Runs on the master."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ddlf.cluster.behaviour import is_number
from ddlf.cluster.config.addresses import parse_advertised
from ddlf.cluster.group import Group
from ddlf.cluster.hosted import Hosted
from ddlf.cluster.introduce import introduce, introduced
from ddlf.cluster.launch.launcher import Given, Launcher, addresses, installed, machine
from ddlf.cluster.link import CONNECT_TIMEOUT_S
from ddlf.cluster.look import look
from ddlf.cluster.members import Members
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import ConfigError
from ddlf.events.sinks import Events
from ddlf.monitor.terminal.echo import Echo
from ddlf.rpc.liveness import Timing
from ddlf.rpc.tls import Security, client_context

if TYPE_CHECKING:
    from ddlf.monitor.dashboard.server import Dashboard


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
        heartbeat_s: Seconds between two signs of life, in both directions; by default an eighth of ``dead_after_s``.
        suspect_after_s: Seconds of silence that make a worker's ``state`` ``"suspect"``; by default half of
            ``dead_after_s``.
        dead_after_s: Seconds of silence; 4 by default. After them the master gives up a worker, and another master may
            take this master's workers.
        takeover: Take the workers from another master that has their leases.
        guest: Connect without leases, for status and measurements. This works while another master has the workers.
        names: Names of the workers for people, instead of their addresses.
        advertise: Where other workers reach each worker, as ``HOST`` or ``HOST:PORT``. With an empty text the master
            asks the worker.
        echo: Print the output of user code on the workers to standard error, with the worker's name. You can set this
            attribute at any time.

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
    ) -> None:
        if isinstance(hosts, Launcher) and token_file is not None:
            raise ConfigError("a launcher has a token of its own", hint="leave out token_file")
        launcher = hosts if isinstance(hosts, Launcher) else Given(hosts, ports, token_file=token_file, names=names)
        count = len(launcher.addresses)
        if len(advertise) not in (0, count):
            raise ConfigError(
                f"{count} workers but {len(advertise)} places to advertise", hint="an empty text for none"
            )
        for text in filter(None, advertise):
            parse_advertised(text)
        self._advertise = advertise or [""] * count
        if not is_number(connect_timeout_s) or not 0 < connect_timeout_s < math.inf:
            raise ConfigError(f"connect_timeout_s must be a number of seconds above 0, got {connect_timeout_s!r}")
        if min_workers is not None and not 1 <= min_workers <= count:
            raise ConfigError(f"min_workers must be 1-{count}, got {min_workers}")
        ca, certificate, key = (Path(file).expanduser() if file else None for file in (tls_ca, tls_cert, tls_key))
        security = Security(ca, certificate, key, insecure_plaintext)
        if ca or certificate:
            client_context(security)  # check the files now, because a wrong file is a mistake of the caller
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
        members = Members(launcher, self._proxies(count), min_workers, connect_timeout_s, events.emit)
        super().__init__(members, hosted, events)

    def _proxies(self, count: int) -> list[ProxyWorker]:
        launcher = self._launcher
        return [
            self._proxy(
                *launcher.addresses[index],
                id=index + 1,
                N=count,
                called=launcher.names[index] if launcher.names else "",
                advertise=self._advertise[index],
                how_ended=partial(launcher.how_ended, index),
                revive=partial(launcher.revive, index) if launcher.revives else None,
            )
            for index in range(count)
        ]

    def _proxy(self, host: str, port: int, **own: Any) -> ProxyWorker:
        share = self._machines[machine(host)]
        return ProxyWorker(host, port, self._launcher.tokens.primary, share=share, **self._options, **own)

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
        }
        return cls(
            **({"hosts": installed(config.launcher)} if config.launcher is not None else workers),
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
    def local(cls, n: int = 2, **options: Any) -> Self:
        """Return a cluster of ``n`` new workers on this machine. ``connect`` starts them and ``close`` ends them.

        Args:
            n: Number of workers, 1 to 1,024.
            options: Arguments of ``Cluster``, such as ``threads``, ``pickle_results`` and ``dead_after_s``.
        """
        from ddlf.cluster.launch.local import Local

        return cls(Local(n), **options)

    def __repr__(self) -> str:
        return f"Cluster({', '.join(f'{worker.host}:{worker.port}' for worker in self._workers)})"

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
        return self

    async def add(self, host: str, port: int = 9000) -> ProxyWorker:
        """Take another worker into the cluster. A training run gives it slots from its next round.

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
        self._dispatch.look()
        return worker

    @property
    def missing(self) -> list[ProxyWorker]:
        """The workers that ``connect`` did not reach. A training run takes them in when they answer."""
        return list(self._members.missing)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the connections; None while the cluster is not connected."""
        return self._members.loop

    def take_in(self, worker: ProxyWorker) -> None:
        """Count a missing worker among the workers, after the master has reached it."""
        self._members.take_in(worker)
        self._dispatch.look()

    async def introduce(self, workers: Sequence[ProxyWorker], run: str) -> None:
        """Let each of these workers call every other one in a run; ``ddlf.cluster.introduce`` has the details."""
        await introduce(workers, run)

    async def introduced(self, workers: Sequence[ProxyWorker], run: str) -> list[tuple[ProxyWorker, ProxyWorker, str]]:
        """Introduce workers like ``introduce``, but return the pairs without a way instead of raising an error.

        Returns:
            For each such pair: the caller, the called worker, and the reason.
        """
        return await introduced(workers, run)

    async def look(self) -> list[dict[str, Any]]:
        """Return the state of each worker, missing ones included, as its daemon reports it.

        Returns:
            The dicts that ``ddlf.cluster.look`` describes. A guest connects to daemons that have returned.
        """
        return await look(self._members, reach=bool(self._options["guest"]))

    def dashboard(
        self, app: Any = None, *, port: int | None = None, stop: Callable[[], bool] | None = None, **about: Any
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
