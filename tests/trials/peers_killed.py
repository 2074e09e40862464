"""Kill the server of peers at random moments: ``python -m tests.trials.peers_killed [KILLS]``.

Four peers post as fast as the server answers. They share no code with the server. They note each answered post, and a
value of its set. After the last kill, the bytes of the journal must contain each of these posts once, with this value. The
posts of each peer must have consecutive numbers.
"""

import asyncio
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

from tests.peers.light import Light, get

PEERS = 4
PROGRAM = """
import asyncio, socket, sys
from pathlib import Path
import numpy as np
from ddlf.peers.plan import Plan
from ddlf.peers.served_model import Model
from ddlf.peers.server import PeerServer
from ddlf.peers.sets import layout_of
weights = {"dense/kernel": np.zeros((int(sys.argv[3]) // 4,), np.float32)}
layout = layout_of(weights)
model = Model(text="m", layout=layout, first=layout.encode(list(weights.values())), trainable=(True,))
plan = Plan(validate_s=0.0, longest=0.0, codec="float32" if len(sys.argv) < 5 else sys.argv[4])
server = PeerServer(Path(sys.argv[1]), model, plan, say=lambda line: None, control="secret")
server.recover()
sock = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=1024)
print("ready", flush=True)
asyncio.run(server.serve(sock, lambda: None))
"""


def start(folder: Path, port: int, size: int) -> subprocess.Popen[str]:
    """Start a server, and return when it listens."""
    words = [sys.executable, "-c", PROGRAM, str(folder), str(port), str(size)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


async def codes_of(port: int, count: int) -> list[str]:
    """Return new codes of a server."""
    codes: list[str] = []
    while len(codes) < count:
        batch = min(100, count - len(codes))
        _, _, body = await get(port, f"/control/invite?count={batch}", {"Authorization": "Bearer secret"})
        codes += json.loads(body)["codes"]
    return codes


async def play(peer: Light, answered: dict[int, bytes], back: list[float], over: asyncio.Event) -> None:
    """Post until the end, reconnect after each kill, and note the answered posts."""
    sent = b""
    lost_at = 0.0
    while not over.is_set():
        try:
            if lost_at:
                await peer.connect(keeps=True)
                back.append(time.monotonic() - lost_at)
                lost_at = 0.0
                if sent:
                    await peer.send_again(sent)
            else:
                sent = peer.set[:-4] + struct.pack("<f", random.random())
                await peer.send_post(sent)
            await peer.answer()
            answered[peer.number], sent = sent[-4:], b""
        except Exception:
            lost_at = lost_at or time.monotonic()
            await asyncio.sleep(0.05)


def journal_of(folder: Path) -> tuple[list[dict[str, object]], dict[int, bytes]]:
    """Return the entries of a run and the last bytes of its sets, from the bytes of its files."""
    entries: dict[int, list[dict[str, object]]] = {}
    ends: dict[int, bytes] = {}
    for path in folder.glob("history-*"):
        entries[int(path.name[8:14])] = [json.loads(line) for line in path.read_text().splitlines()]
    for path in folder.glob("journal-*"):
        data, at = path.read_bytes(), 0
        rows = entries.setdefault(int(path.name[8:14]), [])
        rows.clear()
        while at + 24 <= len(data):
            magic, crc, text, _, length = struct.unpack_from("<4sIIIQ", data, at)
            if magic not in (b"DPJ1", b"DPJ+") or zlib.crc32(data[at + 8 : at + 24 + text + length]) != crc:
                break
            row = json.loads(data[at + 24 : at + 24 + text])
            if row["kind"] not in ("Snapshot", "Kept"):
                rows.append(row)
            if length and "set" in row:
                ends[row["set"]] = data[at + 24 + text + length - 4 : at + 24 + text + length]
            at += 24 + text + length
    return [row for _, rows in sorted(entries.items()) for row in rows], ends


async def main(kills: int) -> None:
    """Run the trial."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = start(folder, port, 24_000)
        peers = [Light(port) for _ in range(PEERS)]
        for peer, code in zip(peers, await codes_of(port, PEERS), strict=True):
            await peer.join(code)
        answered: list[dict[int, bytes]] = [{} for _ in peers]
        back: list[float] = []
        over = asyncio.Event()
        tasks = [
            asyncio.ensure_future(play(peer, rows, back, over)) for peer, rows in zip(peers, answered, strict=True)
        ]
        starts = []
        for _ in range(kills):
            await asyncio.sleep(random.uniform(0.05, 1.0))
            os.kill(server.pid, signal.SIGKILL)
            server.communicate()
            begun = time.monotonic()
            server = await asyncio.to_thread(start, folder, port, 24_000)
            starts.append(time.monotonic() - begun)
        await asyncio.sleep(1.0)
        over.set()
        await asyncio.gather(*tasks)
        server.kill()
        server.communicate()
        rows, ends = journal_of(folder)
    posts = [row for row in rows if row["kind"] == "Posted"]
    for number, (peer, noted) in enumerate(zip(peers, answered, strict=True), 1):
        numbers = [row["number"] for row in posts if row["peer"] == number]
        assert numbers == list(range(1, len(numbers) + 1)), f"peer {number} has gaps or doubles"
        assert len(numbers) >= peer.number - 1
        assert noted.keys() <= set(numbers), f"answered posts of peer {number} are lost"
        for row in posts:
            if row["peer"] == number and row["set"] in ends and row["number"] in noted:
                assert ends[row["set"]] == noted[row["number"]], "a set has other bytes"
    total = sum(map(len, answered))
    print(f"{kills} kills, {total:,} answered posts, {len(posts):,} in the journal: 0 lost, 0 doubled")
    print(
        f"peers were back {max(back):.1f} s after they lost the server at the latest; it took {max(starts):.1f} s to start"
    )


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
