"""What is a script's own on its command line: options that its author has written, and what ``-p`` sets. Runs on the master."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from typing import Any

from ddlf.training.settings.settings import SETTINGS

PLAIN = (bool, int, float, str)
"""Types of values that can be given as text."""


def settable(target: Any) -> str:
    """What ``-p`` can set, with the values that are there without, for the end of a help; nothing if there is nothing.

    Args:
        target: A subclass of ``IApp``, or a function that takes a cluster.
    """
    found = _attributes(target) if isinstance(target, type) else _parameters(target)
    rows = [f"  -p {name}={value}" for name, value in found.items()]
    what = "attributes of this app" if isinstance(target, type) else f"parameters of {target.__name__}"
    return "\n".join([f"{what}, with the values that they have:", *rows]) if rows else ""


def given_to(target: Any, options: argparse.Namespace, own: Sequence[argparse.ArgumentParser]) -> argparse.Namespace:
    """Have options of the author's own set what ``-p`` would.

    Args:
        target: As of ``settable``.
        options: Parsed.
        own: The author's.
    """
    for name in [action.dest for parser in own for action in parser._actions]:
        if (value := getattr(options, name)) is not None:
            options.parameters.append(f"{name}={value}")
    return options


def _attributes(target: type) -> dict[str, Any]:
    classes = [cls for cls in reversed(target.__mro__) if not cls.__module__.startswith("ddlf.") and cls is not object]
    found = {name: value for cls in classes for name, value in vars(cls).items()}
    return {
        name: getattr(target, name)
        for name, value in found.items()
        if not name.startswith("_") and name not in SETTINGS and isinstance(value, PLAIN)
    }


def _parameters(target: Any) -> dict[str, Any]:
    found = list(inspect.signature(target).parameters.values())[1:]
    return {one.name: one.default for one in found if isinstance(one.default, PLAIN)}
