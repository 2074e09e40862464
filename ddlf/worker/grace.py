"""The time between SIGTERM and SIGKILL, in which a process hands its work over. Runs on both sides."""

from __future__ import annotations

import math
import os

from ddlf.errors import ConfigError

GRACE_VARIABLE = "DDLF_GRACE"
GRACE_S = 10.0
SAME_SIGNAL_S = 0.5
"""Schedulers send SIGTERM to several processes and several times. Within this time it counts once."""


def hand_over_s() -> float:
    """Return the part of the grace in which work is handed over. The rest is for the end itself.

    Raises:
        ConfigError: ``DDLF_GRACE`` is not a number of seconds.
    """
    return 0.8 * grace_s()


def grace_s() -> float:
    """Return the seconds between SIGTERM and SIGKILL on this machine: ``$DDLF_GRACE``, else 10.

    Raises:
        ConfigError: The variable is not a number of seconds.
    """
    text = os.environ.get(GRACE_VARIABLE, "") or GRACE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"DDLF_GRACE must be a number of seconds, got {text!r}", hint="unset it, or set it to 30")
    return seconds
