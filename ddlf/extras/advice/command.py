"""``ddlf advise``: what is likely to be wrong with an app, before it is trained."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import sys
from functools import partial
from typing import Any

from ddlf.app import IApp
from ddlf.cli.options import add_options
from ddlf.cli.output import show_error, write_whole
from ddlf.cli.parsing import Parser
from ddlf.cli.run import execute
from ddlf.cli.stopping import Stop
from ddlf.cli.target import find_target, prepare_app
from ddlf.errors import AppError, ConfigError

FAIL_ON = {"error": "E", "warning": "EW", "note": "EWI", "never": ""}


def advise(options: argparse.Namespace) -> int:
    """Say what is found, and return the exit code: 1 if something is as bad as ``--fail-on`` says."""
    if options.explain is not None:
        if options.app is not None:
            raise ConfigError(
                f"{options.app} has no effect with --explain, which is about a rule", hint="leave one of both out"
            )
        return _explain(options.explain)
    if options.app is None:
        raise ConfigError("there is no app to look at", hint="name its file: ddlf advise app.py")
    of_run = Parser()
    add_options(of_run)
    settings = of_run.parse_args(["--out", "none", "--ui", "none"])  # as a run has them: ./cluster.yaml counts
    for name, value in vars(options).items():
        setattr(settings, name, value)

    def find() -> Any:
        with _printed_aside(options):
            target = find_target(options.app, options.target)
            if options.data is not None:
                if not getattr(target, "takes_data", False):
                    raise ConfigError(
                        f"--data has no effect on {options.app}", hint="what it is to learn is in its load_dataset"
                    )
                target.data = options.data
            return target

    return execute(find, settings, then=_advise)


def _explain(id: str) -> int:
    from ddlf.extras.advice.report import explained
    from ddlf.extras.advice.rule import named
    from ddlf.extras.advice.rules import RULES

    print(explained(named(RULES, id, "--explain")), end="")
    return 0


@contextlib.contextmanager
def _printed_aside(options: argparse.Namespace) -> Any:
    """What the app prints is not in the way of what programs read."""
    if options.format == "text" and not options.diff:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _end(error: AppError, *, whole: bool) -> None:
    """Say why the process ends, and end it: what holds it up hears of nothing."""
    show_error(error, whole=whole)
    os._exit(error.exit_code)


async def _advise(target: Any, options: argparse.Namespace, stop: Stop) -> int:
    from ddlf.cluster.cluster import Cluster
    from ddlf.extras.advice.advise import advise as ask
    from ddlf.extras.advice.changes import changed, diff
    from ddlf.extras.advice.limits import held
    from ddlf.extras.advice.report import as_json, as_sarif, lines
    from ddlf.extras.advice.rule import LEVELS, Level
    from ddlf.extras.advice.rules import RULES

    if not (inspect.isclass(target) and issubclass(target, IApp)):
        raise AppError(f"{target.__name__} is no app: there is nothing to look at", hint="name a subclass of ddlf.IApp")
    level: Level = "quick" if options.quick else "cluster" if options.cluster else "batch"
    with _printed_aside(options), held(options.limit, partial(_end, whole=options.debug)):
        cluster = Cluster.local(options.workers or 2) if level == "cluster" else None
        answer = await ask(prepare_app(target, None, options), level, workers=options.workers, cluster=cluster)
    edits = [edit for one in answer.advice for edit in one.edits]
    asked = sum(rule.level in LEVELS[: LEVELS.index(level) + 1] for rule in RULES)
    if options.diff:
        print(diff(edits), end="")
    elif options.format == "json":
        print(json.dumps(as_json(answer), indent=2))
    elif options.format == "sarif":
        print(json.dumps(as_sarif(answer), indent=2))
    else:
        print("\n".join(lines(answer, asked)))
    if options.fix:
        for path, text in changed(edits).items():
            write_whole(path, text.encode())
            print(f"wrote     {path}", file=sys.stderr)
    bad = FAIL_ON[options.fail_on]
    return int(any(one.finding.severity in bad for one in answer.advice))
