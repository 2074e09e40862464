"""A cluster as one peer: the accuracy beside a cluster that has all data, and the cost of ``--peer``.

``python -m benchmarks.cluster_peer accuracy [--kind python] [--data mnist] [--seeds 3] [--epochs 3] [--updates 10]``
``python -m benchmarks.cluster_peer cost [--rounds 200] [--repeats 5] [--updates 20]``

Accuracy: two workers have two thirds of the samples and are one peer, and another peer has the rest. They work in rounds,
so both train the same share of their samples between two posts. Three workers that have all data train equally many
samples in batches of the same size. The bar is one point, as the mean of the seeds. ``tests.trials.chromium_peers`` has the
same with a peer in Chromium.

Cost: the same run with and without ``--peer``, in turns. The time is that of the rounds, without the start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ddlf
from ddlf.data import datasets

TEXT = """
digits:input shape=[{width}];
digits:output shape=[10];
digits:layers Dense(units={hidden}, activation=relu), Dense(units=10, activation=softmax);
digits:loss SCE;
train:optimizer SGD(learning_rate=0.1);
train:metrics accuracy;
"""
BATCH = 32


class Measured(ddlf.IApp):
    """Trains the model text on a file of samples; each worker trains one batch in a round."""

    notation = "model.nnm"
    verbose = False
    worker_steps, batch_size = 1, BATCH
    file = "all.npz"

    async def load_dataset(self) -> None:
        """Read the file."""
        with np.load(self.file) as data:
            for name in ("x_train", "y_train", "x_test", "y_test"):
                setattr(self, name, data[name])


class Server:
    """``ddlf peers serve`` in a separate process.

    Args:
        folder: The folder with the model text.
        words: More options.
        peers: Number of links.
    """

    def __init__(self, folder: Path, *words: object, peers: int) -> None:
        self.folder = folder
        self._process = _ddlf(
            folder, "peers", "serve", "model.nnm", "--invite", peers, "--port", 0, "--validate-s", 0, *words
        )
        self.links = [self._until(r"link +(\S+)") for _ in range(peers)]
        self.port = re.search(r":(\d+)/", self.links[0])[1]  # type: ignore[index]

    def _until(self, pattern: str) -> str:
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if match := re.search(pattern, line):
                return match[1]
        raise RuntimeError(f"the server has ended: {''.join(lines)}")

    def stop(self) -> Path:
        """End the training, and return the file of the last model."""
        _ddlf(self.folder, "peers", "stop", "--port", self.port).communicate()
        path = Path(self._until(r"saved +(\S+)"))
        self._process.communicate()
        return path


def _ddlf(folder: Path, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ddlf.cli.main", *map(str, words)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"DDLF_RUN_DIR": str(folder / "runs"), "DDLF_STATE_DIR": str(folder / "state")},
    )


def python_peer(folder: Path, link: str, file: str, batches: int) -> subprocess.Popen[str]:
    """Start a Python peer that leaves after this number of batches."""
    words = ("peers", "join", link, "--data", file, "--most-updates", batches)
    process = _ddlf(folder, *words)
    assert process.stdout is not None
    return process


PEERS: dict[str, Callable[[Path, str, str, int], subprocess.Popen[str]]] = {"python": python_peer}
"""The kinds of the other peer. Each starts a process that ends after this number of batches."""


def write(folder: Path, name: str, seed: int, most: int, updates: int = 1) -> int:
    """Write the data sets and the model text, and return the number of samples of the other peer."""
    (x, y), (x_test, y_test) = datasets.with_classes(name)
    order = np.random.default_rng(seed).permutation(len(x))[: most or None]
    # With such a size, the last posts have as many updates as others.
    third = len(order) // (3 * BATCH * updates) * BATCH * updates
    x, x_test = x.reshape(len(x), -1), x_test.reshape(len(x_test), -1)
    parts = {"all": order[: 3 * third], "two": order[: 2 * third], "one": order[2 * third : 3 * third]}
    for part, rows in parts.items():
        np.savez(folder / f"{part}.npz", x_train=x[rows], y_train=y[rows], x_test=x_test, y_test=y_test)
    (folder / "model.nnm").write_text(TEXT.format(width=x.shape[1], hidden=64))
    return third


@contextlib.contextmanager
def in_folder() -> Iterator[Path]:
    """Work in a new folder."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        os.environ["DDLF_STATE_DIR"] = f"{name}/state"
        yield Path(name)


