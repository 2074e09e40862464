"""Reads the values of options of ``ddlf plan`` that have units: types for argparse."""

from __future__ import annotations

import argparse
import contextlib
import math
import re

from ddlf.errors import ConfigError
from ddlf.settings.checks import count_of_bytes


def seconds(text: str) -> float:
    """Read a duration: ``90``, ``90s``, ``2m`` or ``1h``.

    Raises:
        ArgumentTypeError: It is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text.strip())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a duration such as 30s or 2m, got {text!r}")
    return float(match[1]) * {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600}[match[2]]


def duration(value: float) -> str:
    """Return a duration with its largest whole unit, as one types it: ``2h``, ``90m``, ``45s``."""
    count, unit = next(
        ((value / factor, unit) for factor, unit in ((3600, "h"), (60, "m")) if not value % factor), (value, "s")
    )
    return f"{count:.9g}{unit}"


BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
BYTES = {"kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9}


def bandwidth(text: str) -> float:
    """Read a bandwidth, ``100mbit``, ``1gbit`` or ``12MB/s``, and return bytes per second.

    Raises:
        ArgumentTypeError: It is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z/]+)", text.strip().lower())
    unit = match[2] if match is not None else ""
    per_second = BITS.get(unit.removesuffix("/s"), 0.0) / 8 or BYTES.get(unit, 0.0)
    if match is None or not per_second or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a bandwidth such as 100mbit, 1gbit or 12MB/s, got {text!r}")
    return float(match[1]) * per_second


def latency(text: str) -> float:
    """Read a latency, ``5ms``, ``200us`` or ``1s``, and return seconds.

    Raises:
        ArgumentTypeError: It is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a latency such as 5ms or 200us, got {text!r}")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def memory(text: str) -> int:
    """Read a number of bytes: ``4GB``, ``512MiB``.

    Raises:
        ArgumentTypeError: It is none.
    """
    count = None
    with contextlib.suppress(ConfigError):
        count = count_of_bytes("--max-memory", text)
    if count is None or text.strip()[-1:].isdigit():  # 4 bytes are a mistake
        raise argparse.ArgumentTypeError(f"must be a size such as 512MiB or 4GB, got {text!r}")
    return count


def budget_of(value: object) -> float:
    """Return the seconds of a budget: a number, or a text such as ``"30s"``.

    Raises:
        ConfigError: It is neither, or not above 0.
    """
    budget_s = math.nan
    with contextlib.suppress(argparse.ArgumentTypeError):
        budget_s = seconds(value) if isinstance(value, str) else budget_s
    if isinstance(value, int | float) and not isinstance(value, bool):
        budget_s = float(value)
    if not 0 < budget_s < math.inf:
        raise ConfigError(
            f"the time of a plan must be seconds above 0, or a text such as '30s' or '2m', got {value!r}",
            hint="as in: await app.plan(120)",
        )
    return budget_s
