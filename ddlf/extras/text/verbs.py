"""Defines the actions of ``ddlf model`` with their options and examples. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from ddlf.cli.options import add_verbose
from ddlf.cli.parsing import Command, Parser

A_MODEL = "a model as text, .keras or .safetensors"


def _show_options(parser: Parser) -> None:
    parser.add("file", type=Path, help=A_MODEL)
    parser.add("--json", action="store_true", help="print JSON")
    _add_layers(parser)


def _check_options(parser: Parser) -> None:
    parser.add("files", type=Path, nargs="+", metavar="FILE...", help="models as text")
    add_verbose(parser)


def _format_options(parser: Parser) -> None:
    parser.add("files", type=Path, nargs="+", metavar="FILE...", help="models as text")
    parser.add("--check", action="store_true", help="write nothing; the exit code is 1 if a file would change")
    add_verbose(parser)


def _convert_options(parser: Parser) -> None:
    parser.add("file", type=Path, help=A_MODEL)
    parser.add("target", type=Path, help="new file; its suffix selects the format")
    parser.add("--weights", type=Path, metavar="FILE", help=".safetensors file with weights for the text")
    _add_layers(parser)


def _diff_options(parser: Parser) -> None:
    parser.add("one", type=Path, metavar="A", help=A_MODEL)
    parser.add("other", type=Path, metavar="B", help="another model")
    _add_layers(parser)


def _add_layers(parser: Parser) -> None:
    parser.add(
        "--layers", type=Path, metavar="FILE.py", help="Python file to run first, which registers your own layers"
    )
    add_verbose(parser)


MODEL = Command(
    description="Models as text. No code in a text is run. Only conversion needs Keras.",
    examples=("ddlf model show model.nnm", "ddlf model check *.nnm", "ddlf model format model.nnm"),
    actions={
        "show": (
            "show layers, shapes and parameters",
            Command(
                description="Show each layer of a model with its inputs, shape, type and parameters, and how far each "
                "parameter is from an input and from an output.",
                examples=("ddlf model show model.nnm", "ddlf model show model.keras --json"),
                options=_show_options,
                run="ddlf.extras.text.command:show",
            ),
        ),
        "check": (
            "report mistakes",
            Command(
                description="Report all mistakes in text models, with file, line and column, and statements that are allowed but "
                "probably not intended. The exit code is 0 if there are no mistakes.",
                examples=("ddlf model check model.nnm", "ddlf model check *.nnm"),
                options=_check_options,
                run="ddlf.extras.text.command:check",
            ),
        ),
        "format": (
            "write texts in the standard format",
            Command(
                description="Write models as text in the standard format: one statement per line, with its comments. "
                "Does not check whether the model makes sense.",
                examples=("ddlf model format model.nnm", "ddlf model format --check *.nnm    # for CI: writes nothing"),
                options=_format_options,
                run="ddlf.extras.text.command:format",
            ),
        ),
        "convert": (
            "convert between text, Keras and weights",
            Command(
                description="Convert between a text, a .keras file and a .safetensors file (weights with their text). "
                "Weights keep their bits. A text alone gets initial weights. Optimizer, loss and metrics are not "
                "converted.",
                examples=(
                    "ddlf model convert model.nnm model.keras",
                    "ddlf model convert model.keras model.nnm",
                    "ddlf model convert model.keras model.safetensors",
                    "ddlf model convert model.nnm model.keras --weights model.safetensors",
                ),
                options=_convert_options,
                run="ddlf.extras.text.command:convert",
            ),
        ),
        "diff": (
            "show the differences of two models",
            Command(
                description="Show the differences of two models: removed layers (-), new layers (+), and changed options, "
                "shapes and parameters (~). The exit code is 1 if they differ.",
                examples=("ddlf model diff old.nnm new.nnm", "ddlf model diff model.keras model.nnm"),
                options=_diff_options,
                run="ddlf.extras.text.command:diff",
            ),
        ),
    },
)
