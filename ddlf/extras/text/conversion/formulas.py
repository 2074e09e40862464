"""What each operator of models as text computes, on any backend of Keras. Definitions and defaults are WebNN's (https://www.w3.org/TR/webnn/).

A formula gets what comes in, the batch first; its operands, which are numbers and parameters; and its options, whose axes count without the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from ddlf.extras.text.conversion import images, indices, recurrent
from ddlf.extras.text.conversion.axes import behind_batch, of_options
from ddlf.extras.text.language.inference import RANGES

Options = dict[str, Any]
Formula = Callable[[list[Any], list[Any], Options], Any]


def _each(function: Callable[..., Any], **defaults: Any) -> Formula:
    """A formula of one tensor and some numbers."""
    return lambda into, operands, options: function(
        into[0], **{key: options.get(key, usual) for key, usual in defaults.items()}
    )


def _binary(function: Callable[[Any, Any], Any]) -> Formula:
    """A formula of what comes in and an operand, or another layer's output; axes are lined up from the last."""

    def compute(into: list[Any], operands: list[Any], options: Options) -> Any:
        one, other = into[0], into[1] if len(into) > 1 else operands[0]
        if len(into) > 1:  # the batch stays the first axis of both
            rank = max(len(one.shape), len(other.shape))
            one, other = (
                ops.reshape(each, (-1, *[1] * (rank - len(each.shape)), *each.shape[1:])) for each in (one, other)
            )
        return function(one, other)

    return compute


def _asked(function: Callable[[Any, Any], Any]) -> Formula:
    """A question with the answer 0 or 1 as uint8."""
    compute = _binary(function)
    return lambda into, operands, options: ops.cast(compute(into, operands, options), "uint8")


def _reduced(function: Callable[..., Any]) -> Formula:
    """A formula over ``axes``, by default all."""

    def compute(into: list[Any], operands: list[Any], options: Options) -> Any:
        axes = of_options(options.get("axes"), len(into[0].shape))
        return function(into[0], axis=axes, keepdims=bool(options.get("keepDimensions")))

    return compute


def _arg(function: Callable[..., Any]) -> Formula:
    def compute(into: list[Any], operands: list[Any], options: Options) -> Any:
        axis = behind_batch(options.get("axis", 0))
        found = ops.cast(function(into[0], axis=axis), "int32")
        return ops.expand_dims(found, axis) if options.get("keepDimensions") else found

    return compute


def _hard_sigmoid(x: Any, alpha: float, beta: float) -> Any:
    return ops.clip(alpha * x + beta, 0, 1)


def _elu(x: Any, alpha: float) -> Any:
    return ops.where(x > 0, x, alpha * (ops.exp(ops.minimum(x, 0)) - 1))


def _clamp(x: Any, minValue: float, maxValue: float) -> Any:
    return ops.clip(x, minValue, maxValue)


