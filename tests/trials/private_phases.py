"""Kill workers with private data in each phase of their work, and their master, in a run that continues without them.

``ddlf-worker`` processes have their own samples. A worker is loading, building, training, or between two rounds. Between
two rounds it answers, waits and evaluates. ``kill -9`` ends executors ``--kills`` times in each of these phases, at a random
moment. It ends the master ``--masters`` times, which continues from its checkpoint. One worker dies while it loads for the
first time. Later, no round waits long for a lost worker.

Each value of a worker's update is the number of the worker, and a bit more in later rounds. So the trial can compute the
weights after each round from the logs of the workers that the record does not name as missing.

With ``--masked`` the workers add up their updates under masks. Then each step of a secure sum is a phase, too: the key
(``offer``), the masked numbers (``mask``), the signed list (``sign``), and the masks (``unmask``). A sum of three workers
needs all of them, so their rounds wait for a lost worker. Use ``--workers 4`` for rounds that do not wait. With ``--noise``,
the workers also clip their updates and add noise.

The exit code is 1 in these cases:

- A worker has trained on samples of another worker.
- The weights after a round differ from the mean that is weighted by the present samples.
- The ledger and the records name different missing workers, or an event is missing.
- The noise or an epsilon is too small.
- A killed worker does not return by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np

import ddlf
from benchmarks.measure import table
from ddlf import events
from ddlf.privacy.accountant import Noise, epsilon
from ddlf.training.exchanges.masked.replica import MaskedReplica
from ddlf.training.exchanges.masked.settings import Masked
from ddlf.worker.calls import concurrent
from tests.patience import PATIENCE_S
from tests.trials.masters import end_master, start_master
from tests.trials.options import read_options
from tests.trials.private import digest, samples
from tests.trials.workers import Workers

PHASES = ("loading", "building", "training", "between")
STEPS = ("offer", "mask", "sign", "unmask")
"""The phases of a secure sum."""
RESTARTS = ("loading", "building")
"""The phases of a returning worker."""
PHASE_S = 0.2
"""Additional seconds of each phase of a worker, so that kills hit the phase."""
WAIT_S = 0.3
"""Seconds that a round waits for a lost worker. Only the first master waits longer, so that all workers begin."""
MASKED_WAIT_S = 5.0
"""Seconds that a round with masks waits: without two of four workers after a restart of the master, no sum is possible."""
LOOK_S = 0.01
VALUES = 105
"""Number of weights of the model."""
CLIP, NOISE = 25.0, 1e-3
"""The clip and the noise multiplier. The norms of the updates of workers 1 and 2 are below the clip, all other ones are above
it. The noise is smaller than one update, so the weights show a lost update."""
ROUND_SHARE, ROUNDS = 0.1, 5
"""An update grows by this amount each round, and restarts after this number of rounds. So the weights show a stale update."""


class Phases(ddlf.IApp):
    """An app whose workers log their phases. Each value of a worker's update is about the number of the worker."""

    private, verbose, threads, advice = True, False, 1, "off"
    batch_size, master_epochs, evaluate_every, takeover, resume = 16, 1_000_000, 1, True, "auto"

    def __init__(self, cluster: Any, folder: str, wait_s: float, masked: bool, noise: bool) -> None:
        super().__init__(cluster)
        self.folder, self.wait_for_workers_s, self.checkpoint = folder, wait_s, f"{folder}/checkpoints"
        self.secure_aggregation = masked
        if noise:
            self.update_clip, self.noise_multiplier = CLIP, NOISE

    def note(self, name: str, *facts: Any) -> None:
        """Append a line to the log of a worker or of the master."""
        with open(Path(self.folder) / name, "a") as file:
            file.write(f"{json.dumps(facts)}\n")

    def begin(self, phase: str, *facts: Any) -> None:
        """Log that this worker begins a phase, and stay in the phase for some time."""
        self.note(f"worker-{self.worker.id}", phase, os.getpid(), *facts)
        if phase != "between":  # the master pauses between rounds
            time.sleep(PHASE_S)

    async def load_dataset(self) -> None:
        """Generate the samples of this worker."""
        self.begin("loading")
        self.x_train, self.y_train = samples(self.worker.id)
        self.x_test, self.y_test = self.x_train[:20], self.y_train[:20]

    async def load_test_dataset(self) -> None:
        """Generate test data on the master, if workers report no metrics."""
        if self.secure_aggregation or self.noise_multiplier:
            self.x_test, self.y_test = samples(0)

    async def create_model(self) -> None:
        """Make a network, on a worker or on the master."""
        import keras

        if getattr(self, "worker", None) is not None:
            self.begin("building")
        self.model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(5, kernel_initializer="zeros")])
        self.model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def train(self, weights: Any, worker_epochs: int, batch_size: int) -> Any:
        """Return an update: for each weight the number of this worker, and a bit more in later rounds."""
        value = self.worker.id + ROUND_SHARE * (self.replica.round % ROUNDS)
        self.begin("training", digest(self.x_train[self.indices]), self.replica.round, value)
        self.begin("between")
        return [np.full_like(array, value) for array in weights]

    def see(self, event: events.Event) -> None:
        """Log each slot that is missing in a round."""
        if isinstance(event, events.SlotMissed):
            self.note("missed", event.round, event.slot, event.why)

    async def on_round(self, record: Any) -> None:
        """Log the record and the weights. End when the trial asks for it and no worker is missing."""
        weights = np.concatenate([array.ravel() for array in self.model.get_weights()])
        self.note("master", record.round, record.without, record.workers, weights.tolist())
        await asyncio.sleep(PHASE_S)
        if (Path(self.folder) / "stop").exists() and not record.without:
            self.stop_training()


