"""Defines the options and examples of ``ddlf export`` and ``ddlf model compare``. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ddlf.cli.parsing import Command, Parser, number


def _export_options(parser: Parser) -> None:
    _add_model(parser)
    parser.add("--to", required=True, metavar="A,B", help="formats, with commas between them")
    parser.add("--out", type=Path, metavar="DIR", help="folder to write to (default: the current one)")
    parser.add("--overwrite", action="store_true", help="replace existing files")
    parser.add(
        *("--backend",),
        choices=("tensorflow", "jax", "torch"),
        metavar="NAME",
        help="backend of Keras (default: the first suitable backend of each format)",
    )
    parser.add("--batch", type=number(1), metavar="N", help="stablehlo only: fixed batch size (default: variable)")
    parser.add("--verify", action="store_true", help="run the written models and compare them with Keras")


def _compare_options(parser: Parser) -> None:
    _add_model(parser)
    parser.add(
        "--backends", metavar="A,B", help="backends, the reference first (default: all installed backends of Keras)"
    )


def _add_model(parser: Parser) -> None:
    parser.add(
        "model",
        type=Path,
        help="a .keras file, a model as text (.nnm), or a run: its folder, or the beginning of its name",
    )
    parser.add(
        "--layers", dest="code", type=Path, metavar="FILE", help="Python file with your own layers, to run first"
    )
    parser.add("--inputs", type=Path, metavar="FILE", help=".npz with an array for each input (default: random inputs)")
    parser.add(
        "--tolerance", type=_positive, metavar="X", help="maximum difference from Keras's outputs (default: 1e-5)"
    )
    parser.add("--json", action="store_true", help="print JSON")
    parser.add("-v", "--verbose", "--debug", dest="debug", action="store_true", help="print the output of each step")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


EXPORT = Command(
    description="Write a model in formats of other programs: saved_model (TensorFlow), onnx, litert (TensorFlow Lite), "
    "openvino, torch, stablehlo (JAX, IREE). The batch size stays variable. --verify runs each result in its own "
    "runtime, and the model in Keras on each installed backend, on the same inputs with batch sizes 1, 7 and 64. "
    "The exit code is 0 if all were written, ran and agree.",
    examples=(
        "ddlf export model.keras --to onnx,litert",
        "ddlf export runs/20261122-101500-app --to saved_model --out served    # the model of a run",
        "ddlf export model.nnm --to stablehlo --verify    # a model as text, with its initial weights",
        "ddlf export model.keras --to onnx --layers my_layers.py --verify --inputs digits.npz",
    ),
    options=_export_options,
    run="ddlf.extras.export.command:export",
)
COMPARE = Command(
    description="Run a model on each installed backend of Keras, on the same inputs, and name the first layer that "
    "differs. The exit code is 0 if they agree.",
    examples=(
        "ddlf model compare model.keras",
        "ddlf model compare model.keras --backends tensorflow,jax --tolerance 1e-6",
    ),
    options=_compare_options,
    run="ddlf.extras.export.command:compare_backends",
)
