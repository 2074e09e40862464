"""What encryption costs: the same transfers and calls with and without TLS, between two machines (``tests/trials/machines.py``).

    python -m tests.trials.encryption [--megabytes 64] [--calls 2000] [--repeats 5]

Both ends share this machine's processors, so the figures for TLS hold the encryption of one side and the decryption of the other.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

import numpy as np

from ddlf.cluster.cluster import Cluster
from tests.trials.machines import Link, enter, inside
from tests.trials.workers import Workers

SECURITY = {"plaintext": ["--insecure-plaintext"], "TLS 1.3": []}


async def measure(cluster: Cluster, megabytes: int, calls: int) -> tuple[float, float, float, float]:
    """MB/s up, MB/s down, small calls per second one after another, and milliseconds to connect anew."""
    (only,) = cluster.workers
    array = np.random.default_rng(0).random(megabytes * 10**6 // 8)
    begin = time.perf_counter()
    await cluster.set_variable("array", array)
    up = time.perf_counter()
    (back,) = await cluster.get_variable("array")
    down = time.perf_counter()
    assert np.array_equal(array, back)
    for _ in range(calls):
        await cluster.methods()
    called = time.perf_counter()
    await only.close()
    closed = time.perf_counter()
    await only.connect()
    connected = time.perf_counter()
    return (
        array.nbytes / 1e6 / (up - begin),
        array.nbytes / 1e6 / (down - up),
        calls / (called - down),
        (connected - closed) * 1e3,
    )


async def compare(ports: dict[str, int], token_file: Path, options: argparse.Namespace) -> None:
    """In turns, so that a slow moment of the machine falls on both."""
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in ports}
    for repeat in range(-1, options.repeats):
        for name, port in ports.items():
            plaintext = name == "plaintext"
            async with Cluster([Link.address_b], port, token_file=token_file, insecure_plaintext=plaintext) as cluster:
                figures = await measure(cluster, options.megabytes, options.calls)
            if repeat >= 0:  # the first one warms up
                found[name].append(figures)
    print(
        f"{'median of ' + str(options.repeats):<14}{'MB/s up':>10}{'MB/s down':>11}{'calls/s':>10}{'ms to connect':>15}"
    )
    for name, runs in found.items():
        up, down, calls, connect = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{name:<14}{up:>10.0f}{down:>11.0f}{calls:>10.0f}{connect:>15.1f}")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    enter("tests.trials.encryption")
    with Workers() as workers, Link() as link, inside(link.a):
        ports = {
            name: workers.start(*security, host=link.address_b, namespace=link.b)[1]
            for name, security in SECURITY.items()
        }
        asyncio.run(compare(ports, workers.token_file, options))


if __name__ == "__main__":
    main()
