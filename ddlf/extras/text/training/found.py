"""What the rules look at: facts of a model that is text, and of the arrays it is to learn. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ddlf.extras.text.language.graph import Graph, Head, Node, consumers
from ddlf.extras.text.language.model import Model
from ddlf.extras.text.language.operators import DTYPES, is_keras
from ddlf.extras.text.language.shapes import options_of
from ddlf.extras.text.training.deciding import DROPOUTS, MOST_NUMBERS, NORMALIZING, Facts, Input, Labels, Output

PASSING = frozenset({"identity", "cast", "reshape", "Flatten", "Reshape", "Identity", *DROPOUTS})
"""What changes no value: the activation is that before it."""
READS_NUMBERS = frozenset({"Embedding", "StringLookup", "IntegerLookup", "CategoryEncoding", "Hashing"})
WHOLE = DTYPES[3:]
LITTLE = 0.1
"""Share of all that a sequence has between its least and its largest value, of which features that lie in other places have less each."""
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


def facts(
    model: Model,
    x: Any,
    y: Any,
    *,
    parameters: int,
    validation: bool,
    weighted: bool = False,
    losses: Mapping[str, str] | None = None,
    ignore: float | None = None,
) -> Facts:
    """What there is to know.

    Args:
        model: The text.
        x: Inputs of training, as Keras takes them; None if they are not in memory.
        y: Labels, likewise.
        parameters: How many the model has.
        validation: Whether there is validation data.
        weighted: Whether samples have weights.
        losses: Those that are written, by name of the output.
        ignore: Label of what is left out of the losses; None for nothing.
    """
    graph = model.graph
    nodes = inputs_of(graph)
    given = by_name(x, [node.name for node in nodes])
    first = next(iter(given.values()), None)
    layers = tuple(node.operator for node in graph.nodes if node.operator != "input")
    return Facts(
        inputs=tuple(_input(graph, node, given.get(node.name)) for node in nodes),
        outputs=outputs_of(model, y, losses or {}, ignore),
        samples=0 if first is None else len(first),
        parameters=parameters,
        layers=layers,
        learning=sum(bool(node.parameters) for node in graph.nodes),
        validation=validation,
        drawn=model.draws,
        depth=_depth(graph),
        weighted=weighted,
    )


def outputs_of(model: Model, y: Any, losses: Mapping[str, str], ignore: float | None) -> tuple[Output, ...]:
    """What there is to know of each output and its labels; see ``facts``."""
    graph, blocks = model.graph, blocks_of(model)
    labels = by_name(y, [head.name for head in graph.heads])
    return tuple(
        _output(graph, head, blocks, labels.get(head.name), losses.get(head.name, ""), ignore) for head in graph.heads
    )


def _depth(graph: Graph) -> int:
    """Operators on the shortest path from an input to an output, of the output for which it is longest; nodes come after what they read."""
    begun: list[int] = []
    for node in graph.nodes:
        begun.append(min((begun[each] for each in node.inputs), default=-1) + 1)
    return max((begun[head.node] for head in graph.heads), default=0)


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


def _output(graph: Graph, head: Head, blocks: dict[str, str], labels: Any, loss: str, ignore: float | None) -> Output:
    node = graph.nodes[head.node]
    shape = tuple(head.wanted or node.shape or ())
    sizes = tuple(int(size or 0) for size in shape)
    seen = None if labels is None else labels_of(np.asarray(labels), sizes, ignore)
    last = last_activation(graph, head.node)
    return Output(blocks.get(head.name, head.name), last, sizes, node.dtype, seen, loss, head.name)


def labels_of(y: np.ndarray[Any, Any], shape: tuple[int, ...], ignore: float | None = None) -> Labels:
    """What some labels are, for an output of a shape; of those that are left out nothing is known but the shape."""
    if ignore is not None:
        kept = y[y == y] if ignore != ignore else y[y != ignore]
        return replace(labels_of(kept, ()), shape=tuple(y.shape[1:]))
    if not len(y):
        return Labels(y.shape[1:], True, 0.0, 0.0)
    whole = y.dtype.kind in "iub" or bool(np.all(np.mod(y, 1) == 0))
    low, high = float(y.min()), float(y.max())
    rows = y.ndim > 1 and y.shape[1:] == shape and shape[-1] > 1
    one_each = rows and bool(np.allclose(y.sum(axis=-1, dtype=np.float64), 1.0, atol=1e-4))
    majority = sigma = far = square = 0.0
    counts: tuple[int, ...] = ()
    if one_each and whole:
        sums = y.reshape(-1, y.shape[-1]).sum(axis=0, dtype=np.float64)
        majority, counts = float(sums.max() / sums.sum()), tuple(map(int, sums))
    elif whole and high - low < MOST_NUMBERS:
        found = np.bincount((y - low).astype(np.int64).reshape(-1))
        majority = float(found.max() / y.size)
        counts = (*[0] * int(low), *map(int, found)) if 0 <= low < MOST_NUMBERS else ()
    if not rows or not one_each:
        middle = np.median(y)
        away = np.abs(np.asarray(y, np.float64) - middle)
        sigma = SIGMA * float(np.median(away))
        far = float(np.mean(away > FAR * sigma)) if sigma > 0 else 0.0
        square = float(np.mean(np.square(y, dtype=np.float64)))
    return Labels(tuple(y.shape[1:]), whole, low, high, one_each, majority, sigma, far, square, counts)


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
    plain = Input(node.name, shape, numbers, scaled, low, high, peak=_peak(x))
    if len(shape) not in (1, 2) or x.ndim != len(shape) + 1 or shape[-1] > MOST_NUMBERS or not x.size:
        return plain
    steps = tuple(range(len(shape)))
    ranges = x.max(axis=steps).astype(np.float64) - x.min(axis=steps)
    if len(shape) == 2 and not np.median(ranges) < LITTLE * (high - low):  # a picture, or a sequence of one scale
        return plain
    means, deviations = x.mean(axis=steps, dtype=np.float64), x.std(axis=steps, dtype=np.float64)
    known = [tuple(map(float, each)) for each in (means, deviations, ranges)]
    return replace(plain, means=known[0], deviations=known[1], ranges=known[2])


def _peak(x: np.ndarray[Any, Any]) -> float:
    """The largest norm of a sample over that of the middle one; 0 of bytes, which have no outliers."""
    if x.dtype.kind != "f" or not x.size:
        return 0.0
    rows = x.reshape(len(x), -1)
    squares = np.einsum("ij,ij->i", rows, rows, dtype=np.float64 if x.dtype == np.float64 else np.float32)
    middle = float(np.median(squares))
    return float(np.sqrt(squares.max() / middle)) if middle > 0 else 0.0
