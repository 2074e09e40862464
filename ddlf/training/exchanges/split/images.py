"""Layers that are cut by image rows: each worker computes some rows of the output, with all channels.

A convolution or pooling has windows of k rows, a stride s, and p rows of zeros above the image. An output row o needs the
input rows o s - p to o s - p + k - 1. So workers exchange rows at the borders between their shares: k - s of them for
each border, if the shares fit. Zeros are only added above and below the whole image. All workers have all weights,
and their gradients are added up. "Rows" are the first axis behind the samples, such as the steps of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from ddlf.training.exchanges.split.graph import Call
from ddlf.training.exchanges.split.units import ROWS, Units, between
from ddlf.training.exchanges.split.ways import Alike, Linear, Way

WHOLE_WEIGHTS = "each worker has all its weights"
UNEVEN = 1.2
"""Largest number of rows of a worker, as a multiple of the mean. Shares may be unequal so that fewer rows travel."""


@dataclass(frozen=True, slots=True)
class Window:
    """The positions of an axis of the input that each position of the output needs.

    Args:
        size: Positions of the input.
        kernel: k, the positions of the input that one of the output needs, with gaps of a dilation.
        stride: s.
        before: p, the number of zeros before the first position.
        count: Positions of the output.
    """

    size: int
    kernel: int
    stride: int
    before: int
    count: int

    @classmethod
    def of(cls, size: int, kernel: int, stride: int, padding: str) -> Window:
        """Return the window of a layer with a kind of padding, as Keras names it."""
        if padding == "valid":
            return cls(size, kernel, stride, 0, (size - kernel) // stride + 1)
        count = -(-size // stride)
        zeros = max(0, (count - 1) * stride + kernel - size)
        return cls(size, kernel, stride, kernel - 1 if padding == "causal" else zeros // 2, count)

    def needs(self, low: int, high: int) -> tuple[int, int]:
        """Return the first input position, and the end, of the outputs from ``low`` to ``high``. Both may be outside."""
        return low * self.stride - self.before, (high - 1) * self.stride - self.before + self.kernel

    def inside(self, low: int, high: int) -> tuple[int, int]:
        """Return the result of ``needs`` without the zeros."""
        begin, end = self.needs(low, high)
        return max(0, begin), min(self.size, end)

    def zeros(self, low: int, high: int) -> tuple[int, int]:
        """Return the numbers of zeros before and behind the input of the outputs from ``low`` to ``high``."""
        begin, end = self.needs(low, high)
        return max(0, -begin), max(0, end - self.size)

    def counted(self, low: int, high: int) -> np.ndarray[Any, Any]:
        """Return how many input positions, without zeros, each output from ``low`` to ``high`` needs."""
        spans = (self.inside(position, position + 1) for position in range(low, high))
        return np.array([end - begin for begin, end in spans])

    def shared(self, input_units: Units | None, workers: int) -> list[int]:
        """Return the first output of each worker, and the end.

        Shares are nearly equal, and their borders are chosen so that few input positions travel.

        Args:
            input_units: The input positions of each worker; None if all have all.
            workers: Their number.
        """
        equal = [len(share) for share in np.array_split(np.arange(self.count), workers)]
        ends = np.cumsum(equal).tolist()
        if input_units is None or any(len(positions) != positions[-1] - positions[0] + 1 for positions in input_units):
            return [0, *ends]
        most = max(equal[0], math.floor(UNEVEN * self.count / workers))
        firsts = [0]
        for worker, end in enumerate(ends[:-1]):
            border, capacity = int(input_units[worker][-1]) + 1, (workers - worker - 1) * most
            fit = [
                first
                for first in (end - 1, end, end + 1)
                if firsts[-1] < first <= firsts[-1] + most and first < self.count <= first + capacity
            ]
            firsts.append(min(fit or [end], key=lambda first: (self._travels(first, border), abs(first - end))))
        return [*firsts, self.count]

    def _travels(self, first: int, border: int) -> int:
        """Return how many positions travel if a worker begins with an output, and its input begins at a border."""
        begin, end = self.needs(first, first)[0], self.needs(first - 1, first)[1]
        return max(0, border - begin) + max(0, end - border)


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of all axes of an image, and the outputs of each worker.

    Args:
        axes: The window of each axis. The first one is cut.
        bounds: The first output row of each worker, and the end.
    """

    axes: tuple[Window, ...]
    bounds: tuple[int, ...]

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        kernel: Sequence[int],
        strides: Sequence[int],
        dilation: Sequence[int],
        padding: str,
        input_units: Units | None,
        workers: int,
    ) -> Windows | None:
        """Return the windows of a layer; None if there are fewer rows than workers."""
        axes = tuple(
            Window.of(size, (k - 1) * d + 1, s, padding)
            for size, k, s, d in zip(sizes, kernel, strides, dilation, strict=True)
        )
        return None if axes[0].count < workers else cls(axes, tuple(axes[0].shared(input_units, workers)))

    @property
    def gives(self) -> Units:
        """The output rows of each worker."""
        return between(self.bounds, ROWS)

    @property
    def takes(self) -> Units:
        """The input rows that each worker needs."""
        spans = (self.axes[0].inside(*bounds) for bounds in pairwise(self.bounds))
        return Units(tuple(np.arange(*span) for span in spans), ROWS)

    def padded(self, value: Any, worker: int, zero: float = 0.0) -> Any:
        """Return an image with the zeros at its edges that a worker needs, or with another number."""
        import keras

        first, *other_axes = self.axes
        pads = [first.zeros(*self.bounds[worker : worker + 2]), *(axis.zeros(0, axis.count) for axis in other_axes)]
        if not any(map(any, pads)):
            return value
        return keras.ops.pad(value, [(0, 0), *pads, (0, 0)], constant_values=zero)

    def counted(self, worker: int) -> np.ndarray[Any, Any]:
        """Return how many values of an image each output of a worker needs, in the shape of a sample."""
        first, *other_axes = self.axes
        counts = first.counted(*self.bounds[worker : worker + 2])
        for axis in other_axes:
            counts = np.multiply.outer(counts, axis.counted(0, axis.count))
        return counts[None, ..., None]


