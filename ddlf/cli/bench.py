"""``ddlf bench``: measure the connection to each worker, to find a slow cable. Runs on the master.

Workers are measured one after another, so that they do not share the master's own cable. A busy worker measures lower.

With ``--pairs``, each two workers measure the link between them. The command leases the workers for this, because a
guest cannot introduce workers to each other.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import secrets
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.cli.doctor import leased
from ddlf.cli.options import add_cluster_options, add_json, named_cluster
from ddlf.cli.parsing import Command, Parser, number
from ddlf.errors import ConfigError, ConnectError, DDLFError
from ddlf.rpc.messages import Request
from ddlf.training.crew.link_speed import WAYS, Ways

if TYPE_CHECKING:
    from ddlf.cluster.proxy import ProxyWorker

CALLS = 200
TRANSFERS = 3
SLOW = 0.6
"""A way with less than this share of the median's speed is marked."""


@dataclass(frozen=True, slots=True)
class Way:
    """The measurements of the link between the master and a worker, or between two workers.

    Args:
        latency_s: Median round trip of a call with 64 bytes.
        latency_p99_s: 99th percentile of the round trips.
        there_mbs: Speed from the master to the worker, or from the first worker to the second, in MB/s (10^6 bytes).
        back_mbs: Speed in the other direction.
    """

    latency_s: float
    latency_p99_s: float
    there_mbs: float
    back_mbs: float


def take(data: Any) -> None:
    """Receive data that the master sends, to measure the speed to the worker. Runs on the worker."""


_payloads: dict[int, Any] = {}


def give(size: int) -> Any:
    """Return ``size`` bytes, which were created before the measurement of the speed from the worker. Runs on the
    worker.
    """
    if size not in _payloads:
        _payloads.clear()
        _payloads[size] = np.ones(size, np.uint8)
    return _payloads[size]


def forget() -> None:
    """Free the bytes that were created for the measurement. Runs on the worker."""
    _payloads.clear()


