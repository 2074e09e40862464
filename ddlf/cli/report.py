"""``ddlf report``: the page of a run that is over, failed, was killed, or goes on. Reads and writes the run's folder only."""

from __future__ import annotations

import argparse

from ddlf.cli.recording import runs_of
from ddlf.runs import folder, report, table


def make(options: argparse.Namespace) -> int:
    """Write the report anew, and say where it is; or print a table of the run."""
    path = folder.find(runs_of(options), options.run)
    past = report.write(path)
    rows = table.of_workers(past) if options.workers else table.of_runs([past])
    if options.csv:
        print(table.as_csv(rows), end="")
    elif options.latex:
        print(table.as_latex(rows), end="")
    else:
        print(table.as_text(rows))
        print(f"report    {path / folder.REPORT}")
    if options.open:
        import webbrowser

        webbrowser.open((path / folder.REPORT).resolve().as_uri())
    return 0
