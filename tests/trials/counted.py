"""Kill workers with servers of Downpour, and the master, and check that each push counts once at each server.

    python -m tests.trials.counted [--kills 50] [--masters 5] [--workers 8] [--parameters 1.25e7] [--seed 0]

The workers are processes. ``kill -9`` ends executors of ``ddlf-worker``, one after another, each as soon as all servers
have backups again. Between these kills it ends the master. The master restarts and continues from the last checkpoint.
Each worker writes and reads the slice of the checkpoint for its server.

Replicas compute nothing (``benchmarks.stand_in_killed``): each push adds its own number to all values, and small
integers have the same sum in any order. So the final weights show whether a push is missing or was applied twice. In both
cases the exit code is 1. It is also 1 if a server has counted another number of pushes, or if the ledger is not exact.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shard_copies import PLAIN, kill
from benchmarks.stand_in_killed import KilledRun, KilledStandIn, size_of_push
from ddlf.training.slot.task import Task
from tests.trials.masters import end_master, start_master
from tests.trials.options import read_options
from tests.trials.workers import Workers

STEPS = 20
"""Number of steps of a replica in a round. Each round ends with a commit and a checkpoint."""
LOOK_S = 0.02
PAUSE_S = 0.5
"""Pause after a kill in seconds, in which the other processes notice it."""


class SlowStandIn(KilledStandIn):
    """A replica with a pause in each step, so that kills can happen during a round."""

    async def _replicas(self, task: Task) -> list[Any]:
        replicas = await super()._replicas(task)
        for replica in replicas:
            replica.take = _after(self._facts["pause_s"], replica.take)
        return replicas


def _after(seconds: float, function: Any) -> Any:
    async def called(*arguments: Any) -> Any:
        await asyncio.sleep(seconds)
        return await function(*arguments)

    return called


class SlowRun(KilledRun):
    """A run with slow replicas."""

    @property
    def stand_in(self) -> tuple[Any, Any]:
        """See ``StandInRun``."""
        return SlowStandIn, self._worker_facts


async def master(facts: dict[str, Any]) -> None:
    """Train or resume, kill some executors meanwhile, and print the result as JSON."""
    from ddlf import Cluster

    log = Path(facts["log"])

    def note(label: str) -> None:
        with log.open("a") as file:
            file.write(f"{label}\n")

    class Noted(list[int]):
        def append(self, worker: int) -> None:
            note("kill")
            super().append(worker)

    hosts = ["127.0.0.1"] * len(facts["ports"])
    async with Cluster(
        hosts, facts["ports"], token_file=facts["token_file"], takeover=True, connect_timeout_s=30
    ) as cluster:
        settings = {"checkpoint": facts["folder"], "resume": "auto", "master_epochs": facts["rounds"], **PLAIN}
        run = SlowRun(cluster, int(facts["parameters"]), steps=STEPS, **settings)
        run._worker_facts["pause_s"] = facts["pause_s"]
        run.takeover = True
        run.on_round = lambda record: note("commit")  # type: ignore[method-assign]
        how_often = argparse.Namespace(kills=facts["kills"], pause=PAUSE_S)
        training = asyncio.ensure_future(run.train_model())
        killing = asyncio.ensure_future(kill(run, random.Random(facts["seed"]), how_often, Noted()))
        try:
            await asyncio.wait({training, killing}, return_when=asyncio.FIRST_COMPLETED)
            if killing.done():
                killing.result()
            await training
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
    pushes = facts["rounds"] * STEPS * len(hosts)
    expected = sum(
        size_of_push(slot, number, push)
        for slot in range(len(hosts))
        for number in range(facts["rounds"])
        for push in range(STEPS)
    )
    weights = np.concatenate(run.model.get_weights())
    received = run.run_context.progress.state["shards"][0][:, 1]  # type: ignore[union-attr]
    print(
        json.dumps(
            {
                "pushes": pushes,
                "missing": int(np.abs(weights + expected).max()),
                "counted": sorted(set(received.tolist())),
                "ledger": run.ledger.is_exact(facts["rounds"]),
                "commits": len(run.history),
            }
        )
    )


def trial(kills: int, masters: int, workers: int, parameters: float, seed: int, pause_s: float) -> dict[str, Any]:
    """Kill executors of workers, and the master between these kills. Return the numbers of kills and the result."""
    chance, begin = random.Random(seed), time.monotonic()
    share = -(-kills // (masters + 1))  # kills of executors during each life of the master
    with Workers() as started:
        ports = [started.start()[1] for _ in range(workers)]
        log = started.folder / "noted"
        log.touch()
        facts: dict[str, Any] = {
            "ports": ports,
            "token_file": str(started.token_file),
            "log": str(log),
            "folder": str(started.folder / "checkpoints"),
            "parameters": parameters,
            "pause_s": pause_s,
            "rounds": max(4, round((kills + 2 * masters) * SECONDS_OF_A_KILL / pause_s / STEPS)),
        }
        killed = 0
        while True:
            lines = log.read_text().splitlines()
            kills_left = min(share, kills - lines.count("kill"))
            more = {"kills": kills_left, "seed": chance.randrange(2**32)}
            process = start_master(master, {**facts, **more}, started.folder / "output")
            if killed == masters:
                break
            commits = lines.count("commit") + chance.randrange(1, 2 * workers)
            kills_due = lines.count("kill") + kills_left
            while process.is_alive():
                now = log.read_text().splitlines()
                if now.count("kill") >= kills_due and now.count("commit") >= commits:
                    break
                time.sleep(LOOK_S)
            time.sleep(chance.random() * pause_s * STEPS)
            if not process.is_alive():
                break
            end_master(process)
            killed += 1
        process.join()
        assert process.exitcode == 0, f"the run failed:\n{started.log.read_text()[-2000:]}"
        done = log.read_text().splitlines().count("kill")
        counts = json.loads((started.folder / "output").read_text().splitlines()[-1])
    return {"kills": done, "masters": killed, **counts, "seconds": round(time.monotonic() - begin, 1)}


SECONDS_OF_A_KILL = 4.0
"""Approximate time from a kill until all servers have backups again. It decides the number of rounds."""


def is_well(result: dict[str, Any]) -> bool:
    """Return whether each push has counted once at each server."""
    return bool(result["missing"] == 0 and result["counted"] == [result["pushes"]] and result["ledger"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial, print its result, and return the exit code."""
    options = read_options(__doc__, argv, kills=50, masters=5, workers=8, parameters=1.25e7, pause=0.5, seed=0)
    result = trial(options.kills, options.masters, options.workers, options.parameters, options.seed, options.pause)
    print(json.dumps(result, indent=1))
    return 0 if is_well(result) else 1


if __name__ == "__main__":
    sys.exit(main())
