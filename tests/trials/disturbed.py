"""Training that is harmed all the time, against the undisturbed run, bit by bit.

    python -m tests.trials.disturbed kills [--kills 50] [--seed 0]      executors are killed at random moments of one synchronous job
    python -m tests.trials.disturbed resume [--kills 20] [--seed 0]     the master is killed at random moments, and resumed;
                                            [--exchange sharded]        with checkpoints that its workers write

Both train a CNN with dropout and Adam on scikit-learn's digits and compare the SHA-256 of weights and optimizer states; the exit code is 1 if they
differ, if a sample was not trained on exactly once an epoch, or if a resumed run did again more than one interval of checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from apps.digits_cnn import DigitsCNN
from ddlf import Cluster
from ddlf.events import Event, SlotStarted, WorkerLost
from tests.trials.workers import Workers

KILLS_ROUNDS = 45
RESUME_ROUNDS = 30


class App(DigitsCNN):
    """Everything that has a state: Adam, and dropout's random numbers."""

    worker_epochs = 1
    verbose = False

    async def create_model(self) -> None:
        """Make the CNN with dropout and Adam."""
        import keras
        from keras import layers

        self.model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(8, 3, activation="relu"),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dropout(0.3),
                layers.Dense(10, activation="softmax"),
            ],
            name="digits_small",
        )
        self.model.compile(keras.optimizers.Adam(0.001), "categorical_crossentropy", metrics=["accuracy"])


def digest(app: App) -> str:
    """SHA-256 of the weights and of all slots' optimizers."""
    total = hashlib.sha256()
    for array in [*app.model.get_weights(), *(array for state in app.optimizers for array in state)]:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


async def kills(wanted: int, seed: int, rounds: int) -> bool:
    """Kill executors while one job trains."""
    chance = random.Random(seed)
    killed: list[float] = []
    async with Cluster.local(2) as cluster:
        plain = App(cluster)
        await plain.train_sync(master_epochs=rounds)
        app = App(cluster)
        lost: list[WorkerLost] = []

        async def kill(worker: int, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            if len(killed) < wanted:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(cluster.workers[worker - 1].facts["pid"], signal.SIGKILL)
                    killed.append(time.monotonic())

        per_round: Counter[int] = Counter()
        pending: set[asyncio.Task[None]] = set()

        def follow(event: Event) -> None:
            if isinstance(event, WorkerLost):
                lost.append(event)
            # Not three in a round: a slot that ends three executors is given up, as the fault of the slot itself.
            elif isinstance(event, SlotStarted) and per_round[event.round] < 2 and chance.random() < wanted / rounds:
                per_round[event.round] += 1
                task = asyncio.get_running_loop().create_task(kill(event.worker, chance.uniform(0, 0.1)))
                pending.add(task)
                task.add_done_callback(pending.discard)

        app.subscribe(follow)
        begin = time.monotonic()
        await app.train_sync(master_epochs=rounds)
        took = time.monotonic() - begin
    exact = app.ledger.is_exact(rounds)
    same = digest(app) == digest(plain)
    print(f"{len(killed)} executors killed in {rounds} rounds, {len(lost)} slots computed again, {took:.0f} s")
    print(f"weights and optimizers {'are the same bits' if same else 'DIFFER'}: {digest(app)[:16]}")
    print(f"every sample trained on exactly once an epoch: {exact}")
    return same and exact and len(killed) >= min(wanted, rounds)


async def lead(ports: list[int], token_file: Path, folder: Path, rounds: int, exchange: str) -> None:
    """Be the master that is killed: train, or go on."""
    async with Cluster(["127.0.0.1"] * len(ports), ports, token_file=token_file, connect_timeout_s=20) as cluster:
        app = App(cluster)
        app.checkpoint, app.resume, app.exchange = folder, "auto", exchange
        app.on_round = lambda record: print(f"round {record.round}", flush=True)  # type: ignore[method-assign]
        app.verbose = True
        await app.train_sync(master_epochs=rounds)
    print(f"digest {digest(app)} exact {app.ledger.is_exact(rounds)}", flush=True)


def resume(wanted: int, seed: int, rounds: int, exchange: str) -> bool:
    """Kill masters at random moments, each of which goes on from where the one before was."""
    chance = random.Random(seed)
    with Workers() as workers:
        folder = workers.folder
        ports = [workers.start("--quiet")[1] for _ in range(2)]

        def master(run: str) -> subprocess.Popen[str]:
            arguments = [",".join(map(str, ports)), workers.token_file, folder / run, rounds, exchange]
            return subprocess.Popen(
                [sys.executable, "-m", "tests.trials.disturbed", "lead", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

        whole = master("undisturbed")
        begin = time.monotonic()
        output, _ = whole.communicate(timeout=300)
        took = time.monotonic() - begin
        expected = output.strip().splitlines()[-1]
        problems, loaded, reached, killed = [], 0, 0, 0
        while True:
            process = master("killed")
            timer = None
            if killed < wanted:
                # Most of the time in the part in which rounds are trained, sometimes before.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(chance.uniform(0.5, 0.5 + took))
                timer = process.poll()
                if timer is None:
                    process.kill()
                    killed += 1
            output, _ = process.communicate(timeout=300)
            resumed = re.search(r"resumed   after round (\d+)", output)
            if resumed is not None and int(resumed[1]) < reached - 1:
                problems.append(f"round {reached} was reached, but the next master resumed after round {resumed[1]}")
            reached = max([reached, *map(int, re.findall(r"^round (\d+)$", output, re.MULTILINE))])
            loaded += "loaded on" in output
            if "digest" in output:
                if killed >= wanted:
                    break
                # It finished before its time to die: begin the next run of the same kind.
                if output.strip().splitlines()[-1] != expected:
                    problems.append("a finished run has other bits")
                reached = 0
                for path in (folder / "killed").iterdir():
                    subprocess.run(["rm", "-rf", str(path)], check=True)
    last = output.strip().splitlines()[-1]
    if last != expected:
        problems.append(f"the resumed run has other bits: {last} instead of {expected}")
    if not last.endswith("exact True"):
        problems.append("the ledger is not exact")
    if loaded:
        problems.append(f"{loaded} masters made the workers load data again")
    print(f"master killed {killed} times in runs of {rounds} rounds; undisturbed one took {took:.0f} s")
    print("\n".join(problems) or f"the same bits, every sample once an epoch, nothing loaded again: {expected[7:23]}")
    return not problems


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, count, rounds in (("kills", 50, KILLS_ROUNDS), ("resume", 20, RESUME_ROUNDS)):
        command = commands.add_parser(name)
        command.add_argument("--kills", type=int, default=count)
        command.add_argument("--rounds", type=int, default=rounds)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--exchange", choices=("star", "sharded"), default="star", help="of the masters' runs")
    leader = commands.add_parser("lead")
    leader.add_argument("ports")
    leader.add_argument("token", type=Path)
    leader.add_argument("folder", type=Path)
    leader.add_argument("rounds", type=int)
    leader.add_argument("exchange")
    options = parser.parse_args()
    if options.command == "lead":
        ports = [int(port) for port in options.ports.split(",")]
        asyncio.run(lead(ports, options.token, options.folder, options.rounds, options.exchange))
        return 0
    if options.command == "kills":
        return not asyncio.run(kills(options.kills, options.seed, options.rounds))
    return not resume(options.kills, options.seed, options.rounds, options.exchange)


if __name__ == "__main__":
    sys.exit(main())
