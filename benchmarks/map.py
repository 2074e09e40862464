"""Compare a map with its ideal time, and with alternatives: ``python -m benchmarks.map``.

    python -m benchmarks.map [--only ddlf] [--compute] [--json FILE]

The items take 1 to 50 ms, drawn once, and in a second case four times as many items take 1 ms. By default an item
sleeps, so a machine of two cores can keep four workers busy. With ``--compute`` items use the processor. The ideal is
the sum of all items divided by the number of workers. Each contender starts once and stays. Each repeat measures all
contenders in turn, beginning with a different one, and checks each result.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import importlib.util
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Spread, machine, table, turns


def sleep(seconds: float) -> float:
    """An item that waits."""
    time.sleep(seconds)
    return seconds


def compute(seconds: float) -> float:
    """An item that needs the processor."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(100))
    return seconds


class Mapper:
    """The interface of a contender: workers that map.

    Args:
        workers: How many processes.

    Attributes:
        name: In the table.
        needs: The module that must be installed.
    """

    name: str
    needs = "ddlf"

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def start(self) -> None:
        """Start them."""

    def stop(self) -> None:
        """End them."""

    def map(self, function: Callable[[float], float], items: Sequence[float]) -> list[float]:
        """Return the results, in the order of the items."""
        raise NotImplementedError


class Ours(Mapper):
    """``await cluster.map(...)``."""

    name = "DDLF cluster.map"

    def start(self) -> None:
        from ddlf import Cluster

        self._runner = asyncio.Runner()
        self._cluster = Cluster.local(self.workers)
        self._runner.run(self._cluster.connect())

    def stop(self) -> None:
        self._runner.run(self._cluster.close())
        self._runner.close()

    def map(self, function: Callable[[float], float], items: Sequence[float]) -> list[float]:
        async def all_of() -> list[float]:
            return await self._cluster.map(function, items)

        return self._runner.run(all_of())


class OurPool(Mapper):
    """``ddlf.Pool``, for programs that are not async."""

    name = "DDLF Pool.map"

    def start(self) -> None:
        from ddlf import Pool

        self._pool = Pool(self.workers).__enter__()

    def stop(self) -> None:
        self._pool.shutdown()

    def map(self, function: Callable[[float], float], items: Sequence[float]) -> list[float]:
        return list(self._pool.map(function, items))


class Processes(Mapper):
    """The standard library: processes of one machine, which already have the function."""

    name = "ProcessPoolExecutor"
    needs = "concurrent.futures"

    def start(self) -> None:
        self._pool = concurrent.futures.ProcessPoolExecutor(self.workers)

    def stop(self) -> None:
        self._pool.shutdown()

    def map(self, function: Callable[[float], float], items: Sequence[float]) -> list[float]:
        return list(self._pool.map(function, items))


class Ray(Mapper):
    """Tasks."""

    name = "Ray tasks"
    needs = "ray"

    def start(self) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        ray.init(num_cpus=self.workers, include_dashboard=False, log_to_driver=False, logging_level="error")

    def stop(self) -> None:
        import ray

        ray.shutdown()

    def map(self, function: Callable[[float], float], items: Sequence[float]) -> list[float]:
        import ray

        remote = ray.remote(num_cpus=1)(function)
        return ray.get([remote.remote(item) for item in items])


class Dask(Mapper):
    """``Client.map``."""

    name = "Dask Client.map"
    needs = "distributed"

    def start(self) -> None:
        import dask
        from distributed import Client, LocalCluster

        dask.config.set({"distributed.admin.log-format": "%(message)s"})
        self._cluster = LocalCluster(
            n_workers=self.workers, threads_per_worker=1, processes=True, dashboard_address=None
        )
        self._client = Client(self._cluster)

    def stop(self) -> None:
        self._client.close()
        self._cluster.close()

    def map(self, function: Callable[[float], float], items: Sequence[float]) -> list[float]:
        return self._client.gather(self._client.map(function, items, pure=False))


MAPPERS: tuple[type[Mapper], ...] = (Ours, OurPool, Processes, Ray, Dask)


def measure(
    kinds: Sequence[type[Mapper]],
    function: Callable[[float], float],
    cases: dict[str, list[float]],
    workers: int,
    repeats: int,
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each repeat, by case and contender.

    Raises:
        AssertionError: Somebody returned something else than asked for.
    """
    mappers = {kind.name: kind(workers) for kind in kinds}
    seconds: dict[str, dict[str, list[float]]] = {case: {name: [] for name in mappers} for case in cases}
    started: list[Mapper] = []
    try:
        for mapper in mappers.values():
            mapper.start()
            started.append(mapper)
            mapper.map(function, [0.001] * 20 * workers)  # warm
        for case, items in cases.items():
            for _, name in turns(list(mappers), repeats):
                begin = time.perf_counter()
                results = mappers[name].map(function, items)
                seconds[case][name].append(time.perf_counter() - begin)
                assert results == items, name
    finally:
        for mapper in started:
            mapper.stop()
    return seconds


def report(seconds: dict[str, list[float]], ideal_s: float) -> str:
    """Return the table of a case."""
    first = next(iter(seconds.values()))
    rows = [("contender", "seconds", "% of the ideal", "DDLF / it")]
    for name, values in seconds.items():
        share = Spread.of([100 * ideal_s / value for value in values])
        ratio = Spread.of([base / other for base, other in zip(first, values, strict=True)])
        rows.append((name, Spread.of(values).text(), share.text(".1f"), ratio.text()))
    return table(rows)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.map", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--items", type=int, default=1000, help="of 1 to 50 ms; four times as many of 1 ms")
    parser.add_argument("--workers", type=int, help="default: 4; 2 with --compute")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compute", action="store_true", help="items use the processor instead of sleeping")
    parser.add_argument("--only", help="comma-separated parts of names: ddlf,ray")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(argv)
    parts = options.only.lower().split(",") if options.only else [""]
    kinds = [
        kind
        for kind in MAPPERS
        if importlib.util.find_spec(kind.needs) and any(part in kind.name.lower() for part in parts)
    ]
    workers = options.workers or (2 if options.compute else 4)
    chance = random.Random(0)
    cases = {
        "1 to 50 ms": [chance.uniform(0.001, 0.05) for _ in range(options.items)],
        "1 ms": [0.001] * (4 * options.items),
    }
    seconds = measure(kinds, compute if options.compute else sleep, cases, workers, options.repeats)
    ideal_s = {case: sum(items) / workers for case, items in cases.items()}
    for case, items in cases.items():
        print(f"{len(items)} items of {case} on {workers} workers, ideal {ideal_s[case]:.2f} s")
        print(report(seconds[case], ideal_s[case]))
    result = {"machine": machine(), "ideal_s": ideal_s, "seconds": seconds}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main()
