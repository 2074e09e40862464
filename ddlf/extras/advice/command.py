"""Defines the options of ``ddlf advise``, and runs it. Heavy modules are imported only when it runs."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ddlf.cli.options import add_options, add_parameters, add_target, add_verbose
from ddlf.cli.parsing import Command, Parser, number
from ddlf.errors import AppError, ConfigError

FAIL_ON = {"error": "E", "warning": "EW", "note": "EWI", "never": ""}


def advise(options: argparse.Namespace) -> int:
    """Run ``ddlf advise``: print the findings, and return the exit code. It is 1 if a finding is as severe as
    ``--fail-on`` or worse."""
    from ddlf.cli.run import execute
    from ddlf.cli.target import find_target

    if options.explain is not None:
        if options.app is not None:
            raise ConfigError(
                f"{options.app} has no effect with --explain, which explains a rule", hint="leave one of them out"
            )
        return _explain(options.explain)
    if options.app is None:
        raise ConfigError("ddlf advise needs an app", hint="name its file: ddlf advise app.py")
    of_run = Parser()
    add_options(of_run)
    settings = of_run.parse_args(["--out", "none", "--ui", "none"])  # like in a run, so ./cluster.yaml applies
    for name, value in vars(options).items():
        setattr(settings, name, value)

    def find() -> Any:
        with _printed_aside(options):
            target = find_target(options.app, options.target)
            if options.data is not None:
                if not getattr(target, "takes_data", False):
                    raise ConfigError(f"--data has no effect on {options.app}", hint="its load_dataset names its data")
                target.data = options.data
            return target

    return execute(find, settings, then=_advise)


def _explain(id: str) -> int:
    from ddlf.extras.advice.report import explained
    from ddlf.extras.advice.rule import find_rule
    from ddlf.extras.advice.rules import RULES

    print(explained(find_rule(RULES, id, "--explain")), end="")
    return 0


@contextlib.contextmanager
def _printed_aside(options: argparse.Namespace) -> Iterator[None]:
    """Send the app's own output to standard error within this context, if a program reads the report from standard
    output.
    """
    if options.format == "text" and not options.diff:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _end(error: AppError, *, whole: bool) -> None:
    """Print the error and end the process at once, because a user's method that runs too long cannot be interrupted."""
    from ddlf.cli.output import show_error

    show_error(error, whole=whole)
    os._exit(error.exit_code)


async def _advise(target: Any, options: argparse.Namespace, stop: object) -> int:
    from ddlf.app import IApp
    from ddlf.cli.output import write_whole
    from ddlf.cli.target import prepare_app
    from ddlf.cluster.cluster import Cluster
    from ddlf.extras.advice.advise import advise as ask
    from ddlf.extras.advice.changes import changed, diff
    from ddlf.extras.advice.limits import time_limit
    from ddlf.extras.advice.report import as_json, as_sarif, lines
    from ddlf.extras.advice.rule import LEVELS, Level
    from ddlf.extras.advice.rules import RULES

    if not (inspect.isclass(target) and issubclass(target, IApp)):
        raise AppError(f"{target.__name__} is not an app, so it cannot be checked", hint="name a subclass of ddlf.IApp")
    level: Level = "quick" if options.quick else "cluster" if options.cluster else "batch"
    with _printed_aside(options), time_limit(options.limit, partial(_end, whole=options.debug)):
        cluster = Cluster.local(options.workers or 2) if level == "cluster" else None
        report = await ask(prepare_app(target, None, options), level, workers=options.workers, cluster=cluster)
    edits = [edit for advice in report.advice for edit in advice.edits]
    checked = sum(rule.level in LEVELS[: LEVELS.index(level) + 1] for rule in RULES)
    if options.diff:
        print(diff(edits), end="")
    elif options.format == "json":
        print(json.dumps(as_json(report), indent=2))
    elif options.format == "sarif":
        print(json.dumps(as_sarif(report), indent=2))
    else:
        print("\n".join(lines(report, checked)))
    if options.fix:
        for path, text in changed(edits).items():
            write_whole(path, text.encode())
            print(f"wrote     {path}", file=sys.stderr)
    bad = FAIL_ON[options.fail_on]
    return int(any(advice.severity in bad for advice in report.advice))


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
    run=advise,
)
