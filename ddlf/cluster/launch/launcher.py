"""The interface of launchers, and the launcher for workers that already run. Runs on the master."""

from __future__ import annotations

import difflib
import re
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Self

from ddlf.errors import ConfigError, ConnectError
from ddlf.rpc.tokens import Tokens, find_tokens, loopback_tokens

GROUP = "ddlf.launchers"
"""Group of entry points. Each is a subclass of ``Launcher``, which makes an object by ``from_text`` or ``from_keys``, or
a function that makes a ``Launcher`` from a text, which may be empty.
"""
OWN = {
    "command": "ddlf.cluster.launch.command:Commanded",
    "dask": "ddlf.cluster.launch.dask:Dask",
    "k8s": "ddlf.cluster.launch.kubernetes.launcher:Kubernetes",
    "mpi": "ddlf.cluster.launch.ranks:Mpi",
    "ray": "ddlf.cluster.launch.ray:Rayed",
    "slurm": "ddlf.cluster.launch.slurm.launcher:Slurm",
    "spark": "ddlf.cluster.launch.spark:Spark",
    "ssh": "ddlf.cluster.launch.ssh:Ssh",
}
"""DDLF's own launchers, as entry points."""
LOOPBACK = "loopback"
MOST_WORKERS = 1024

Address = tuple[str, int]
"""Host and port."""
Way = Callable[[float], Awaitable[socket.socket]]
"""Returns a connected socket to one worker within some seconds. It may be called in any event loop."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The number of workers of a run.

    Args:
        least: The run begins when so many have come.
        most: Number of places, and of slots.
    """

    least: int
    most: int

    @classmethod
    def of(cls, value: object) -> Self:
        """Parse ``4``, ``"4"`` or ``"2..8"``.

        Raises:
            ValueError: It is none of these, or not 1-1024.
        """
        if isinstance(value, cls):
            return value
        match = (
            re.fullmatch(r"(\d{1,9})(?:\.\.(\d{1,9}))?", str(value).strip()) if not isinstance(value, bool) else None
        )
        if match is None:
            raise ValueError(f"must be a number of workers such as 4, or 2..8, got {value!r}")
        least, most = int(match[1]), int(match[2] or match[1])
        if not 1 <= least <= most <= MOST_WORKERS:
            raise ValueError(
                f"must be 1-{MOST_WORKERS} workers, and a range begins with its smaller number, got {value}"
            )
        return cls(least, most)

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}..{self.most}"


