"""Compare the speed of calls with alternatives: ``python -m benchmarks.rpc [--quick] [--json FILE]``.

Each transport is one server process on this machine, which starts once and stays. Each repeat measures every transport in turn,
so a disturbance affects all of them. The table shows medians and, in brackets, the range of the middle half of the
repeats. A ratio is DDLF's time divided by the other time, so DDLF is faster if it is below 1. It is the median of the
ratios within each repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.transports import ALWAYS, TRANSPORTS, Transport

SMALL = bytes(64)
FLOATS_2MB = 515_000
"""2.06 MB: the weights of a small convolutional network, which a round of training sends."""
FLOATS_100MB = 25_000_000


@dataclass(frozen=True)
class Case:
    """A measurement: one kind of call.

    Args:
        name: The name in the table.
        measure: Takes a transport and returns seconds per call.
        shown: Returns these seconds as text.
        pipelined: Whether it needs several calls on one connection at a time.
    """

    name: str
    measure: Callable[[Transport], Awaitable[float]]
    shown: Callable[[float], str]
    pipelined: bool = False


def one_at_a_time(value: Any, calls: int) -> Callable[[Transport], Awaitable[float]]:
    """Return the seconds of a round trip, as the mean of ``calls``."""

    async def measure(transport: Transport) -> float:
        result = await transport.call(value)
        assert memoryview(result).nbytes == memoryview(value).nbytes
        del result
        begin = time.perf_counter()
        for _ in range(calls):
            await transport.call(value)
        return (time.perf_counter() - begin) / calls

    return measure


def in_flight(value: Any, calls: int, at_once: int) -> Callable[[Transport], Awaitable[float]]:
    """Return the seconds per call while ``at_once`` calls are open."""

    async def measure(transport: Transport) -> float:
        async def caller() -> None:
            for _ in range(calls // at_once):
                await transport.call(value)

        begin = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(at_once)))
        return (time.perf_counter() - begin) / (calls // at_once * at_once)

    return measure


def cases(quick: bool) -> list[Case]:
    """Return the measurements to make."""
    scale = 0.1 if quick else 1.0
    array = np.zeros(FLOATS_2MB, np.float32) + 1  # touched, so that its pages exist
    large = np.zeros(FLOATS_100MB // (10 if quick else 1), np.float32) + 1
    return [
        Case("64 B, one at a time", one_at_a_time(SMALL, int(1000 * scale)), lambda s: f"{s * 1e6:,.0f} us"),
        Case("64 B, 100 in flight", in_flight(SMALL, int(5000 * scale), 100), lambda s: f"{1 / s:,.0f}/s", True),
        Case("2.06 MB round trip", one_at_a_time(array, int(50 * scale)), lambda s: f"{s * 1e3:,.2f} ms"),
        Case(f"{large.nbytes / 1e6:.0f} MB round trip", one_at_a_time(large, 2), lambda s: f"{s * 1e3:,.0f} ms"),
    ]


async def measure(
    kinds: list[type[Transport]], repeats: int, quick: bool, pin: str | None = None
) -> dict[str, dict[str, list[float]]]:
    """Start the transports, measure them in turn, end them.

    Returns:
        Seconds per call: by case, by transport, one for each repeat.
    """
    todo = cases(quick)
    seconds_of: dict[str, dict[str, list[float]]] = {case.name: {} for case in todo}
    transports = [kind() for kind in kinds]
    started: list[Transport] = []
    try:
        for transport in transports:
            try:
                await transport.start()
            except Exception as error:
                if type(transport) in ALWAYS:
                    raise
                print(f"{transport.name} does not start and is left out: {error}", file=sys.stderr)
            else:
                started.append(transport)
        if pin:
            pin_processes(0 if pin == "one" else 1)
        for repeat in range(-1, repeats):  # the first one warms up
            for case in todo:
                for transport in started:
                    if case.pipelined and not transport.pipelines:
                        continue
                    gc.collect()
                    seconds = await case.measure(transport)
                    if repeat >= 0:
                        seconds_of[case.name].setdefault(transport.name, []).append(seconds)
    finally:
        for transport in started:
            await transport.stop()
    return seconds_of


def pin_processes(servers: int) -> None:
    """Pin this process to core 0, and all threads of its children to core ``servers``."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {servers})
    os.sched_setaffinity(0, {0})


def spread(values: list[float]) -> tuple[float, float]:
    """Return the quartiles: half of the repeats lie between them."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0], values[0], values[0])
    return low, high


def table(seconds_of: dict[str, dict[str, list[float]]], quick: bool) -> str:
    """Return the figures as text."""
    lines = []
    for case in cases(quick):
        rows = seconds_of[case.name]
        lines.append(case.name)
        for name, values in rows.items():
            middle = statistics.median(values)
            ratio = statistics.median(base / other for base, other in zip(rows["DDLF"], values, strict=True))
            ends = sorted(spread(values), reverse=case.pipelined)
            shown = f"[{case.shown(ends[0])} .. {case.shown(ends[1])}]"
            compared = "" if name == "DDLF" else f"DDLF / it = {ratio:.2f}"
            lines.append(f"  {name:<22}{case.shown(middle):>12}  {shown:<26}{compared}")
    return "\n".join(lines)


def facts() -> dict[str, Any]:
    """Return the facts that a reader of the figures needs: the machine and the versions."""
    versions = {}
    for name in ("ddlf", "numpy", "msgpack", "grpcio", "ray", "distributed", "uvloop"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform(), **versions}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rpc", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="fewer calls and only transports that need nothing installed"
    )
    parser.add_argument("--repeats", type=int, help="of each measurement (default: 7; 2 with --quick)")
    parser.add_argument("--peers", dest="transports", help="comma-separated parts of names: ddlf,raw,grpc")
    parser.add_argument("--uvloop", action="store_true", help="run this side on uvloop; the worker stays on asyncio")
    parser.add_argument(
        "--pin",
        choices=("one", "two"),
        help="both sides on one core, or one each: where the scheduler puts them decides what waking costs (Linux)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(argv)
    kinds = [kind for kind in (ALWAYS if options.quick else TRANSPORTS) if kind.available()]
    if options.transports:
        parts = ["ddlf", *options.transports.lower().split(",")]
        kinds = [kind for kind in TRANSPORTS if kind.available() and any(part in kind.name.lower() for part in parts)]
    repeats = options.repeats or (2 if options.quick else 7)
    loop_factory = None
    if options.uvloop:
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        seconds_of = runner.run(measure(kinds, repeats, options.quick, options.pin))
    print(table(seconds_of, options.quick))
    if options.json:
        options.json.write_text(
            json.dumps({"machine": facts(), "quick": options.quick, "seconds": seconds_of}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