class SlowSteps(MaskedReplica):
    """A replica that logs and delays each step of a secure sum."""

    @concurrent
    async def offer(self, attempt: str, slot: int, number: int) -> Any:
        """Log and make the step."""
        return await self._slowly("offer", super().offer(attempt, slot, number))

    @concurrent
    async def mask(self, attempt: str, offers: Any, most: int) -> Any:
        """Log and make the step."""
        return await self._slowly("mask", super().mask(attempt, offers, most))

    @concurrent
    async def sign(self, attempt: str, survivors: Any) -> Any:
        """Log and make the step."""
        return await self._slowly("sign", super().sign(attempt, survivors))

    @concurrent
    async def unmask(self, attempt: str, signatures: Any) -> Any:
        """Log and make the step, in which this worker helps to unmask a sum."""
        return await self._slowly("unmask", super().unmask(attempt, signatures))

    async def _slowly(self, phase: str, step: Any) -> Any:
        name = f"worker-{self.app.worker.id}"
        self.app.note(name, phase, os.getpid())
        await asyncio.sleep(PHASE_S / 2)
        result = await step
        self.app.note(name, phase, os.getpid(), "made")
        await asyncio.sleep(PHASE_S / 2)
        return result


async def master(facts: dict[str, Any]) -> None:
    """Train or resume, and write the ledger and the records at the end."""
    Masked.role = "tests.trials.private_phases:SlowSteps"
    hosts = ["127.0.0.1"] * len(facts["ports"])
    async with ddlf.Cluster(
        hosts, facts["ports"], token_file=facts["token_file"], takeover=True, connect_timeout_s=30
    ) as cluster:
        app = Phases(cluster, *(facts[name] for name in ("folder", "wait_s", "masked", "noise")))
        app.subscribe(app.see)
        await app.train_model()
        shares = [[share.samples, share.trained, share.epochs, list(share.left_out)] for share in app.ledger.shares]
        records = [(record.round, record.without, record.workers, record.epsilons) for record in app.history]
        app.note("end", shares, records)


