"""What encryption costs: the same transfers and calls with and without TLS, between two network namespaces.

    python -m benchmarks.security.throughput [--megabytes 64] [--calls 2000] [--repeats 5]

Both ends share this machine's processors, so the figures for TLS hold the encryption of one side and the decryption of the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.security.machines import THERE, copy_token, enter, home, other_machine, worker
from ddlf.cluster.cluster import Cluster

PORTS = {"plaintext": 9001, "TLS 1.3": 9002}


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


async def compare(options: argparse.Namespace) -> None:
    """In turns, so that a slow moment of the machine falls on both."""
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in PORTS}
    for repeat in range(-1, options.repeats):
        for name, port in PORTS.items():
            async with Cluster([THERE], port, insecure_plaintext=name == "plaintext") as cluster:
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
    enter("benchmarks.security.throughput")
    with tempfile.TemporaryDirectory() as name, other_machine() as there, contextlib.ExitStack() as workers:
        master, machine = home(Path(name) / "master"), home(Path(name) / "machine")
        copy_token(master, machine)
        os.environ.update(HOME=master["HOME"])
        for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
            os.environ.pop(variable, None)
        workers.enter_context(worker(there, machine, "--insecure-plaintext", port=PORTS["plaintext"]))
        workers.enter_context(worker(there, machine, port=PORTS["TLS 1.3"]))
        asyncio.run(compare(options))


if __name__ == "__main__":
    main()
