"""Measure how the work of one master grows with its workers.

    python -m benchmarks.scale [--workers 8,16,32,64] [--simulated 125,250,500,1000] [--json FILE]

A round sends the same 2.06 MB to every worker, receives as many bytes from each, and merges them. ``--workers`` are
real workers on this machine (two processes each, without TensorFlow). ``--simulated`` are peers that only speak the
protocol, many in one process. The time is compared with moving the same bytes through one blocking socket pair. A line
that is fitted through all sizes gives the cost of one more worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.transports import ROOT, Raw
from ddlf import Cluster
from ddlf.algorithms.merge import RunningMerge
from ddlf.rpc.connection import Connection
from ddlf.rpc.handshake import PREAMBLE
from ddlf.rpc.listen import answer
from ddlf.rpc.messages import Frame, Kind, Limits, Request, dumps, loads, read_arguments
from ddlf.rpc.stream import receive_exactly
from ddlf.rpc.tokens import new_token
from ddlf.worker.status import ExecutorInfo

LAYERS = ((3, 3, 3, 32), (3, 3, 32, 64), (3, 3, 64, 64), (1600, 256), (256, 170), (170, 10))
"""Shapes of a small convolutional network with 2.06 MB of float32."""


def give_back(weights: list[Any]) -> list[Any]:
    """Return the weights from the worker without a change."""
    return weights


async def round_of(cluster: Cluster, weights: list[Any]) -> tuple[float, float, float]:
    """Run one round. The master merges each update on arrival, so that it holds few of them.

    Returns:
        Seconds until everything is merged, seconds of that in the merge, and seconds of the master's processor.
    """
    merge = RunningMerge(cluster.N, like=weights)
    merging = 0.0

    async def train_slot(slot: int, worker: Any) -> None:
        nonlocal merging
        update = await worker.rpc(Request("run", "give_back", weights))
        begin = time.perf_counter()
        merge.add(slot, update, 1)
        merging += time.perf_counter() - begin

    begin, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(train_slot(slot, worker) for slot, worker in enumerate(cluster.workers)))
    last = time.perf_counter()
    merge.result()
    end = time.perf_counter()
    return end - begin, merging + end - last, time.process_time() - cpu


async def raw_seconds(raw: Raw, weights: list[Any], workers: int) -> float:
    """Move the same bytes there and back through one blocking socket pair."""
    flat = np.concatenate([weight.ravel() for weight in weights])
    begin = time.perf_counter()
    for _ in range(workers):
        await raw.call(flat)
    return time.perf_counter() - begin


async def measure(cluster: Cluster, raw: Raw, connect_s: float, rounds: int) -> dict[str, float]:
    """Return the figures for one number of workers, as medians of ``rounds``."""
    weights = [np.ones(shape, np.float32) for shape in LAYERS]
    await round_of(cluster, weights)
    outcomes, moved, pings = [], [], []
    for _ in range(rounds):
        outcomes.append(await round_of(cluster, weights))
        moved.append(await raw_seconds(raw, weights, cluster.N))
        begin = time.perf_counter()
        await cluster.ping()
        pings.append(time.perf_counter() - begin)
    seconds, merging, cpu = (statistics.median(values) for values in zip(*outcomes, strict=True))
    raw_s = statistics.median(moved)
    return {
        "workers": cluster.N,
        "connect_s": connect_s,
        "round_s": seconds,
        "merge_s": merging,
        "transfer_s": seconds - merging,
        "raw_s": raw_s,
        "ratio": statistics.median((o[0] - o[1]) / m for o, m in zip(outcomes, moved, strict=True)),
        "master_cpu_s": cpu,
        "ping_sweep_s": statistics.median(pings),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


async def real(numbers: list[int], rounds: int) -> list[dict[str, float]]:
    """Measure clusters of real workers. Each cluster is new."""
    rows = []
    raw = Raw()
    await raw.start()
    for number in numbers:
        begin = time.perf_counter()
        async with Cluster.local(number) as cluster:
            connect_s = time.perf_counter() - begin
            await cluster.add_method(give_back)
            rows.append(await measure(cluster, raw, connect_s, rounds))
        print(row(rows[-1]), flush=True)
    await raw.stop()
    return rows


async def simulated(numbers: list[int], rounds: int) -> list[dict[str, float]]:
    """Measure clusters of peers that only speak the protocol."""
    rows = []
    raw = Raw()
    await raw.start()
    os.environ["DDLF_TOKEN"] = new_token()  # for the peers, which inherit it, and for the clusters here
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.scale", "--serve", stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        for number in numbers:
            # All of 127.0.0.0/8 is this machine (on Linux): one listener is many addresses.
            hosts = [f"127.0.{index // 250}.{index % 250 + 1}" for index in range(number)]
            begin = time.perf_counter()
            async with Cluster(hosts, port, connect_timeout_s=30) as cluster:
                rows.append(await measure(cluster, raw, time.perf_counter() - begin, rounds))
            print(row(rows[-1]), flush=True)
    finally:
        process.terminate()
        await process.wait()
        await raw.stop()
    return rows


async def serve() -> None:
    """Act as many workers: do the handshake, then answer every request with its own arguments."""
    listener = socket.create_server(("0.0.0.0", 0), backlog=4096)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    tokens = (os.environ["DDLF_TOKEN"].encode(),)
    limits = Limits()
    executor = ExecutorInfo(python=sys.version.split()[0], cores=1, threads=1)

    async def greet(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock, _ = await answer(sock, await receive_exactly(sock, PREAMBLE.size), tokens, limits.max_body_bytes)
        except OSError:
            sock.close()
            return

        def on_frame(frame: Frame) -> None:
            if frame.kind != Kind.REQUEST:
                return
            args, _ = read_arguments(loads(frame.buffers))
            answers = {"connect": executor, "claim": {"epoch": 1}}
            result = args[1] if frame.name == "run" else answers.get(frame.name)
            connection.send(Kind.RESULT, frame.id, "", dumps(result))

        def allocate(size: int) -> Any:
            return np.empty(size, np.uint8)

        connection = Connection(sock, on_frame, lambda reason: None, limits=limits, allocate=allocate)

    tasks: set[asyncio.Task[None]] = set()
    while True:
        sock, _ = await loop.sock_accept(listener)
        sock.setblocking(False)
        task = loop.create_task(greet(sock))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def fit(rows: list[dict[str, float]], name: str) -> tuple[float, float, float]:
    """Fit a line. Return the seconds (or MB) per worker, the seconds without workers, and the share of explained variance."""
    x = np.array([row["workers"] for row in rows])
    y = np.array([row[name] for row in rows])
    if len(rows) < 2:
        return float(y[0] / x[0]), 0.0, 1.0
    slope, base = np.polyfit(x, y, 1)
    rest = ((y - slope * x - base) ** 2).sum() / max(((y - y.mean()) ** 2).sum(), 1e-12)
    return float(slope), float(base), float(1 - rest)


HEAD = "workers  connect    round   merge  transfer  raw pair  ratio  master CPU  ping sweep  peak memory"


def row(figures: dict[str, float]) -> str:
    """Return a line of the table."""
    f = figures
    return (
        f"{f['workers']:>7}  {f['connect_s']:>5.1f} s  {f['round_s'] * 1e3:>4.0f} ms  {f['merge_s'] * 1e3:>3.0f} ms  "
        f"{f['transfer_s'] * 1e3:>5.0f} ms  {f['raw_s'] * 1e3:>5.0f} ms  {f['ratio']:>5.2f}  {f['master_cpu_s'] * 1e3:>7.0f} ms  "
        f"{f['ping_sweep_s'] * 1e3:>7.1f} ms  {f['peak_mb']:>8.0f} MB"
    )


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", default="8,16,32,64", help="numbers of real workers; empty for none")
    parser.add_argument("--simulated", default="125,250,500,1000", help="numbers of simulated ones; empty for none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        asyncio.run(serve())
        return
    figures: dict[str, list[dict[str, float]]] = {}
    for name, kind, counts_text in (("real", real, options.workers), ("simulated", simulated, options.simulated)):
        numbers = [int(part) for part in counts_text.split(",") if part]
        if not numbers:
            continue
        print(f"{name} workers\n{HEAD}", flush=True)
        figures[name] = asyncio.run(kind(numbers, options.rounds))
        for figure in ("transfer_s", "merge_s", "master_cpu_s", "ping_sweep_s", "peak_mb"):
            slope, base, explained = fit(figures[name], figure)
            unit, factor = ("MB", 1.0) if figure == "peak_mb" else ("ms", 1e3)
            print(
                f"  {figure:<13} = {base * factor:8.1f} {unit} + {slope * factor:7.3f} {unit} per worker (R2 {explained:.3f})"
            )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
