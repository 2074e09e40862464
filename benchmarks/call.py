"""Measure the processor time of a small call: ``python -m benchmarks.call [--calls 2000] [--repeats 15]``.

Master and worker run in this process, on one event loop, and are connected by a socket. No process has to wake up, so
the figures repeat within some 2 %, and show a change of one microsecond. The time is the sum of both sides. An echo
over asyncio's streams is measured for comparison. Run the benchmark on one core (``taskset -c 1``), and compare two
versions in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.echo import LENGTH
from ddlf.cluster.proxy import ProxyWorker
from ddlf.rpc.buffers import POOL
from ddlf.rpc.code import CodeSender
from ddlf.rpc.connection import Channel, Connection
from ddlf.rpc.messages import Limits, Request
from ddlf.worker.activity import Activity
from ddlf.worker.executor import Executor

SMALL = bytes(64)
IN_FLIGHT = 50


def echo(value: Any) -> Any:
    """The function that the worker runs."""
    return value


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    for sock in (left, right):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    return left, right


async def processor_us(calls: int, repeats: int, run: Callable[[int], Awaitable[None]]) -> list[float]:
    """Return this process's processor time for a call in microseconds, for each repeat."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        await run(calls)
        times.append((time.process_time() - begin) / calls * 1e6)
    return times


async def measure_ddlf(calls: int, repeats: int) -> dict[str, list[float]]:
    """Measure calls one at a time, and with several in flight."""
    left, right = connected()
    with tempfile.TemporaryDirectory() as folder:
        page = Activity.create()
        executor = Executor(Path(folder) / "session", Path(folder) / "persist", Activity(page))
        serving = asyncio.create_task(executor.serve(right, Limits(), Limits()))
        proxy = ProxyWorker("127.0.0.1", 1, b"")
        stream = partial(Connection, left, limits=Limits(), allocate=POOL.take)
        # without the handshake and a daemon
        proxy._link.data = Channel(proxy._link, stream, itertools.count(1), code=CodeSender())
        await proxy.rpc(Request("connect", guest=True))  # without a daemon nobody gives leases
        await proxy.add_method(echo)

        async def one_at_a_time(calls: int) -> None:
            for _ in range(calls):
                await proxy.rpc(Request("run", "echo", SMALL))

        async def in_flight(calls: int) -> None:
            await asyncio.gather(*(one_at_a_time(calls // IN_FLIGHT) for _ in range(IN_FLIGHT)))

        times = {
            "DDLF, one at a time": await processor_us(calls, repeats, one_at_a_time),
            f"DDLF, {IN_FLIGHT} in flight": await processor_us(calls // IN_FLIGHT * IN_FLIGHT, repeats, in_flight),
        }
        proxy._link.data.stream.close()
        await serving
    return times


async def measure_streams(calls: int, repeats: int) -> dict[str, list[float]]:
    """The same echo with asyncio's streams."""
    left, right = connected()
    reader, writer = await asyncio.open_connection(sock=left)
    far_reader, far_writer = await asyncio.open_connection(sock=right)

    async def serve() -> None:
        while True:
            head = await far_reader.readexactly(LENGTH.size)
            far_writer.write(head + await far_reader.readexactly(*LENGTH.unpack(head)))
            await far_writer.drain()

    async def one_at_a_time(calls: int) -> None:
        for _ in range(calls):
            writer.write(LENGTH.pack(len(SMALL)) + SMALL)
            await writer.drain()
            await reader.readexactly(*LENGTH.unpack(await reader.readexactly(LENGTH.size)))

    serving = asyncio.create_task(serve())
    times = {"asyncio's streams": await processor_us(calls, repeats, one_at_a_time)}
    serving.cancel()
    writer.close()
    far_writer.close()
    return times


async def measure(calls: int, repeats: int) -> dict[str, list[float]]:
    """Return the microseconds of both sides together, by contender."""
    return await measure_ddlf(calls, repeats) | await measure_streams(calls, repeats)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.call", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000, help=f"in each repeat, at least {IN_FLIGHT}")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(argv)
    for name, values in asyncio.run(measure(options.calls, options.repeats)).items():
        print(f"{name:<22} least {min(values):5.1f} us, median {statistics.median(values):5.1f} us")


if __name__ == "__main__":
    main()
