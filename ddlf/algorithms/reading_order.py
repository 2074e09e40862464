"""Computes the rows that each slot reads in an epoch, and their order. Pure: master and workers get the same result.

All files are placed on a circle in random order, and the circle is cut into one arc for each slot. After each epoch
every slot moves on by one arc. After K epochs, with K slots, each slot has read all files, and the files are shuffled
again. With K files each slot reads one whole file, a different one in each epoch. If workers store only some files
(``stays``), arcs stay with their slots. A slot's task contains a ``Portion``: a few numbers, however large the data
set is. The worker computes the rows from it and from the file sizes in the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from ddlf.algorithms.partition import Indices, shuffled
from ddlf.algorithms.rule_text import Family, Named
from ddlf.errors import ConfigError

Numbers = npt.NDArray[np.int64]

CUT_TOLERANCE = 0.02
"""Share of an arc. A cut within this distance of a file's end moves there, so that two slots need not open the file."""
MAX_GLOBAL = 2**25
"""Maximum number of samples in a global shuffle. Their order takes 4 bytes for each sample, on every node."""
BLOCK_SAMPLES = 2**16
"""Number of samples in a block without a window."""
LAYOUT, ARC, WINDOW = 1, 2, 3
"""Independent random streams. They are also independent of the orders of ``partition.shuffled``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Global(Named):
    """Shuffle all samples together, like data in memory.

    Rows are read one by one, so each worker needs the files on its own disk.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Named):
    """Read files in random order, some at a time, and shuffle the rows of the files that are open together.

    Args:
        files: Number of files that are open together, > 0. All of them are in memory.

    Raises:
        ConfigError: ``files`` is out of range.
    """

    files: int = 8

    def __post_init__(self) -> None:
        if self.files < 1:
            raise ConfigError(f"a window needs at least one file, got {self.files}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshuffled(Named):
    """Read files and rows in their stored order, for shuffled data and models that may see one order in all epochs."""


Shuffle = Global | Window | Unshuffled
SHUFFLE: Family[Shuffle] = Family("shuffle", **{"global": Global, "window": Window, "none": Unshuffled})


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """The rows that one slot reads in an epoch, or a consecutive part of these rows.

    Args:
        shuffle: The shuffle rule, as text of ``SHUFFLE``.
        seed: Seed of the run, >= 0.
        epoch: Number of the epoch, >= 0.
        slots: Number of slots, which the layout of the files depends on.
        start: Position of the slot's first sample in the layout.
        stop: Position after the slot's last sample.
        begin: Index of the part's first sample among the slot's samples, in the order of reading.
        end: Index after the part's last sample; None for all remaining samples.
        again: Seed of the order of a later pass over the same samples; empty for the first one.
        version: Version of the data set whose files are read; 0 for the version that each node has opened.
        stays: Whether a slot has the same files in each epoch, in the order of the manifest, because each worker has
            only some files on its own disk.
    """

    shuffle: str
    seed: int
    epoch: int
    slots: int
    start: int
    stop: int
    begin: int = 0
    end: int | None = None
    again: tuple[int, ...] = ()
    version: int = 0
    stays: bool = False

    windows: ClassVar[int] = 1
    """Number of windows of files that are read at the same time."""

    @property
    def samples(self) -> int:
        """Number of samples in the portion (the rows of files that a slot reads)."""
        return (self.stop - self.start if self.end is None else self.end) - self.begin

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, part: slice) -> Self:
        """Return a portion with some of the samples of this one, in the order of reading."""
        begin, end, _ = part.indices(len(self))
        return replace(self, begin=self.begin + begin, end=self.begin + max(begin, end))

    def of(self, again: tuple[int, ...]) -> Self:
        """Return a portion with the same samples as this one, in the order of a later pass over them."""
        return replace(self, again=again)

    def to_message(self) -> dict[str, Any]:
        """Return the portion's fields as a dict, which can travel in a message."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Self:
        """Return the portion whose fields a message contains."""
        return cls(**{**message, "again": tuple(message["again"])})

    def digest(self) -> str:
        """Return the SHA-256 hash of the portion's fields, which identifies it."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def stretches(self, sizes: Sequence[int] | Numbers) -> Numbers:
        """Return the rows that the portion contains, as one range for each file, in the order of reading.

        Args:
            sizes: Number of samples in each file, as when the portions were made.

        Returns:
            Shape ``(files, 3)``: number of the file, its first row, and the end of its rows. With ``global`` these are
            all rows of all files, in the order of files.
        """
        sizes = np.asarray(sizes, np.int64)
        if isinstance(SHUFFLE.read(self.shuffle), Global):
            return np.stack([np.arange(len(sizes)), np.zeros_like(sizes), sizes], axis=1)
        files = _layout(len(sizes), self)
        ends = np.cumsum(sizes[files])
        first, last = np.searchsorted(ends, [self.start, self.stop - 1], side="right")
        files, ends = files[first : last + 1], ends[first : last + 1]
        starts = ends - sizes[files]
        ranges = np.stack([files, np.maximum(self.start - starts, 0), np.minimum(self.stop, ends) - starts], axis=1)
        if isinstance(SHUFFLE.read(self.shuffle), Window):
            _chance(ARC, self.seed, self.epoch, self.start, *self.again).shuffle(ranges)
        return ranges

    def blocks(self, sizes: Sequence[int] | Numbers) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield the portion's samples in training order, in blocks: one for each window of files, or for each file.

        Args:
            sizes: Number of samples in each file, as when the portions were made.

        Yields:
            The number of the file of each sample and its row there, both of the block's length.
        """
        shuffle, skip, remaining = SHUFFLE.read(self.shuffle), self.begin, self.samples
        if isinstance(shuffle, Global):
            ends = np.cumsum(sizes, dtype=np.int64)
            all_of_it = shuffled(int(ends[-1]), self.seed, self.epoch)[self.start : self.stop]
            if self.again:
                all_of_it = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.again))).permutation(
                    all_of_it
                )
            for first in range(skip, skip + remaining, BLOCK_SAMPLES):
                samples = all_of_it[first : min(first + BLOCK_SAMPLES, skip + remaining)].astype(np.int64)
                files = np.searchsorted(ends, samples, side="right")
                yield files, samples - (ends - sizes)[files]
            return
        stretches = self.stretches(sizes)
        windows = -(-len(stretches) // (shuffle.files if isinstance(shuffle, Window) else 1))
        for number, window in enumerate(np.array_split(stretches, windows)):
            lengths = window[:, 2] - window[:, 1]
            if skip >= (length := int(lengths.sum())):
                skip -= length
                continue
            files = np.repeat(window[:, 0], lengths)
            rows = np.concatenate([np.arange(start, stop) for _, start, stop in window])
            if isinstance(shuffle, Window):
                order = _chance(WINDOW, self.seed, self.epoch, self.start, number, *self.again).permutation(len(rows))
                files, rows = files[order], rows[order]
            piece = slice(skip, skip + remaining)
            skip, remaining = 0, remaining - len(rows[piece])
            yield files[piece], rows[piece]
            if not remaining:
                return

    def ids(self, sizes: Sequence[int] | Numbers) -> Numbers:
        """Return the numbers of the portion's samples, counted through all files, in the order of reading."""
        sizes = np.asarray(sizes, np.int64)
        firsts = np.cumsum(sizes) - sizes
        return np.concatenate([firsts[:0], *(firsts[files] + rows for files, rows in self.blocks(sizes))])


