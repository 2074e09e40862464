"""What recurrent operators compute, step by step. Definitions and defaults are WebNN's: gates of an LSTM in the order i o f g, of a GRU z r n."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

Options = dict[str, Any]


def _gates(weights: Any, order: str, wanted: str) -> list[Any]:
    """What belongs to each gate, in another order."""
    parts = ops.split(weights, len(order), axis=0)
    return [parts[order.index(letter)] for letter in wanted]


def _sums(x: Any, weights: Any, bias: Any, order: str, wanted: str) -> list[Any]:
    biases = _gates(bias, order, wanted) if bias is not None else [0.0] * len(wanted)
    return [
        ops.matmul(x, ops.transpose(each)) + add
        for each, add in zip(_gates(weights, order, wanted), biases, strict=True)
    ]


def _lstm_step(x: Any, state: Sequence[Any], operands: list[Any], options: Options) -> tuple[Any, Any]:
    w, r, b, rb = (*operands, None, None)[:4]
    order = options.get("layout", "iofg")
    into = zip(_sums(x, w, b, order, "iofg"), _sums(state[0], r, rb, order, "iofg"), strict=True)
    i, o, f, g = (one + other for one, other in into)
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


def lstm_cell(into: list[Any], operands: list[Any], options: Options) -> Any:
    """One step from a state of zeros."""
    begin = _begin(into[0], operands)
    return _lstm_step(into[0], (begin, begin), operands, options)[0]


def gru_cell(into: list[Any], operands: list[Any], options: Options) -> Any:
    """One step from a state of zeros."""
    return _gru_step(into[0], _begin(into[0], operands), operands, options)


def lstm(into: list[Any], operands: list[Any], options: Options) -> Any:
    """All steps, from a state of zeros; the last output, or all with ``returnSequence``."""

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        state = ops.concatenate(_lstm_step(x, ops.split(state, 2, axis=-1), operands, options), axis=-1)
        return state, state  # which is one tensor, for TensorFlow's scan wants both to have one structure

    begin = _begin(into[0], operands)
    made = _over_time(into[0], step, ops.concatenate([begin, begin], axis=-1), options)
    return made[..., : begin.shape[-1]]


def gru(into: list[Any], operands: list[Any], options: Options) -> Any:
    """All steps, from a state of zeros; the last output, or all with ``returnSequence``."""

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        hidden = _gru_step(x, state, operands, options)
        return hidden, hidden

    return _over_time(into[0], step, _begin(into[0], operands), options)


def _over_time(x: Any, step: Any, state: Any, options: Options) -> Any:
    backward = options.get("direction") == "backward"
    _, made = ops.scan(step, state, ops.transpose(x, (1, 0, 2)), reverse=backward)
    if options.get("returnSequence"):
        return ops.transpose(made, (1, 0, 2))
    return made[0] if backward else made[-1]
