"""Check that training stays within its memory limit for data.

    python -m benchmarks.bounded growth [--caps 32,128,512] [--times 4]
    python -m benchmarks.bounded group [--gib 15] [--limit-mib 1536] [--folder /tmp]       # as root, on Linux

``growth`` trains the app of ``apps/big_images.py`` on data that is several times as large as each cap (``data_memory``,
in MiB), each in its own process. It takes the highest private and shared memory (``RssAnon``; mapped files do not
count, because the kernel can reclaim them). From this it subtracts the memory of a run with only one batch of data, and
divides by the cap. The result must be at most 1.1. Both ways of reading are tested: a window of files that fits into
half of the cap is read into memory, and the rows of a larger window are read from the disk.

``group`` has two workers with TensorFlow, each in its own control group with that memory limit. They train one epoch on
so many GiB. The kernel must kill no process, no worker may be lost, and each sample must be trained on once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from apps.big_images import PIXELS, BigImages, pictures
from benchmarks.measure import ROOT, run_child, table
from ddlf import Cluster
from ddlf.algorithms.reading_order import portions
from ddlf.data.location import Folder
from ddlf.data.manifest import Column
from ddlf.data.rows import Rows, row_type
from ddlf.data.split import sizes_of, split
from ddlf.events import WorkerLost

MIB = 2**20
PICTURE = PIXELS * PIXELS * 3 + 8
"""Bytes of a picture with its label."""
AT_ONCE = 512


class Endless:
    """A source that makes pictures while they are written.

    Args:
        samples: How many.
    """

    classes = ()

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.columns = {"x": Column("uint8", (PIXELS, PIXELS, 3)), "y": Column("int64", ())}

    def rows(self, at_once: int, first: int = 0) -> Iterator[Rows]:
        """See ``Source``. A few hundred distinct pictures are enough, because their content does not matter here."""
        few = np.empty(AT_ONCE, row_type(self.columns))
        few["x"], few["y"] = pictures(0, AT_ONCE)
        at_once = min(at_once, AT_ONCE)
        for begin in range(first, self.samples, at_once):
            yield few[: min(at_once, self.samples - begin)]


def write(folder: Path, nbytes: int, file_bytes: int) -> None:
    """Write a data set of a given size in bytes."""
    samples = nbytes // PICTURE
    split(Endless(samples), Folder(folder), sizes_of(samples, PICTURE, file_bytes=file_bytes), shuffle=False)


# -- growth ---------------------------------------------------------------------------------------------------------------


class Highest(threading.Thread):
    """A thread that reads the private memory of this process a hundred times a second, and keeps the maximum."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.nbytes, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.01):
            lines = Path("/proc/self/status").read_text().splitlines()
            resident = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
            self.nbytes = max(self.nbytes, resident)


def trained(folder: str, cap_mib: int) -> dict[str, int]:
    """Train one epoch in this process, and return its peak memory."""
    import tensorflow as tf

    from ddlf.training.slot.feed import FileFeed

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    watching = Highest()
    watching.start()
    app = BigImages()
    app.location, app.data_memory = folder, f"{cap_mib}MiB"
    asyncio.run(app.load_dataset())
    asyncio.run(app.create_model())
    feed = FileFeed(app, "train", app.batch_size)
    sizes = app.train_data.manifest.sizes
    for portion in portions(sizes, [int(sizes.sum())], seed=0, epoch=0):
        feed.set_order(portion)
        app.model.fit(feed.dataset, epochs=1, verbose=0)
    watching.ended.set()
    watching.join()
    return {"nbytes": watching.nbytes}


