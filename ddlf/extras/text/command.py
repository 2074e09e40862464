"""``ddlf model``: show, check, format, convert and compare models as text, ``.keras`` files and ``.safetensors`` files.

Keras is imported only for ``.keras`` and ``.safetensors`` files.
"""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ddlf.cli.output import native_output_to_log, write_whole
from ddlf.errors import ConfigError, NotationError
from ddlf.extras.text.conversion import weights
from ddlf.extras.text.language.diff import differences
from ddlf.extras.text.language.graph import Node, distances
from ddlf.extras.text.language.inference import shown
from ddlf.extras.text.language.keras_layers import INNER
from ddlf.extras.text.language.model import Model, load, read, read_bytes
from ddlf.extras.text.language.printer import format as formatted
from ddlf.extras.text.language.printer import spelled
from ddlf.extras.text.language.values import Number, Word
from ddlf.extras.text.language.web_model import SUFFIXES
from ddlf.extras.text.training.block import check_train

KERAS, WEIGHTS = ".keras", ".safetensors"
KERAS_PACKAGES = {home.rpartition(".")[2] for home in INNER}
"""Keras's own packages, in names of layers such as ``numpy>Add``."""
HALF = ("float16", "bfloat16")
OTHERS = {
    **dict.fromkeys((".h5", ".hdf5"), "an older format of Keras: load it in Python, and save it as .keras"),
    **dict.fromkeys(
        (".onnx", ".tflite", ".xml", ".pt2", ".pt", ".pth", ".mlirbc", ".pb"),
        "a file of another program: `ddlf export` writes some",
    ),
    **dict.fromkeys((".npz", ".npy", ".csv", ".py", ".ipynb"), "no model"),
}
"""Suffixes of files that are never texts."""


def opened(path: Path, layers: Path | None = None) -> Model:
    """Read the model from a ``.nnm``, ``.keras`` or ``.safetensors`` file, and return its description without weights.

    Raises:
        ConfigError: The file cannot be read.
        NotationError: The model text in the file has mistakes, or a Keras model has a part that the notation lacks.
    """
    if path.suffix == WEIGHTS:
        return read(weights.load(path)[0], str(path))
    _check_kind(path)
    if path.suffix != KERAS:
        _check_layers(layers)
        return load(path)
    with native_output_to_log():
        from ddlf.extras.text.conversion.describe import describe

        return read(describe(_loaded(path, layers)), str(path))


def _check_kind(path: Path) -> None:
    """Refuse a file of another program, such as ``.h5``, that these commands cannot read. The suffix tells."""
    if description := OTHERS.get(path.suffix.lower()):
        raise ConfigError(
            f"{path} is {description}",
            hint="models are texts (.nnm), .keras and .safetensors, and files of WebNN (.js, .json)",
        )


def provide(name: str) -> Any:
    """Return a function or class that another part of DDLF asks for by name; None if this part lacks it."""
    homes = {
        "text_of_file": "ddlf.extras.text.language.model:text_of_file",
        "layers_of_text": f"{__name__}:layers_of_text",
        "model_of_text": f"{__name__}:model_of_text",
        "Notation": "ddlf.extras.text.training.notation:Notation",
        "DataSource": "ddlf.extras.text.training.data:DataSource",
        "dataset": "ddlf.extras.text.training.data:dataset",
        "describe": "ddlf.extras.text.conversion.describe:describe",
        "named_weights": "ddlf.extras.text.conversion.weights:variables",
    }
    return resolve_name(homes[name]) if name in homes else None


def layers_of_text(path: Path) -> tuple[tuple[str, ...], tuple[str, str] | None]:
    """Return the names of the custom layers in a model text, and its first layer that computes in 16 bits with its
    type. The latter is None without such a layer.

    Raises:
        NotationError: The text has mistakes.
    """
    model = load(path)
    custom_layers: dict[str, None] = {}
    half_precision = None
    for graph in (model.graph, *(graph for _, graph in model.parts.values())):
        for node in graph.nodes:
            package, _, _ = node.operator.rpartition(">")
            if package and package not in KERAS_PACKAGES:
                custom_layers[node.operator] = None
            dtypes = [arg.value.name for arg in node.options if arg.key == "dtype" and isinstance(arg.value, Word)]
            kind = dtypes[0] if dtypes else node.dtype
            if half_precision is None and kind.removeprefix("mixed_") in HALF:
                half_precision = (node.name or node.operator, kind)
    return tuple(custom_layers), half_precision


