"""``ddlf export`` and the like: options and examples. Imports nothing of weight."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from ddlf.cli.parsing import Parser, number, verb, verb_with_actions

if TYPE_CHECKING:
    from ddlf.cli.parsing import Verbs


def add(verbs: Verbs) -> None:
    """Add the verb ``export`` and the action ``model compare``."""
    export = verb(
        verbs,
        "export",
        "ddlf.extras.export.command:export",
        "write a model for other programs",
        "Write a model in formats of other programs: saved_model (TensorFlow), onnx, litert (TensorFlow Lite), openvino, torch, "
        "stablehlo (JAX, IREE). The batch stays free. With --verify each is run in its own runtime, and Keras on each "
        "backend that is installed, on the same inputs at batches of 1, 7 and 64; the exit code is 0 if all were written, ran and agree.",
        "ddlf export model.keras --to onnx,litert",
        "ddlf export runs/20261122-101500-app --to saved_model --out served    # the model of a run",
        "ddlf export model.nnm --to stablehlo --verify                         # a model as text, with its first weights",
        "ddlf export model.keras --to onnx --layers my_layers.py --verify --inputs digits.npz",
    )
    export.add_argument("--to", required=True, metavar="A,B", help="formats with commas between them")
    export.add_argument("--out", type=Path, metavar="FOLDER", help="where to (default: here)")
    export.add_argument("--overwrite", action="store_true", help="replace what is there")
    export.add_argument(
        "--backend",
        choices=("tensorflow", "jax", "torch"),
        metavar="NAME",
        help="of Keras: %(choices)s (default: the usual one of each format)",
    )
    export.add_argument(
        "--batch", type=number("batch", 1), metavar="N", help="of stablehlo: samples in each batch (default: any)"
    )
    export.add_argument("--verify", action="store_true", help="run what was written, and compare it with Keras")
    _add_model(export)
    _add_compare(verbs)


def _add_compare(verbs: Verbs) -> None:
    """Add ``ddlf model compare``."""
    actions = verb_with_actions(
        verbs,
        "model",
        "compare models",
        "Models of Keras.",
        "ddlf model compare model.keras",
    )
    compare = verb(
        actions,
        "compare",
        "ddlf.extras.export.command:compare_backends",
        "run a model on each backend of Keras",
        "Run a model on each backend of Keras that is installed, on the same inputs, and name the first layer that differs. The exit code is 0 if "
        "they agree.",
        "ddlf model compare model.keras",
        "ddlf model compare model.keras --backends tensorflow,jax --tolerance 1e-6",
    )
    compare.add_argument(
        "--backends", metavar="A,B", help="the reference first (default: tensorflow, jax and torch, if installed)"
    )
    _add_model(compare)


def _add_model(parser: Parser) -> None:
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="a .keras file, a model as text (.nnm), or the folder of a run"
    )
    parser.add_argument(
        "--layers", dest="code", type=Path, metavar="FILE", help="Python file with your own layers, which is run"
    )
    parser.add_argument(
        "--inputs", type=Path, metavar="FILE", help=".npz with an array for each input (default: made up)"
    )
    parser.add_argument(
        "--tolerance", type=_positive, metavar="X", help="how far outputs may be from Keras's (default: 1e-5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "-v", "--verbose", "--debug", dest="debug", action="store_true", help="show what each step wrote, too"
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value
