"""Compare workers that dial their master through a NAT with workers that it dials: ``python -m tests.trials.behind_nat``.

Both kinds of workers are one hop away, behind a router in a network namespace. Each repeat measures both, in the opposite
order of the repeat before. The table shows medians with the smallest and the largest repeat, and the median of the ratios
within a repeat. The trial needs Linux, root and ``nft``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import turns
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.gate import Joined
from ddlf.rpc.tokens import new_token
from tests.trials.machines import inside
from tests.trials.nat import Nat, on

WORKERS = 2
FORGETS_AFTER_S = 60
ROUND_BYTES = 2_060_000
"""Size of the weights of a small convolutional network, which a round sends to each worker and back."""
CASES = {"small call": (b"", 200), "round of 2 MB": (np.zeros(ROUND_BYTES // 4, "float32"), 10)}
"""For each case, the argument that a call sends and returns, and the number of calls of one measurement."""


def same(value: object) -> object:
    """Return the argument. This function runs on workers."""
    return value


async def seconds(cluster: Cluster, value: object, calls: int) -> float:
    """Return the mean time of a call to all workers."""
    begin = time.perf_counter()
    for _ in range(calls):
        await cluster.run_method(same, value=value)
    return (time.perf_counter() - begin) / calls


async def compare(repeats: int, folder: Path) -> None:
    """Measure both kinds of workers, and print the table."""
    token = folder / "token"
    token.write_text(new_token())
    token.chmod(0o600)
    async with contextlib.AsyncExitStack() as stack:
        nat, direct = (
            stack.enter_context(Nat(forgets, number)) for number, forgets in ((1, FORGETS_AFTER_S), (2, None))
        )
        with inside(nat.outside):
            joined = Joined(WORKERS, nat.address_outside, 9100, token_file=token)
            joined.open()
        for number in range(WORKERS):
            dials = ("--join", f"{nat.address_outside}:9100", "--place", str(number))
            listens = ("--host", direct.address_inside, "--port", str(9000 + number))
            for namespace, options in ((nat.inside, dials), (direct.inside, listens)):
                command = (sys.executable, "-m", "ddlf.cli.worker", *options, "--token-file", str(token), "--quiet")
                environment = {**os.environ, "DDLF_CORES": "1"}
                process = subprocess.Popen(on(namespace, *command), env=environment)  # noqa: ASYNC220 - the call returns at once
                stack.callback(process.wait)
                stack.callback(process.terminate)
        ports = [9000 + number for number in range(WORKERS)]
        stack.enter_context(inside(direct.outside))
        hosts = Cluster([direct.address_inside] * WORKERS, ports, token_file=token)
        async with Cluster(joined) as behind_nat, hosts:
            clusters = {"behind NAT": behind_nat, "dialled": hosts}
            for name, (value, calls) in CASES.items():
                seconds_by_kind: dict[str, list[float]] = {kind: [] for kind in clusters}
                for cluster in clusters.values():
                    await seconds(cluster, value, calls)
                for _, kind in turns(list(clusters), repeats):
                    seconds_by_kind[kind].append(await seconds(clusters[kind], value, calls))
                for kind, times in seconds_by_kind.items():
                    low, middle, high = (
                        1e3 * duration for duration in (min(times), statistics.median(times), max(times))
                    )
                    print(f"{name:14} {kind:11} {middle:8.3f} ms  [{low:.3f}, {high:.3f}]")
                ratios = [
                    nat_s / dialled_s
                    for nat_s, dialled_s in zip(seconds_by_kind["behind NAT"], seconds_by_kind["dialled"], strict=True)
                ]
                print(f"{name:14} ratio       {statistics.median(ratios):8.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(parser.parse_args().repeats, Path(folder)))
