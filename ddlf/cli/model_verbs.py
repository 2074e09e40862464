"""``ddlf model``: its actions, their options and examples. Imports nothing of weight."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddlf.cli.parsing import Parser, examples_of, verb

if TYPE_CHECKING:
    from ddlf.cli.parsing import Verbs


def add(verbs: Verbs) -> None:
    """Add the verb."""
    model = verbs.add_parser(
        "model",
        help="show, check, format and convert models that are text",
        description="Models as text. Nothing in a text is run; Keras is needed to convert one only.",
        epilog=examples_of("ddlf model show model.nnm", "ddlf model check *.nnm", "ddlf model format model.nnm"),
    )
    actions = model.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser, required=True)
    show = verb(
        actions,
        "show",
        "model:show",
        "layers, shapes and parameters",
        "Show each layer of a model with what it reads, its shape, its type and its parameters, and how far each parameter is from an input "
        "and from an output.",
        "ddlf model show model.nnm",
        "ddlf model show model.nnm --json",
    )
    show.add_argument("file", type=Path, metavar="FILE", help="text of a model")
    show.add_argument("--json", action="store_true", help="print JSON")

    check = verb(
        actions,
        "check",
        "model:check",
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
        "model:format",
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
        "model:convert",
        "make a model of Keras of a text",
        "Make a model of Keras of a text, with its first weights, and save it. It is not compiled.",
        "ddlf model convert model.nnm model.keras",
    )
    convert.add_argument("file", type=Path, metavar="FILE", help="text of a model")
    convert.add_argument("target", type=Path, metavar="TARGET", help="new file, which ends in .keras")
    for action in (show, check, format_, convert):
        action.add_argument(
            "-v", "--verbose", "--debug", dest="debug", action="store_true", help="show the traceback of an error"
        )
