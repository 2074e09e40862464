"""Kill and resume the master of a run at random moments, and compare the result with an undisturbed run bit by bit.

    python -m tests.trials.disturbed [--kills 20] [--seed 0] [--exchange sharded]

The run trains a CNN with dropout and Adam on scikit-learn's digits. With ``--exchange sharded`` its workers write the
checkpoints. The exit code is 1 if the SHA-256 of weights and optimizer states differs, if a sample was not trained on
exactly once in each epoch, or if a resumed run repeated more than one interval of checkpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import time

import numpy as np

from apps.digits_cnn import DigitsCNN
from ddlf import Cluster, IApp
from tests.trials.options import read_options
from tests.trials.workers import Workers


class App(DigitsCNN):
    """An app with each kind of state: Adam's moments, batch normalization, and the random numbers of dropout."""

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


def digest(app: IApp) -> str:
    """Return the SHA-256 of the weights and of the optimizers of all slots."""
    total = hashlib.sha256()
    for array in [*app.model.get_weights(), *(array for state in app.optimizers for array in state)]:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


async def lead(ports: list[int], token_file: str, folder: str, rounds: int, exchange: str) -> None:
    """Train or resume, in the master process that the trial kills."""
    async with Cluster(["127.0.0.1"] * len(ports), ports, token_file=token_file, connect_timeout_s=20) as cluster:
        app = App(cluster)
        app.checkpoint, app.resume, app.exchange = folder, "auto", exchange
        app.on_round = lambda record: print(f"round {record.round}", flush=True)  # type: ignore[method-assign]
        app.verbose = True
        await app.train_sync(master_epochs=rounds)
    print(f"digest {digest(app)} exact {app.ledger.is_exact(rounds)}", flush=True)


def resume(kills: int, seed: int, rounds: int, exchange: str) -> bool:
    """Kill masters at random moments. Each master resumes the run of the one before. Return whether the result is right."""
    chance = random.Random(seed)
    with Workers() as workers:
        folder = workers.folder
        ports = [workers.start("--quiet")[1] for _ in range(2)]

        def master(run: str) -> subprocess.Popen[str]:
            facts = {"ports": ports, "token_file": str(workers.token_file), "folder": str(folder / run)}
            run_facts = json.dumps({**facts, "rounds": rounds, "exchange": exchange})
            return subprocess.Popen(
                [sys.executable, "-m", "tests.trials.disturbed", "--lead", run_facts],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

        undisturbed = master("undisturbed")
        begin = time.monotonic()
        output, _ = undisturbed.communicate(timeout=300)
        took = time.monotonic() - begin
        expected = output.strip().splitlines()[-1]
        problems, loaded, reached, killed = [], 0, 0, 0
        while True:
            process = master("killed")
            timer = None
            if killed < kills:
                # Most kills come while rounds are trained, some before.
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
                if killed >= kills:
                    break
                # The run finished before its kill, so start another one.
                if output.strip().splitlines()[-1] != expected:
                    problems.append("a finished run has other bits")
                reached = 0
                shutil.rmtree(folder / "killed")
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
    """Read the command line and run the trial. Return the exit code."""
    options = read_options(__doc__, kills=20, rounds=30, seed=0, exchange=("star", "sharded"), lead=json.loads)
    if options.lead is not None:
        asyncio.run(lead(**options.lead))
        return 0
    return not resume(options.kills, options.seed, options.rounds, options.exchange)


if __name__ == "__main__":
    sys.exit(main())
