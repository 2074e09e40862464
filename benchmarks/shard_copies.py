"""Measure the use and the cost of backups of Downpour's servers. Workers are real, their pushes are made up. Linux.

    python -m benchmarks.shard_copies kills [--kills 50] [--workers 8] [--parameters 1e8]
    python -m benchmarks.shard_copies cost [--rate 200mbit] [--parameters 1.25e7] [--rules sgd,adagrad] [--copies 0,1]

During a training, ``kills`` ends executors with ``kill -9``, one after another. Each has a server, and is killed as
soon as all servers have backups again. The output has the time from the detection of a loss to the first push that the
backup applied. At the end, the benchmark compares the weights with the pushes of all replicas. Each push adds its own
number to all values, and small integers have the same sum in any order. The exit code is 1 if the sums differ.

``cost`` measures a cycle, in which each replica fetches and pushes once, with and without backups. The links are
limited (``benchmarks.network``; root).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.distbelief import PORT, rate_of, started, workers_of
from benchmarks.measure import some_of, table
from benchmarks.network import Network
from ddlf.errors import DDLFError
from ddlf.rpc.tokens import new_token
from ddlf.training.roles import REPLICA

PLAIN = {"push_rule": "sgd:rate=1", "staleness": "constant"}


async def kills(options: argparse.Namespace) -> dict[str, Any]:
    """Train while workers are killed, and return the result."""
    from benchmarks.stand_in_killed import KilledRun, size_of_push
    from ddlf import Cluster
    from ddlf.training.strategies.downpour.placement import Placement

    noticed: dict[tuple[int, int], float] = {}  # of each worker that was lost when the master knew of it
    lost = Placement.lost

    async def record_loss(holding: Placement, owner: tuple[int, int], error: Exception | None) -> None:
        if owner in holding.owners:
            noticed.setdefault(owner, time.monotonic())
        await lost(holding, owner, error)

    chance, done = random.Random(options.seed), list[int]()
    Placement.lost = record_loss  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            async with Cluster.local(options.workers) as cluster:
                rounds = max(2, -(-options.kills * options.cycles // options.steps))
                run = KilledRun(
                    cluster, int(options.parameters), steps=options.steps, log=str(log), master_epochs=rounds, **PLAIN
                )
                training = asyncio.ensure_future(run.train_model())
                killing = asyncio.ensure_future(kill(run, chance, options, done))
                try:
                    await asyncio.wait({training, killing}, return_when=asyncio.FIRST_COMPLETED)
                    await training
                finally:
                    killing.cancel()
                    await asyncio.gather(killing, return_exceptions=True)
            applied = lines_of(log)
    finally:
        Placement.lost = lost  # type: ignore[method-assign]
    took = []
    times = [*noticed.values(), float("inf")]
    for when, until in pairwise(times):
        took += [at - when for _, _, at in applied if when <= at < until]
    expected = sum(
        size_of_push(slot, number, push)
        for slot in range(options.workers)
        for number in range(rounds)
        for push in range(options.steps)
    )
    weights = np.concatenate(run.model.get_weights())
    received = run.run_context.progress.state["shards"][0][:, 1]  # type: ignore[union-attr]
    pushes = rounds * options.steps * options.workers
    exact = bool((weights == -expected).all()) and bool((received == pushes).all()) and run.ledger.is_exact(rounds)
    return {"kills": len(done), "taken over": len(took), "seconds": took, "pushes": pushes, "exact": exact}


def lines_of(log: Path) -> list[list[Any]]:
    """Return the lines that workers have written."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


async def kill(run: Any, chance: random.Random, options: argparse.Namespace, done: list[int]) -> None:
    """Kill one executor after another, each time when all workers are present and each server has a backup."""
    while len(done) < options.kills:
        await asyncio.sleep(0.1)
        if not run.run_context.name:
            continue
        try:
            asking = (
                member.call((run.run_context.name, REPLICA), "copied", timeout_s=5) for member in run.cluster.workers
            )
            placements = await asyncio.gather(*asking)
        except DDLFError:  # one is on its way
            continue
        owned = [shard for _, shards, _ in placements for shard in shards]
        if len({arranged for arranged, *_ in placements}) > 1 or not owned or not all(safe for *_, safe in placements):
            continue
        if len(owned) < len(run.cluster.workers):  # one is on its way from worker to worker
            continue
        worker = chance.choice(
            [member for member, (_, shards, _) in zip(run.cluster.workers, placements, strict=True) if shards]
        )
        pid = (await worker.status()).executor_pid
        os.kill(pid, signal.SIGKILL)
        done.append(worker.id)
        await asyncio.sleep(options.pause)


