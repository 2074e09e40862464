"""Train one model with peers in Chromium and in Python, and search all bytes that a browser sends for its pictures.

``python -m tests.trials.browser_peers [--seconds 300] [--browsers 8] [--pythons 2] [--block 30] [--way swap]``

A proxy in front of the server records the bytes from browsers. Each private picture has a mark. The trial searches all
recorded bytes for the marks: raw, as float32, as base64, and inside of anything that zlib can inflate. It blocks the main
thread of the first page once, without using its core, and compares the speed of training with the speed before and after.
It measures the memory of all renderers of Chromium (anonymous pages) at a third of the time and at the end, and counts the
buffers of the engine while a peer pauses.

The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.monitor.dashboard.browser import chromium, opened
from tests.peers.browser.joining import DOCUMENT, MODEL, BrowserPeer
from tests.peers.browser.page import COUNT

POST = 3
EXTRA_BYTES = 2_000
"""Number of bytes that a post may have besides its set."""
ENGINE = "**/engine/vendor/jax.js"
BLOCK = """(ms) => {
  const last = () => told.filter(({ told }) => told === "progress").at(-1).batches, before = last(), began = performance.now();
  const request = new XMLHttpRequest();
  request.open("GET", `/block?${ms}`, false);
  request.send();
  const took = performance.now() - began;
  return new Promise((resolve) => setTimeout(() => resolve([before, last(), took]), 0));
}"""
"""JavaScript that blocks the main thread without using its core, which other processes of a small machine need."""
SPEED = """async (ms) => {
  const last = () => told.filter(({ told }) => told === "progress").at(-1).batches, before = last(), began = performance.now();
  await new Promise((resolve) => setTimeout(resolve, ms));
  return [before, last(), performance.now() - began];
}"""


@dataclass
class Recorder:
    """A TCP proxy that records the bytes from clients.

    Attributes:
        to: The port of the server.
        sent: The recorded bytes of each connection.
        port: The port of the proxy.
    """

    to: int
    sent: list[bytearray] = field(default_factory=list)
    port: int = 0

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        record = bytearray(await reader.read(2**16))
        if request := re.match(rb"GET /block\?(\d+)", record):
            await asyncio.sleep(int(request[1]) / 1000)
            writer.write(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()
            return
        self.sent.append(record)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.to)
        server_writer.write(record)
        await asyncio.gather(_pumped(reader, server_writer, record), _pumped(server_reader, writer, None))


async def _pumped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(2**16):
            if record is not None:
                record += data
            writer.write(data)
            await writer.drain()
    writer.close()


def payloads(sent: bytes) -> Iterator[bytes]:
    """Yield the requests of one connection of a client, and the unmasked content of each of its messages."""
    while sent:
        head, separator, following = sent.partition(b"\r\n\r\n")
        yield head
        sent = following
        if not separator or b"upgrade: websocket" not in head.lower():
            continue
        while len(sent) >= 6:
            length, at = sent[1] & 127, 2
            if length >= 126:
                size = 2 if length == 126 else 8
                length, at = int.from_bytes(sent[2 : 2 + size], "big"), 2 + size
            mask, content = sent[at : at + 4], sent[at + 4 : at + 4 + length]
            key = np.resize(np.frombuffer(mask, np.uint8), len(content))
            yield (np.frombuffer(content, np.uint8) ^ key).tobytes()
            sent = sent[at + 4 + length :]
        return


def forms_of(mark: Any) -> dict[str, bytes]:
    """Return a mark, which is an array of bytes, in each form that a page could send, by the name of the form."""
    raw = mark.tobytes()
    forms = {"raw": raw}
    for name, numbers in (("float32", mark.astype("<f4")), ("float32 of 0 to 1", mark.astype("<f4") / np.float32(255))):
        forms[name] = numbers.tobytes()
    for name, data in list(forms.items()):
        for shift in range(3):  # base64 has three alignments
            text = base64.b64encode(bytes(shift) + data)
            forms[f"base64 of {name} at {shift}"] = text[4:-4]
    return forms


def inflated(data: bytes) -> Iterator[bytes]:
    """Yield all data that zlib can inflate at some place in these bytes: zlib, gzip, and a whole deflated message."""
    starts = [(0, -15), *((match.start(), 47) for match in re.finditer(rb"\x78[\x01\x5e\x9c\xda]|\x1f\x8b\x08", data))]
    for at, bits in starts:
        with contextlib.suppress(zlib.error):
            content = zlib.decompressobj(bits).decompress(data[at:], 2**24)
            if len(content) >= 16:
                yield content


def leaks(contents: list[bytes], marks: list[Any]) -> list[str]:
    """Return the names of the forms of marks that these contents include."""
    forms = set()
    everything = [data for content in contents for data in (content, *inflated(content))]
    for mark in marks:
        for name, data in forms_of(mark).items():
            if any(data in text for text in everything):
                forms.add(name)
    return sorted(forms)


def post_sizes(contents: list[bytes]) -> list[tuple[int, int]]:
    """Return for each post its number of bytes, and the number of bytes of its set."""
    sizes = []
    for content in contents:
        if content[:4] == b"DDLP" and content[5] == POST:
            [text] = struct.unpack_from("<I", content, 8)
            sizes.append((len(content), len(content) - 16 - text))
    return sizes


def renderers_bytes() -> int:
    """Return the anonymous memory of all renderers of this process's Chromium.

    Pages of files do not count, because other processes on the machine can share them.
    """
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, FileNotFoundError):
            if "--type=renderer" in process.cmdline():
                rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                total += 1024 * int(re.findall(r"^Anonymous: +(\d+) kB", rollup, re.MULTILINE)[0])
    return total


class Commands:
    """Commands of ``ddlf peers`` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "ddlf.cli.main", "peers", *words],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"DDLF_RUN_DIR": str(self.folder / "runs")},
        )
        self.running.append(process)
        return process

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


