"""Swaps of light peers: the server of ``ddlf peers`` beside a bare server with the same library.

``python -m benchmarks.peer_swaps [--peers 200] [--bytes 24000] [--seconds 4] [--repeats 5] [--rate 0] [--codec float32]``

The bare server receives a message, writes it to a file, syncs, and answers with the message of another peer. Messages
that come together share a sync, like in the server of peers. Both are one process, and another process has all peers.
The peers post different sets in turn, so that the server's checks see trainings of usual length.
Repeats of both take turns. With ``--rate`` the peers together post this number of sets per second, and the latency
counts; otherwise each posts as soon as it is answered. ``--bytes`` is the size of float32 weights: with another codec half
of these bytes travel, to the bare server, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
from websockets.asyncio.client import ClientConnection, connect

from ddlf.peers.sets import layout_of
from ddlf.peers.wire import CODECS, FLOAT32, Wire

VARIANTS = 8
"""Number of different sets that the peers post."""

BARE = """
import asyncio, os, socket, sys
from websockets.asyncio.server import serve
file = os.open(sys.argv[1] + "/bare", os.O_RDWR | os.O_CREAT)
queue = asyncio.Queue()
waiting = b"x" * int(sys.argv[3])
def write(batch):
    os.write(file, b"".join(data for data, _ in batch))
    os.fdatasync(file)
async def writer():
    global waiting
    while True:
        batch = [await queue.get()]
        while not queue.empty():
            batch.append(queue.get_nowait())
        await asyncio.to_thread(write, batch)
        for data, done in batch:
            done.set_result(waiting)
            waiting = data
async def one(peer):
    async for data in peer:
        done = asyncio.get_running_loop().create_future()
        queue.put_nowait((data, done))
        await peer.send(await done)
