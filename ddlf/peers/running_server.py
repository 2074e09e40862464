"""The servers of peers on this machine, and the commands that their owner sends. Runs on the server.

A server writes its address and its secret into two files, so that other commands of its owner find it. Commands travel
as HTTP requests, and the answers as JSON with the fields of the dataclasses here.
"""

from __future__ import annotations

import contextlib
import http
import json
import os
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ddlf.errors import CheckpointError, ConfigError, ConnectError
from ddlf.events.facts import from_data, to_data
from ddlf.monitor.runs import folder as runs
from ddlf.peers.entries import NO_SHARD
from ddlf.peers.link import request
from ddlf.peers.sessions import Link, link_of
from ddlf.rpc.tokens import state_folder
from ddlf.training.checkpoints.durable import explained, replace

SERVER = "server.json"
"""The file with the address in the folder of a run."""
A = TypeVar("A")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The answer to a command that needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitations:
    """The answer to ``invite``: new codes."""

    codes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The answer to ``stop``.

    Args:
        secure: Whether the result comes from secure sums, so that no sets are merged.
    """

    secure: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPeer:
    """A peer in the answer to ``list``.

    Args:
        peer: Its number.
        name: Name that it gave itself.
        connected: Whether it has a connection.
        present: Whether it takes part, with a connection or until its lease runs out.
        removed: Whether it was removed for good.
        samples: Number of its samples.
        shard: The shard that it has; ``NO_SHARD`` without one.
        posts: Number of its answered posts.
        trainings: Trainings that its weights went through.
        updates: Batches that it has trained.
        strikes: Number of its strikes.
        out_s: Seconds until its posts count again; 0 if they count.
        posted_s_ago: Seconds since its last post; None before the first one.
        epsilon: Epsilon of its releases so far; None without noise.
    """

    peer: int
    name: str = ""
    connected: bool = False
    present: bool = False
    removed: bool = False
    samples: int
    shard: int = NO_SHARD
    posts: int = 0
    trainings: int = 0
    updates: int = 0
    strikes: int = 0
    out_s: float = 0.0
    posted_s_ago: float | None = None
    epsilon: float | None = None

    @property
    def state(self) -> str:
        """Whether it is here, in a word."""
        return "removed" if self.removed else "here" if self.connected else "away" if self.present else "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The answer to ``list``.

    Args:
        run: Random name of the run.
        way: How the peers work together: ``"swap"`` or ``"rounds"``.
        codec: How sets travel.
        set_bytes: Length of a set, as it travels.
        over: Why the training is over; empty if it is not.
        shards: Number of shards of the server's data.
        free_shards: Shards without a peer.
        missing_posts: Posts that the round needs beyond those of present peers.
        counts: How often each outcome of a post has happened.
        sets: Number of sets by their state.
        accuracy: Accuracy of the last validation; None before.
        peers: All peers that have arrived.
    """

    run: str
    way: str
    codec: str
    set_bytes: int
    over: str = ""
    shards: int = 0
    free_shards: tuple[int, ...] = ()
    missing_posts: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    sets: dict[str, int] = field(default_factory=dict)
    accuracy: float | None = None
    peers: tuple[ListedPeer, ...] = ()