def model_of_text(path: Path) -> Any:
    """Build the Keras model that a model text describes, with initial weights."""
    from ddlf.extras.text.conversion.build import build

    return build(load(path))


def check(options: argparse.Namespace) -> int:
    """Run ``ddlf model check``: report the mistakes in model texts, and return the exit code."""
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
    """Run ``ddlf model format``: write model texts in the standard form, and return the exit code."""
    code = 0
    for path in options.files:
        if path.suffix in SUFFIXES:
            raise ConfigError(
                f"{path} is a model file of WebNN", hint=f"make a text of it: ddlf model convert {path} {path.stem}.nnm"
            )
        before = read_bytes(path)
        after = formatted(before, str(path)).encode()
        if before == after:
            continue
        if options.check:
            print(f"{path} is not in the standard form; write it with: ddlf model format {path}")
            code = 1
        else:
            write_whole(path, after)
            print(f"wrote     {path}")
    return code


def show(options: argparse.Namespace) -> int:
    """Run ``ddlf model show``: print the layers of a model, and return the exit code."""
    model = opened(options.file, options.layers)
    if options.json:
        print(json.dumps(_facts(model)))
        return 0
    _warn(model)
    graph = model.graph
    rows = [("", "layer", "reads", "shape", "type", "parameters")]
    lengths = distances(graph)
    for number, node in enumerate(graph.nodes):
        learned = ", ".join(
            f"{parameter.name} {shown(parameter.shape)} ({lengths[number][0]},{lengths[number][1] + 1})"
            for parameter in node.parameters
        )
        reads = ", ".join(str(source + 1) for source in node.inputs)
        rows.append((str(number + 1), _called(node), reads, shown(node.shape), node.dtype, learned))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join(f"{text:<{width}}" for text, width in zip(row, [*widths, 0], strict=True)).rstrip())
    for head in graph.heads:
        node = graph.nodes[head.node]
        loss = f", loss {head.loss}" if head.loss else ""
        print(f"output    {head.name}: {node.dtype} {shown(node.shape)} of {head.node + 1}{loss}")
    print(f"model     {_sum(model)}")
    return 0


def _called(node: Node) -> str:
    operands = [operand.written if isinstance(operand, Number) else operand for operand in node.operands]
    types = [node.written] if node.operator == "cast" else []
    options = [f"{arg.key}={spelled(arg.value)}" for arg in node.options]
    options += [f"call={spelled(node.call_arguments)}"] if node.call_arguments else []
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
    for warning in model.warnings:
        print(f"{model.file}:{warning.line}:{warning.column}: warning: {warning.sentence}", file=sys.stderr)


def _facts(model: Model) -> dict[str, Any]:
    graph = model.graph
    lengths = distances(graph)
    return {
        "parameters": graph.parameters,
        "layers": [
            {
                "layer": _called(node),
                "reads": [source + 1 for source in node.inputs],
                "shape": node.shape,
                "dtype": node.dtype,
                "parameters": [
                    {
                        "name": parameter.name,
                        "shape": parameter.shape,
                        "dtype": parameter.dtype,
                        "count": parameter.count,
                    }
                    | {"from_input": from_input, "to_output": to_output + 1}
                    for parameter in node.parameters
                ],
            }
            for node, (from_input, to_output) in zip(graph.nodes, lengths, strict=True)
        ],
        "outputs": [{"name": head.name, "reads": head.node + 1, "loss": head.loss or None} for head in graph.heads],
        "warnings": [warning._asdict() for warning in model.warnings],
    }


def diff(options: argparse.Namespace) -> int:
    """Run ``ddlf model diff``: print the differences between two models, and return 1 if there are any."""
    lines = differences(opened(options.one, options.layers), opened(options.other, options.layers))
    for line in lines:
        print(line)
    return 1 if lines else 0


