"""Measure reading from a web server through a cache for a fifth of the data: traffic and processor time.

    python -m benchmarks.cached [--mb 63] [--files 12] [--epochs 5] [--repeats 5] [--part 0.2]

The server is a separate process on this machine, so a cache hit saves almost no time. The benchmark trains nothing. It
measures these caches in turns:

- ``none``: no cache
- ``part``: a cache for this part of the data
- ``oldest``: the same cache, but it always removes the file that was unused for the longest time, as most caches do

``fetched`` is the number of files that came from the server, divided by files times epochs. CPU seconds are those of
the reading process, with the kernel's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Spread, table, turns
from ddlf.algorithms.reading_order import portions
from ddlf.data.cache import Cache
from ddlf.data.data_set import DataSet
from ddlf.data.location import Folder
from ddlf.data.remote_folder import RemoteFolder
from ddlf.data.sources import open_source
from ddlf.data.split import sizes_of, split
from ddlf.data.store import Store
from ddlf.data.stream import SampleStream

CASES = ("none", "part", "oldest")
ROW = 784
SERVE = "import sys; from ddlf.testing import FaultyStore; print(FaultyStore(sys.argv[1]).url, flush=True); sys.stdin.read()"


class Counted(Store):
    """A store that counts its requests."""

    requests = 0

    def read(self, name: str, nbytes: int) -> bytes:
        """See ``Store``."""
        self.requests += name.endswith(".safetensors")
        return super().read(name, nbytes)

    def fetch(self, name: str, nbytes: int, target: Path) -> None:
        """See ``Store``."""
        self.requests += 1
        super().fetch(name, nbytes, target)


class Oldest(Cache):
    """A cache that drops the least recently used file."""

    def path(self, *args: Any, **more: Any) -> Path | None:
        """See ``Cache``."""
        return super().path(*args, **more | {"protected": ()})


def read(url: str, case: str, folder: Path, part: float, epochs: int) -> tuple[float, float, int, int]:
    """Read all epochs; returns CPU seconds, seconds, files that were fetched, and the most bytes that the cache held."""
    store = Counted(url)
    location = RemoteFolder(url, store=store)
    nbytes = location.manifest().nbytes
    cap = 0 if case == "none" else int(nbytes * part)
    location = RemoteFolder(url, (Oldest if case == "oldest" else Cache)(folder, cap), store)
    data = DataSet(url)
    data._location, most_cached = location, 0
    location.manifest()
    begin, used = time.perf_counter(), time.process_time()
    for epoch in range(epochs):
        (portion,) = portions(data.manifest.sizes, [data.manifest.samples], "window:1", seed=0, epoch=epoch)
        # Memory for the window of one file and little more: nothing stays in it from epoch to epoch.
        samples = sum(len(chunk["x"]) for chunk in SampleStream(data, portion, 64, 3 * data.manifest.files[0].nbytes))
        assert samples == data.manifest.samples
        most_cached = max(most_cached, sum(file.stat().st_size for file in folder.glob("*") if file.is_file()))
    return time.process_time() - used, time.perf_counter() - begin, store.requests, most_cached


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=63)
    parser.add_argument("--files", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--part", type=float, default=0.2)
    options = parser.parse_args()
    results: dict[str, list[tuple[float, float, int, int]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["DDLF_CACHE"] = str(folder / "cache")
        samples = options.mb * 10**6 // ROW
        np.save(folder / "x.npy", np.random.default_rng(0).integers(0, 256, (samples, ROW), np.uint8))
        split(open_source(folder / "x.npy"), Folder(folder / "place"), sizes_of(samples, ROW, files=options.files))
        command = [sys.executable, "-c", SERVE, str(folder / "place")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            for repeat, case in turns(CASES, options.repeats):
                cache = folder / f"cache-{repeat}-{case}"
                results[case].append(read(url, case, cache, options.part, options.epochs))
            server.communicate("")
    rows = [["cache", "CPU s", "s", "fetched", "most MB in it"]]
    for case, runs in results.items():
        cpu, took, requests, cached = zip(*runs, strict=True)
        of = f"{Spread.of(requests).median:.0f} of {options.files * options.epochs}"
        rows.append([case, Spread.of(cpu).text(), Spread.of(took).text(), of, f"{max(cached) / 1e6:.1f}"])
    print(table(rows))


if __name__ == "__main__":
    main()
