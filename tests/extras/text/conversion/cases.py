"""Operators with their inputs and their formulas in NumPy. The axes of NumPy include the batch.

``python -m tests.extras.text.conversion.cases`` tests all operators and their gradients on the backend of
``KERAS_BACKEND``. Keras computes in float64 only with TensorFlow.
"""

import math
from typing import NamedTuple

import numpy as np

BATCH = 3


class Case(NamedTuple):
    """An operator with its parameters, and the shapes of its input tensors without the batch."""

    name: str
    shapes: list
    operands: list
    options: dict
    formula: object
    low: float = -2.0
    high: float = 2.0
    smooth: bool = True


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


erf = np.vectorize(math.erf)


def unary(name, formula, options=None, low=-2.0, high=2.0, smooth=True, shape=(4, 3)):
    return Case(name, [shape], [], options or {}, lambda x: formula(x[0]), low, high, smooth)


def conv(x, w, b=0.0, padding=(0, 0, 0, 0), strides=(1, 1), dilations=(1, 1), groups=1):
    """Compute a convolution by its sum. The axes of x are batch, channels, height, width; of w: out, in, height, width."""
    x = np.pad(x, [(0, 0), (0, 0), tuple(padding[:2]), tuple(padding[2:])])
    out, channels, high, wide = w.shape
    rows = (x.shape[2] - (high - 1) * dilations[0] - 1) // strides[0] + 1
    columns = (x.shape[3] - (wide - 1) * dilations[1] - 1) // strides[1] + 1
    result = np.zeros((len(x), out, rows, columns))
    for o in range(out):
        first = o // (out // groups) * channels
        for i, j, c, h, v in np.ndindex(rows, columns, channels, high, wide):
            result[:, o, i, j] += (
                w[o, c, h, v] * x[:, first + c, i * strides[0] + h * dilations[0], j * strides[1] + v * dilations[1]]
            )
    return result + np.reshape(b, (-1, 1, 1))


def conv_transposed(x, w, padding=(0, 0, 0, 0), strides=(1, 1), extra=(0, 0)):
    """Compute a transposed convolution. The axes of w are out, in, height, width."""
    out, _, high, wide = w.shape
    rows, columns = (
        (size - 1) * stride + window for size, stride, window in zip(x.shape[2:], strides, (high, wide), strict=True)
    )
    result = np.zeros((len(x), out, rows + extra[0], columns + extra[1]))
    for i, j, h, v in np.ndindex(x.shape[2], x.shape[3], high, wide):
        result[:, :, i * strides[0] + h, j * strides[1] + v] += x[:, :, i, j] @ w[:, :, h, v].T
    return result[:, :, padding[0] : result.shape[2] - padding[1], padding[2] : result.shape[3] - padding[3]]


