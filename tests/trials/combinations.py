"""Train random combinations of settings while workers are lost, leave and return, and compare the bits of the runs.

    python -m tests.trials.combinations [--count 1000] [--first 1] [--mode sync|async|downpour]

Each number from ``--first`` is the seed of one combination. Loops, rules, codecs, crew and checkpoints are real. Model and
workers are fake (``FakeRun``). A combination that DDLF refuses only counts as refused. Otherwise these statements must be
true, and the exit code is 1 if one is false:

- Synchronous training with another number of workers ends with the same bits of weights and optimizers.
- So does a run whose workers are lost before, while or after they compute, announce their end, and return.
- So does a run that is cancelled at random moments, each time disturbed, and resumed with other workers.
- The bits may differ only if the event ``ResidualDropped`` says which state was lost with a worker. A run whose weights are
  on workers may end because all copies of some weights were lost.
- Disturbed asynchronous and Downpour training ends, too.
- After each run, every sample was trained on once in each epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ddlf.cluster.link import Notice
from ddlf.errors import ClusterTooSmall, ConfigError, WorkerLost
from ddlf.events import Event, ResidualDropped
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from tests.trials.options import read_options

LIMIT_S = 60.0
"""Longest time of a run in seconds."""
CHANGED = 0.15
"""Share of the settings that a combination changes."""
CHANCE = np.random.default_rng(1)
START = {
    "dense/kernel": CHANCE.normal(size=(40, 30)).astype("f4"),
    "dense/bias": CHANCE.normal(size=7).astype("f4"),
    "scale": np.asarray(0.5, "f4"),
    "nothing": np.zeros((0, 3), "f4"),
    "wide/kernel": CHANCE.normal(size=(20, 30)).astype("f4"),
    "half": CHANCE.normal(size=5).astype("f2"),
    "norm/variance": CHANCE.random(7, "f4"),
    "norm/steps": np.asarray(41, "i8"),
    "mask": np.array([True, False, True]),
}
FROZEN = frozenset(["norm/variance", "norm/steps", "mask"])
CODECS = ["float16", "bfloat16", "int8", "int8-block:128", "int4-block:32", "topk:0.05", "topk:0.5", "powersgd:rank=3"]
OUTER = [
    "nesterov",
    "fedavgm:0.5,momentum=0.8",
    "fedadam",
    "fedadagrad",
    "fedyogi:0.1",
    "streaming:fragments=2,alpha=0.25",
    "streaming:3",
]
COMMON: dict[str, list[Any]] = {
    "worker_epochs": [2],
    "worker_steps": [1, 2, 3, 5, 30],
    "round_samples": [40, 64, 100],
    "optimizer_state": ["stays", "fresh", "averaged"],
    "local_rule": ["fedprox:0.5", "scaffold"],
    "codec": CODECS,
    "weights_codec": ["float16", "bfloat16", "delta:float32", *(f"delta:{codec}" for codec in CODECS)],
    "update_policy": ["reject", "clip"],
    "partition": ["dirichlet:0.5", "classes:2", "power:1"],
    "schedule": ["warmup:0.1,cosine", "linear", "restarts"],
    "compiled_with": ["Adam"],
    "files": [(31, 17, 40, 29, 28, 29, 29), (5, 100, 2), (64, 64)],
    "seed": [1, 2**32 - 1],
    "balance": ["speed"],
    "shuffle": ["global", "none", "window:2"],
    "learning_rate": [0.001],
}
SETTINGS: dict[str, dict[str, list[Any]]] = {
    "sync": {
        **COMMON,
        "exchange": ["sharded", "sharded", "auto"],
        "merge": ["median", "trimmed:0.34", "krum:bad=0", "krum:bad=0,keep=2", "krum", "geometric", "clipped"],
        "outer": OUTER,
        "batchnorm": ["local", "recalibrated"],
    },
    "async": {
        **COMMON,
        "outer": OUTER[:5],
        "arrival": [
            "fedasync",
            "fedbuff:2",
            "fedbuff:4",
            "dcasgd:0.5",
            "delayed",
            "elastic",
            "average",
            "weighted",
            "mimic",
            "copy",
        ],
        "staleness": ["constant", "polynomial", "hinge:2,1", "inverse"],
        "max_staleness": [0, 1, 3],
    },
    "downpour": {
        **{name: COMMON[name] for name in ("worker_steps", "partition", "files", "seed", "shuffle", "weights_codec")},
        "replicas": [2, 5],
        "n_fetch": [2, 3],
        "n_push": [2, 3],
        "push_rule": ["sgd:rate=0.01"],
        "staleness": ["constant"],
        "max_staleness": [0, 3],
        "shards": [1, 2, 4],
        "shard_cut": ["layers"],
        "shard_workers": [1],
        "copies": [0, 1],
    },
}
"""The unusual values of each setting, by mode."""
FAULTS = ("before", "while", "after", "leaves", "leaves at once", "peer")
"""Kinds of faults of a worker. A loss comes before, while or after the work of a request, or while another worker asks."""
LATE = 6
"""Mean number of requests before a fault."""


class Disturbed(FakeWorker):
    """A worker with faults.

    Attributes:
        faults: The kind of each fault, by the number of the request.
        requests: Number of requests up to now.
        happened: Counts the faults that have happened, by kind. The workers of a cluster share it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.faults: dict[int, str] = {}
        self.requests = 0
        self.happened: Counter[str] = Counter()

    def announce(self, within_s: float) -> None:
        """Announce the end of this worker. With 0 s, it ends at once."""
        self.notice = Notice("SIGTERM", asyncio.get_running_loop().time() + within_s)
        if self.on_leaving is not None:
            self.on_leaving()
        self.lost = self.lost or not within_s

    def lose(self) -> None:
        """Lose this worker with its request."""
        self.lost = True
        raise WorkerLost("it was lost", worker=self.name)

    async def rpc(self, request: Any, timeout_s: float | None = None) -> Any:
        """Execute a request of the master, with the fault of its number."""
        self.requests += 1
        fault = "" if self.lost else self.faults.pop(self.requests, "")
        self.happened.update([fault] if fault else [])
        if fault == "before":
            self.lose()
        elif fault in ("leaves", "leaves at once"):
            self.announce(LIMIT_S if fault == "leaves" else 0.0)
        working = asyncio.ensure_future(super().rpc(request, timeout_s))
        if fault == "while":
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.lost = True
        result = await working
        if fault == "after":
            self.lose()
        return result

    async def _ask(self, worker: int, role: str, verb: str, *arguments: Any) -> Any:
        callee: Any = self.others[worker]
        if callee is not self and callee.faults.get(callee.requests + 1) == "peer":
            del callee.faults[callee.requests + 1]
            self.happened["peer"] += 1
            callee.lost = True
        return await super()._ask(worker, role, verb, *arguments)


