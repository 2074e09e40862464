"""``ddlf logs``: what workers wrote in a run, also while it goes on. Reads files only."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterable

from ddlf.cli.recording import runs_of
from ddlf.monitor.observe.echo import harmless
from ddlf.monitor.runs import folder
from ddlf.monitor.runs.logs import Line, Reader

LOOK_S = 0.3
"""How often it is looked for more."""


def show(options: argparse.Namespace) -> int:
    """Print the lines of all workers, or of one, and those that come until the run is over."""
    path = folder.find(runs_of(options), options.run)
    reader = Reader(path, options.worker)
    lines: Iterable[Line] = reader.new()
    printed = _print(lines if options.last is None else deque(lines, options.last))
    while options.follow:
        is_over = folder.read_state(path).state != "running"  # asked first: what came before that is read below
        printed += _print(reader.new())
        if is_over:
            break
        time.sleep(LOOK_S)
    if not printed:
        whose = f"those of {', '.join(reader.writers)}" if reader.writers else f"see {path / folder.LOGS}"
        print(f"nothing was written by {options.worker or 'workers'} in {path.name}: {whose}", file=sys.stderr)
    return 0


def _print(lines: Iterable[Line]) -> int:
    count, colours = 0, sys.stdout.isatty()
    for when, who, text in lines:
        print(f"{when[11:19]} [{who}] {harmless(text, colours=colours)}")
        count += 1
    sys.stdout.flush()
    return count