SlotSamples = Indices | Portion
"""The samples of a slot in a round: their numbers, or a portion of a stored data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """Several parts of a portion whose batches alternate, for replicas that share a model.

    Args:
        pieces: The parts, at least one. Each is read from its beginning.
        order: For each batch, the number of its part, from 0.
        batch: Samples in a batch; the last batch may have fewer.
    """

    pieces: tuple[Portion, ...]
    order: tuple[int, ...]
    batch: int

    @property
    def samples(self) -> int:
        """Number of samples in all parts, which replicas read in turn."""
        return sum(map(len, self.pieces))

    def __len__(self) -> int:
        return self.samples

    @property
    def shuffle(self) -> str:
        """The shuffle rule of the parts, as text of ``SHUFFLE``."""
        return self.pieces[0].shuffle

    @property
    def version(self) -> int:
        """The version of the data set whose files are read, as in ``Portion``."""
        return self.pieces[0].version

    @property
    def windows(self) -> int:
        """The windows of files that are read, as in ``Portion``."""
        return len(self.pieces)

    def blocks(self, sizes: Sequence[int] | Numbers) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield the samples in training order, like ``Portion.blocks``.

        A block ends where one of the parts enters its next window of files.
        """
        sources = [piece.blocks(sizes) for piece in self.pieces]
        nothing = np.zeros(0, np.int64)
        buffers = [(nothing, nothing)] * len(sources)
        block: list[tuple[Numbers, Numbers]] = []
        remaining = self.samples
        for index in self.order:
            missing = min(self.batch, remaining)
            remaining -= missing
            while missing:
                if not len(buffers[index][0]):
                    if block:
                        yield _joined(block)
                    buffers[index], block = next(sources[index]), []
                files, rows = buffers[index]
                buffers[index] = files[missing:], rows[missing:]
                block.append((files[:missing], rows[:missing]))
                missing -= len(block[-1][0])
        if block:
            yield _joined(block)


def _joined(block: list[tuple[Numbers, Numbers]]) -> tuple[Numbers, Numbers]:
    return np.concatenate([files for files, _ in block]), np.concatenate([rows for _, rows in block])