class Seen(FakeRun):
    """A run with all its events."""

    def __init__(self, cluster: FakeCluster, **settings: Any) -> None:
        super().__init__(cluster, **settings)
        self.received: list[Event] = []
        self.subscribe(self.received.append)

    @property
    def has_lost_state(self) -> bool:
        """Whether the run has said that a state was lost with its worker."""
        return any(isinstance(event, ResidualDropped) for event in self.received)


def cluster_of(count: int, chance: random.Random, faults: int = 0) -> FakeCluster:
    """Return a cluster in a random order, with a number of faults at random workers."""
    cluster, happened = FakeCluster(0), Counter[str]()
    workers = [Disturbed(number) for number in range(1, count + 1)]
    for worker in workers:
        vars(worker).update(others={peer.id: peer for peer in workers}, happened=happened)
    for _ in range(faults):
        chance.choice(workers).faults[1 + int(chance.expovariate(1 / LATE))] = chance.choice(FAULTS)
    chance.shuffle(workers)
    cluster.workers = [*workers]
    return cluster


def random_settings(mode: str, chance: random.Random) -> dict[str, Any]:
    """Return a random combination of settings."""
    settings = {name: chance.choice(values) for name, values in SETTINGS[mode].items() if chance.random() < CHANGED}
    settings |= {"mode": mode, "slots": chance.randint(1, 5), "master_epochs": chance.randint(1, 4)}
    settings["batch_size"] = chance.choice([7, 16, 32, 300])
    if "files" not in settings:
        settings["samples"] = chance.choice([41, 100, 203])
        settings.pop("shuffle", None)
        if "partition" in settings:
            settings["y_train"] = np.arange(settings["samples"]) % 7
    if "batchnorm" in settings:
        settings["norms"] = frozenset(["norm/variance", "dense/bias"])
    return settings


def bits(run: FakeRun) -> Any:
    """Return all results of a run, except workers and times."""
    records = [(r.round, r.slot, r.version, r.staleness, r.epochs, r.samples, r.metrics) for r in run.history]
    arrays = [*run.model.get_weights(), *(array for state in run.optimizers for array in state or ())]
    return [(a.dtype, a.shape, a.tobytes()) for a in [*arrays, run.ledger.counts]], str(records)


