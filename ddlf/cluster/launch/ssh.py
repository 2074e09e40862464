"""Workers on other machines, by the system's ``ssh``: ``--launcher ssh:hosts=pc01,pc02``. Runs on the master.

Each worker has its own connection of ssh. A forward of this connection leads from a port there to the master's gate, so
neither machine needs an open port. The token travels through standard input. When the connection ends, the worker ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from ddlf.cluster.launch.engine import PlaceEngine, first_line
from ddlf.cluster.launch.gate import LOOPBACK_HOST, Gate
from ddlf.cluster.launch.keys import Cores, Env, Names, Python, WorkersKeys
from ddlf.cluster.launch.launcher import Cause, Check, Left, Workers
from ddlf.cluster.launch.remote import CONNECTING, PYTHON, SSH_FAILED, Failure, Remote, check_ssh, is_host
from ddlf.cluster.launch.supervisor import WorkerStart

ANY_PORT = 9
"""A port of this machine where nothing listens, for a forward that is only tried."""


def _hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    if not hosts:
        raise ValueError("must name at least one host")
    for host in hosts:
        if {"[", "]"} & set(host) and ":" not in host:  # no address of IPv6
            raise ValueError(f"must be single names, because ssh expands no lists, got {host!r}")
        if not is_host(host):
            raise ValueError(f"must be names that ssh knows, got {host!r}")
    duplicates = [host for host, count in Counter(hosts).items() if count > 1]
    if duplicates:
        raise ValueError(f"names {duplicates[0]} twice; for more workers than hosts give their number with --workers")
    return hosts


class SshKeys(WorkersKeys):
    """The keys of the launcher ``ssh``."""

    example: ClassVar[str] = "hosts=pc01,pc02"
    hosts: Annotated[Names, AfterValidator(_hosts)] = Field(description="Names of the machines, as ssh knows them.")
    python: Python = Field(default=PYTHON, description="The Python there, with DDLF; ~ is the home folder there.")
    env: Env = Field(default_factory=dict, description="More environment variables of the workers.")
    cores: Cores | None = Field(default=None, description="Number of CPUs that each worker may use.")


class Ssh(PlaceEngine):
    """Workers on machines that the system's ssh can reach: one for each host, or the number of ``workers``, host by host
    in turns.
    """

    name = "ssh"
    model = SshKeys
    keys: SshKeys

    def __init__(self, keys: SshKeys, workers: Workers | None = None) -> None:
        hosts = keys.hosts
        super().__init__(keys, workers or keys.workers or Workers(len(hosts), len(hosts)))
        self.host = LOOPBACK_HOST  # the forwards end here
        hosts_and_numbers = [
            (hosts[place % len(hosts)], place // len(hosts) + 1) for place in range(len(self.addresses))
        ]
        self.addresses = [(host, 0) for host, _ in hosts_and_numbers]  # workers of one machine share its cores
        self.names = [host if number == 1 else f"{host} ({number})" for host, number in hosts_and_numbers]
        self._waits: dict[int, str] = {}
        self._connecting: asyncio.Semaphore  # ``prepare`` makes it, because it belongs to one gate's loop

    async def check(self) -> AsyncIterator[Check]:
        """Connect to each host as a worker would: with ssh, a Python with DDLF, and a forward to this machine."""
        check_ssh()
        yield Check(await first_line("ssh", "-V"))
        connecting = asyncio.Semaphore(CONNECTING)
        looks = [asyncio.ensure_future(self._look_at_host(host, connecting)) for host in self.keys.hosts]
        try:
            for check in looks:
                yield await check
        finally:
            for check in looks:
                check.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    async def _look_at_host(self, host: str, connecting: asyncio.Semaphore) -> Check:
        async with connecting:
            remote = await Remote.open(host, self.keys.python, ANY_PORT)
            try:
                answer: object = await remote.port()
                if not isinstance(answer, Failure):
                    remote.begin("look", {})
                    for _ in ("begun", "python"):
                        answer = answer if isinstance(answer, Failure) else await remote.answer()
            finally:
                await remote.end()
        if isinstance(answer, Failure):
            return Check(answer.sentence, answer.hint or f"try it without DDLF first: ssh {host} true")
        assert isinstance(answer, dict)
        return Check(f"{host}: {answer['python']} has the same DDLF, and its connection leads back to this machine")

    async def prepare(self) -> None:
        check_ssh()
        self._connecting = asyncio.Semaphore(CONNECTING)

    def worker(self, gate: Gate, place: int | None) -> WorkerStart:
        return WorkerStart("", place, self.tokens.primary, self.keys.cores, self.keys.env)

    async def run(self, place: int, worker: WorkerStart) -> Left:
        """Run a worker until it ends, within one connection of ssh.

        Raises:
            ConnectError: ssh, Python or DDLF cannot be used there, and another try would fail, too.
        """
        host, gate = self.addresses[place][0], self.gate
        self._waits.setdefault(place, f"ssh connects to {host}")
        remote = None
        try:
            async with self._connecting:
                remote = await Remote.open(host, self.keys.python, gate.port)
                failure = await self._prepare_worker(remote, worker)
            if failure is None:
                self._waits[place] = f"the worker on {host} starts"
                self._runs_in[place] = f"ssh to {host}"
                remote.send(worker.token)
                failure = await remote.failure()
        finally:
            if remote is not None:
                await remote.end()
        self._waits[place] = failure.sentence
        if failure.is_final and not gate.has_begun:
            raise failure.error()
        return Left(Cause.NODE if failure.code == SSH_FAILED else Cause.CRASH, failure.sentence, failure.code)

    async def _prepare_worker(self, remote: Remote, worker: WorkerStart) -> Failure | None:
        """Send all that the worker needs but the token, which only the right DDLF gets."""
        port = await remote.port()
        if isinstance(port, Failure):
            return port
        start = replace(worker, gates=f"{LOOPBACK_HOST}:{port}")
        remote.begin("join", {"arguments": start.arguments(), "environment": start.environment()})
        for _ in ("begun", "ready"):
            answer = await remote.answer()
            if isinstance(answer, Failure):
                return answer
        return None

    async def waits(self, index: int) -> str:
        return self._waits.get(index, "")