async def main():
    task = asyncio.ensure_future(writer())
    sock = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=1024)
    async with serve(one, sock=sock, compression=None, max_size=2**24, max_queue=1, ping_interval=None):
        print("ready", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
OURS = """
import asyncio, socket, sys
from pathlib import Path
import numpy as np
from ddlf.peers.plan import Plan
from ddlf.peers.served_model import Model
from ddlf.peers.server import PeerServer
from ddlf.peers.sets import layout_of
weights = {"dense/kernel": np.ones((int(sys.argv[3]) // 4,), np.float32)}
layout = layout_of(weights)
model = Model(text="m", layout=layout, first=layout.encode(list(weights.values())), trainable=(True,))
plan = Plan(validate_s=0.0, codec=sys.argv[4])
server = PeerServer(Path(sys.argv[1]), model, plan, say=lambda line: None, control="secret")
server.recover()
sock = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=1024)
asyncio.run(server.serve(sock, lambda: print("ready", flush=True)))
"""


def frame(kind: int, content: dict[str, object], data: bytes = b"") -> bytes:
    """Return the bytes of a frame of the peers' protocol."""
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return b"DDLP" + struct.pack("<BBHII", 1, kind, 0, len(text), 0) + text + data


async def get(port: int, path: str, headers: dict[str, str]) -> dict[str, object]:
    """Send a GET request, and return its JSON answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{lines}\r\n".encode())
    answer = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    content: dict[str, object] = json.loads(answer)
    return content


class Bare:
    """A peer of the bare server."""

    def __init__(self, port: int, sets: Sequence[bytes]) -> None:
        self.port, self.sets, self.number = port, sets, 0
        self.socket: ClientConnection

    async def open(self, code: str) -> None:
        """Connect."""
        self.socket = await connect(
            f"ws://127.0.0.1:{self.port}/", compression=None, max_size=None, proxy=None, ping_interval=None
        )

    async def swap(self) -> None:
        """Post, and wait for the answer."""
        self.number += 1
        await self.socket.send(self.sets[self.number % len(self.sets)])
        await self.socket.recv()


class Ours(Bare):
    """A peer of the server of peers."""

    async def open(self, code: str) -> None:
        key = (await get(self.port, "/join", {"X-DDLF-Code": code}))["key"]
        self.socket = await connect(
            f"ws://127.0.0.1:{self.port}/live",
            additional_headers={"Authorization": f"Bearer {key}"},
            compression=None,
            max_size=None,
            proxy=None,
            ping_interval=None,
        )
        await self.socket.send(frame(1, {"name": "", "samples": 100}))
        welcome = await self.socket.recv()
        assert isinstance(welcome, bytes)
        self.contained = 0

    async def swap(self) -> None:
        self.number += 1
        data = self.sets[self.number % len(self.sets)]
        await self.socket.send(frame(3, {"number": self.number, "contains": self.contained, "updates": 1}, data))
        answer = await self.socket.recv()
        assert isinstance(answer, bytes)
        assert answer[5] == 4, answer[:300]
        [length] = struct.unpack_from("<I", answer, 8)
        content = json.loads(answer[16 : 16 + length])
        assert content["answer"] != "rejected", content
        self.contained = content["set_number"] or self.contained


def sets_of(size: int, codec: str) -> list[bytes]:
    """Return sets whose weights differ by a hundredth, each for float32 weights of this size."""
    random = np.random.default_rng(0)
    layout = layout_of({"dense/kernel": np.ones((size // 4,), np.float32)})
    wire = Wire(layout, codec, (True,))
    drawn = (random.normal(1.0, 0.01, size // 4) for _ in range(VARIANTS))
    return [wire.encode([weights.astype(np.float32)]) for weights in drawn]


async def measure(kind: type[Bare], options: argparse.Namespace) -> dict[str, float]:
    """Start a server and its peers, and return swaps per second, latencies, processor time and memory."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        program = OURS if kind is Ours else BARE
        words = [sys.executable, "-c", program, folder, str(port), str(options.bytes), options.codec]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220  once in a repeat
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            sets = sets_of(options.bytes, options.codec)
            peers = [kind(port, sets) for _ in range(options.peers)]
            codes: list[str] = [""] * options.peers
            if kind is Ours:
                requests = [
                    get(port, "/control/invite?count=100", {"Authorization": "Bearer secret"})
                    for _ in range(0, options.peers, 100)
                ]
                codes = [code for answer in await asyncio.gather(*requests) for code in answer["codes"]]  # type: ignore[attr-defined]
            for peer, code in zip(peers, codes, strict=False):
                await peer.open(code)
            server, times, count = psutil.Process(process.pid), [], 0
            used = sum(server.cpu_times()[:2])
            begun = time.perf_counter()
            end = begun + options.seconds

            async def play(peer: Bare, first: float) -> None:
                nonlocal count
                due = first
                while (now := time.perf_counter()) < end:
                    if options.rate:
                        due += options.peers / options.rate
                        await asyncio.sleep(max(0.0, due - now))
                        now = time.perf_counter()
                    await peer.swap()
                    times.append(time.perf_counter() - now)
                    count += 1

            gap = 1 / options.rate if options.rate else 0.0
            await asyncio.gather(*(play(peer, begun + number * gap) for number, peer in enumerate(peers)))
            passed = time.perf_counter() - begun
            memory = server.memory_info().rss
            used = sum(server.cpu_times()[:2]) - used
            for peer in peers:
                peer.socket.transport.abort()
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    times.sort()
    return {
        "swaps/s": count / passed,
        "p50 ms": 1000 * times[len(times) // 2],
        "p99 ms": 1000 * times[int(len(times) * 0.99)],
        "server ms/swap": 1000 * used / count,
        "server MB": memory / 1e6,
    }


async def main(options: argparse.Namespace) -> None:
    """Measure both in turns, and print medians."""
    figures: dict[str, list[dict[str, float]]] = {"bare": [], "peers": []}
    for _ in range(options.repeats):
        for name, kind in (("bare", Bare), ("peers", Ours)):
            figures[name].append(await measure(kind, options))
    for name, rows in figures.items():
        print(name, ", ".join(f"{key} {statistics.median(row[key] for row in rows):.4g}" for key in rows[0]))
    ratios = [ours["swaps/s"] / bare["swaps/s"] for ours, bare in zip(figures["peers"], figures["bare"], strict=True)]
    print(f"ratio of swaps/s: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, files in {options.folder or tempfile.gettempdir()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="swaps of light peers")
    parser.add_argument("--peers", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=24_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--codec", choices=CODECS, default=FLOAT32)
    parser.add_argument("--folder", type=Path, default=None)
    asyncio.run(main(parser.parse_args()))
