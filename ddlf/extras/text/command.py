"""``ddlf model``: models that are text, shown, checked and formatted. Nothing is connected, and Keras is imported to show a file of its own only."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ddlf.cli.output import write_whole
from ddlf.errors import ConfigError, NotationError
from ddlf.extras.text.files import opened
from ddlf.extras.text.language.drawing import drawn
from ddlf.extras.text.language.graph import Graph, Node, distances
from ddlf.extras.text.language.known import shown
from ddlf.extras.text.language.model import Model, load, read_bytes
from ddlf.extras.text.language.printer import format as formatted
from ddlf.extras.text.language.printer import spelled
from ddlf.extras.text.language.svg import picture
from ddlf.extras.text.language.values import Number
from ddlf.extras.text.training.block import check_train


def check(options: argparse.Namespace) -> int:
    """Say what is wrong with some texts; returns the exit code."""
    code = 0
    for path in options.files:
        try:
            model = load(path)
            check_train(model)
        except NotationError as error:
            print(error, file=sys.stderr)
            code = error.exit_code
        else:
            _warn(model)
            print(f"{path}: {_sum(model)}")
    return code


def format(options: argparse.Namespace) -> int:
    """Write texts in their one form; returns the exit code."""
    code = 0
    for path in options.files:
        before = read_bytes(path)
        after = formatted(before, str(path)).encode()
        if before == after:
            continue
        if options.check:
            print(f"{path} has another form; write it with: ddlf model format {path}")
            code = 1
        else:
            write_whole(path, after)
            print(f"wrote     {path}")
    return code


def show(options: argparse.Namespace) -> int:
    """Show the layers of a model; returns the exit code."""
    model = opened(options.file, options.layers)
    if options.svg:
        return _svg(model, options.svg)
    if options.json:
        print(json.dumps(_facts(model)))
        return 0
    _warn(model)
    graph = model.graph
    if options.graph:
        for line in drawn(graph, [_label(graph, number) for number in range(len(graph.nodes))]):
            print(line)
        print(f"model     {_sum(model)}")
        return 0
    rows = [("", "layer", "reads", "shape", "type", "parameters")]
    far = distances(graph)
    for number, node in enumerate(graph.nodes):
        learned = ", ".join(
            f"{each.name} {shown(each.shape)} ({far[number][0]},{far[number][1] + 1})" for each in node.parameters
        )
        reads = ", ".join(str(each + 1) for each in node.inputs)
        rows.append((str(number + 1), _called(node), reads, shown(node.shape), node.dtype, learned))
    wide = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join(f"{text:<{width}}" for text, width in zip(row, [*wide, 0], strict=True)).rstrip())
    for head in graph.heads:
        node = graph.nodes[head.node]
        loss = f", loss {head.loss}" if head.loss else ""
        print(f"output    {head.name}: {node.dtype} {shown(node.shape)} of {head.node + 1}{loss}")
    print(f"model     {_sum(model)}")
    return 0


def _svg(model: Model, path: Path) -> int:
    """Write the picture of a model."""
    graph = model.graph
    labels = [
        (f"{node.operator} {node.name}", f"{shown(node.shape)} {node.dtype}", f"{at + 1} {_called(node)}")
        for at, node in enumerate(graph.nodes)
    ]
    try:
        path.write_text(picture(graph, labels), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    print(f"wrote     {path}: {_sum(model)}")
    return 0


def _label(graph: Graph, number: int) -> str:
    """A layer as its row of a picture has it."""
    node = graph.nodes[number]
    heads = "".join(f"  -> output {head.name}" for head in graph.heads if head.node == number)
    return f"{number + 1:>3} {_called(node)}  {shown(node.shape)}{heads}"


def _called(node: Node) -> str:
    operands = [each.written if isinstance(each, Number) else each for each in node.operands]
    types = [node.written] if node.operator == "cast" else []
    options = [f"{arg.key}={spelled(arg.value)}" for arg in node.options]
    options += [f"call={spelled(node.given)}"] if node.given else []
    options += [f"share={node.share}"] if node.share and node.share != node.operator else []
    name = f" {node.name}" if node.name else ""
    return (
        f"input{name}{' ' * bool(options)}{' '.join(options)}"
        if node.operator == "input"
        else f"{node.operator}({', '.join([*operands, *types, *options])}){name}"
    )


def _sum(model: Model) -> str:
    count = model.graph.parameters
    learned = "parameters of some layers are known to Keras only" if count is None else f"{count:,} parameters"
    return f"{learned}, {len(model.graph.nodes):,} layers"


def _warn(model: Model) -> None:
    for each in model.warnings:
        print(f"{model.file}:{each.line}:{each.column}: warning: {each.sentence}", file=sys.stderr)


def _facts(model: Model) -> dict[str, Any]:
    graph = model.graph
    far = distances(graph)
    return {
        "parameters": graph.parameters,
        "layers": [
            {
                "layer": _called(node),
                "reads": [each + 1 for each in node.inputs],
                "shape": node.shape,
                "dtype": node.dtype,
                "parameters": [
                    {"name": each.name, "shape": each.shape, "dtype": each.dtype, "count": each.count}
                    | {"from_input": begun, "to_output": left + 1}
                    for each in node.parameters
                ],
            }
            for node, (begun, left) in zip(graph.nodes, far, strict=True)
        ],
        "outputs": [{"name": each.name, "reads": each.node + 1, "loss": each.loss or None} for each in graph.heads],
        "warnings": [each._asdict() for each in model.warnings],
    }