async def trained(cluster: ddlf.Cluster, **settings: Any) -> Measured:
    """Train, and return the app."""
    app = Measured(cluster)
    vars(app).update(settings)
    await app.train_model()
    return app


async def with_peer(folder: Path, kind: str, seed: int, samples: int, epochs: int, updates: int) -> float:
    """Return the accuracy of two workers and another peer."""
    ways = ("--way", "rounds", "--merge", "mean", "--quorum", 2, "--deadline-s", 600, "--seed", seed)
    server = Server(folder, *ways, "--updates", updates, "--batch-size", BATCH, peers=2)
    other = PEERS[kind](folder, server.links[1], "one.npz", epochs * samples // BATCH)
    async with ddlf.Cluster.local(2) as cluster:
        how = {"file": str(folder / "two.npz"), "notation": str(folder / "model.nnm")}
        await trained(cluster, peer=server.links[0], master_epochs=epochs, seed=seed, **how)
    await asyncio.to_thread(other.communicate)
    file = await asyncio.to_thread(server.stop)
    model = importlib.import_module("keras").saving.load_model(file, compile=False)
    with np.load(folder / "all.npz") as data:
        classes = np.argmax(model.predict(data["x_test"], verbose=0), axis=1)
        return float(np.mean(classes == data["y_test"]))


async def accuracy(options: argparse.Namespace) -> None:
    """Print the accuracies of both for each seed."""
    differences = []
    for seed in range(options.seeds):
        with in_folder() as folder:
            samples = write(folder, options.data, seed, options.samples, options.updates)
            peers = await with_peer(folder, options.kind, seed, samples, options.epochs, options.updates)
            async with ddlf.Cluster.local(3) as cluster:
                how = {"file": str(folder / "all.npz"), "notation": str(folder / "model.nnm")}
                app = await trained(cluster, master_epochs=options.epochs, seed=seed, **how)
                three = (await app.evaluate_model())["accuracy"]
        differences.append(100 * (peers - three))
        print(
            f"seed {seed}: two workers and one {options.kind} peer {100 * peers:.2f} %, three workers {100 * three:.2f} %",
            flush=True,
        )
    mean = statistics.fmean(differences)
    print(f"difference {mean:+.2f} points (mean of {len(differences)} seeds): {'OK' if abs(mean) <= 1 else 'FAILED'}")


async def cost(options: argparse.Namespace) -> None:
    """Print the ratio of the times of a round with and without ``--peer``."""
    with in_folder() as folder:
        samples = write(folder, options.data, 0, options.samples)
        epochs = max(options.rounds * 2 * BATCH // (2 * samples), 1)
        how = {"file": str(folder / "two.npz"), "notation": str(folder / "model.nnm"), "master_epochs": epochs}
        server = Server(folder, "--updates", options.updates, peers=options.repeats)
        ratios, processor = [], []
        async with ddlf.Cluster.local(2) as cluster:
            await trained(cluster, **how)  # compiles
            for link in server.links:
                times = []
                for peer in (None, link):
                    cpu, began = time.process_time(), time.perf_counter()
                    app = await trained(cluster, peer=peer, **how)
                    rounds = app.history[2:]  # the first rounds are slow
                    times.append((statistics.fmean(record.seconds for record in rounds), time.process_time() - cpu))
                    print(
                        f"{'with   ' if peer else 'without'} {1000 * times[-1][0]:7.2f} ms a round, {times[-1][1]:.2f} s of "
                        f"the master's processor, {time.perf_counter() - began:.1f} s in all, {len(app.history)} rounds",
                        flush=True,
                    )
                ratios.append(times[1][0] / times[0][0])
                processor.append(times[1][1] / times[0][1])
        server.stop()
    print(f"ratio of a round {statistics.median(ratios):.3f}, of the processor {statistics.median(processor):.3f}")


def main(words: Sequence[str] | None = None) -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "cost"))
    parser.add_argument("--kind", choices=PEERS, default="python", help="kind of the other peer")
    parser.add_argument("--data", default="mnist", help="data set: mnist or digits")
    parser.add_argument("--samples", type=int, default=0, help="most training samples (0: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--updates", type=int, default=20, help="commits between two posts")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(words)
    asyncio.run({"accuracy": accuracy, "cost": cost}[options.what](options))


if __name__ == "__main__":
    main()