def window_values(x, size, dilations, strides):
    """Return the values of all windows. The first axis counts the positions in a window, which dilations set apart."""
    wide = [(length - 1) * gap + 1 for length, gap in zip(size, dilations, strict=True)]
    rows, columns = ((x.shape[2 + axis] - wide[axis]) // strides[axis] + 1 for axis in (0, 1))
    i, j = np.meshgrid(np.arange(rows) * strides[0], np.arange(columns) * strides[1], indexing="ij")
    return np.stack([x[:, :, i + h * dilations[0], j + v * dilations[1]] for h, v in np.ndindex(*size)])


def windows(x, size, strides, padding, value, function):
    x = np.pad(x, [(0, 0), (0, 0), tuple(padding[:2]), tuple(padding[2:])], constant_values=value)
    rows, columns = ((x.shape[2 + axis] - size[axis]) // strides[axis] + 1 for axis in (0, 1))
    return np.stack([
        np.stack([function(x[:, :, i * strides[0] : i * strides[0] + size[0], j * strides[1] : j * strides[1] + size[1]], axis=(2, 3))
                  for j in range(columns)], axis=-1)
        for i in range(rows)
    ], axis=-2)  # fmt: skip


def normalized(x, axes, scale=1.0, bias=0.0, epsilon=1e-5):
    return (x - x.mean(axis=axes, keepdims=True)) / np.sqrt(x.var(axis=axes, keepdims=True) + epsilon) * scale + bias


def lstm(x, w, r, b, rb, order="iofg", every=False):
    def gates(of):
        return dict(zip(order, np.split(of, 4), strict=True))

    hidden, cell, all_of = np.zeros((len(x), r.shape[1])), 0.0, []
    for step in range(x.shape[1]):
        z = {g: x[:, step] @ gates(w)[g].T + gates(b)[g] + hidden @ gates(r)[g].T + gates(rb)[g] for g in "iofg"}
        cell = sigmoid(z["f"]) * cell + sigmoid(z["i"]) * np.tanh(z["g"])
        hidden = sigmoid(z["o"]) * np.tanh(cell)
        all_of.append(hidden)
    return np.stack(all_of, 1) if every else hidden


def gru(x, w, r, b, rb, after=True):
    wz, wr, wn = np.split(w, 3)
    rz, rr, rn = np.split(r, 3)
    bz, br, bn = np.split(b, 3)
    qz, qr, qn = np.split(rb, 3)
    hidden = np.zeros((len(x), r.shape[1]))
    for step in range(x.shape[1]):
        now = x[:, step]
        z, reset = sigmoid(now @ wz.T + bz + hidden @ rz.T + qz), sigmoid(now @ wr.T + br + hidden @ rr.T + qr)
        mixed = reset * (hidden @ rn.T + qn) if after else (reset * hidden) @ rn.T + qn
        hidden = (1 - z) * np.tanh(now @ wn.T + bn + mixed) + z * hidden
    return hidden


def attend(x, source, *weights, heads=1, causal=False):
    q, qb, k, kb, v, vb, out, outb = weights
    width = x.shape[-1] // heads
    heads_out = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        scores = (x @ q + qb)[..., part] @ (source @ k + kb)[..., part].transpose(0, 2, 1) / np.sqrt(width)
        if causal:
            scores = np.where(np.tril(np.ones(scores.shape[1:])) > 0, scores, -np.inf)
        heads_out.append(softmax(scores) @ (source @ v + vb)[..., part])
    return np.concatenate(heads_out, -1) @ out + outb


def exclusive(x):
    return np.flip(np.cumsum(np.flip(x, 1), 1), 1) - x


def elements_written(x, indices, values, axis):
    x = x.copy()
    np.put_along_axis(x, indices.astype(int), values, axis)
    return x


def rows_written(x, indices, values):
    x = x.copy()
    for sample, rows, written in zip(x, indices.astype(int), values, strict=True):
        sample[tuple(np.moveaxis(rows, -1, 0))] = written
    return x


def scatter_indices(case, random):
    """Return the indices of a scatter: distinct in a sample, plus 0.5 so that rounding does not change them."""
    shape, index_shape = case.shapes[:2]
    if case.name == "scatterElements":
        axis = case.options.get("axis", 0) % len(shape)
        return np.argsort(random.random((BATCH, *shape)), axis + 1).take(range(index_shape[axis]), axis + 1) + 0.5
    into = shape[: index_shape[-1]]
    flat = [random.permutation(math.prod(into))[: math.prod(index_shape[:-1])] for _ in range(BATCH)]
    return np.stack(np.unravel_index(flat, into), -1).reshape(BATCH, *index_shape) + 0.5


IMAGE, SEQUENCE = (2, 6, 5), (4, 3)
LSTM = [(8, 3), (8, 2), (8,), (8,)]
GRU = [(6, 3), (6, 2), (6,), (6,)]
ATTEND = [(4, 4), (4,)] * 4
CASES = [
    unary("abs", np.abs),
    unary("floor", np.floor, smooth=False),
    unary("ceil", np.ceil, smooth=False),
    unary("identity", lambda x: x),
    unary("neg", np.negative),
    unary("sign", np.sign, smooth=False),
    unary("relu", lambda x: np.maximum(x, 0)),
    unary("cos", np.cos),
    unary("erf", erf),
    unary("exp", np.exp),
    unary("log", np.log, low=0.2),
    unary("reciprocal", lambda x: 1 / x, low=0.5),
    unary("sin", np.sin),
    unary("sqrt", np.sqrt, low=0.2),
    unary("tan", np.tan, low=-1.0, high=1.0),
    unary("tanh", np.tanh),
    unary("sigmoid", sigmoid),
    unary("softsign", lambda x: x / (1 + np.abs(x))),
    unary("softplus", lambda x: np.log1p(np.exp(x))),
    unary("hardSwish", lambda x: x * np.clip(x + 3, 0, 6) / 6),
    unary("gelu", lambda x: x / 2 * (1 + erf(x / np.sqrt(2)))),
    unary("elu", lambda x: np.where(x > 0, x, 0.7 * np.expm1(x)), {"alpha": 0.7}),
    unary("leakyRelu", lambda x: np.where(x > 0, x, 0.01 * x)),
    unary("hardSigmoid", lambda x: np.clip(0.2 * x + 0.5, 0, 1), low=-4.0, high=4.0),
    unary("linear", lambda x: 3 * x - 1, {"alpha": 3, "beta": -1}),
    unary("clamp", lambda x: np.clip(x, -1, 0.5), {"minValue": -1, "maxValue": 0.5}),
    unary("clamp", lambda x: np.maximum(x, 0.25), {"minValue": 0.25}),
    unary("softmax", softmax),
    unary("softmax", lambda x: softmax(x, 1), {"axis": 0}),
    unary("logSoftmax", lambda x: np.log(softmax(x))),
    unary("reverse", lambda x: x[:, ::-1, ::-1]),
    unary("reverse", lambda x: x[:, :, ::-1], {"axes": [1]}),
    unary("triangular", np.triu),
    unary("triangular", lambda x: np.tril(x, -1), {"upper": False, "diagonal": -1}),
    unary("cumulativeSum", lambda x: np.cumsum(x, 1)),
    unary("cumulativeSum", exclusive, {"exclusive": True, "reversed": True}),
    unary("logicalNot", lambda x: x == 0, smooth=False),
    unary("transpose", lambda x: x.transpose(0, 2, 1)),
    unary("transpose", lambda x: x.transpose(0, 2, 3, 1), {"permutation": [1, 2, 0]}, shape=IMAGE),
    unary("slice", lambda x: x[:, 1:4:2, 0:2], {"starts": [1, 0], "sizes": [3, 2], "strides": [2, 1]}),
    unary(
        "pad",
        lambda x: np.pad(x, [(0, 0), (1, 0), (0, 2)], constant_values=7),
        {"beginningPadding": [1, 0], "endingPadding": [0, 2], "value": 7},
    ),
    unary(
        "pad",
        lambda x: np.pad(x, [(0, 0), (2, 0), (0, 1)], "reflect"),
        {"beginningPadding": [2, 0], "endingPadding": [0, 1], "mode": "reflection"},
    ),
    unary("tile", lambda x: np.tile(x, (1, 2, 3)), {"repetitions": [2, 3]}),
    unary("reshape", lambda x: x.reshape(-1, 2, 6), {"shape": [2, 6]}),
    unary("expand", lambda x: np.broadcast_to(x[:, None], (BATCH, 2, 4, 3)), {"shape": [2, 4, 3]}),
    unary("split", lambda x: x[:, 2:], {"splits": 2, "index": 1}),
    unary("split", lambda x: x[:, :, 1:], {"splits": [1, 2], "index": 1, "axis": -1}),
    unary("reduceL1", lambda x: np.abs(x).sum((1, 2))),
    unary("reduceL2", lambda x: np.sqrt((x**2).sum(2)), {"axes": [1]}),
    unary("reduceLogSum", lambda x: np.log(x.sum(1)), {"axes": [0]}, low=0.1),
    unary("reduceLogSumExp", lambda x: np.log(np.exp(x).sum(2)), {"axes": [-1]}),
    unary("reduceMax", lambda x: x.max(2, keepdims=True), {"axes": [1], "keepDimensions": True}),
    unary("reduceMean", lambda x: x.mean((1, 2))),
    unary("reduceMin", lambda x: x.min(1), {"axes": [0]}),
    unary("reduceProduct", lambda x: x.prod(2), {"axes": [1]}),
    unary("reduceSum", lambda x: x.sum((1, 2))),
    unary("reduceSumSquare", lambda x: (x**2).sum(1), {"axes": [0]}),
    unary("reduceVariance", lambda x: x.var(2), {"axes": [1]}),
    unary("argMin", lambda x: x.argmin(1), smooth=False),
    unary("argMax", lambda x: x.argmax(2)[..., None], {"axis": 1, "keepDimensions": True}, smooth=False),
    unary("resample2d", lambda x: x.repeat(2, 2).repeat(3, 3), {"scales": [2, 3]}, shape=IMAGE),
    unary(
        "resample2d",
        lambda x: x.repeat(2, 1),
        {"sizes": [4, 6], "axes": [0, 1], "mode": "nearest-neighbor"},
        shape=IMAGE,
    ),
    unary("averagePool2d", lambda x: x.mean((2, 3), keepdims=True), shape=IMAGE),
    unary(
        "averagePool2d",
        lambda x: windows(x, (2, 3), (2, 1), (0,) * 4, 0, np.mean),
        {"windowDimensions": [2, 3], "strides": [2, 1]},
        shape=IMAGE,
    ),
    unary(
        "averagePool2d",
        lambda x: windows(x, (2, 2), (1, 1), (1, 0, 0, 1), np.nan, np.nanmean),
        {"windowDimensions": [2, 2], "padding": [1, 0, 0, 1]},
        shape=IMAGE,
    ),
    unary(
        "l2Pool2d",
        lambda x: np.sqrt(windows(x**2, (2, 2), (2, 2), (0,) * 4, 0, np.sum)),
        {"windowDimensions": [2, 2], "strides": [2, 2]},
        shape=IMAGE,
    ),
    unary(
        "maxPool2d",
        lambda x: windows(x, (3, 2), (1, 2), (1, 1, 0, 1), -np.inf, np.max),
        {"windowDimensions": [3, 2], "strides": [1, 2], "padding": [1, 1, 0, 1]},
        shape=IMAGE,
    ),
    unary("instanceNormalization", lambda x: normalized(x, (2, 3)), shape=IMAGE),
    unary("layerNormalization", lambda x: normalized(x, (2,))),
    Case(
        "instanceNormalization",
        [(6, 5, 2)],
        [(2,), (2,)],
        {"layout": "nhwc"},
        lambda x, s, b: normalized(x[0], (1, 2), s, b),
    ),
    Case(
        "layerNormalization",
        [(4, 3)],
        [(4, 3), (4, 3)],
        {"axes": [0, 1], "epsilon": 0.1},
        lambda x, s, b: normalized(x[0], (1, 2), s, b, 0.1),
    ),
    Case("prelu", [(4, 3)], [(3,)], {}, lambda x, s: np.where(x[0] > 0, x[0], s * x[0])),
    Case(
        "quantizeLinear",
        [(4, 3)],
        [(), ()],
        {},
        lambda x, s, z: np.clip(np.round(x[0] / s) + z, -128, 127).astype("int8"),
        low=0.5,
        smooth=False,
    ),
    Case("dequantizeLinear", [(4, 3)], [(), ()], {}, lambda x, s, z: (x[0] - z) * s, smooth=False),
    *[
        Case(name, [(4, 3), (3,)], [], {}, lambda x, f=f: f(x[0], x[1][:, None]), low=0.3)
        for name, f in {
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "div": np.divide,
            "max": np.maximum,
            "min": np.minimum,
            "pow": np.power,
        }.items()
    ],
    *[
        Case(name, [(4, 3)], [(3,)], {}, lambda x, w, f=f: f(x[0], w), smooth=False)
        for name, f in {
            "equal": np.equal,
            "notEqual": np.not_equal,
            "greater": np.greater,
            "greaterOrEqual": np.greater_equal,
            "lesser": np.less,
            "lesserOrEqual": np.less_equal,
            "logicalAnd": np.logical_and,
            "logicalOr": np.logical_or,
            "logicalXor": np.logical_xor,
        }.items()
    ],
    Case("sub", [(4, 3)], [(3,)], {}, lambda x, w: x[0] - w),
    Case("residual", [(4, 3), (4, 3), (4, 3)], [], {}, sum),
    Case("concat", [(4, 3), (2, 3)], [], {}, lambda x: np.concatenate(x, 1)),
    Case("matmul", [(4, 3)], [(3, 2)], {}, lambda x, w: x[0] @ w),
    Case("matmul", [(4, 3), (3, 2)], [], {}, lambda x: x[0] @ x[1]),
    Case(
        "gemm",
        [(4, 3)],
        [(2, 3), (2,)],
        {"alpha": 2, "beta": 3, "bTranspose": True},
        lambda x, w, c: 2 * x[0] @ w.T + 3 * c,
    ),
    Case(
        "conv2d",
        [IMAGE],
        [(3, 2, 2, 3), (3,)],
        {"padding": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 1]},
        lambda x, w, b: conv(x[0], w, b, (1, 0, 2, 1), (2, 1)),
    ),
    Case(
        "conv2d",
        [IMAGE],
        [(4, 1, 2, 2)],
        {"groups": 2, "dilations": [2, 1]},
        lambda x, w: conv(x[0], w, dilations=(2, 1), groups=2),
    ),
    Case(
        "conv2d",
        [(6, 5, 2)],
        [(2, 2, 2, 3)],
        {"inputLayout": "nhwc", "filterLayout": "hwio"},
        lambda x, w: conv(x[0].transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)).transpose(0, 2, 3, 1),
    ),
    Case(
        "convTranspose2d",
        [IMAGE],
        [(3, 2, 3, 2)],
        {"strides": [2, 3], "padding": [1, 0, 0, 1], "outputPadding": [1, 0]},
        lambda x, w: conv_transposed(x[0], w, (1, 0, 0, 1), (2, 3), (1, 0)),
    ),
    Case(
        "convTranspose2d",
        [IMAGE],
        [(2, 2, 3, 2)],
        {"strides": [2, 1], "groups": 2},
        lambda x, w: np.concatenate(
            [conv_transposed(x[0][:, at : at + 1], w[:, at : at + 1], strides=(2, 1)) for at in (0, 1)], 1
        ),
    ),
    unary(
        "maxPool2d",
        lambda x: window_values(x, (2, 2), (2, 1), (2, 1)).max(0),
        {"windowDimensions": [2, 2], "dilations": [2, 1], "strides": [2, 1]},
        shape=IMAGE,
    ),
    unary(
        "averagePool2d",
        lambda x: np.nanmean(
            window_values(np.pad(x, [(0, 0), (0, 0), (1, 1), (0, 0)], constant_values=np.nan), (2, 2), (1, 3), (1, 1)),
            0,
        ),
        {"windowDimensions": [2, 2], "dilations": [1, 3], "padding": [1, 1, 0, 0]},
        shape=IMAGE,
    ),
    unary(
        "l2Pool2d",
        lambda x: np.sqrt((window_values(x, (2, 2), (2, 2), (1, 1)) ** 2).sum(0)),
        {"windowDimensions": [2, 2], "dilations": [2, 2]},
        shape=IMAGE,
    ),
    Case("gather", [(4, 3)], [], {"axis": 1}, None),
    Case(
        "gather",
        [(4, 3), (2,)],
        [],
        {},
        lambda x: np.stack([a[i.astype(int)] for a, i in zip(*x, strict=True)]),
        low=0.0,
    ),
    Case(
        "gather",
        [(4, 3), (2, 2)],
        [],
        {"axis": 1},
        lambda x: np.stack([a[:, i.astype(int)] for a, i in zip(*x, strict=True)]),
        low=0.0,
    ),
    Case(
        "gatherElements",
        [(4, 3), (2, 3)],
        [],
        {},
        lambda x: np.take_along_axis(x[0], x[1].astype(int), 1),
        low=0.0,
    ),
    Case(
        "gatherND",
        [(4, 3), (5, 1)],
        [],
        {},
        lambda x: np.stack([a[i[:, 0].astype(int)] for a, i in zip(*x, strict=True)]),
        low=0.0,
    ),
    Case(
        "gatherND",
        [(4, 3, 2), (2, 5, 2)],
        [],
        {},
        lambda x: np.stack([a[tuple(np.moveaxis(i.astype(int), -1, 0))] for a, i in zip(*x, strict=True)]),
        low=0.0,
    ),
    Case("scatterElements", [(4, 3), (2, 3), (2, 3)], [], {}, lambda x: elements_written(*x, 1)),
    Case("scatterElements", [(2, 4), (2, 3), (2, 3)], [], {"axis": -1}, lambda x: elements_written(*x, 2)),
    Case("scatterND", [(4, 3), (2, 1), (2, 3)], [], {}, lambda x: rows_written(*x)),
    Case("scatterND", [(4, 3, 2), (3, 2), (3, 2)], [], {}, lambda x: rows_written(*x)),
    Case("where", [(4, 3), (4, 3)], [(3,)], {}, lambda x, w: np.where(x[0] != 0, x[1], w)),
    Case("lstm", [SEQUENCE], LSTM, {}, lambda x, *w: lstm(x[0], *w)),
    Case(
        "lstm",
        [SEQUENCE],
        LSTM,
        {"returnSequence": True, "layout": "ifgo"},
        lambda x, *w: lstm(x[0], *w, order="ifgo", every=True),
    ),
    Case("lstm", [SEQUENCE], LSTM, {"direction": "backward"}, lambda x, *w: lstm(x[0][:, ::-1], *w)),
    Case("gru", [SEQUENCE], GRU, {}, lambda x, *w: gru(x[0], *w)),
    Case("gru", [SEQUENCE], GRU, {"resetAfter": False}, lambda x, *w: gru(x[0], *w, after=False)),
    Case("lstmCell", [(3,)], LSTM, {}, lambda x, *w: lstm(x[0][:, None], *w)),
    Case("gruCell", [(3,)], GRU, {}, lambda x, *w: gru(x[0][:, None], *w)),
    Case(
        "attend",
        [(5, 4)],
        ATTEND,
        {"heads": 2, "mask": "causal"},
        lambda x, *w: attend(x[0], x[0], *w, heads=2, causal=True),
    ),
    Case("attend", [(5, 4), (3, 4)], ATTEND, {}, lambda x, *w: attend(x[0], x[1], *w)),
]
CASES = [
    case if case.formula else case._replace(shapes=[(4, 3)], formula=lambda x, i: x[0][:, :, i], smooth=False)
    for case in CASES
]


