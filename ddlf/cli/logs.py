"""``ddlf logs``: what the workers printed in a run, also while it is running. Reads files only."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterable

from ddlf.cli.parsing import Command, Parser, number
from ddlf.cli.runs import add_out, add_run, runs_folder
from ddlf.monitor.runs import folder
from ddlf.monitor.runs.logs import Line, Reader
from ddlf.monitor.terminal.echo import harmless

POLL_S = 0.3
"""Seconds between two looks for new lines."""


def _options(parser: Parser) -> None:
    add_run(parser)
    parser.add("-f", "--follow", action="store_true", help="keep printing until the run is over")
    parser.add("-n", "--last", type=number(1), metavar="N", help="print only the last N of the existing lines")
    parser.add("--worker", metavar="NAME", help="print only the lines of one worker")
    add_out(parser)


def show(options: argparse.Namespace) -> int:
    """Print the lines of all workers or of one, with ``--follow`` until the run is over."""
    path = folder.find(runs_folder(options), options.run)
    reader = Reader(path, options.worker)
    lines: Iterable[Line] = reader.new()
    printed = _print(lines if options.last is None else deque(lines, options.last))
    while options.follow:
        is_over = folder.read_state(path).state != "running"  # first, so that the lines before the end are read below
        printed += _print(reader.new())
        if is_over:
            break
        time.sleep(POLL_S)
    if not printed:
        more = f"there are lines of {', '.join(reader.writers)}" if reader.writers else f"see {path / folder.LOGS}"
        print(f"{options.worker or 'the workers'} printed nothing in {path.name}; {more}", file=sys.stderr)
    return 0


def _print(lines: Iterable[Line]) -> int:
    count, colours = 0, sys.stdout.isatty()
    for when, who, text in lines:
        print(f"{when[11:19]} [{who}] {harmless(text, colours=colours)}")
        count += 1
    sys.stdout.flush()
    return count


LOGS = Command(
    description="Print what user code printed on the workers in a run, ordered by time.",
    examples=(
        "ddlf logs                         # of the last run",
        "ddlf logs -f                      # keep printing until the run is over",
        "ddlf logs 20261122-1145 --worker pc02 -n 100",
    ),
    options=_options,
    run=show,
)
