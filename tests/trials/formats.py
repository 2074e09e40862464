"""Train on one data set in every format and store, while workers are killed and join. All results must be equal.

    python -m tests.trials.formats [--formats npz,npy,parquet,tar,tfrecord,placed] [--stores folder,http,s3] [--kills 20] [--joins 2] [--seed 0]

``s3`` is a bucket of moto's server in this process (``pip install s3fs 'moto[server]'``), and ``http`` is a web server. The
trial splits the same samples from each format into 7 partition files. For each store and format, three slots train for
5 epochs with Adam and dropout, with several rounds in an epoch. Meanwhile executors are killed at random moments, and
workers join. The exit code is 1 unless all of this is true:

- The manifest is the same for every format, with the same hashes of the files, also after a repartition into 5 files
  and back.
- The SHA-256 of weights and optimizers equals that of an undisturbed run on a folder.
- After each epoch, every sample was trained on once in each epoch up to now.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import signal
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ddlf.data
from ddlf import Cluster
from ddlf.data.location import Folder
from ddlf.data.sources import open_source
from ddlf.data.split import PartitionedSource, repartition, sizes_of, split
from ddlf.events import Event, SlotStarted
from ddlf.events.record import RoundRecord
from ddlf.testing import FaultyStore
from tests.training.models import Blobs, blobs
from tests.trials.disturbed import digest
from tests.trials.options import read_options
from tests.trials.stores import FaultyBucket
from tests.trials.workers import Workers

SAMPLES, FILES, SLOTS, EPOCHS = 203, 7, 3, 5
ROUNDS = 3
"""Number of rounds in an epoch."""
FORMATS = ("npz", "npy", "parquet", "tar", "tfrecord", "placed")
STORES = ("folder", "http", "s3")


class Stored(Blobs):
    """An app that trains on points in partition files, with Adam and dropout, which have state.

    Attributes:
        location: The address of the partition files.
    """

    location = ""
    slots = SLOTS
    shuffle = "window:3"
    round_samples = 70
    optimizer = "adam"
    dropout = 0.3

    async def load_dataset(self) -> None:
        """Open the partition files."""
        self.train_data = ddlf.data.open(self.location)


# -- formats --------------------------------------------------------------------------------------------------------------


def written(kind: str, folder: Path) -> Path:
    """Write the points in a format, and return their path."""
    x, y = blobs(SAMPLES)
    path = folder / f"points.{kind}"
    if kind == "npz":
        np.savez(path, x=x, y=y)
    elif kind == "npy":
        path.mkdir()
        np.save(path / "x.npy", x)
        np.save(path / "y.npy", y)
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"x": list(x), "y": list(y)}), path)
    elif kind == "tar":
        with tarfile.open(path, "w") as archive:
            for number in range(SAMPLES):
                for name, array in (("x", x[number]), ("y", y[number])):
                    data = io.BytesIO()
                    np.save(data, array)
                    head = tarfile.TarInfo(f"{number:05}.{name}.npy")
                    head.size = data.tell()
                    data.seek(0)
                    archive.addfile(head, data)
    else:  # formats that DDLF writes: begin with another number and order of partition files
        other = Folder(folder / f"{kind}-before")
        np.savez(folder / f"{kind}.npz", x=x, y=y)
        partitioned = split(open_source(folder / f"{kind}.npz"), other, sizes_of(SAMPLES, 1, files=4), shuffle=False)
        if kind == "placed":
            return other.path
        from ddlf.data.export import export

        export(other, partitioned, path)
    return path


def prepared(kind: str, folder: Path) -> Path:
    """Split the points of a format into a data set, repartition it into 5 files and back, and return its path."""
    target = Folder(folder / kind)
    split(open_source(written(kind, folder)), target, sizes_of(SAMPLES, 1, files=FILES), seed=1)
    for files in (5, FILES):
        repartition(target, PartitionedSource(target), sizes_of(SAMPLES, 1, files=files))
    return target.path


@contextlib.contextmanager
def served(store: str, folder: Path) -> Any:
    """Serve a folder in a store, and yield its address."""
    if store == "folder":
        yield str(folder)
        return
    serving: Any = FaultyBucket(folder) if store == "s3" else FaultyStore(folder)
    try:
        yield serving.url
    finally:
        serving.close()


# -- training -------------------------------------------------------------------------------------------------------------


async def trained(workers: Workers, ports: Sequence[int], location: str, kills: int, chance: random.Random) -> str:
    """Train on the first workers. The other workers join later, and executors are killed meanwhile. Return the digest.

    Raises:
        AssertionError: The ledger was not exact at the end of an epoch, or no executor was killed.
    """
    killed, tasks, per_round = 0, set[asyncio.Task[Any]](), dict[int, int]()
    async with Cluster(["127.0.0.1"] * SLOTS, list(ports[:SLOTS]), token_file=workers.token_file) as cluster:
        app = Stored(cluster)
        app.location = location

        async def kill(worker: int, delay_s: float) -> None:
            nonlocal killed
            await asyncio.sleep(delay_s)
            if killed < kills:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(cluster.workers[worker - 1].executor.pid, signal.SIGKILL)
                    killed += 1

        def follow(event: Event) -> None:
            # At most two kills in a round: DDLF gives up a slot after the loss of three executors.
            if not isinstance(event, SlotStarted) or per_round.get(event.round, 0) >= 2:
                return
            if chance.random() < 2 * kills / (SLOTS * ROUNDS * EPOCHS):
                per_round[event.round] = per_round.get(event.round, 0) + 1
                task = asyncio.get_running_loop().create_task(kill(event.worker, chance.uniform(0, 0.05)))
                tasks.add(task)

        async def on_round(record: RoundRecord) -> None:
            if record.round % ROUNDS == 0:
                assert app.ledger.is_exact(record.round // ROUNDS), f"the ledger behind round {record.round}"
            if record.round in (2, 5) and (later := ports[SLOTS + len(cluster.workers) - SLOTS :]):
                await cluster.add("127.0.0.1", later[0])

        app.subscribe(follow)
        app.on_round = on_round  # type: ignore[method-assign, assignment]
        await app.train_sync(master_epochs=EPOCHS)
        for task in tasks:
            task.cancel()
        assert app.ledger.is_exact(EPOCHS)
        assert killed >= min(kills, 1), "nothing was killed"
        assert len(cluster.workers) == len(ports)
        print(f"          {killed} executors were killed, {len(ports) - SLOTS} workers joined", flush=True)
        return digest(app)


async def compare(formats: Sequence[str], stores: Sequence[str], kills: int, joins: int, seed: int = 0) -> bool:
    """Train with each format and store, and print the results. Return whether all results are equal."""
    chance, fine, contents, expected = random.Random(seed), True, set[str](), ""

    async def train_one(kind: str, store: str, kills: int, joins: int, shared: Workers) -> None:
        nonlocal fine, expected
        os.environ["DDLF_CACHE"], os.environ["DDLF_CACHE_SIZE"] = str(folder / f"cache-{kind}"), "1GB"
        with (
            served(store, paths[kind]) as address,
            Workers()
            if store == "s3"
            else contextlib.nullcontext(shared) as workers,  # workers of S3 need its address in their environment
        ):
            while len(ports.setdefault(workers, [])) < SLOTS + joins:
                ports[workers].append(workers.start("--quiet")[1])
            sha = await trained(workers, ports[workers][: SLOTS + joins], address, kills, chance)
        expected = expected or sha
        fine = fine and sha == expected
        print(f"{kind:<9} {store:<7} {sha[:16]}{'' if sha == expected else '  DIFFERS'}", flush=True)

    with tempfile.TemporaryDirectory() as name, Workers() as shared:
        folder, ports = Path(name), dict[Workers, list[int]]()
        os.environ["DDLF_CACHE_SIZE"] = "0"
        ports[shared] = [shared.start("--quiet")[1] for _ in range(SLOTS)]
        paths = {kind: prepared(kind, folder) for kind in formats}
        for kind, path in paths.items():
            contents.add(Folder(path).manifest().content)
            print(f"{kind:<9} {Folder(path).manifest().content}", flush=True)
        await train_one(formats[0], "folder", 0, 0, shared)
        for kind in formats:
            for store in stores:
                await train_one(kind, store, kills, joins, shared)
    return fine and len(contents) == 1


if __name__ == "__main__":
    options = read_options(__doc__, formats=",".join(FORMATS), stores=",".join(STORES), kills=20, joins=2, seed=0)
    every = options.formats.split(","), options.stores.split(",")
    sys.exit(not asyncio.run(compare(*every, options.kills, options.joins, options.seed)))
