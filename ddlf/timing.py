"""How long silence may last before it means something. Runs everywhere; imports nothing but the errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddlf.errors import ConfigError

DEAD_AFTER_S = 4.0
"""Long enough for a Wi-Fi that changes its access point, short enough that nobody watches a hung run."""
HEARTBEATS_TO_DEATH = 8
MIN_HEARTBEATS = 3
"""One heartbeat may be late and one lost without a verdict."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When a peer is asked, suspected, and given up; seconds.

    Args:
        heartbeat_s: Between two signs of life.
        suspect_after_s: Silence after which a peer is suspected.
        dead_after_s: Silence after which it is given up; at least 3 x ``heartbeat_s``.

    Raises:
        ConfigError: They contradict each other; the text has the figures.
    """

    heartbeat_s: float = DEAD_AFTER_S / HEARTBEATS_TO_DEATH
    suspect_after_s: float = DEAD_AFTER_S / 2
    dead_after_s: float = DEAD_AFTER_S

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "suspect_after_s", "dead_after_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a finite number of seconds > 0, got {value!r}")
        if self.dead_after_s < MIN_HEARTBEATS * self.heartbeat_s:
            raise ConfigError(
                f"dead_after_s ({self.dead_after_s:g} s) must be at least {MIN_HEARTBEATS} x heartbeat_s ({self.heartbeat_s:g} s)"
            )
        if not self.heartbeat_s < self.suspect_after_s < self.dead_after_s:
            raise ConfigError(
                f"suspect_after_s ({self.suspect_after_s:g} s) must be between heartbeat_s ({self.heartbeat_s:g} s) "
                f"and dead_after_s ({self.dead_after_s:g} s)"
            )

    @classmethod
    def of(
        cls,
        heartbeat_s: float | None = None,
        suspect_after_s: float | None = None,
        dead_after_s: float | None = None,
    ) -> Timing:
        """What is given, and the rest in proportion to ``dead_after_s``: an eighth and a half of it."""
        dead = DEAD_AFTER_S if dead_after_s is None else dead_after_s
        known = isinstance(dead, int | float)
        return cls(
            heartbeat_s=(dead / HEARTBEATS_TO_DEATH if known else 1.0) if heartbeat_s is None else heartbeat_s,
            suspect_after_s=(dead / 2 if known else 2.0) if suspect_after_s is None else suspect_after_s,
            dead_after_s=dead,
        )
