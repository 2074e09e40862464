"""Counts how often each sample was trained on in accepted updates. Kept on the master; ``IApp.ledger`` shows it.

A worker reports the samples that it trained on (their digest comes with its update). Only merged updates are counted.
So the ledger shows whether a run trained on every sample exactly once in each local epoch, though workers came and
went. If the user's ``train`` sets ``self.indices`` or ends early, the ledger counts the samples that ``replica.fit``
received.
Samples that a ``train`` feeds to the model by itself are invisible: then its partition counts as trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ddlf.algorithms.reading_order import Portion


class Ledger:
    """The counts of one run.

    Args:
        samples: n, the number of samples.

    Attributes:
        counts: Local epochs in which each sample was trained on, in merged updates; int32, shape (n,).
    """

    def __init__(self, samples: int) -> None:
        self.counts = np.zeros(samples, np.int32)

    @property
    def samples(self) -> int:
        """n, the number of samples."""
        return len(self.counts)

    def add(self, indices: np.ndarray[Any, Any], epochs: int, fed: np.ndarray[Any, Any] | None = None) -> None:
        """Count the samples of one slot's merged update.

        Args:
            indices: Indices of the slot's samples, shape (n_j,).
            epochs: Local epochs.
            fed: The samples of all epochs, shape (m,), if they differ from ``indices``.
        """
        if fed is not None:
            indices, epochs = fed, 1
        counts = self.counts.copy()  # the old array may be on its way into a checkpoint
        np.add.at(counts, indices, np.int32(epochs))
        self.counts = counts

    def is_exact(self, epochs: int) -> bool:
        """Return whether each sample was trained on exactly once in each of this number of local epochs."""
        return bool((self.counts == epochs).all())

    def summary(self) -> dict[str, Any]:
        """Return the least, the most and the mean of the counts, and their SHA-256."""
        counts = self.counts
        return {
            "samples": len(counts),
            "least": int(counts.min()),
            "most": int(counts.max()),
            "mean": float(counts.mean()),
            "exact": bool(counts.min() == counts.max()),
            "sha256": hashlib.sha256(counts.astype("<i4").tobytes()).hexdigest(),
        }


class FileLedger:
    """The counts of one run on partition files. Its size does not grow with the number of samples.

    A slot reads a range of the order of an epoch. When the ranges cover an epoch, each sample has been trained on once
    more, and the ranges are dropped.

    Args:
        samples: n, the number of samples.
        sizes: Samples in each file; only ``counts`` needs them.
        times: How often every sample was trained on, without the open ranges.
        open: The ranges of incomplete epochs: a portion for each, and how often it was read.
        skipped: Damaged files that were left out: a portion, how often it was read, and the numbers of the files.

    Attributes:
        at: Returns the data set in another version, by its number; None if there is only one version.
        inexact: Why the samples in the data set are not exactly known; "" if they are.
    """

    def __init__(
        self,
        samples: int,
        sizes: Sequence[int] | np.ndarray[Any, Any] = (),
        times: int = 0,
        open: Sequence[tuple[Portion, int]] = (),
        skipped: Sequence[tuple[Portion, int, Sequence[int]]] = (),
    ) -> None:
        self.inexact = ""
        self.samples = samples
        self.sizes = sizes
        self.at: Callable[[int], Any] | None = None
        self._times = times
        self._open = list(open)
        self._skipped = [(portion, times, tuple(files)) for portion, times, files in skipped]

    def add(
        self,
        indices: Portion,
        epochs: int,
        fed: Sequence[Sequence[int]] | int | None = None,
        skipped: Sequence[int] = (),
    ) -> None:
        """Count the samples of one slot's merged update.

        Args:
            indices: The portion that the slot read.
            epochs: Local epochs.
            fed: The number of epochs in which it read the portion, if not all; or the ranges of it that count.
            skipped: Numbers of the files that were left out.
        """
        if fed is not None and not isinstance(fed, int):
            for begin, end in fed:
                self.add(indices[begin:end], epochs, skipped=skipped)
            return
        epochs = epochs if fed is None else fed
        if not epochs:
            return
        one = replace(indices, again=(), end=indices.begin + len(indices))
        if skipped:
            self._skipped.append((one, epochs, tuple(skipped)))
        alike = [(open, times) for open, times in self._open if _epoch(open) == _epoch(one)]
        if all(times == epochs for _, times in alike) and _is_all([one, *(open for open, _ in alike)], self.samples):
            self._open = [entry for entry in self._open if entry not in alike]
            self._times += epochs
            return
        for number, (open, times) in enumerate(self._open):
            if (
                times == epochs
                and replace(open, end=one.end) == replace(one, begin=open.begin)
                and open.end == one.begin
            ):
                self._open[number] = replace(open, end=one.end), times
                return
        self._open.append((one, epochs))

    @property
    def counts(self) -> np.ndarray[Any, Any]:
        """The counts as in ``Ledger``, int32, shape (n,). Computed on request, 4 bytes for each sample."""
        counts = np.full(self.samples, self._times, np.int32)
        for portion, times in self._open:
            np.add.at(counts, portion.ids(self._sizes_of(portion)), np.int32(times))
        for portion, times, numbers in self._skipped:
            sizes = np.asarray(self._sizes_of(portion), np.int64)
            firsts = np.cumsum(sizes) - sizes
            for files, rows in portion.blocks(sizes):
                left_out = np.isin(files, numbers)
                np.subtract.at(counts, firsts[files[left_out]] + rows[left_out], np.int32(times))
        return counts

    def _sizes_of(self, portion: Portion) -> Any:
        return self.sizes if self.at is None else self.at(portion.version).manifest.sizes

    def is_exact(self, epochs: int) -> bool:
        """Return whether each sample was trained on exactly once in each of this number of local epochs."""
        return self._times == epochs and not self._open and not self._skipped and not self.inexact

    def summary(self) -> dict[str, Any]:
        """Return the same facts as ``Ledger``. The SHA-256 is computed from the ranges."""
        read = [times * len(portion) for portion, times in self._open]
        counts = self.counts if read or self._skipped else np.array([self._times])
        return {
            "samples": self.samples,
            "least": int(counts.min()),
            "most": int(counts.max()),
            "mean": float(counts.mean()) if self._skipped else self._times + sum(read) / self.samples,
            "exact": not read and not self._skipped and not self.inexact,
            **(
                {"skipped": sorted({file + 1 for *_, files in self._skipped for file in files})}
                if self._skipped
                else {}
            ),
            **({"inexact": self.inexact} if self.inexact else {}),
            "sha256": hashlib.sha256(repr(self.to_facts()).encode()).hexdigest(),
        }

    def to_facts(self) -> dict[str, Any]:
        """Return the ledger as JSON data for a checkpoint."""
        open = [[portion.to_message() | {"again": []}, times] for portion, times in self._open]
        facts = {"samples": self.samples, "times": self._times, "open": open}
        left_out = [[portion.to_message() | {"again": []}, times, files] for portion, times, files in self._skipped]
        return facts | ({"skipped": left_out} if left_out else {})

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> FileLedger:
        """Return the stored ledger, without the sizes of the files."""
        open = [(Portion.from_message(portion), times) for portion, times in facts["open"]]
        skipped = [(Portion.from_message(portion), *more) for portion, *more in facts.get("skipped", ())]
        return cls(facts["samples"], times=facts["times"], open=open, skipped=skipped)


def _is_all(portions: Sequence[Portion], samples: int) -> bool:
    """Return whether ranges of one epoch cover all of it."""
    reached = 0
    for begin, length in sorted((portion.start + portion.begin, len(portion)) for portion in portions):
        if begin != reached:
            return False
        reached += length
    return reached == samples


def _epoch(portion: Portion) -> tuple[Any, ...]:
    """Return the facts that identify the order of an epoch."""
    return portion.shuffle, portion.seed, portion.epoch, portion.slots, portion.version