def _softmax(into: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.softmax(into[0], axis=behind_batch(options.get("axis", -1)))


def _log_softmax(into: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.log_softmax(into[0], axis=behind_batch(options.get("axis", -1)))


def _reverse(into: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.flip(into[0], axis=of_options(options.get("axes"), len(into[0].shape)))


def _triangular(into: list[Any], operands: list[Any], options: Options) -> Any:
    keep = ops.triu if options.get("upper", True) else ops.tril
    return keep(into[0], k=options.get("diagonal", 0))


def _cumulative_sum(into: list[Any], operands: list[Any], options: Options) -> Any:
    x, axis = into[0], behind_batch(options.get("axis", 0))
    if options.get("reversed"):
        x = ops.flip(x, axis=axis)
    found = ops.cumsum(x, axis=axis)
    if options.get("exclusive"):
        found = found - x
    return ops.flip(found, axis=axis) if options.get("reversed") else found


def _prelu(into: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.maximum(into[0], 0) + operands[0] * ops.minimum(into[0], 0)


def _quantized(into: list[Any], operands: list[Any], options: Options) -> Any:
    scale, zero = operands
    dtype = options.get("dtype", "int8")
    low, high = RANGES[dtype]
    return ops.cast(ops.clip(ops.round(into[0] / scale) + zero, low, high), dtype)


def _dequantized(into: list[Any], operands: list[Any], options: Options) -> Any:
    scale, zero = operands
    return (into[0] - zero) * scale


def _along(values: Any, axis: int, rank: int) -> Any:
    """A parameter of one axis, as wide as the tensor that it is multiplied with."""
    return ops.reshape(values, [1 if each != axis % rank else -1 for each in range(rank)])


def _instance_normalization(into: list[Any], operands: list[Any], options: Options) -> Any:
    x, rank = into[0], len(into[0].shape)
    channels = 1 if options.get("layout", "nchw") == "nchw" else rank - 1
    space = [axis for axis in range(1, rank) if axis != channels]
    found = normalized(x, ops.moments(x, axes=space, keepdims=True), options)
    return scaled(found, [_along(each, channels, rank) for each in operands])


def _layer_normalization(into: list[Any], operands: list[Any], options: Options) -> Any:
    x, rank = into[0], len(into[0].shape)
    axes = [each % rank for each in of_options(options.get("axes", [-1]), rank)]
    found = normalized(x, ops.moments(x, axes=axes, keepdims=True), options)
    wide = [x.shape[axis] if axis in axes else 1 for axis in range(rank)]
    return scaled(found, [ops.reshape(each, wide) for each in operands])


def normalized(x: Any, moments: tuple[Any, Any], options: Options) -> Any:
    """What is left of a mean, in units of the standard deviation."""
    mean, variance = moments
    return (x - mean) / ops.sqrt(variance + options.get("epsilon", 1e-5))


def scaled(x: Any, operands: Sequence[Any]) -> Any:
    """Multiplied with the first operand, added to the second, as far as they are there."""
    for index, each in enumerate(operands):
        x = x + each if index else x * each
    return x


def _residual(into: list[Any], operands: list[Any], options: Options) -> Any:
    total = into[0]
    for each in into[1:]:
        total = total + each
    return total


def _matmul(into: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.matmul(into[0], into[1] if len(into) > 1 else operands[0])


def _gemm(into: list[Any], operands: list[Any], options: Options) -> Any:
    other = into[1] if len(into) > 1 else operands[0]
    rest = operands if len(into) > 1 else operands[1:]
    if options.get("bTranspose"):
        other = ops.swapaxes(other, -1, -2)
    found = options.get("alpha", 1.0) * ops.matmul(into[0], other)
    return found + options.get("beta", 1.0) * rest[0] if rest else found


def _concat(into: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.concatenate(into, axis=behind_batch(options.get("axis", 0)))


def _reshape(into: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.reshape(into[0], (-1, *options["shape"]))


def _expand(into: list[Any], operands: list[Any], options: Options) -> Any:
    x, shape = into[0], tuple(options["shape"])
    x = ops.reshape(x, (-1, *[1] * (len(shape) + 1 - len(x.shape)), *x.shape[1:]))
    return ops.broadcast_to(x, (ops.shape(x)[0], *shape))


def _transpose(into: list[Any], operands: list[Any], options: Options) -> Any:
    rank = len(into[0].shape)
    order = options.get("permutation", range(rank - 2, -1, -1))
    return ops.transpose(into[0], (0, *(each + 1 for each in order)))


def _slice(into: list[Any], operands: list[Any], options: Options) -> Any:
    strides = options.get("strides", [1] * len(options["starts"]))
    cuts = [
        slice(start, start + size, stride)
        for start, size, stride in zip(options["starts"], options["sizes"], strides, strict=True)
    ]
    return into[0][(slice(None), *cuts)]


def _pad(into: list[Any], operands: list[Any], options: Options) -> Any:
    rank = len(into[0].shape) - 1
    begin, end = (options.get(key, [0] * rank) for key in ("beginningPadding", "endingPadding"))
    mode = {"reflection": "reflect"}.get(options.get("mode", "constant"), options.get("mode", "constant"))
    value = {"constant_values": options.get("value", 0)} if mode == "constant" else {}
    return ops.pad(into[0], [(0, 0), *zip(begin, end, strict=True)], mode=mode, **value)


def _tile(into: list[Any], operands: list[Any], options: Options) -> Any:
    return ops.tile(into[0], (1, *options.get("repetitions", [1] * (len(into[0].shape) - 1))))


def _split(into: list[Any], operands: list[Any], options: Options) -> Any:
    axis, splits = behind_batch(options.get("axis", 0)), options["splits"]
    where = splits if isinstance(splits, int) else [sum(splits[: end + 1]) for end in range(len(splits) - 1)]
    return ops.split(into[0], where, axis=axis)[options.get("index", 0)]


def _where(into: list[Any], operands: list[Any], options: Options) -> Any:
    """Where what comes in is not 0 the first, else the second; ``to`` is the first of them."""
    one, other = (*into[1:], *operands)
    return ops.where(ops.not_equal(into[0], 0), one, other)


def _attend(into: list[Any], operands: list[Any], options: Options) -> Any:
    """Scaled dot products of several heads (arXiv:1706.03762), with biases and a projection."""
    x, source = into[0], into[-1]
    heads, width = options.get("heads", 1), x.shape[-1]

    def divided(tensor: Any, weights: Any, bias: Any) -> Any:
        made = ops.matmul(tensor, weights) + bias
        return ops.transpose(ops.reshape(made, (-1, tensor.shape[1], heads, width // heads)), (0, 2, 1, 3))

    query, key, value = (
        divided(tensor, *operands[2 * at : 2 * at + 2]) for at, tensor in enumerate((x, source, source))
    )
    scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))) / math.sqrt(width // heads)
    if options.get("mask") == "causal":
        seen = ops.tril(ops.ones((x.shape[1], source.shape[1]), dtype="bool"))
        scores = ops.where(seen, scores, ops.cast(-1e9 if scores.dtype != "float16" else -6e4, scores.dtype))
    mixed = ops.transpose(ops.matmul(ops.softmax(scores), value), (0, 2, 1, 3))
    return ops.matmul(ops.reshape(mixed, (-1, x.shape[1], width)), operands[6]) + operands[7]


def _l2(x: Any, **how: Any) -> Any:
    return ops.sqrt(ops.sum(x * x, **how))


FORMULAS: dict[str, Formula] = {
    "abs": _each(ops.absolute), "floor": _each(ops.floor), "ceil": _each(ops.ceil), "identity": _each(lambda x: x), "neg": _each(ops.negative),
    "sign": _each(ops.sign), "relu": _each(lambda x: ops.maximum(x, 0)), "cos": _each(ops.cos), "erf": _each(ops.erf), "exp": _each(ops.exp),
    "log": _each(ops.log), "reciprocal": _each(ops.reciprocal), "sin": _each(ops.sin), "sqrt": _each(ops.sqrt), "tan": _each(ops.tan),
    "tanh": _each(ops.tanh), "sigmoid": _each(ops.sigmoid), "softsign": _each(ops.softsign), "softplus": _each(ops.softplus),
    "hardSwish": _each(lambda x: x * ops.clip(x + 3, 0, 6) / 6), "gelu": _each(lambda x: x / 2 * (1 + ops.erf(x / math.sqrt(2)))),
    "elu": _each(_elu, alpha=1.0), "leakyRelu": _each(lambda x, alpha: ops.maximum(x, 0) + alpha * ops.minimum(x, 0), alpha=0.01),
    "hardSigmoid": _each(_hard_sigmoid, alpha=0.2, beta=0.5), "linear": _each(lambda x, alpha, beta: alpha * x + beta, alpha=1.0, beta=0.0),
    "clamp": _each(_clamp, minValue=-math.inf, maxValue=math.inf), "softmax": _softmax, "logSoftmax": _log_softmax, "cast": _each(lambda x: x),
    "reverse": _reverse, "triangular": _triangular, "cumulativeSum": _cumulative_sum, "prelu": _prelu,
    "logicalNot": _each(lambda x: ops.cast(ops.equal(x, 0), "uint8")), "quantizeLinear": _quantized, "dequantizeLinear": _dequantized,
    "instanceNormalization": _instance_normalization, "layerNormalization": _layer_normalization,
    "add": _binary(ops.add), "sub": _binary(ops.subtract), "mul": _binary(ops.multiply), "div": _binary(ops.divide), "max": _binary(ops.maximum),
    "min": _binary(ops.minimum), "pow": _binary(ops.power), "equal": _asked(ops.equal), "notEqual": _asked(ops.not_equal),
    "greater": _asked(ops.greater), "greaterOrEqual": _asked(ops.greater_equal), "lesser": _asked(ops.less), "lesserOrEqual": _asked(ops.less_equal),
    "logicalAnd": _asked(ops.logical_and), "logicalOr": _asked(ops.logical_or), "logicalXor": _asked(ops.logical_xor),
    "residual": _residual, "matmul": _matmul, "gemm": _gemm, "concat": _concat, "reshape": _reshape, "expand": _expand, "transpose": _transpose,
    "slice": _slice, "pad": _pad, "tile": _tile, "split": _split,
    "gather": indices.gather, "gatherElements": indices.gather_elements, "gatherND": indices.gather_nd,
    "scatterElements": indices.scatter_elements, "scatterND": indices.scatter_nd, "where": _where,
    "attend": _attend, "resample2d": images.resample, "conv2d": images.convolve, "convTranspose2d": images.convolve_transposed,
    "averagePool2d": images.pool_average, "l2Pool2d": images.pool_l2, "maxPool2d": images.pool_max,
    "reduceL1": _reduced(lambda x, **how: ops.sum(ops.absolute(x), **how)), "reduceL2": _reduced(_l2),
    "reduceLogSum": _reduced(lambda x, **how: ops.log(ops.sum(x, **how))), "reduceLogSumExp": _reduced(ops.logsumexp), "reduceMax": _reduced(ops.max),
    "reduceMean": _reduced(ops.mean), "reduceMin": _reduced(ops.min), "reduceProduct": _reduced(ops.prod), "reduceSum": _reduced(ops.sum),
    "reduceSumSquare": _reduced(lambda x, **how: ops.sum(x * x, **how)), "reduceVariance": _reduced(ops.var),
    "argMin": _arg(ops.argmin), "argMax": _arg(ops.argmax), "gru": recurrent.gru, "lstm": recurrent.lstm, "gruCell": recurrent.gru_cell,
    "lstmCell": recurrent.lstm_cell,
}  # fmt: skip
"""By the operator's name; ``dropout`` and ``batchNormalization`` have a state, and are in ``operator``."""
