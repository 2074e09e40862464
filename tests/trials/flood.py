"""Flood a worker with strangers while a master uses it: slow connections, garbage, and thousands of idle connections.

    python -m tests.trials.flood [--drips 500] [--garbage 100] [--idle 5000] [--seconds 20]

The strangers are one process with 200 loopback addresses. They reconnect one second after the worker closes their
connection. These limits must hold: the p99 of real handshakes is below 250 ms, and none fails. The p99 of calls is less
than twice the value before the flood. The worker keeps an idle connection, or reports that it has no place. Each idle
connection needs less than 60 KiB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil

from ddlf.cluster.cluster import Cluster
from ddlf.errors import ConnectError, DDLFError
from ddlf.rpc.dial import dial
from ddlf.rpc.handshake import Role
from ddlf.rpc.tls import make_certificate
from tests.tls import far_apart
from tests.trials.options import read_options
from tests.trials.workers import Workers

ROOT = Path(__file__).parents[2]
ADDRESSES = 200
GARBAGE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"SSH-2.0-OpenSSH_9\r\n",
    bytes(200),
    b"\x16\x03\x01\x02\x00\x01\x00\x01",
    b"\xff" * 500,
)


def percentile(values: list[float], percent: float) -> float:
    """Return the percentile of some values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


# -- the strangers, in another process ----------------------------------------------------------------------------------


