"""Measure how many samples a second one core reads as shuffled batches, beside tf.data, WebDataset and Mosaic's streaming.

    python -m benchmarks.reading [--others PYTHON] [--repeats 3] [--batch 64] [--arrays 200000] [--pictures 20000]
    python -m benchmarks.reading --quick

``PYTHON`` is the interpreter of an environment with webdataset, mosaicml-streaming and torch. Without it these readers
are left out. The data is uint8 arrays of 28x28, and JPEG images of 64x64. Each reader has its own files of about 64 MB,
on a disk with a warm cache, and shuffles in its usual way. Each run is a separate process on one core. It reads the
data several times, and the first time does not count. Readers run in turns.

DDLF is measured in three ways: as NumPy arrays, as the tensors that ``fit`` receives, and with JPEG images in its files
that are decoded while they are read. The output has wall time and processor time. Other programs on the machine change
processor time less.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines.readers import READERS, samples
from benchmarks.measure import ROOT, Spread, table, turns
from ddlf.algorithms.reading_order import portions

MEMORY = 2**28
"""Memory limit of a worker of DDLF for data, in bytes."""
PASSES = 3
OURS = ["DDLF, NumPy", "DDLF, as fit gets it", "DDLF, decoding"]
Found = dict[str, list[tuple[float, float]]]
"""Samples per second of each reader, by the clock and by processor time."""


def arrays(count: int, path: Path) -> None:
    """Write arrays with the shape of handwritten digits."""
    chance = np.random.default_rng(0)
    np.savez(path, x=chance.integers(0, 256, (count, 28, 28), np.uint8), y=np.arange(count) % 10)


def pictures(count: int, path: Path) -> None:
    """Write JPEG pictures: soft noise, some 2 kB each."""
    from PIL import Image

    chance, images = np.random.default_rng(0), []
    for coarse in chance.integers(0, 256, (count, 8, 8, 3), np.uint8):
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC).save(buffer, "jpeg", quality=90)
        images.append(buffer.getvalue())
    ends = np.cumsum([len(image) for image in images])
    np.savez(path, x=np.frombuffer(b"".join(images), np.uint8), ends=ends, y=np.arange(count) % 10)


def write(source: Path, folder: Path, decoding: bool) -> None:
    """Write the same samples as partition files.

    Args:
        source: The file or folder that ``arrays`` or ``pictures`` wrote.
        folder: The folder to write.
        decoding: Whether pictures stay JPEG, and are decoded when they are read; else ``split`` does it.
    """
    from ddlf.data.location import Folder
    from ddlf.data.sources import open_source
    from ddlf.data.split import USUAL_FILE_BYTES, sizes_of, split

    if source.stem == "pictures":
        images = source.with_suffix("")
        if not images.exists():
            for number, (data, label) in enumerate(samples(str(source))):
                (images / str(label)).mkdir(parents=True, exist_ok=True)
                (images / str(label) / f"{number:07}.jpg").write_bytes(data)
        source = images
    opened = open_source(source, ragged="x" if decoding else "")
    row = sum(column.row_bytes for column in opened.columns.values())
    split(opened, Folder(folder), sizes_of(opened.samples, row, file_bytes=USUAL_FILE_BYTES))


def read(name: str, folder: Path, batch: int, passes: int) -> None:
    """Read partition files, and print the same line as ``benchmarks.baselines.readers``."""
    import ddlf.data

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "x": ddlf.data.pixels(sample["x"])}

    data = ddlf.data.open(folder, decode=decode if name == OURS[2] else None)
    begun = _tensors(data, batch) if name == OURS[1] else _batches(data, batch)
    for number in range(passes):
        begin, used, count = time.perf_counter(), time.process_time(), 0
        for x, _ in begun(number):
            count += len(x)
        print(json.dumps([time.perf_counter() - begin, time.process_time() - used, count]), flush=True)


def _order(data: Any, epoch: int) -> Any:
    (portion,) = portions(data.manifest.sizes, [data.manifest.samples], seed=0, epoch=epoch)
    return portion


def _batches(data: Any, batch: int) -> Callable[[int], Iterator[Any]]:
    from ddlf.data.stream import SampleStream

    def begun(epoch: int) -> Iterator[Any]:
        for chunk in SampleStream(data, _order(data, epoch), batch, MEMORY):
            for first in range(0, len(chunk["y"]), batch):
                yield chunk["x"][first : first + batch], chunk["y"][first : first + batch]

    return begun


def _tensors(data: Any, batch: int) -> Callable[[int], Iterator[Any]]:
    import tensorflow as tf

    import ddlf
    from ddlf.training.slot.feed import FileFeed

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    app = ddlf.IApp()
    app.train_data, app.data_memory = data, str(MEMORY)
    feed = FileFeed(app, "train", batch)

    def begun(epoch: int) -> Iterator[Any]:
        feed.set_order(_order(data, epoch))
        return iter(feed.dataset)

    return begun


def child(python: str, script: list[str], *arguments: str) -> list[Any]:
    """Run a process on one core, and return the lines of its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [python, *script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=900,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    if done.returncode:
        raise RuntimeError(f"{arguments[0]} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def python_of(name: str, other_python: str) -> tuple[str, list[str]]:
    """Return the command line of a reader."""
    if name in OURS:
        return sys.executable, ["-m", "benchmarks.reading", "--child"]
    script = str(ROOT / "benchmarks" / "baselines" / "readers.py")
    return (sys.executable if name.startswith("tf.data") else other_python), [script]


def compare(source: Path, folder: Path, names: list[str], options: argparse.Namespace) -> Found:
    """Write the data in the format of each reader, then read in turns."""
    rates_of: Found = {name: [] for name in names}
    for name in OURS[::2]:
        if name in names:
            write(source, folder / name, name == OURS[2])
    for number, name in enumerate(names):
        if name not in OURS:
            child(*python_of(name, options.others), name, "write", str(source), str(folder / str(number)))
    for _, name in turns(names, options.repeats):
        where = folder / ({OURS[1]: OURS[0]}.get(name, name) if name in OURS else str(names.index(name)))
        lines = child(*python_of(name, options.others), name, "read", str(where), str(options.batch), str(PASSES))
        rates = [(count / clock, count / used) for clock, used, count in lines[1:]]
        rates_of[name].append(
            (statistics.median(rate for rate, _ in rates), statistics.median(rate for _, rate in rates))
        )
        print(
            f"{source.stem:<9} {name:<21} {rates_of[name][-1][0]:12,.0f} /s {rates_of[name][-1][1]:12,.0f} /CPU s",
            flush=True,
        )
    return rates_of


def run(options: argparse.Namespace) -> dict[str, Found]:
    """Measure, and print a table for each kind of data."""
    names = [*OURS, *(name for name in READERS if options.others or name.startswith("tf.data"))]
    results = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for make, count in ((arrays, options.arrays), (pictures, options.pictures)):
            if count:
                source = Path(folder, f"{make.__name__}.npz")
                make(count, source)
                those = names if make is pictures else [name for name in names if name != OURS[2]]
                results[make.__name__] = compare(source, Path(folder, f"{make.__name__}-files"), those, options)
    for kind, rates_of in results.items():
        rows = [[kind, "samples/s", "samples/CPU s", "of the first"]]
        for name, rates in rates_of.items():
            clock, used = zip(*rates, strict=True)
            share = statistics.median(used) / statistics.median(rate for _, rate in rates_of[names[0]])
            rows.append([name, Spread.of(clock).text(",.0f"), Spread.of(used).text(",.0f"), f"{share:.3f}"])
        print("\n" + table(rows))
    return results


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", default="", metavar="PYTHON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--arrays", type=int, default=200_000, help="samples of 28x28; 0 for none")
    parser.add_argument("--pictures", type=int, default=20_000, help="JPEG pictures of 64x64; 0 for none")
    parser.add_argument("--folder", help="where the data is written meanwhile")
    parser.add_argument("--quick", action="store_true", help="a tenth of it, once")
    return parser


if __name__ == "__main__":
    if "--child" in sys.argv:
        _, _, name, _, location, size, count = sys.argv
        read(name, Path(location), int(size), int(count))
    else:
        options = arguments().parse_args()
        if options.quick:
            options.arrays, options.pictures, options.repeats = options.arrays // 10, options.pictures // 10, 1
        run(options)
