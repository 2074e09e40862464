"""Measure the costs of a plan: its time, the time of a second plan, and its remains on the workers. Linux.

    python -m benchmarks.plan_cost [--models mlp,cnn] [--budgets 10,30,60]

For each model and budget, two fresh local workers make a plan, a second plan, and then a training. Two other ones train
twice, since a process keeps some memory after its first training, 10 MB with TensorFlow. All files of both are below a
new folder: files of the user, of the workers, and temporary ones.

The bars are: no plan takes more than its budget and 5 s. A second plan takes at most 2 s. Both trainings give the same
weights to the bit. After a plan, no worker has over 5 % more memory. The only new file has the measurements.
Files that Python packages write in each training do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.mlp import MLP
from apps.mnist_cnn import MNISTCNN
from benchmarks.measure import some_of, table
from ddlf import Cluster
from ddlf.algorithms.weights import digest
from ddlf.extras.planner.planning import plan
from ddlf.extras.planner.trial import memory_now

WORKERS, SAMPLES, EPOCHS = 2, 12_000, 3
OVER_S, SECOND_S, MORE_MEMORY = 5.0, 2.0, 0.05
OWN_FILE = "state/ddlf/plans/*.json"
OF_FRAMEWORKS = ("__autograph_generated_file*.py*", "fontlist-*.json")
"""Files of TensorFlow and matplotlib that each training process writes, with or without a plan."""


def seeded(base: type) -> type:
    """Return the app with a part of its samples."""

    class Seeded(base):  # type: ignore[misc]
        verbose, seed, master_epochs = False, 1, EPOCHS

        async def load_dataset(self) -> None:
            await super().load_dataset()
            self.x_train, self.y_train = self.x_train[:SAMPLES], self.y_train[:SAMPLES]

    return Seeded


MODELS = {"mlp": seeded(MLP), "cnn": seeded(MNISTCNN)}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A training after plans, or after another training.

    Args:
        plans: Seconds of each plan.
        sha256: The digest of the weights.
        memory: Bytes of each worker after the last training.
        files: The new files.
    """

    plans: tuple[float, ...]
    sha256: str
    memory: tuple[int, ...]
    files: tuple[str, ...]


@contextlib.contextmanager
def own_folders() -> Iterator[Path]:
    """Put all files of this process and its children below a new folder."""
    with tempfile.TemporaryDirectory(prefix="ddlf-plan-") as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        names = {"XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config", "TMPDIR": "tmp"}
        (folder / "here").mkdir()
        before = {name: os.environ.get(name) for name in names}
        for name, part in names.items():
            (folder / part).mkdir()
            os.environ[name] = str(folder / part)
        stack.enter_context(contextlib.chdir(folder / "here"))
        tempfile.tempdir = None
        try:
            yield folder
        finally:
            tempfile.tempdir = None
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


async def measured(name: str, budgets: Sequence[float]) -> Cost:
    """Make plans with these budgets, then train. Only the first plan measures. Without plans, train twice."""
    with own_folders() as folder:
        async with Cluster.local(WORKERS) as cluster:
            before, times = files_in(folder), list[float]()
            for budget in budgets:
                app = MODELS[name](cluster)
                await app.connect()
                begin = time.perf_counter()
                await plan(app, budget, say=lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True))
                times.append(time.perf_counter() - begin)
            more = files_in(folder) - before
            for _ in range(1 if budgets else 2):
                app = MODELS[name](cluster)
                await app.train_model()
            pids = [(await worker.status()).executor_pid for worker in cluster.workers]
            return Cost(
                plans=tuple(times),
                sha256=digest(app.model.get_weights()),
                memory=tuple(memory_now(pid) for pid in pids),
                files=tuple(sorted(more)),
            )


def files_in(folder: Path) -> set[str]:
    """Return all files below a folder, except those of the frameworks."""
    files = (path for path in folder.rglob("*") if path.is_file() and not any(map(path.match, OF_FRAMEWORKS)))
    return {str(path.relative_to(folder)) for path in files}


def more_memory(planned: Cost, alone: Cost) -> float:
    """Return by which share a worker has more memory than without a plan, at most."""
    pairs = zip(planned.memory, alone.memory, strict=True)
    return max(with_plan / without_plan - 1.0 for with_plan, without_plan in pairs)


def leaves_nothing(planned: Cost, alone: Cost) -> bool:
    """Return whether plans kept the weights, left no memory in use, and left only the file of measurements."""
    matches = [Path(name).match(OWN_FILE) for name in planned.files]
    return planned.sha256 == alone.sha256 and more_memory(planned, alone) <= MORE_MEMORY and matches == [True]


def main(argv: Sequence[str] | None = None) -> bool:
    """Run the command. Return whether all bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=some_of(MODELS), default=list(MODELS))
    parser.add_argument(
        "--budgets", type=lambda text: [float(budget) for budget in text.split(",")], default=[10.0, 30.0, 60.0]
    )
    options = parser.parse_args(argv)
    rows: list[list[Any]] = [["model", "budget (s)", "plan (s)", "second plan (s)", "same weights", "memory", "files"]]
    right = True
    for name in options.models:
        alone = asyncio.run(measured(name, []))
        for budget in options.budgets:
            planned = asyncio.run(measured(name, [budget, budget]))
            first, second = planned.plans
            right &= leaves_nothing(planned, alone) and first <= budget + OVER_S and second <= SECOND_S
            rows.append(
                [
                    *(name, f"{budget:g}", f"{first:.1f}", f"{second:.2f}", planned.sha256 == alone.sha256),
                    *(f"{more_memory(planned, alone):+.1%}", len(planned.files)),
                ]
            )
            print(rows[-1], planned, alone, file=sys.stderr, flush=True)
    print(table([[str(cell) for cell in row] for row in rows]))
    print(f"\n{'all bars are met' if right else 'a bar is missed'}")
    return right


if __name__ == "__main__":
    main()