@dataclass(frozen=True)
class Filtered(Linear):
    """A convolution whose output is cut by image rows.

    Args:
        windows: Its windows.
    """

    windows: Windows | None = None

    def compute(
        self, call: Call, symbols: Sequence[Any], values: Sequence[Any], worker: int, training: bool
    ) -> list[Any]:
        """Compute x W on a worker, without b."""
        import keras

        assert self.windows is not None
        layer, value = call.operation, keras.ops.cast(values[0], call.operation.compute_dtype)
        return [
            keras.ops.conv(
                self.windows.padded(value, worker),
                layer.kernel,
                strides=list(layer.strides),
                padding="valid",
                dilation_rate=layer.dilation_rate,
                data_format="channels_last",
            )
        ]


@dataclass(frozen=True)
class Pooled(Alike):
    """A pooling layer whose output is cut by image rows.

    Args:
        windows: Its windows.
    """

    windows: Windows | None = None

    def compute(
        self, call: Call, symbols: Sequence[Any], values: Sequence[Any], worker: int, training: bool
    ) -> list[Any]:
        """Compute the call on a worker."""
        import keras

        assert self.windows is not None
        layer, windows = call.operation, self.windows
        options = {"pool_size": layer.pool_size, "strides": layer.strides, "padding": "valid"}
        options["data_format"] = "channels_last"
        if layer.pool_mode == "max":
            least = float(np.finfo(str(symbols[0].dtype)).min)
            return [keras.ops.max_pool(windows.padded(values[0], worker, least), **options)]
        average = keras.ops.average_pool(windows.padded(values[0], worker), **options)
        counted, most = windows.counted(worker), math.prod(layer.pool_size)
        return [average if (counted == most).all() else average * (most / counted).astype(str(symbols[0].dtype))]


@dataclass(frozen=True)
class Averaged(Way):
    """The mean over an image that is cut by rows: the sum of what each worker adds.

    Args:
        positions: Number of positions of the whole image.
    """

    adds: ClassVar[bool] = True
    positions: int = 1

    def compute(
        self, call: Call, symbols: Sequence[Any], values: Sequence[Any], worker: int, training: bool
    ) -> list[Any]:
        """Compute a worker's part of the mean."""
        import keras

        axes = tuple(range(1, len(symbols[0].shape) - 1))
        return [keras.ops.sum(values[0], axes, keepdims=call.operation.keepdims) / self.positions]


def filtered(layer: Any, shape: Sequence[int | None], input_units: Units | None, workers: int) -> Way:
    """Return how a convolution is cut by image rows; a way without ``gives`` if it cannot be.

    Args:
        layer: The layer.
        shape: Shape of its input.
        input_units: The rows that each worker has; None if all have all.
        workers: Number of workers.
    """
    sizes = shape[1:-1]
    known_sizes = [size for size in sizes if size is not None]
    if len(known_sizes) < len(sizes):
        return Way("the size of its images is unknown")
    geometry = known_sizes, layer.kernel_size, layer.strides, layer.dilation_rate, layer.padding
    windows = Windows.of(*geometry, input_units, workers)
    if windows is None:
        return Way(f"its images have fewer rows than {workers} parts")
    return Filtered(WHOLE_WEIGHTS, takes=windows.takes, gives=windows.gives, windows=windows)


def pooled(layer: Any, shape: Sequence[int | None], input_units: Units, workers: int) -> Way:
    """Return how a pooling layer is cut by image rows; a way without ``gives`` if it cannot be."""
    sizes = [size or 0 for size in shape[1:-1]]
    if not all(sizes) or not all(layer.strides):
        return Way()
    windows = Windows.of(sizes, layer.pool_size, layer.strides, [1] * len(sizes), layer.padding, input_units, workers)
    return Way() if windows is None else Pooled(takes=windows.takes, gives=windows.gives, windows=windows)