def data(case, seed=0):
    """Return inputs and parameters, away from points where functions are not differentiable."""
    random = np.random.default_rng(seed)
    into = [random.uniform(case.low, case.high, (BATCH, *shape)) for shape in case.shapes]
    operands = [random.uniform(max(case.low, 0.1), case.high, shape) for shape in case.operands]
    if case.name.startswith("scatter"):
        into[1] = scatter_indices(case, random)
    if case.name == "gather" and len(into) == 1:
        operands = [2]
    return into, operands


def computed(case, into, operands):
    """Return the result of the operator as an array of NumPy."""
    from keras import ops

    from ddlf.extras.text.conversion.formulas import FORMULAS

    def formula(values):
        arrays = iter(values[len(into) :])
        rest = [operand if isinstance(operand, int) else next(arrays) for operand in operands]
        return FORMULAS[case.name](values[: len(into)], rest, case.options)

    floats = [*into, *(operand for operand in operands if not isinstance(operand, int))]
    values = [ops.convert_to_tensor(operand, dtype="float64") for operand in floats]
    return np.asarray(ops.convert_to_numpy(compiled(formula)(values)))


def compiled(function):
    """Return the function. On JAX, compile it as a whole, because otherwise JAX compiles each operation."""
    import keras

    if keras.backend.backend() != "jax":
        return function
    import jax

    return jax.jit(function)


