"""Rules about sizes: how much of a picture an output sees, and how much memory a step takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ddlf.extras.advice.facts import Facts, Layer
from ddlf.extras.advice.rule import Found, Rule

SEEN = 0.5
"""Share of a picture's side that an output ought to see."""
MUCH = 0.8
"""Share of all memory that a step may take."""
WHOLE = math.inf
SLIDING = frozenset({"Conv2D", "SeparableConv2D", "DepthwiseConv2D", "MaxPooling2D", "AveragePooling2D"})
GLOBAL = frozenset({"GlobalAveragePooling2D", "GlobalMaxPooling2D"})
PASSING = frozenset(
    {"Activation", "ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "Softmax", "Sigmoid", "Tanh", "Gelu", "Silu", "Relu", "Bias", "Identity", "Cast"}
    | {"BatchNormalization", "LayerNormalization", "Dropout", "SpatialDropout2D", "Rescaling", "Normalization", "ZeroPadding2D"}
    | {"Add", "Concatenate", "Average", "Multiply", "Subtract", "Maximum", "Dense", "Reshape", "Flatten"}
)  # fmt: skip
"""What mixes no places of a picture, as long as it has places."""
Field = tuple[float, float, bool]
"""Pixels that a value depends on along a side, pixels between neighbours, and whether places were put together."""


def _pair(value: Any, usual: int) -> int:
    return usual if value is None else int(max(value) if isinstance(value, list | tuple) else value)


def _field(layer: Layer, ins: list[Field]) -> Field:
    """What an output of a layer sees."""
    seen, apart, joined = max(ins)
    if layer.kind in SLIDING:
        kernel = layer.config.get("kernel_size", layer.config.get("pool_size"))
        if kernel is None:  # an operator that pools all there is
            return seen, apart, True
        size, stride = _pair(kernel, 1), layer.config.get("strides")
        step = _pair(stride, size if "Pooling" in layer.kind else 1)
        wide = (size - 1) * _pair(layer.config.get("dilation_rate"), 1)
        return seen + wide * apart, apart * step, joined
    if layer.kind in GLOBAL:
        return seen, apart, True
    has_places = len(layer.before) == 3
    if layer.kind == "Flatten" and has_places and math.prod(size or 1 for size in layer.before[:2]) > 1:
        return WHOLE, apart, True
    return (seen, apart, joined) if layer.kind in PASSING else (WHOLE, apart, joined)


def _small_field(facts: Facts) -> Iterator[Found]:
    shapes = [shape for _, shape, _ in facts.inputs]
    if not shapes or not all(len(shape) == 3 and shape[0] and shape[1] for shape in shapes):
        return
    side = max(size or 0 for shape in shapes for size in shape[:2])
    begin: Field = (1.0, 1.0, False)
    fields: dict[str, Field] = {}
    last: dict[str, str] = {}
    for layer in facts.layers:
        ins = [fields.get(name, begin) for name in layer.reads]  # what no layer makes is an input
        if not ins:
            fields[layer.name] = (WHOLE, 1.0, False)
            continue
        fields[layer.name] = _field(layer, ins)
        before = next((last[name] for name in layer.reads if name in last), "")
        last[layer.name] = layer.name if layer.kind in SLIDING else before
    for head in facts.heads:
        seen, _, joined = fields.get(head.layer, (WHOLE, 1.0, False))
        if joined and seen < SEEN * side and last.get(head.layer):
            yield Found(
                f"each value before the pictures' places are put together sees {seen:.0f} x {seen:.0f} pixels of {side} x {side}",
                ("layer", last[head.layer]),
            )


def _much_memory(facts: Facts) -> Iterator[Found]:
    if not facts.memory or not facts.layers:
        return
    rows = min(int(facts.settings.get("batch_size", 32)), facts.samples or 1)
    kept = 2 + (facts.optimizer.keeps if facts.optimizer is not None else 0)  # weights, gradients, and the optimizer's
    parts = {
        "weights, gradients and optimizer": 4 * kept * sum(one.parameters for one in facts.layers),
        f"outputs of all layers for {rows:,} samples": 4 * rows * sum(_values(one) for one in facts.layers),
    }
    if sum(parts.values()) > MUCH * facts.memory:
        what, size = max(parts.items(), key=lambda part: part[1])
        yield Found(
            f"a step takes about {sum(parts.values()) / 1e9:,.0f} GB, most of it for {what} ({size / 1e9:,.0f} GB), and this machine has "
            f"{facts.memory / 1e9:,.0f} GB",
            ("setting", "batch_size") if "samples" in what else ("method", "create_model"),
        )


def _values(layer: Layer) -> int:
    return math.prod(size or 1 for size in layer.shape) if layer.shape else 0


FIELDS = (
    Rule(
        id="M18",
        severity="W",
        title="a receptive field smaller than half of the picture",
        look=_small_field,
        why="What is larger than that is never seen as a whole: only its texture is.",
        fix="Pool or stride earlier, add layers, or dilate filters (dilation_rate=2).",
        source="Luo et al., Understanding the Effective Receptive Field, arXiv:1701.04128",
    ),
    Rule(
        id="T12",
        severity="W",
        title="a step that does not fit into memory",
        look=_much_memory,
        why="A process that asks for more than there is gets killed in its first step, and on a worker with all that it holds.",
        fix="Take a smaller batch_size, or smaller layers.",
        source="4 bytes for each weight, its gradient, what the optimizer keeps of it, and each output that the way back needs",
    ),
)
