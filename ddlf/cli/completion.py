"""``ddlf completion``: the script that teaches a shell to complete commands and options.

The scripts are files of this package, made from the parsers by shtab: ``python docs/reference`` writes them anew. So nothing is needed to print them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SHELLS = ("bash", "zsh", "fish")
FOLDER = Path(__file__).parent / "completions"


def completion(options: argparse.Namespace) -> int:
    """Print the script for a shell."""
    sys.stdout.write((FOLDER / f"ddlf.{options.shell}").read_text(encoding="utf-8"))
    return 0
