"""Measure how much memory the transfer of a large array needs: ``python -m benchmarks.bulk``. Linux.

    python -m benchmarks.bulk [--megabytes 500] [--json FILE]

First an array goes to one worker, and another one comes back. The peak of each process is its high-water mark (VmHWM),
which is reset before each transfer. Then an array of a tenth of this size goes to several workers at once, and one
comes back from each. The last part has unusual arrays: empty, of one byte, of 2 GiB + 1 bytes, and 20,000 small ones in
one call.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from ddlf import Cluster


def reset_peak() -> int:
    """Reset the peak memory of this process, and return its memory in bytes."""
    from ddlf.rpc.buffers import POOL  # in here, because each process has its own

    gc.collect()
    POOL.clear()
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def prepare(self: Any) -> int:
    """Runs on the worker."""
    return reset_peak()


def receive(data: Any) -> int:
    """Return the peak memory of the worker while it holds ``data``. Runs on the worker."""
    return memory("VmHWM")


def make(self: Any, size: int) -> int:
    """Make an array to send, so that its memory exists before the measurement. Runs on the worker."""
    self.array = np.ones(size, np.uint8)
    return reset_peak()


def give(self: Any) -> Any:
    """Runs on the worker."""
    return self.array


def peak() -> int:
    """Runs on the worker."""
    return memory("VmHWM")


async def measure(size: int) -> dict[str, float]:
    """Return the additional memory of both sides in both directions, as a multiple of the array's size."""
    async with Cluster.local(1) as cluster:
        (before,) = await cluster.run_method(prepare)
        array = np.ones(size, np.uint8)
        own_peak = reset_peak()
        begin = time.perf_counter()
        (peak_of_receiver,) = await cluster.run_method(receive, data=array)
        there_s = time.perf_counter() - begin
        there_sender = memory("VmHWM") - own_peak
        del array
        (peak_of_sender,) = await cluster.run_method(make, size=size)
        own_peak = reset_peak()
        begin = time.perf_counter()
        (back,) = await cluster.run_method(give)
        back_s = time.perf_counter() - begin
        back_receiver = memory("VmHWM") - own_peak
        assert back.nbytes == size
        (sent,) = await cluster.run_method(peak)
    return {
        "bytes": size,
        "master_to_worker_s": there_s,
        "worker_to_master_s": back_s,
        "receiving_worker": (peak_of_receiver - before) / size,
        "sending_master": there_sender / size,
        "receiving_master": back_receiver / size,
        "sending_worker": (sent - peak_of_sender) / size,
    }


def give_back(data: Any) -> Any:
    """Runs on the worker."""
    return data


async def broadcast(size: int, workers: int) -> dict[str, float]:
    """Return the additional memory of the master, as a multiple of the array's size, while it sends to all workers and while
    all workers send back.
    """
    async with Cluster.local(workers) as cluster:
        array = np.ones(size, np.uint8)
        await cluster.run_method(give_back, data=0)
        own_peak = reset_peak()
        await cluster.run_method(receive, data=array)
        out = memory("VmHWM") - own_peak
        own_peak = reset_peak()
        updates = await cluster.run_method(give_back, data=array)
        back = memory("VmHWM") - own_peak
        assert all(update.nbytes == size for update in updates)
    return {
        "broadcast_bytes": size,
        "broadcast_workers": workers,
        "broadcasting_master": out / size,
        "gathering_master": back / size,
    }


def describe(data: Any) -> Any:
    """Return facts about the received array instead of the array. Runs on the worker."""
    if isinstance(data, list):
        return len(data), sum(int(part.sum()) for part in data)
    return data.shape, int(data[-1]) if data.size else None


async def odd(large: bool) -> None:
    """Measure unusual arrays."""
    async with Cluster.local(1) as cluster:
        cases: dict[str, Any] = {
            "empty": np.empty((0, 3), np.float32),
            "1 byte": np.ones(1, np.uint8),
            "20,000 of 1 kB": [np.ones(1000, np.uint8) for _ in range(20_000)],
        }
        if large:
            cases["2 GiB + 1"] = np.ones(2**31 + 1, np.uint8)
        for name, data in cases.items():
            begin = time.perf_counter()
            (answer,) = await cluster.run_method(describe, data=data)
            print(f"{name:<16} {time.perf_counter() - begin:6.3f} s  {answer}")
            assert answer == describe(data)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bulk", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--workers", type=int, default=4, help="of the broadcast")
    parser.add_argument("--no-large", action="store_true", help="leave out the array of 2 GiB + 1")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    shares = asyncio.run(measure(options.megabytes * 10**6))
    for side in ("receiving_worker", "sending_master", "receiving_master", "sending_worker"):
        print(
            f"{side.replace('_', ' '):<19} {shares[side]:.3f} x the array ({shares[side] * options.megabytes:+.0f} MB)"
        )
    shares |= asyncio.run(broadcast(options.megabytes * 10**5, options.workers))
    for side in ("broadcasting_master", "gathering_master"):
        print(f"{side.replace('_', ' '):<19} {shares[side]:.3f} x the array, {options.workers} workers")
    asyncio.run(odd(not options.no_large))
    if options.json:
        options.json.write_text(json.dumps(shares, indent=2) + "\n")


if __name__ == "__main__":
    main()
