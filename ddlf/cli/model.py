"""``ddlf model``: models that are text. Nothing is connected, and Keras is imported to convert one only."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ddlf.cli.output import native_output_to_log
from ddlf.errors import ConfigError, NotationError
from ddlf.notation.graph import Node, distances
from ddlf.notation.model import Model, load, read_bytes
from ddlf.notation.printer import format as formatted
from ddlf.notation.printer import spelled
from ddlf.notation.shapes import shown
from ddlf.notation.values import Number
from ddlf.texts.block import check_train


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
            _replace(path, after)
            print(f"wrote     {path}")
    return code


def _replace(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.chmod(path.stat().st_mode)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def show(options: argparse.Namespace) -> int:
    """Show the layers of a model; returns the exit code."""
    model = load(options.file)
    if options.json:
        print(json.dumps(_facts(model)))
        return 0
    _warn(model)
    graph = model.graph
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


def convert(options: argparse.Namespace) -> int:
    """Make a model of Keras of a text; returns the exit code."""
    target: Path = options.target
    if target.suffix != ".keras":
        raise ConfigError(f"{target} does not end in .keras", hint=f"write {target.with_suffix('.keras')}")
    if target.exists():
        raise ConfigError(f"{target} exists", hint="name a new file, or delete it first")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent}", hint="make it first, or name another")
    model = load(options.file)
    _warn(model)
    with native_output_to_log():
        from ddlf.models.build import build

        made = build(model)
    beside = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        made.save(beside)
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    print(f"wrote     {target}: {made.count_params():,} parameters")
    print("load      keras.saving.load_model, after: import ddlf.models.operator")
    return 0


def _called(node: Node) -> str:
    operands = [each.written if isinstance(each, Number) else each for each in node.operands]
    types = [node.written] if node.operator == "cast" else []
    options = [f"{arg.key}={spelled(arg.value)}" for arg in node.options]
    name = f" {node.name}" if node.name else ""
    return (
        f"input{name}"
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
