"""Kill and resume the master of a run at random moments, and compare the result with an undisturbed run bit by bit.

    python -m tests.trials.disturbed [--kills 20] [--seed 0] [--exchange sharded]

The run trains a CNN with dropout and Adam on scikit-learn's digits. With ``--exchange sharded`` its workers write the
checkpoints. The exit code is 1 if the SHA-256 of weights and optimizer states differs, if a sample was not trained on
exactly once in each epoch, or if a resumed run repeated more than one interval of checkpoints.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np

from apps.digits_cnn import DigitsCNN
from ddlf import Cluster, IApp
from tests.trials.masters import end_master, start_master
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


async def lead(facts: dict[str, Any]) -> None:
    """Train or resume, in the master process that the trial kills."""
    ports, rounds = facts["ports"], facts["rounds"]
    hosts = ["127.0.0.1"] * len(ports)
    async with Cluster(hosts, ports, token_file=facts["token_file"], connect_timeout_s=20) as cluster:
        app = App(cluster)
        app.checkpoint, app.resume, app.exchange = facts["folder"], "auto", facts["exchange"]
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
        outputs: dict[ForkServerProcess, Path] = {}

        def master(run: str) -> ForkServerProcess:
            facts = {"ports": ports, "token_file": str(workers.token_file), "folder": str(folder / run)}
            output = folder / f"output-{len(outputs)}"
            process = start_master(lead, {**facts, "rounds": rounds, "exchange": exchange}, output)
            outputs[process] = output
            return process

        def ended(process: ForkServerProcess) -> str:
            process.join(300)
            assert process.exitcode is not None, "a master has not ended"
            return outputs[process].read_text()

        undisturbed = master("undisturbed")
        begin = time.monotonic()
        expected = ended(undisturbed).strip().splitlines()[-1]
        took = time.monotonic() - begin
        problems, loaded, reached, killed = [], 0, 0, 0
        while True:
            process = master("killed")
            if killed < kills:
                # Most kills come while rounds are trained, some before.
                process.join(chance.uniform(0, took))
                if process.is_alive():
                    end_master(process)
                    killed += 1
            output = ended(process)
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
    options = read_options(__doc__, kills=20, rounds=30, seed=0, exchange=("star", "sharded"))
    return not resume(options.kills, options.seed, options.rounds, options.exchange)


if __name__ == "__main__":
    sys.exit(main())