def gradients(case, into, operands, factor):
    """Return the gradients of the sum of products with ``factor``, for each input and parameter."""
    import keras
    from keras import ops

    from ddlf.extras.text.conversion.formulas import FORMULAS

    def total(values):
        tensors = [ops.convert_to_tensor(array, dtype="float64") for array in values]
        result = FORMULAS[case.name](tensors[: len(into)], tensors[len(into) :], case.options)
        return ops.sum(result * ops.convert_to_tensor(factor, dtype="float64"))

    values = [*into, *operands]
    if keras.backend.backend() == "jax":
        import jax

        return [np.asarray(gradient) for gradient in compiled(jax.grad(total))(values)]
    import tensorflow as tf

    variables = [tf.constant(gradient, dtype="float64") for gradient in values]
    with tf.GradientTape() as tape:
        tape.watch(variables)
        result = total(variables)
    return [
        np.zeros_like(value) if gradient is None else gradient.numpy()
        for gradient, value in zip(tape.gradient(result, variables), values, strict=True)
    ]


def hold_forward(case, within=1e-9):
    """Compare an operator with NumPy."""
    into, operands = data(case)
    expected = np.asarray(case.formula(into, *operands))
    result = computed(case, into, operands)
    assert result.shape == expected.shape, (case.name, result.shape, expected.shape)
    np.testing.assert_allclose(result, expected, rtol=within, atol=within, err_msg=f"{case.name} {case.options}")