async def attack(port: int, drips: int, garbage: float) -> None:
    """Hold ``drips`` connections that send a byte each second, and send garbage ``garbage`` times a second, until killed."""

    async def connect(number: int) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind((f"127.0.0.{2 + number % ADDRESSES}", 0))
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return sock

    async def drip(number: int) -> None:
        while True:
            with contextlib.suppress(OSError), await connect(number) as sock:
                for byte in b"DDLF\x01\x00\x01\x00" + bytes(56):
                    await asyncio.get_running_loop().sock_sendall(sock, bytes([byte]))
                    await asyncio.sleep(1)
            await asyncio.sleep(1)

    async def throw(number: int) -> None:
        with contextlib.suppress(OSError), await connect(number) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, random.choice(GARBAGE))
            await asyncio.get_running_loop().sock_recv(sock, 1000)

    tasks = {asyncio.create_task(drip(number)) for number in range(drips)}
    number = 0
    while garbage:
        number += 1
        task = asyncio.create_task(throw(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(1 / garbage)
    await asyncio.gather(*tasks)


@contextlib.asynccontextmanager
async def strangers(port: int, drips: int, garbage: float) -> AsyncIterator[None]:
    """Run the attack during the block. It has begun when the block begins."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.trials.flood"),
        *("--attack", str(port), "--drips", str(drips), "--garbage", str(garbage)),
        cwd=ROOT,
    )
    try:
        await asyncio.sleep(2)
        yield
    finally:
        process.kill()
        await process.wait()


def start(workers: Workers) -> tuple[subprocess.Popen[bytes], int]:
    """Start a worker with a certificate on loopback, and return its process and its port."""
    certificate = workers.folder / "certificate.pem"
    make_certificate(certificate)
    return workers.start("-q", "--tls-cert", certificate, "--tls-key", certificate)


# -- the master --------------------------------------------------------------------------------------------------------


async def often(action: Callable[[], Awaitable[object]], seconds: float, pause_s: float) -> tuple[list[float], int]:
    """Repeat an action for some seconds. Return the durations in seconds, and the number of failures."""
    durations, failed = [], 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        try:
            await action()
            durations.append(time.perf_counter() - begin)
        except DDLFError:
            failed += 1
        await asyncio.sleep(pause_s)
    return durations, failed


async def at_work(cluster: Cluster, port: int, token: bytes, seconds: float) -> dict[str, float]:
    """Make calls, heartbeats and handshakes at the same time, and return their durations in milliseconds."""

    async def greet() -> None:
        sock, _ = await dial("127.0.0.1", port, Role.CONTROL, token, max_message_bytes=1000)
        sock.close()

    (worker,) = cluster.workers
    (calls, _), (pings, _), (greetings, failed) = await asyncio.gather(
        often(cluster.methods, seconds, 0.002),
        often(lambda: worker.ask("ping", timeout_s=10), seconds, 0.05),
        often(greet, seconds, 0.02),
    )
    return {
        "call p50": statistics.median(calls) * 1e3,
        "call p99": percentile(calls, 99) * 1e3,
        "heartbeat max": max(pings) * 1e3,
        "handshake p50": statistics.median(greetings) * 1e3,
        "handshake p99": percentile(greetings, 99) * 1e3,
        "handshakes": len(greetings),
        "failed": failed,
    }


async def idle(port: int, token: bytes, count: int, daemon: psutil.Process, *, encrypted: bool) -> dict[str, float]:
    """Open idle connections with the token. Return their number, the number of refusals, and the memory for each."""
    sockets: list[socket.socket] = []
    refused = 0
    before = daemon.memory_full_info().uss
    limit = asyncio.Semaphore(4)

    async def open_one() -> None:
        nonlocal refused
        async with limit:
            try:
                sockets.append((await dial("127.0.0.1", port, Role.CONTROL, token, max_message_bytes=1000))[0])
            except ConnectError as error:
                if "the worker accepts no more connections" not in str(error):
                    raise
                refused += 1

    with far_apart() if encrypted else contextlib.nullcontext():
        await asyncio.gather(*(open_one() for _ in range(count)))
    used = daemon.memory_full_info().uss - before
    for sock in sockets:
        sock.close()
    return {"held": len(sockets), "refused politely": refused, "KiB each": used / 1024 / max(1, len(sockets))}


async def run(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run all parts of the trial with one worker, and return their values."""
    results = {}
    with Workers() as workers:
        process, port = start(workers)
        daemon = psutil.Process(process.pid)
        async with Cluster(["127.0.0.1"], port, token_file=workers.token_file) as cluster:
            results["undisturbed"] = await at_work(cluster, port, workers.token, options.seconds)
            async with strangers(port, options.drips, options.garbage):
                results["flooded"] = await at_work(cluster, port, workers.token, options.seconds)
            for encryption in ("plaintext", "TLS"):
                idling = asyncio.create_task(
                    idle(port, workers.token, options.idle, daemon, encrypted=encryption == "TLS")
                )
                (worker,) = cluster.workers
                slowest = 0.0
                while not idling.done():
                    begin = time.perf_counter()
                    await worker.ask("ping", timeout_s=10)
                    slowest = max(slowest, time.perf_counter() - begin)
                    await asyncio.sleep(0.05)
                results[f"idle, {encryption}"] = {**await idling, "heartbeat max": slowest * 1e3}
        results["log"] = {"lines": len(workers.log.read_text().splitlines())}
    return results


def main() -> None:
    """Run the trial and print its values. Exit with 1 if a limit is exceeded."""
    options = read_options(__doc__, drips=500, garbage=100.0, idle=5000, seconds=20.0, json=False, attack=int)
    if options.attack:
        asyncio.run(attack(options.attack, options.drips, options.garbage))
        return
    results = asyncio.run(run(options))
    if options.json:
        print(json.dumps(results))
    else:
        for part, figures in results.items():
            print(f"{part:<16}", "  ".join(f"{name} {figure:.4g}" for name, figure in figures.items()))
    before, flooded = results["undisturbed"], results["flooded"]
    good = (
        flooded["handshake p99"] < 250
        and flooded["failed"] == 0
        and flooded["call p99"] < 2 * before["call p99"]
        and all(results[f"idle, {encryption}"]["KiB each"] < 60 for encryption in ("plaintext", "TLS"))
    )
    if not options.json:
        print("all bars held" if good else "A BAR WAS MISSED")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
