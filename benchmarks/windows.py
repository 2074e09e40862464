"""Measure how well each ``shuffle`` of partition files mixes MNIST, if the source is sorted by label.

    python -m benchmarks.windows [--epochs 5] [--seeds 3] [--files 60] [--samples 60000] [--only "arrays,split window:8"]
    python -m benchmarks.windows --seeds 0        # without training

The benchmark first sorts the samples by label. ``arrays`` has them in memory and shuffles all of them. ``split`` has
files that ``ddlf data split`` has shuffled, as it does by default. ``as they lie`` has files of ``--shuffle none``,
which were never shuffled.

The first figures are about the batches of the first of two slots in the first epoch: from how many files the samples of
a batch come, the entropy of their labels in bits (ten equal shares have 3.32), and the rank correlation (Spearman)
between a sample's position in the epoch and in the source. The accuracy is that of the published CNN on two workers,
with the same initial weights within a seed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import ddlf
import ddlf.data
from apps.mnist_cnn import MNISTCNN
from benchmarks.measure import mean_and_deviation, some_of, table
from ddlf import Cluster
from ddlf.algorithms.reading_order import portions
from ddlf.data.location import Folder
from ddlf.data.sources import open_source
from ddlf.data.split import split

BATCH, SLOTS = 64, 2
WHOLE = "arrays"
MIXED, LYING = "split", "as they lie"
CASES = [
    WHOLE,
    f"{MIXED} window:8",
    f"{MIXED} window:1",
    f"{MIXED} none",
    f"{LYING} global",
    f"{LYING} window:30",
    f"{LYING} window:8",
    f"{LYING} window:1",
    f"{LYING} none",
]


class Sorted(MNISTCNN):
    """The published CNN on sorted digits.

    Attributes:
        case: One of ``CASES``.
        folder: Where the data sets and the sorted arrays are.
    """

    verbose = False
    case, folder = WHOLE, ""

    async def load_dataset(self) -> None:
        """Load the arrays, or open the data set of the case."""
        arrays = np.load(Path(self.folder, "sorted.npz"))
        self.x_test, self.y_test = ddlf.load_mnist()[1]
        if self.case == WHOLE:
            self.x_train, self.y_train = arrays["x"], arrays["y"]
        else:
            self.train_data = ddlf.data.open(Path(self.folder, self.case.rpartition(" ")[0]))

    async def create_model(self) -> None:
        """Make a model with the first weights of a seed."""
        import keras

        keras.utils.set_random_seed(self.seed)
        await super().create_model()


def make(folder: Path, samples: int, files: int) -> np.ndarray[Any, Any]:
    """Write the sorted digits as arrays and as both data sets. Return their labels in the order of the source."""
    (x, y), _ = ddlf.load_mnist()
    labels = y[:samples].argmax(axis=1)
    order = np.argsort(labels, kind="stable")
    np.savez(folder / "sorted.npz", x=x[order], y=y[order])
    sizes = [len(part) for part in np.array_split(order, files)]
    for name, mixed in {MIXED: True, LYING: False}.items():
        split(open_source(folder / "sorted.npz"), Folder(folder / name), sizes, shuffle=mixed)
    return np.asarray(labels[order])


def order_of(case: str, folder: Path, labels: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Return facts about the first slot in the first epoch: mean number of files in a batch, mean entropy of its labels in
    bits, and rank correlation with the source.
    """
    name, _, shuffle = ("split", "", "global") if case == WHOLE else case.rpartition(" ")
    data = ddlf.data.open(folder / name)
    sizes, samples = data.manifest.sizes, len(labels)
    ids = portions(sizes, [samples - samples // SLOTS, samples // SLOTS], shuffle, seed=0, epoch=0)[0].ids(sizes)
    files = np.searchsorted(np.cumsum(sizes), ids, side="right")
    # The source is sorted by label, so the label of a sample of the mixed files gives its place in the source.
    source = data["y"].argmax(axis=1)[ids]
    batches = range(0, len(ids) - BATCH + 1, BATCH)
    shares = [np.bincount(source[begin : begin + BATCH], minlength=10) / BATCH for begin in batches]
    entropy = np.mean([-np.sum(share[share > 0] * np.log2(share[share > 0])) for share in shares])
    count = np.mean([len(set(files[begin : begin + BATCH].tolist())) for begin in batches])
    return float(count), float(entropy), correlation(source)


def correlation(values: np.ndarray[Any, Any]) -> float:
    """Return Spearman's rank correlation of values with their indices. Equal values share their mean rank."""
    _, value_indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[value_indices]
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])


async def accuracy(cluster: Cluster, case: str, folder: Path, epochs: int, seed: int) -> float:
    """Return the test accuracy after all epochs."""
    app = Sorted(cluster)
    app.case, app.folder, app.seed = case, str(folder), seed
    if case != WHOLE:
        app.shuffle = case.rpartition(" ")[2]
    await app.train_sync(master_epochs=epochs, batch_size=BATCH)
    assert app.ledger.is_exact(epochs)
    return float((await app.evaluate_model())["accuracy"])


async def run(options: argparse.Namespace) -> dict[str, list[float]]:
    """Train each case with each seed, in turns, and print a table; returns the accuracies of each case."""
    accuracies_of: dict[str, list[float]] = {case: [] for case in options.only}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        labels = make(folder, options.samples, options.files)
        orders = {case: order_of(case, folder, labels) for case in options.only}
        if options.seeds:
            async with Cluster.local(SLOTS) as cluster:
                for seed in range(options.seeds):
                    for case, values in accuracies_of.items():
                        values.append(await accuracy(cluster, case, folder, options.epochs, seed))
                        print(f"seed {seed}  {case:<22} {values[-1]:.4f}", flush=True)
    base = accuracies_of.get(WHOLE)
    rows = [["files", "files in a batch", "entropy of labels", "rank correlation", "accuracy %", "points to arrays"]]
    for case, values in accuracies_of.items():
        count, entropy, ranks = orders[case]
        shown = mean_and_deviation([100 * value for value in values]) if values else "-"
        difference = f"{100 * (statistics.mean(values) - statistics.mean(base)):+.2f}" if values and base else "-"
        rows.append([case, f"{count:.1f}", f"{entropy:.2f}", f"{ranks:+.2f}", shown, difference])
    print(
        f"\n{options.samples} samples in {options.files} files, {SLOTS} slots, {options.epochs} epochs, {options.seeds} seeds"
    )
    print(table(rows))
    return accuracies_of


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--files", type=int, default=60)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--only", type=some_of(CASES), default=CASES)
    return parser


if __name__ == "__main__":
    asyncio.run(run(arguments().parse_args()))
