"""Where the workers of a cluster come from: the interface, and those that exist already. Runs on the master."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from ddlf.errors import ConfigError
from ddlf.rpc.tokens import Tokens, find_tokens, loopback_tokens

GROUP = "ddlf.launchers"
"""Entry points of other packages: each makes a ``Launcher`` of a text, which may be empty."""
LOOPBACK = "loopback"

Address = tuple[str, int]
"""Host and port."""


class Launcher(ABC):
    """Brings up the workers of one cluster, and ends those that it has started.

    Attributes:
        tokens: The secret that the workers share with this side.
        addresses: One for each worker, in order; a port is 0 until the worker has started.
        names: What people call the workers, in order; where empty, by their addresses.
        revives: Whether it starts workers, and again those that have ended.
    """

    tokens: Tokens
    addresses: list[Address]
    names: Sequence[str] = ()
    revives = False

    @abstractmethod
    async def start(self, modules: Sequence[str] = ()) -> list[Address]:
        """Let all workers be there, and return their addresses, in order. Safe to call again, also at the same time.

        Args:
            modules: What their executors will have to import; those that are started now may begin with it at once.

        Raises:
            ConnectError: One did not start, or ``stop`` was called meanwhile. Nothing is left running.
        """

    async def revive(self, index: int) -> Address:
        """Start one worker again if it has ended.

        Args:
            index: Index of its address in what ``start`` returned.

        Raises:
            ConnectError: It did not start, or ``stop`` was called.
        """
        return self.addresses[index]

    async def how_ended(self, index: int) -> int | None:
        """The exit code of a worker's process, negative for a signal; None while it runs, and where that cannot be known."""
        return None

    @abstractmethod
    async def stop(self) -> None:
        """End what was started, also what is starting, and wait for it. Safe to call again; ``start`` may follow."""


class Given(Launcher):
    """Workers that somebody else starts and ends.

    Args:
        hosts: Names or addresses of their machines.
        ports: One for each host, or one for all.
        token_file: As in ``Cluster``.
        names: What people call them.

    Raises:
        ConfigError: The addresses cannot be used, or there is no token for other machines.
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


def installed(text: str) -> Launcher:
    """A launcher that another package brings.

    Args:
        text: ``"NAME"``, or ``"NAME:TEXT"`` with what the launcher itself reads, as ``"slurm:nodes=4"``.

    Raises:
        ConfigError: No installed package brings one of that name, or what it brings is none.
    """
    name, _, rest = text.partition(":")
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        there = f"there are: {', '.join(sorted(found))}" if found else "install the package that brings it"
        raise ConfigError(f"there is no launcher {name!r}", hint=there)
    launcher = found[name].load()(rest)
    if not isinstance(launcher, Launcher):
        raise ConfigError(
            f"{found[name].value} makes a {type(launcher).__name__}, which is no ddlf.cluster.launch.launcher.Launcher"
        )
    return launcher


def machine(host: str) -> str:
    """What workers share when they are on the same machine."""
    return LOOPBACK if host == "::1" or host.startswith(("localhost", "127.")) else host


def addresses(hosts: Sequence[str], ports: Sequence[int] | int) -> list[Address]:
    """Pairs of host and port.

    Raises:
        ConfigError: They cannot be addresses, or one is named twice.
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
                hint=f"give ports apart, one for each host or one for all: Cluster([{name!r}], [{behind or 9000}])",
            )
    for port in ports:
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
            raise ConfigError(f"a port must be 1-65535, got {port!r}")
    pairs = list(zip(hosts, ports, strict=True))
    for (host, port), count in Counter(pairs).items():
        if count > 1:
            raise ConfigError(f"{host}:{port} is named twice")
    return pairs
