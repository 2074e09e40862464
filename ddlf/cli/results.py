"""Fit the lines of a result to the terminal, for commands such as ``ddlf plan``. Runs on the master."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from ddlf.events.record import fitted

LEAST_COLUMNS = 40
COMMANDS = ("run ", "longer ")
"""Beginnings of lines with a command."""


def columns() -> int | None:
    """Return the columns of the terminal; None if standard output is none."""
    return max(shutil.get_terminal_size().columns, LEAST_COLUMNS) if sys.stdout.isatty() else None


def on_terminal(text: Sequence[str]) -> str:
    """Return lines for standard output: wrapped on a terminal, except commands, which users copy."""
    return "\n".join(line if line.startswith(COMMANDS) else fitted(line) for line in text)