def growth(options: argparse.Namespace) -> list[list[str]]:
    """Measure each cap both ways, and print a table."""
    rows = [["data_memory", "files", "data", "grows by", "of the cap"]]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for cap in options.caps:
            for way, part in (("held", 17), ("from the disk", 5)):
                folder = Path(name, f"{cap}-{part}")
                nbytes = options.times * cap * MIB
                write(folder / "all", nbytes, cap * MIB // part)
                write(folder / "one", BigImages.batch_size * PICTURE, cap * MIB)
                least, most = (
                    run_child("benchmarks.bounded", "trained", str(folder / size), str(cap), timeout_s=900)["nbytes"]
                    for size in ("one", "all")
                )
                shutil.rmtree(folder)
                grown = (most - least) / MIB
                rows.append([f"{cap} MiB", way, f"{nbytes / MIB:.0f} MiB", f"{grown:.1f} MiB", f"{grown / cap:.2f}"])
                print("  ".join(rows[-1]), flush=True)
    print("\n" + table(rows))
    return rows


# -- group ----------------------------------------------------------------------------------------------------------------


class Group:
    """A control group of Linux whose memory has a limit, of version 1 or 2.

    Args:
        name: Its name, below the group of this process.
        limit: Bytes.
    """

    def __init__(self, name: str, limit: int) -> None:
        root = Path("/sys/fs/cgroup")
        self.old = (root / "memory").is_dir()
        self.folder = root / "memory" / name if self.old else root / name
        self.folder.mkdir()
        (self.folder / ("memory.limit_in_bytes" if self.old else "memory.max")).write_text(str(limit))

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a process that belongs to the group from its first instruction."""
        into = ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs; exec "$@"', "sh", *command]
        return subprocess.Popen(into, env=environment, cwd=ROOT)

    def killed(self) -> int:
        """Return how many processes the kernel killed for lack of memory."""
        lines = (self.folder / ("memory.oom_control" if self.old else "memory.events")).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def resident(self) -> int:
        """Return the bytes of processes, without the cache of files."""
        lines = (self.folder / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(("rss ", "anon ")))

    def close(self) -> None:
        """Remove the group after its processes have ended."""
        for _ in range(100):
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.1)


async def group(options: argparse.Namespace) -> None:
    """Train an epoch, and return the result."""
    need = int(options.gib * 2**30)
    if shutil.disk_usage(options.folder or "/tmp").free < need + 2**30:
        raise SystemExit(f"{options.gib} GiB do not fit onto the disk of {options.folder}")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        begin = time.monotonic()
        write(Path(name, "data"), need, 64 * 10**6)
        print(f"written   {need / 2**30:.1f} GiB in {time.monotonic() - begin:.0f} s", flush=True)
        groups = [Group(f"ddlf-{os.getpid()}-{number}", options.limit_mib * MIB) for number in range(2)]
        with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
            ports = [first.getsockname()[1], second.getsockname()[1]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        workers = []
        for port, control_group in zip(ports, groups, strict=True):
            command = [sys.executable, "-m", "ddlf.cli.worker", "--port", str(port), "--quiet"]
            command += ["--host", "127.0.0.1", "--state-dir", str(Path(name, str(port)))]
            workers.append(control_group.start(command, environment))
        try:
            lost: list[str] = []
            most = [0, 0]
            for port in ports:
                listening(port)
            async with Cluster(["127.0.0.1", "127.0.0.1"], ports) as cluster:
                app = BigImages(cluster)
                app.location = str(Path(name, "data"))
                app.subscribe(lambda event: lost.append(str(event)) if isinstance(event, WorkerLost) else None)
                watching = asyncio.create_task(watch(groups, most))
                begin = time.monotonic()
                (record,) = await app.train_sync(master_epochs=1)
                watching.cancel()
                seconds = time.monotonic() - begin
                samples, exact = app.train_data.manifest.samples, app.ledger.is_exact(1)
            killed = [control_group.killed() for control_group in groups]
            memory = ", ".join(f"{nbytes / MIB:.0f} MiB" for nbytes in most)
            print(f"trained   {samples:,} pictures in {seconds:.0f} s, waited for samples {record.wait_data_s:.1f} s")
            print(
                f"limit     {options.limit_mib} MiB a worker; processes had {memory}; killed {sum(killed)}, lost {len(lost)}"
            )
            print(f"ledger    {'exact' if exact else 'NOT EXACT'}")
        finally:
            for worker in workers:
                worker.terminate()
                worker.wait()
            for control_group in groups:
                control_group.close()
    if sum(killed) or lost or not exact:
        raise SystemExit(1)


def listening(port: int) -> None:
    """Wait until a process listens on a port."""
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise SystemExit("a worker did not start")


async def watch(groups: list[Group], most: list[int]) -> None:
    """Record the peak memory of the processes of each group."""
    while True:
        most[:] = [max(before, group.resident()) for before, group in zip(most, groups, strict=True)]
        await asyncio.sleep(0.2)


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    growth_parser = verbs.add_parser("growth")
    growth_parser.add_argument("--caps", type=lambda text: list(map(int, text.split(","))), default=[32, 128, 512])
    growth_parser.add_argument("--times", type=int, default=4, help="data, of the cap")
    group_parser = verbs.add_parser("group")
    group_parser.add_argument("--gib", type=float, default=15)
    group_parser.add_argument("--limit-mib", type=int, default=1536)
    for verb in (growth_parser, group_parser):
        verb.add_argument("--folder", help="where the data is meanwhile")
    three = verbs.add_parser("trained")
    three.add_argument("place")
    three.add_argument("cap", type=int)
    return parser


if __name__ == "__main__":
    options = arguments().parse_args()
    if options.verb == "trained":
        print(json.dumps(trained(options.place, options.cap)))
    elif options.verb == "growth":
        growth(options)
    else:
        asyncio.run(group(options))
