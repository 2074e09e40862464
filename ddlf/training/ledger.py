"""How often each sample has been trained on, of what counts. Kept on the master; ``IApp.ledger`` shows it.

A worker says which samples it trained on (their digest comes with its update), and only a slot whose update was merged is counted. So the ledger
shows that a run trained on every sample exactly once in each local epoch, though workers came and went. What ``replica.fit`` was given otherwise,
by an own ``train`` that sets ``self.indices`` or ends early, is counted as it was. What a ``train`` feeds by itself nobody sees: its partition is
counted as trained on.
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
        samples: n.

    Attributes:
        counts: Local epochs in which each sample was trained on, of merged updates; int32, shape (n,).
    """

    def __init__(self, samples: int) -> None:
        self.counts = np.zeros(samples, np.int32)

    @property
    def samples(self) -> int:
        """n."""
        return len(self.counts)

    def add(self, indices: np.ndarray[Any, Any], epochs: int, fed: np.ndarray[Any, Any] | None = None) -> None:
        """Count what one slot was trained on, whose update was merged.

        Args:
            indices: Indices of its samples, shape (n_j,).
            epochs: Local ones.
            fed: What it was given instead, once for each epoch, shape (m,); None if it was that.
        """
        if fed is not None:
            indices, epochs = fed, 1
        counts = self.counts.copy()  # the old array may be on its way into a checkpoint
        np.add.at(counts, indices, np.int32(epochs))
        self.counts = counts

    def is_exact(self, epochs: int) -> bool:
        """Whether each sample was trained on exactly once in each of so many local epochs."""
        return bool((self.counts == epochs).all())

    def summary(self) -> dict[str, Any]:
        """The least, the most and the mean of the counts, and their SHA-256."""
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
    """The counts of one run on partition files: some numbers, however many samples there are.

    What is read is a range of places in the order of an epoch. When the ranges of an epoch are all of it, each sample has been trained on once more,
    and they are done with.

    Args:
        samples: n.
        sizes: Samples in each file; only ``counts`` needs them.
        times: How often every sample was trained on, beside what is open.
        open: What was read in epochs that are not all read: a portion for each range, and how often.
        skipped: Of what was read, damaged files that were left out: a portion, how often, and the numbers of the files.

    Attributes:
        at: Gives the data set in another version, by its number; None where there is one only.
        inexact: Why nobody knows which samples those were; empty where that is known.
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
        """Count what one slot was trained on, whose update was merged.

        Args:
            indices: What it read.
            epochs: Local ones.
            fed: In how many it was given that, if not in all; or the ranges of it that count.
            skipped: Numbers of files that were left out of it.
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
        """As of ``Ledger``; made when it is asked for, 4 bytes for each sample."""
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
        """As of ``Ledger``."""
        return self._times == epochs and not self._open and not self._skipped and not self.inexact

    def summary(self) -> dict[str, Any]:
        """As of ``Ledger``; the SHA-256 is of the counts as ranges."""
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
        """As it is stored."""
        open = [[portion.to_message() | {"again": []}, times] for portion, times in self._open]
        facts = {"samples": self.samples, "times": self._times, "open": open}
        left_out = [[portion.to_message() | {"again": []}, times, files] for portion, times, files in self._skipped]
        return facts | ({"skipped": left_out} if left_out else {})

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> FileLedger:
        """As it was stored; without the sizes of the files."""
        open = [(Portion.from_message(portion), times) for portion, times in facts["open"]]
        skipped = [(Portion.from_message(portion), *more) for portion, *more in facts.get("skipped", ())]
        return cls(facts["samples"], times=facts["times"], open=open, skipped=skipped)


def _is_all(portions: Sequence[Portion], samples: int) -> bool:
    """Whether ranges of one epoch are all of it."""
    reached = 0
    for begin, length in sorted((portion.start + portion.begin, len(portion)) for portion in portions):
        if begin != reached:
            return False
        reached += length
    return reached == samples


def _epoch(portion: Portion) -> tuple[Any, ...]:
    """What names the order of an epoch."""
    return portion.shuffle, portion.seed, portion.epoch, portion.slots, portion.version
