"""``ddlf advise``: its options and examples. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from ddlf.cli.options import add_parameters, add_target, add_verbose
from ddlf.cli.parsing import Command, Parser, number


def _options(parser: Parser) -> None:
    parser.add(
        "app",
        type=Path,
        nargs="?",
        metavar="[APP]",
        help="Python file with a subclass of ddlf.IApp, or a model as text (.nnm)",
    )
    parser.add("--data", metavar="NAME|FILE", help="data for a model as text that does not name its data")
    level = parser.add_mutually_exclusive_group()
    parser.add("--quick", action="store_true", help="check settings, arrays and model; train nothing", within=level)
    parser.add(
        "--cluster",
        action="store_true",
        help="also check what shows only on several machines, and wrong labels, which takes five trainings",
        within=level,
    )
    parser.add("--workers", type=number(1), metavar="N", help="number of workers to plan for (default: 2)")
    parser.add(
        *("--limit",),
        type=number(1),
        default=600,
        metavar="SECONDS",
        help="maximum time for load_dataset and for create_model (default: 600)",
    )
    parser.add("--explain", metavar="RULE", help="explain a rule")
    shown = parser.add_mutually_exclusive_group()
    parser.add(
        "--format",
        choices=("text", "json", "sarif"),
        default="text",
        help="output format (default: text)",
        within=shown,
    )
    parser.add(
        "--diff", action="store_true", help="print the changes that fix the findings, for patch -p0", within=shown
    )
    parser.add("--fix", action="store_true", help="make these changes")
    parser.add(
        *("--fail-on",),
        choices=("error", "warning", "note", "never"),
        default="error",
        metavar="LEVEL",
        help="exit with 1 if there is a finding of this level: error (the default), warning, note, never",
    )
    add_target(parser)
    add_parameters(parser)
    add_verbose(parser)


def _advise(options: argparse.Namespace) -> int:
    from ddlf.extras.advice.command import advise

    return advise(options)


ADVISE = Command(
    description="Check an app's data, labels, loss, model and settings for known mistakes, and say how to fix them. "
    "The app is not changed, and no workers are needed. The exit code is 1 if a finding has the level of --fail-on.",
    examples=(
        "ddlf advise app.py",
        "ddlf advise app.py --quick            # train nothing",
        "ddlf advise app.py --diff | patch -p0 # or --fix",
        "ddlf advise model.nnm --data digits",
        "ddlf advise --explain L02",
        "ddlf advise app.py --format sarif --fail-on warning    # for CI",
    ),
    options=_options,
    run=_advise,
)
