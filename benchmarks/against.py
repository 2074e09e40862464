"""Compare the speed of this version with another commit, in turns.

    python -m benchmarks.against COMMIT [--only rpc|training|sharded|downpour] [--repeats 12]

Each repeat starts one process with the code of each version. A process starts workers and measures small calls (one at
a time, and 100 in flight), arrays of 2.06 and 100 MB that go to a worker and back, and the training of the MNIST CNN on
two workers: rounds through the master, rounds between the workers (``exchange="sharded"``), and epochs of Downpour. A
ratio is this version's time divided by the other's. The output is the median of the ratios within each repeat, with
quartiles. Both versions run the measuring code of this version, so it only uses functions that both have.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRAINING_SAMPLES = 12_000
TRAINING_ROUNDS = 5
REPEATS = 3
COMPUTED = ", computed"
"""Suffix for the processor time of master and workers together. It is more reliable than seconds on a busy machine."""


def echo(value: Any) -> Any:
    """Runs on the worker."""
    return value


async def rpc(share: float = 1.0) -> dict[str, float]:
    """Return the seconds of a call, and the processor seconds of all processes.

    Args:
        share: Share of the usual number of calls.
    """
    import numpy as np

    from benchmarks.network import computed_s
    from ddlf import Cluster

    seconds: dict[str, float] = {}
    async with Cluster.local(1) as cluster:
        await cluster.add_method(echo)
        worker = cluster.workers[0]

        async def measure(name: str, value: Any, usual_calls: int, in_flight: int = 1) -> None:
            """Call three times. Return the shortest time, because disturbances only add time, and the total processor time."""
            calls = max(1, round(share * usual_calls / in_flight)) * in_flight
            measured, before = [], computed_s([os.getpid()])
            for _ in range(REPEATS):
                begin = time.perf_counter()
                for _ in range(calls // in_flight):
                    await asyncio.gather(*(worker.run("echo", value=value) for _ in range(in_flight)))
                measured.append((time.perf_counter() - begin) / calls)
            seconds[name] = min(measured)
            seconds[f"{name}{COMPUTED}"] = (computed_s([os.getpid()]) - before) / (REPEATS * calls)

        small = bytes(64)
        await measure("64 B, one at a time", small, 500)  # a call compiles, caches, allocates
        await measure("64 B, one at a time", small, 2000)
        await measure("64 B, 100 in flight", small, 10_000, 100)
        await measure("2.06 MB", np.ones(515_000, "f4"), 200)
        await measure("100 MB", np.ones(25_000_000, "f4"), 4)
    return seconds


async def training(measured: str = "round of training", **how: Any) -> dict[str, float]:
    """Seconds of a round, compiled before; or of an epoch of a slot, without rounds.

    Args:
        measured: Name of the measured time.
        how: Settings of the app.
    """
    from apps.mnist_cnn import MNISTCNN
    from benchmarks.network import computed_s
    from ddlf import Cluster

    class App(MNISTCNN):
        verbose = False

        async def load_dataset(self) -> None:
            await super().load_dataset()
            self.x_train, self.y_train = self.x_train[:TRAINING_SAMPLES], self.y_train[:TRAINING_SAMPLES]

    ended: list[tuple[float, float]] = []

    async with Cluster.local(2) as cluster:
        app = App(cluster)
        app.on_round = lambda record: ended.append((time.perf_counter(), computed_s([os.getpid()])))
        for name, value in {"master_epochs": TRAINING_ROUNDS + 1, **how}.items():
            setattr(app, name, value)
        await app.train_model()
    first = len(ended) // (TRAINING_ROUNDS + 1) - 1  # the last record of the first epoch
    begin, end = ended[first], ended[-1]
    seconds, computed = ((after - before) / (len(ended) - first - 1) for before, after in zip(begin, end, strict=True))
    return {measured: seconds, f"{measured}{COMPUTED}": computed}


PARTS = {
    "rpc": rpc,
    "training": training,
    "sharded": partial(training, "round of training, sharded", exchange="sharded"),
    "downpour": partial(training, "epoch of a slot, Downpour", mode="downpour"),
}


def run(tree: Path, part: str, share: float = 1.0) -> dict[str, float]:
    """One part, in a process with the code of a tree. ``rpc`` makes this share of its usual number of calls."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, str(Path(__file__)), "--child", part, "--share", str(share)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=tree, env=environment, timeout=600, check=True
    )
    facts = json.loads(done.stdout.splitlines()[-1])
    assert Path(facts.pop("code")).is_relative_to(tree), "the other tree's code was measured"
    return dict(facts)


def main() -> None:
    """Measure in turns and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        import ddlf

        sys.path.insert(0, str(ROOT))  # for what measures; ``ddlf`` is known by now
        part = partial(rpc, options.share) if options.child == "rpc" else PARTS[options.child]
        print(json.dumps({**asyncio.run(part()), "code": ddlf.__file__}))
        return
    with tempfile.TemporaryDirectory() as name:
        other = Path(name, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), options.commit], check=True)
        try:
            for part in [options.only] if options.only else PARTS:
                pairs = []
                for repeat in range(options.repeats):
                    trees = (ROOT, other) if repeat % 2 else (other, ROOT)
                    seconds_of = {tree: run(tree, part) for tree in trees}
                    pairs.append((seconds_of[ROOT], seconds_of[other]))
                for measurement in pairs[0][0]:
                    ratios = [ours[measurement] / base[measurement] for ours, base in pairs]
                    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
                    best = min(ours[measurement] for ours, _ in pairs) / min(base[measurement] for _, base in pairs)
                    seconds = statistics.median(ours[measurement] for ours, _ in pairs)
                    print(
                        f"{measurement:<30} {1e3 * seconds:10.3f} ms  {middle:.3f} of {options.commit} "
                        f"({low:.3f}-{high:.3f}); the best of each {best:.3f}",
                        flush=True,
                    )
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)


if __name__ == "__main__":
    main()