CommandAnswer = Done | Invitations | Stopped | Overview


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server as its owner's commands reach it. The files of servers have these fields.

    Args:
        origin: URL in links.
        pin: SHA-256 of its certificate in links; empty if systems trust it.
        control: Secret of the commands.
        pid: Its process.
        folder: The folder of its run.
        address: Name or address on this machine.
        port: The port.
        certificate: File of its certificate; empty without TLS.
    """

    origin: str
    pin: str
    control: str
    pid: int
    folder: str
    address: str
    port: int
    certificate: str = ""

    def link(self, code: str) -> str:
        """Return the link with a code."""
        return link_of(self.origin, code, self.pin)

    def invite(self, count: int = 1, peers: int = 1) -> tuple[str, ...]:
        """Return new links, each for a number of peers."""
        answer = self._ask(Invitations, f"invite?count={count}&peers={peers}")
        return tuple(self.link(code) for code in answer.codes)

    def overview(self) -> Overview:
        """Return the peers and the sets."""
        return self._ask(Overview, "list")

    def kick(self, peer: int) -> None:
        """Remove a peer for good."""
        self._ask(Done, f"kick?peer={peer}")

    def merge(self) -> None:
        """Merge all sets into one."""
        self._ask(Done, "merge")

    def stop(self) -> Stopped:
        """End the training."""
        return self._ask(Stopped, "stop")

    def _ask(self, kind: type[A], command: str) -> A:
        """Send a command, and return the answer.

        Raises:
            ConnectError: The server does not answer, or has another version.
            ConfigError: It refuses.
            CheckpointError: Its disk refuses.
        """
        link = Link("https" if self.certificate else "http", self.address, self.port, "")
        tls = None
        if self.certificate:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            tls.check_hostname = False
            # The certificate itself is known, so it need not be signed by itself.
            tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            tls.load_verify_locations(self.certificate)
        # Behind a proxy, the server accepts names of loopback and the proxy's name only.
        headers = {"Authorization": f"Bearer {self.control}", "Host": "127.0.0.1"}
        status, body = request(link, f"/control/{command}", headers, tls)
        if status == http.HTTPStatus.INSUFFICIENT_STORAGE:
            raise CheckpointError(body)
        if status != http.HTTPStatus.OK:
            raise (ConfigError if status == 409 else ConnectError)(f"the server refuses: {body}")
        try:
            return from_data(kind, json.loads(body))
        except (TypeError, ValueError) as error:
            raise ConnectError(
                f"the answer of {self.origin} cannot be read: {error}",
                hint="use the version of DDLF that the server has",
            ) from None

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Write the files with the address. That in the run's folder stays after the end, so that a resumed run has the
        same port.
        """
        own_file = _folder() / f"{self.pid}.json"
        content = json.dumps(to_data(self)).encode()
        for file in (own_file, Path(self.folder) / SERVER):
            with explained(file.parent, "write the address of the server in", need=len(content)):
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace(file, content)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                own_file.unlink()


def server_at(
    sock: socket.socket, path: Path, *, origin: str, pin: str, control: str, certificate: Path | None
) -> RunningServer:
    """Return the server of this process.

    Args:
        sock: Its listening socket.
        path: The folder of its run.
        origin: URL in links.
        pin: SHA-256 of its certificate in links; empty if systems trust it.
        control: Secret of the commands.
        certificate: File of its certificate; None without TLS.
    """
    address, port = sock.getsockname()[:2]
    return RunningServer(
        origin=origin,
        pin=pin,
        control=control,
        pid=os.getpid(),
        folder=str(path),
        address={"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address) or name_in_link(address),
        port=port,
        certificate="" if certificate is None else str(certificate.absolute()),
    )


def running_servers() -> list[RunningServer]:
    """Return the servers of this user on this machine, newest first. Entries of killed servers are removed."""
    result: list[tuple[float, RunningServer]] = []
    for file in _folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            server = read_server(file)
            if runs.process_started(server.pid) is None:
                file.unlink()
            else:
                result.append((file.stat().st_mtime, server))
    return [server for _, server in sorted(result, key=lambda row: row[0], reverse=True)]


def read_server(file: Path) -> RunningServer:
    """Return the server in one of its files.

    Raises:
        OSError: There is no such file.
        TypeError, ValueError: It is damaged.
    """
    return from_data(RunningServer, json.loads(file.read_text(encoding="utf-8")))


def last_port(path: Path) -> int:
    """Return the port of the last server of a run; 0 if none has begun."""
    try:
        return read_server(path / SERVER).port
    except (OSError, TypeError, ValueError):
        return 0


def name_in_link(host: str) -> str:
    """Return how a link names the address that a server listens on."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _folder() -> Path:
    """Return the folder with the files of this user's servers."""
    return state_folder() / "peer-servers"
