"""The interface of launchers, and the launcher for workers that already run. Runs on the master."""

from __future__ import annotations

import contextlib
import inspect
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from ddlf.errors import ConfigError
from ddlf.rpc.tokens import Tokens, find_tokens, loopback_tokens

GROUP = "ddlf.launchers"
"""Group of entry points of other packages. Each is a function that makes a ``Launcher`` from a text, which may be
empty. If it has a parameter ``workers``, it also gets the number of workers (``--workers``).
"""
OWN = {
    "command": "ddlf.cluster.launch.command:make_command",
    "mpi": "ddlf.cluster.launch.ranks:make_mpi",
    "slurm": "ddlf.cluster.launch.ranks:make_slurm",
}
"""DDLF's own launchers, as entry points."""
LOOPBACK = "loopback"

Address = tuple[str, int]
"""Host and port."""
Way = Callable[[float], Awaitable[socket.socket]]
"""Returns a connected socket to one worker within some seconds. It may be called in any event loop."""


class Launcher(ABC):
    """Starts the workers of one cluster, and ends the workers that it has started.

    Attributes:
        tokens: The secret that the workers share with the master.
        addresses: One address for each worker, in order; a port is 0 until the worker has started.
        names: Names of the workers for people, in order; if empty, addresses serve as names.
        revives: Whether the launcher starts workers, and restarts them after they have ended.
    """

    tokens: Tokens
    addresses: list[Address]
    names: Sequence[str] = ()
    revives = False

    @abstractmethod
    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        """Start all workers that do not run, and return all addresses, in order. Safe to call again or concurrently.

        Args:
            modules: Modules that the executors will import. Workers that start now can begin with these imports.

        Raises:
            ConnectError: A worker did not start, or ``stop`` was called meanwhile. No started process remains.
        """

    async def revive(self, index: int) -> Address:
        """Restart one worker if it has ended.

        Args:
            index: Index of the worker's address in the result of ``start``.

        Raises:
            ConnectError: The worker did not start, or ``stop`` was called.
        """
        return self.addresses[index]

    def follower(self) -> Callable[[], int] | None:
        """Return the work of this process if it is not the master, else None. An engine may start the same command
        several times, for workers, too. The work returns the exit code.
        """
        return None

    def way(self, index: int) -> Way | None:
        """Return a function that gets a connection to a worker that dials this master; None if the master dials the
        worker's address.
        """
        return None

    async def how_ended(self, index: int) -> int | None:
        """Return the exit code of a worker's process, negative for a signal.

        None means that the process runs, or that the launcher cannot know.
        """
        return None

    @abstractmethod
    async def stop(self) -> None:
        """End all started and starting workers, and wait for them. Safe to call again; ``start`` may follow."""


class Given(Launcher):
    """The launcher for workers that already run. This process neither starts nor ends them.

    Args:
        hosts: Names or addresses of their machines.
        ports: One port for each host, or one for all.
        token_file: The argument of ``Cluster``.
        names: Names of the workers for people.

    Raises:
        ConfigError: The addresses are invalid, or there is no token for other machines.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        ports: Sequence[int] | int = 9000,
        *,
        token_file: str | Path | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.addresses = addresses(hosts, ports)
        self.names = names
        tokens = find_tokens(token_file)
        if tokens is None and any(machine(host) != LOOPBACK for host, _ in self.addresses):
            raise ConfigError(
                "no token for workers on other machines",
                hint="run 'ddlf token new' and copy the file to the other machines",
            )
        self.tokens = tokens or loopback_tokens()

    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        return self.addresses

    async def stop(self) -> None:
        pass


def installed(text: str, workers: int | None = None) -> Launcher:
    """Return the launcher with a name, from DDLF or from another package.

    Args:
        text: ``"NAME"``, or ``"NAME:TEXT"`` with a text for the launcher, as in ``"slurm:start_timeout=60"``.
        workers: Number of workers, for a launcher that needs it.

    Raises:
        ConfigError: There is no launcher of this name, its entry point returns another object, or it cannot be used here.
    """
    name, _, rest = text.partition(":")
    own = {name: EntryPoint(name, where, GROUP) for name, where in OWN.items()}
    launchers = {entry.name: entry for entry in entry_points(group=GROUP)} | own
    if name not in launchers:
        hint = f"there are: {', '.join(sorted(launchers))}; other packages can bring more"
        raise ConfigError(f"there is no launcher {name!r}", hint=hint)
    make = launchers[name].load()
    counts = False
    with contextlib.suppress(TypeError, ValueError):  # a class of C has no signature
        counts = "workers" in inspect.signature(make).parameters
    if counts and workers is None:
        raise ConfigError(
            f"--launcher {name} needs the number of workers",
            hint="start it with: ddlf run app.py --launcher '...' --workers N",
        )
    if not counts and workers is not None:
        raise ConfigError(f"--workers has no effect with --launcher {name}", hint="leave it out")
    launcher = make(rest, workers=workers) if counts else make(rest)
    if not isinstance(launcher, Launcher):
        raise ConfigError(
            f"{launchers[name].value} makes a {type(launcher).__name__} instead of a ddlf.cluster.launch.launcher.Launcher"
        )
    return launcher


def machine(host: str) -> str:
    """Return a text that identifies the machine of a host: it is equal for all workers on the same machine."""
    return LOOPBACK if host == "::1" or host.startswith(("localhost", "127.")) else host


def addresses(hosts: Sequence[str], ports: Sequence[int] | int) -> list[Address]:
    """Combine hosts and ports to one address for each worker.

    Raises:
        ConfigError: A host or a port is invalid, or an address is named twice.
    """
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
        name, colon, behind = host.partition(":")
        if colon and ":" not in behind:
            raise ConfigError(
                f"a host is a name or an address without a port, got {host!r}",
                hint=f"pass ports separately, one for each host or one for all: Cluster([{name!r}], [{behind or 9000}])",
            )
    for port in ports:
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
            raise ConfigError(f"a port must be 1-65535, got {port!r}")
    pairs = list(zip(hosts, ports, strict=True))
    for (host, port), count in Counter(pairs).items():
        if count > 1:
            raise ConfigError(f"{host}:{port} is named twice")
    return pairs
