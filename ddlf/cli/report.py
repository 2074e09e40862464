"""``ddlf report``: the report of a run, also of one that failed or is still running. Works in the run's folder only."""

from __future__ import annotations

import argparse
import sys

from ddlf.cli.parsing import Command, Parser
from ddlf.cli.runs import add_formats, add_out, add_run, runs_folder
from ddlf.monitor.runs import folder, report, table
from ddlf.monitor.runs.background import reason
from ddlf.monitor.runs.past import read


def _options(parser: Parser) -> None:
    add_run(parser)
    add_out(parser)
    add_formats(parser)
    parser.add("--workers", action="store_true", help="print the table of the workers")
    parser.add("--open", action="store_true", help="open the report in the browser")


def make(options: argparse.Namespace) -> int:
    """Write the report again and print where it is, with a table of the run."""
    path = folder.find(runs_folder(options), options.run)
    failed = None
    try:
        past = report.write(path)
    except OSError as error:  # somebody else's run, or a full disk: the tables can be printed all the same
        past, failed = read(path), reason(error)
    rows = table.of_workers(past) if options.workers else table.of_runs([past])
    if options.csv:
        print(table.as_csv(rows), end="")
    elif options.latex:
        print(table.as_latex(rows), end="")
    else:
        print(table.as_text(rows))
        if failed is None:
            print(f"report    {path / folder.REPORT}")
    if failed is not None:
        older = "; the existing one is older" if (path / folder.REPORT).exists() else ""
        print(f"the report cannot be written: {failed}{older}", file=sys.stderr)
    if options.open and (path / folder.REPORT).exists():
        import webbrowser

        webbrowser.open((path / folder.REPORT).resolve().as_uri())
    return 0 if failed is None or options.csv or options.latex else 1


REPORT = Command(
    description="Write the report of a run again, print where it is, and print the table of the run.",
    examples=(
        "ddlf report                       # of the last run",
        "ddlf report 20261122-1145 --open",
        "ddlf report --latex > table.tex",
    ),
    options=_options,
    run=make,
)
