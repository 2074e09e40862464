"""Flood a server of peers: ``python -m tests.trials.peers_flooded [SECONDS] [TURNS]``.

Honest peers post at a steady rate. The attackers run in another process. There are three attacks:

- One peer posts as fast as it can, which is 10 times its quota and more.
- 10,000 joins a minute come with wrong codes, from one address and from 200 addresses.
- 50 peers read no answers, and reconnect when the server closes their connections.

Each attack has TURNS (3) turns of SECONDS (10) with it and without it. The honest peers must keep 90 % of their rate, and
the memory of the server must not grow after the attackers have connected. ``test_peers_flooded.py`` is the short form. The
machine should do nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.peers.light import Light
from tests.trials.peers_killed import PROGRAM, codes_of

ROOT = Path(__file__).parents[2]
LEAST_SHARE = 0.9
MOST_GROWTH_BYTES = 32 * 2**20
SLOW_READERS, JOINS_A_MINUTE, ADDRESSES = 50, 10_000, 200


@dataclass(frozen=True, kw_only=True)
class Attack:
    """An attack, and the honest peers that post during it.

    Args:
        set_bytes: Length of a set in bytes.
        peers: Number of honest peers.
        rate: Number of posts of each honest peer per second.
        codes: Number of codes for the attackers.
    """

    set_bytes: int
    peers: int
    rate: float
    codes: int


ATTACKS = {
    "quota": Attack(set_bytes=24_000, peers=16, rate=25.0, codes=1),
    "joins": Attack(set_bytes=24_000, peers=16, rate=25.0, codes=0),
    "readers": Attack(set_bytes=1_000_000, peers=4, rate=5.0, codes=SLOW_READERS),
}


# -- the attackers, in another process --------------------------------------------------------------------------------------


async def over_quota(port: int, code: str) -> None:
    """Post as fast as the server answers."""
    peer = Light(port)
    await peer.join(code)
    while True:
        await peer.post(peer.set)


async def joins(port: int) -> None:
    """Ask to join with wrong codes."""
    tasks: set[asyncio.Task[None]] = set()

    async def ask(address: str) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            code = random.randbytes(32).hex()[:43]
            writer.write(f"GET /join HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-DDLF-Code: {code}\r\n\r\n".encode())
            await reader.read()
            writer.close()

    due, number = time.monotonic(), 0
    while True:
        number += 1
        address = f"127.0.0.{2 + (number // 2) % ADDRESSES}" if number % 2 else "127.0.0.1"
        task = asyncio.create_task(ask(address))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due = max(due, time.monotonic() - 0.1) + 60 / JOINS_A_MINUTE  # do not catch up after a pause
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def slow_reader(port: int, code: str) -> None:
    """Post, do not read the answer, and reconnect when the server has closed the connection."""
    peer = Light(port)
    await peer.join(code)
    while True:
        with contextlib.suppress(Exception):
            await peer.send_post(peer.set)
            peer.socket.transport.pause_reading()
            await peer.socket.wait_closed()
        await asyncio.sleep(1.0)
        with contextlib.suppress(Exception):
            await peer.connect()


async def attack(name: str, port: int, codes: list[str]) -> None:
    """Run an attack until the process is killed."""
    match name:
        case "quota":
            await over_quota(port, codes[0])
        case "joins":
            await joins(port)
        case _:
            await asyncio.gather(*(slow_reader(port, code) for code in codes))


# -- the honest peers -------------------------------------------------------------------------------------------------------


async def play(peer: Light, rate: float, times: list[float], rates: list[float]) -> None:
    """Post at a rate, and note the time and the delay of each answer."""
    due = time.monotonic() + random.random() / rate
    while True:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        begun = time.monotonic()
        await peer.post(peer.set[:-4] + struct.pack("<f", random.random()))
        rates.append(time.monotonic())
        times.append(time.monotonic() - begun)
        due = max(due + 1 / rate, time.monotonic() - 1 / rate)


async def measured(name: str, seconds: float, turns: int) -> tuple[float, int, str]:
    """Run one attack. Return the remaining share of the rate, the growth of the memory in bytes, and a line of text."""
    attack = ATTACKS[name]
    with tempfile.TemporaryDirectory() as folder:
        program = PROGRAM.replace('print("ready"', "print(sock.getsockname()[1]")
        words = [sys.executable, "-c", program, folder, "0", str(attack.set_bytes)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220  once in a run
        attackers: subprocess.Popen[bytes] | None = None
        peers: list[Light] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            server = psutil.Process(process.pid)
            codes = await codes_of(port, attack.peers + attack.codes)
            times: list[float] = []
            rates: list[float] = []
            for code in codes[attack.codes :]:
                peers.append(Light(port))
                await peers[-1].join(code)
                tasks.append(asyncio.ensure_future(play(peers[-1], attack.rate, times, rates)))
            await asyncio.sleep(min(seconds, 1.0))
            shares, memories, waits, used = [], list[int](), {True: [0.0], False: [0.0]}, []
            attack_codes = codes[: attack.codes]
            nice = ["nice", "-n", "19"]  # like on another machine, they take hardly any time from the server
            words = [*nice, sys.executable, "-m", "tests.trials.peers_flooded"]
            words += ["--attack", name, str(port), json.dumps(attack_codes)]
            attackers = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
            attacking = psutil.Process(attackers.pid)
            await asyncio.sleep(max(3.0, seconds))
            memories.append(server.memory_info().rss)
            for _ in range(turns):
                counts = {}
                for on in (False, True):
                    attacking.resume() if on else attacking.suspend()
                    await asyncio.sleep(0.2)
                    first, first_wait, begun = len(rates), len(times), sum(server.cpu_times()[:2])
                    await asyncio.sleep(seconds)
                    counts[on] = len(rates) - first
                    waits[on] += times[first_wait:]
                    used.append((on, (sum(server.cpu_times()[:2]) - begun) / seconds))
                    memories.append(server.memory_info().rss)
                shares.append(counts[True] / max(counts[False], 1))
            assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for peer in peers:
                await peer.abort()
            for child in (process, attackers):
                if child is not None:
                    child.kill()
                    child.wait()
            if process.stdout is not None:
                process.stdout.close()
    growth = memories[-1] - memories[0]
    p99 = {on: 1000 * sorted(durations)[int(0.99 * len(durations))] for on, durations in waits.items()}
    cores = {on: statistics.fmean(share for was_on, share in used if was_on == on) for on in (False, True)}
    share = statistics.median(shares)  # other programs disturb single turns
    return (
        share,
        growth,
        (
            f"{name}: honest peers keep {share:.1%} of {attack.peers * attack.rate:.0f} posts/s ({min(shares):.1%} at least), 99 % answered in "
            f"{p99[False]:.0f} ms without and {p99[True]:.0f} ms with it, the server uses {cores[False]:.2f} and "
            f"{cores[True]:.2f} cores, memory {growth / 2**20:+.1f} MiB"
        ),
    )


async def main(seconds: float, turns: int) -> int:
    """Run all attacks, and return the exit status."""
    failed = 0
    for name in ATTACKS:
        share, growth, line = await measured(name, seconds, turns)
        print(line, flush=True)
        failed += share < LEAST_SHARE or growth > MOST_GROWTH_BYTES
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        asyncio.run(attack(sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])))
    else:
        words = sys.argv[1:] + ["10", "3"][len(sys.argv) - 1 :]
        sys.exit(asyncio.run(main(float(words[0]), int(words[1]))))
