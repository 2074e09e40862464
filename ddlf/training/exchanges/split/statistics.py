"""Layers that need a few numbers of the units of all workers, such as their sum: workers exchange these, not the units.

The mean and the variance of all units follow from the mean and the variance of each worker's units (Chan et al. 1979)::

    mean = sum of n_k mean_k / n          variance = sum of n_k (variance_k + (mean_k - mean)^2) / n
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ddlf.training.exchanges.split.ways import Alike

LARGEST = "largest"
"""Kind of the largest unit of a worker. It has no gradient."""
TOTAL = "total"
"""Kind of a sum or a mean over the units of a worker."""


@dataclass(frozen=True)
class Exchanged(Alike, ABC):
    """A layer that exchanges numbers, once or several times.

    Args:
        shape: Shape of the numbers for one sample.
    """

    kinds: ClassVar[tuple[str, ...]] = (TOTAL,)
    """The kind of the numbers of each exchange."""
    shape: tuple[int | None, ...] = ()

    @abstractmethod
    def tell(self, layer: Any, number: int, value: Any, numbers: Sequence[Any], worker: int) -> tuple[Any, Any]:
        """Compute the numbers for an exchange.

        Args:
            layer: The layer.
            number: Number of the exchange, from 0.
            value: The worker's share; after the first exchange, the first result of ``tell`` in the exchange before.
            numbers: The numbers of all workers in the exchange before; none for the first one.
            worker: Number of the worker.

        Returns:
            The values for the next step, in the shape of the share; and the numbers that all workers need.
        """

    @abstractmethod
    def finish(self, layer: Any, value: Any, numbers: Sequence[Any], worker: int, training: bool) -> Any:
        """Return the worker's share of the result, after the last exchange."""


@dataclass(frozen=True)
class Softmax(Exchanged):
    """A softmax over units that are cut: the workers exchange their largest units, and then their sums."""

    kinds: ClassVar[tuple[str, ...]] = (LARGEST, TOTAL)

    def tell(self, layer: Any, number: int, value: Any, numbers: Sequence[Any], worker: int) -> tuple[Any, Any]:
        """Return the share and its largest unit, then its powers and their sum."""
        from keras import ops

        if number == 0:
            return value, ops.stop_gradient(ops.max(value, axis=-1, keepdims=True))
        most = ops.max(ops.concatenate(list(numbers), axis=-1), axis=-1, keepdims=True)
        powers = ops.exp(value - ops.stop_gradient(most))
        return powers, ops.sum(powers, axis=-1, keepdims=True)

    def finish(self, layer: Any, value: Any, numbers: Sequence[Any], worker: int, training: bool) -> Any:
        """Divide by the sum of all workers."""
        return value / sum(numbers[1:], numbers[0])


def _mean_and_variance(value: Any, axes: tuple[int, ...]) -> Any:
    """Return mean and variance over some axes, one after the other on the last axis."""
    from keras import ops

    mean = ops.mean(value, axes, keepdims=True)
    return ops.concatenate([mean, ops.mean(ops.square(value - mean), axes, keepdims=True)], axis=-1)


def _moments(numbers: Sequence[Any], counts: Sequence[int], axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the mean and the variance of all workers.

    Args:
        numbers: The result of ``_mean_and_variance`` of each worker.
        counts: The number of values behind each of these.
        axes: Further axes over which to take the mean.
    """
    from keras import ops

    pairs, total = [ops.split(pair, 2, axis=-1) for pair in numbers], sum(counts)

    def mean(values: Sequence[Any]) -> Any:
        weighted = [value * (count / total) for value, count in zip(values, counts, strict=True)]
        combined = sum(weighted[1:], weighted[0])
        return ops.mean(combined, axes, keepdims=True) if axes else combined

    mean_of_all = mean([worker_mean for worker_mean, _ in pairs])
    return mean_of_all, mean([variance + ops.square(worker_mean - mean_of_all) for worker_mean, variance in pairs])


@dataclass(frozen=True)
class NormalizedUnits(Exchanged):
    """A LayerNormalization whose units are cut."""

    def tell(self, layer: Any, number: int, value: Any, numbers: Sequence[Any], worker: int) -> tuple[Any, Any]:
        """Return the share, and the mean and variance of each position."""
        return value, _mean_and_variance(value, (-1,))

    def finish(self, layer: Any, value: Any, numbers: Sequence[Any], worker: int, training: bool) -> Any:
        """Normalize the share."""
        from keras import ops

        assert self.gives is not None
        mean, variance = _moments(numbers, self.gives.counts, ())
        normalized = (value - mean) * ops.rsqrt(variance + layer.epsilon)
        normalized = normalized if layer.gamma is None else normalized * layer.gamma
        return normalized if layer.beta is None else normalized + layer.beta


@dataclass(frozen=True)
class RootMeanSquare(Exchanged):
    """An RMSNormalization whose units are cut."""

    def tell(self, layer: Any, number: int, value: Any, numbers: Sequence[Any], worker: int) -> tuple[Any, Any]:
        """Return the share, and the sum of squares of each position."""
        from keras import ops

        return value, ops.sum(ops.square(value), axis=-1, keepdims=True)

    def finish(self, layer: Any, value: Any, numbers: Sequence[Any], worker: int, training: bool) -> Any:
        """Normalize the share."""
        from keras import ops

        assert self.gives is not None
        mean = sum(numbers[1:], numbers[0]) / sum(self.gives.counts)
        return value * ops.rsqrt(mean + layer.epsilon) * layer.scale


@dataclass(frozen=True)
class NormalizedRows(Exchanged):
    """A BatchNormalization of images that are cut by rows. All workers get the same moving averages."""

    def _axes(self, value: Any) -> tuple[int, ...]:
        return tuple(range(1, len(value.shape) - 1))

    def tell(self, layer: Any, number: int, value: Any, numbers: Sequence[Any], worker: int) -> tuple[Any, Any]:
        """Return the share, and the mean and variance of each channel of each sample."""
        return value, _mean_and_variance(value, self._axes(value))

    def finish(self, layer: Any, value: Any, numbers: Sequence[Any], worker: int, training: bool) -> Any:
        """Normalize the share, and move the averages."""
        from keras import ops

        assert self.gives is not None
        if not (training and layer.trainable):
            return layer(value, training=False)
        all_axes = tuple(range(len(value.shape) - 1))
        mean, variance = (ops.squeeze(moment, all_axes) for moment in _moments(numbers, self.gives.counts, (0,)))
        for moving, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
            moving.assign(moving * layer.momentum + new * (1.0 - layer.momentum))
        return ops.batch_normalization(
            value, mean, variance, axis=-1, offset=layer.beta, scale=layer.gamma, epsilon=layer.epsilon
        )


def of_units(shape: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the shape for one sample of a number of each position, from the shape of a tensor."""
    return (*shape[1:-1], 1)


def pairs_of_units(shape: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the shape for one sample of mean and variance of each position."""
    return (*shape[1:-1], 2)


def pairs_of_channels(shape: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the shape for one sample of mean and variance of each channel."""
    return (*np.ones(len(shape) - 2, int).tolist(), 2 * (shape[-1] or 0))
