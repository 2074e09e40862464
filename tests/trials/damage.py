"""Flip bits and truncate files of a data set, and check that DDLF names each damaged file and trains on none.

    python -m tests.trials.damage [--flips 500] [--cuts 200] [--seed 0]

The damaged files include the manifest. The data set has fixed and ragged columns. A stream reads it like in training, by
turns into memory and mapped from the disk. The exit code is 1 if DDLF did not name a damaged file, or if it returned a
sample of a damaged file.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

import ddlf.data
from ddlf.algorithms.reading_order import portions
from ddlf.data.location import Folder
from ddlf.data.manifest import NAME
from ddlf.data.sources import open_source
from ddlf.data.split import split
from ddlf.data.stream import SampleStream
from ddlf.errors import DatasetError
from tests.trials.options import read_options

SAMPLES, FILES = 120, 6


def data_set(folder: Path) -> Path:
    """Write a small data set below a folder, and return its place."""
    columns = {"x": [[n] * (n % 7) for n in range(SAMPLES)], "y": range(SAMPLES), "z": np.arange(SAMPLES) / 3}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
    split(open_source(folder / "a.parquet", ragged="x"), Folder(folder / "place"), [SAMPLES // FILES] * FILES)
    return folder / "place"


def harmless(data_path: Path, path: Path, memory: int, seed: int) -> str:
    """Return a problem as a sentence; empty if the error names the damaged file and the stream returned none of its samples."""
    samples: list[int] = []
    try:
        data = ddlf.data.open(data_path)
        (portion,) = portions(data.manifest.sizes, [SAMPLES], "window:2", seed=seed, epoch=0)
        for chunk in SampleStream(data, portion, 4, memory):
            samples += chunk["y"].tolist()
    except DatasetError as error:
        if path.name not in error.message:
            return f"{path.name} is not named: {error.message}"
        number = -1 if path.name == NAME else int(path.stem)
        if path.name == NAME:
            return f"{len(samples)} samples came out" if samples else ""
        first = data.manifest.files[number].first
        ids = portion.ids(data.manifest.sizes)[: len(samples)]
        bad = [sample for sample in ids.tolist() if first <= sample < first + data.manifest.files[number].samples]
        return f"{len(bad)} samples of {path.name} came out" if bad else ""
    return f"DDLF did not notice that {path.name} is damaged"


def trial(flips: int, cuts: int, seed: int = 0) -> list[str]:
    """Flip bits and truncate files, one at a time. Return the problems."""
    chance, wrong = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        data_path = data_set(Path(folder))
        paths = [data_path / NAME, *sorted(data_path.glob("v0001/*"))]
        for number in range(flips + cuts):
            path = paths[number % len(paths)]
            content = path.read_bytes()
            if number < flips:
                harmed = bytearray(content)
                harmed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            else:
                harmed = bytearray(content[: chance.randrange(len(content))])
            path.write_bytes(harmed)
            if problem := harmless(data_path, path, (3000, 10**6)[number % 2], number):
                wrong.append(problem)
            path.write_bytes(content)
    return wrong


def main() -> int:
    """Run the trial and print its result. Return the exit code."""
    options = read_options(__doc__, flips=500, cuts=200, seed=0)
    wrong = trial(options.flips, options.cuts, options.seed)
    print("\n".join(wrong))
    print(f"{options.flips} flipped bits, {options.cuts} truncations: {len(wrong)} not named, or trained on")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
