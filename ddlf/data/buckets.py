"""Where each sample of a data set goes when all are mixed: the chance of the two passes of ``split``, and the samples meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlf.data.manifest import MAX_CLASSES
from ddlf.data.rows import Rows
from ddlf.data.unfinished import Heaps
from ddlf.errors import ConfigError

Numbers = npt.NDArray[np.unsignedinteger[Any]]

PIECE = 1024
"""Samples that are taken out of a heap at a time."""
SPLIT = 4
"""What chance is used for; ``algorithms/reading_order.py`` has the other streams."""
NOTED_S = 20.0
"""How much of the first pass is done again at most, when it was broken off."""


class Buckets:
    """Where each sample goes.

    Args:
        samples: All of them.
        buckets: How many there are.
        room: Samples that a heap may have.
        seed: Seed of the order.
        stratify: Column of labels, of each of which every bucket gets as many but for one; empty for pure chance.
    """

    def __init__(self, samples: int, buckets: int, room: int, seed: int, stratify: str = "") -> None:
        self._samples, self._buckets, self._seed, self._stratify = samples, buckets, seed, stratify
        self._dealers: dict[int, _Dealer] = {}
        each = samples / buckets
        fit = 1
        while fit < buckets and (fit + 1) * each + 6 * ((fit + 1) * each) ** 0.5 <= room:  # 6 standard deviations
            fit += 1
        if samples <= room:
            fit = buckets
        self.heaps = [range(first, min(first + fit, buckets)) for first in range(0, buckets, fit)]

    def _thrown(
        self, pieces: Iterable[Rows], first: int = 0, labels: Iterable[tuple[int, int]] = ()
    ) -> Iterator[tuple[Rows, Numbers]]:
        """Each piece with the bucket of each of its samples.

        Args:
            pieces: Samples in order.
            first: How many were thrown before.
            labels: Each label of these, and how many had it.
        """
        chance = _chance(self._seed, 0)
        # One draw of 64 bits for each sample: the same, however many come at a time.
        chance.bit_generator.advance(first)  # type: ignore[attr-defined]
        self._dealers = {}
        for label, count in labels:
            self._dealer(label).take(count)
        for rows in pieces:
            if self._stratify:
                yield rows, self._dealt_evenly(rows[self._stratify])
            else:
                yield rows, (chance.random(len(rows)) * self._buckets).astype(np.uint32)

    def _dealer(self, label: int) -> _Dealer:
        if label not in self._dealers:
            if len(self._dealers) >= MAX_CLASSES:
                raise ConfigError(f"--stratify {self._stratify}: there are more than {MAX_CLASSES:,} labels")
            self._dealers[label] = _Dealer(self._buckets, _chance(self._seed, 2, label % 2**64))
        return self._dealers[label]

    def _dealt_evenly(self, labels: npt.NDArray[Any]) -> Numbers:
        buckets = np.empty(len(labels), np.uint32)
        values, which = np.unique(labels, return_inverse=True)
        for number, label in enumerate(values.tolist()):
            mine = which == number
            buckets[mine] = self._dealer(int(label)).take(int(mine.sum()))
        return buckets

    def held(self, pieces: Iterable[Rows], kind: np.dtype[Any]) -> tuple[Rows, Numbers]:
        """All samples and their buckets in memory."""
        whole, whose, done = np.empty(self._samples, kind), np.empty(self._samples, np.uint32), 0
        for rows, buckets in self._thrown(pieces):
            whole[done : done + len(rows)], whose[done : done + len(rows)] = rows, buckets
            done += len(rows)
        return whole, whose

    def deal(self, pieces: Iterable[Rows], heaps: Heaps) -> None:
        """Throw the samples that are not there yet on their heaps, which are on a disk."""
        done, noted, fit = heaps.samples, time.monotonic(), len(self.heaps[0])
        for rows, buckets in self._thrown(pieces, done, heaps.labels.items()):
            heap = buckets // fit
            order = np.argsort(heap, kind="stable")
            ends = np.searchsorted(heap[order], np.arange(len(self.heaps) + 1))
            both = np.empty(len(rows), heaps.kind)
            both["row"], both["bucket"] = rows, buckets
            for number in range(len(self.heaps)):
                heaps.throw(number, both[order[ends[number] : ends[number + 1]]])
            done += len(rows)
            if (whole := done == self._samples) or time.monotonic() - noted >= NOTED_S:
                heaps.note(done, {label: each.taken for label, each in self._dealers.items()}, whole=whole)
                noted = time.monotonic()

    def taken_up(self, heaps: Heaps, start: int) -> Iterator[Rows]:
        """The shuffled samples of all heaps behind the first ``start``. A heap is removed when its last one was taken, and the next asked for."""
        begin = 0
        for number in range(len(self.heaps)):
            end = begin + heaps.length(number)
            if end > start:
                both = heaps.read(number)
                yield from behind(start - begin, self.shuffled(number, both["row"], both["bucket"]))
            begin = end

    def shuffled(self, heap: int, rows: Rows, buckets: Numbers) -> Iterator[Rows]:
        """The samples of a heap, those of each bucket by chance; some at a time."""
        order = np.argsort(buckets, kind="stable")
        ends = np.searchsorted(buckets[order], np.arange(self.heaps[heap].start, self.heaps[heap].stop + 1))
        for bucket, start, stop in zip(self.heaps[heap], ends, ends[1:], strict=False):
            _chance(self._seed, 1, bucket).shuffle(order[start:stop])
            for first in range(start, stop, PIECE):
                yield rows[order[first : min(first + PIECE, stop)]]


class _Dealer:
    """Gives the numbers of buckets, each once in an order by chance, then in another one, and so on."""

    def __init__(self, buckets: int, chance: np.random.Generator) -> None:
        self._buckets, self._chance = buckets, chance
        self._left = np.empty(0, np.uint32)
        self.taken = 0

    def take(self, count: int) -> Numbers:
        """The next so many."""
        self.taken += count
        rounds = range(-(-(count - len(self._left)) // self._buckets))
        parts = [self._left, *(self._chance.permutation(self._buckets).astype(np.uint32) for _ in rounds)]
        whole = np.concatenate(parts)
        self._left = whole[count:]
        return whole[:count]


def behind(first: int, pieces: Iterable[Rows]) -> Iterator[Rows]:
    """The pieces without so many of the first rows."""
    for rows in pieces:
        yield rows[max(first, 0) :]
        first -= len(rows)


def _chance(seed: int, *numbers: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed], spawn_key=(SPLIT, *numbers))))
