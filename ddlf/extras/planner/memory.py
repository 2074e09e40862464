"""The model of memory: the most bytes that a worker needs with a given batch size. Pure functions and values.

A worker that trains batches of b samples needs at most

    max(l, m0 + m1 b) + x w

bytes. The constant l is the most memory until the first steps end: the framework, loading the data, and copying them into
the framework. The constant m0 has the framework, the data, the weights, the update and the optimizer. The activations and
the buffers of one sample take m1. An exchange other than the star adds x copies of the weights, of w bytes. Peaks of
processes that trained a few steps with some batch sizes, one after the other, give l, m0 and m1. Such a process keeps a
part of the memory of each earlier size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ddlf.errors import ConfigError
from ddlf.extras.planner.fit import fitted

LEAST_ERROR = 0.03
"""The least relative standard deviation of a predicted peak: allocators keep a part of the freed memory."""
KEPT = 0.5
"""The part of the memory of a batch that a process keeps when it trains larger ones: 0.35 to 1.2 were measured with TensorFlow."""
COPIES = {"star": 0.0, "sharded": 2.0, "gradient": 1.0}
"""Copies of the weights that a worker needs for an exchange, beside local training with the star exchange."""
SMALLER = 0.8
"""The next batch size to try after one that did not fit, as a part of it."""
LARGER = 1.1
"""A batch is tried after one that fits if it is more than so many times as large."""
MOST_TRIES = 5
COARSE = 64
"""From this batch size on, the largest batch is a multiple of 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """A predicted number of bytes.

    Args:
        count: The number.
        low: Lower end of its 80 % interval.
        high: Its upper end.
    """

    count: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest batch that fits into a limit.

    Args:
        limit: The limit of a worker's memory, in bytes.
        batch: Samples of the batch; 0 if none was found.
        confirmed: Whether a process trained some steps with it under this limit.
        failed: Batches that a process could not train under this limit.
        of_machine: Whether the limit is the share of a worker in the memory of its machine.
    """

    limit: int
    batch: int
    confirmed: bool = False
    failed: tuple[int, ...] = ()
    of_machine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Measured memory of steps with one batch size.

    Args:
        batch: Samples of a batch.
        most: The most bytes of the process during these steps.
        earlier: Batch sizes that the same process had trained before.
    """

    batch: int
    most: int
    earlier: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Measured memory of processes that trained some steps beside a worker.

    Args:
        worker: Number of the worker.
        samples: n, the training samples.
        framework: Bytes after the import of Keras.
        data: Bytes that loading the data added.
        loaded: The most bytes until the end of the first steps.
        weights: Bytes of the weights.
        optimizer: Bytes of the optimizer's state.
        batches: The memory of steps with each batch size.
        master: The most bytes of the master so far, with all workers; 0 if unknown.
    """

    worker: int
    samples: int
    framework: int
    data: int
    loaded: int
    weights: int
    optimizer: int
    batches: tuple[Peak, ...]
    master: int = 0


class MemoryModel:
    """Predicts the most bytes of a worker.

    Args:
        peaks: The measured memory.

    Attributes:
        constant: m0, bytes of a worker without the part of the batch.
        sample: m1, bytes of a sample of the batch.
    """

    def __init__(self, peaks: Peaks) -> None:
        if not peaks.batches:
            raise ConfigError("no step was measured, so no memory is known", hint="plan with a smaller batch")
        self.peaks = peaks
        rows = np.array([[1.0, peak.batch + KEPT * sum(peak.earlier)] for peak in peaks.batches])
        self._fit = fitted(rows, np.array([float(peak.most) for peak in peaks.batches]), LEAST_ERROR)
        self.constant, self.sample = map(float, self._fit.values)

    def predict(self, batch: int, exchange: str = "star") -> Bytes:
        """Return the most bytes of a worker.

        Args:
            batch: b, the samples of a batch.
            exchange: How updates travel.
        """
        copies = COPIES.get(exchange, 0.0) * self.peaks.weights
        count, half_width = self._fit.predict(np.array([1.0, float(batch)]))
        return Bytes(
            count=max(count, self.peaks.loaded) + copies,
            low=max(count / (1.0 + half_width), self.peaks.loaded) + copies,
            high=max(count * (1.0 + half_width), self.peaks.loaded) + copies,
        )

    def largest(self, limit: int, exchange: str = "star") -> int:
        """Return the largest batch whose memory surely fits into a limit, at most all samples; 0 if none does."""
        low, high = 0, self.peaks.samples
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.predict(middle, exchange).high <= limit else (low, middle - 1)
        return low if low == self.peaks.samples else rounded(low)

    @property
    def parts(self) -> dict[str, float]:
        """Bytes of a worker by their use, without the part of the batch."""
        model = self.constant - self.peaks.framework - self.peaks.data
        return {"framework": self.peaks.framework, "data": self.peaks.data, "model": max(model, 0.0)}


def rounded(batch: int) -> int:
    """Return a batch size, from 64 on rounded down to a multiple of 8."""
    return batch if batch < COARSE else batch - batch % 8


def find_largest(peaks: Peaks, limit: int, exchange: str, train: Callable[[int], Peak | None]) -> tuple[Largest, Peaks]:
    """Find the largest batch that fits into a limit by the model, and confirm it.

    Each batch that was trained improves the model, which may then allow a clearly larger one.

    Args:
        peaks: The measured memory.
        limit: The limit of a worker's memory, in bytes.
        exchange: How updates travel.
        train: Returns the memory of a process that trained some steps with a batch under the limit; None if it could
            not. It raises ``TimeoutError`` if no time is left.

    Returns:
        The batch, and the measured memory with that of all trained batches.
    """
    best, failed = 0, list[int]()
    for _ in range(MOST_TRIES):
        batch = MemoryModel(peaks).largest(limit, exchange)
        if failed:
            batch = min(batch, rounded(int(SMALLER * min(failed))))
        if batch <= LARGER * best:
            break
        try:
            peak = train(batch)
        except TimeoutError:
            if not best:
                return Largest(limit=limit, batch=batch, failed=tuple(failed)), peaks
            break
        if peak is None:
            failed.append(batch)
        else:
            best, peaks = batch, replace(peaks, batches=(*peaks.batches, peak))
    return Largest(limit=limit, batch=best, confirmed=best > 0, failed=tuple(failed)), peaks