class Cause(StrEnum):
    """Why a worker has left its place."""

    NOTICE = "notice"
    PREEMPTED = "preempted"
    MEMORY = "out of memory"
    TIME_LIMIT = "time limit"
    NODE = "node lost"
    CRASH = "crash"
    CARD = "card lost"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Left:
    """The end of a worker, as its launcher knows it.

    Args:
        cause: Why it ended.
        words: The engine's own words about it, as the end of a sentence; empty if there are none.
        exit_code: Exit code of the worker's process, negative for a signal; None if nobody knows it.
    """

    cause: Cause
    words: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Incarnation:
    """The present one of the workers that come to a place one after another.

    Args:
        number: Differs from that of each other worker at this place; 0 if nobody knows it.
        engine: The name of what runs the worker in its engine, such as ``"job 12_3"`` or ``"pod app-0"``; empty without
            one.
    """

    number: int = 0
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A fact about an engine that its launcher finds before a run, for ``ddlf doctor``.

    Args:
        fact: The fact, in one line, such as ``"Slurm 22.05.8"``, or the problem.
        do: How to repair the problem; empty without a problem.
        exit_code: Exit code of a run with this problem.
    """

    fact: str
    do: str = ""
    exit_code: int = ConnectError.exit_code


class WorkersMissing(ConfigError):
    """A launcher needs the number of workers, which is missing."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """How an engine runs this command again after a notice.

    Args:
        job: The engine's name of the job with this command. It is the same each time that the engine runs the command.
        ask: Asks the engine. It does nothing if the engine sees by the exit code that it has to run the command again.
    """

    job: str
    ask: Callable[[], None]


class Launcher(ABC):
    """Starts the workers of one cluster, and ends the workers that it has started.

    Attributes:
        tokens: The secret that the workers share with the master.
        addresses: One address for each worker, in order; a port is 0 until the worker has started.
        names: Names of the workers for people, in order; if empty, addresses serve as names.
        revives: Whether the launcher starts workers, and restarts them after they have ended.
        fixed_places: Whether each worker has a number before it comes, its place + 1. A run then has a slot for each
            place, also if its worker comes later.
        uses_tasks: Whether the workers are in the tasks in which an engine has started this command several times.
        least: How many workers are enough to begin; None if all are needed.
        when_lost: What to do about a lost worker, for messages.
    """

    tokens: Tokens
    addresses: list[Address]
    names: Sequence[str] = ()
    revives = False
    fixed_places = False
    uses_tasks = False
    least: int | None = None
    when_lost = "check the worker's terminal, or run: ddlf status"

    @classmethod
    def from_text(cls, text: str, workers: Workers | None = None) -> Launcher:
        """Make the launcher of ``--launcher NAME:TEXT --workers N``. It may be of another class, as the place asks for.

        Raises:
            ConfigError: The text is invalid, or the launcher cannot be used here.
        """
        raise ConfigError(f"{cls.__name__} cannot be made from a text", hint="it needs a method from_text")

    @classmethod
    def from_keys(cls, values: Mapping[str, Any]) -> Launcher:
        """Make the launcher of a mapping in cluster.yaml, or of ``Cluster.on``.

        Raises:
            ConfigError: A key or a value is invalid, or the launcher cannot be used here.
        """
        raise ConfigError(f"{cls.__name__} has no keys", hint="write it as a text: NAME:TEXT")

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

    def requeue(self) -> Requeue:
        """Return how the engine runs this command again after a notice.

        Raises:
            ConfigError: No engine runs it again. The message says why.
        """
        raise ConfigError(
            "--requeue has no effect here: no engine has started this command, so none starts it again",
            hint="start it again yourself, with --checkpoint DIR --resume auto",
        )

    def way(self, index: int) -> Way | None:
        """Return a function that gets a connection to a worker that dials this master; None if the master dials the
        worker's address.
        """
        return None

    def incarnation(self, index: int) -> Incarnation:
        """Return which worker is at a place now, for the record of the run."""
        return Incarnation()

    async def left(self, index: int) -> Left | None:
        """Return how the worker at a place ended. None means that it runs, or that the launcher does not know."""
        return None

    async def waits(self, index: int) -> str:
        """Return why a worker has not come yet, in the engine's words; empty if the reason is unknown."""
        return ""

    def never(self, index: int) -> str:
        """Return why the engine starts no worker at a place any more, in its words; empty if one may come."""
        return ""

    def comes_later(self, index: int) -> bool:
        """Return whether the run has no worker at a place yet, and may get one."""
        return False

    async def check(self) -> AsyncIterator[Check]:
        """Ask the engine all that it can answer before a run, for ``ddlf doctor``. This starts no worker.

        Yields:
            The facts, as soon as they are known.

        Raises:
            DDLFError: The engine cannot be used at all.
        """
        nothing: tuple[Check, ...] = ()
        for check in nothing:
            yield check

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


def installed(text: str, workers: Workers | None = None) -> Launcher:
    """Return the launcher with a name, from DDLF or from another package.

    Args:
        text: ``"NAME"``, or ``"NAME:TEXT"`` with a text for the launcher, as in ``"slurm:start_timeout=60"``.
        workers: Number of workers (``--workers``), for a launcher that has this key.

    Raises:
        ConfigError: There is no launcher of this name, its entry point returns another object, or it cannot be used here.
    """
    name, _, argument = text.partition(":")
    entry = _find(name)
    if isinstance(entry, type) and issubclass(entry, Launcher):
        return entry.from_text(argument, workers)
    if workers is not None:
        raise ConfigError(f"--workers has no effect with --launcher {name}", hint="leave it out")
    launcher = entry(argument)
    if not isinstance(launcher, Launcher):
        raise ConfigError(
            f"the launcher {name!r} makes a {type(launcher).__name__} instead of a ddlf.cluster.launch.launcher.Launcher"
        )
    return launcher


def from_keys(name: str, values: Mapping[str, Any]) -> Launcher:
    """Return the launcher with a name, with these keys.

    Raises:
        ConfigError: There is no launcher of this name, it has no keys, or they are invalid.
    """
    entry = _find(name)
    if not (isinstance(entry, type) and issubclass(entry, Launcher)):
        raise ConfigError(f"the launcher {name!r} has no keys", hint=f"write it as a text: {name}:TEXT")
    return entry.from_keys(values)


def _find(name: str) -> Any:
    """Load the entry point of a launcher. DDLF's own names cannot be taken by another package."""
    by_name = {entry.name: entry for entry in entry_points(group=GROUP)}
    if clashes := by_name.keys() & OWN.keys():
        name_taken = min(clashes)
        raise ConfigError(
            f"the package of {by_name[name_taken].value} brings a launcher {name_taken!r}, which DDLF has already",
            hint="uninstall it, or give its launcher another name",
        )
    if name in OWN:
        return EntryPoint(name, OWN[name], GROUP).load()
    if name not in by_name:
        names = sorted({*by_name, *OWN})
        similar = difflib.get_close_matches(name.lower(), names, 1)
        hint = (
            f"did you mean {similar[0]!r}?"
            if similar
            else f"there are: {', '.join(names)}; other packages can bring more"
        )
        raise ConfigError(f"there is no launcher {name!r}", hint=hint)
    return by_name[name].load()


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