def until(process: subprocess.Popen[str], pattern: str) -> str:
    """Read lines of a command until one matches, and return the first group of the match."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(pattern, line):
            return match[1]
    raise RuntimeError(f"{process.args} has ended without {pattern}")


async def paused_buffers(peer: BrowserPeer) -> int:
    """Return the number of the engine's buffers between two batches."""
    await peer.ask("pause")
    states = await peer.messages("state")
    while states[-1]["state"] != "paused":
        await asyncio.sleep(0.02)
        states = await peer.messages("state")
    count: int = await peer.page.workers[0].evaluate("buffersInUse()")
    await peer.ask("resume")
    return count


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all peers, and return the measurements by name."""
    from ddlf.data import datasets
    from ddlf.peers.running_server import SERVER, read_server

    (x, y), _ = datasets.with_classes("digits")
    x = x.reshape(-1, 64)
    random = np.random.default_rng(3)
    marks = [random.integers(1, 256, 16, dtype=np.uint8) for _ in range(options.browsers)]
    (folder / "digits.nnm").write_text(MODEL)
    np.savez(folder / "all.npz", x=x, y=y)
    commands, count = Commands(folder), options.browsers + options.pythons
    server = commands.start("serve", "digits.nnm", "--invite", str(count), "--port", "0", "--way", options.way)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(commands.end)
        links = [await asyncio.to_thread(until, server, r"link +(\S+)") for _ in range(count)]
        port = int(links[0].partition("/#")[0].rpartition(":")[2])
        drain = asyncio.create_task(asyncio.to_thread(server.communicate))
        stack.callback(drain.cancel)
        recorder = Recorder(port)
        stack.callback((await recorder.start()).close)
        for link in links[options.browsers :]:
            python = commands.start("join", link, "--data", "all.npz", "--name", "python")
            await asyncio.to_thread(until, python, r"(joined) ")
            reading = asyncio.create_task(asyncio.to_thread(python.communicate))
            stack.callback(reading.cancel)
        browser = await stack.enter_async_context(chromium())
        peers, pages = [], []
        for number in range(options.browsers):
            url = f"http://127.0.0.1:{recorder.port}{DOCUMENT}"
            page = await stack.enter_async_context(opened(browser, url))
            await page.route(ENGINE, _counting)
            peer = BrowserPeer(page)
            status, body = await peer.session(links[number])
            if status != 200:
                raise RuntimeError(body)
            own_x = x[number :: options.browsers].astype(np.float32).copy()
            own_x[:, :16] = marks[number].astype(np.float32) / np.float32(255)
            answer = await peer.join(own_x, y[number :: options.browsers].astype("i4"), name=f"browser {number}")
            if "error" in answer:
                raise RuntimeError(answer["error"])
            peers.append(peer)
            pages.append(page)
            print(f"joined           browser {number} as peer {answer['peer']}", file=sys.stderr, flush=True)
        began = time.monotonic()
        for peer in peers:
            await peer.until("progress", lambda message: message["posts"] >= 2)
        await asyncio.sleep(max(0.0, options.seconds / 3 - (time.monotonic() - began)))
        first = [await paused_buffers(peer) for peer in peers]
        memory = renderers_bytes()
        block_ms = int(1000 * options.block)
        before = await pages[0].evaluate(SPEED, block_ms // 2)
        blocked = await pages[0].evaluate(BLOCK, block_ms)
        after = await pages[0].evaluate(SPEED, block_ms // 2)
        reached = read_server(next((folder / "runs").glob("*-peers-digits")) / SERVER)
        listing = await asyncio.to_thread(reached.overview)
        await asyncio.sleep(max(0.0, options.seconds - (time.monotonic() - began)))
        last_memory = renderers_bytes()
        last = [await paused_buffers(peer) for peer in peers]
        progress = [(await peer.messages("progress"))[-1] for peer in peers]
        lost = [state for peer in peers for state in await peer.messages("state") if state["state"] == "lost"]
        contents = [content for sent in recorder.sent for content in payloads(bytes(sent))]
        sizes = post_sizes(contents)
        errors = [line for page in pages for line in page.wrong if "404" not in line]
        return {
            "seconds": time.monotonic() - began,
            "peers": len(listing.peers),
            "gone": [row.peer for row in listing.peers if not row.connected],
            "posts": [row.posts for row in listing.peers],
            "merges": [message["merges"] for message in progress],
            "batches": [message["batches"] for message in progress],
            "accuracy": listing.accuracy,
            "buffers": [first, last],
            "memory": [memory, last_memory],
            "errors": errors,
            "hosts": sorted({host for page in pages for host in page.hosts}),
            "port": recorder.port,
            "lost": len(lost),
            "free": 1000 * (before[1] - before[0] + after[1] - after[0]) / (before[2] + after[2]),
            "blocked": 1000 * (blocked[1] - blocked[0]) / blocked[2],
            "bytes": sum(map(len, recorder.sent)),
            "recorded posts": len(sizes),
            "extra": max(size - set_size for size, set_size in sizes),
            "leaks": leaks(contents, marks),
        }


async def _counting(route: Any) -> None:
    answer = await route.fetch()
    await route.fulfill(response=answer, body=COUNT + await answer.text())


def missed(results: dict[str, Any], *, memory: float = 1.05, slower: float = 0.9) -> list[str]:
    """Return the bars that a run has missed."""
    bars = {
        "all peers are here": not results["gone"],
        "all peers have posted": min(results["posts"]) > 0,
        "the number of buffers is constant": results["buffers"][0] == results["buffers"][1],
        "memory of the pages grows by 5% at most": results["memory"][1] <= memory * results["memory"][0],
        "no error in a console": not results["errors"],
        "no request to another host": results["hosts"] == [f"127.0.0.1:{results['port']}"],
        "no connection was lost": not results["lost"],
        "a blocked page trains at 90% of its speed": results["blocked"] >= slower * results["free"],
        "no mark in any byte": not results["leaks"],
        "a post has at most its set and 2 kB": results["extra"] <= EXTRA_BYTES,
    }
    return [name for name, holds in bars.items() if not holds]


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--browsers", type=int, default=8)
    parser.add_argument("--pythons", type=int, default=2)
    parser.add_argument("--block", type=float, default=30.0, help="seconds to block the main thread of a page")
    parser.add_argument("--way", choices=("swap", "rounds"), default="swap")
    return parser.parse_args(words)


def main() -> int:
    """Run the trial, and print the measurements and the missed bars. Return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(parsed(), Path(folder)))
    for name, value in results.items():
        print(f"{name:16} {value}")
    for name in (failed := missed(results)):
        print(f"missed: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
