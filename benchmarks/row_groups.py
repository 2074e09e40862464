"""Compare training on Parquet files in a bucket with partition files, and kill a master in the middle of an epoch.

    python -m benchmarks.row_groups [--gigabytes 3] [--memory 128MiB] [--epochs 2] [--only parquet,partition,killed] [--folder PATH] [--quick]

The benchmark starts moto's server for the bucket (``pip install s3fs 'moto[server]'``). Two workers train a small
model, so reading takes most of the time. Each case begins with an empty cache. The first epoch fetches all data, and
the second finds the data on the disk.

- ``parquet``: the Parquet files as they are
- ``partition``: the same samples as partition files of the usual size, written by ``ddlf data split``
- ``killed``: the Parquet files again. SIGKILL ends the master in the middle of the first epoch, and the run is resumed.
  Its weights must have the SHA-256 of ``parquet``.

Rates are samples per second in the first and in the second epoch. ``workers`` is the peak memory of a worker. ``exact``
says that each sample was trained on once in each epoch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import ddlf
import ddlf.data
from benchmarks.measure import ROOT, run_child, some_of, table
from benchmarks.streamed import served_by_moto
from ddlf import Cluster
from ddlf.algorithms.weights import digest

CASES = ["parquet", "partition", "killed"]
WIDTH, FILE_ROWS, GROUP_ROWS = 768, 20_000, 2_500
ROUNDS = 8
"""Rounds of an epoch. Each ends with a checkpoint."""
BUCKET = "ddlf-benchmark"


class Rows(ddlf.IApp):
    """A small model of wide rows.

    Attributes:
        location: Where they are; a glob of Parquet files, or partition files.
    """

    verbose = False
    advice = "off"
    batch_size = 500
    location = ""

    async def load_dataset(self) -> None:
        """Open the data set."""
        columns = dict(x="x", y="y") if self.location.endswith(".parquet") else {}
        self.train_data = ddlf.data.open(self.location, **columns)

    async def create_model(self) -> None:
        """One layer."""
        import keras

        self.model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(10, activation="softmax")])
        self.model.compile("sgd", "sparse_categorical_crossentropy")


async def measure(facts: dict[str, Any]) -> dict[str, Any]:
    """Train, or continue a training, and return the result."""
    async with Cluster.local(2) as cluster:
        app = Rows(cluster)
        app.location, app.data_memory = facts["place"], facts["memory"]
        app.checkpoint, app.resume, app.round_samples = facts["folder"], "auto", facts["samples"] // ROUNDS
        records = await app.train_sync(master_epochs=facts["epochs"])
        peaks = [_peak(pid) for worker in cluster.workers for pid in _family(worker.executor.pid)]
        exact = bool(app.ledger.is_exact(facts["epochs"]))
        sha256 = digest(app.model.get_weights())
    seconds = [record.seconds for record in records]
    epochs = [sum(seconds[first : first + ROUNDS]) for first in range(0, len(seconds), ROUNDS)]
    return {"seconds": epochs, "exact": exact, "sha256": sha256, "workers": max(peaks)}


def _family(pid: int) -> list[int]:
    """Return the ids of a process and its descendants."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [pid, *(descendant for child in children for descendant in _family(child))]


def _peak(pid: int) -> int:
    """Return the peak memory of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def make(folder: Path, gigabytes: float) -> int:
    """Write Parquet files, and partition files of them; returns the number of samples."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ddlf.data.location import Folder
    from ddlf.data.sources import open_source
    from ddlf.data.split import sizes_of, split

    (folder / "set/parquet").mkdir(parents=True)
    files = max(round(gigabytes * 1e9 / (FILE_ROWS * WIDTH * 4)), 2)
    for number in range(files):
        chance = np.random.default_rng(number)
        x = chance.standard_normal(FILE_ROWS * WIDTH, dtype=np.float32)
        columns = {"x": pa.FixedSizeListArray.from_arrays(x, WIDTH), "y": chance.integers(10, size=FILE_ROWS)}
        path = folder / f"set/parquet/{number:05}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=GROUP_ROWS, use_dictionary=False, compression="none")
    source = open_source(folder / "set/parquet")
    sizes = sizes_of(source.samples, WIDTH * 4 + 8)
    split(source, Folder(folder / "set/partition"), sizes, shuffle=False)
    return source.samples


def killed(facts: dict[str, Any]) -> dict[str, Any]:
    """Kill the master after some rounds of the first epoch, and resume it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "benchmarks.row_groups", "--child", json.dumps(facts)]
    master = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while len(list(Path(facts["folder"]).glob("*"))) < 3 and master.poll() is None:
            time.sleep(0.05)
        time.sleep(1.0)  # into the next round
        if master.poll() is not None:
            raise RuntimeError("the run was over before it could be killed")
    finally:
        master.send_signal(signal.SIGKILL)
        master.wait()
    return run_child("benchmarks.row_groups", "--child", json.dumps(facts), timeout_s=3600)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and print a table."""
    result_of: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        note = folder / "samples"
        if not note.exists():
            note.write_text(str(make(folder, options.gigabytes)))
        samples = int(note.read_text())
        os.environ.update(stack.enter_context(served_by_moto(folder / "set", f"s3://{BUCKET}/set")))
        for case in options.only:
            location = f"s3://{BUCKET}/set/partition" if case == "partition" else f"s3://{BUCKET}/set/parquet/*.parquet"
            own_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            os.environ.update(DDLF_CACHE=str(own_folder / "cache"), DDLF_CACHE_SIZE="20GB")
            facts = {"place": location, "folder": str(own_folder / "run"), "samples": samples, "epochs": options.epochs}
            facts["memory"] = options.memory
            if case == "killed":
                result_of[case] = killed(facts)
            else:
                result_of[case] = run_child("benchmarks.row_groups", "--child", json.dumps(facts), timeout_s=3600)
            rates = [f"{samples / seconds:,.0f}" for seconds in result_of[case]["seconds"]]
            print(f"{case}: {' and '.join(rates)} samples/s, {json.dumps(result_of[case])}", flush=True)
    rows = [["case", *(f"epoch {n + 1}" for n in range(options.epochs)), "workers", "exact"]]
    for case, result in result_of.items():
        rates = [f"{samples / seconds:,.0f}" for seconds in result["seconds"]]
        rows.append([case, *rates, f"{result['workers'] / 1e6:.0f} MB", str(result["exact"])])
    print(table(rows))
    if {"parquet", "partition"} <= result_of.keys():
        pairs = zip(result_of["partition"]["seconds"], result_of["parquet"]["seconds"], strict=True)
        print("parquet / partition:", ", ".join(f"{partition_s / parquet_s:.2f}" for partition_s, parquet_s in pairs))
    if {"parquet", "killed"} <= result_of.keys():
        print("same SHA-256 after a kill:", result_of["parquet"]["sha256"] == result_of["killed"]["sha256"])
    return result_of


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3)
    parser.add_argument("--memory", default="128MiB")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--only", type=some_of(CASES), default=CASES)
    parser.add_argument("--folder", default="", help="where the data is made, and stays for the next call")
    parser.add_argument("--quick", action="store_true", help="0.5 GB")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(asyncio.run(measure(options.child))))
        return
    if options.quick:
        options.gigabytes = 0.5
    run(options)


if __name__ == "__main__":
    main()
