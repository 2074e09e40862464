"""Find near duplicates between the training and the test part of CIFAR-10 and MNIST.

    python -m benchmarks.advice.pictures [--sheet FILE.png]

Run it on one core (``taskset -c 0``, ``OMP_NUM_THREADS=1``). The sheet shows 100 pairs of CIFAR-10, drawn with a fixed
seed. The training image is on the left, the test image on the right.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import table
from ddlf.data.datasets import load_cifar10, load_mnist
from ddlf.extras.advice import arrays

DRAWN, IN_A_ROW, SIDE = 100, 10, 96


def sheet(x: Any, other: Any, pairs: Sequence[tuple[int, int]], path: Path) -> None:
    """Draw some of the pairs, and write them as a picture.

    Args:
        x: Training pictures, of shape (n, 32, 32, 3), from -0.5 to 0.5.
        other: Test pictures, of the same shape.
        pairs: Pairs of indices, of a training picture and a test picture.
        path: The file to write.
    """
    from PIL import Image

    some = np.sort(np.random.default_rng(0).choice(len(pairs), min(DRAWN, len(pairs)), replace=False))
    whole = Image.new("RGB", (IN_A_ROW * (2 * SIDE + 12), -(-len(some) // IN_A_ROW) * (SIDE + 6)), "white")
    for index, number in enumerate(some):
        row, column = divmod(index, IN_A_ROW)
        for offset, picture in ((0, x[pairs[number][0]]), (SIDE, other[pairs[number][1]])):
            image = Image.fromarray(((np.asarray(picture) + 0.5) * 255).astype("uint8")).resize((SIDE, SIDE))
            whole.paste(image, (column * (2 * SIDE + 12) + offset, row * (SIDE + 6)))
    whole.save(path)


def main(argv: Sequence[str] | None = None) -> dict[str, int]:
    """Print the table; returns how many there are of each data set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sheet", type=Path)
    options = parser.parse_args(argv)
    arrays.NEAR_SHOWN = 1_000_000
    rows, counts = [["data", "pictures of the test", "near duplicates", "s"]], {}
    for name, load in (("CIFAR-10", load_cifar10), ("MNIST", load_mnist)):
        (x, _), (other, _) = load()
        begin = time.monotonic()
        duplicates = arrays.near_duplicates(x, other)
        assert duplicates is not None
        rows.append([name, f"{duplicates['of']:,}", str(duplicates["count"]), f"{time.monotonic() - begin:.1f}"])
        counts[name] = duplicates["count"]
        if name == "CIFAR-10" and options.sheet is not None:
            sheet(x, other, duplicates["pairs"], options.sheet)
    print(table(rows))
    return counts


if __name__ == "__main__":
    main()