def hold_gradients(case, step=1e-6, within=1e-5):
    """Compare gradients with central differences of NumPy's results, along a direction for each input and parameter."""
    into, operands = data(case, seed=1)
    random = np.random.default_rng(2)
    expected = np.asarray(case.formula(into, *operands))
    factor = random.normal(size=expected.shape)
    values = [*into, *operands]
    for number, gradient in enumerate(gradients(case, into, operands, factor)):
        direction = random.normal(size=values[number].shape)
        ends = []
        for sign in (1, -1):
            moved = [*values]
            moved[number] = values[number] + sign * step * direction
            ends.append((case.formula(moved[: len(into)], *moved[len(into) :]) * factor).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(
            (gradient * direction).sum(),
            slope,
            rtol=within,
            atol=within,
            err_msg=f"{case.name} {case.options} {number}",
        )


def main(every=1):
    """Test all cases, and the gradients of each ``every``-th case. Print the number of cases."""
    import keras

    exact = keras.backend.backend() == "tensorflow"
    for number, case in enumerate(CASES):
        hold_forward(case, 1e-9 if exact else 1e-5)
        if case.smooth and number % every == 0:
            hold_gradients(case, within=1e-5 if exact else 1e-3)
    print(f"{len(CASES)} cases on {keras.backend.backend()}")


if __name__ == "__main__":
    main()
