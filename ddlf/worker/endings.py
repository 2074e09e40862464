"""Describes how a process ended, for people. Runs in the daemon."""

from __future__ import annotations

from typing import NamedTuple

from ddlf.worker.process import UNKNOWN


class Reason(NamedTuple):
    """Why a process ended, for people.

    Args:
        text: The event that ended it.
        hint: Advice.
        gave_up: Whether its daemon ended it after a ``cancel``.
    """

    text: str
    hint: str = ""
    gave_up: bool = False


def reason_of(code: int | None, name: str | None) -> Reason:
    """Return the reason that an exit code, or the name of a signal, shows by itself."""
    if code == UNKNOWN:
        return Reason("has ended, and so has the process that could say how")
    if name == "SIGKILL":
        return Reason(
            f"was ended by {name}",
            "somebody killed it, or the machine ran out of memory: see dmesg, use smaller batches or fewer workers",
        )
    if name:
        return Reason(f"was ended by {name}", "the fault is in native code that the method called")
    return Reason(f"ended with exit code {code}")
