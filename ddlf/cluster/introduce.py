"""Introduces the workers of a run to each other, so that they can call each other. Runs on the master.

The introduction tells each worker its callers, its callees and their addresses. The address that a master dials may be
its own machine's or a forwarded port, so another worker often cannot use it. Therefore each worker gets several
candidates, a called worker proves its identity, and every pair is tried before the run depends on it. If a worker cannot
dial another one, as when the other one listens nowhere, the other one dials it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

from ddlf.cluster.config.addresses import parse_advertised, same_host
from ddlf.cluster.launch.launcher import LOOPBACK, machine
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import AppMissing, ConfigError, ConnectError, DDLFError, ProtocolError, VersionError
from ddlf.rpc.messages import Request
from ddlf.worker.introduction import Address, Callee, Endpoint
from ddlf.worker.lease import offer_number, peer_pass

log = logging.getLogger(__name__)

PAIRS_SHOWN = 5
"""Maximum number of unconnected pairs in the error message."""
DIAL_BACK_S = 30.0
"""Seconds until a worker must have tried all addresses of another one."""


async def introduce(
    workers: Sequence[ProxyWorker], run: str, *, calls: Mapping[int, Collection[int]] | None = None
) -> None:
    """Let workers call each other in a run, and wait until every pair has been tried.

    The workers already host their roles of the run. Repeat the introduction with all workers of the run after a worker
    was lost or has joined, or after a role was opened again. Existing connections stay, except for workers that are
    not named any more. An introduction ends with the run on each worker, and with this master's lease.

    Args:
        workers: All workers of the run that call or are called.
        run: Name of the run.
        calls: For each caller's number, the numbers of the workers that it may call. None allows every pair.

    Raises:
        ConnectError: A worker cannot reach another one. The message names both, and the problem at each address.
        ConfigError: This master has no lease; ``calls`` names workers that are not in ``workers``; or two workers
            advertise the same address.
        VersionError: A worker's release does not support calls between workers.
        WorkerLost: A worker was lost meanwhile; other possible errors are ``ExecutorCrashed``, ``AppMissing`` and
            ``LeaseError``.
    """
    if pairs := await introduced(workers, run, calls=calls):
        raise unreachable(pairs)


HINT = "open that port in the firewall, or set the address for other workers: ddlf-worker --advertise HOST:PORT, or advertise: in cluster.yaml"
"""Hint of the error when one worker cannot reach another one."""


def unreachable(pairs: Sequence[tuple[ProxyWorker, ProxyWorker, str]], hint: str = HINT) -> ConnectError:
    """Return the error that names the workers that cannot reach each other, from the result of ``introduced``."""
    lines = [f"{caller.name} cannot reach {callee.name}: {problem}" for caller, callee, problem in pairs]
    note = [f"and {len(lines) - PAIRS_SHOWN} more pairs"] if len(lines) > PAIRS_SHOWN else []
    return ConnectError("\n".join([*lines[:PAIRS_SHOWN], *note]), hint=hint)


async def introduced(
    workers: Sequence[ProxyWorker], run: str, *, calls: Mapping[int, Collection[int]] | None = None
) -> list[tuple[ProxyWorker, ProxyWorker, str]]:
    """Introduce workers like ``introduce``, but return the pairs without a connection instead of raising an error.

    Returns:
        For each such pair: the caller, the called worker, and the problem at each address.
    """
    for worker in workers:
        if worker.identity.guest:
            raise ConfigError(
                f"{worker.name} is connected as a guest, so it cannot be introduced to other workers",
                hint="connect without guest",
            )
    numbers = {id for caller, callee in (calls or {}).items() for id in (caller, *callee)}
    if unknown := sorted(numbers - {worker.id for worker in workers}):
        raise ConfigError(f"worker {unknown[0]} is named in calls, but is not among the introduced workers")
    endpoints = dict(zip(workers, await asyncio.gather(*map(_endpoint, workers)), strict=True))
    _check_distinct(endpoints)
    executors = {worker.id: worker.executor.name for worker in workers}
    await asyncio.gather(*(worker.rpc(_introduction(worker, endpoints, run, calls)) for worker in workers))
    unmet = await _meet(workers, workers)
    refused = await asyncio.gather(*(_dial_back(caller, callee, endpoints, run) for caller, callee, _ in unmet))
    if retried := {caller for (caller, _, _), reason in zip(unmet, refused, strict=True) if reason == ""}:
        settled = [(pair, reason) for pair, reason in zip(unmet, refused, strict=True) if pair[0] not in retried]
        unmet = await _meet(list(retried), workers)
        refused = [reason for _, reason in settled] + [None] * len(unmet)
        unmet = [pair for pair, _ in settled] + unmet
    missed = {worker for caller, callee, _ in unmet for worker in (caller, callee)}
    await asyncio.gather(*(_check_there(worker, executors[worker.id]) for worker in missed))
    return [
        (caller, callee, f"{reason}; and {callee.name} cannot dial it either: {reason_back}" if reason_back else reason)
        for (caller, callee, reason), reason_back in zip(unmet, refused, strict=True)
    ]


async def _meet(
    callers: Sequence[ProxyWorker], workers: Sequence[ProxyWorker]
) -> list[tuple[ProxyWorker, ProxyWorker, str]]:
    """Let some workers connect to all that they may call. Return the pairs without a connection, with the reasons."""
    by_number = {worker.id: worker for worker in workers}
    failures = await asyncio.gather(*(worker.rpc(Request("meet")) for worker in callers))
    return [
        (worker, by_number[id], problem)
        for worker, failed in zip(callers, failures, strict=True)
        for id, problem in failed
    ]


async def _dial_back(
    caller: ProxyWorker, callee: ProxyWorker, endpoints: Mapping[ProxyWorker, Endpoint], run: str
) -> str | None:
    """Have a worker dial its caller, which cannot dial it. Return why it did not reach the caller; empty if it did. None
    if the caller has no address, or if a user has given one for the called worker, which must lead to it.
    """
    addresses = _candidates(caller, callee, endpoints)
    if not addresses or _advertised_addresses(callee, endpoints[callee], caller.id):
        return None
    number = offer_number(peer_pass(callee.identity.key["lease"], run, caller.executor.name))
    try:
        return str(await callee.ask("dial", addresses, callee.id, number, timeout_s=DIAL_BACK_S))
    except DDLFError as error:  # it is lost, or runs an earlier release; the pair has a reason already
        log.debug("%s does not dial %s: %s", callee.name, caller.name, error)
        return None


async def _check_there(worker: ProxyWorker, executor: str) -> None:
    """Raise an error if a worker was not reached because it was lost meanwhile: its daemon is dead, or its executor is
    a new one.
    """
    await worker.rpc(Request("list_methods"))
    if worker.executor.name != executor:
        raise AppMissing("its executor ended while workers were introduced to each other", worker=worker.name)


async def _endpoint(worker: ProxyWorker) -> Endpoint:
    """Return the port and the addresses where other workers can call a worker, as its daemon reports them."""
    try:
        return await worker.endpoint()
    except ProtocolError as error:
        raise VersionError(
            "runs a release that does not support calls between workers",
            worker=worker.name,
            hint="install the same version of DDLF on all machines",
        ) from error


def _advertised_addresses(worker: ProxyWorker, endpoint: Endpoint, caller: int | None = None) -> list[tuple[str, int]]:
    """Return the addresses that a user has given for reaching a worker.

    They come from ``advertise`` in cluster.yaml, either for all callers or for this one, and from the worker's
    ``--advertise``.
    """
    advertised = worker.advertise
    texts = (
        [advertised]
        if isinstance(advertised, str)
        else [text for id, text in advertised.items() if caller in (None, id)]
    )
    parsed = [parse_advertised(text) for text in texts if text]
    if endpoint.advertised is not None:
        parsed.append(endpoint.advertised)
    return [(host, port or endpoint.port) for host, port in parsed]


def _check_distinct(endpoints: Mapping[ProxyWorker, Endpoint]) -> None:
    """Raise ``ConfigError`` if two workers advertise the same address. This check needs no connection."""
    workers_by_address: dict[tuple[str, int], ProxyWorker] = {}
    for worker, endpoint in endpoints.items():
        for host, port in _advertised_addresses(worker, endpoint):
            other = workers_by_address.setdefault((same_host(host), port), worker)
            if other is not worker:
                raise ConfigError(
                    f"{other.name} and {worker.name} are both advertised at {host}:{port}",
                    hint="give each its own address: --advertise when you start it, or advertise: in cluster.yaml",
                )


def _introduction(
    worker: ProxyWorker,
    endpoints: Mapping[ProxyWorker, Endpoint],
    run: str,
    calls: Mapping[int, Collection[int]] | None,
) -> Request:
    """Return the request that introduces the other workers to one worker."""

    def may(caller: ProxyWorker, callee: ProxyWorker) -> bool:
        return caller is not callee and (calls is None or callee.id in calls.get(caller.id, ()))

    return Request(
        "introduce",
        run=run,
        me=worker.id,
        lease=worker.identity.key["lease"],
        callers={other.executor.name: other.id for other in endpoints if may(other, worker)},
        peers=[
            Callee(
                id=other.id,
                name=other.name,
                addresses=_candidates(other, worker, endpoints),
                shows=peer_pass(other.identity.key["lease"], run, worker.executor.name),
            )
            for other in endpoints
            if may(worker, other)
        ],
        dead_after_s=worker.timing.dead_after_s,
    )


def _candidates(worker: ProxyWorker, caller: ProxyWorker, endpoints: Mapping[ProxyWorker, Endpoint]) -> list[Address]:
    endpoint = endpoints[worker]
    advertised = _advertised_addresses(worker, endpoint, caller.id)
    return candidates(advertised, (worker.host, worker.port), endpoint, endpoints[caller].machine)


def candidates(
    advertised: Sequence[tuple[str, int]], dialled: tuple[str, int], endpoint: Endpoint, caller: str
) -> list[Address]:
    """Return the addresses where one worker may reach another one, best first.

    Args:
        advertised: Addresses that a user has given.
        dialled: The address that the master dials for the called worker.
        endpoint: Where the called worker's daemon can be called.
        caller: Machine of the calling worker.

    Returns:
        Host, port, and whether a user has given the address.
    """
    port = endpoint.port
    if not port:  # it joins its master, and listens nowhere
        return [(*address, True) for address in dict.fromkeys(advertised) if address[1]]
    listens = [(host, port) for host in endpoint.addresses]
    loopback = [address for address in listens if machine(address[0]) == LOOPBACK and endpoint.machine == caller]
    remote = [address for address in (dialled, *listens) if machine(address[0]) != LOOPBACK]
    return [(*address, address in advertised) for address in dict.fromkeys((*advertised, *loopback, *remote))]