# -- what it costs --------------------------------------------------------------------------------------------------------


async def cycles(facts: dict[str, Any]) -> None:
    """Run the master of a measured training, and print the seconds of a cycle."""
    from benchmarks.stand_in_killed import KilledRun
    from ddlf import Cluster

    began = []
    async with Cluster(facts["hosts"], PORT, insecure_plaintext=True, connect_timeout_s=60) as cluster:
        how = {"push_rule": facts["rule"], "copies": facts["copies"], "warm_start": 0}
        run = KilledRun(cluster, facts["parameters"], steps=facts["steps"], master_epochs=2, **how)

        def on_round(record: Any) -> None:
            began.append((record.round, record.slot, time.perf_counter(), record.seconds))

        run.on_round = on_round  # type: ignore[method-assign]
        await run.train_model()
    # the first round begins with connections, and the shards on their way
    print(statistics.median(seconds for number, _, _, seconds in began if number == 2) / facts["steps"], flush=True)


def cost(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of a cycle of each way, interleaved."""
    seconds_of: dict[str, list[float]] = {}
    token = new_token()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without taking the machines away
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(options.workers + 1, options.rate) as network,
        workers_of(network, token, tls=False, folder=Path(folder)),
    ):
        for _, rule, copies in product(range(options.repeats), options.rules, options.copies):
            facts = {"hosts": network.addresses[1:], "parameters": int(options.parameters), "rule": rule}
            facts |= {"copies": int(copies), "steps": options.steps}
            command = (sys.executable, "-m", "benchmarks.shard_copies", "--master", json.dumps(facts))
            with started([network.on(0, *command)], more={"DDLF_TOKEN": token}) as (child,):
                line = child.stdout.readline()
            if not line:
                raise RuntimeError("a training ended before it was over")
            seconds_of.setdefault(f"{rule}, copies={copies}", []).append(float(line))
            print(rule, copies, line.strip(), file=sys.stderr, flush=True)
    return seconds_of


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", type=json.loads, help=argparse.SUPPRESS)
    studies = parser.add_subparsers(dest="study")
    kills_parser = studies.add_parser("kills")
    kills_parser.add_argument("--kills", type=int, default=50)
    kills_parser.add_argument("--workers", type=int, default=8)
    kills_parser.add_argument("--parameters", type=float, default=1e8, help="of the model (default: %(default)g)")
    kills_parser.add_argument("--steps", type=int, default=3, help="of a replica in a round")
    kills_parser.add_argument("--cycles", type=int, default=6, help="pushes of each replica for each kill")
    kills_parser.add_argument("--pause", type=float, default=0.5, help="seconds at least from one to the next")
    kills_parser.add_argument("--seed", type=int, default=1)
    two = studies.add_parser("cost")
    two.add_argument("--workers", type=int, default=8)
    two.add_argument("--rate", default="200mbit", help="of each link, in each direction")
    two.add_argument("--parameters", type=float, default=1.25e7, help="of the model (default: %(default)g)")
    two.add_argument("--rules", type=some_of(("sgd", "adagrad", "adam")), default=["sgd", "adagrad"])
    two.add_argument("--copies", type=some_of(("0", "1", "2")), default=["0", "1"])
    two.add_argument("--steps", type=int, default=12, help="of a replica in a round")
    two.add_argument("--repeats", type=int, default=2)
    return parser


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, and return the measurements."""
    options = parser().parse_args(argv)
    if options.master is not None:
        asyncio.run(cycles(options.master))
        return {}
    if options.study == "cost":
        result = cost(options)
        least = 2 * (options.workers - 1) / options.workers * 4 * options.parameters / rate_of(options.rate)
        rows = [["", "cycle", "bound"]]
        rows += [[name, f"{statistics.median(seconds):.2f} s", f"{least:.2f} s"] for name, seconds in result.items()]
        print(table(rows))
        return dict(result)
    result = asyncio.run(kills(options))
    took = np.array(result["seconds"] or [np.nan])
    within = float(np.mean(took <= 2)) if result["seconds"] else 0.0
    sentence = f"{result['kills']} kills, {result['taken over']} shards taken over, {result['pushes']} pushes of {options.parameters:g} values; "
    sentence += f"the first push was applied after {np.median(took):.2f} s, at most {took.max():.2f} s, {within:.0%} within 2 s; "
    print(sentence + ("each push counts once" if result["exact"] else "PUSHES ARE MISSING OR DOUBLED"))
    return result


if __name__ == "__main__":
    sys.exit(0 if main().get("exact", True) else 1)
