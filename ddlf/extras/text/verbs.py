"""``ddlf model``: its actions, their options and examples. Imports nothing of weight."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddlf.cli.parsing import verb, verb_with_actions

if TYPE_CHECKING:
    from ddlf.cli.parsing import Verbs


def add(verbs: Verbs) -> None:
    """Add the verb."""
    actions = verb_with_actions(
        verbs,
        "model",
        "show, check, format, convert and compare models",
        "Models as text. DDLF never runs code from a text. Only conversion needs Keras.",
        "ddlf model show model.nnm",
        "ddlf model check *.nnm",
        "ddlf model format model.nnm",
    )
    show = verb(
        actions,
        "show",
        "ddlf.extras.text.command:show",
        "layers, shapes and parameters",
        "Show each layer of a model with what it reads, its shape, its type and its parameters, and how far each parameter is from an input "
        "and from an output.",
        "ddlf model show model.nnm",
        "ddlf model show model.nnm --graph",
        "ddlf model show model.nnm --svg model.svg",
    )
    show.add_argument("file", type=Path, metavar="FILE", help="a text, .keras or .safetensors")
    how = show.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON")
    how.add_argument("--graph", action="store_true", help="draw what reads what")
    how.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of what reads what")

    check = verb(
        actions,
        "check",
        "ddlf.extras.text.command:check",
        "say what is wrong",
        "Say all that is wrong with some texts, with file, line and column, and what is allowed but probably not meant. The exit code is 0 if "
        "nothing is wrong.",
        "ddlf model check model.nnm",
        "ddlf model check *.nnm",
    )
    check.add_argument("files", type=Path, nargs="+", metavar="FILE", help="text of a model")

    format_ = verb(
        actions,
        "format",
        "ddlf.extras.text.command:format",
        "write texts in their one form",
        "Write texts in their one form: a statement a line, with its comments. Whether the model makes sense is not looked at.",
        "ddlf model format model.nnm",
        "ddlf model format --check *.nnm    # for CI: writes nothing",
    )
    format_.add_argument("files", type=Path, nargs="+", metavar="FILE", help="text of a model")
    format_.add_argument(
        "--check", action="store_true", help="write nothing; the exit code is 1 if a text has another form"
    )

    convert = verb(
        actions,
        "convert",
        "ddlf.extras.text.files:convert",
        "make a model of Keras, weights or a text of another of them",
        "Make of a text, a .keras file or a .safetensors file (weights with their text) another of them. Weights stay the same bits; a text "
        "by itself begins with first weights. What a model is compiled with does not come along.",
        "ddlf model convert model.nnm model.keras",
        "ddlf model convert model.keras model.nnm",
        "ddlf model convert model.keras model.safetensors",
        "ddlf model convert model.nnm model.keras --weights model.safetensors",
    )
    convert.add_argument("file", type=Path, metavar="FILE", help="a text, .keras or .safetensors")
    convert.add_argument("target", type=Path, metavar="TARGET", help="new file, whose ending says what is made")
    convert.add_argument("--weights", type=Path, metavar="FILE", help=".safetensors file with the weights of the text")

    diff = verb(
        actions,
        "diff",
        "ddlf.extras.text.files:diff",
        "say what differs between two models",
        "Say what differs between two models: layers that are gone (-) or new (+), and options, shapes and parameters that changed (~). The exit "
        "code is 1 if anything differs.",
        "ddlf model diff old.nnm new.nnm",
        "ddlf model diff model.keras model.nnm",
    )
    diff.add_argument("one", type=Path, metavar="A", help="a text, .keras or .safetensors")
    diff.add_argument("other", type=Path, metavar="B", help="another one")
    for action in (show, convert, diff):
        action.add_argument(
            "--layers", type=Path, metavar="FILE.py", help="Python file to run, which registers layers of your own"
        )
    for action in (show, check, format_, convert, diff):
        action.add_argument(
            "-v", "--verbose", "--debug", dest="debug", action="store_true", help="show the traceback of an error"
        )
