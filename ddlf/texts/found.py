"""What the rules look at: facts of a model that is text, and of the arrays it is to learn. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ddlf.models.deciding import DROPOUTS, MOST_NUMBERS, NORMALIZING, Facts, Input, Labels, Output
from ddlf.notation.graph import Graph, Head, Node, consumers
from ddlf.notation.model import Model
from ddlf.notation.operators import DTYPES, is_keras
from ddlf.notation.shapes import options_of

PASSING = frozenset({"identity", "cast", "reshape", "Flatten", "Reshape", "Identity", *DROPOUTS})
"""What changes no value: the activation is that before it."""
READS_NUMBERS = frozenset({"Embedding", "StringLookup", "IntegerLookup", "CategoryEncoding", "Hashing"})
WHOLE = DTYPES[3:]
FAR = 6.0
SIGMA = 1.4826
"""Of a normal distribution: the deviation, as a multiple of the median distance from the median."""
LINEAR = ("input", "matmul", "gemm", "add", "residual", "conv2d", "convTranspose2d", "linear")


def blocks_of(model: Model) -> dict[str, str]:
    """The block of each output, by the output's name."""
    return {head.name: head.block for head in model.graph.heads}


def inputs_of(graph: Graph) -> list[Node]:
    """The inputs, in the order of the text."""
    return sorted((node for node in graph.nodes if node.operator == "input"), key=lambda node: node.at)


def by_name(data: Any, names: list[str]) -> dict[str, Any]:
    """Arrays by the names of their blocks, of what Keras takes: one array, a dict, or a list in the order of the text."""
    if isinstance(data, Mapping):
        return dict(data)
    return dict(zip(names, data if isinstance(data, list | tuple) else [data], strict=False))


def facts(model: Model, x: Any, y: Any, *, parameters: int, validation: bool) -> Facts:
    """What there is to know.

    Args:
        model: The text.
        x: Inputs of training, as Keras takes them; None if they are not in memory.
        y: Labels, likewise.
        parameters: How many the model has.
        validation: Whether there is validation data.
    """
    graph, blocks = model.graph, blocks_of(model)
    nodes = inputs_of(graph)
    given = by_name(x, [node.name for node in nodes])
    labels = by_name(y, [head.name for head in graph.heads])
    first = next(iter(given.values()), None)
    layers = tuple(node.operator for node in graph.nodes if node.operator != "input")
    return Facts(
        inputs=tuple(_input(graph, node, given.get(node.name)) for node in nodes),
        outputs=tuple(_output(graph, head, blocks, labels.get(head.name)) for head in graph.heads),
        samples=0 if first is None else len(first),
        parameters=parameters,
        layers=layers,
        learning=sum(bool(node.parameters) for node in graph.nodes),
        validation=validation,
        drawn=model.draws,
    )


def last_activation(graph: Graph, number: int) -> str:
    """The activation that a node ends with; ``"linear"`` if there is none."""
    node = graph.nodes[number]
    if node.operator in PASSING and node.inputs:
        return last_activation(graph, node.inputs[0])
    if node.operator == "Activation" or (is_keras(node.operator) and "activation" in options_of(node)):
        return str(options_of(node).get("activation", "linear")).lower()
    if node.operator in LINEAR or is_keras(node.operator):
        return "softmax" if node.operator == "Softmax" else "linear"
    return node.operator


def _output(graph: Graph, head: Head, blocks: dict[str, str], labels: Any) -> Output:
    node = graph.nodes[head.node]
    shape = tuple(head.wanted or node.shape or ())
    sizes = tuple(int(size or 0) for size in shape)
    seen = None if labels is None else labels_of(np.asarray(labels), sizes)
    return Output(blocks.get(head.name, head.name), last_activation(graph, head.node), sizes, node.dtype, seen)


def labels_of(y: np.ndarray[Any, Any], shape: tuple[int, ...]) -> Labels:
    """What some labels are, for an output of a shape."""
    if not len(y):
        return Labels(y.shape[1:], True, 0.0, 0.0)
    whole = y.dtype.kind in "iub" or bool(np.all(np.mod(y, 1) == 0))
    low, high = float(y.min()), float(y.max())
    rows = y.ndim > 1 and y.shape[1:] == shape and shape[-1] > 1
    one_each = rows and bool(np.allclose(y.sum(axis=-1, dtype=np.float64), 1.0, atol=1e-4))
    majority = sigma = far = 0.0
    if one_each and whole:
        majority = float(y.reshape(-1, y.shape[-1]).mean(axis=0, dtype=np.float64).max())
    elif whole and high - low < MOST_NUMBERS:
        majority = float(np.bincount((y - low).astype(np.int64).reshape(-1)).max() / y.size)
    if not rows or not one_each:
        middle = np.median(y)
        away = np.abs(np.asarray(y, np.float64) - middle)
        sigma = SIGMA * float(np.median(away))
        far = float(np.mean(away > FAR * sigma)) if sigma > 0 else 0.0
    return Labels(tuple(y.shape[1:]), whole, low, high, one_each, majority, sigma, far)


def _input(graph: Graph, node: Node, x: Any) -> Input:
    number = graph.nodes.index(node)
    readers = [graph.nodes[each] for each in consumers(graph.nodes).get(number, ())]
    numbers = node.dtype not in WHOLE and not any(reader.operator in READS_NUMBERS for reader in readers)
    scaled = bool(readers) and all(reader.operator in NORMALIZING for reader in readers)
    shape = tuple(int(size or 0) for size in node.shape or ())
    if x is None or not numbers or scaled:
        return Input(node.name, shape, numbers and x is not None, scaled, 0.0, 0.0)
    x = np.asarray(x)
    low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
    if len(shape) != 1 or shape[0] > MOST_NUMBERS:
        return Input(node.name, shape, numbers, scaled, low, high)
    means, deviations = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
    ranges = (x.max(axis=0) - x.min(axis=0)) if x.dtype.kind == "f" else np.ptp(x.astype(np.float64), axis=0)
    return Input(
        node.name, shape, numbers, scaled, low, high, *(tuple(map(float, each)) for each in (means, deviations, ranges))
    )
