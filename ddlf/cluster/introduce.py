"""Workers that call each other in a run: who may call whom, where each is reached, and whether each pair has a way. Runs on the master.

What a master dials, an address of its own machine or a forwarded port, is often not where another worker reaches that one. So there are several
addresses to try, the worker that answers says who it is, and each pair is tried before anything depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddlf.cluster.config.addresses import parse_advertised, same_host
from ddlf.cluster.launch.launcher import LOOPBACK, machine
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import AppMissing, ConfigError, ConnectError, ProtocolError, VersionError
from ddlf.rpc.messages import Request
from ddlf.worker.lease import peer_pass

PAIRS_SHOWN = 5
"""In the error for pairs without a way."""


async def introduce(
    workers: Sequence[ProxyWorker], run: str, *, calls: Mapping[int, Collection[int]] | None = None
) -> None:
    """Let workers call each other in a run, in which each plays its roles already, and wait until every pair has been tried.

    It is to be done again, with all workers that are in the run then, when one was lost or has joined, or a role was opened anew. Who stays connected
    does so; who is not named any more is cut off. It ends with the run on each worker, and with this side's lease.

    Args:
        workers: All of the run that call or are called.
        run: Its name.
        calls: The numbers of those that each may call, by its own; None lets everybody call everybody.

    Raises:
        ConnectError: A pair has no way; the text names both, and each address with what is wrong there.
        ConfigError: This side has no lease; ``calls`` names others; or two workers are advertised at one address.
        VersionError: A worker is of a release whose workers do not call each other.
        WorkerLost: A worker was lost meanwhile; so it is with ``ExecutorCrashed``, ``AppMissing`` and ``LeaseError``.
    """
    if found := await introduced(workers, run, calls=calls):
        raise no_way(found)


HINT = "let a firewall pass that, or say where other workers reach it: ddlf-worker --advertise HOST:PORT, or advertise: in cluster.yaml"
"""What to do where one worker cannot reach another one."""


def no_way(found: Sequence[tuple[ProxyWorker, ProxyWorker, str]], hint: str = HINT) -> ConnectError:
    """The error for pairs without a way, as ``introduced`` gives them."""
    lines = [f"{caller.name} has no way to {called.name}: {why}" for caller, called, why in found]
    more = [f"and {len(lines) - PAIRS_SHOWN} more pairs"] if len(lines) > PAIRS_SHOWN else []
    return ConnectError("\n".join([*lines[:PAIRS_SHOWN], *more]), hint=hint)


async def introduced(
    workers: Sequence[ProxyWorker], run: str, *, calls: Mapping[int, Collection[int]] | None = None
) -> list[tuple[ProxyWorker, ProxyWorker, str]]:
    """``introduce``, but who has no way to whom is the result, and no error.

    Returns:
        Of each such pair who calls, who is called, and what is wrong at each address.
    """
    for worker in workers:
        if worker.claim.guest:
            raise ConfigError(
                f"{worker.name} is asked as a guest, who cannot introduce it to others", hint="take it: without guest"
            )
    named = {id for caller, called in (calls or {}).items() for id in (caller, *called)}
    if unknown := sorted(named - {worker.id for worker in workers}):
        raise ConfigError(f"worker {unknown[0]} is to call or be called, and is not among those that are introduced")
    places = dict(zip(workers, await asyncio.gather(*map(_place, workers)), strict=True))
    _check_distinct(places)
    executors = {worker.id: worker.facts["executor"] for worker in workers}
    await asyncio.gather(*(worker.rpc(_introduction(worker, places, run, calls)) for worker in workers))
    unmet = await asyncio.gather(*(worker.rpc(Request("meet")) for worker in workers))
    others = {worker.id: worker for worker in workers}
    missed = {one for worker, found in zip(workers, unmet, strict=True) for id, _ in found for one in (worker.id, id)}
    await asyncio.gather(*(_check_there(others[id], executors[id]) for id in missed))
    return [(worker, others[id], why) for worker, found in zip(workers, unmet, strict=True) for id, why in found]


async def _check_there(worker: ProxyWorker, executor: str) -> None:
    """Raise the loss of a worker that others did not reach because it, or what it was introduced as, is not there any more."""
    await worker.rpc(Request("list_methods"))
    if worker.facts["executor"] != executor:
        raise AppMissing("its executor ended while workers were introduced to each other", worker=worker.name)


async def _place(worker: ProxyWorker) -> dict[str, Any]:
    """Where a worker is, as its daemon says."""
    try:
        return dict(await worker.ask("addresses"))
    except ProtocolError as error:
        raise VersionError(
            "is of a release whose workers do not call each other",
            worker=worker.name,
            hint="install the same version of DDLF on all machines",
        ) from error


def _given(worker: ProxyWorker, place: Mapping[str, Any], caller: int | None = None) -> list[tuple[str, int]]:
    """Where its people say that others, or that caller, reach a worker: in cluster.yaml, and where it was started."""
    told = worker.advertise
    texts = [told] if isinstance(told, str) else [text for id, text in told.items() if caller in (None, id)]
    found = [parse_advertised(text) for text in texts if text]
    if place["advertised"]:
        found.append(tuple(place["advertised"]))
    return [(host, port or place["port"]) for host, port in found]


def _check_distinct(places: Mapping[ProxyWorker, dict[str, Any]]) -> None:
    """Two workers cannot be at one address; with one that is known here nobody has to be dialled to find out."""
    seen: dict[tuple[str, int], ProxyWorker] = {}
    for worker, place in places.items():
        for host, port in _given(worker, place):
            other = seen.setdefault((same_host(host), port), worker)
            if other is not worker:
                raise ConfigError(
                    f"{other.name} and {worker.name} are both advertised at {host}:{port}",
                    hint="give each an address of its own: --advertise where it is started, or advertise: in cluster.yaml",
                )


def _introduction(
    worker: ProxyWorker,
    places: Mapping[ProxyWorker, dict[str, Any]],
    run: str,
    calls: Mapping[int, Collection[int]] | None,
) -> Request:
    """What one worker is told."""

    def may(caller: ProxyWorker, called: ProxyWorker) -> bool:
        return caller is not called and (calls is None or called.id in calls.get(caller.id, ()))

    return Request(
        "introduce",
        run=run,
        me=worker.id,
        lease=worker.claim.key["lease"],
        callers=[other.facts["executor"] for other in places if may(other, worker)],
        peers=[
            {
                "id": other.id,
                "name": other.name,
                "addresses": candidates(
                    _given(other, place, worker.id), (other.host, other.port), place, places[worker]["machine"]
                ),
                "shows": peer_pass(other.claim.key["lease"], run, worker.facts["executor"]),
            }
            for other, place in places.items()
            if may(worker, other)
        ],
        dead_after_s=worker.timing.dead_after_s,
    )


def candidates(
    given: Sequence[tuple[str, int]], dialled: tuple[str, int], place: Mapping[str, Any], caller: str
) -> list[tuple[str, int, bool]]:
    """Where one worker may reach another one, best first.

    Args:
        given: What its people say.
        dialled: What the master dials for that one.
        place: What its daemon says: machine, port, and addresses that it listens on.
        caller: Machine of the one that is to reach it.

    Returns:
        Host, port, and whether somebody gave that address for this purpose.
    """
    port = place["port"]
    listens = [(host, port) for host in place["addresses"]]
    near = [one for one in listens if machine(one[0]) == LOOPBACK and place["machine"] == caller]
    far = [one for one in (dialled, *listens) if machine(one[0]) != LOOPBACK]
    return [(*one, one in given) for one in dict.fromkeys((*given, *near, *far))]