def convert(options: argparse.Namespace) -> int:
    """Run ``ddlf model convert``: write a model to a file of another kind, and return the exit code."""
    source, target = options.file, options.target
    for path in (source, target):
        _check_kind(path)
    if options.weights and (source.suffix in (KERAS, WEIGHTS) or target.suffix not in (KERAS, WEIGHTS)):
        raise ConfigError(
            "--weights only applies to a text that becomes a model with weights", hint="leave --weights out"
        )
    if target.suffix in SUFFIXES:
        raise ConfigError(f"{target} would be a model file of WebNN, which is only read", hint="name a .nnm text")
    model_suffixes = (KERAS, WEIGHTS, *SUFFIXES)
    kinds = [path.suffix if path.suffix in model_suffixes else "a text" for path in (source, target)]
    if kinds[0] == kinds[1]:
        raise ConfigError(
            f"{source} and {target} are both {kinds[0]}",
            hint="`ddlf model format` writes a text in its standard form" if kinds[0] == "a text" else "copy the file",
        )
    if target.exists():
        raise ConfigError(f"{target} exists", hint="name a new file, or delete it first")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent}", hint="make it first, or name another")
    if source.suffix == WEIGHTS and target.suffix != KERAS:
        with weights.replacing(target) as temporary:
            temporary.write_text(weights.load(source)[0], encoding="utf-8")
        print(f"wrote     {target}: the text")
        return 0
    with native_output_to_log():
        text, model = _text_and_model(source, options)
    if target.suffix == WEIGHTS:
        weights.save(model, text, target)
    else:
        with weights.replacing(target) as temporary:
            if target.suffix == KERAS:
                model.save(temporary)
            else:
                temporary.write_text(text, encoding="utf-8")
    print(
        f"wrote     {target}: {model.count_params():,} parameters{'' if kinds[1] != 'a text' else ', without their values'}"
    )
    if target.suffix == KERAS and "ddlf>" in str(model.get_config()):
        print("load      keras.saving.load_model, after: import ddlf.extras.text.conversion.operator")
    if source.suffix == KERAS and model.compiled:
        print("note      the text does not contain the optimizer, the loss and the metrics")
    return 0


def _text_and_model(source: Path, options: argparse.Namespace) -> tuple[str, Any]:
    """Return the model in a file both as a model text and as a Keras model, to convert it."""
    if source.suffix == KERAS:
        from ddlf.extras.text.conversion.describe import describe

        keras_model = _loaded(source, options.layers)
        return describe(keras_model), keras_model
    from ddlf.extras.text.conversion.build import build

    _register(options.layers)
    tensors = None
    if source.suffix == WEIGHTS:
        text, tensors = weights.load(source)
        model = read(text, str(source))
    else:
        model = load(source)
    _warn(model)
    if options.weights:
        text, tensors = weights.load(options.weights)
        weights.check_text(model, text, options.weights)
    keras_model = build(model)
    if tensors is not None:
        weights.fill(keras_model, tensors, options.weights or source)
    return model.text, keras_model


def _loaded(path: Path, layers: Path | None) -> Any:
    """Return the model in a ``.keras`` file."""
    import keras

    importlib.import_module("ddlf.extras.text.conversion.operator")  # registers the layer of operators
    _register(layers)
    if not path.is_file():
        raise ConfigError(f"{path} cannot be read: there is no such file")
    try:
        return keras.saving.load_model(path, compile=False)
    except Exception as error:  # zip, JSON, HDF5 and any custom class may fail
        sentence = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{path} cannot be loaded by Keras: {sentence}",
            hint="if custom layers are missing, name the Python file that registers them with --layers",
        ) from error


def _check_layers(layers: Path | None) -> None:
    """Refuse a missing file for ``--layers``, even if no layer needs it."""
    if layers is not None and not layers.is_file():
        raise ConfigError(f"{layers} cannot be read: there is no such file", hint="--layers names a Python file")


def _register(layers: Path | None) -> None:
    """Run the user's Python file of ``--layers``, which registers custom layers with Keras."""
    _check_layers(layers)
    if layers is not None:
        runpy.run_path(str(layers), run_name=layers.stem)
