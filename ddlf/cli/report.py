"""``ddlf report``: the page of a run that is over, failed, was killed, or goes on. Reads and writes the run's folder only."""

from __future__ import annotations

import argparse
import sys

from ddlf.cli.recording import runs_of
from ddlf.monitor.runs import folder, report, table
from ddlf.monitor.runs.behind import reason
from ddlf.monitor.runs.past import read


def make(options: argparse.Namespace) -> int:
    """Write the report anew, and say where it is; or print a table of the run."""
    path = folder.find(runs_of(options), options.run)
    failed = None
    try:
        past = report.write(path)
    except OSError as error:  # somebody else's run, or the disk is full: the tables need neither
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
        there = "; what is there is older" if (path / folder.REPORT).exists() else ""
        print(f"the report cannot be written: {failed}{there}", file=sys.stderr)
    if options.open and (path / folder.REPORT).exists():
        import webbrowser

        webbrowser.open((path / folder.REPORT).resolve().as_uri())
    return 0 if failed is None or options.csv or options.latex else 1
