"""Computes each operator of a model text, on any Keras backend.

Definitions and defaults are WebNN's (https://www.w3.org/TR/webnn/).

A formula takes the inputs, whose first axis is the batch; the operands, which are numbers and parameters; and the
options, whose axes do not count the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from ddlf.extras.text.language.inference import RANGES

Options = dict[str, Any]
Formula = Callable[[list[Any], list[Any], Options], Any]


def behind_batch(axis: int) -> int:
    """Convert an axis of a model text to an axis of a tensor with a batch. A negative axis stays the same."""
    return axis + 1 if axis >= 0 else axis


def tensor_axes(axes: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Convert axes of a model text to axes of a tensor with a batch. Without axes, return all except the batch axis."""
    return tuple(range(1, rank)) if axes is None else tuple(behind_batch(axis) for axis in axes)


def _unary(function: Callable[..., Any], **defaults: Any) -> Formula:
    """Wrap a Keras function of one tensor and some numbers as a formula, which computes an operator."""
    return lambda inputs, operands, options: function(
        inputs[0], **{key: options.get(key, default) for key, default in defaults.items()}
    )


def _binary(function: Callable[[Any, Any], Any]) -> Formula:
    """Wrap a function of two tensors as a formula. The second tensor is an operand or another layer's output. Their
    axes are aligned from the last one.
    """

    def compute(inputs: list[Any], operands: list[Any], options: Options) -> Any:
        left, right = inputs[0], inputs[1] if len(inputs) > 1 else operands[0]
        if len(inputs) > 1:  # the batch stays the first axis of both
            rank = max(len(left.shape), len(right.shape))
            left, right = (
                ops.reshape(item, (-1, *[1] * (rank - len(item.shape)), *item.shape[1:])) for item in (left, right)
            )
        return function(left, right)

    return compute


def _compare(function: Callable[[Any, Any], Any]) -> Formula:
    """Wrap a comparison of two tensors as a formula, with the result 0 or 1 as uint8."""
    compute = _binary(function)
    return lambda inputs, operands, options: ops.cast(compute(inputs, operands, options), "uint8")


def _reduced(function: Callable[..., Any]) -> Formula:
    """Wrap a reduction, such as a sum, as a formula over the option ``axes``; by default over all axes."""

    def compute(inputs: list[Any], operands: list[Any], options: Options) -> Any:
        axes = tensor_axes(options.get("axes"), len(inputs[0].shape))
        return function(inputs[0], axis=axes, keepdims=bool(options.get("keepDimensions")))

    return compute


def _arg(function: Callable[..., Any]) -> Formula:
    def compute(inputs: list[Any], operands: list[Any], options: Options) -> Any:
        axis = behind_batch(options.get("axis", 0))
        result = ops.cast(function(inputs[0], axis=axis), "int32")
        return ops.expand_dims(result, axis) if options.get("keepDimensions") else result

    return compute


def _hard_sigmoid(x: Any, alpha: float, beta: float) -> Any:
    return ops.clip(alpha * x + beta, 0, 1)


def _elu(x: Any, alpha: float) -> Any:
    return ops.where(x > 0, x, alpha * (ops.exp(ops.minimum(x, 0)) - 1))


def _clamp(x: Any, minValue: float, maxValue: float) -> Any:
    return ops.clip(x, minValue, maxValue)


