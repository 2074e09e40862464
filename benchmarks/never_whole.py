"""Measure the memory of a model in parts that no machine could train whole. Linux.

    python -m benchmarks.never_whole [--quick] [--parameters 1.5e8] [--workers 3]

The benchmark trains a dense Keras model with Adam for three rounds in two ways, each in its own processes: by plain
``fit``, and in one part per worker. It limits the data of each worker (``RLIMIT_DATA``) to 60 % of the
peak memory of ``fit``, and shows that ``fit`` dies with this limit. Then it shows the peak memory of each worker since
its start, what the master needs in addition before the end of the last round, and whether the saved model predicts the
same in plain Keras. ``--quick`` trains a small model, in which the memory of the framework outweighs the model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import ROOT, run_child, table
from ddlf import Cluster, IApp
from ddlf.events import Committed

MODULE = "benchmarks.never_whole"
ROUNDS = 3
SAMPLES = 64
BATCH = 16
LAYERS = 24
SHARE = 0.6


def data(width: int) -> tuple[Any, Any]:
    """Random samples of 10 classes."""
    chance = np.random.default_rng(1)
    return chance.normal(size=(SAMPLES, width)).astype("float32"), chance.integers(0, 10, SAMPLES)


def model(width: int) -> Any:
    """A compiled network of equal layers and a small last one."""
    import keras

    layers = [keras.layers.Dense(width, activation="relu") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(10)])
    model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def limit(nbytes: int) -> None:
    """Limit the data of this process."""
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))


class Wide(IApp):
    """The network in parts.

    Args:
        cluster: Workers.
        width: Units of each layer.
        most: Limit of a worker's data in bytes.
    """

    def __init__(self, cluster: Any, width: int, most: int, **settings: Any) -> None:
        super().__init__(cluster)
        self.width, self.most = width, most
        for name, value in settings.items():
            setattr(self, name, value)

    def load_dataset(self) -> None:
        if hasattr(self, "replica"):
            limit(self.most)
        self.x_train, self.y_train = data(self.width)

    def create_model(self) -> None:
        self.model = model(self.width)


def peak(pid: int | str = "self") -> int:
    """Return the peak memory in bytes of this process since its start, or since ``begin``."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["VmHWM"].split()[0]) * 1024


def begin() -> int:
    """Restart the kernel's count of peak memory for this process, and return the current value."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def fitted(width: int, most: int) -> dict[str, float]:
    """Train by plain ``fit``, with a limit unless it is 0."""
    import keras

    if most:
        limit(most)
    keras.utils.set_random_seed(0)
    network, (x, y) = model(width), data(width)
    network.fit(x, y, batch_size=BATCH, epochs=ROUNDS, verbose=0)
    return {"peak": peak()}


async def in_parts(width: int, workers: int, most: int, out: str) -> dict[str, Any]:
    """Train in parts, and save the model."""
    import keras

    async with Cluster.local(workers) as cluster:
        how = {"master_epochs": ROUNDS, "batch_size": BATCH, "micro_batches": 4, "verbose": False}
        await Wide(cluster, 8, most, split=f"stages:{workers}", **how).train_model()  # so that all is imported
        app, before, later = Wide(cluster, width, most, split=f"stages:{workers}", **how), begin(), list[int]()

        def look(event: Any) -> None:
            if isinstance(event, Committed) and event.record.round == ROUNDS - 1:
                later.append(peak())

        app.subscribe(look)
        await app.train_model()
        pids = [(await worker.status()).executor_pid for worker in cluster.workers]
        peaks = {"workers": [peak(pid) for pid in pids], "master": later[0] - before, "end": peak() - before}
        await app.save_model(out)
        x, _ = data(width)
        whole = app.model.predict(x[:8], verbose=0)
    plain = keras.models.load_model(out)
    return {
        **peaks,
        "same": bool(np.array_equal(plain.predict(x[:8], verbose=0), whole)),
        "exact": app.ledger.is_exact(ROUNDS),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark. Return the shares of the peak of ``fit``, and the other results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1.5e8)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--most", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    parameters = 6e6 if options.quick else options.parameters
    width = round((parameters / LAYERS) ** 0.5)
    if options.one == "fit":
        print(json.dumps(fitted(width, options.most)))
        return {}
    if options.one == "parts":
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asyncio.run(in_parts(width, options.workers, options.most, f"{folder}/whole.keras"))))
        return {}
    arguments = ("--parameters", str(parameters), "--workers", str(options.workers))
    fit = run_child(MODULE, *arguments, "--one", "fit", timeout_s=3600)["peak"]
    most = int(SHARE * fit) if not options.quick else 1 << 40
    dies = None
    if not options.quick:
        again = [sys.executable, "-m", MODULE, *arguments, "--one", "fit", "--most", str(most)]
        dies = subprocess.run(again, cwd=ROOT, env=os.environ, capture_output=True, check=False).returncode != 0
    result = run_child(MODULE, *arguments, "--one", "parts", "--most", str(most), timeout_s=3600)
    size = 4 * width * (LAYERS * (width + 1) + 10)
    shares = [peak / fit for peak in result["workers"]]
    rows = [
        ["what", "measured"],
        ["the model", f"{size / 1e9:.2f} GB"],
        ["peak of fit", f"{fit / 1e9:.2f} GB"],
        ["fit dies with the limit", "not tried" if dies is None else "yes" if dies else "no"],
        ["peak of each worker, of that of fit", ", ".join(f"{peak:.0%}" for peak in shares)],
        ["the master in addition before the end, in models", f"{result['master'] / size:.2f}"],
        ["the master in addition in all, in models", f"{result['end'] / size:.2f}"],
        ["the saved model predicts the same", "yes" if result["same"] else "no"],
        ["each sample once an epoch", "yes" if result["exact"] else "no"],
    ]
    print(table(rows))
    return {**result, "dies": dies, "shares": shares}


if __name__ == "__main__":
    main()
