"""``ddlf bench``: how fast the way to each worker is, so that a slow cable is found. Runs on the master.

Workers are measured one after another, so that they do not share the master's own cable meanwhile. A worker that runs something else shows that, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.cli.options import named_cluster
from ddlf.errors import DDLFError
from ddlf.wire.messages import Request

if TYPE_CHECKING:
    from ddlf.cluster.proxy import ProxyWorker

CALLS = 200
TRANSFERS = 3
SLOW = 0.6
"""A way with less than this share of the median's speed is marked."""


@dataclass(frozen=True, slots=True)
class Way:
    """What was measured between the master and one worker.

    Args:
        latency_s: Median round trip of a call with 64 bytes.
        latency_p99_s: 99 of 100 were faster.
        there_mbs: Master to worker, in MB/s (10^6 bytes).
        back_mbs: Worker to master.
    """

    latency_s: float
    latency_p99_s: float
    there_mbs: float
    back_mbs: float


def take(data: Any) -> None:
    """Runs on the worker: receive."""


_held: dict[int, Any] = {}


def give(size: int) -> Any:
    """Runs on the worker: send ``size`` bytes, made before they are measured."""
    if size not in _held:
        _held.clear()
        _held[size] = np.ones(size, np.uint8)
    return _held[size]


def forget() -> None:
    """Runs on the worker: free them."""
    _held.clear()


async def measure(worker: ProxyWorker, size: int) -> Way:
    """Measure the way to a connected worker.

    Args:
        worker: Should be idle.
        size: Bytes of a transfer.

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
    there = min([await seconds(take, payload) for _ in range(TRANSFERS)])
    back = min([await seconds(give, size) for _ in range(TRANSFERS)])
    await worker.rpc(Request("run_method", forget))
    # A transfer includes one small round trip, which is no part of the speed of the way.
    there_mbs, back_mbs = (size / max(t - latency, 0.1 * t) / 1e6 for t in (there, back))
    return Way(latency, calls[CALLS * 99 // 100], there_mbs, back_mbs)


async def bench(options: argparse.Namespace) -> int:
    """Measure each worker and print a line for it; return the exit code."""
    cluster = named_cluster(options, guest=True)
    found: list[Way | DDLFError] = []
    for worker in cluster.workers:
        try:
            await worker.connect(timeout_s=options.timeout)
            async with asyncio.timeout(options.limit):
                found.append(await measure(worker, options.megabytes * 10**6))
        except DDLFError as error:
            error.worker = ""  # the line says which
            found.append(error)
        except TimeoutError:
            found.append(DDLFError(f"not done within {options.limit} s", hint="see whether it is busy: ddlf status"))
        finally:
            await worker.close()
        if not options.json:
            print(_line(worker, found[-1]), flush=True)
    if options.json:
        rows = [asdict(way) if isinstance(way, Way) else {"error": str(way)} for way in found]
        addresses = [{"address": f"{worker.host}:{worker.port}"} for worker in cluster.workers]
        print(json.dumps([address | row for address, row in zip(addresses, rows, strict=True)]))
    else:
        for text in slow(cluster.workers, found):
            print(text)
    return max((error.exit_code for error in found if isinstance(error, DDLFError)), default=0)


def _line(worker: ProxyWorker, way: Way | DDLFError) -> str:
    name = f"{worker.id:>3}  {worker.label:<21}  "
    if isinstance(way, DDLFError):
        return f"{name}{way}"
    return (
        f"{name}call {way.latency_s * 1e3:6.2f} ms, p99 {way.latency_p99_s * 1e3:6.2f} ms; "
        f"to it {way.there_mbs:7,.0f} MB/s, from it {way.back_mbs:7,.0f} MB/s"
    )


def slow(workers: list[ProxyWorker], found: list[Way | DDLFError]) -> list[str]:
    """A sentence for each way that is much slower than the others. Two workers are too few to say which is the odd one."""
    ways = [(worker, way) for worker, way in zip(workers, found, strict=True) if isinstance(way, Way)]
    if len(ways) < 3:
        return []
    sentences = []
    for what, speeds in (("to", [way.there_mbs for _, way in ways]), ("from", [way.back_mbs for _, way in ways])):
        middle = statistics.median(speeds)
        sentences += [
            f"the way {what} {worker.name} has {speed / middle:.0%} of the usual speed: check its cable and its switch port"
            for (worker, _), speed in zip(ways, speeds, strict=True)
            if speed < SLOW * middle
        ]
    return sentences
