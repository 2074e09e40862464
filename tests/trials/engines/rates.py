"""Compare the speed of a worker with limited CPUs with the speed of ``ddlf-worker --port`` under the same limit.

    python -m tests.trials.engines.rates [CASE...] [--repeats 5] [--rounds 40] [--backend tensorflow|torch]

A CASE is a name in ``CASES``: a CPU quota, an affinity, the CPUs of a task of Slurm, the CPUs of an actor of Ray, or the
threads of a Dask worker with its nanny. The app is a dense network that uses all allowed threads, and does not set their
number. In each repeat, both workers run one after another, in random order. The trial prints the cores and the threads of the
worker. It also prints the median, the smallest and the largest ratio of the times of a round. The exit code is 1 if a worker
has a wrong number of cores or threads. For Ray and Dask, use a Python that has their packages.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trials.engines.command import CommandRig
from tests.trials.engines.cost import spread, train
from tests.trials.engines.here import HostsRig
from tests.trials.engines.rig import Rig, Run, load

APP = '''
import dataclasses
import json
import os
import time

import numpy as np

import ddlf


class Dense(ddlf.IApp):
    """A dense network. Each worker writes its cores and threads to a file in the app's folder."""

    batch_size, master_epochs, seed, slots = 256, 1_000_000, 3, 1
    folder = ""

    async def load_dataset(self):
        numbers = np.random.default_rng(0)
        self.x_train = numbers.normal(size=(2048, 784)).astype("float32")
        self.y_train = numbers.integers(0, 10, 2048)

    async def create_model(self):
        import keras
        from keras import layers

        self.model = keras.Sequential([keras.Input((784,)), *(layers.Dense(1024, "relu") for _ in range(2)), layers.Dense(10)])
        self.model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def train(self, weights, worker_epochs, batch_size):
        from ddlf.worker.machine import cores

        if os.environ["KERAS_BACKEND"] == "torch":
            import torch

            threads = torch.get_num_threads()
        else:
            threads = int(os.environ["TF_NUM_INTRAOP_THREADS"])
        with open(os.path.join(self.folder, "had.json"), "w") as file:
            json.dump({"cores": cores(), "threads": threads}, file)
        return super().train(weights, worker_epochs, batch_size)

    async def train_model(self, *, fresh=False):
        with open("events.jsonl", "a", buffering=1) as file:

            def note(event, **facts):
                file.write(json.dumps({"at": time.time(), "event": event, **facts}, default=str) + "\\n")

            self.subscribe(lambda event: note(type(event).__name__, **dataclasses.asdict(event)))
            history = await super().train_model(fresh=fresh)
            note("Result")
        return history
'''
QUOTA_US, PERIOD_US = 150_000, 100_000


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of limit.

    Args:
        engine: Name of the rig.
        cores: The number of cores that the worker must have.
        limit: Words before the command of ``ddlf-worker``, which set the limit.
        keys: More keys of the launcher.
        before: Words before ``ddlf run``, if the engine starts it.
    """

    engine: str
    cores: int
    limit: tuple[str, ...] = ()
    keys: str = ""
    before: tuple[str, ...] = ()


ONE = ("taskset", "-c", "0")
CASES = {
    "quota of 1.5": Case("command", 1, ("sh", "-c", 'echo $$ > "$QUOTA/cgroup.procs"; exec "$@"', "sh")),
    "affinity": Case("command", 1, ONE),
    "slurm, 1 of 2": Case("slurm-tasks", 1, ONE, before=("srun", "-n", "1", "-c", "1")),
    "slurm, 2 of 2": Case("slurm-tasks", 2, before=("srun", "-n", "1", "-c", "2")),
    "ray, num_cpus=1": Case("ray", 1, ONE, keys="cores=1"),
    "ray, default": Case("ray", 1, ONE),
    "dask, nanny": Case("dask", 1, ONE),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the cases. Return the number of cases with wrong cores or threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--backend", default="tensorflow")
    options = parser.parse_args(argv)
    os.environ["KERAS_BACKEND"] = options.backend
    quota = Path("/sys/fs/cgroup/cpu") / f"ddlf-{uuid.uuid4().hex[:8]}"
    quota.mkdir()
    os.environ["QUOTA"] = str(quota)
    (quota / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (quota / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
    try:
        return sum(not measure(name, CASES[name], options.repeats, options.rounds) for name in options.cases or CASES)
    finally:
        quota.rmdir()


def measure(name: str, case: Case, repeats: int, rounds: int) -> bool:
    """Measure one case, and return whether cores and threads are right."""
    ratios, had = list[float](), list[Any]()
    with tempfile.TemporaryDirectory(prefix="ddlf-rates-") as folder:
        top = Path(folder)
        top.chmod(0o755)
        for kind in ("hosts", "engine"):
            (top / kind).mkdir()
        hosts = LimitedHosts(top / "hosts", case.limit)
        engine = (
            LimitedCommand(top / "engine", case.limit)
            if case.engine == "command"
            else load(case.engine, top / "engine")
        )
        rigs: list[Rig] = [hosts, engine]
        for rig in rigs:
            rig.places, rig.app = 1, APP
        if case.keys or case.before:
            change(engine, case)
        with hosts, engine:
            for repeat in range(repeats):
                seconds = {}
                random.Random(repeat).shuffle(rigs)
                for rig in rigs:
                    run = top / f"run-{repeat}-{rig.name}"
                    seconds[rig] = train(rig, run, rounds, ["-p", f"folder={run}", "--no-dashboard", "--out", "none"])[
                        1
                    ]
                    had.append(json.loads((run / "had.json").read_text()))
                ratios.append(seconds[engine] / seconds[hosts])
    is_right = all(entry["cores"] == entry["threads"] == case.cores for entry in had)
    facts = had[0] if is_right else had
    print(f"{name:<16} {'right' if is_right else 'WRONG'}: {facts}; a round {spread(ratios)} of --hosts", flush=True)
    return is_right


class LimitedHosts(HostsRig):
    """A rig with a listening worker under a limit."""

    def __init__(self, folder: Path, limit: Sequence[str]) -> None:
        super().__init__(folder)
        self._limit = limit

    def worker(self, *options: str) -> None:
        self._engine.start(*self._limit, sys.executable, "-m", "ddlf.cli.worker", *options)


class LimitedCommand(CommandRig):
    """A rig with a worker that a command starts, under a limit."""

    def __init__(self, folder: Path, limit: Sequence[str]) -> None:
        super().__init__(folder)
        limited = folder / "limited"
        words = " ".join(f"'{word}'" for word in limit)
        limited.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        limited.chmod(0o755)
        self._limited = limited

    def launcher(self, run: Run) -> list[str]:
        return ["--workers", str(self.places), "--launcher", f"command:{self._limited} {{worker}}"]


def change(engine: Rig, case: Case) -> None:
    """Give the launcher of a rig more keys, or start its command in another way."""
    launcher, command = engine.launcher, engine.command

    def with_keys(run: Run) -> list[str]:
        *options, last = launcher(run)
        return [*options, f"{last}{',' if ':' in last else ':'}{case.keys}"] if case.keys else [*options, last]

    def with_words(run: Run, options: Sequence[str]) -> list[str]:
        words = command(run, options)
        return [*case.before, *words[words.index(sys.executable) :]] if case.before else words

    engine.launcher, engine.command = with_keys, with_words  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
