"""Build the command line of a trial from its default options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def read_options(doc: str | None, argv: Sequence[str] | None = None, **defaults: Any) -> argparse.Namespace:
    """Read an option ``--name value`` for each default. The default decides its type.

    Args:
        doc: The help text.
        argv: Arguments to read; None reads the command line.
        defaults: False makes a flag. A tuple contains the choices, and its first item is the default. A list makes an
            option with several values; if its items are texts, they are the choices. A function makes an option
            without default, and converts its value.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        how: dict[str, Any]
        match default:
            case False:
                how = {"action": "store_true"}
            case tuple():
                how = {"choices": default, "default": default[0]}
            case list():
                choices = default if isinstance(default[0], str) else None
                how = {"nargs": "+", "default": default, "type": type(default[0]), "choices": choices}
            case _ if callable(default):
                how = {"type": default}
            case _:
                how = {"type": type(default), "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    return parser.parse_args(argv)