class Watch:
    """Reads the logs of the workers and of the master in a folder, and kills workers."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.kills: Counter[str] = Counter()
        self.is_running: Callable[[], bool] = lambda: True
        self._read: dict[str, tuple[int, list[Any]]] = {}

    def lines(self, name: str) -> list[Any]:
        """Return the logged facts of a worker or of the master. Skip a last line that is not complete yet."""
        read_bytes, facts = self._read.get(name, (0, []))
        with contextlib.suppress(FileNotFoundError), (self.folder / name).open("rb") as file:
            file.seek(read_bytes)
            complete, end, _ = file.read().rpartition(b"\n")
            facts += map(json.loads, complete.splitlines())
            self._read[name] = read_bytes + len(complete + end), facts
        return facts

    def until(self, fits: Callable[[], bool], label: str) -> None:
        """Wait until the logs fulfil a condition.

        Raises:
            AssertionError: The master has ended, or the condition was not true for a long time.
        """
        end = time.monotonic() + 10 * PATIENCE_S
        while not fits():
            assert self.is_running(), "the master has ended"
            assert time.monotonic() < end, f"{label} did not happen"
            time.sleep(LOOK_S)

    def await_phase(self, number: int, phase: str, after: int) -> None:
        """Wait until a worker begins a phase after this number of its lines."""
        name = f"worker-{number}"
        self.until(lambda: any(entry[0] == phase for entry in self.lines(name)[after:]), f"{phase} of worker {number}")

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
        """Wait for a new round with an update of a worker."""
        rounds = len(self.lines("master"))
        self.until(
            lambda: any(number in present(*entry[1:3]) for entry in self.lines("master")[rounds:]),
            f"a round with worker {number}",
        )


def present(without: Any, workers: Any) -> list[int]:
    """Return the workers whose updates are in a round. A void round has none."""
    missing = {slot for slot, *_ in without}
    return [worker for worker in workers if worker not in missing]


def phases(masked: bool) -> tuple[str, ...]:
    """Return the phases of a worker."""
    return (*PHASES, *STEPS) if masked else PHASES


def tried(
    kills: int, masters: int, seed: int, workers: int = 3, *, masked: bool = False, noise: bool = False
) -> dict[str, Any]:
    """Kill workers and masters of a run, and return what the logs show."""
    chance, begin = random.Random(seed), time.monotonic()
    every = phases(masked)
    working = [phase for phase in every if phase not in RESTARTS]
    wait_s = WAIT_S
    if masked:
        wait_s = MASKED_WAIT_S if workers > 3 else PATIENCE_S
    with Workers() as started:
        watch = Watch(started.folder / "trial", chance)
        watch.folder.mkdir()
        ports = [started.start()[1] for _ in range(workers)]
        facts = {"ports": ports, "token_file": str(started.token_file), "folder": str(watch.folder)}
        facts.update(masked=masked, noise=noise)

        def begun(wait_s: float) -> ForkServerProcess:
            return start_master(master, {**facts, "wait_s": wait_s}, started.folder / "output")

        process = begun(PATIENCE_S)
        watch.is_running = lambda: process.is_alive()
        try:
            watch.kill(2, "loading")
            watch.until(lambda: bool(watch.lines("master")), "the first round")
            done = 0
            while done <= masters:
                while min(watch.kills[phase] for phase in every) < kills * (done + 1) // (masters + 1):
                    number = chance.randrange(workers) + 1
                    watch.kill(number, min(working, key=watch.kills.__getitem__))
                    watch.kill(number, min(RESTARTS, key=watch.kills.__getitem__))
                    watch.trained(number)
                if done < masters:
                    time.sleep(chance.uniform(0, 4 * PHASE_S))
                    end_master(process)
                    process = begun(wait_s)
                    number = chance.randrange(workers) + 1
                    watch.kill(number, "loading")
                    watch.trained(number)
                done += 1
            (watch.folder / "stop").touch()
            process.join(10 * PATIENCE_S)
            assert process.exitcode == 0, started.log.read_text()[-2000:]
        finally:
            end_master(process)
        results = found_in(watch, workers, masked, noise)
    return {
        **{f"killed {phase}": watch.kills[phase] for phase in every},
        "masters": masters,
        **results,
        "seconds": round(time.monotonic() - begin, 1),
    }


def found_in(watch: Watch, workers: int, masked: bool, noise: bool) -> dict[str, Any]:
    """Compare weights, ledger, records and events with the logs of the workers."""
    sizes = {number: len(samples(number)[0]) for number in range(1, workers + 1)}
    logs = {number: watch.lines(f"worker-{number}") for number in sizes}
    trained = {number: [entry[2:] for entry in log if entry[0] == "training"] for number, log in logs.items()}
    mismatches = sum(sha != digest(samples(number)[0]) for number, log in trained.items() for sha, _, _ in log)
    values = {(number, round): value for number, log in trained.items() for _, round, value in log}
    logged = {number: facts for number, *facts in watch.lines("master")}  # a resumed master repeats some rounds
    missed_reasons = {(round, slot): reason for round, slot, reason in watch.lines("missed")}
    shares, records = watch.lines("end")[-1]
    wrong, unsaid, voids = list[str](), 0, 0
    before, merged, variance, noises = np.zeros(VALUES), 0.0, 0.0, []
    for number, without, replied, _ in records:
        present_workers = present(without, sizes)
        voids += masked and not present_workers
        named = all(worker in (slot, 0) and count == sizes[slot] for slot, worker, count in without)
        if not named or present(without, replied) != present_workers or (0 < len(present_workers) < 3 and masked):
            wrong.append(f"round {number} of workers {replied} is without {without}")
        unsaid += any((number, slot) not in missed_reasons for slot, *_ in without)
        unsaid += not present_workers and not any(
            "the round is void" in missed_reasons.get((number, slot), "") for slot in sizes
        )
        if noise:
            merged += sum(min(values[worker, number], CLIP / VALUES**0.5) for worker in present_workers) / workers
            variance += (
                (NOISE * CLIP / workers) ** 2 * (len(present_workers) / 3 if masked else 1.0) * bool(present_workers)
            )
        elif present_workers:
            merged += sum(sizes[worker] * values[worker, number] for worker in present_workers) / sum(
                sizes[worker] for worker in present_workers
            )
        if number in logged:  # a master can die between a checkpoint and its log
            more = before - logged[number][2] - merged
            if noise and variance:
                noises.append(more / variance**0.5)
                more = np.array(
                    [more.mean() - np.clip(more.mean(), *(6 * (variance / VALUES) ** 0.5 * np.array([-1, 1])))]
                )
            if logged[number][:2] != [without, replied]:
                wrong.append(f"round {number} was logged as {logged[number][:2]}, and has {[without, replied]}")
            if not np.allclose(more, 0, atol=1e-3):
                wrong.append(f"round {number} of workers {present_workers} differs from their mean by {more[0]:.4f}")
            before, merged, variance = np.asarray(logged[number][2]), 0.0, 0.0
    left_out = {
        number: [round - 1 for round, without, *_ in records if any(number == slot for slot, *_ in without)]
        for number in sizes
    }
    ledger = [
        [size, size * (len(records) - len(left_out[number])), len(records) - len(left_out[number]), left_out[number]]
        for number, size in sizes.items()
    ]
    return {
        "rounds": len(records),
        "without somebody": sum(bool(without) for _, without, *_ in records),
        "void": voids,
        "unsaid": unsaid,
        "other samples": mismatches,
        "wrong rounds": "; ".join(wrong),
        "not logged": len(records) - len(logged),
        "ledger": shares == ledger,
        "enough trained": all(len(trained[number]) >= len(records) - len(left_out[number]) for number in sizes),
        **({"noise": round(float(np.std(noises)), 3), "of values": np.size(noises)} if noise else {}),
        **({"epsilon too small": understated(logs, records, masked)} if noise else {}),
    }


def understated(logs: dict[int, Any], records: Any, masked: bool) -> int:
    """Return the number of records in which the epsilon of a worker is too small for its releases up to the record.

    The last record must count at least the releases in the log of the worker. Some of these releases are from rounds that
    were repeated after a kill of the master.
    """
    too_small, releases = 0, Counter[int]()
    for _, without, workers, epsilons in records:
        releases.update(present(without, workers))
        too_small += any(epsilons[f"{worker}"] < of_releases(count) for worker, count in releases.items())
    if masked:
        unmasked = {
            number: sum(entry[0] == "unmask" and entry[2:] == ["made"] for entry in log) for number, log in logs.items()
        }
        too_small += any(records[-1][3][f"{number}"] < of_releases(count) for number, count in unmasked.items())
    return too_small


def of_releases(count: int) -> float:
    """Return the epsilon for a number of releases."""
    return epsilon({Noise(multiplier=NOISE): count}, 1e-5)


def is_right(result: dict[str, Any]) -> bool:
    """Return whether a trial has kept all its promises."""
    is_wrong = result["other samples"] or result["wrong rounds"] or result["not logged"] > result["masters"]
    is_hidden = result["unsaid"] or result.get("epsilon too small")
    spread = 6 / (2 * result.get("of values", 1)) ** 0.5
    is_noisy = abs(result.get("noise", 1.0) - 1) < spread
    return bool(not is_wrong and not is_hidden and is_noisy and result["ledger"] and result["enough trained"])


def main() -> None:
    """Run the trial."""
    options = read_options(__doc__ or "", kills=20, masters=4, workers=3, masked=False, noise=False, seed=0)
    result = tried(**vars(options))
    print(table([list(result), [str(value) for value in result.values()]]))
    sys.exit(not is_right(result))


if __name__ == "__main__":
    main()
