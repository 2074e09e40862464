"""The command line of a trial, read from its defaults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def read_options(doc: str | None, argv: Sequence[str] | None = None, **defaults: Any) -> argparse.Namespace:
    """Read ``--name value`` for each default, which gives the type, too.

    Args:
        doc: The help.
        argv: In place of the command line.
        defaults: False is a flag. A tuple has the choices, the first is the default. A list takes several values, if they are texts some of
            these. A function reads the value of an option without default.
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
