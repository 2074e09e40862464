"""Wrong tokens, against a real worker: how many open it (none), and what they cost a master that works meanwhile.

    python -m tests.trials.guesses [--guesses 100000]

A guess is a hello and a random proof, sent by somebody who does not care that the worker's own proof shows another token. The worker answers an
accepted proof at once, so he waits for that moment only, and comes again from one of 200 addresses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import sys
import time

from ddlf.cluster.cluster import Cluster
from ddlf.rpc.handshake import HELLO, Hello, Role, Verdict
from ddlf.rpc.stream import receive_exactly
from tests.trials.flood import ADDRESSES, ROOT, percentile, start
from tests.trials.workers import Workers

AT_ONCE = 32
PATIENCE_S = 0.02


async def guess(port: int, number: int) -> str:
    """Try one proof; returns what the worker made of it."""
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        sock.setblocking(False)
        sock.bind((f"127.0.0.{2 + number % ADDRESSES}", 0))
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, Hello(Role.CONTROL, os.urandom(32), 1000).encode() + os.urandom(32))
            async with asyncio.timeout(5):
                await receive_exactly(sock, HELLO.size + 32)
            async with asyncio.timeout(PATIENCE_S):
                verdict = await receive_exactly(sock, 1)
            return "accepted" if verdict == bytes([Verdict.ACCEPTED]) else "refused"
        except TimeoutError:
            return "not accepted at once"
        except OSError:
            return "closed"


async def guess_all(port: int, count: int) -> None:
    """All guesses, some at a time; prints how they ended."""
    ends: dict[str, int] = {}
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            end = await guess(port, number)
            ends[end] = ends.get(end, 0) + 1

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    print(", ".join(f"{number:,} {end}" for end, number in sorted(ends.items())), flush=True)
    sys.exit(1 if "accepted" in ends else 0)


async def calls(cluster: Cluster, until: asyncio.Event) -> list[float]:
    """Seconds of each small call until an event."""
    taken = []
    while not until.is_set():
        begin = time.perf_counter()
        await cluster.methods()
        taken.append(time.perf_counter() - begin)
        await asyncio.sleep(0.005)
    return taken


async def run(count: int) -> int:
    """Guess while a master works; returns the exit code."""
    with Workers() as workers:
        process, port = start(workers)
        async with Cluster(["127.0.0.1"], port, token_file=workers.token_file) as cluster:
            quiet = asyncio.Event()
            asyncio.get_running_loop().call_later(3, quiet.set)
            before = await calls(cluster, quiet)
            done, begin = asyncio.Event(), time.perf_counter()
            attack = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.trials.guesses",
                "--attack",
                str(port),
                "--guesses",
                str(count),
                cwd=ROOT,
            )
            meanwhile = asyncio.create_task(calls(cluster, done))
            code = await attack.wait()
            done.set()
            took, during = time.perf_counter() - begin, await meanwhile
        for what, taken in (("undisturbed", before), ("meanwhile", during)):
            print(
                f"calls {what:<12} p50 {statistics.median(taken) * 1e3:.2f} ms  p99 {percentile(taken, 99) * 1e3:.2f} ms"
            )
        print(f"{count / took:.0f} guesses a second; the worker is {'alive' if process.poll() is None else 'DEAD'}")
        return code or process.poll() or 0


def main() -> None:
    """Print how it ended; exit with 1 when one guess was accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guesses", type=int, default=100_000)
    parser.add_argument("--attack", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        asyncio.run(guess_all(options.attack, options.guesses))
    sys.exit(asyncio.run(run(options.guesses)))


if __name__ == "__main__":
    main()
