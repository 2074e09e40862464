"""How much an asynchronous update counts when the weights moved on meanwhile. Runs on the master.

``tau``, the staleness, is the number of merges applied between reading the weights and applying the update made from
them: 0 when nobody else came in between. Each value here maps ``tau`` to a factor in (0, 1] that scales **one** update;
it must never be multiplied into a lasting rate, which would then decay to zero over the rounds.
"""

import sys
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from ddlf.algorithms.named import Family, Named
from ddlf.errors import ConfigError

LEAST = sys.float_info.min
"""No factor is smaller: others divide by it."""


class Staleness(Protocol):
    """Base of all staleness rules."""

    def __call__(self, tau: int) -> float:
        """Return the factor on an update.

        Args:
            tau: Staleness, in applied merges, 0 or more.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Named):
    """Count every update in full: ``s(tau) = 1``.

    Source:
        Phan, Do 2023, Algorithm 3; FedAsync's "constant" (arXiv:1903.03934).
    """

    def __call__(self, tau: int) -> float:
        _check(tau)
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inverse(Named):
    """Divide by the staleness: ``s(tau) = 1 / max(1, tau)``.

    Where a fixed rate diverges because many slots step from the same old weights, this learns.

    Source:
        Zhang et al. 2016, staleness-aware async-SGD, arXiv:1511.05950.
    """

    def __call__(self, tau: int) -> float:
        _check(tau)
        return 1.0 / max(1, tau)


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial(Named):
    """Shrink with a power of the staleness: ``s(tau) = (1 + tau) ** -a``.

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
        a: How fast the factor falls behind ``b``, > 0.
        b: Largest staleness, in applied merges, that counts in full, >= 0.

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
            raise ConfigError(f"b must be 0 merges or more, got {self.b}")

    def __call__(self, tau: int) -> float:
        _check(tau)
        return 1.0 if tau <= self.b else max(1.0 / (self.a * (tau - self.b) + 1.0), LEAST)


def _check(tau: int) -> None:
    """A negative staleness means that versions were confused, which must not turn into a factor above 1."""
    if tau < 0:
        raise ConfigError(f"staleness must be 0 applied merges or more, got {tau}")


STALENESS: Family[Staleness] = Family(
    "staleness", constant=Constant, inverse=Inverse, polynomial=Polynomial, hinge=Hinge
)
"""Every rule of staleness by name."""
