"""Run small trainings with this version and with another commit, and compare the results bit by bit.

    python -m tests.trials.same_bits COMMIT [--only NAME ...]

Each training runs in one process for each version. There are Keras models on workers of ``ddlf.testing``, and trainings
without Keras, whose workers keep all the state that a round leaves behind (momentum, residuals, weights). The trial
compares the SHA-256 of the weights, of the optimizers' states and of the ledger. It also compares the rounds, slots,
versions, staleness and samples in the records. Asynchronous training of several slots does not use Keras, and has a fixed
order of updates. The exit code is 1 if anything differs. Both versions run the trainings of this version, so the trainings
only use functions that both versions have.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ddlf
from ddlf import testing

ROOT = Path(__file__).parents[2]
MADE_UP = ("tests.trials.made_up", "benchmarks.reliability.made_up")
"""Modules with fake runs in versions before ``FakeRun``."""
LIMIT_S = 900

Facts = dict[str, str]


class Interrupted(Exception):
    """Ends a run that is resumed later."""


class Blobs(ddlf.IApp):
    """A small network on points of 4 classes in 8 dimensions. Attributes choose its optimizer and its dropout."""

    verbose = False
    master_epochs = 4
    batch_size = 16
    optimizer = "sgd"
    dropout = 0.0

    async def load_dataset(self) -> None:
        """Generate 203 points. No number of slots in the trainings divides 203."""
        chance = np.random.default_rng(0)
        labels = chance.integers(0, 4, 203)
        centres = 2 * chance.normal(size=(4, 8))
        self.x_train = (centres[labels] + chance.normal(size=(203, 8))).astype("float32")
        self.y_train = np.eye(4, dtype="float32")[labels]

    async def create_model(self) -> None:
        """Make a network with 64 hidden units, because codecs encode no smaller kernels."""
        import keras
        from keras import layers

        hidden = [layers.BatchNormalization(), layers.Dropout(self.dropout)] if self.dropout else []
        self.model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(64, "tanh"), *hidden, layers.Dense(4, "softmax")], name="blobs"
        )
        optimizers = {
            "sgd": keras.optimizers.SGD(0.05),
            "momentum": keras.optimizers.SGD(0.05, momentum=0.9),
            "adam": keras.optimizers.Adam(0.01),
        }
        self.model.compile(optimizers[self.optimizer], "categorical_crossentropy", metrics=["accuracy"])


HARD = {"optimizer": "adam", "dropout": 0.3}
LOSSY = {"codec": "int8", "weights_codec": "delta:int8"}
KERAS: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, 3 slots": {"slots": 3},
    "sync, adam, dropout": HARD,
    "sync, momentum": {"optimizer": "momentum"},
    "sync, momentum, fresh": {"optimizer": "momentum", "optimizer_state": "fresh"},
    "sync, nesterov outside": {**HARD, "outer": "nesterov"},
    "sync, int8, resumed": {**HARD, **LOSSY, "resumed": 2},
    "async, 1 slot": {**HARD, "mode": "async", "slots": 1},
    "async, 1 slot, resumed": {**HARD, **LOSSY, "mode": "async", "slots": 1, "resumed": 2},
}
"""Trainings of the network above, on two workers."""
NUMPY: dict[str, dict[str, Any]] = {
    f"{mode}, {label}": {"mode": mode, "slots": slots, **settings}
    for mode in ("sync", "async")
    for label, slots, settings in (
        ("1 slot", 1, {}),
        ("2 slots", 2, {}),
        ("3 slots", 3, {}),
        ("2 epochs a round", 2, {"worker_epochs": 2}),
        ("fresh", 2, {"optimizer_state": "fresh"}),
        ("float16", 2, {"codec": "float16", "weights_codec": "bfloat16"}),
        ("delta", 2, {"weights_codec": "delta:float16"}),
        ("int8", 3, LOSSY),
        ("top-k", 2, {"codec": "topk:0.05"}),
        ("nesterov outside", 3, {"outer": "nesterov"}),
        ("reject", 3, {"update_policy": "reject"}),
        ("clip", 3, {"update_policy": "clip"}),
        ("int8, nesterov, resumed", 3, {**LOSSY, "outer": "nesterov", "resumed": 7}),
        ("top-k, resumed between checkpoints", 2, {"codec": "topk:0.05", "checkpoint_every": 4, "resumed": 7}),
    )
} | {
    f"sync, {merge}": {"mode": "sync", "slots": 5, "merge": merge} for merge in ("median", "trimmed:0.2", "trimmed:0.4")
}
"""Trainings without Keras, for 12 epochs."""


def digest(arrays: Iterable[Any]) -> str:
    """Return the SHA-256 of types, shapes and bits."""
    total = hashlib.sha256()
    for array in map(np.ascontiguousarray, arrays):
        total.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return total.hexdigest()


def facts(app: Any) -> Facts:
    """Return the result of a training."""
    names = ("round", "rounds", "slot", "version", "staleness", "epochs", "samples", "slots", "verdicts")
    records = [[getattr(record, name) for name in names] for record in app.history]
    return {
        "weights": digest(app.model.get_weights()),
        "optimizers": digest(array for state in app.optimizers for array in (state or ())),
        "ledger": digest([app.ledger.counts]),
        "records": hashlib.sha256(json.dumps(records).encode()).hexdigest(),
    }


def in_order(workers: Sequence[Any], order: Sequence[int]) -> None:
    """Let the updates of slots arrive in this order.

    An update waits for its turn. The next turn begins when each slot with remaining updates waits.
    """
    remaining, waiting = list(order), dict[int, asyncio.Event]()

    def next_one() -> None:
        if remaining and waiting.keys() == set(remaining):
            waiting[remaining[0]].set()

    async def arrive(slot: int) -> None:
        waiting[slot] = asyncio.Event()
        next_one()
        await waiting[slot].wait()
        del remaining[0], waiting[slot]
        next_one()

    for worker in workers:
        usual = worker.rpc

        async def rpc(request: Any, timeout_s: float | None = None, usual: Any = usual) -> Any:
            reply = await usual(request, timeout_s)
            if (
                isinstance(request.args[-1], dict) and "epochs" in request.args[-1]
            ):  # a task: the name of the request depends on the commit
                await arrive(request.args[-1]["slot"])
            return reply

        worker.rpc = rpc


async def trained(make: Any, *, resumed: int = 0) -> Facts:
    """Train an app. With ``resumed``, interrupt it after this number of updates, and resume it from its checkpoints."""
    if not resumed:
        app = make()
        await app.train_model()
        return facts(app)

    def interrupt(record: Any) -> None:
        if record.version == resumed:
            raise Interrupted

    with tempfile.TemporaryDirectory() as folder:
        first = make(checkpoint=folder)
        first.on_round = interrupt
        try:
            await first.train_model()
        except Interrupted:
            app = make(done=len(first.history), checkpoint=folder, resume="auto")
            await app.train_model()
            return facts(app)
    raise AssertionError("it was not interrupted")


async def with_keras(names: Iterable[str], workers: int) -> dict[str, Facts]:
    """Train the Keras network with the settings of these names."""
    from ddlf.testing import in_process_cluster

    results = {}
    async with in_process_cluster(workers) as cluster:
        for name in names:
            settings = {"slots": 2, **KERAS[name]}
            resumed = settings.pop("resumed", 0)

            def make(done: int = 0, settings: dict[str, Any] = settings, **more: Any) -> Blobs:
                app = Blobs(cluster)
                vars(app).update(settings, **more)
                return app

            results[name] = await trained(make, resumed=resumed)
    return results


async def without_keras(names: Iterable[str], workers: int) -> dict[str, Facts]:
    """Train without Keras with the settings of these names. Asynchronous training has a worker for each slot, and a fixed
    order of updates.
    """
    results = {}
    for name in names:
        settings = {"master_epochs": 12, **NUMPY[name]}
        resumed, slots = settings.pop("resumed", 0), settings["slots"]
        order = [slot for slot in range(slots) for _ in range(12 // settings.get("worker_epochs", 1))]
        random.Random(name).shuffle(order)

        def make(done: int = 0, settings: Any = settings, order: Any = order, **more: Any) -> Any:
            ordered = settings["mode"] == "async"
            return fake(settings["slots"] if ordered else workers, order[done:] if ordered else [], **settings, **more)

        results[f"made up: {name}"] = await trained(make, resumed=resumed)
    return results


def fake(workers: int, arrivals: Sequence[int], **settings: Any) -> Any:
    """Return a run without Keras, made by the classes of the measured version."""
    if hasattr(testing, "FakeRun"):
        order = [slot + 1 for slot in arrivals] or None
        return testing.FakeRun(testing.FakeCluster(workers), arrivals=order, **settings)
    for home in MADE_UP:
        with contextlib.suppress(ModuleNotFoundError):
            made_up = importlib.import_module(home)
    cluster = made_up.Cluster(workers)
    if arrivals:
        in_order(cluster.workers, arrivals)

    class Run(made_up.App):  # type: ignore[misc,name-defined]
        async def train_model(self) -> Any:
            with made_up.made_up():
                return await super().train_model()

    return Run(cluster, **settings)


def run(
    tree: Path, keras: Sequence[str] = (*KERAS,), numpy: Sequence[str] = (*NUMPY,), workers: Sequence[int] = (2,)
) -> list[dict[str, Facts]]:
    """Run trainings in a process with the code of a tree. Return their results by name for each number of workers."""
    paths = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONHASHSEED": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    request = json.dumps({"keras": keras, "numpy": numpy, "workers": workers})
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), "--child", request],
        **dict(capture_output=True, text=True, cwd=tree, env=environment, timeout=LIMIT_S),
    )
    if done.returncode:
        raise RuntimeError(f"the code of {tree} failed:\n{done.stderr[-4000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    assert Path(answer["code"]).is_relative_to(tree), "the other tree's code was used"
    return list(answer["found"])


def compared(own_results: dict[str, Facts], other_results: dict[str, Facts]) -> tuple[list[str], bool]:
    """Return a line for each training, and whether all results are equal."""
    lines = []
    for name, facts in own_results.items():
        different = [key for key in facts if facts[key] != other_results[name][key]]
        verdict = f"OTHER {', '.join(different)}" if different else "same"
        lines.append(f"{name:<50} {facts['weights'][:12]}  {verdict}")
    return lines, own_results == other_results


def main() -> int:
    """Train with the code of both versions, and print a table. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--only", nargs="+", default=["keras", "numpy"], choices=["keras", "numpy"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        request = json.loads(options.child)
        results_of_counts = []
        for workers in request["workers"]:
            results = asyncio.run(without_keras(request["numpy"], workers))
            if request["keras"]:
                results |= asyncio.run(with_keras(request["keras"], workers))
            results_of_counts.append(results)
        print(json.dumps({"found": results_of_counts, "code": ddlf.__file__}))
        return 0
    request = {"keras": (*KERAS,) * ("keras" in options.only), "numpy": (*NUMPY,) * ("numpy" in options.only)}
    with tempfile.TemporaryDirectory() as name:
        other = Path(name, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), options.commit], check=True)
        try:
            lines, same = compared(*run(ROOT, **request), *run(other, **request))
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    print(*lines, f"all {len(lines)} are the same" if same else "NOT ALL ARE THE SAME", sep="\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
