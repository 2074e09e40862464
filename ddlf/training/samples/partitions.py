"""The samples and the planned steps of each slot in a round. Runs on the master.

``Progress.span`` gives the part of an epoch that a round has.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ddlf.algorithms.partition import Indices, equal_sizes, partition, shuffled, sizes_by_speed
from ddlf.algorithms.partitioners import Labels, Owners, Partition, counts_of, labels_of
from ddlf.algorithms.reading_order import SHUFFLE, Global, Numbers, Portion, SlotSamples, pieces, portions
from ddlf.errors import ConfigError
from ddlf.events import DataPartitioned
from ddlf.training.context import App
from ddlf.training.progress import Progress, Span
from ddlf.training.slot.optimizers import Steps

LEAST_SHARE = 8
"""The smallest part of a slot is an equal share divided by this number, if an epoch of files has several rounds.

So even a slow slot has samples in each round.
"""
ORDERS = 4
"""Number of orders of the samples that are kept; each takes 1 to 8 bytes a sample."""
IN_A_THREAD = 100_000
"""This many samples take a millisecond to shuffle. Larger numbers are shuffled on a thread."""


class Partitions(Protocol):
    """Chooses the samples of each slot in each round of a run."""

    async def order(self, number: int) -> object:
        """Prepare the order of the samples of a round or an epoch, from 0, if this takes time."""

    async def of_round(
        self, span: Span, slots: int, speeds: Sequence[float | None] = (), batch_size: int = 1
    ) -> Sequence[SlotSamples]:
        """Return the samples of each slot in a round. No two slots share a sample, and together they have all of them.

        Args:
            span: The samples of the round.
            slots: K, the number of slots.
            speeds: Samples per second of each slot, so that all end together; if one is unknown, partitions are equal.
            batch_size: Smallest size of a partition that follows speeds, if possible.
        """


class ArrayPartitions:
    """Divides the samples of one run among its slots (shares of the training), in each round.

    Args:
        samples: n, the number of samples.
        seed: Seed of the orders.
        owners: The slot of each sample in the whole run; None if each round cuts new parts.
    """

    def __init__(self, samples: int, seed: int, owners: Owners | None = None) -> None:
        self._samples = samples
        self._owners = owners
        self._seed = seed
        self._orders: dict[int, asyncio.Future[Indices]] = {}

    async def order(self, number: int) -> Indices:
        """Return all samples in the order of a round or an epoch, from 0.

        The last few orders are kept, since several rounds, or slots of one round, need the same one.
        """
        if number not in self._orders:
            for old in list(self._orders)[: 1 - ORDERS]:
                del self._orders[old]
            self._orders[number] = asyncio.ensure_future(self._shuffled(number))
        return await asyncio.shield(self._orders[number])

    async def of_round(
        self, span: Span, slots: int, speeds: Sequence[float | None] = (), batch_size: int = 1
    ) -> list[Indices]:
        """Return the samples of each slot, with the arguments of ``Partitions.of_round``.

        If there are fewer samples than slots, the first slots have one each.
        """
        order = (await self.order(span.order))[span.begin : span.end]
        if self._owners is not None:
            owners = self._owners[order]
            return [order[owners == slot] for slot in range(slots)]
        samples = len(order)
        if samples < self._samples:  # if the whole data set has fewer samples than slots, other code refuses it
            slots = min(slots, samples)
        measured = [speed for speed in speeds[:slots] if speed is not None]
        if len(measured) < slots:
            return partition(order, equal_sizes(samples, slots))
        return partition(order, sizes_by_speed(samples, measured, minimum=min(batch_size, samples // slots)))

    async def _shuffled(self, number: int) -> Indices:
        if self._samples < IN_A_THREAD:
            return shuffled(self._samples, self._seed, number)
        return await asyncio.to_thread(shuffled, self._samples, self._seed, number)


class FilePartitions:
    """Divides the samples of partition files among the slots of one run, in each round.

    Args:
        sizes: Samples in each file.
        seed: Seed of the orders.
        shuffle: The shuffle rule for rows, as text.
        at: Returns the same data set in another version, by its number.
    """

    def __init__(self, sizes: Numbers, seed: int, shuffle: str, at: Callable[[int], Any] | None = None) -> None:
        self._sizes, self._seed, self._shuffle, self._at = sizes, seed, shuffle, at
        self._samples = int(sizes.sum())
        self._whole: tuple[Any, list[Portion]] = None, []  # the parts of the epoch requested last

    async def order(self, number: int) -> None:
        """Do nothing. ``ArrayPartitions`` needs the order of all samples in memory, but a portion of files does not."""

    async def of_round(
        self, span: Span, slots: int, speeds: Sequence[float | None] = (), batch_size: int = 1
    ) -> list[Portion]:
        """Return the portion of the files' samples that each slot gets in a round, with the arguments of ``Partitions.of_round``.

        With a global shuffle, parts are cut like parts of arrays. Otherwise a slot reads the same
        share of its part of the epoch as the round has of the epoch.
        """
        mixed = isinstance(SHUFFLE.read(self._shuffle), Global)
        samples = span.end - span.begin if mixed else self._samples
        if samples < self._samples:
            slots = min(slots, samples)
        measured = [speed for speed in speeds[:slots] if speed is not None]
        if len(measured) < slots:
            shares = equal_sizes(samples, slots)
        else:
            shares = sizes_by_speed(samples, measured, minimum=min(batch_size, samples // slots))
        if mixed:
            more: dict[str, Any] = dict(shuffle=self._shuffle, seed=self._seed, epoch=span.order, slots=slots)
            more["version"] = span.version
            stops = [span.begin + int(end) for end in np.cumsum(shares)]
            return [Portion(start=stop - share, stop=stop, **more) for stop, share in zip(stops, shares, strict=True)]
        key = span.order, shares, span.version
        if self._whole[0] != key:
            manifest = None if self._at is None else self._at(span.version).manifest
            sizes, stays = (self._sizes, False) if manifest is None else (manifest.sizes, manifest.hosts > 0)
            order = dict(seed=self._seed, epoch=span.order, version=span.version)
            self._whole = key, portions(sizes, shares, self._shuffle, **order, stays=stays)
        whole = self._whole[1]
        return whole if span.end - span.begin == self._samples else pieces(whole, span.begin, span.end)


def partitions_of(samples: int, seed: int, owners: Owners | None, data: Any, shuffle: str) -> Partitions:
    """Return the object that chooses each slot's samples, for arrays or for partition files.

    Args:
        samples: n, the number of samples.
        seed: Seed of the orders.
        owners: The slot of each sample in the whole run; None if each round cuts new parts.
        data: The data set of partition files; None for arrays.
        shuffle: The shuffle rule for rows of files, as text.
    """
    return (
        ArrayPartitions(samples, seed, owners)
        if data is None
        else FilePartitions(data.manifest.sizes, seed, shuffle, data.in_version)
    )


def owners_of(app: App, rule: Partition, samples: int, slots: int, seed: int) -> Owners | None:
    """Assign each sample to a slot for the whole run, by a rule. Return None if each round divides the samples again.

    Raises:
        ConfigError: The rule cannot be used with these samples, slots and labels.
    """
    try:
        return rule.owners(samples, slots, seed, _labels(app, rule))
    except ConfigError as error:
        raise ConfigError(f"partition {str(rule)!r}: {error.message}", hint=error.hint) from None


def partitioned(app: App, rule: Partition, owners: Owners, slots: int) -> DataPartitioned:
    """Return the event that tells the user how the samples are distributed over the slots."""
    labels = counts_of(owners, _labels(app, rule), slots) if rule.goes_by_labels else []
    return DataPartitioned(
        partition=str(rule),
        samples=tuple(np.bincount(owners, minlength=slots).tolist()),
        labels=tuple({str(label): count for label, count in counts.items()} for counts in labels),
    )


def _labels(app: App, rule: Partition) -> Labels:
    if not rule.goes_by_labels:
        return np.empty(0, np.int64)
    if getattr(app, "y_train", None) is None:
        raise ConfigError(
            "it depends on labels, but the master has no y_train",
            hint="set it in load_dataset, or use partition='power:1', which needs no labels",
        )
    return labels_of(app.y_train)


class PlannedSteps:
    """The number of steps that each slot's optimizer is planned to make, for learning rate schedules.

    The steps are counted once for each plan of the run.

    Parts by speed have unknown sizes in advance and count as equal here. A worker stretches its actual steps to the
    planned ones.

    Args:
        progress: Has the plan.
        batch_size: Samples in a batch of each slot.
    """

    def __init__(self, progress: Progress, batch_size: int) -> None:
        self._progress, self._batch_size = progress, batch_size
        self._plan: tuple[object, ...] = ()
        self._owned: list[int] | None = None  # samples of each slot, if they are the same in the whole run
        self._before: dict[int, list[int]] = {}  # slot -> the steps before each round, and after the last one

    def of_round(self, slot: int, number: int) -> Steps:
        """Return the planned steps of a slot's optimizer in a round, both numbered from 0."""
        progress = self._progress
        # These facts identify the plan. The completed rounds of an earlier plan stay the same.
        plan = (len(progress.epochs), progress.starts[-1], tuple(progress.slots_from), len(progress.parts_from))
        if plan != self._plan:
            self._plan, self._before = plan, {}
        if slot not in self._before:
            steps_in_rounds = (self._in_round(slot, round_number) for round_number in range(len(progress.epochs)))
            self._before[slot] = [0, *itertools.accumulate(steps_in_rounds)]
        before = self._before[slot]
        return Steps(before[number], before[number + 1], before[-1], progress.starts[-1])

    def _in_round(self, slot: int, number: int) -> int:
        progress = self._progress
        return progress.epochs[number] * -(-self._samples(slot, number) // self._batch_size)

    def _samples(self, slot: int, number: int) -> int:
        progress = self._progress
        span, slots = progress.span(number), progress.tasks_in(number)
        samples = span.end - span.begin
        if progress.owners is not None:
            if self._owned is None:
                self._owned = np.bincount(progress.owners, minlength=len(progress.states)).tolist()
            return round(self._owned[slot] * samples / progress.samples)
        if (parts := progress.parts_in(number)) and slot < len(parts):
            return round(parts[slot] * samples / sum(parts))
        return samples // slots + (slot < samples % slots) if slot < slots else 0
