"""Kill workers with private data in each phase of their work, and their master, in a run that goes on without them.

    python -m tests.trials.private_phases [--kills 20] [--masters 4] [--seed 0]

Three ``ddlf-worker`` processes have their own samples. A worker is loading, building, training, or between two rounds:
it answers, waits and evaluates. ``kill -9`` ends its executor ``--kills`` times in each of these phases, at a random
moment, and the master ``--masters`` times, which continues from its checkpoint. One worker dies while it loads for the
first time. Then no round waits long for a lost worker. The update of a worker is its number in each weight, so the
trial computes the weights after each round by hand, from those workers that the record does not name as missing.

The exit code is 1 if a worker has trained on samples of another one, if a round has other weights than the mean by
present samples, if ledger and records differ in who was missing, or if a worker does not come back by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ddlf
from benchmarks.measure import table
from tests.patience import PATIENCE_S
from tests.trials.options import read_options
from tests.trials.private import digest, samples
from tests.trials.workers import Workers

PHASES = ("loading", "building", "training", "between")
PHASE_S = 0.2
"""Each phase of a worker takes this much longer, so that kills hit it."""
WAIT_S = 0.3
"""Seconds that a round waits for a lost worker. Only the first master waits long, so that no worker misses its begin."""
WORKERS = 3
LOOK_S = 0.01


class Phases(ddlf.IApp):
    """Workers say in which phase they are. The update of a worker is its number in each weight."""

    private, verbose, threads, advice = True, False, 1, "off"
    batch_size, master_epochs, evaluate_every, takeover, resume = 16, 1_000_000, 1, True, "auto"

    def __init__(self, cluster: Any, folder: str, wait_s: float) -> None:
        super().__init__(cluster)
        self.folder, self.wait_for_workers_s, self.checkpoint = folder, wait_s, f"{folder}/checkpoints"

    def note(self, who: str, *facts: Any) -> None:
        """Append a line to the log of a worker or of the master."""
        with open(Path(self.folder) / who, "a") as file:
            file.write(f"{json.dumps(facts)}\n")

    def begin(self, phase: str, *facts: Any) -> None:
        """Say that this worker is in a phase now, and stay in it for some time."""
        self.note(f"worker-{self.worker.id}", phase, os.getpid(), *facts)
        if phase != "between":  # the master pauses between rounds
            time.sleep(PHASE_S)

    async def load_dataset(self) -> None:
        """Make up the samples of this worker."""
        self.begin("loading")
        self.x_train, self.y_train = samples(self.worker.id)
        self.x_test, self.y_test = self.x_train[:20], self.y_train[:20]

    async def create_model(self) -> None:
        """Make a network, on a worker or on the master."""
        import keras

        if getattr(self, "worker", None) is not None:
            self.begin("building")
        self.model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(5)])
        self.model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def train(self, weights: Any, worker_epochs: int, batch_size: int) -> Any:
        """Return the number of this worker for each weight."""
        self.begin("training", digest(self.x_train[self.indices]))
        self.begin("between")
        return [np.full_like(one, self.worker.id) for one in weights]

    async def on_round(self, record: Any) -> None:
        """Log the record and the weights, and end if the trial asks for it while all workers are there."""
        self.note("master", record.round, record.without, record.workers, self.model.get_weights()[1].tolist())
        await asyncio.sleep(PHASE_S)
        if (Path(self.folder) / "stop").exists() and not record.without:
            self.stop_training()


async def master(facts: dict[str, Any]) -> None:
    """Train, or go on, and write the ledger and the records at the end."""
    hosts = ["127.0.0.1"] * len(facts["ports"])
    async with ddlf.Cluster(
        hosts, facts["ports"], token_file=facts["token_file"], takeover=True, connect_timeout_s=30
    ) as cluster:
        app = Phases(cluster, facts["folder"], facts["wait_s"])
        await app.train_model()
        shares = [[one.samples, one.trained, one.epochs, list(one.left_out)] for one in app.ledger.shares]
        app.note("end", shares, [(record.round, record.without, record.workers) for record in app.history])


class Watch:
    """What the workers and the master have logged in a folder, and kills."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.kills: Counter[str] = Counter()
        self.is_running: Callable[[], bool] = lambda: True

    def lines(self, who: str) -> list[Any]:
        """Return the facts that a worker or the master has logged."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.folder / who).read_text().splitlines()]
        return []

    def until(self, fits: Callable[[], bool], what: str) -> None:
        """Wait until something is logged."""
        end = time.monotonic() + 10 * PATIENCE_S
        while not fits():
            assert self.is_running(), "the master has ended"
            assert time.monotonic() < end, f"{what} did not happen"
            time.sleep(LOOK_S)

    def await_phase(self, number: int, phase: str, after: int) -> None:
        """Wait until a worker begins a phase after this number of its lines."""
        name = f"worker-{number}"
        self.until(lambda: any(one[0] == phase for one in self.lines(name)[after:]), f"{phase} of worker {number}")

    def kill(self, number: int, phase: str) -> None:
        """Kill a worker at a random moment of the next phase of this kind."""
        name = f"worker-{number}"
        self.await_phase(number, phase, len(self.lines(name)))
        time.sleep(self.chance.uniform(0, PHASE_S))
        last = self.lines(name)[-1]
        with contextlib.suppress(ProcessLookupError):
            os.kill(last[1], signal.SIGKILL)
            self.kills[last[0]] += 1

    def trained(self, number: int) -> None:
        """Wait until the update of a worker is in a round again."""
        rounds = len(self.lines("master"))
        self.until(
            lambda: any(number in workers for _, _, workers, _ in self.lines("master")[rounds:]),
            f"a round with worker {number}",
        )


def tried(kills: int, masters: int, seed: int) -> dict[str, Any]:
    """Kill workers and masters of a run, and return what the logs show."""
    chance, begin = random.Random(seed), time.monotonic()
    with Workers() as started:
        watch = Watch(started.folder / "trial", chance)
        watch.folder.mkdir()
        ports = [started.start()[1] for _ in range(WORKERS)]
        facts = {"ports": ports, "token_file": str(started.token_file), "folder": str(watch.folder)}

        def begun(wait_s: float) -> subprocess.Popen[bytes]:
            words = [
                sys.executable,
                "-m",
                "tests.trials.private_phases",
                "--master",
                json.dumps({**facts, "wait_s": wait_s}),
            ]
            return subprocess.Popen(words)

        process = begun(PATIENCE_S)
        watch.is_running = lambda: process.poll() is None
        try:
            watch.kill(2, "loading")
            watch.until(lambda: bool(watch.lines("master")), "the first round")
            done = 0
            while done <= masters:
                while min(watch.kills[phase] for phase in PHASES) < kills * (done + 1) // (masters + 1):
                    number = chance.randrange(WORKERS) + 1
                    first = "training" if watch.kills["training"] <= watch.kills["between"] else "between"
                    watch.kill(number, first)
                    later = "loading" if watch.kills["loading"] <= watch.kills["building"] else "building"
                    watch.kill(number, later)
                    watch.trained(number)
                if done < masters:
                    time.sleep(chance.uniform(0, 4 * PHASE_S))
                    process.kill()
                    process.wait()
                    process = begun(WAIT_S)
                    number = chance.randrange(WORKERS) + 1
                    watch.kill(number, "loading")
                    watch.trained(number)
                done += 1
            (watch.folder / "stop").touch()
            assert process.wait(10 * PATIENCE_S) == 0, started.log.read_text()[-2000:]
        finally:
            process.kill()
            process.wait()
        found = found_in(watch)
    return {
        **{f"killed {phase}": watch.kills[phase] for phase in PHASES},
        "masters": masters,
        **found,
        "seconds": round(time.monotonic() - begin, 1),
    }


def found_in(watch: Watch) -> dict[str, Any]:
    """Compare weights, ledger and records with the logs of the workers."""
    sizes = {number: len(samples(number)[0]) for number in range(1, WORKERS + 1)}
    trained = {number: [one[2] for one in watch.lines(f"worker-{number}") if one[0] == "training"] for number in sizes}
    others = sum(one != digest(samples(number)[0]) for number, log in trained.items() for one in log)
    seen = {number: rest for number, *rest in watch.lines("master")}  # a resumed master repeats some
    shares, records = watch.lines("end")[-1]
    wrong, before, means = 0, np.zeros(5), 0.0
    for number, without, workers in records:
        missing = {slot for slot, _, _ in without}
        present = [one for one in sizes if one not in missing]
        means += sum(sizes[one] * one for one in present) / sum(sizes[one] for one in present)
        named = all(worker in (slot, 0) and count == sizes[slot] for slot, worker, count in without)
        wrong += not (named and workers == present)
        if number in seen:  # a master can die between a checkpoint and its log
            wrong += seen[number][:2] != [without, workers] or not np.allclose(
                before - seen[number][2], means, atol=1e-3
            )
            before, means = np.asarray(seen[number][2]), 0.0
    left_out = {
        number: [one - 1 for one, without, _ in records if any(number == slot for slot, *_ in without)]
        for number in sizes
    }
    ledger = [
        [size, size * (len(records) - len(left_out[number])), len(records) - len(left_out[number]), left_out[number]]
        for number, size in sizes.items()
    ]
    return {
        "rounds": len(records),
        "without somebody": sum(bool(without) for _, without, _ in records),
        "other samples": others,
        "wrong rounds": wrong,
        "not logged": len(records) - len(seen),
        "ledger": shares == ledger,
        "enough trained": all(len(trained[number]) >= len(records) - len(left_out[number]) for number in sizes),
    }


def is_right(result: dict[str, Any]) -> bool:
    """Return whether a trial has met all its bars."""
    is_wrong = result["other samples"] or result["wrong rounds"] or result["not logged"] > result["masters"]
    return bool(not is_wrong and result["ledger"] and result["enough trained"])


def main() -> None:
    """Run the trial."""
    options = read_options(__doc__ or "", kills=20, masters=4, seed=0)
    result = tried(**vars(options))
    print(table([list(result), [str(value) for value in result.values()]]))
    sys.exit(not is_right(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--master"]:
        asyncio.run(master(json.loads(sys.argv[2])))
    else:
        main()
