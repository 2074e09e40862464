"""Measure how much memory the exchange needs, beside local training. Linux.

    python -m benchmarks.footprint [--parameters 1e8] [--workers 4]

The benchmark trains a dense Keras model for some rounds in three ways, each in its own processes: by plain ``fit`` in
one process, with the star exchange on local workers, and with the sharded exchange. Plain ``fit`` shows how much memory
local training itself needs. The output is the peak memory of any worker, and of the master, minus its memory after the
import of Keras. The unit is one model (four bytes for each parameter). The kernel measures the peak of a process from a
reset on (``/proc/PID/clear_refs``). The master gets the model at the end of the last round, so its peak before that is
also shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import run_child, table
from ddlf import Cluster, IApp
from ddlf.events import Committed

MODULE = "benchmarks.footprint"
ROUNDS = 4
SAMPLES = 64
BATCH = 16
WAYS = ("fit", "star", "sharded")


class Wide(IApp):
    """A network of one large layer and a small one; SGD keeps nothing.

    Args:
        cluster: Workers.
        width: Inputs and outputs of the large layer.
    """

    def __init__(self, cluster: Any, width: int, **settings: Any) -> None:
        super().__init__(cluster)
        self.width = width
        for name, value in settings.items():
            setattr(self, name, value)

    def load_dataset(self) -> None:
        chance = np.random.default_rng(1)
        self.x_train = chance.normal(size=(SAMPLES, self.width)).astype("float32")
        self.y_train = chance.integers(0, 10, SAMPLES)

    def create_model(self) -> None:
        self.model = model(self.width)


def model(width: int) -> Any:
    """The network, compiled."""
    import keras

    layers = [keras.layers.Dense(width, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def memory_of(pid: int | str = "self") -> tuple[int, int]:
    """Return the current bytes of a process, and its peak since ``begin``."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    now, most = (int(facts[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


def begin(pid: int | str = "self") -> int:
    """Restart the kernel's count of peak memory, and return the current bytes of the process."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory_of(pid)[0]


def fitted(width: int) -> dict[str, float]:
    """Measure plain ``fit`` on as many samples as a worker has."""
    before = 0
    for wide in (8, width):  # the first pass makes all imports and one-time objects
        before = begin()
        chance = np.random.default_rng(1)
        x, y = chance.normal(size=(BATCH, wide)).astype("float32"), chance.integers(0, 10, BATCH)
        network = model(wide)
        network.fit(x, y, batch_size=BATCH, epochs=ROUNDS, verbose=0)
    return {"worker": memory_of()[1] - before}


async def trained(width: int, workers: int, way: str) -> dict[str, float]:
    """Measure the same training on workers."""
    how = {"master_epochs": ROUNDS, "batch_size": BATCH, "exchange": way, "mode": "sync"}
    async with Cluster.local(workers) as cluster:
        await Wide(cluster, 8, **how).train_model()  # so that all that is imported and made once is there
        app = Wide(cluster, width, **how)
        pids = [(await worker.status()).executor_pid for worker in cluster.workers]
        before = {pid: begin(pid) for pid in (*pids, os.getpid())}
        later: list[int] = []

        def look(event: Any) -> None:
            if isinstance(event, Committed) and event.record.round == ROUNDS - 1:
                later.append(memory_of()[1])

        app.subscribe(look)
        await app.train_model()
        most = {pid: memory_of(pid)[1] - had for pid, had in before.items()}
    master = most.pop(os.getpid())
    return {"worker": max(most.values()), "master": master, "until the end": later[0] - before[os.getpid()]}


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Run the benchmark, and return the memory of each way, in models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ways", default=",".join(WAYS), type=lambda text: text.split(","))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    width = round(options.parameters**0.5)
    if options.one is not None:
        way = options.one
        results_of_way = fitted(width) if way == "fit" else asyncio.run(trained(width, options.workers, way))
        print(json.dumps(results_of_way))
        return {}
    size, results = 4 * width * (width + 11), dict[str, dict[str, float]]()
    arguments = ("--parameters", str(options.parameters), "--workers", str(options.workers))
    for way in options.ways:
        results_of_way = run_child(MODULE, *arguments, "--one", way, timeout_s=3600)
        results[way] = {name: value / size for name, value in results_of_way.items()}
        print(way, results[way], file=sys.stderr, flush=True)
    names = ("worker", "master", "until the end")
    rows = [["way", "a worker", "the master", "the master, before the last round's end"]]
    rows += [
        [way, *(f"{results_of_way[name]:.1f}" if name in results_of_way else "-" for name in names)]
        for way, results_of_way in results.items()
    ]
    print(table(rows))
    return results


if __name__ == "__main__":
    main()
