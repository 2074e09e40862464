"""Compare training on partition files with training on arrays in memory: the MNIST CNN on two workers, in turns.

    python -m benchmarks.streamed [--only arrays,disk,s3] [--repeats 5] [--rounds 5] [--samples 60000] [--quick]
    python -m benchmarks.streamed --only http,capped,uncached       # the cost of a cache that is too small

Each run is a process with two workers. The first round does not count, because it traces the training step. Ratios are
within one repeat.

- ``arrays``: the app as it is, with its data in memory
- ``disk``: the same samples as partition files in a folder
- ``s3``: the same in a bucket of moto's server, which the benchmark starts. After the first round, the cache of the
  machine has all files. It needs ``pip install s3fs 'moto[server]'``.
- ``http``: the same from a web server of this process, with the cache
- ``capped``: the same with a cache for a fifth of the data
- ``uncached``: the same without a cache

``wait`` is ``wait_data_s`` divided by the time of the rounds, in percent. ``requests`` is the number of requests for
partition files that ``http`` answered, per file and round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ddlf
import ddlf.data
from apps.mnist_cnn import MNISTCNN
from benchmarks.measure import Spread, run_child, some_of, table, turns
from ddlf import Cluster

CASES = ["arrays", "disk", "s3", "http", "capped", "uncached"]
FILES = 12
BUCKET = "s3://ddlf-benchmark/mnist"
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


class Streamed(MNISTCNN):
    """The published CNN, with arrays or with a data set.

    Attributes:
        location: The location of the data set; empty for arrays.
        samples: Number of training samples, from the beginning of the training set.
    """

    verbose = False
    location, samples = "", 60_000

    async def load_dataset(self) -> None:
        """Load the digits."""
        if self.location:
            self.train_data = ddlf.data.open(self.location)
        else:
            await super().load_dataset()
            self.x_train, self.y_train = self.x_train[: self.samples], self.y_train[: self.samples]


async def measure(location: str, samples: int, rounds: int) -> dict[str, Any]:
    """Train once; the median seconds of a round, what was waited for samples, and files that were opened in all rounds."""
    opened: list[int] = []
    async with Cluster.local(2) as cluster:
        app = Streamed(cluster)
        app.location, app.samples = location, samples
        app.subscribe(lambda event: opened.extend(getattr(event, "files", ())))
        records = (await app.train_sync(master_epochs=rounds + 1))[1:]
        assert app.ledger.is_exact(rounds + 1)
    seconds = sum(record.seconds for record in records)
    return {
        "seconds": statistics.median(record.seconds for record in records),
        "wait": 100 * sum(record.wait_data_s for record in records) / seconds,
        "files": len(opened) / (rounds + 1),
    }


@contextlib.contextmanager
def served_by_moto(folder: Path, url: str) -> Iterator[dict[str, str]]:
    """Run a server of moto with a bucket that has a folder's files at this URL. Yields the environment variables of its clients."""
    target = url
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {**KEYS, "FSSPEC_S3_ENDPOINT_URL": url}
    log = folder.with_suffix(".moto.log").open("w")
    serving = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url).close()
                break
            if serving.poll() is not None:
                raise RuntimeError("the server of moto did not start; pip install s3fs 'moto[server]'")
            time.sleep(0.1)
        os.environ.update(environment)
        import fsspec

        files = fsspec.filesystem("s3")
        files.mkdir(target.split("/")[2])
        files.put(str(folder), target, recursive=True)
        yield environment
    finally:
        serving.kill()
        serving.wait()
        log.close()


def make(folder: Path, samples: int) -> int:
    """Write the digits as partition files, and return their size in bytes."""
    from ddlf.data.location import Folder
    from ddlf.data.sources import open_source
    from ddlf.data.split import split

    (x, y), _ = ddlf.load_mnist()
    np.savez(folder / "a.npz", x=x[:samples], y=y[:samples])
    sizes = [len(part) for part in np.array_split(np.arange(samples), FILES)]
    return split(open_source(folder / "a.npz"), Folder(folder / "mnist"), sizes).nbytes


def run(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Measure in turns, and print a table."""
    from ddlf.testing import FaultyStore

    results_of: dict[str, list[dict[str, Any]]] = {case: [] for case in options.only}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        nbytes = make(folder, options.samples)
        environment = stack.enter_context(served_by_moto(folder / "mnist", BUCKET)) if "s3" in options.only else {}
        web = stack.enter_context(FaultyStore(folder / "mnist"))
        locations = {"arrays": "", "disk": str(folder / "mnist"), "s3": BUCKET}
        caps = {"capped": str(nbytes // 5), "uncached": "0"}
        for _, case in turns(options.only, options.repeats):
            web.served.clear()
            cache = tempfile.TemporaryDirectory(dir=folder)
            os.environ.update(environment, DDLF_CACHE=cache.name, DDLF_CACHE_SIZE=caps.get(case, "10GB"))
            request = json.dumps([locations.get(case, web.url), options.samples, options.rounds])
            result = run_child("benchmarks.streamed", "--child", request, timeout_s=900)
            fetched = sum(count for name, count in web.served.items() if name.endswith(".safetensors"))
            result["requests"] = fetched / FILES / (options.rounds + 1)
            result["held"] = sum(file.stat().st_size for file in Path(cache.name).iterdir() if file.is_file())
            cache.cleanup()
            results_of[case].append(result)
            print(f"{case:<9} {result['seconds']:7.3f} s  wait {result['wait']:5.2f} %", flush=True)
    base = results_of[options.only[0]]
    rows = [["", "s a round", f"of {options.only[0]}", "wait %", "files a round", "requests", "MB in the cache"]]
    for case, results in results_of.items():
        ratios = [
            case_result["seconds"] / base_result["seconds"]
            for case_result, base_result in zip(results, base, strict=True)
        ]
        shown = {key: Spread.of([result[key] for result in results]) for key in results[0]}
        held_mb = shown["held"].median / 1e6
        rows.append(
            [
                case,
                shown["seconds"].text(".3f"),
                Spread.of(ratios).text(".3f"),
                shown["wait"].text(),
                shown["files"].text(".1f"),
                shown["requests"].text() if case in CASES[3:] else "-",
                f"{held_mb:.0f} of {nbytes / 1e6:.0f}" if case in CASES[2:] else "-",
            ]
        )
    print("\n" + table(rows))
    return results_of


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=some_of(CASES), default=CASES[:3])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--quick", action="store_true", help="6,000 samples, 2 rounds, once")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    options = arguments().parse_args()
    if options.child:
        print(json.dumps(asyncio.run(measure(*json.loads(options.child)))))
    else:
        if options.quick:
            options.samples, options.rounds, options.repeats = 6_000, 2, 1
        run(options)