class Combination:
    """One random combination of settings, and its runs.

    Args:
        mode: The value of ``mode``.
        seed: Chooses the settings, the workers, the faults and the moments.
        folder: An empty folder for checkpoints.

    Attributes:
        settings: The settings.
        stage: The kind of run that trains now.
        counts: Numbers of faults and of runs, by kind.
    """

    def __init__(self, mode: str, seed: int, folder: Path) -> None:
        self._chance, self._folder = random.Random(seed), folder
        self.settings = random_settings(mode, self._chance)
        self.stage = "an undisturbed run"
        self.counts: Counter[str] = Counter()

    async def check(self) -> str:
        """Train all runs of this combination. Return the outcome, such as ``refused: reason``.

        Raises:
            AssertionError: A promise is broken.
        """
        chance, settings, same = self._chance, self.settings, self.settings["mode"] == "sync"
        plain = self._run(cluster_of(settings["slots"] + 2, chance))
        training = asyncio.ensure_future(self._trained(plain))
        turns = await turns_of(training)
        try:
            await training
        except ConfigError as error:
            return f"refused: {error.message}"
        if same:
            self.stage = "a run with another number of workers"
            assert bits(await self._trained(self._run(cluster_of(chance.randint(1, 6), chance)))) == bits(plain)
        self.stage = "a disturbed run"
        disturbed = self._run(self._faulty(1, 4), checkpoint=self._folder / "disturbed")
        try:
            await self._trained(disturbed)
            assert not same or disturbed.has_lost_state or bits(disturbed) == bits(plain), "other bits"
            if settings.get("balance") == "speed":  # then the bits of a resumed run depend on measured times
                return "good"
            resumed, has_lost_state = await self._resumed(turns)
            assert not same or has_lost_state or bits(resumed) == bits(plain), "other bits"
        except ClusterTooSmall as error:
            if "the weights" in error.message:  # all copies of some weights were on workers that are lost
                return "ended without weights"
            raise
        return "good"

    async def _resumed(self, turns: int) -> tuple[Seen, bool]:
        """Cancel a run twice at a random turn of the event loop, and let it end then. Return the last run, and whether a state
        was lost.
        """
        chance, has_lost_state = self._chance, False
        for _ in range(2):
            self.stage = "a cancelled run"
            run = self._run(self._faulty(0, 2), checkpoint=self._folder / "cancelled", resume="auto")
            training = asyncio.ensure_future(self._trained(run))
            for _ in range(chance.randrange(turns)):
                await asyncio.sleep(0)
            self.counts["runs cancelled"] += training.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await training
            has_lost_state = has_lost_state or run.has_lost_state
        self.stage = "a resumed run"
        workers = cluster_of(chance.randint(2, 6), chance)
        run = await self._trained(self._run(workers, checkpoint=self._folder / "cancelled", resume="auto"))
        return run, has_lost_state

    def _faulty(self, least: int, most: int) -> FakeCluster:
        return cluster_of(self._chance.randint(2, 5), self._chance, self._chance.randint(least, most))

    def _run(self, cluster: FakeCluster, **more: Any) -> Seen:
        usual = {"start": START, "frozen": FROZEN, "wait_for_workers_s": LIMIT_S}
        return Seen(cluster, **{**usual, **self.settings, **more})

    async def _trained(self, run: Seen) -> Seen:
        """Train a run, count its faults, and check its ledger."""
        try:
            async with asyncio.timeout(LIMIT_S):
                await run.train_model()
        finally:
            workers: Any = run.cluster.workers
            self.counts.update(workers[0].happened)
            self.counts["runs"] += 1
            self.counts["runs that lost a state"] += run.has_lost_state
        assert run.ledger.is_exact(run.master_epochs), "a sample was not trained on once an epoch"
        return run


async def turns_of(task: asyncio.Future[Any]) -> int:
    """Return the number of turns of the event loop until a task is done."""
    count = 0
    while not task.done():
        await asyncio.sleep(0)
        count += 1
    return count


@contextlib.contextmanager
def short_waits() -> Iterator[None]:
    """Let retries wait for milliseconds, and let checkpoints not wait for the disk."""
    with contextlib.ExitStack() as stack:
        for name in ("client.RETRY_S", "server.RETRY_S", "server.LONGEST_S", "master.LOOK_S"):
            stack.enter_context(mock.patch(f"ddlf.training.strategies.downpour.{name}", 0.005))
        stack.enter_context(mock.patch("ddlf.training.crew.recovery.RETRY_S", (0.02, 0.1)))
        stack.enter_context(mock.patch("os.fsync"))
        yield


def combinations(mode: str, seeds: Iterable[int]) -> tuple[Counter[str], list[str]]:
    """Try the combination of each seed. Return counts of outcomes, faults and runs, and the problems as text."""
    counts, problems = Counter[str](), []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder, short_waits():
            combination = Combination(mode, seed, Path(folder))
            try:
                outcome = asyncio.run(combination.check())
            except Exception:
                outcome = "bad"
                settings = {name: value for name, value in combination.settings.items() if name != "y_train"}
                problems.append(
                    f"{mode}, seed {seed}, {combination.stage}: {settings}\n{traceback.format_exc(limit=-4)}"
                )
                print(problems[-1], flush=True)
        counts.update(combination.counts)
        counts.update([outcome])
    return counts, problems


def main() -> int:
    """Run the trial and print its results. Return the exit code."""
    options = read_options(__doc__, count=1000, first=1, mode=("sync", "async", "downpour"))
    begin = time.monotonic()
    counts, problems = combinations(options.mode, range(options.first, options.first + options.count))
    for label, count in sorted(counts.items()):
        print(f"{count:>6} {label}")
    print(f"{options.count} combinations, {len(problems)} problems, {time.monotonic() - begin:.0f} s")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