def pieces(epoch_portions: Sequence[Portion], begin: int, end: int) -> list[Portion]:
    """Divide the samples of one round among the slots, if a round is a part of an epoch.

    Each slot gets the same share of its samples as the round has of all samples.

    Args:
        epoch_portions: Portion of each slot in the epoch.
        begin: Number of samples in the epoch before the round, over all slots.
        end: Number of samples in the epoch up to the end of the round.

    Returns:
        A portion for each slot. All rounds of an epoch together contain each sample once.

    Raises:
        ConfigError: A slot would have no samples.
    """
    samples = sum(portion.samples for portion in epoch_portions)
    pieces = [
        replace(portion, begin=portion.samples * begin // samples, end=portion.samples * end // samples)
        for portion in epoch_portions
    ]
    if not min(pieces, key=len):
        raise ConfigError(
            f"a round of {end - begin:,} samples leaves one of {len(epoch_portions):,} slots without samples",
            hint="use longer rounds, or fewer slots",
        )
    return pieces


def portions(
    sizes: Sequence[int] | Numbers,
    shares: Sequence[int],
    shuffle: str = "window:8",
    *,
    seed: int,
    epoch: int,
    version: int = 0,
    stays: bool = False,
) -> list[Portion]:
    """Distribute the samples of an epoch over the slots. Each sample belongs to exactly one slot.

    Args:
        sizes: Samples in each file, each > 0, in the order of the manifest.
        shares: Number of samples for each slot, each > 0, from ``equal_sizes`` or ``sizes_by_speed``. Except with
            ``global``, a slot may get a few more or fewer (``CUT_TOLERANCE``) to keep a file whole.
        shuffle: The shuffle rule, as text of ``SHUFFLE``.
        seed: Seed of the run, >= 0.
        epoch: Number of the epoch, >= 0.
        version: Version of the data set whose files are read, as in ``Portion``.
        stays: Whether a slot has the same files in each epoch, as in ``Portion``.

    Returns:
        A portion for each slot, in slot order.

    Raises:
        ConfigError: An argument is out of range, or there are too many samples for one global shuffle.
    """
    sizes = np.asarray(sizes, np.int64)
    samples, slots, rule = int(sizes.sum()), len(shares), SHUFFLE.read(shuffle)
    if not len(sizes) or sizes.min() <= 0 or not slots or min(shares) <= 0:
        raise ConfigError("every partition file and every slot needs at least one sample")
    if sum(shares) != samples:
        raise ConfigError(f"shares add up to {sum(shares):,}, but there are {samples:,} samples")
    if seed < 0 or epoch < 0:
        raise ConfigError(f"seed and epoch must not be negative, got seed {seed} and epoch {epoch}")
    if isinstance(rule, Global) and samples > MAX_GLOBAL:
        raise ConfigError(
            f"{samples:,} samples are too many for shuffle='global', which takes up to {MAX_GLOBAL:,}",
            hint="use shuffle='window:8'",
        )
    unversioned = Portion(shuffle=str(rule), seed=seed, epoch=epoch, slots=slots, start=0, stop=samples)
    epoch_samples = replace(unversioned, version=version, stays=stays)
    if isinstance(rule, Global):
        turn, ends = 0, np.array([], np.int64)
    else:
        turn, ends = 0 if stays else epoch % slots, np.cumsum(sizes[_layout(len(sizes), epoch_samples)])
    slot_of_arc = [(arc - turn) % slots for arc in range(slots)]
    cuts = _cuts([shares[slot] for slot in slot_of_arc], ends)
    arcs = {slot: (start, stop) for slot, start, stop in zip(slot_of_arc, [0, *cuts], cuts, strict=False)}
    return [replace(epoch_samples, start=arcs[slot][0], stop=arcs[slot][1]) for slot in range(slots)]


def _cuts(shares: Sequence[int], ends: Numbers) -> list[int]:
    """Return the end position of each slot's arc on the circle of files.

    An arc ends at the end of its slot's share, or at the end of a file nearby. Each arc has at least one sample.

    Args:
        shares: Number of samples in each arc, in the order of the arcs.
        ends: End position of each file, ascending; empty if arcs may end anywhere.
    """
    samples = sum(shares)
    tolerance = max(1.0, CUT_TOLERANCE * samples / len(shares))
    cuts: list[int] = []
    target = previous = 0
    for following, share in zip(range(len(shares) - 1, -1, -1), shares, strict=True):
        target += share
        cut = target
        if len(ends):
            index = int(np.searchsorted(ends, target))
            end = int(min(ends[max(index - 1, 0) : index + 1], key=lambda end: abs(int(end) - target)))
            if abs(end - target) <= tolerance and previous < end <= samples - following:
                cut = end
        previous = samples if not following else max(cut, previous + 1)
        cuts.append(previous)
    return cuts


def _layout(files: int, portion: Portion) -> Numbers:
    """Return the order of the files on the circle that slots cut into arcs. It is valid for K epochs with K slots."""
    if portion.stays or isinstance(SHUFFLE.read(portion.shuffle), Unshuffled):
        return np.arange(files)
    return _chance(LAYOUT, portion.seed, portion.epoch // portion.slots).permutation(files)


def _chance(stream: int, *numbers: Any) -> np.random.Generator:
    entropy = [int(number) for number in numbers]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy, spawn_key=(stream,))))
