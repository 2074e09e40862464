"""Each setting of a run looked at by itself, and with the mode that it is for, before anything is started. Runs on the master.

A setting that has no effect is refused, too: nobody trains a day with a median that was never taken.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from ddlf.algorithms.check import POLICIES
from ddlf.algorithms.codec import CODEC, Outward
from ddlf.algorithms.merge import MERGE
from ddlf.algorithms.outer import OUTER, OuterOptimizer
from ddlf.errors import ConfigError
from ddlf.roles.precision import PRECISIONS

MODES = ("sync", "async")
CHOICES = {
    "mode": MODES,
    "precision": PRECISIONS,
    "optimizer_state": ("kept", "fresh"),
    "balance": ("equal", "speed"),
    "update_policy": POLICIES,
}
COUNTS = {"checkpoint_every": 1, "checkpoint_keep": 1, "evaluate_every": 0}
"""Whole numbers, and the least that each may be."""
SYNC_ONLY = {"merge": "mean", "balance": "equal"}
"""Settings that asynchronous training has no use for, and what they are by default."""
MAX_SEED = 2**32 - 1


def check_values(app: Any, mode: str) -> None:
    """Refuse a value that a setting cannot have, and a setting that the mode would not use.

    Raises:
        ConfigError: Names the setting, the value, and what it may be.
    """
    for name, choices in CHOICES.items():
        choose(name, getattr(app, name), choices)
    for name, low in COUNTS.items():
        whole(name, getattr(app, name), low)
    if app.slots is not None:
        whole("slots", app.slots, 1, or_else=", or None for as many as workers")
    for name in ("verbose", "takeover"):
        if not isinstance(getattr(app, name), bool | int):
            raise ConfigError(f"{name} must be True or False, got {getattr(app, name)!r}")
    for name in ("merge", "codec", "weights_codec"):
        if not isinstance(getattr(app, name), str):
            raise ConfigError(f"{name} must be a name, got {getattr(app, name)!r}")
    for name in ("checkpoint", "resume"):
        if not isinstance(getattr(app, name), str | Path | None):
            raise ConfigError(f"{name} must be a folder or None, got {getattr(app, name)!r}")
    wait = app.wait_for_workers_s
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not isfinite(wait) or wait < 0:
        raise ConfigError(f"wait_for_workers_s must be a number of seconds, 0 or more, got {wait!r}")
    check_callbacks(app)
    MERGE.read(app.merge)
    CODEC.read(app.codec)
    Outward.read(app.weights_codec)
    outer_of(app)
    if mode == "async":
        for name, default in SYNC_ONLY.items():
            if getattr(app, name) != default:
                raise ConfigError(
                    f"{name}={getattr(app, name)!r} is for synchronous training: asynchronous training applies each update when it comes",
                    hint=f"leave {name} at {default!r}, or train in mode 'sync'",
                )


def check_callbacks(app: Any) -> None:
    """Refuse callbacks that are no list.

    Raises:
        ConfigError: Says what was found.
    """
    if not isinstance(app.callbacks, list | tuple):
        raise ConfigError(
            f"callbacks must be a list of Keras callbacks, got {app.callbacks!r}", hint="leave it out for none"
        )


def outer_of(app: Any) -> OuterOptimizer:
    """The outer optimizer that an app names or has.

    Raises:
        ConfigError: It is none.
    """
    given = app.outer
    if given is None or isinstance(given, str):
        return OUTER.read("subtract" if given is None else given)
    if isinstance(given, type) and hasattr(given, "update"):
        raise ConfigError(f"outer must be an object, got the class {given.__name__}", hint=f"write {given.__name__}()")
    if not (callable(getattr(given, "init", None)) and callable(getattr(given, "update", None))):
        raise ConfigError(
            f"outer must be an outer optimizer or the name of one, got {given!r}",
            hint="for example ddlf.algorithms.outer.Nesterov(), or 'nesterov'",
        )
    found: OuterOptimizer = given
    return found


def choose(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse what is none of the choices.

    Raises:
        ConfigError: Names the one that may be meant.
    """
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(str(value).lower(), choices, 1)
        which = (
            " or ".join(map(repr, choices)) if len(choices) == 2 else "one of " + ", ".join(choices)
        )  # two are read best as a sentence
        raise ConfigError(f"{name} must be {which}, got {value!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def whole(name: str, value: Any, low: int, high: float = float("inf"), or_else: str = "") -> int:
    """The value as an int, NumPy's whole numbers among them.

    Raises:
        ConfigError: It is no whole number, or out of range.
    """
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        limits = f"of {low} or more" if high == float("inf") else f"from {low} to {high}"
        raise ConfigError(f"{name} must be a whole number {limits}{or_else}, got {value!r}")
    return number
