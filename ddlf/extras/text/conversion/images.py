"""What operators on images compute: filters, windows, other sizes. Definitions and defaults are WebNN's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from keras import ops

Options = dict[str, Any]


def _last(x: Any, options: Options, key: str) -> Any:
    """An image with its channels last."""
    return ops.transpose(x, (0, 2, 3, 1)) if options.get(key, "nchw") == "nchw" else x


def _back(x: Any, options: Options, key: str) -> Any:
    return ops.transpose(x, (0, 3, 1, 2)) if options.get(key, "nchw") == "nchw" else x


def _padding(options: Options) -> list[tuple[int, int]]:
    top, bottom, left, right = options.get("padding", [0, 0, 0, 0])
    return [(0, 0), (top, bottom), (left, right), (0, 0)]


def _filter(weights: Any, options: Options, wanted: str) -> Any:
    layout = options.get("filterLayout", "oihw")
    return ops.transpose(weights, [layout.index(letter) for letter in wanted])


def convolve(into: list[Any], operands: list[Any], options: Options) -> Any:
    """A filter and, if it is there, a bias for each channel."""
    x = ops.pad(_last(into[0], options, "inputLayout"), _padding(options))
    made = ops.conv(
        x,
        _filter(operands[0], options, "hwio"),
        strides=tuple(options.get("strides", [1, 1])),
        padding="valid",
        data_format="channels_last",
        dilation_rate=tuple(options.get("dilations", [1, 1])),
    )
    return _back(made + operands[1] if len(operands) > 1 else made, options, "inputLayout")


def convolve_transposed(into: list[Any], operands: list[Any], options: Options) -> Any:
    """The gradient of a filter, which makes images larger; then a bias. Each group of channels has a slice of the filter's input channels."""
    x = _last(into[0], options, "inputLayout")
    weights, groups = _filter(operands[0], options, "hwoi"), options.get("groups", 1)
    parts = zip(ops.split(x, groups, axis=-1), ops.split(weights, groups, axis=-1), strict=True)
    made = ops.concatenate([_transposed(*part, options) for part in parts], axis=-1)
    return _back(made + operands[1] if len(operands) > 1 else made, options, "inputLayout")


def _transposed(x: Any, weights: Any, options: Options) -> Any:
    strides, dilations, extra = (
        options.get(key, usual)
        for key, usual in (("strides", [1, 1]), ("dilations", [1, 1]), ("outputPadding", [0, 0]))
    )
    made = ops.conv_transpose(
        x, weights, strides=tuple(strides), padding="valid", data_format="channels_last", dilation_rate=tuple(dilations)
    )
    for axis, (before, after) in enumerate(_padding(options)[1:3]):
        wide = (weights.shape[axis] - 1) * dilations[axis] + 1
        size = (x.shape[1 + axis] - 1) * strides[axis] + wide - before - after + extra[axis]
        lacks = before + size - made.shape[1 + axis]
        made = ops.pad(made, [(0, max(lacks, 0) if each == 1 + axis else 0) for each in range(4)])
        cut = slice(before, before + size)
        made = made[:, cut] if axis == 0 else made[:, :, cut]
    return made


def _pooled(x: Any, options: Options, pool: Callable[..., Any], value: float, whole: Callable[..., Any]) -> Any:
    window = options.get("windowDimensions")
    if window is None:
        return whole(x, axis=(1, 2), keepdims=True)
    padded = ops.pad(x, _padding(options), constant_values=value)
    if options.get("dilations", [1, 1]) != [1, 1]:
        return whole(_dilated(padded, options), axis=0)
    return pool(
        padded,
        tuple(window),
        strides=tuple(options.get("strides", [1, 1])),
        padding="valid",
        data_format="channels_last",
    )


def _dilated(x: Any, options: Options) -> Any:
    """Of each window the values at each of its places, first; places are apart from each other."""
    window, apart = options["windowDimensions"], options["dilations"]
    steps = options.get("strides", [1, 1])
    ends = [size - (places - 1) * gap for size, places, gap in zip(x.shape[1:3], window, apart, strict=True)]
    return ops.stack(
        [
            x[
                :,
                row * apart[0] : row * apart[0] + ends[0] : steps[0],
                column * apart[1] : column * apart[1] + ends[1] : steps[1],
            ]
            for row in range(window[0])
            for column in range(window[1])
        ]
    )


def _averaged(x: Any, options: Options) -> Any:
    """The mean of what lies in each window; padding does not count."""
    made = _pooled(x, options, ops.average_pool, 0.0, ops.mean)
    if "windowDimensions" not in options or not any(options.get("padding", [])):
        return made
    return made / _pooled(ops.ones_like(x[:1, :, :, :1]), options, ops.average_pool, 0.0, ops.mean)


def pool_average(into: list[Any], operands: list[Any], options: Options) -> Any:
    """The mean of each window, of all if none is written."""
    return _back(_averaged(_last(into[0], options, "layout"), options), options, "layout")


def pool_l2(into: list[Any], operands: list[Any], options: Options) -> Any:
    """The square root of the sum of squares of each window."""
    x = _last(into[0], options, "layout")
    area = math.prod(options.get("windowDimensions", x.shape[1:3]))
    made = ops.sqrt(_pooled(x * x, options, ops.average_pool, 0.0, ops.mean) * area)
    return _back(made, options, "layout")


def pool_max(into: list[Any], operands: list[Any], options: Options) -> Any:
    """The largest of each window."""
    x = _last(into[0], options, "layout")
    return _back(_pooled(x, options, ops.max_pool, -math.inf, ops.max), options, "layout")


def resample(into: list[Any], operands: list[Any], options: Options) -> Any:
    """Another height and width; the centres of pixels stay where they are."""
    x = into[0]
    axes = [each + 1 if each >= 0 else each + len(x.shape) for each in options.get("axes", [1, 2])]
    scales = options.get("scales", [1, 1])
    sizes = options.get("sizes") or [
        max(int(x.shape[axis] * scale), 1) for axis, scale in zip(axes, scales, strict=True)
    ]
    how = {"nearest-neighbor": "nearest", "linear": "bilinear"}[options.get("mode", "nearest-neighbor")]
    rest = next(axis for axis in (1, 2, 3) if axis not in axes)
    order = (0, *axes, rest)
    made = ops.image.resize(ops.transpose(x, order), tuple(sizes), interpolation=how, data_format="channels_last")
    return ops.transpose(made, [order.index(axis) for axis in range(4)])
