"""Options of the calls that one view of a cluster makes. Pure; used on the master."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from ddlf.errors import ConfigError

OnError = Literal["raise", "return"]
MAX_PER_WORKER = 1000
"""Largest number of concurrent calls on one worker. Each call may need a thread there."""


@dataclass(frozen=True)
class Behaviour:
    """The options that ``Group.options`` can change, except the choice of workers.

    Args:
        on_error: Whether a failed call raises its error, or returns it instead of a result.
        timeout_s: Seconds for each request; None waits indefinitely.
        idempotent: Whether requests may run more than once.
        per_worker: How many calls of ``map``, ``starmap`` and ``submit`` may run on one worker at the same time.
    """

    on_error: OnError = "raise"
    timeout_s: float | None = None
    idempotent: bool = False
    per_worker: int = 1

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "return"):
            raise ConfigError(f"on_error must be 'raise' or 'return', got {self.on_error!r}")
        timeout_s, per_worker = self.timeout_s, self.per_worker
        if timeout_s is not None and (not is_number(timeout_s) or not 0 <= timeout_s < math.inf):
            raise ConfigError(f"timeout_s must be a number of seconds of 0 or more, got {timeout_s!r}")
        if type(per_worker) is not int or not 1 <= per_worker <= MAX_PER_WORKER:
            raise ConfigError(f"per_worker must be 1-{MAX_PER_WORKER}, got {per_worker!r}")

    def but(self, **given: Any) -> Behaviour:
        """Return a copy with the given values. None keeps a value."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float. A bool is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