async def measure(worker: ProxyWorker, size: int) -> Way:
    """Measure the latency and the speed of the link between the master and a connected worker.

    Args:
        worker: The worker, which should be idle.
        size: Number of bytes in a transfer.

    Raises:
        DDLFError: The worker was lost.
    """

    async def seconds(function: Any, argument: Any) -> float:
        begin = time.perf_counter()
        await worker.rpc(Request("run_method", function, argument))
        return time.perf_counter() - begin

    payload = np.ones(size, np.uint8)
    await seconds(take, b"")
    calls = sorted([await seconds(take, bytes(64)) for _ in range(CALLS)])
    await seconds(take, payload)
    await seconds(give, size)
    latency = statistics.median(calls)
    to_worker = min([await seconds(take, payload) for _ in range(TRANSFERS)])
    from_worker = min([await seconds(give, size) for _ in range(TRANSFERS)])
    await worker.rpc(Request("run_method", forget))
    # A transfer includes one small round trip, which does not belong to the link's speed.
    there_mbs, back_mbs = (size / max(t - latency, 0.1 * t) / 1e6 for t in (to_worker, from_worker))
    return Way(latency, calls[CALLS * 99 // 100], there_mbs, back_mbs)


Pair = tuple["ProxyWorker", "ProxyWorker", "Way | DDLFError"]


async def between(options: argparse.Namespace, numbers: list[int]) -> list[Pair]:
    """Let workers measure the link between each two of them, one pair after another, and print a line for each pair.

    Raises:
        DDLFError: A worker is in use, or was lost.
    """
    from ddlf.cluster.introduce import introduced

    role, pairs = (secrets.token_hex(8), WAYS), []
    async with leased(options, numbers) as workers:
        await asyncio.gather(*(worker.call(role, "open", Ways, role[0]) for worker in workers))
        unreachable = await introduced(workers, role[0])
        for pair in itertools.combinations(workers, 2):
            way: Way | DDLFError
            problems = [
                f"{a.nickname} cannot reach {b.nickname}: {reason}" for a, b, reason in unreachable if {a, b} == {*pair}
            ]
            try:
                if problems:
                    raise ConnectError("; ".join(problems))
                async with asyncio.timeout(options.limit):
                    way = Way(*await pair[0].call(role, "measure", pair[1].id, options.megabytes * 10**6))
            except DDLFError as error:
                error.worker = ""
                way = error
            except TimeoutError:
                way = DDLFError(f"not done within {options.limit} s")
            pairs.append((*pair, way))
            if not options.json:
                print(_line(f"{pair[0].id:>3} - {pair[1].id:<3}", way, "there", "back"), flush=True)
    return pairs


def _options(parser: Parser) -> None:
    add_cluster_options(parser)
    parser.add("--megabytes", type=number(1, 1000), default=32, metavar="N", help="size of a transfer (default: 32)")
    parser.add("--limit", type=number(1), default=60, metavar="S", help="maximum seconds per worker (default: 60)")
    parser.add("--pairs", action="store_true", help="also measure between workers; nobody else may use them meanwhile")
    add_json(parser)


async def bench(options: argparse.Namespace) -> int:
    """Run ``ddlf bench``: measure the link to each worker, print a line for it, and return the exit code."""
    cluster = named_cluster(options, guest=True)
    if options.pairs and len(cluster.workers) < 2:
        raise ConfigError("--pairs has no effect on one worker", hint="name two or more, or leave --pairs out")
    results: list[Way | DDLFError] = []
    for worker in cluster.workers:
        try:
            await worker.connect(timeout_s=options.timeout)
            async with asyncio.timeout(options.limit):
                results.append(await measure(worker, options.megabytes * 10**6))
        except DDLFError as error:
            error.worker = ""  # the line says which
            results.append(error)
        except TimeoutError:
            results.append(DDLFError(f"not done within {options.limit} s", hint="see whether it is busy: ddlf status"))
        finally:
            await worker.close()
        if not options.json:
            print(_line(f"{worker.id:>3}  {worker.label:<21}", results[-1], "to it", "from it"), flush=True)
    reached = [worker.id for worker, way in zip(cluster.workers, results, strict=True) if isinstance(way, Way)]
    pairs = await between(options, reached) if options.pairs else []
    if options.json:
        rows = [asdict(way) if isinstance(way, Way) else {"error": str(way)} for way in results]
        addresses = [{"address": worker.address} for worker in cluster.workers]
        workers = [address | row for address, row in zip(addresses, rows, strict=True)]
        print(json.dumps({"workers": workers, "pairs": [_facts(pair) for pair in pairs]} if options.pairs else workers))
    else:
        for text in (*slow(cluster.workers, results), *slow_pairs(pairs)):
            print(text)
    ways = [*results, *(way for _, _, way in pairs)]
    return max((error.exit_code for error in ways if isinstance(error, DDLFError)), default=0)


def _facts(pair: Pair) -> dict[str, Any]:
    first, second, way = pair
    return {"from": first.id, "to": second.id, **(asdict(way) if isinstance(way, Way) else {"error": str(way)})}


def _line(name: str, way: Way | DDLFError, to_label: str, from_label: str) -> str:
    if isinstance(way, DDLFError):
        return f"{name}  {way}"
    return (
        f"{name}  call {way.latency_s * 1e3:6.2f} ms, p99 {way.latency_p99_s * 1e3:6.2f} ms; "
        f"{to_label} {way.there_mbs:7,.0f} MB/s, {from_label} {way.back_mbs:7,.0f} MB/s"
    )


def slow(workers: list[ProxyWorker], results: list[Way | DDLFError]) -> list[str]:
    """Return a sentence for each worker whose link to the master is much slower than the other links; none with fewer
    than three workers.
    """
    ways = [(worker, way) for worker, way in zip(workers, results, strict=True) if isinstance(way, Way)]
    if len(ways) < 3:
        return []
    sentences = []
    for direction, speeds in (("to", [way.there_mbs for _, way in ways]), ("from", [way.back_mbs for _, way in ways])):
        middle = statistics.median(speeds)
        sentences += [
            f"the way {direction} {worker.name} has {speed / middle:.0%} of the usual speed: check its cable and its switch port"
            for (worker, _), speed in zip(ways, speeds, strict=True)
            if speed < SLOW * middle
        ]
    return sentences


def slow_pairs(pairs: list[Pair]) -> list[str]:
    """Return a sentence for each link between two workers that is much slower than the other links, in either
    direction.
    """
    ways = [(first.name, second.name, way) for first, second, way in pairs if isinstance(way, Way)]
    speeds = [(a, b, way.there_mbs) for a, b, way in ways] + [(b, a, way.back_mbs) for a, b, way in ways]
    if len(ways) < 3:
        return []
    middle = statistics.median(speed for _, _, speed in speeds)
    return [
        f"the way from {a} to {b} has {speed / middle:.0%} of the usual speed between workers"
        for a, b, speed in speeds
        if speed < SLOW * middle
    ]


BENCH = Command(
    description="Measure latency and speed of the connection to each worker.",
    examples=(
        "ddlf bench -c cluster.yaml",
        "ddlf bench -c cluster.yaml --pairs",
        "ddlf bench --hosts 10.0.0.11:9000 --megabytes 100",
    ),
    options=_options,
    run=bench,
)