def _softmax(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.softmax(inputs[0], axis=behind_batch(options.get("axis", -1)))


def _log_softmax(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.log_softmax(inputs[0], axis=behind_batch(options.get("axis", -1)))


def _reverse(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.flip(inputs[0], axis=tensor_axes(options.get("axes"), len(inputs[0].shape)))


def _triangular(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    keep = ops.triu if options.get("upper", True) else ops.tril
    return keep(inputs[0], k=options.get("diagonal", 0))


def _cumulative_sum(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    x, axis = inputs[0], behind_batch(options.get("axis", 0))
    if options.get("reversed"):
        x = ops.flip(x, axis=axis)
    result = ops.cumsum(x, axis=axis)
    if options.get("exclusive"):
        result = result - x
    return ops.flip(result, axis=axis) if options.get("reversed") else result


def _prelu(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.maximum(inputs[0], 0) + operands[0] * ops.minimum(inputs[0], 0)


def _quantized(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    scale, zero = operands
    dtype = options.get("dtype", "int8")
    low, high = RANGES[dtype]
    return ops.cast(ops.clip(ops.round(inputs[0] / scale) + zero, low, high), dtype)


def _dequantized(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    scale, zero = operands
    return (inputs[0] - zero) * scale


def _broadcast_along(values: Any, axis: int, rank: int) -> Any:
    """Reshape a parameter with one axis, so that it broadcasts along an axis of a tensor."""
    return ops.reshape(values, [1 if item != axis % rank else -1 for item in range(rank)])


def _instance_normalization(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    x, rank = inputs[0], len(inputs[0].shape)
    channels = 1 if options.get("layout", "nchw") == "nchw" else rank - 1
    space = [axis for axis in range(1, rank) if axis != channels]
    result = normalized(x, ops.moments(x, axes=space, keepdims=True), options)
    return scaled(result, [_broadcast_along(operand, channels, rank) for operand in operands])


def _layer_normalization(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    x, rank = inputs[0], len(inputs[0].shape)
    axes = [axis % rank for axis in tensor_axes(options.get("axes", [-1]), rank)]
    result = normalized(x, ops.moments(x, axes=axes, keepdims=True), options)
    broadcast_shape = [x.shape[axis] if axis in axes else 1 for axis in range(rank)]
    return scaled(result, [ops.reshape(operand, broadcast_shape) for operand in operands])


def normalized(x: Any, moments: tuple[Any, Any], options: Options) -> Any:
    """Return values minus their mean, divided by their standard deviation."""
    mean, variance = moments
    return (x - mean) / ops.sqrt(variance + options.get("epsilon", 1e-5))


def scaled(x: Any, operands: Sequence[Any]) -> Any:
    """Multiply with the first operand and add the second, if they exist."""
    for index, item in enumerate(operands):
        x = x + item if index else x * item
    return x


def _residual(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    total = inputs[0]
    for item in inputs[1:]:
        total = total + item
    return total


def _matmul(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.matmul(inputs[0], inputs[1] if len(inputs) > 1 else operands[0])


def _gemm(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    other = inputs[1] if len(inputs) > 1 else operands[0]
    biases = operands if len(inputs) > 1 else operands[1:]
    if options.get("bTranspose"):
        other = ops.swapaxes(other, -1, -2)
    result = options.get("alpha", 1.0) * ops.matmul(inputs[0], other)
    return result + options.get("beta", 1.0) * biases[0] if biases else result


def _concat(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.concatenate(inputs, axis=behind_batch(options.get("axis", 0)))


def _reshape(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.reshape(inputs[0], (-1, *options["shape"]))


def _expand(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    x, shape = inputs[0], tuple(options["shape"])
    x = ops.reshape(x, (-1, *[1] * (len(shape) + 1 - len(x.shape)), *x.shape[1:]))
    return ops.broadcast_to(x, (ops.shape(x)[0], *shape))


def _transpose(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    rank = len(inputs[0].shape)
    order = options.get("permutation", range(rank - 2, -1, -1))
    return ops.transpose(inputs[0], (0, *(axis + 1 for axis in order)))


def _slice(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    strides = options.get("strides", [1] * len(options["starts"]))
    cuts = [
        slice(start, start + size, stride)
        for start, size, stride in zip(options["starts"], options["sizes"], strides, strict=True)
    ]
    return inputs[0][(slice(None), *cuts)]


def _pad(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    rank = len(inputs[0].shape) - 1
    begin, end = (options.get(key, [0] * rank) for key in ("beginningPadding", "endingPadding"))
    mode = {"reflection": "reflect"}.get(options.get("mode", "constant"), options.get("mode", "constant"))
    value = {"constant_values": options.get("value", 0)} if mode == "constant" else {}
    return ops.pad(inputs[0], [(0, 0), *zip(begin, end, strict=True)], mode=mode, **value)


def _tile(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.tile(inputs[0], (1, *options.get("repetitions", [1] * (len(inputs[0].shape) - 1))))


def _split(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    axis, splits = behind_batch(options.get("axis", 0)), options["splits"]
    sections = splits if isinstance(splits, int) else [sum(splits[: end + 1]) for end in range(len(splits) - 1)]
    return ops.split(inputs[0], sections, axis=axis)[options.get("index", 0)]


def _select(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Return a tensor with values of the first operand where the input is not 0, and of the second one elsewhere. A
    layer in ``to`` replaces the first operand.
    """
    if_true, if_false = (*inputs[1:], *operands)
    return ops.where(ops.not_equal(inputs[0], 0), if_true, if_false)


def _attend(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Compute multi-head attention with scaled dot products (arXiv:1706.03762), biases and a projection."""
    x, source = inputs[0], inputs[-1]
    heads, width = options.get("heads", 1), x.shape[-1]

    def divided(tensor: Any, weights: Any, bias: Any) -> Any:
        projected = ops.matmul(tensor, weights) + bias
        return ops.transpose(ops.reshape(projected, (-1, tensor.shape[1], heads, width // heads)), (0, 2, 1, 3))

    query, key, value = (
        divided(tensor, *operands[2 * at : 2 * at + 2]) for at, tensor in enumerate((x, source, source))
    )
    scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))) / math.sqrt(width // heads)
    if options.get("mask") == "causal":
        is_visible = ops.tril(ops.ones((x.shape[1], source.shape[1]), dtype="bool"))
        scores = ops.where(is_visible, scores, ops.cast(-1e9 if scores.dtype != "float16" else -6e4, scores.dtype))
    mixed = ops.transpose(ops.matmul(ops.softmax(scores), value), (0, 2, 1, 3))
    return ops.matmul(ops.reshape(mixed, (-1, x.shape[1], width)), operands[6]) + operands[7]


def _l2(x: Any, **how: Any) -> Any:
    return ops.sqrt(ops.sum(x * x, **how))


# -- images --------------------------------------------------------------------------------------------------------------


def _channels_last(x: Any, options: Options, key: str) -> Any:
    """Return an image with the channels on the last axis, whatever the option says."""
    return ops.transpose(x, (0, 2, 3, 1)) if options.get(key, "nchw") == "nchw" else x


def _channels_back(x: Any, options: Options, key: str) -> Any:
    return ops.transpose(x, (0, 3, 1, 2)) if options.get(key, "nchw") == "nchw" else x


def _padding(options: Options) -> list[tuple[int, int]]:
    top, bottom, left, right = options.get("padding", [0, 0, 0, 0])
    return [(0, 0), (top, bottom), (left, right), (0, 0)]


def _filter(weights: Any, options: Options, target_layout: str) -> Any:
    layout = options.get("filterLayout", "oihw")
    return ops.transpose(weights, [layout.index(letter) for letter in target_layout])


def convolve(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Convolve with a filter, and add an optional bias for each channel."""
    x = ops.pad(_channels_last(inputs[0], options, "inputLayout"), _padding(options))
    result = ops.conv(
        x,
        _filter(operands[0], options, "hwio"),
        strides=tuple(options.get("strides", [1, 1])),
        padding="valid",
        data_format="channels_last",
        dilation_rate=tuple(options.get("dilations", [1, 1])),
    )
    return _channels_back(result + operands[1] if len(operands) > 1 else result, options, "inputLayout")


def convolve_transposed(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Apply a transposed convolution, which enlarges images, then add a bias.

    Each group of channels has a slice of the filter's input channels.
    """
    x = _channels_last(inputs[0], options, "inputLayout")
    weights, groups = _filter(operands[0], options, "hwoi"), options.get("groups", 1)
    parts = zip(ops.split(x, groups, axis=-1), ops.split(weights, groups, axis=-1), strict=True)
    result = ops.concatenate([_transposed(*part, options) for part in parts], axis=-1)
    return _channels_back(result + operands[1] if len(operands) > 1 else result, options, "inputLayout")


def _transposed(x: Any, weights: Any, options: Options) -> Any:
    strides, dilations, output_padding = (
        options.get(key, default)
        for key, default in (("strides", [1, 1]), ("dilations", [1, 1]), ("outputPadding", [0, 0]))
    )
    result = ops.conv_transpose(
        x, weights, strides=tuple(strides), padding="valid", data_format="channels_last", dilation_rate=tuple(dilations)
    )
    for axis, (before, after) in enumerate(_padding(options)[1:3]):
        extent = (weights.shape[axis] - 1) * dilations[axis] + 1
        size = (x.shape[1 + axis] - 1) * strides[axis] + extent - before - after + output_padding[axis]
        lacks = before + size - result.shape[1 + axis]
        result = ops.pad(result, [(0, max(lacks, 0) if item == 1 + axis else 0) for item in range(4)])
        cut = slice(before, before + size)
        result = result[:, cut] if axis == 0 else result[:, :, cut]
    return result


def _pooled(x: Any, options: Options, pool: Callable[..., Any], value: float, pool_all: Callable[..., Any]) -> Any:
    window = options.get("windowDimensions")
    if window is None:
        return pool_all(x, axis=(1, 2), keepdims=True)
    padded = ops.pad(x, _padding(options), constant_values=value)
    if options.get("dilations", [1, 1]) != [1, 1]:
        return pool_all(_dilated(padded, options), axis=0)
    return pool(
        padded,
        tuple(window),
        strides=tuple(options.get("strides", [1, 1])),
        padding="valid",
        data_format="channels_last",
    )


def _dilated(x: Any, options: Options) -> Any:
    """Return the values at each position of a dilated window, as a new first axis."""
    window, dilations = options["windowDimensions"], options["dilations"]
    steps = options.get("strides", [1, 1])
    ends = [size - (count - 1) * gap for size, count, gap in zip(x.shape[1:3], window, dilations, strict=True)]
    return ops.stack(
        [
            x[
                :,
                row * dilations[0] : row * dilations[0] + ends[0] : steps[0],
                column * dilations[1] : column * dilations[1] + ends[1] : steps[1],
            ]
            for row in range(window[0])
            for column in range(window[1])
        ]
    )


def _averaged(x: Any, options: Options) -> Any:
    """Return the mean of each window; padding does not count."""
    means = _pooled(x, options, ops.average_pool, 0.0, ops.mean)
    if "windowDimensions" not in options or not any(options.get("padding", [])):
        return means
    return means / _pooled(ops.ones_like(x[:1, :, :, :1]), options, ops.average_pool, 0.0, ops.mean)


def pool_average(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Return the mean of each window. Without a window, it is the whole image."""
    return _channels_back(_averaged(_channels_last(inputs[0], options, "layout"), options), options, "layout")


def pool_l2(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Return the square root of the sum of squares of each window."""
    x = _channels_last(inputs[0], options, "layout")
    area = math.prod(options.get("windowDimensions", x.shape[1:3]))
    norms = ops.sqrt(_pooled(x * x, options, ops.average_pool, 0.0, ops.mean) * area)
    return _channels_back(norms, options, "layout")


def pool_max(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Return the maximum of each window."""
    x = _channels_last(inputs[0], options, "layout")
    return _channels_back(_pooled(x, options, ops.max_pool, -math.inf, ops.max), options, "layout")


def resample(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Resize to another height and width. The centres of pixels keep their positions."""
    x = inputs[0]
    axes = [axis + 1 if axis >= 0 else axis + len(x.shape) for axis in options.get("axes", [1, 2])]
    scales = options.get("scales", [1, 1])
    sizes = options.get("sizes") or [
        max(int(x.shape[axis] * scale), 1) for axis, scale in zip(axes, scales, strict=True)
    ]
    how = {"nearest-neighbor": "nearest", "linear": "bilinear"}[options.get("mode", "nearest-neighbor")]
    channel_axis = next(axis for axis in (1, 2, 3) if axis not in axes)
    order = (0, *axes, channel_axis)
    resized = ops.image.resize(ops.transpose(x, order), tuple(sizes), interpolation=how, data_format="channels_last")
    return ops.transpose(resized, [order.index(axis) for axis in range(4)])


# -- recurrent layers: gates in the order i o f g of an LSTM, z r n of a GRU ---------------------------------------------


def _gates(weights: Any, order: str, gate_order: str) -> list[Any]:
    """Split the weights of a recurrent layer into its gates, and return them in another order."""
    parts = ops.split(weights, len(order), axis=0)
    return [parts[order.index(letter)] for letter in gate_order]


def _sums(x: Any, weights: Any, bias: Any, order: str, gate_order: str) -> list[Any]:
    biases = _gates(bias, order, gate_order) if bias is not None else [0.0] * len(gate_order)
    return [
        ops.matmul(x, ops.transpose(item)) + add
        for item, add in zip(_gates(weights, order, gate_order), biases, strict=True)
    ]


def _lstm_step(x: Any, state: Sequence[Any], operands: list[Any], options: Options) -> tuple[Any, Any]:
    w, r, b, rb = (*operands, None, None)[:4]
    order = options.get("layout", "iofg")
    inputs = zip(_sums(x, w, b, order, "iofg"), _sums(state[0], r, rb, order, "iofg"), strict=True)
    i, o, f, g = (first + other for first, other in inputs)
    cell = ops.sigmoid(f) * state[1] + ops.sigmoid(i) * ops.tanh(g)
    return ops.sigmoid(o) * ops.tanh(cell), cell


def _gru_step(x: Any, hidden: Any, operands: list[Any], options: Options) -> Any:
    w, r, b, rb = (*operands, None, None)[:4]
    order = options.get("layout", "zrn")
    (xz, xr, xn), (hz, hr, hn) = _sums(x, w, b, order, "zrn"), _sums(hidden, r, rb, order, "zrn")
    update, reset = ops.sigmoid(xz + hz), ops.sigmoid(xr + hr)
    if options.get("resetAfter", True):
        new = ops.tanh(xn + reset * hn)
    else:
        add = _gates(rb, order, "n")[0] if rb is not None else 0.0
        new = ops.tanh(xn + ops.matmul(reset * hidden, ops.transpose(_gates(r, order, "n")[0])) + add)
    return (1 - update) * new + update * hidden


def _begin(x: Any, operands: list[Any]) -> Any:
    return ops.zeros((ops.shape(x)[0], operands[1].shape[-1]), dtype=x.dtype)


def lstm_cell(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Compute one step from a state of zeros."""
    begin = _begin(inputs[0], operands)
    return _lstm_step(inputs[0], (begin, begin), operands, options)[0]


def gru_cell(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Compute one step from a state of zeros."""
    return _gru_step(inputs[0], _begin(inputs[0], operands), operands, options)


def lstm(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Compute all steps from a state of zeros. Return the last output, or all with ``returnSequence``."""

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        state = ops.concatenate(_lstm_step(x, ops.split(state, 2, axis=-1), operands, options), axis=-1)
        return state, state  # return the state twice, because TensorFlow's scan needs equal structures

    begin = _begin(inputs[0], operands)
    states = _over_time(inputs[0], step, ops.concatenate([begin, begin], axis=-1), options)
    return states[..., : begin.shape[-1]]


def gru(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Compute all steps from a state of zeros. Return the last output, or all with ``returnSequence``."""

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        hidden = _gru_step(x, state, operands, options)
        return hidden, hidden

    return _over_time(inputs[0], step, _begin(inputs[0], operands), options)


def _over_time(x: Any, step: Any, state: Any, options: Options) -> Any:
    backward = options.get("direction") == "backward"
    _, outputs = ops.scan(step, state, ops.transpose(x, (1, 0, 2)), reverse=backward)
    if options.get("returnSequence"):
        return ops.transpose(outputs, (1, 0, 2))
    return outputs[0] if backward else outputs[-1]


# -- indices: each sample has its own, and two writes to one place have no defined order ---------------------------------


def gather(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Take from each sample the slices at its own indices along an axis, or the slice at an operand."""
    axis = behind_batch(options.get("axis", 0))
    if len(inputs) == 1:
        return ops.take(inputs[0], ops.cast(operands[0], "int32"), axis=axis)
    x, indices = inputs[0], ops.cast(inputs[1], "int32")
    axis %= len(x.shape)
    x = ops.moveaxis(x, axis, 1)
    result = _take(_table(x, 1), _flat(indices))
    result = ops.reshape(result, (-1, *indices.shape[1:], *x.shape[2:]))
    count = len(indices.shape) - 1
    rank = len(result.shape)
    before = list(range(1 + count, count + axis))
    return ops.transpose(result, (0, *before, *range(1, 1 + count), *range(count + axis, rank)))


def gather_elements(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Take a value for each index along an axis."""
    return ops.take_along_axis(inputs[0], ops.cast(inputs[1], "int32"), axis=behind_batch(options.get("axis", 0)))


def gather_nd(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Take the values at each row of indices into the first axes."""
    x, indices = inputs[0], ops.cast(inputs[1], "int32")
    depth = indices.shape[-1]
    result = _take(_table(x, depth), _flat(_numbered(indices, x.shape[1:])))
    return ops.reshape(result, (-1, *indices.shape[1:-1], *x.shape[1 + depth :]))


def scatter_elements(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Return the input with a value written at each index along an axis."""
    x, indices, updates = inputs[0], ops.cast(inputs[1], "int32"), inputs[2]
    axis = behind_batch(options.get("axis", 0)) % len(x.shape)
    x, indices, updates = (ops.moveaxis(tensor, axis, -1) for tensor in (x, indices, updates))
    rows, rows_there, written = (ops.reshape(tensor, (-1, tensor.shape[-1])) for tensor in (x, indices, updates))
    result = _written(rows[..., None], rows_there, written[..., None])
    return ops.moveaxis(ops.reshape(result, (-1, *x.shape[1:])), -1, axis)


def scatter_nd(inputs: list[Any], operands: list[Any], options: Options) -> Any:
    """Return the input with a slice written at each row of indices, which select a place in the first axes."""
    x, indices, updates = inputs[0], ops.cast(inputs[1], "int32"), inputs[2]
    table, rows = _table(x, indices.shape[-1]), _flat(_numbered(indices, x.shape[1:]))
    written = ops.reshape(updates, (-1, rows.shape[1], table.shape[2]))
    return ops.reshape(_written(table, rows, written), (-1, *x.shape[1:]))


def _table(x: Any, depth: int) -> Any:
    """Reshape each sample to a table, with a row for each place in its first ``depth`` axes."""
    return ops.reshape(x, (-1, math.prod(x.shape[1 : 1 + depth]), math.prod(x.shape[1 + depth :])))


def _flat(indices: Any) -> Any:
    return ops.reshape(indices, (-1, math.prod(indices.shape[1:])))


def _numbered(indices: Any, shape: Any) -> Any:
    """Convert rows of indices, one index for each axis, to row numbers in the table of ``_table``."""
    strides = [math.prod(shape[axis + 1 : indices.shape[-1]]) for axis in range(indices.shape[-1])]
    return ops.sum(indices * ops.convert_to_tensor(strides, dtype="int32"), axis=-1)


def _take(table: Any, indices: Any) -> Any:
    broadcast = ops.broadcast_to(indices[..., None], (ops.shape(table)[0], indices.shape[1], table.shape[2]))
    return ops.take_along_axis(table, broadcast, axis=1)


def _written(table: Any, indices: Any, values: Any) -> Any:
    samples = ops.cumsum(ops.ones_like(indices), axis=0) - 1
    positions = ops.reshape(ops.stack([samples, indices], axis=-1), (-1, 2))
    return ops.scatter_update(table, positions, ops.reshape(values, (-1, table.shape[2])))


FORMULAS: dict[str, Formula] = {
    "abs": _unary(ops.absolute), "floor": _unary(ops.floor), "ceil": _unary(ops.ceil), "identity": _unary(lambda x: x), "neg": _unary(ops.negative),
    "sign": _unary(ops.sign), "relu": _unary(lambda x: ops.maximum(x, 0)), "cos": _unary(ops.cos), "erf": _unary(ops.erf), "exp": _unary(ops.exp),
    "log": _unary(ops.log), "reciprocal": _unary(ops.reciprocal), "sin": _unary(ops.sin), "sqrt": _unary(ops.sqrt), "tan": _unary(ops.tan),
    "tanh": _unary(ops.tanh), "sigmoid": _unary(ops.sigmoid), "softsign": _unary(ops.softsign), "softplus": _unary(ops.softplus),
    "hardSwish": _unary(lambda x: x * ops.clip(x + 3, 0, 6) / 6), "gelu": _unary(lambda x: x / 2 * (1 + ops.erf(x / math.sqrt(2)))),
    "elu": _unary(_elu, alpha=1.0), "leakyRelu": _unary(lambda x, alpha: ops.maximum(x, 0) + alpha * ops.minimum(x, 0), alpha=0.01),
    "hardSigmoid": _unary(_hard_sigmoid, alpha=0.2, beta=0.5), "linear": _unary(lambda x, alpha, beta: alpha * x + beta, alpha=1.0, beta=0.0),
    "clamp": _unary(_clamp, minValue=-math.inf, maxValue=math.inf), "softmax": _softmax, "logSoftmax": _log_softmax, "cast": _unary(lambda x: x),
    "reverse": _reverse, "triangular": _triangular, "cumulativeSum": _cumulative_sum, "prelu": _prelu,
    "logicalNot": _unary(lambda x: ops.cast(ops.equal(x, 0), "uint8")), "quantizeLinear": _quantized, "dequantizeLinear": _dequantized,
    "instanceNormalization": _instance_normalization, "layerNormalization": _layer_normalization,
    "add": _binary(ops.add), "sub": _binary(ops.subtract), "mul": _binary(ops.multiply), "div": _binary(ops.divide), "max": _binary(ops.maximum),
    "min": _binary(ops.minimum), "pow": _binary(ops.power), "equal": _compare(ops.equal), "notEqual": _compare(ops.not_equal),
    "greater": _compare(ops.greater), "greaterOrEqual": _compare(ops.greater_equal), "lesser": _compare(ops.less),
    "lesserOrEqual": _compare(ops.less_equal),
    "logicalAnd": _compare(ops.logical_and), "logicalOr": _compare(ops.logical_or), "logicalXor": _compare(ops.logical_xor),
    "residual": _residual, "matmul": _matmul, "gemm": _gemm, "concat": _concat, "reshape": _reshape, "expand": _expand, "transpose": _transpose,
    "slice": _slice, "pad": _pad, "tile": _tile, "split": _split,
    "gather": gather, "gatherElements": gather_elements, "gatherND": gather_nd,
    "scatterElements": scatter_elements, "scatterND": scatter_nd, "where": _select,
    "attend": _attend, "resample2d": resample, "conv2d": convolve, "convTranspose2d": convolve_transposed,
    "averagePool2d": pool_average, "l2Pool2d": pool_l2, "maxPool2d": pool_max,
    "reduceL1": _reduced(lambda x, **how: ops.sum(ops.absolute(x), **how)), "reduceL2": _reduced(_l2),
    "reduceLogSum": _reduced(lambda x, **how: ops.log(ops.sum(x, **how))), "reduceLogSumExp": _reduced(ops.logsumexp), "reduceMax": _reduced(ops.max),
    "reduceMean": _reduced(ops.mean), "reduceMin": _reduced(ops.min), "reduceProduct": _reduced(ops.prod), "reduceSum": _reduced(ops.sum),
    "reduceSumSquare": _reduced(lambda x, **how: ops.sum(x * x, **how)), "reduceVariance": _reduced(ops.var),
    "argMin": _arg(ops.argmin), "argMax": _arg(ops.argmax), "gru": gru, "lstm": lstm, "gruCell": gru_cell,
    "lstmCell": lstm_cell,
}  # fmt: skip
"""The formulas by operator name. ``dropout`` and ``batchNormalization`` have a state, so they are in ``operator``."""
