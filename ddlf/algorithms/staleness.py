"""Rules for the weight of stale updates in asynchronous training. Runs on the master.

``tau``, the staleness of an update, is the number of merges between the reading of its starting weights and its own
merge: 0 if no other update was merged in between. Each rule maps ``tau`` to a factor in (0, 1] for **one** update.
Never multiply a lasting rate by this factor, because the rate would decay to zero over the rounds.
"""

import sys
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from ddlf.algorithms.rule_text import Family, Named
from ddlf.errors import ConfigError

LEAST = sys.float_info.min
"""No factor is smaller: others divide by it."""


class Staleness(Protocol):
    """Base of all staleness rules: each says how much a stale update counts."""

    def __call__(self, tau: int) -> float:
        """Return the factor to multiply an update by.

        Args:
            tau: Staleness, in applied merges, 0 or more.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Named):
    """Count every update in full, however stale it is: ``s(tau) = 1``.

    Source:
        Phan, Do 2023, Algorithm 3; FedAsync's "constant" (arXiv:1903.03934).
    """

    def __call__(self, tau: int) -> float:
        _check(tau)
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inverse(Named):
    """Divide each update by its staleness: ``s(tau) = 1 / max(1, tau)``.

    This rule can learn where a fixed rate diverges because many slots step from the same old weights.

    Source:
        Zhang et al. 2016, staleness-aware async-SGD, arXiv:1511.05950.
    """

    def __call__(self, tau: int) -> float:
        _check(tau)
        return 1.0 / max(1, tau)


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial(Named):
    """Shrink each update with a power of its staleness: ``s(tau) = (1 + tau) ** -a``.

    Args:
        a: Exponent, >= 0; 0 counts every update in full.

    Raises:
        ConfigError: ``a`` is out of range.

    Source:
        FedAsync, arXiv:1903.03934; FedBuff, arXiv:2106.06639.
    """

    a: float = 0.5

    def __post_init__(self) -> None:
        if not (isfinite(self.a) and self.a >= 0):
            raise ConfigError(f"a must be finite and >= 0, got {self.a}")

    def __call__(self, tau: int) -> float:
        _check(tau)
        return max(float((1.0 + tau) ** -self.a), LEAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hinge(Named):
    """Count fresh updates in full: ``s(tau) = 1`` up to ``b``, then ``1 / (a * (tau - b) + 1)``.

    Args:
        a: Speed of the factor's fall above ``b``, > 0.
        b: Largest staleness, in applied merges, with the factor 1, >= 0.

    Raises:
        ConfigError: A value is out of range.

    Source:
        FedAsync, arXiv:1903.03934.
    """

    a: float = 10.0
    b: int = 4

    def __post_init__(self) -> None:
        if not (isfinite(self.a) and self.a > 0):
            raise ConfigError(f"a must be finite and > 0, got {self.a}")
        if self.b < 0:
            raise ConfigError(f"b must be at least 0 merges, got {self.b}")

    def __call__(self, tau: int) -> float:
        _check(tau)
        return 1.0 if tau <= self.b else max(1.0 / (self.a * (tau - self.b) + 1.0), LEAST)


def _check(tau: int) -> None:
    """Raise an error for a negative staleness, which would give a factor above 1.

    It means that versions of the weights were confused.
    """
    if tau < 0:
        raise ConfigError(f"staleness must be at least 0 merges, got {tau}")


STALENESS: Family[Staleness] = Family(
    "staleness", constant=Constant, inverse=Inverse, polynomial=Polynomial, hinge=Hinge
)
"""Every rule of staleness by name."""
