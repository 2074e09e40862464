"""Measure how well byte compressors compress trained weights and an update: ``python -m benchmarks.compressors``.

The published table compares none, bz2, gzip, lz4, lzma and zlib on the weights of the CNN. This benchmark adds zstd and
these inputs:

- an *update*: the change of the weights by one local epoch, which a worker sends back in each round;
- the int8 codes of the update by DDLF's codec, to compare a codec with a compressor;
- a *byte shuffle*: the first bytes of all float32 values, then all second bytes, and so on. So the bytes with sign and
  exponent, which often repeat, are neighbours.

Speeds are in MB/s of uncompressed bytes, for one thread, the best of several runs. ``pip install ddlf[bench]`` installs
lz4 and zstandard.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import importlib
import lzma
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.measure import table
from benchmarks.workload import APPS, Weights, Workload, batches

Compressor = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def compressors() -> dict[str, Compressor]:
    """Return the compressors by name, with the default level of their library. It leaves out missing libraries."""
    compressors: dict[str, Compressor] = {
        "none": (lambda data: data, lambda data: data),
        "bz2": (bz2.compress, bz2.decompress),
        "gzip": (gzip.compress, gzip.decompress),
        "lzma": (lzma.compress, lzma.decompress),
        "zlib": (zlib.compress, zlib.decompress),
    }
    for name, module in (("lz4", "lz4.frame"), ("zstd", "zstandard")):
        try:
            library = importlib.import_module(module)
        except ImportError:
            print(f"{name} left out: {module.partition('.')[0]} is not installed")
            continue
        compressors[name] = (library.compress, library.decompress)
    return dict(sorted(compressors.items(), key=lambda item: (item[0] != "none", item[0])))


def shuffled(data: bytes, width: int) -> bytes:
    """Return the first bytes of all values of ``width`` bytes, then all second bytes, and so on."""
    return np.frombuffer(data, np.uint8).reshape(-1, width).T.tobytes()


def unshuffled(data: bytes, width: int) -> bytes:
    """The inverse of ``shuffled``."""
    return np.frombuffer(data, np.uint8).reshape(width, -1).T.tobytes()


def train(workload: Workload) -> tuple[Weights, Weights]:
    """Train for two epochs.

    Returns:
        The weights after the first epoch, and the update of the second: weights before minus after.
    """
    app = workload.load()
    data = batches(app.x_train, app.y_train, workload.batch_size, shuffle_seed=workload.seed)
    app.model.fit(data, shuffle=False, verbose=0)
    before = app.model.get_weights()
    app.model.fit(data, shuffle=False, verbose=0)
    return before, [w - after for w, after in zip(before, app.model.get_weights(), strict=True)]


def int8_codes(update: Weights) -> bytes:
    """Return the bytes that DDLF's int8 codec sends for an update."""
    from ddlf.algorithms.codec import CODEC
    from ddlf.algorithms.encoding import encode_update

    encoded, _ = encode_update(CODEC.read("int8"), update, [False] * len(update))
    return b"".join(array.tobytes() for payload in encoded["payloads"] for array in payload.values())


def measured(subject: str, data: bytes, width: int, repeats: int) -> Iterator[list[str]]:
    """Return a row for each compressor, and a row with a byte shuffle if values are wider than a byte."""
    for name, (compress, decompress) in compressors().items():
        for shuffle in (False, True) if width > 1 and name != "none" else (False,):
            into = (lambda d, c=compress: c(shuffled(d, width))) if shuffle else compress
            out = (lambda d, c=decompress: unshuffled(c(d), width)) if shuffle else decompress
            packed = into(data)
            assert out(packed) == data
            speeds = [
                len(data) / 1e6 / best_s(call, input_bytes, repeats)
                for call, input_bytes in ((into, data), (out, packed))
            ]
            yield [
                subject,
                f"{name} + shuffle" if shuffle else name,
                f"{len(packed):,}",
                f"{100 * len(packed) / len(data):.1f}",
                *("-" if name == "none" else f"{speed:,.0f}" for speed in speeds),
            ]


def best_s(function: Callable[[bytes], bytes], data: bytes, repeats: int) -> float:
    """The shortest time of several calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function(data)
        times.append(time.perf_counter() - begin)
    return min(times)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compressors", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--data", choices=list(APPS), default="mnist")
    parser.add_argument("--samples", type=int, default=30_000, metavar="N", help="of a local epoch; default 30,000")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="default 5")
    options = parser.parse_args(arguments)
    weights, update = train(Workload(data=options.data, samples=options.samples))
    rows: list[list[str]] = [["what", "compressor", "bytes", "%", "MB/s in", "MB/s out"]]
    for subject, data, width in (
        ("weights, float32", _joined(weights), 4),
        ("update, float32", _joined(update), 4),
        ("update, int8", int8_codes(update), 1),
    ):
        rows += measured(subject, data, width, options.repeats)
    print(table(rows))


def _joined(arrays: Sequence[np.ndarray[Any, Any]]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


if __name__ == "__main__":
    main()
